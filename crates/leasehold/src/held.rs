//! What a task holds: work runs inside the lock it was given, and what it calls can find out. A task
//! that enters the same name again counts up instead of waiting for itself.

use std::sync::Arc;

use crate::engine::Core;
use crate::error::Error;
use crate::event::LossReason;
use crate::facts::{Fence, LockName};
use crate::guard::Guard;
use crate::request::LockRequest;

tokio::task_local! {
    /// The innermost lock this task runs under.
    static HELD: Arc<Held>;
}

/// A lock somebody runs under, and what is around it.
struct Held {
    /// Shared by everybody who entered; the last one to leave gives the lock back.
    guard: Arc<Guard>,
    /// In which manager: the same name in another store is another lock.
    core: Arc<Core>,
    outer: Option<Arc<Held>>,
}

/// The fence of the innermost lock that the calling task runs under, by `#[lock]`,
/// [`LockRequest::run`] or [`LockManager::with_lock`](crate::LockManager::with_lock): for code that
/// writes to a resource which checks fences, however deep it is called.
///
/// `None` outside of any lock, in a task that was spawned from inside one, and where the lock is
/// [`unfenced`](LockRequest::unfenced) or unprotected.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// # let locks = leasehold::LockManager::connect("memory:").await?;
/// async fn write() -> bool {
///     leasehold::current_fence().is_some()
/// }
/// assert!(locks.with_lock("order:42", async |_| write().await).await?);
/// assert!(!write().await);
/// # Ok(()) }
/// ```
pub fn current_fence() -> Option<Fence> {
    HELD.try_with(|held| held.guard.fence()).ok().flatten()
}

/// Whether a task that holds a lock may enter it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entry {
    Once,
    Again,
}

/// What happens to work whose lease is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnLoss {
    Cancel,
    Continue,
}

/// A lock that was entered, and is left by [`Entered::leave`] or, in the background, by a drop.
pub(crate) struct Entered {
    held: Arc<Held>,
    /// Whether an outer call of this task holds the lock, and is cancelled with it.
    nested: bool,
}

impl Entered {
    /// Acquires the lock, or counts up where this task holds it already.
    pub(crate) async fn by(request: LockRequest, entry: Entry) -> Result<Self, Error> {
        let (core, name) = request.of()?;
        let (core, outer) = (core.clone(), HELD.try_with(Arc::clone).ok());
        if entry == Entry::Again
            && let Some(mine) = outer.as_ref().and_then(|held| held.find(&core, name))
        {
            // The outer call is being cancelled: nothing new begins inside it.
            if let Some(why) = mine.loss() {
                return Err(cancelled_with_the_outer_call(name, why).await);
            }
            return Ok(Self { held: Arc::new(Held { guard: mine, core, outer }), nested: true });
        }
        let guard = Arc::new(request.await?);
        Ok(Self { held: Arc::new(Held { guard, core, outer }), nested: false })
    }

    /// Enters by a guard that somebody else acquired.
    pub(crate) fn with(core: Arc<Core>, guard: Guard) -> Self {
        let outer = HELD.try_with(Arc::clone).ok();
        Self { held: Arc::new(Held { guard: Arc::new(guard), core, outer }), nested: false }
    }

    pub(crate) fn guard(&self) -> &Guard {
        &self.held.guard
    }

    /// Does work inside the lock.
    pub(crate) async fn work<T>(&self, on_loss: OnLoss, work: impl Future<Output = T>) -> Result<T, Error> {
        let guard = self.guard();
        let work = HELD.scope(self.held.clone(), work);
        if on_loss == OnLoss::Continue {
            let done = work.await;
            if let Some(why) = guard.loss() {
                tracing::warn!(name = %guard.name(), %why, "the lease was lost while the work went on");
            }
            return Ok(done);
        }
        tokio::select! {
            // Lost first: work must not take another step once the lease is over.
            biased;
            why = guard.lost() => Err(match self.nested {
                true => cancelled_with_the_outer_call(guard.name(), why).await,
                false => Error::Lost { name: guard.name().clone(), why },
            }),
            done = work => Ok(done),
        }
    }

    /// Leaves. Whoever is the last gives the lock back, and waits until that is done. What goes wrong
    /// then hides nobody's result: it goes on in the background.
    pub(crate) async fn leave(self) {
        let Some(guard) = Arc::into_inner(self.held).and_then(|held| Arc::into_inner(held.guard)) else { return };
        if let Err(error) = guard.release().await {
            tracing::warn!(%error, "the work is done; its lock is released in the background");
        }
    }
}

/// The error of a nested call whose lease is lost.
///
/// Another thread may report the loss after the outer call looked for it and before this one does. The
/// outer call must be polled first then, because it cancels all work inside the lock: this call yields
/// once, and returns only where the outer call chose to continue.
async fn cancelled_with_the_outer_call(name: &LockName, why: LossReason) -> Error {
    tokio::task::yield_now().await;
    Error::Lost { name: name.clone(), why }
}

impl Held {
    /// The guard by which this task holds a name.
    fn find(&self, core: &Arc<Core>, name: &LockName) -> Option<Arc<Guard>> {
        if Arc::ptr_eq(&self.core, core) && self.guard.name() == name {
            return Some(self.guard.clone());
        }
        self.outer.as_ref()?.find(core, name)
    }
}
