//! What a store must do, in few verbs. The siblings ([`memory`], [`sqlite`], [`redis`]) know
//! nothing of each other; one state machine (`machine`) says what each verb means.
//!
//! [`Store`] is the lock path, [`Inspect`] the look path, [`Bind`] what has nothing to do with locks. `Err` always means that the answer is
//! unknown, never that the lock is taken.

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
pub(crate) mod open;
mod operation;
mod pushes;
pub(crate) mod record;
#[cfg(feature = "redis")]
pub mod redis;
mod seen;
#[cfg(feature = "sqlite")]
pub mod sqlite;

pub use crate::facts::{BindingKind, KeySpace, Namespace, RawPattern};
pub use bindings::{
    Bind, BindingId, Bound, Change, Changed, Create, Expected, NewBinding, NodeSlot, Step, VALUE_BYTES_MAX,
};
pub use error::{StoreError, StoreErrorKind};
pub(crate) use finding::Finding;
pub(crate) use holder::{Cursor, EvictMode, Evicted, FinishRequest, Holder, Page, Waiter};
pub use operation::Operation;
pub use pushes::PushReceiver;
pub(crate) use pushes::PushSender;
#[cfg(test)]
pub(crate) use seen::view;

/// One attempt to hold one lock: the same from its first request to its last, so that every verb
/// can be sent twice without harm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The lock.
    pub name: LockName,
    /// The attempt's secret.
    pub token: Token,
    /// How long the lease lasts without renewal.
    pub ttl: Ttl,
    /// Who asks, for people.
    pub owner: Owner,
    /// Whether the grant must carry a fence. An unfenced try is one command cheaper.
    pub fenced: bool,
    /// Whether this process listens for messages about the claim. When it does not, a waiter has
    /// to poll, and a holder's lease lives by its ttl alone: it belongs to no process.
    pub listens: bool,
    /// When the attempt began, in wall-clock milliseconds.
    pub since_ms: u64,
}

/// A place in a queue: lower is earlier. A waiter keeps it over a reconnect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// A lease was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// Its fence; `None` when the claim was unfenced.
    pub fence: Option<Fence>,
    /// A moment before the store's countdown began.
    pub asked_at: Moment,
    /// How long the store counts from there.
    pub lasts: Duration,
}

/// The answer to a try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Try {
    /// Ours.
    Granted(Grant),
    /// Somebody else's; `None` when it changed hands before we could see whose.
    Held(Option<Holder>),
    /// Ours for a moment, and revoked by somebody since. The token is used up.
    Revoked,
}

/// The answer to an acquire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Acquire {
    /// Ours.
    Granted(Grant),
    /// We stand in line.
    Queued(Place),
    /// It was ours and has been revoked since: release it, the token is used up.
    Revoked,
}

/// Where a waiter stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Keep it, and ask with it again.
    pub ticket: Ticket,
    /// How many stand before us.
    pub position: usize,
    /// Who holds the lock; `None` when it is between two holders.
    pub holder: Option<Holder>,
}

/// The answer to a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// It was ours; it is free, or the next waiter's.
    Released,
    /// It was not ours, or not any more. Nothing was touched.
    NotOwner,
}

/// One lease to renew, or to look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Renewal {
    /// The lock.
    pub name: LockName,
    /// The lease's secret.
    pub token: Token,
    /// The fence the lease was granted with: another one in the store means that the token was
    /// granted anew since, and this lease is over.
    pub fence: Option<Fence>,
    /// Counted anew from now; never shortens.
    pub ttl: Ttl,
    /// `false`: a check. The store says whether the lease is still its holder's, and changes nothing: neither the
    /// countdown nor what `rewrite` and `hand_to` say. For leases that are not renewed.
    pub prolong: bool,
    /// Writes ttl and owner into the record: a confirm by the task that got the lock, or an extend.
    pub rewrite: Option<Owner>,
    /// Makes it the lease of this token, which may be its own, and of no process: no death ends it any more, only
    /// its ttl. Idempotent: sent again, it finds what it has done by the fence.
    pub hand_to: Option<Token>,
}

