use std::fmt;
use std::sync::Arc;

use super::IntoLockName;
use super::belief::Belief;
use crate::clock::Moment;
use crate::engine::EngineHandle;
use crate::error::Error;
use crate::events::{EventKind, LockEvent};
use crate::facts::{Fence, HolderId, LockName, Token, Ttl};
use crate::loss::LossReason;
use crate::manager::LockManager;
use crate::store::{Note, Operation, Release, Renewal, Renewed};

/// A lease without a guard: it belongs to no process, and its token alone renews and releases it.
///
/// It is for handing a lock to another process, and for work that outlives the request that began it. Nothing renews it
/// by itself: it ends by its ttl. Dropping this value releases nothing.
///
/// [`Guard::detach`](crate::Guard::detach) and [`LockRequest::under_token`](crate::LockRequest::under_token) return
/// one; [`LockManager::lease`] makes one from a token that came from elsewhere.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// # let locks = leasehold::LockManager::connect("memory:").await?;
/// # let another_process = locks.clone();
/// let lease = locks.lock("deploy").await?.detach().await?;
/// let token = lease.into_token(); // a secret: hand it to the process that goes on
///
/// let lease = another_process.lease("deploy", &token)?;
/// lease.renew(None).await?;
/// assert!(lease.release().await?);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Lease {
    engine: Arc<EngineHandle>,
    name: LockName,
    token: Token,
    fence: Option<Fence>,
}

impl LockManager {
    /// Returns the lease of a token, such as one that another process handed on. Nothing is sent: whether the token
    /// holds the lock shows when the lease is renewed or released.
    ///
    /// # Errors
    /// [`Error::Invalid`] for text that cannot be a name.
    pub fn lease(&self, name: impl IntoLockName, token: &Token) -> Result<Lease, Error> {
        Ok(Lease::new(self.engine().clone(), name.into_lock_name()?, token.clone(), None))
    }
}

impl Lease {
    pub(crate) fn new(engine: Arc<EngineHandle>, name: LockName, token: Token, fence: Option<Fence>) -> Self {
        Self { engine, name, token, fence }
    }

    /// Returns the lock.
    pub fn name(&self) -> &LockName {
        &self.name
    }

    /// Returns the secret that renews and releases the lease.
    pub fn token(&self) -> &Token {
        &self.token
    }

    /// Gives the token out, and keeps the lease.
    pub fn into_token(self) -> Token {
        self.token
    }

    /// Returns the public id of the holder.
    pub fn holder_id(&self) -> HolderId {
        self.token.holder_id()
    }

    /// Returns the fence of the lease, or [`Fence::NONE`] when it has none or is not known here, as after
    /// [`LockManager::lease`].
    pub fn fence(&self) -> Fence {
        self.fence.unwrap_or(Fence::NONE)
    }

    /// Returns the fence of the lease, or `None` when it has none or is not known here.
    pub fn try_fence(&self) -> Option<Fence> {
        self.fence
    }

    /// Renews the lease, and returns until when it is proven. A given `ttl` becomes the lease's own; without one it is
    /// renewed to the ttl it was taken with. It never shortens the present lease.
    ///
    /// # Errors
    /// [`Error::Lost`] when this token does not hold the lock (any more) or was revoked, [`Error::Store`] when the store
    /// did not answer.
    ///
    /// # Cancel safety
    /// Dropped before the answer, the lease may have been renewed or not; both are safe.
    pub async fn renew(&self, ttl: impl Into<Option<Ttl>>) -> Result<Moment, Error> {
        let (core, name, token) = (&self.engine.core, &self.name, &self.token);
        let lost = |why| Error::Lost { name: name.clone(), why };
        let holder = core.within(core.store.holder(name)).await;
        let holder = holder.map_err(|error| core.store_error(Operation::Renew, name, error))?;
        let Some(holder) = holder.filter(|holder| holder.id == token.holder_id()) else {
            return Err(lost(LossReason::Gone));
        };
        let recorded = holder.ttl.and_then(|ttl| Ttl::new(ttl).ok()).unwrap_or_default();
        let ttl = ttl.into().unwrap_or(recorded);
        // The last sign of life is computed from the recorded ttl, so a new ttl is recorded.
        let rewrite = (ttl != recorded).then_some(holder.owner);
        let renewal = Renewal {
            name: name.clone(),
            token: token.clone(),
            fence: holder.fence,
            ttl,
            prolong: true,
            rewrite,
            hand_to: None,
        };
        let (asked_at, answer) = core.renew(renewal).await;
        match answer {
            Renewed::Renewed => {
                core.publisher.note(Note::Enter {
                    name: name.clone(),
                    holder: token.holder_id(),
                    lasts: ttl.duration(),
                });
                Ok(Belief::new(asked_at, asked_at, ttl.duration()).valid_until())
            }
            Renewed::Lost => Err(lost(LossReason::Gone)),
            Renewed::Revoked => Err(lost(LossReason::Revoked)),
            Renewed::Displaced => Err(lost(LossReason::Displaced)),
            Renewed::Unknown(error) => Err(core.store_error(Operation::Renew, name, error)),
        }
    }

    /// Releases the lock, and publishes the event with the owner of the lease. `false`: this token does not hold the
    /// lock (any more), and nothing was touched.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer; call it again.
    ///
    /// # Cancel safety
    /// Dropped before the answer, the lock may have been released or not.
    pub async fn release(&self) -> Result<bool, Error> {
        let core = &self.engine.core;
        // The event names the owner. The release does not depend on this answer.
        let looking = core.within(core.store.holder(&self.name));
        let (holder, released) = tokio::join!(looking, self.release_without_event());
        let released = released?;
        if released {
            let holder = holder.ok().flatten().filter(|holder| holder.id == self.holder_id());
            let owner = holder.as_ref().map_or_else(String::new, |holder| holder.owner.to_string());
            let fence = holder.and_then(|holder| holder.fence);
            let event = LockEvent::new(EventKind::Released, &self.name, self.holder_id(), &owner, fence, "normal");
            core.publisher.note(Note::Tell(event));
        }
        Ok(released)
    }

    /// Releases the lock and publishes no event, which saves the store one question. `false`: this token does not hold
    /// the lock (any more), and nothing was touched.
    ///
    /// # Errors
    /// As [`release`](Self::release).
    ///
    /// # Cancel safety
    /// As [`release`](Self::release).
    pub async fn release_without_event(&self) -> Result<bool, Error> {
        let (core, name, token) = (&self.engine.core, &self.name, &self.token);
        let answer = core.within(core.store.release_uncontended(name, token)).await;
        let answer = answer.map_err(|error| core.store_error(Operation::Release, name, error))?;
        if answer == Release::NotOwner {
            core.publisher.stats.ownership_violations.add_one();
            tracing::warn!(%name, holder = %token.holder_id(), "released a lock that was not ours; nothing was touched");
            return Ok(false);
        }
        // A renewal may have entered it in the index, in this process or in another one.
        core.publisher.note(Note::Remove { name: name.clone(), holder: token.holder_id() });
        Ok(true)
    }
}

/// Without the token, which is a secret.
impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("name", &self.name)
            .field("holder", &self.holder_id())
            .field("fence", &self.fence)
            .finish_non_exhaustive()
    }
}
