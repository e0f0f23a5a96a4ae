//! The operations of a store. The stores ([`memory`], [`sqlite`], [`redis`]) do not depend on each other; one state
//! machine (`machine`) defines what each operation means.
//!
//! [`Store`] is the lock path, [`Inspect`] is read-only inspection, [`Bind`] stores values that have nothing to do with
//! locks. `Err` always means that the answer is unknown, never that the lock is held.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::mpsc;

use crate::clock::Moment;
use crate::events::lock_event::LockEvent;
use crate::facts::{Fence, HolderId, LockName, Owner, Token, Ttl};

mod bindings;
mod error;
pub(crate) mod finding;
pub(crate) mod holder;
pub mod memory;
mod on_machine;
pub(crate) mod open;
mod operation;
mod pushes;
pub(crate) mod record;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "sqlite")]
pub mod sqlite;

pub use crate::facts::{BindingKind, KeySpace, Namespace, RawPattern};
pub use bindings::{
    Bind, BindingId, Bound, Change, Changed, Create, Expected, NewBinding, NodeSlot, Step, VALUE_BYTES_MAX,
};
pub use error::{StoreError, StoreErrorKind};
pub(crate) use finding::Finding;
pub(crate) use holder::{Cursor, EvictMode, Evicted, FinishRequest, Holder, Page, Waiter};
#[cfg(test)]
pub(crate) use on_machine::view;
pub use operation::Operation;
pub use pushes::PushReceiver;
pub(crate) use pushes::PushSender;

/// One attempt to acquire one lock. It is the same from the first request to the last, so that every operation can be
/// repeated without harm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AcquireRequest {
    /// The lock.
    pub name: LockName,
    /// The attempt's secret.
    pub token: Token,
    /// How long the lease lasts without renewal.
    pub ttl: Ttl,
    /// The owner, as people read it.
    pub owner: Owner,
    /// Whether the grant must carry a fence. An unfenced try is one command cheaper.
    pub fenced: bool,
    /// Whether this process receives messages about the attempt. If not, a waiter has to poll, and a holder's lease ends
    /// by its ttl alone: it belongs to no process.
    pub listens: bool,
    /// When the attempt began, in wall-clock milliseconds.
    pub since_ms: u64,
}

/// A place in a queue: lower is earlier. A waiter keeps it over a reconnect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// A lease that was granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// The fence; `None` if the attempt was unfenced.
    pub fence: Option<Fence>,
    /// A moment before the store's countdown began.
    pub asked_at: Moment,
    /// The duration of the lease, counted from `asked_at`.
    pub lasts: Duration,
}

/// The answer to a try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Try {
    /// The lock was granted.
    Granted(Grant),
    /// Another holder has the lock; `None` if it changed before it could be read.
    Held(Option<Holder>),
    /// The lock was granted for a moment, and has been revoked since. The token is used up.
    Revoked,
}

/// The answer to an acquire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acquire {
    /// The lock was granted.
    Granted(Grant),
    /// The attempt waits in the queue.
    Queued(Place),
    /// The lock was granted and has been revoked since: release it. The token is used up.
    Revoked,
}

/// The position of a waiter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Its ticket, to be sent with the next request.
    pub ticket: Ticket,
    /// The number of waiters before it.
    pub position: usize,
    /// The holder of the lock; `None` while it changes.
    pub holder: Option<Holder>,
}

/// The answer to a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// The token held the lock. It is free now, or belongs to the next waiter.
    Released,
    /// The token did not hold the lock, or not any more. Nothing was changed.
    NotOwner,
}

/// One lease to renew or to check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Renewal {
    /// The lock.
    pub name: LockName,
    /// The lease's secret.
    pub token: Token,
    /// The fence that the lease was granted with. Another fence in the store means that the token was granted anew
    /// since, and that this lease has ended.
    pub fence: Option<Fence>,
    /// The duration, counted anew from now. It never shortens the lease.
    pub ttl: Ttl,
    /// `false` for a check: the store answers whether the lease is still held, and changes nothing, not even for
    /// `rewrite` and `hand_to`. For leases that are not renewed.
    pub prolong: bool,
    /// Writes ttl and owner into the record: for a confirmation by the task that received the lock, or an extension.
    pub rewrite: Option<Owner>,
    /// Transfers the lease to this token, which may be its own, and to no process: from then on only its ttl ends it.
    /// Idempotent: a repetition recognizes the transfer by the fence.
    pub hand_to: Option<Token>,
}

