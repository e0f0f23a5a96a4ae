//! Values bound to request ids: the first caller creates a value, and later callers read it.

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
    BindingId, Bound, Change, Changed, Create, Expected, NewBinding, NodeSlot, Operation, Step, StoreError,
    StoreErrorKind, VALUE_BYTES_MAX,
};

mod jobs;
mod undo;

pub use crate::facts::{ClaimId, Retention};
pub use jobs::{JobBinding, Reservation, Reserved};
pub(crate) use undo::BindingUndo;

/// How often [`Bindings::modify`] tries again after a concurrent change.
const MODIFY_ATTEMPTS: usize = 16;

/// Values of one type, bound to request ids; see [`LockManager::bindings`].
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
/// // The second caller gets the existing value, in the same single step.
/// match uploads.try_create("req-1", &"bucket/b".into(), lease).await? {
///     Claimed::Exists(first) => assert_eq!(first.value, "bucket/a"),
///     Claimed::Created(_) => unreachable!("the first call created it"),
/// }
/// # Ok(()) }
/// ```
///
/// A request id is 1 to 512 bytes of UTF-8 without control characters; a value is at most 1 MiB of JSON; a lease is 1 s to
/// 400 days ([`Retention`]). Each namespace has ids of its own.
pub struct Bindings<T> {
    core: Arc<Core>,
    /// Keeps the manager's background tasks alive.
    _manager: LockManager,
    of: PhantomData<fn() -> T>,
}

/// The result of [`Bindings::try_create`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claimed<T> {
    /// The value was created. The claim id is needed to change or remove it.
    Created(ClaimId),
    /// Another caller created a value before.
    Exists(Binding<T>),
}

/// A value that is bound to a request id.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Binding<T> {
    /// The value.
    pub value: T,
    /// The claim that created it.
    pub claim: ClaimId,
    /// The number of changes since it was created.
    pub revision: u64,
    /// The lease it was created or renewed with.
    pub lease: Duration,
    /// The time that is left of the lease. Only [`Bindings::get`] and [`Bindings::modify`] return it.
    pub left: Option<Duration>,
    /// The node on which it has a slot.
    pub slot_on: Option<LockName>,
}

impl LockManager {
    /// Returns values bound to request ids: the first caller creates a value, and later callers read it. There is no lock and
    /// no waiting, only one round trip.
    pub fn bindings<T>(&self) -> Bindings<T> {
        Bindings { core: self.core().clone(), _manager: self.clone(), of: PhantomData }
    }
}

impl<T: Serialize + DeserializeOwned> Bindings<T> {
    /// Binds a value to a request id unless a value is already bound, in one atomic step. The value is removed when its lease
    /// ends, so a creator that crashed blocks the id for no longer than that.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an id, value or lease out of bounds; [`Error::Store`] when the store did not answer (whether a
    /// value exists is unknown); [`Error::Unreadable`] when the existing value is not a `T`.
    ///
    /// # Cancel safety
    /// If the future is dropped, or there is no reply, a value that may have been created is removed in the background.
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

    /// Returns the value that is bound to a request id.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer; [`Error::Unreadable`] when the value is not a `T`.
    pub async fn get(&self, request_id: impl AsRef<str>) -> Result<Option<Binding<T>>, Error> {
        let id = binding_id(request_id)?;
        match self.core.read(&id).await? {
            Some((bound, left)) => Ok(Some(binding(&id.id, bound, Some(left))?)),
            None => Ok(None),
        }
    }

    /// Replaces the value that is bound to a request id, whichever claim created it. A lease starts again from now; with `None`
    /// the end does not change. Returns `false` when no value is bound; none is created.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a value or lease out of bounds; [`Error::Store`] when the store did not answer (the value may
    /// have been replaced).
    pub async fn update(
        &self,
        request_id: impl AsRef<str>,
        value: &T,
        lease: impl Into<Option<Duration>>,
    ) -> Result<bool, Error> {
        self.replace(request_id, &Expected::Any, value, lease.into()).await
    }

