//! The state of one lock, as a store keeps it.

use crate::facts::{HolderId, Owner, Token};

/// The address of a process that receives messages. `None` where an address is expected: the waiter polls, or the lease
/// belongs to no process.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct InboxId(pub(crate) std::sync::Arc<str>);

/// One lock: its holder and its queue.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Lock {
    pub(crate) slot: Slot,
    /// The waiters in order of their tickets.
    pub(crate) queue: Vec<QueueEntry>,
    /// The queue is deleted at this time unless a waiter asks before.
    pub(crate) queue_ends_ms: u64,
}

/// The holder of a lock.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) enum Slot {
    #[default]
    Free,
    Held(Held),
    /// Written by another kind of client. It is respected and never changed.
    #[cfg_attr(not(any(test, feature = "test-hooks")), expect(dead_code, reason = "only tests write one"))]
    Foreign {
        value: String,
        ends_ms: Option<u64>,
    },
}

/// A lease as the store knows it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Held {
    pub(crate) flag: Flag,
    pub(crate) token: Token,
    /// 0 until it is known.
    pub(crate) fence: u64,
    pub(crate) inbox: Option<InboxId>,
    pub(crate) since_ms: u64,
    pub(crate) ttl_ms: u64,
    pub(crate) owner: Owner,
    /// `None` if another program removed the expiry.
    pub(crate) ends_ms: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Flag {
    Uncontended,
    /// A waiter has queued.
    Contended,
    /// The lease was revoked. It is not prolonged any more.
    Revoked,
}

/// A waiter in a queue.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct QueueEntry {
    pub(crate) ticket: u64,
    pub(crate) token: Token,
    pub(crate) inbox: Option<InboxId>,
    pub(crate) ttl_ms: u64,
    pub(crate) since_ms: u64,
    pub(crate) owner: Owner,
    /// When it last asked. Only the age of a polling waiter matters.
    pub(crate) polled_ms: u64,
}

impl Slot {
    pub(crate) fn holder_id(&self) -> Option<HolderId> {
        match self {
            Self::Free => None,
            Self::Held(held) => Some(held.token.holder_id()),
            Self::Foreign { value, .. } => Some(HolderId::of(value.as_bytes())),
        }
    }

    /// The inbox of the holder.
    pub(crate) fn inbox(&self) -> Option<&InboxId> {
        match self {
            Self::Held(held) => held.inbox.as_ref(),
            Self::Free | Self::Foreign { .. } => None,
        }
    }
}

impl Held {
    /// Restarts the countdown where that is later than its present end.
    pub(super) fn prolong(&mut self, now_ms: u64, ttl_ms: u64) {
        let end = now_ms + ttl_ms;
        self.ends_ms = Some(self.ends_ms.map_or(end, |old| old.max(end)));
    }
}