/// The answer to one renewal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Renewed {
    /// The lease is held. If it was prolonged, the countdown restarted after the request was sent.
    Renewed,
    /// The lease is not held (any more).
    Lost,
    /// The lease was revoked: stop, and release it.
    Revoked,
    /// The database was removed or replaced: other processes use another one.
    Displaced,
    /// No answer. The lease may or may not have been renewed.
    Unknown(StoreError),
}

/// The answer to a leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// The token was waiting, or was unknown.
    WasWaiting,
    /// The lock had been granted to the token meanwhile, and was passed on.
    WasGranted,
}

/// A message of the store to this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Push {
    /// The lock was granted to a waiter of this process.
    Granted {
        /// The token of the attempt.
        token: Token,
        /// The lease. `lasts` is provisional until it is confirmed.
        grant: Grant,
    },
    /// The attempt has to send its request again after a while: the waiter served before it may never confirm.
    LookAgain {
        /// The token of the attempt.
        token: Token,
        /// How long to wait before the request.
        after: Duration,
    },
    /// A lease of this process was revoked.
    Revoked {
        /// The token of the lease.
        token: Token,
    },
    /// A holder of this process is asked to finish soon.
    Finish {
        /// The token of the lease.
        token: Token,
        /// The reason, as the requester gave it.
        reason: String,
    },
    /// The connection to the store is lost. [`Push::Resync`] follows when it is back.
    Disconnected,
    /// Messages may have been missed: send every pending request again now.
    Resync,
    /// Whether messages arrive at all. If not, waiters have to poll.
    Hearing(bool),
}

/// An entry of the index, or a published event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// Enter a long-held lease in the index, or keep it there.
    Enter {
        /// The lock.
        name: LockName,
        /// Its holder.
        holder: HolderId,
        /// How long the entry is valid.
        lasts: Duration,
    },
    /// Remove an entry from the index.
    Remove {
        /// The lock.
        name: LockName,
        /// Its holder.
        holder: HolderId,
    },
    /// Publish an event to followers.
    Tell(LockEvent),
}

impl Note {
    /// Returns whether it is an alert, which must not be lost.
    pub(crate) fn is_alert(&self) -> bool {
        matches!(self, Self::Tell(event) if event.kind == crate::events::lock_event::EventKind::Alert)
    }
}

/// Keeps the traits to the stores of this crate: their operations may change with every version.
pub(crate) mod sealed {
    pub trait Sealed {}
    impl Sealed for super::memory::MemoryStore {}
    #[cfg(feature = "redis")]
    impl Sealed for super::redis::RedisStore {}
    #[cfg(feature = "sqlite")]
    impl Sealed for super::sqlite::SqliteStore {}
}

