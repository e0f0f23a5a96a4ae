//! The locks that a task runs under. Work runs inside a scope, is cancelled when its lease is lost, and can read the
//! fence. A task that enters the same name again counts up instead of waiting for itself.

use std::sync::Arc;

use crate::engine::Core;
use crate::engine::guard::{Guard, first_lost};
use crate::error::Error;
use crate::facts::{Fence, LockName};
use crate::loss::LossReason;
use crate::request::LockRequest;

tokio::task_local! {
    /// The innermost scope of this task.
    static CURRENT: Arc<Scope>;
}

/// What work runs under, and the scope around it.
struct Scope {
    fence: Option<Fence>,
    /// The lock that can be entered again. The last call that leaves it releases it.
    lock: Option<Entrance>,
    outer: Option<Arc<Scope>>,
}

struct Entrance {
    guard: Arc<Guard>,
    /// The manager: the same name in another store is another lock.
    core: Arc<Core>,
}

/// Returns the fence of the innermost lock that the calling task runs under, for code that writes to a resource which
/// checks fences, however deep it is called.
///
/// `#[lock]` and `#[gpu_lock]` set it, [`LockRequest::run`], [`LockManager::with_lock`](crate::LockManager::with_lock), and
/// `run` of pool and GPU requests. Of several members of a pool it is the highest fence.
///
/// It is an `Option`, unlike [`Guard::fence`], because code that is called from many places cannot know that it runs under
/// a lock: `None` outside of any lock, in a task that was spawned from inside one, and where the lock is
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
    CURRENT.try_with(|scope| scope.fence).ok().flatten()
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

/// Runs work under leases that the caller keeps. Cancels it, with [`Error::Lost`], when one of them is lost.
pub(crate) async fn run<T>(guards: &[&Guard], work: impl Future<Output = T>) -> Result<T, Error> {
    let lost = |(name, why)| Error::Lost { name, why };
    Scope::new(guards, None).run(guards, OnLoss::Cancel, work).await.map_err(lost)
}

/// Logs a release that failed after the work was done. It goes on in the background, and hides no result.
pub(crate) fn log_release(released: Result<bool, Error>) {
    if let Err(error) = released {
        tracing::warn!(error = %format_args!("{error:#}"), "the work is done; its lock is released in the background");
    }
}

/// A lock that was entered, and is left by [`Entered::leave`] or, in the background, by a drop.
pub(crate) struct Entered {
    guard: Arc<Guard>,
    scope: Arc<Scope>,
    /// Whether an outer call of this task holds the lock, and is cancelled with it.
    nested: bool,
}

impl Entered {
    /// Acquires the lock, or counts up where this task holds it already.
    pub(crate) async fn by(request: LockRequest, entry: Entry) -> Result<Self, Error> {
        let (core, name) = request.of()?;
        let core = core.clone();
        let outer = Scope::current();
        if entry == Entry::Again
            && let Some(mine) = outer.as_ref().and_then(|scope| scope.find(&core, name))
        {
            // The outer call is being cancelled: nothing new begins inside it.
            if let Some(why) = mine.loss() {
                return Err(cancelled_with_the_outer_call(name, why).await);
            }
            return Ok(Self::new(core, mine, true));
        }
        Ok(Self::new(core, Arc::new(request.await?), false))
    }

    /// Enters by a guard that the caller acquired.
    pub(crate) fn with(core: Arc<Core>, guard: Guard) -> Self {
        Self::new(core, Arc::new(guard), false)
    }

    fn new(core: Arc<Core>, guard: Arc<Guard>, nested: bool) -> Self {
        let scope = Scope::new(&[&guard], Some(Entrance { guard: guard.clone(), core }));
        Self { guard, scope, nested }
    }

    pub(crate) fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Runs work inside the lock.
    pub(crate) async fn work<T>(&self, on_loss: OnLoss, work: impl Future<Output = T>) -> Result<T, Error> {
        match self.scope.clone().run(&[&self.guard], on_loss, work).await {
            Ok(done) => Ok(done),
            // Only now, because the work must not be polled again.
            Err((name, why)) if self.nested => Err(cancelled_with_the_outer_call(&name, why).await),
            Err((name, why)) => Err(Error::Lost { name, why }),
        }
    }

    /// Leaves. The last call releases the lock, and waits until that is done.
    pub(crate) async fn leave(self) {
        let Self { guard, scope, .. } = self;
        drop(scope);
        let Some(guard) = Arc::into_inner(guard) else { return };
        log_release(guard.release().await);
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

impl Scope {
    fn new(guards: &[&Guard], lock: Option<Entrance>) -> Arc<Self> {
        let fence = guards.iter().filter_map(|guard| guard.try_fence()).max();
        Arc::new(Self { fence, lock, outer: Self::current() })
    }

    /// Runs work in this scope. Cancels it when a lease is lost, and returns which and why.
    async fn run<T>(
        self: Arc<Self>,
        guards: &[&Guard],
        on_loss: OnLoss,
        work: impl Future<Output = T>,
    ) -> Result<T, (LockName, LossReason)> {
        let work = CURRENT.scope(self, work);
        if on_loss == OnLoss::Continue {
            let done = work.await;
            for guard in guards {
                if let Some(why) = guard.loss() {
                    tracing::warn!(name = %guard.name(), %why, "the lease was lost while the work went on");
                }
            }
            return Ok(done);
        }
        tokio::select! {
            // Lost first: work must not take another step once the lease is over.
            biased;
            (which, why) = first_lost(guards) => Err((guards[which].name().clone(), why)),
            done = work => Ok(done),
        }
    }

    fn current() -> Option<Arc<Self>> {
        CURRENT.try_with(Arc::clone).ok()
    }

    /// The guard by which this task holds a name.
    fn find(&self, core: &Arc<Core>, name: &LockName) -> Option<Arc<Guard>> {
        match &self.lock {
            Some(lock) if Arc::ptr_eq(&lock.core, core) && lock.guard.name() == name => Some(lock.guard.clone()),
            _ => self.outer.as_ref()?.find(core, name),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::poll_fn;
    use std::task::Poll;

    use super::*;
    use crate::manager::LockManager;

    #[tokio::test]
    async fn work_finds_its_fence_and_takes_no_step_after_a_loss() {
        let locks = LockManager::connect("memory:").await.expect("a store");
        let pool = locks.pool("pool", 0..3).expect("a pool");
        let (begun, steps, steps_before) = (Cell::new(0), Cell::new(0), Cell::new(0));
        let work = async || {
            assert!(current_fence().is_some());
            begun.set(begun.get() + 1);
            poll_fn(|_| {
                steps.set(steps.get() + 1);
                Poll::<()>::Pending
            })
            .await;
        };
        let (lock, one, two, ()) = tokio::join!(
            locks.with_lock("lock", async |_| work().await),
            pool.acquire().run(async |_| work().await),
            pool.any(2).run(async |_| work().await),
            async {
                while begun.get() < 3 {
                    tokio::task::yield_now().await;
                }
                steps_before.set(steps.get());
                locks.shutdown().await;
            }
        );
        for ended in [lock, one, two] {
            assert!(matches!(ended, Err(Error::Lost { why: LossReason::Shutdown, .. })), "{ended:?}");
        }
        assert_eq!(steps.get(), steps_before.get());
    }
}
