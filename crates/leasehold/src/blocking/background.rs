//! The thread that does what goes on in the background, and how other threads wait for an answer.

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

/// More than the steps a task may take before it has to let others run: tokio gives it 128.
const MORE_THAN_A_BUDGET: usize = 1_024;

/// A manager and the thread that runs its background tasks.
pub(super) struct Background {
    /// There until it is dropped.
    parts: Option<Parts>,
    /// Which store, for people.
    store: String,
    /// In which process the thread is.
    pid: AtomicU32,
}

struct Parts {
    locks: LockManager,
    runtime: Handle,
    /// Ends the thread, which first gives back what is still to be given back.
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
            source: StoreError::new(StoreErrorKind::Other, format!("no thread for it: {error}")),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        // Its tasks run, its sockets and timers are looked at, for as long as this waits.
        let work = move || runtime.block_on(run_until(stopped));
        let thread = std::thread::Builder::new().name("leasehold".into()).spawn(work).map_err(failed)?;
        // Should connecting fail, dropping `stop` ends the thread.
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
        self.parts.as_ref().expect("there until it is dropped")
    }

    /// Asks, and waits for the answer. `call` is not even called where nobody may wait.
    pub(super) fn ask<'a, T, F>(&'a self, call: impl FnOnce(&'a LockManager) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        self.may_wait()?;
        wait(&self.parts().runtime, call(self.locks()))
    }

    /// Whether this thread may wait for an answer, and somebody is there to give it.
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
    /// Waits until what is under way in the background is done: a program that ends now must not
    /// leave a lock behind.
    fn drop(&mut self) {
        let Some(parts) = self.parts.take() else { return };
        if self.is_forked() {
            // Nothing of it is touched: a mutex that the thread held at the fork is held for ever here.
            std::mem::forget(parts);
            return;
        }
        let Parts { locks, stop, thread, .. } = parts;
        // Ends by itself, but for a thread that has panicked.
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

/// Polls a future in this thread until it is done. Not tokio's own: that panics in a thread which
/// belongs to another runtime.
fn wait<T>(runtime: &Handle, future: impl Future<Output = T>) -> T {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    // Sockets and timers made on the way are the thread's.
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

/// Whether this thread is in the midst of a task of a tokio runtime, where waiting stops other tasks.
///
/// `Handle::try_current` does not tell: it answers in `spawn_blocking` and `block_in_place` too, where
/// waiting is right. But only a task has a budget that it can use up.
fn inside_a_task() -> bool {
    if Handle::try_current().is_err() {
        return false;
    }
    let mut taken = Vec::new();
    let mut inside = false;
    while !inside && taken.len() < MORE_THAN_A_BUDGET {
        match coop::poll_proceed(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(step) => taken.push(step),
            Poll::Pending => inside = true,
        }
    }
    // Each gives its step back, the last one first: the task has its budget again.
    while taken.pop().is_some() {}
    inside
}
