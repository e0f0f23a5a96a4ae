//! What an operation receives, and what it answers.

use super::state::{InboxId, QueueEntry};
use crate::facts::{Fence, Owner, Token};

/// A message to a process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Message {
    Granted { token: Token, fence: u64, lasts_ms: u64 },
    LookAgain { token: Token, after_ms: u64 },
    Revoked { token: Token },
    Finish { token: Token, reason: String },
}

/// Fixed numbers of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// How long an unconfirmed grant lasts: what a waiter that hangs costs.
    pub(crate) provisional_ms: u64,
    /// How many dead waiters one call passes over.
    pub(crate) sweep: usize,
    /// How long a queue outlives the last request of a waiter.
    pub(crate) queue_ttl_ms: u64,
    /// A polling waiter that has not asked for this long is passed over.
    pub(crate) poll_grace_ms: u64,
}

impl Limits {
    pub(crate) const DEFAULT: Self =
        Self { provisional_ms: 2_000, sweep: 200, queue_ttl_ms: 60_000, poll_grace_ms: 3_000 };
}

/// What one call may read and change besides the lock.
pub(crate) struct CallContext<'a> {
    /// The clock by which leases end.
    pub(crate) now_ms: u64,
    /// Wall-clock time, for `since_ms` and as the lower bound of fences.
    pub(crate) wall_us: u64,
    /// The store's fence counter.
    pub(crate) counter: &'a mut u64,
    /// Whether a process receives messages at an inbox.
    pub(crate) listening: &'a mut dyn FnMut(&InboxId) -> bool,
    /// Messages to deliver once the call has taken effect.
    pub(crate) outbox: &'a mut Vec<(InboxId, Message)>,
    pub(crate) limits: Limits,
}

/// The fence counter is above 2⁵², so nothing may be granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FenceUnusable;

/// An attempt to hold a lock.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Contender {
    pub(crate) token: Token,
    pub(crate) inbox: Option<InboxId>,
    pub(crate) ttl_ms: u64,
    pub(crate) since_ms: u64,
    pub(crate) owner: Owner,
    pub(crate) fenced: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TryReply {
    Granted { fence: u64 },
    Held,
    Revoked,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AcquireReply {
    Granted {
        fence: u64,
    },
    Queued {
        ticket: u64,
        position: usize,
    },
    Revoked,
    /// The same call must be sent again: dead waiters were passed over, and more may follow.
    Again {
        ticket: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PassReply {
    Done,
    NotOurs,
    Again,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RenewReply {
    Renewed,
    Lost,
    Revoked,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EvictReply {
    Done,
    ChangedHands,
    Free,
    Foreign,
    Again,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FinishReply {
    Sent,
    NotListening,
    ChangedHands,
    Free,
}

#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum YieldReply {
    Ours,
    NotOurs,
    Revoked,
    Again,
}

impl From<Contender> for QueueEntry {
    fn from(contender: Contender) -> Self {
        Self {
            ticket: 0,
            token: contender.token,
            inbox: contender.inbox,
            ttl_ms: contender.ttl_ms,
            since_ms: contender.since_ms,
            owner: contender.owner,
            polled_ms: 0,
        }
    }
}

/// The next number of a store's counter: a fence, or a ticket.
pub(crate) fn draw(counter: &mut u64, wall_us: u64) -> Result<u64, FenceUnusable> {
    let next = (*counter + 1).max(wall_us);
    if next > Fence::MAX {
        return Err(FenceUnusable);
    }
    *counter = next;
    Ok(next)
}

impl CallContext<'_> {
    pub(super) fn fence(&mut self) -> Result<u64, FenceUnusable> {
        draw(self.counter, self.wall_us)
    }

    /// Sends a message. `false`: no process listens at that inbox.
    pub(super) fn send(&mut self, inbox: &InboxId, message: Message) -> bool {
        let listens = (self.listening)(inbox);
        if listens {
            self.outbox.push((inbox.clone(), message));
        }
        listens
    }
}