/// The answer to one renewal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Renewed {
    /// Ours. Where it was to be prolonged, the countdown began anew, after the moment the caller asked.
    Renewed,
    /// Not ours (any more).
    Lost,
    /// Somebody took it away: stop, and release.
    Revoked,
    /// The database it was in was removed or replaced: other processes use another one.
    Displaced,
    /// No answer; it may have been renewed or not.
    Unknown(StoreError),
}

/// The answer to a leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// We stood in line, or were not known at all.
    WasWaiting,
    /// The grant had crossed us on the way: it was handed on.
    WasGranted,
}

/// What a store tells this process without being asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Push {
    /// A waiter of ours holds the lock now.
    Granted {
        /// Whose attempt.
        token: Token,
        /// Its lease. `lasts` is provisional: confirm it.
        grant: Grant,
    },
    /// Ask again for this attempt in a while: whoever was served before us may never confirm.
    LookAgain {
        /// Whose attempt.
        token: Token,
        /// When.
        after: Duration,
    },
    /// A lease of ours was taken away.
    Revoked {
        /// Whose.
        token: Token,
    },
    /// Somebody asks a holder of ours to come to an end soon.
    Finish {
        /// Whose.
        token: Token,
        /// Why, in the asker's words.
        reason: String,
    },
    /// The connection to the store is lost. [`Push::Resync`] follows when it is back.
    Disconnected,
    /// Messages may have been missed: ask again for everything now.
    Resync,
    /// Whether messages arrive at all. When they do not, waiters have to poll.
    Hearing(bool),
}

/// What happens to a lease in the index and on the events channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// Enter a long-held lease in the index, or keep it there.
    Enter {
        /// The lock.
        name: LockName,
        /// Its holder.
        holder: HolderId,
        /// How long the entry is worth something.
        lasts: Duration,
    },
    /// Take it out.
    Remove {
        /// The lock.
        name: LockName,
        /// Its holder.
        holder: HolderId,
    },
    /// Tell whoever follows.
    Tell(LockEvent),
}

impl Note {
    /// Whether it is for a person, and must not be lost.
    pub(crate) fn is_alert(&self) -> bool {
        matches!(self, Self::Tell(event) if event.kind == crate::events::lock_event::EventKind::Alert)
    }
}

/// The stores of this crate, and no others: the verbs may change with every version.
mod sealed {
    pub trait Sealed {}
    impl Sealed for super::memory::MemoryStore {}
    #[cfg(feature = "redis")]
    impl Sealed for super::redis::RedisStore {}
    #[cfg(feature = "sqlite")]
    impl Sealed for super::sqlite::SqliteStore {}
}

