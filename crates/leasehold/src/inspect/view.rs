//! A lock as programs read it: one vocabulary for the command, the API and Python.

use serde::{Deserialize, Serialize};

use crate::clock::wall_ms;
use crate::facts::{LockName, Token};
use crate::store::{EvictMode, Holder, Waiter};

/// What a store knows of one lock: the answer to "why can I not have it?".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockInfo {
    /// The lock.
    pub name: LockName,
    /// Who holds it; `None` when it is free.
    pub holder: Option<Holder>,
    /// Who waits, in order.
    pub waiters: Vec<Waiter>,
}

/// A [`LockInfo`] for JSON. What is not known is `null`; moments are wall-clock milliseconds, and
/// it carries no secret.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// let locks = leasehold::LockManager::connect("memory:").await?;
/// let free = locks.info("order:42").await?.view();
/// assert!(!free.held && free.owner.is_none());
/// let guard = locks.lock("order:42").owner("checkout").await?;
/// let held = locks.info("order:42").await?.view();
/// assert_eq!(held.holder_id, Some(guard.holder_id().to_string()));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LockView {
    /// The lock.
    pub name: String,
    /// Whether anybody holds it.
    pub held: bool,
    /// Who, for people; what a foreign holder wrote.
    pub owner: Option<String>,
    /// Names the holder without its secret.
    pub holder_id: Option<String>,
    /// The fence of this tenure.
    pub fence: Option<u64>,
    /// Since when it is held.
    pub since_ms: Option<u64>,
    /// For how long it has been held.
    pub held_ms: Option<u64>,
    /// The lease that was asked for.
    pub ttl_ms: Option<u64>,
    /// What is left of it if nobody renews it; `null` also for a foreign key without an end.
    pub ttl_left_ms: Option<u64>,
    /// The last sign of life: when the lease was taken or last renewed.
    pub last_seen_ms: Option<u64>,
    /// Whether the holder's process can be reached; `null` for a lease that belongs to no process.
    pub connected: Option<bool>,
    /// Told to give the lock up.
    pub revoked: bool,
    /// Held by another kind of client.
    pub foreign: bool,
    /// Who waits, in order.
    pub waiters: Vec<WaiterView>,
}

/// A [`Waiter`] for JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WaiterView {
    /// Who.
    pub owner: String,
    /// Its place: lower is earlier.
    pub ticket: u64,
    /// For how long it has been waiting.
    pub waiting_ms: u64,
}

/// A lease that was taken for somebody else: the lock, and the one answer that carries a token.
#[derive(Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AcquiredView {
    /// The lock as its holder may know it.
    #[serde(flatten)]
    pub lock: LockView,
    /// The secret that alone can renew and release it.
    pub token: String,
}

impl AcquiredView {
    /// For whoever asked for the lease.
    pub fn new(lock: LockView, token: &Token) -> Self {
        Self { lock, token: token.reveal().to_owned() }
    }
}

impl std::fmt::Debug for AcquiredView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AcquiredView").field("lock", &self.lock).finish_non_exhaustive()
    }
}

/// A lock that was given back by its token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReleasedView {
    /// The lock.
    pub name: String,
    /// Whether it was given back now.
    pub released: bool,
}

/// What an eviction did, and to whom.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EvictedView {
    /// The lock.
    pub name: String,
    /// What was done.
    pub outcome: EvictOutcome,
    /// Whether the lock was freed by this: not by a revocation, which waits for its holder, and not when it
    /// was free already.
    pub released: bool,
    /// The holder it was taken from; `null` when it was free.
    pub holder_id: Option<String>,
    /// The owner of that holder, for people.
    pub owner: Option<String>,
    /// Its fence.
    pub fence: Option<u64>,
    /// Since when it held the lock.
    pub since_ms: Option<u64>,
    /// Its last sign of life.
    pub last_seen_ms: Option<u64>,
}

/// The ends of an eviction that is no error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum EvictOutcome {
    /// The holder is told to stop; its renewals are refused.
    Revoked,
    /// The lock was freed at once.
    Forced,
    /// Nobody held it.
    Free,
}

impl EvictedView {
    /// Taken from a holder.
    pub fn done(name: &LockName, mode: EvictMode, old: Holder) -> Self {
        let outcome = if mode == EvictMode::Force { EvictOutcome::Forced } else { EvictOutcome::Revoked };
        let old = LockInfo { name: name.clone(), holder: Some(old), waiters: Vec::new() }.view();
        Self {
            name: old.name,
            outcome,
            released: outcome == EvictOutcome::Forced,
            holder_id: old.holder_id,
            owner: old.owner,
            fence: old.fence,
            since_ms: old.since_ms,
            last_seen_ms: old.last_seen_ms,
        }
    }

    /// Nobody held it.
    pub fn free(name: &LockName) -> Self {
        Self {
            name: name.to_string(),
            outcome: EvictOutcome::Free,
            released: false,
            holder_id: None,
            owner: None,
            fence: None,
            since_ms: None,
            last_seen_ms: None,
        }
    }
}

