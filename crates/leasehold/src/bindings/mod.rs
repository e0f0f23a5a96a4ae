//! Values bound to request ids: the first caller creates a value, all others read the one that exists.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::engine::Core;
use crate::error::Error;
use crate::facts::{BindingKind, Invalid, LockName, beginning};
use crate::manager::LockManager;
use crate::store::{
    BindingId, Bound, Change, Changed, Create, Expected, NewBinding, NodeSlot, Operation, Step, VALUE_BYTES_MAX,
};

mod jobs;
mod undo;

pub use crate::facts::{ClaimId, Retention};
pub use jobs::{JobBinding, Reservation, Reserved};
pub(crate) use undo::BindingUndo;

/// How often a change is tried again that somebody else's change overtook.
const OVERTAKEN_MAX: usize = 16;

/// Values bound to request ids, of one type: see [`LockManager::bindings`].
///
/// ```
/// # use std::time::Duration;
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::bindings::Claimed;
/// use leasehold::LockManager;
///
/// let locks = LockManager::connect("memory:").await?;
/// let uploads = locks.bindings::<String>();
/// let lease = Duration::from_secs(60);
/// assert!(matches!(uploads.try_create("req-1", &"bucket/a".into(), lease).await?, Claimed::Created(_)));
/// // Whoever comes second gets what exists, in the same one step.
/// match uploads.try_create("req-1", &"bucket/b".into(), lease).await? {
///     Claimed::Exists(first) => assert_eq!(first.value, "bucket/a"),
///     Claimed::Created(_) => unreachable!("there is one"),
/// }
/// # Ok(()) }
/// ```
///
/// A request id is 1 to 512 bytes of UTF-8 without control characters, a value at most 1 MiB of JSON, a
/// lease 1 s to 400 days ([`Retention`]). Namespaces set ids apart as they do names.
pub struct Bindings<T> {
    core: Arc<Core>,
    /// Keeps the manager's background tasks alive.
    _manager: LockManager,
    of: PhantomData<fn() -> T>,
}

/// The answer to [`Bindings::try_create`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claimed<T> {
    /// We were the first. The claim id changes and removes it later.
    Created(ClaimId),
    /// Somebody else was.
    Exists(Binding<T>),
}

/// What is bound to a request id.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Binding<T> {
    /// The value.
    pub value: T,
    /// Which claim created it.
    pub claim: ClaimId,
    /// How often it was changed since.
    pub revision: u64,
    /// The lease it was created or renewed with.
    pub lease: Duration,
    /// How long it still is there, where that was asked for: by [`Bindings::get`].
    pub left: Option<Duration>,
    /// The node on which it has a slot.
    pub slot_on: Option<LockName>,
}

impl LockManager {
    /// Values bound to request ids: created by the first who asks, read by everybody else. No lock, no
    /// wait, one round trip.
    pub fn bindings<T>(&self) -> Bindings<T> {
        Bindings { core: self.core().clone(), _manager: self.clone(), of: PhantomData }
    }
}

impl<T: Serialize + DeserializeOwned> Bindings<T> {
    /// Binds a value to a request id unless one is bound already: one atomic step, one round trip, no
    /// wait. It is gone when the lease is over, so a creator that crashed blocks nobody for longer.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an id, value or lease out of bounds; [`Error::Store`] when the store did not
    /// answer, which is not "somebody was first"; [`Error::Unreadable`] when what exists is no `T`.
    ///
    /// # Cancel safety
    /// Dropped before the answer, or without one, what may have been created is removed in the background.
    pub async fn try_create(
        &self,
        request_id: impl AsRef<str>,
        value: &T,
        lease: Duration,
    ) -> Result<Claimed<T>, Error> {
        let (id, claim) = (binding_id(request_id)?, ClaimId::random());
        match self.create(&id, &claim, value, lease, None).await? {
            Create::Created => Ok(Claimed::Created(claim)),
            Create::Exists(bound) => Ok(Claimed::Exists(binding(&id.id, bound, None)?)),
            Create::NoSlot => unreachable!("no slot was asked for"),
        }
    }

