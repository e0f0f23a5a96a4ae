//! The thread that runs a manager's background tasks, and how other threads wait for replies.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{JoinHandle, Thread};

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::coop;

use crate::error::Error;
use crate::manager::LockManager;
use crate::options::Options;
use crate::store::open::without_secrets;
use crate::store::{StoreError, StoreErrorKind};

/// More than the budget of a tokio task, which is 128 steps.
const ABOVE_TASK_BUDGET: usize = 1_024;

/// A manager and the thread that runs its background tasks.
pub(super) struct Background {
    /// `None` only while it is dropped.
    parts: Option<Parts>,
    /// The store, without secrets.
    store: String,
    /// The process in which the thread runs.
    pid: AtomicU32,
}

struct Parts {
    locks: LockManager,
    runtime: Handle,
    /// Ends the thread after its pending releases.
    stop: oneshot::Sender<LockManager>,
    thread: JoinHandle<()>,
}

impl Background {
    pub(super) fn connect(url: &str, options: Options) -> Result<Self, Error> {
        if inside_a_task() {
            return Err(Error::InsideRuntime);
        }
        let failed = |error: std::io::Error| Error::Connect {
            store: without_secrets(url),
            source: StoreError::new(StoreErrorKind::Other, format!("the background thread cannot be started: {error}")),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        // The thread drives all tasks, sockets and timers of the runtime while it waits for `stopped`.
        let work = move || runtime.block_on(run_until(stopped));
        let thread = std::thread::Builder::new().name("leasehold".into()).spawn(work).map_err(failed)?;
        // If connecting fails, `stop` is dropped and the thread ends.
        let locks = wait(&handle, LockManager::connect_with(url, options))?;
        let store = locks.store();
        let parts = Some(Parts { locks, runtime: handle, stop, thread });
        Ok(Self { parts, store, pid: AtomicU32::new(std::process::id()) })
    }

    pub(super) fn locks(&self) -> &LockManager {
        &self.parts().locks
    }

    pub(super) fn store(&self) -> &str {
        &self.store
    }

    fn parts(&self) -> &Parts {
        self.parts.as_ref().expect("present until it is dropped")
    }

    /// Runs a call and waits for its result. `call` is not invoked if this thread must not wait.
    pub(super) fn ask<'a, T, F>(&'a self, call: impl FnOnce(&'a LockManager) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        self.may_wait()?;
        wait(&self.parts().runtime, call(self.locks()))
    }

    /// Checks that this thread may block, and that the background thread exists in this process.
    pub(super) fn may_wait(&self) -> Result<(), Error> {
        if self.is_forked() {
            return Err(Error::Connect { store: self.store.clone(), source: StoreErrorKind::Forked.into() });
        }
        if inside_a_task() { Err(Error::InsideRuntime) } else { Ok(()) }
    }

    pub(super) fn is_forked(&self) -> bool {
        std::process::id() != self.pid.load(Ordering::Relaxed)
    }

    #[cfg(any(test, feature = "test-hooks"))]
    pub(super) fn pretend_forked(&self, forked: bool) {
        let pid = std::process::id();
        self.pid.store(if forked { pid.wrapping_add(1) } else { pid }, Ordering::Relaxed);
    }
}

impl Drop for Background {
    /// Waits for the pending releases, so that a program that ends now leaves no lock behind.
    fn drop(&mut self) {
        let Some(parts) = self.parts.take() else { return };
        if self.is_forked() {
            // A mutex that the background thread held at the fork is locked for ever here, so nothing is dropped.
            std::mem::forget(parts);
            return;
        }
        let Parts { locks, stop, thread, .. } = parts;
        // Sending fails only if the thread has panicked.
        let _ = stop.send(locks);
        if thread.thread().id() != std::thread::current().id() && !inside_a_task() {
            let _ = thread.join();
        }
    }
}

async fn run_until(stopped: oneshot::Receiver<LockManager>) {
    if let Ok(locks) = stopped.await {
        locks.engine().drain(locks.core().options.request_timeout).await;
    }
}

/// Polls a future in this thread until it is done. Tokio's own `block_on` panics in a thread of another runtime.
fn wait<T>(runtime: &Handle, future: impl Future<Output = T>) -> T {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    // Sockets and timers that the future creates belong to the background runtime.
    let _entered = runtime.enter();
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(done) => return done,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Returns whether this thread is running a task of a tokio runtime. Waiting there would block other tasks.
///
/// `Handle::try_current` cannot tell: it also succeeds in `spawn_blocking` and `block_in_place`, where waiting is allowed. But
/// only a task has a limited budget.
fn inside_a_task() -> bool {
    if Handle::try_current().is_err() {
        return false;
    }
    let mut taken = Vec::new();
    let mut inside = false;
    while !inside && taken.len() < ABOVE_TASK_BUDGET {
        match coop::poll_proceed(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(step) => taken.push(step),
            Poll::Pending => inside = true,
        }
    }
    // Dropping the steps in reverse order restores the task's budget.
    while taken.pop().is_some() {}
    inside
}