/// The lock path of a store. It is sealed: only the stores of this crate implement it.
///
/// Every verb is idempotent on its token. `Err` means unknown: the request may have been carried
/// out or not.
#[async_trait]
pub trait Store: Inspect + Bind + sealed::Sealed + Send + Sync + 'static {
    /// Takes the lock if it is free and nobody stands in line.
    async fn try_acquire(&self, claim: &Claim) -> Result<Try, StoreError>;

    /// Takes the lock or stands in line for it. `ticket` is the one an earlier answer gave, or one that was
    /// [drawn](Store::ticket).
    async fn acquire(&self, claim: &Claim, ticket: Option<Ticket>) -> Result<Acquire, StoreError>;

    /// Draws a ticket, for an attempt that stands in several queues under one: later than every ticket given
    /// or drawn before, in whichever queue, and earlier than every one after. It takes nothing and needs no
    /// giving back; one whose answer was lost is just not used.
    async fn ticket(&self) -> Result<Ticket, StoreError>;

    /// Gives the lock to the next waiter, or frees it.
    async fn release(&self, name: &LockName, token: &Token) -> Result<Release, StoreError>;

    /// Releases a lock that probably has no waiter: cheaper than [`Store::release`] when it has none, and dearer when it has
    /// one.
    async fn release_uncontended(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        self.release(name, token).await
    }

    /// Releases a lock by other means, which are slower, for when [`Store::release`] fails.
    async fn release_emergency(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        self.release(name, token).await
    }

    /// Gives back what another kind of client wrote as a plain value, compared with that value as a whole. Where no
    /// other kind of client can write there is none.
    async fn release_value(&self, _name: &LockName, _value: &str) -> Result<Release, StoreError> {
        Ok(Release::NotOwner)
    }

    /// Renews or checks many leases in one pass; one answer for each, in order.
    async fn renew(&self, renewals: &[Renewal]) -> Vec<Renewed>;

    /// Gives up an attempt wherever it stands: in line, or granted without our knowing.
    async fn leave(&self, claim: &Claim) -> Result<Left, StoreError>;

    /// Takes the lock away from the holder that was looked at, and from nobody else.
    async fn evict(&self, name: &LockName, holder: HolderId, mode: EvictMode) -> Result<Evicted, StoreError>;

    /// Asks the holder that was looked at to come to an end.
    async fn ask_to_finish(&self, name: &LockName, holder: HolderId, reason: &str)
    -> Result<FinishRequest, StoreError>;

    /// Whether a try that was not answered may be sent again under its own token. Not where the first
    /// one can still be carried out later than the second: then the token is given up.
    fn may_resend_try(&self) -> bool {
        true
    }

    /// Whether the record of a lock that a try has taken lacks its fence until the first renewal.
    fn writes_fence_later(&self) -> bool {
        false
    }

    /// Delivers the messages for this process to a receiver. Only the first receiver counts.
    fn deliver_to(&self, receiver: Arc<dyn PushReceiver>);

    /// The messages for this process, as a channel.
    fn pushes(&self) -> mpsc::UnboundedReceiver<Push> {
        let (tell, pushes) = mpsc::unbounded_channel();
        self.deliver_to(Arc::new(pushes::Channel(tell)));
        pushes
    }

    /// How many claims of this process stand in line, the position of the one nearest to its turn,
    /// and the shortest ttl among them: a store that has to prove that its messages arrive does so
    /// only while somebody waits, and more often near the head of a queue.
    fn waiting(&self, _claims: usize, _nearest: usize, _shortest: Option<Ttl>) {}

    /// Notes for people who look: never needed by the lock path, whose calls never fail by it.
    async fn note(&self, _notes: Vec<Note>) -> Result<(), StoreError> {
        Ok(())
    }

    /// Adds to the fleet's counters.
    async fn count(&self, _deltas: &[(&'static str, u64)]) -> Result<(), StoreError> {
        Ok(())
    }

    /// A descriptor that keeps this process's leases from being taken for a dead one's: while any process
    /// has it open, only the end of their ttl ends them. `None` where a lease does not depend on its
    /// process anyway.
    fn lifeline(&self) -> Option<OwnedFd> {
        None
    }

    /// Lets go of connections, threads and files. Verbs answer with an error afterwards.
    async fn close(&self) {}
}

/// The look path of a store. It is sealed, like [`Store`].
#[async_trait]
pub trait Inspect: sealed::Sealed + Send + Sync + 'static {
    /// Which store this is, without its secrets: `sqlite:/path`, `redis://host:6379`.
    fn describe(&self) -> String;

    /// Who holds one lock.
    async fn holder(&self, name: &LockName) -> Result<Option<Holder>, StoreError>;

    /// Locks whose names begin with `prefix`, at most about `limit` of them.
    async fn list(&self, prefix: &str, after: Option<Cursor>, limit: usize) -> Result<Page, StoreError>;

    /// Who waits for a lock, in order.
    async fn queue(&self, name: &LockName) -> Result<Vec<Waiter>, StoreError>;

    /// Long-held locks from the index, at most about `limit` of them, checked against the locks themselves; a
    /// store that can list cheaply lists.
    async fn long_held(&self, after: Option<Cursor>, limit: usize) -> Result<Page, StoreError>;

    /// The fleet's counters.
    async fn counters(&self) -> Result<Vec<(String, u64)>, StoreError>;

    /// Whether the store can keep a promise: one finding per check. What cannot be checked is a
    /// finding too.
    async fn checkup(&self) -> Vec<Finding>;

    /// Events of the whole fleet from now on, until the connection to the store is lost.
    async fn follow(&self) -> Result<mpsc::Receiver<LockEvent>, StoreError>;
}

/// A store that can be shared.
pub type SharedStore = Arc<dyn Store>;
