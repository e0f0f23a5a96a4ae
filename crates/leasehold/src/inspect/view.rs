//! The JSON of a lock, shared by the command, the API and Python.

use serde::{Deserialize, Serialize};

use crate::clock::wall_ms;
use crate::facts::{LockName, Token};
use crate::store::{EvictMode, Holder, Waiter};

/// The holder and the waiters of one lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockInfo {
    /// The lock.
    pub name: LockName,
    /// The holder; `None` when the lock is free.
    pub holder: Option<Holder>,
    /// The waiters, in the order of the queue.
    pub waiters: Vec<Waiter>,
}

/// The JSON of a [`LockInfo`]. Unknown values are `null`, times are wall-clock milliseconds, and it contains no secret.
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
    /// Whether it is held.
    pub held: bool,
    /// The owner, for people; for a foreign holder the value at the key.
    pub owner: Option<String>,
    /// The holder's public id.
    pub holder_id: Option<String>,
    /// The fence of this grant.
    pub fence: Option<u64>,
    /// When it was granted.
    pub since_ms: Option<u64>,
    /// For how long it has been held.
    pub held_ms: Option<u64>,
    /// The ttl that was requested.
    pub ttl_ms: Option<u64>,
    /// The time left of the lease; `null` also for a foreign key without an expiry.
    pub ttl_left_ms: Option<u64>,
    /// When the lease was granted or last renewed.
    pub last_seen_ms: Option<u64>,
    /// Whether the holder's process is connected; `null` for a lease that belongs to no process.
    pub connected: Option<bool>,
    /// Whether the lease was revoked: the holder was notified and cannot renew.
    pub revoked: bool,
    /// Whether another kind of client holds it.
    pub foreign: bool,
    /// The waiters, in the order of the queue.
    pub waiters: Vec<WaiterView>,
}

/// The JSON of a [`Waiter`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WaiterView {
    /// The owner.
    pub owner: String,
    /// Its queue position: lower is earlier.
    pub ticket: u64,
    /// For how long it has been waiting.
    pub waiting_ms: u64,
}

/// The JSON of a lease that was acquired for a client: the lock and its token. No other response contains a token.
#[derive(Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AcquiredView {
    /// The lock.
    #[serde(flatten)]
    pub lock: LockView,
    /// The secret that alone renews and releases it.
    pub token: String,
}

impl AcquiredView {
    /// Creates the response for the client that requested the lease.
    pub fn new(lock: LockView, token: &Token) -> Self {
        Self { lock, token: token.reveal().to_owned() }
    }
}

impl std::fmt::Debug for AcquiredView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AcquiredView").field("lock", &self.lock).finish_non_exhaustive()
    }
}

/// The JSON of a release by token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReleasedView {
    /// The lock.
    pub name: String,
    /// Whether this request released it.
    pub released: bool,
}

/// The JSON of an eviction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EvictedView {
    /// The lock.
    pub name: String,
    /// The outcome.
    pub outcome: EvictOutcome,
    /// Whether this eviction freed the lock: not if it was revoked, because a revoked holder releases it itself, and not if it
    /// was already free.
    pub released: bool,
    /// The evicted holder; `null` when the lock was free.
    pub holder_id: Option<String>,
    /// The holder's owner, for people.
    pub owner: Option<String>,
    /// The holder's fence.
    pub fence: Option<u64>,
    /// When the lock was granted to the holder.
    pub since_ms: Option<u64>,
    /// When its lease was granted or last renewed.
    pub last_seen_ms: Option<u64>,
}

/// The outcome of an eviction that did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum EvictOutcome {
    /// The holder was notified and cannot renew.
    Revoked,
    /// The lock was freed at once.
    Forced,
    /// The lock was not held.
    Free,
}

impl EvictedView {
    /// Describes the eviction of a holder.
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

    /// Describes an eviction of a lock that was not held.
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
    /// Returns its JSON, with durations up to now.
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

/// Returns when the lease was last renewed: a renewal restores the full ttl, so the missing part is the time since then. Two
/// clocks are compared here, so the result is limited to the time between the grant and now.
fn last_seen_ms(holder: &Holder, now_ms: u64) -> Option<u64> {
    let ago = holder.ttl?.saturating_sub(holder.ttl_left?);
    let renewed = now_ms.saturating_sub(u64::try_from(ago.as_millis()).unwrap_or(u64::MAX));
    Some(renewed.max(holder.since_ms).min(now_ms))
}

/// One member of a pool and its holder; see [`Pool::status`](crate::pool::Pool::status).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolMember {
    /// Its index in the pool.
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
    fn last_seen_is_the_last_renewal() {
        let view = info(1_000_000, 300, 297).view_at(1_520_000);
        assert_eq!((view.held_ms, view.last_seen_ms), (Some(520_000), Some(1_517_000)));
        assert_eq!((view.ttl_ms, view.ttl_left_ms), (Some(300_000), Some(297_000)));
    }

    #[test]
    fn last_seen_is_neither_before_the_grant_nor_in_the_future() {
        // A provisional grant has less left than it will have once it is confirmed.
        assert_eq!(info(1_000_000, 300, 2).view_at(1_000_500).last_seen_ms, Some(1_000_000));
        // Extended beyond its recorded ttl, or measured by another clock.
        assert_eq!(info(1_000_000, 10, 300).view_at(1_500_000).last_seen_ms, Some(1_500_000));
        assert_eq!(info(2_000_000, 30, 30).view_at(1_000_000).last_seen_ms, Some(1_000_000));
        assert_eq!(info(2_000_000, 30, 30).view_at(1_000_000).held_ms, Some(0));
    }

    #[test]
    fn unknown_values_are_null() {
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