    /// Replaces the value that a claim created; see [`update`](Self::update). Returns `false` when it is gone or belongs to
    /// another claim.
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
        self.replace(request_id, &Expected::Claim(claim.clone()), value, lease.into()).await
    }

    async fn replace(
        &self,
        request_id: impl AsRef<str>,
        expected: &Expected,
        value: &T,
        lease: Option<Duration>,
    ) -> Result<bool, Error> {
        let id = binding_id(request_id)?;
        let change = change(&id.id, value, lease)?;
        Ok(matches!(self.core.change(&id, expected, &change).await?, Changed::Done))
    }

    /// Reads a value, changes it, and writes it unless it was changed in between; then it is read and changed again. The end of
    /// its lease does not change. Returns the new value, or `None` when no value is bound.
    ///
    /// # Errors
    /// As [`update`](Self::update); [`Error::Unreadable`]. [`Error::Store`] also after 16 concurrent changes.
    pub async fn modify(
        &self,
        request_id: impl AsRef<str>,
        mut by: impl FnMut(&mut T),
    ) -> Result<Option<Binding<T>>, Error> {
        let id = binding_id(request_id)?;
        for _ in 0..MODIFY_ATTEMPTS {
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
        let busy = StoreErrorKind::Busy.into();
        Err(self.core.store_error(Operation::Change, &id.id, busy))
    }

    /// Removes the value that a claim created and frees its slot. Returns `false` when it is gone or belongs to another claim.
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

/// Requests to the store, bounded by the request timeout.
impl Core {
    pub(crate) async fn create(self: &Arc<Self>, new: &NewBinding) -> Result<Create, Error> {
        let _call = self.call();
        // Armed before the request is sent, because only this claim can remove what may be created.
        let mut undo = BindingUndo::arm(self.clone(), new.id.clone(), new.claim.clone());
        let answer = self.within(self.store.create(new)).await;
        if !answer.as_ref().is_err_and(StoreError::may_have_happened) {
            undo.disarm();
        }
        answer.map_err(|e| self.store_error(Operation::Create, &new.id.id, e))
    }

    pub(crate) async fn read(&self, id: &BindingId) -> Result<Option<(Bound, Duration)>, Error> {
        self.ask(Operation::Read, id, self.store.read(id)).await
    }

    pub(crate) async fn change(&self, id: &BindingId, expected: &Expected, change: &Change) -> Result<Changed, Error> {
        self.ask(Operation::Change, id, self.store.change(id, expected, change)).await
    }

    pub(crate) async fn remove(&self, id: &BindingId, claim: &ClaimId) -> Result<bool, Error> {
        Ok(self.ask(Operation::Remove, id, self.store.remove(id, claim)).await? == Changed::Done)
    }

    /// Writes a step of work that is done once.
    pub(crate) async fn advance(&self, step: &Step) -> Result<Changed, Error> {
        let operation = if step.over { Operation::Change } else { Operation::Create };
        self.ask(operation, &step.id, self.store.advance(step)).await
    }

    /// Removes the record of work that was begun and is not finished.
    pub(crate) async fn withdraw(&self, id: &BindingId, claim: &ClaimId) -> Result<bool, Error> {
        Ok(self.ask(Operation::Remove, id, self.store.withdraw(id, claim)).await? == Changed::Done)
    }

    async fn ask<T>(
        &self,
        operation: Operation,
        id: &BindingId,
        request: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, Error> {
        self.within(request).await.map_err(|error| self.store_error(operation, &id.id, error))
    }
}

/// Parses a request id.
pub(crate) fn request_id(text: impl AsRef<str>) -> Result<LockName, Invalid> {
    LockName::new(text).map_err(|invalid| match invalid {
        Invalid::Name { problem, .. } => Invalid::Id { what: "request id", problem },
        other => other,
    })
}

/// Checks that a value is not too large for a store.
pub(crate) fn fits(id: &LockName, bytes: usize) -> Result<(), Invalid> {
    if bytes <= VALUE_BYTES_MAX {
        return Ok(());
    }
    let problem = format!("has {bytes} bytes; at most {VALUE_BYTES_MAX} can be stored");
    Err(Invalid::Value { id: beginning(id.as_str()), problem })
}

/// Writes a value as JSON.
pub(crate) fn json(id: &LockName, value: &impl Serialize) -> Result<Vec<u8>, Invalid> {
    let unwritable =
        |error| Invalid::Value { id: beginning(id.as_str()), problem: format!("cannot be written as JSON: {error}") };
    let json = serde_json::to_vec(value).map_err(unwritable)?;
    fits(id, json.len())?;
    Ok(json)
}

/// Reads a value from JSON.
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

/// Omits the value, which may be confidential and does not belong in a log.
impl<T> fmt::Debug for Binding<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Binding");
        text.field("claim", &self.claim).field("revision", &self.revision).field("lease", &self.lease);
        text.field("left", &self.left).field("slot_on", &self.slot_on).finish_non_exhaustive()
    }
}