impl LockInfo {
    /// As programs read it, now.
    pub fn view(&self) -> LockView {
        self.view_at(wall_ms())
    }

    fn view_at(&self, now_ms: u64) -> LockView {
        let holder = self.holder.as_ref();
        let since_ms = holder.map(|h| h.since_ms).filter(|since| *since > 0);
        let whole_ms = |d: std::time::Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        let waiter = |w: &Waiter| WaiterView {
            owner: w.owner.to_string(),
            ticket: w.ticket.0,
            waiting_ms: now_ms.saturating_sub(w.since_ms),
        };
        LockView {
            name: self.name.to_string(),
            held: holder.is_some(),
            owner: holder.map(|h| h.owner.to_string()),
            holder_id: holder.map(|h| h.id.to_string()),
            fence: holder.and_then(|h| h.fence).map(crate::facts::Fence::get),
            since_ms,
            held_ms: since_ms.map(|since| now_ms.saturating_sub(since)),
            ttl_ms: holder.and_then(|h| h.ttl).map(whole_ms),
            ttl_left_ms: holder.and_then(|h| h.ttl_left).map(whole_ms),
            last_seen_ms: holder.and_then(|h| last_seen_ms(h, now_ms)),
            connected: holder.and_then(|h| h.connected),
            revoked: holder.is_some_and(|h| h.revoked),
            foreign: holder.is_some_and(|h| h.foreign),
            waiters: self.waiters.iter().map(waiter).collect(),
        }
    }
}

/// A renewal restores the recorded ttl, so what is missing of it is the time since the last one.
/// Never before the tenure began, and never in the future: two clocks are compared here.
fn last_seen_ms(holder: &Holder, now_ms: u64) -> Option<u64> {
    let ago = holder.ttl?.saturating_sub(holder.ttl_left?);
    let renewed = now_ms.saturating_sub(u64::try_from(ago.as_millis()).unwrap_or(u64::MAX));
    Some(renewed.max(holder.since_ms).min(now_ms))
}

/// One member of a pool, and who holds it: an answer of [`Pool::status`](crate::pool::Pool::status).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolMember {
    /// Its number in the pool.
    pub index: u32,
    /// Its lock.
    pub lock: LockInfo,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::facts::{Owner, Token};
    use crate::store::Ticket;

    fn info(since_ms: u64, ttl_s: u64, left_s: u64) -> LockInfo {
        let holder = Holder {
            id: Token::random().holder_id(),
            owner: Owner::named("tts").expect("valid"),
            fence: Some(crate::facts::Fence::new(7)),
            since_ms,
            ttl: Some(Duration::from_secs(ttl_s)),
            ttl_left: Some(Duration::from_secs(left_s)),
            revoked: false,
            foreign: false,
            listens: true,
            connected: Some(true),
        };
        LockInfo { name: LockName::new("a").expect("valid"), holder: Some(holder), waiters: Vec::new() }
    }

    #[test]
    fn the_last_sign_of_life_is_the_last_renewal() {
        let view = info(1_000_000, 300, 297).view_at(1_520_000);
        assert_eq!((view.held_ms, view.last_seen_ms), (Some(520_000), Some(1_517_000)));
        assert_eq!((view.ttl_ms, view.ttl_left_ms), (Some(300_000), Some(297_000)));
    }

    #[test]
    fn the_last_sign_of_life_is_neither_before_the_tenure_nor_in_the_future() {
        // A provisional grant has less left than it will have once it is confirmed.
        assert_eq!(info(1_000_000, 300, 2).view_at(1_000_500).last_seen_ms, Some(1_000_000));
        // Prolonged beyond its recorded ttl, or by another clock than ours.
        assert_eq!(info(1_000_000, 10, 300).view_at(1_500_000).last_seen_ms, Some(1_500_000));
        assert_eq!(info(2_000_000, 30, 30).view_at(1_000_000).last_seen_ms, Some(1_000_000));
        assert_eq!(info(2_000_000, 30, 30).view_at(1_000_000).held_ms, Some(0));
    }

    #[test]
    fn what_is_not_known_is_null_and_what_is_free_is_not_held() {
        let mut info = info(1, 1, 1);
        info.holder = Some(Holder::foreign(b"somebody", None));
        let json = serde_json::to_value(info.view_at(5)).expect("JSON");
        for unknown in ["fence", "since_ms", "held_ms", "ttl_ms", "ttl_left_ms", "last_seen_ms", "connected"] {
            assert!(json[unknown].is_null(), "{unknown}");
        }
        assert_eq!((&json["held"], &json["foreign"], &json["owner"]), (&true.into(), &true.into(), &"somebody".into()));
        info.holder = None;
        info.waiters = vec![Waiter { ticket: Ticket(9), owner: Owner::default(), since_ms: 2, listens: true }];
        let json = serde_json::to_value(info.view_at(5)).expect("JSON");
        assert_eq!((&json["held"], &json["owner"]), (&false.into(), &serde_json::Value::Null));
        assert_eq!((&json["waiters"][0]["ticket"], &json["waiters"][0]["waiting_ms"]), (&9.into(), &3.into()));
    }
}