    /// What is bound to a request id.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer, [`Error::Unreadable`] when it is no `T`.
    pub async fn get(&self, request_id: impl AsRef<str>) -> Result<Option<Binding<T>>, Error> {
        let id = binding_id(request_id)?;
        match self.core.read(&id).await? {
            Some((bound, left)) => Ok(Some(binding(&id.id, bound, Some(left))?)),
            None => Ok(None),
        }
    }

    /// Replaces the value that is bound to a request id, whoever created it: with a lease its time counts
    /// anew, with `None` its end stays. `false`: there is none, and none was created.
    ///
    /// # Errors
    /// [`Error::Invalid`], or [`Error::Store`] when the store did not answer: it may have been replaced.
    pub async fn update(
        &self,
        request_id: impl AsRef<str>,
        value: &T,
        lease: impl Into<Option<Duration>>,
    ) -> Result<bool, Error> {
        let id = binding_id(request_id)?;
        let change = change(&id.id, value, lease.into())?;
        Ok(matches!(self.core.change(&id, &Expected::Any, &change).await?, Changed::Done))
    }

    /// Removes the value that a claim created. `false`: it is gone, or another claim's by now.
    ///
    /// # Errors
    /// As [`update`](Self::update).
    pub async fn update_claim(
        &self,
        request_id: impl AsRef<str>,
        claim: &ClaimId,
        value: &T,
        lease: impl Into<Option<Duration>>,
    ) -> Result<bool, Error> {
        let id = binding_id(request_id)?;
        let change = change(&id.id, value, lease.into())?;
        Ok(matches!(self.core.change(&id, &Expected::Claim(claim.clone()), &change).await?, Changed::Done))
    }

    /// Changes a value by what it is: read, changed, and written only if nobody else changed it meanwhile
    /// (else read again). Its end stays. Returns what it is now; `None` when there is none.
    ///
    /// # Errors
    /// As [`update`](Self::update), and [`Error::Unreadable`].
    pub async fn modify(
        &self,
        request_id: impl AsRef<str>,
        mut by: impl FnMut(&mut T),
    ) -> Result<Option<Binding<T>>, Error> {
        let id = binding_id(request_id)?;
        for _ in 0..OVERTAKEN_MAX {
            let Some((bound, left)) = self.core.read(&id).await? else { return Ok(None) };
            let expected = Expected::Unchanged(bound.claim.clone(), bound.revision);
            let mut found: Binding<T> = binding(&id.id, bound, Some(left))?;
            by(&mut found.value);
            let change = change(&id.id, &found.value, None)?;
            match self.core.change(&id, &expected, &change).await? {
                Changed::Done => return Ok(Some(Binding { revision: found.revision + 1, ..found })),
                Changed::Gone => return Ok(None),
                Changed::Other(_) => {}
            }
        }
        let busy = crate::store::StoreErrorKind::Busy.into();
        Err(self.core.store_error(Operation::Change, &id.id, busy))
    }

    /// Removes what a claim created, and gives its slot back, so that the next one can create at once.
    /// `false`: it is gone or somebody else's, and nothing was touched.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn remove(&self, request_id: impl AsRef<str>, claim: &ClaimId) -> Result<bool, Error> {
        self.core.remove(&binding_id(request_id)?, claim).await
    }

    async fn create(
        &self,
        id: &BindingId,
        claim: &ClaimId,
        value: &T,
        lease: Duration,
        slot: Option<NodeSlot>,
    ) -> Result<Create, Error> {
        let value = json(&id.id, value)?;
        let new = NewBinding { id: id.clone(), claim: claim.clone(), keep: Retention::new(lease)?, slot, value };
        self.core.create(&new).await
    }
}

/// The verbs of the store, bounded in time, with errors in the caller's words.
impl Core {
    pub(crate) async fn create(self: &Arc<Self>, new: &NewBinding) -> Result<Create, Error> {
        let _call = self.call();
        // Armed before the request leaves: whatever may have been created is ours alone to remove.
        let mut undo = BindingUndo::arm(self.clone(), new.id.clone(), new.claim.clone());
        let answer = self.within(self.store.create(new)).await;
        if !answer.as_ref().is_err_and(crate::store::StoreError::may_have_happened) {
            undo.disarm();
        }
        answer.map_err(|e| self.store_error(Operation::Create, &new.id.id, e))
    }

