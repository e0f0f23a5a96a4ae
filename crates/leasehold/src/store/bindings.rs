//! Bindings: a value under an id, created by the first caller, read by all others, and removed when it expires. No lock
//! is taken and no caller waits.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use super::StoreError;
use crate::facts::{BindingKind, ClaimId, LockName, Retention};

/// The largest value that a store accepts, in bytes. Larger data belongs in another store, with its address here.
pub const VALUE_BYTES_MAX: usize = 1024 * 1024;

/// The kind and id that identify a binding.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BindingId {
    /// Its kind.
    pub kind: BindingKind,
    /// The request's id. It has the length and characters of a lock's name.
    pub id: LockName,
}

/// A binding to be created.
#[derive(Clone, PartialEq, Eq)]
pub struct NewBinding {
    /// Its kind and id.
    pub id: BindingId,
    /// The id of this attempt. A repetition of the request has the same one.
    pub claim: ClaimId,
    /// How long the binding is kept.
    pub keep: Retention,
    /// A slot that is taken on a node together with the binding.
    pub slot: Option<NodeSlot>,
    /// The value, of at most [`VALUE_BYTES_MAX`].
    pub value: Vec<u8>,
}

/// One of the slots that a node has for jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeSlot {
    /// The node.
    pub node: LockName,
    /// How many slots the node has.
    pub of: u32,
}

/// A binding as stored.
#[derive(Clone, PartialEq, Eq)]
pub struct Bound {
    /// The claim that created it.
    pub claim: ClaimId,
    /// How often it was changed after its creation.
    pub revision: u64,
    /// The requested retention, counted from its creation or its last renewal.
    pub keep: Duration,
    /// The node on which it has a slot.
    pub node: Option<LockName>,
    /// The value.
    pub value: Vec<u8>,
}

/// The answer to a creation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Create {
    /// The binding belongs to this claim: created now, or by an earlier send of the same request.
    Created,
    /// Another claim created it first. Nothing was changed.
    Exists(Bound),
    /// Nothing was created, because every slot of the node is taken.
    NoSlot,
}

/// The precondition of a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expected {
    /// Any binding.
    Any,
    /// The binding that this claim created.
    Claim(ClaimId),
    /// The binding that this claim created, at this revision: unchanged since it was read.
    Unchanged(ClaimId, u64),
}

/// A change of a binding.
#[derive(Clone, PartialEq, Eq)]
pub struct Change {
    /// The new value, of at most [`VALUE_BYTES_MAX`].
    pub value: Vec<u8>,
    /// Restarts the retention with this duration. `None` keeps the present expiry.
    pub keep: Option<Retention>,
    /// Whether the binding's slot, if it has one, is released.
    pub give_slot_back: bool,
}

/// The answer to a change or a removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changed {
    /// The change was made.
    Done,
    /// The binding does not exist (any more). Nothing was changed.
    Gone,
    /// The binding does not meet the precondition. Nothing was changed.
    Other(Bound),
}

/// One step of a runner of [`once`](crate::LockManager::once): it begins, or stores the result of the work.
#[derive(Clone, PartialEq, Eq)]
pub struct Step {
    /// The id of the work.
    pub id: BindingId,
    /// The id of this run, the same in all its steps.
    pub claim: ClaimId,
    /// The fence of the lease that the run holds.
    pub fence: u64,
    /// Whether the work has ended, and the value is its result. Otherwise the work begins.
    pub over: bool,
    /// How long the record is kept.
    pub keep: Retention,
    /// The record, of at most [`VALUE_BYTES_MAX`].
    pub value: Vec<u8>,
}

/// The bindings of a store. Each verb is one atomic step; `Err` means that the outcome is unknown. It is sealed, like
/// [`Store`](super::Store).
#[async_trait]
pub trait Bind: super::sealed::Sealed + Send + Sync + 'static {
    /// Creates a binding unless it exists. A repetition with the same claim has the same answer.
    async fn create(&self, new: &NewBinding) -> Result<Create, StoreError>;

    /// Reads a binding, and how long it is still kept.
    async fn read(&self, id: &BindingId) -> Result<Option<(Bound, Duration)>, StoreError>;

    /// Changes an existing binding that meets the precondition, and increments its revision. Never creates one.
    async fn change(&self, id: &BindingId, expected: &Expected, change: &Change) -> Result<Changed, StoreError>;

    /// Removes the binding that a claim created, and releases its slot.
    async fn remove(&self, id: &BindingId, claim: &ClaimId) -> Result<Changed, StoreError>;

    /// Writes a step of work that is done once. It is written if there is no record, over this run's own running
    /// record, or over a running record with a lower fence (a record without one counts as 0), unless the run begins
    /// and its payload differs from the record's. Any other record is left alone and returned as [`Changed::Other`]: a
    /// finished record is never replaced. Never returns [`Changed::Gone`]. A repetition after a lost answer has the
    /// same answer.
    async fn advance(&self, step: &Step) -> Result<Changed, StoreError>;

    /// Removes the record of a run whose work failed, if it is this run's own and still running.
    async fn withdraw(&self, id: &BindingId, claim: &ClaimId) -> Result<Changed, StoreError>;
}

impl Expected {
    /// Returns whether a binding meets the precondition.
    pub(crate) fn matches(&self, claim: &ClaimId, revision: u64) -> bool {
        match self {
            Self::Any => true,
            Self::Claim(mine) => mine == claim,
            Self::Unchanged(mine, read) => mine == claim && *read == revision,
        }
    }
}

// Values are users' data: their size may be shown, their content may not.

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
