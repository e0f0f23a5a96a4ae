//! Holders and waiters as a store reports them, and the results of evictions. Public as part of
//! [`inspect`](crate::inspect).

use std::time::Duration;

use super::Ticket;
use crate::facts::{Fence, HolderId, LockName, Owner};

/// What the store knows of a holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// The public id of the holder.
    pub id: HolderId,
    /// The owner; for a foreign holder the value that it wrote, shortened.
    pub owner: Owner,
    /// Its fence, if one is known yet.
    pub fence: Option<Fence>,
    /// When the lease was granted, in wall-clock milliseconds; 0 if unknown (foreign).
    pub since_ms: u64,
    /// The requested ttl; `None` if unknown (foreign).
    pub ttl: Option<Duration>,
    /// How long the lease lasts without another renewal; `None` for a key without expiry.
    pub ttl_left: Option<Duration>,
    /// Whether the lease was revoked: its renewals are refused.
    pub revoked: bool,
    /// Whether another kind of client wrote the value. Such a client sends no message when it releases.
    pub foreign: bool,
    /// Whether the holder receives messages.
    pub listens: bool,
    /// Whether the holder's process is connected, as far as the store can tell. `None` if it was not checked, is
    /// unknown, or the lease belongs to no process.
    pub connected: Option<bool>,
}

impl Holder {
    /// Returns the holder for a value that another kind of client wrote; nothing else is known about it.
    pub(crate) fn foreign(value: &[u8], ttl_left: Option<Duration>) -> Self {
        let text = String::from_utf8_lossy(value);
        // A random value is that client's secret: it is enough to release the lock.
        let shown = match newer_version(&text) {
            Some(version) => format!("a newer leasehold (lh{version})"),
            None if looks_random(&text) => "another client".to_owned(),
            None => text.chars().filter(|c| !c.is_control()).take(64).collect(),
        };
        Self {
            id: HolderId::of(value),
            owner: Owner::from_wire(&shown),
            fence: None,
            since_ms: 0,
            ttl: None,
            ttl_left,
            revoked: false,
            foreign: true,
            listens: false,
            connected: None,
        }
    }
}

/// Returns the version of a value whose format this version does not know.
fn newer_version(text: &str) -> Option<u32> {
    let (version, _) = text.strip_prefix("lh")?.split_once(' ')?;
    version.parse().ok().filter(|version| *version > 1)
}

/// Returns whether a text looks like a UUID, hex digits or base64, which clients write to recognize their own lock.
fn looks_random(text: &str) -> bool {
    let has = |kind: fn(&char) -> bool| text.chars().any(|c| kind(&c));
    let hex = text.chars().all(|c| c.is_ascii_hexdigit() || c == '-') && has(char::is_ascii_digit);
    let base64 = text.chars().all(|c| c.is_ascii_alphanumeric() || "+/=_-".contains(c))
        && has(char::is_ascii_uppercase)
        && has(char::is_ascii_lowercase)
        && has(char::is_ascii_digit);
    text.len() >= 16 && (hex || base64)
}

/// How to take a lock away from its holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EvictMode {
    /// Refuse the holder's renewals and notify it. The lock passes on when the holder releases it or its lease ends.
    /// Never leads to two holders.
    Revoke,
    /// Free the lock at once. A holder that is still at work does not know it yet: only fences protect what it writes.
    Force,
}

/// The answer to an eviction. It carries the record of the holder that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Evicted {
    /// The named holder was evicted.
    Done(Holder),
    /// Another holder has the lock by now. Nothing was done.
    ChangedHands(Holder),
    /// The lock is free already.
    Free,
    /// A foreign holder cannot be revoked, only forced.
    Foreign(Holder),
}

/// The result of a request to finish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishRequest {
    /// The holder's process received the request.
    Delivered(Holder),
    /// The holder cannot receive it: it is foreign, gone, or does not listen.
    Undeliverable(Holder),
    /// Another holder has the lock by now.
    ChangedHands(Holder),
    /// The lock is free already.
    Free,
}

/// A page of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// Locks found, in no promised order, each at most once per page.
    pub locks: Vec<(LockName, Holder)>,
    /// The cursor of the next page; `None` after the last page.
    pub next: Option<Cursor>,
}

/// A position in a list, returned with the page before it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Cursor(pub(crate) String);

impl Cursor {
    /// Returns the cursor as text, for a URL.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Reads a cursor from its text. A text that came from no page is rejected when the cursor is used.
    pub fn from_text(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

/// A waiter in the queue of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiter {
    /// Its position in the order of asking.
    pub ticket: Ticket,
    /// The owner of the waiting process.
    pub owner: Owner,
    /// When it began to wait, in wall-clock milliseconds.
    pub since_ms: u64,
    /// Whether it is notified when the lock is granted to it; otherwise it polls.
    pub listens: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_foreign_clients_secret_is_not_shown() {
        let shown = |value: &str| Holder::foreign(value.as_bytes(), None).owner.to_string();
        for secret in
            ["9f1c2ab04d3e4f60a1b2c3d4e5f60718", "550e8400-e29b-41d4-a716-446655440000", "kJ8s+2nQ0vZx/7Tq1LmB3w=="]
        {
            assert_eq!(shown(secret), "another client");
        }
        for name in ["locked_by_tts_task", "celery@gpu-a", "worker-3", "task 9f1c2ab04d3e4f60a1b2c3d4"] {
            assert_eq!(shown(name), name);
        }
        assert_eq!(shown("lh2 0 kJ8s2nQ0vZx7Tq1LmB3w"), "a newer leasehold (lh2)");
    }
}