    pub(crate) async fn read(&self, id: &BindingId) -> Result<Option<(Bound, Duration)>, Error> {
        let answer = self.within(self.store.read(id)).await;
        answer.map_err(|e| self.store_error(Operation::Read, &id.id, e))
    }

    pub(crate) async fn change(&self, id: &BindingId, expected: &Expected, change: &Change) -> Result<Changed, Error> {
        let answer = self.within(self.store.change(id, expected, change)).await;
        answer.map_err(|e| self.store_error(Operation::Change, &id.id, e))
    }

    pub(crate) async fn remove(&self, id: &BindingId, claim: &ClaimId) -> Result<bool, Error> {
        let answer = self.within(self.store.remove(id, claim)).await;
        let answer = answer.map_err(|e| self.store_error(Operation::Remove, &id.id, e))?;
        Ok(answer == Changed::Done)
    }

    /// Sends a step of work that is done once.
    pub(crate) async fn advance(&self, step: &Step) -> Result<Changed, Error> {
        let operation = if step.over { Operation::Change } else { Operation::Create };
        let answer = self.within(self.store.advance(step)).await;
        answer.map_err(|e| self.store_error(operation, &step.id.id, e))
    }

    /// Takes back the beginning of work that came to nothing.
    pub(crate) async fn withdraw(&self, id: &BindingId, claim: &ClaimId) -> Result<bool, Error> {
        let answer = self.within(self.store.withdraw(id, claim)).await;
        let answer = answer.map_err(|e| self.store_error(Operation::Remove, &id.id, e))?;
        Ok(answer == Changed::Done)
    }
}

/// Checks a request id.
pub(crate) fn request_id(text: impl AsRef<str>) -> Result<LockName, Invalid> {
    LockName::new(text).map_err(|invalid| match invalid {
        Invalid::Name { problem, .. } => Invalid::Id { what: "request id", problem },
        other => other,
    })
}

/// Refuses a value that is too large for a store.
pub(crate) fn fits(id: &LockName, bytes: usize) -> Result<(), Invalid> {
    if bytes <= VALUE_BYTES_MAX {
        return Ok(());
    }
    let problem = format!("has {bytes} bytes, and {VALUE_BYTES_MAX} is the most that is stored");
    Err(Invalid::Value { id: beginning(id.as_str()), problem })
}

/// A value as it is stored.
pub(crate) fn json(id: &LockName, value: &impl Serialize) -> Result<Vec<u8>, Invalid> {
    let unwritable =
        |error| Invalid::Value { id: beginning(id.as_str()), problem: format!("cannot be written as JSON: {error}") };
    let json = serde_json::to_vec(value).map_err(unwritable)?;
    fits(id, json.len())?;
    Ok(json)
}

/// Reads a value back.
pub(crate) fn from_json<T: DeserializeOwned>(id: &LockName, json: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(json).map_err(|error| Error::Unreadable { name: id.clone(), problem: error.to_string() })
}

fn binding_id(text: impl AsRef<str>) -> Result<BindingId, Invalid> {
    Ok(BindingId { kind: BindingKind::Bindings, id: request_id(text)? })
}

fn change(id: &LockName, value: &impl Serialize, lease: Option<Duration>) -> Result<Change, Invalid> {
    let keep = lease.map(Retention::new).transpose()?;
    Ok(Change { value: json(id, value)?, keep, give_slot_back: false })
}

fn binding<T: DeserializeOwned>(id: &LockName, bound: Bound, left: Option<Duration>) -> Result<Binding<T>, Error> {
    let Bound { claim, revision, keep, node, value } = bound;
    Ok(Binding { value: from_json(id, &value)?, claim, revision, lease: keep, left, slot_on: node })
}

impl<T> Clone for Bindings<T> {
    fn clone(&self) -> Self {
        Self { core: self.core.clone(), _manager: self._manager.clone(), of: PhantomData }
    }
}

impl<T> fmt::Debug for Bindings<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bindings").field("store", &self.core.store.describe()).finish_non_exhaustive()
    }
}

/// Without the value: it is the user's, and a log is no place for it.
impl<T> fmt::Debug for Binding<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Binding");
        text.field("claim", &self.claim).field("revision", &self.revision).field("lease", &self.lease);
        text.field("left", &self.left).field("slot_on", &self.slot_on).finish_non_exhaustive()
    }
}