/// The lock path of a store. It is sealed: only the stores of this crate implement it.
///
/// Every operation is idempotent on its token. `Err` means unknown: the request may or may not have been carried out.
#[async_trait]
pub trait Store: Inspect + Bind + sealed::Sealed + Send + Sync + 'static {
    /// Acquires the lock if it is free and has no waiters.
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Try, StoreError>;

    /// Acquires the lock or joins its queue. `ticket` comes from an earlier answer, or was [drawn](Store::ticket).
    async fn acquire(&self, request: &AcquireRequest, ticket: Option<Ticket>) -> Result<Acquire, StoreError>;

    /// Draws a ticket, for an attempt that waits in several queues under one. It is later than every ticket assigned or
    /// drawn before, in any queue, and earlier than every one after. It holds nothing and is not given back; a ticket
    /// whose answer was lost stays unused.
    async fn ticket(&self) -> Result<Ticket, StoreError>;

    /// Passes the lock to the next waiter, or frees it.
    async fn release(&self, name: &LockName, token: &Token) -> Result<Release, StoreError>;

    /// Releases a lock that probably has no waiter: cheaper than [`Store::release`] if it has none, and more expensive
    /// if it has one.
    async fn release_uncontended(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        self.release(name, token).await
    }

    /// Releases a lock by other means, which are slower, for when [`Store::release`] fails.
    async fn release_emergency(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        self.release(name, token).await
    }

    /// Deletes a plain value that another kind of client wrote, if the key still holds exactly that value. A store
    /// without other kinds of clients has none.
    async fn release_value(&self, _name: &LockName, _value: &str) -> Result<Release, StoreError> {
        Ok(Release::NotOwner)
    }

    /// Renews or checks many leases in one pass; one answer for each, in order.
    async fn renew(&self, renewals: &[Renewal]) -> Vec<Renewed>;

    /// Gives up an attempt wherever it is: queued, or granted without this process knowing.
    async fn leave(&self, request: &AcquireRequest) -> Result<Left, StoreError>;

    /// Takes the lock away from this holder, and from no other.
    async fn evict(&self, name: &LockName, holder: HolderId, mode: EvictMode) -> Result<Evicted, StoreError>;

    /// Asks this holder to finish soon.
    async fn ask_to_finish(&self, name: &LockName, holder: HolderId, reason: &str)
    -> Result<FinishRequest, StoreError>;

    /// Returns whether a try that was not answered may be sent again under its own token. If the first request may be
    /// carried out after the second, it may not, and the token is given up.
    fn may_resend_try(&self) -> bool {
        true
    }

    /// Returns whether the record of a lock acquired by a try has no fence until the first renewal.
    fn writes_fence_later(&self) -> bool {
        false
    }

    /// Delivers the messages for this process to a receiver. Only the first receiver counts.
    fn deliver_to(&self, receiver: Arc<dyn PushReceiver>);

    /// Returns a channel with the messages for this process.
    fn pushes(&self) -> mpsc::UnboundedReceiver<Push> {
        let (sender, pushes) = mpsc::unbounded_channel();
        self.deliver_to(Arc::new(pushes::Channel(sender)));
        pushes
    }

    /// Reports how many attempts of this process wait, the position of the one closest to the head of its queue, and the
    /// shortest ttl among them. A store that has to probe whether its messages arrive does so only while an attempt
    /// waits, and more often near the head of a queue.
    fn waiting(&self, _attempts: usize, _nearest: usize, _shortest: Option<Ttl>) {}

    /// Writes index entries and events. The lock path never needs them, and no call of it fails because of them.
    async fn note(&self, _notes: Vec<Note>) -> Result<(), StoreError> {
        Ok(())
    }

    /// Adds to the fleet's counters.
    async fn count(&self, _deltas: &[(&'static str, u64)]) -> Result<(), StoreError> {
        Ok(())
    }

    /// Returns a descriptor that keeps this process's leases from being taken for a dead process's. While any process
    /// has it open, only their ttl ends them. `None` if a lease does not depend on its process anyway.
    fn lifeline(&self) -> Option<OwnedFd> {
        None
    }

    /// Closes connections, threads and files. Later operations return an error.
    async fn close(&self) {}
}

/// The inspection of a store. It is sealed, like [`Store`].
#[async_trait]
pub trait Inspect: sealed::Sealed + Send + Sync + 'static {
    /// Returns the store's address without secrets: `sqlite:/path`, `redis://host:6379`.
    fn describe(&self) -> String;

    /// Returns the holder of a lock.
    async fn holder(&self, name: &LockName) -> Result<Option<Holder>, StoreError>;

    /// Lists locks whose names begin with `prefix`, about `limit` of them at most.
    async fn list(&self, prefix: &str, after: Option<Cursor>, limit: usize) -> Result<Page, StoreError>;

    /// Returns the waiters of a lock, in order.
    async fn queue(&self, name: &LockName) -> Result<Vec<Waiter>, StoreError>;

    /// Lists long-held locks from the index, about `limit` of them at most, checked against the locks themselves. A
    /// store that can list cheaply lists all locks.
    async fn long_held(&self, after: Option<Cursor>, limit: usize) -> Result<Page, StoreError>;

    /// Returns the fleet's counters.
    async fn counters(&self) -> Result<Vec<(String, u64)>, StoreError>;

    /// Checks whether the store can keep its promises, with one finding per check. A check that could not be made is a
    /// finding too.
    async fn checkup(&self) -> Vec<Finding>;

    /// Subscribes to the events of the whole fleet, until the connection to the store is lost.
    async fn follow(&self) -> Result<mpsc::Receiver<LockEvent>, StoreError>;
}

/// A shared store.
pub type SharedStore = Arc<dyn Store>;
