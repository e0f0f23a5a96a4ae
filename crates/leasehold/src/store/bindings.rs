//! Bindings: a value under an id, created by the first who asks, read by everybody else, gone when its
//! time is over. No lock is taken and nobody waits.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use super::StoreError;
use crate::facts::{BindingKind, ClaimId, LockName, Retention};

/// The largest value that a store takes, in bytes. A store of locks is not one of documents: what is
/// larger belongs elsewhere, and its address here.
pub const VALUE_BYTES_MAX: usize = 1024 * 1024;

/// What a binding is found by.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BindingId {
    /// Of which kind it is.
    pub kind: BindingKind,
    /// The request's id: as long, and of the same characters, as a lock's name.
    pub id: LockName,
}

/// A binding that is to be created.
#[derive(Clone, PartialEq, Eq)]
pub struct NewBinding {
    /// Where.
    pub id: BindingId,
    /// This attempt's own id: the same when it is sent again.
    pub claim: ClaimId,
    /// How long it is kept.
    pub keep: Retention,
    /// A slot to be taken on a node together with it.
    pub slot: Option<NodeSlot>,
    /// At most [`VALUE_BYTES_MAX`].
    pub value: Vec<u8>,
}

/// One of the places that a node has for jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSlot {
    /// The node.
    pub node: LockName,
    /// How many places it has.
    pub of: u32,
}

/// A binding as it stands in the store.
#[derive(Clone, PartialEq, Eq)]
pub struct Bound {
    /// Whose it is.
    pub claim: ClaimId,
    /// How often it was changed since it was created.
    pub revision: u64,
    /// How long it was asked to be kept, counted from its creation or its last renewal.
    pub keep: Duration,
    /// The node on which it has a slot.
    pub node: Option<LockName>,
    /// The value.
    pub value: Vec<u8>,
}

/// The answer to a creation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Create {
    /// It is ours: created now, or by the same attempt before.
    Created,
    /// Somebody was first; nothing was changed.
    Exists(Bound),
    /// There is none, and none was created: every slot of the node is taken.
    NoSlot,
}

/// What a binding must be like to be changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expected {
    /// Whatever it is.
    Any,
    /// The one that this claim created.
    Claim(ClaimId),
    /// This claim at this revision: unchanged since it was read.
    Unchanged(ClaimId, u64),
}

/// A change of a binding.
#[derive(Clone, PartialEq, Eq)]
pub struct Change {
    /// Its new value; at most [`VALUE_BYTES_MAX`].
    pub value: Vec<u8>,
    /// Counts its time anew, for so long; `None` leaves its end where it is.
    pub keep: Option<Retention>,
    /// Whether its slot, if it has one, is given back.
    pub give_slot_back: bool,
}

/// The answer to a change or a removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changed {
    /// Done.
    Done,
    /// There is none (any more); nothing was done.
    Gone,
    /// It is not as expected; nothing was done.
    Other(Bound),
}

/// One step of a runner of [`once`](crate::LockManager::once): it begins, or stores what came of the work.
#[derive(Clone, PartialEq, Eq)]
pub struct Step {
    /// The id of the work.
    pub id: BindingId,
    /// This run's own id: the same for all of its steps.
    pub claim: ClaimId,
    /// The fence of the lease that the run holds.
    pub fence: u64,
    /// Whether the work is over, and the value says what came of it. Otherwise it begins.
    pub over: bool,
    /// How long the record is kept.
    pub keep: Retention,
    /// The record; at most [`VALUE_BYTES_MAX`].
    pub value: Vec<u8>,
}

/// The bindings of a store. Each verb is one atomic step; `Err` means that the outcome is unknown. It is sealed, like
/// [`Store`](super::Store).
#[async_trait]
pub trait Bind: super::sealed::Sealed + Send + Sync + 'static {
    /// Creates a binding unless there is one. Sent again with the same claim, it answers the same.
    async fn create(&self, new: &NewBinding) -> Result<Create, StoreError>;

    /// Reads one, and how long it is still kept.
    async fn read(&self, id: &BindingId) -> Result<Option<(Bound, Duration)>, StoreError>;

    /// Changes one that is there and as expected; its revision counts up. Never creates.
    async fn change(&self, id: &BindingId, expected: &Expected, change: &Change) -> Result<Changed, StoreError>;

    /// Removes the one that a claim created, and gives its slot back.
    async fn remove(&self, id: &BindingId, claim: &ClaimId) -> Result<Changed, StoreError>;

    /// Writes a step of work that is done once where there is no record, over this run's own running record,
    /// or over a running record with a lower fence (a record without one counts as 0), unless the run begins
    /// and its payload differs from the record's. Anything else is left alone and answered with
    /// [`Changed::Other`]: a finished record is never replaced. Never answers [`Changed::Gone`]. Sent again after
    /// a lost answer, it answers the same.
    async fn advance(&self, step: &Step) -> Result<Changed, StoreError>;

    /// Removes the record of a run whose work came to nothing: only while it is this run's own and running.
    async fn withdraw(&self, id: &BindingId, claim: &ClaimId) -> Result<Changed, StoreError>;
}

impl Expected {
    /// Whether a binding is as expected.
    pub(crate) fn matches(&self, claim: &ClaimId, revision: u64) -> bool {
        match self {
            Self::Any => true,
            Self::Claim(mine) => mine == claim,
            Self::Unchanged(mine, read) => mine == claim && *read == revision,
        }
    }
}

// Values are users' data: how much there is may be shown, what it is may not.

impl fmt::Debug for NewBinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, claim, keep, slot, value } = self;
        let mut text = f.debug_struct("NewBinding");
        text.field("id", id).field("claim", claim).field("keep", keep).field("slot", slot);
        text.field("bytes", &value.len()).finish()
    }
}

impl fmt::Debug for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { claim, revision, keep, node, value } = self;
        let mut text = f.debug_struct("Bound");
        text.field("claim", claim).field("revision", revision).field("keep", keep).field("node", node);
        text.field("bytes", &value.len()).finish()
    }
}

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, claim, fence, over, keep, value } = self;
        let mut text = f.debug_struct("Step");
        text.field("id", id).field("claim", claim).field("fence", fence).field("over", over).field("keep", keep);
        text.field("bytes", &value.len()).finish()
    }
}

impl fmt::Debug for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { value, keep, give_slot_back } = self;
        let mut text = f.debug_struct("Change");
        text.field("bytes", &value.len()).field("keep", keep).field("give_slot_back", give_slot_back).finish()
    }
}
