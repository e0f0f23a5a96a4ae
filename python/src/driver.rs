//! Which thread drives the runtime: the native thread, or a Python thread that waits for an answer.
//!
//! The driving thread polls the sockets and runs the tasks of all callers. A Python thread that waits for an answer drives
//! meanwhile, so it reads the answer itself instead of being woken by another thread. While Python threads keep waiting, the
//! native thread stands by. It drives again when no Python thread has waited for a moment, and at once for work whose caller
//! cannot drive: a call of an event loop, or the release of a dropped guard.
//!
//! The hand-over between Python threads is tokio's: many threads may call `block_on` of a single-threaded runtime, and one of
//! them drives.

use std::pin::Pin;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::sync::Notify;

use crate::lock;

/// The native thread drives again after no Python thread has waited for this long. It is short next to a third of the
/// shortest ttl, when renewals are due, and longer than what most programs do between two locks that they take in a loop.
const TAKE_OVER_AFTER: Duration = Duration::from_millis(10);

/// How often a waiting Python thread checks for signals.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Decides which thread drives the runtime of one process.
#[derive(Default)]
pub(crate) struct Driver {
    /// Another thread may have locked it at a fork; a child never touches its parent's driver.
    state: Mutex<DriverState>,
    /// Wakes the native thread while it stands by.
    resume: Condvar,
    /// Makes the native thread stand by.
    stand_by: Notify,
    /// Tells the task that runs `tick` that a Python thread waits.
    has_waiters: Notify,
    /// Makes the Python threads that wait check for signals.
    check_signals: Notify,
}

#[derive(Default)]
struct DriverState {
    native: NativeThread,
    /// How many Python threads wait, and when the last one started or stopped waiting.
    waiting: usize,
    last_change: Option<Instant>,
    /// How many calls run in the background.
    in_background: usize,
    /// There is other background work that no Python thread drives.
    woken: bool,
    /// The task that runs `tick` is ticking.
    ticking: bool,
}

#[derive(Default, PartialEq, Eq)]
enum NativeThread {
    #[default]
    Drives,
    StandsBy,
    /// Stands by without a timeout, until no Python thread waits.
    Sleeps,
}

/// Counts a Python thread as waiting.
struct Waiting<'a>(&'a Driver);

/// Counts a call as running in the background.
pub(crate) struct InBackground<'a>(&'a Driver);

impl Driver {
    /// Runs the native thread, which ends with the process.
    pub(crate) fn run(&'static self, runtime: &Runtime) {
        drop(runtime.spawn(self.tick()));
        loop {
            runtime.block_on(self.until_python_drives());
            self.block_until_needed();
        }
    }

    /// Drives in a Python thread, without the GIL, until the work is done or it is time to check for signals.
    pub(crate) fn wait_for<T>(&self, runtime: &Runtime, mut work: impl Future<Output = T> + Unpin) -> Poll<T> {
        if self.state().native == NativeThread::Drives {
            // Work that needs no reply, such as a lock in memory, is done in one poll, without a change of drivers.
            let _entered = runtime.enter();
            let polled = Pin::new(&mut work).poll(&mut Context::from_waker(Waker::noop()));
            if polled.is_ready() {
                return polled;
            }
        }
        let _waiting = self.waiting();
        runtime.block_on(async {
            tokio::select! {
                biased;
                answer = work => Poll::Ready(answer),
                () = self.check_signals.notified() => Poll::Pending,
            }
        })
    }

    /// Makes the native thread drive until the result is dropped.
    pub(crate) fn in_background(&self) -> InBackground<'_> {
        self.state().in_background += 1;
        self.resume.notify_one();
        InBackground(self)
    }

    /// Makes the native thread drive as soon as no Python thread does.
    pub(crate) fn wake(&self) {
        let mut state = self.state();
        if state.native != NativeThread::Drives {
            state.woken = true;
            self.resume.notify_one();
        }
    }

    fn waiting(&self) -> Waiting<'_> {
        let mut state = self.state();
        state.waiting += 1;
        state.last_change = Some(Instant::now());
        let takes_over = state.native == NativeThread::Drives && state.in_background == 0;
        let was_ticking = std::mem::replace(&mut state.ticking, true);
        drop(state);
        if takes_over {
            self.stand_by.notify_one();
        }
        if !was_ticking {
            self.has_waiters.notify_one();
        }
        Waiting(self)
    }

    async fn until_python_drives(&self) {
        loop {
            self.stand_by.notified().await;
            let mut state = self.state();
            // The thread that sent the notification may have its answer by now.
            if state.waiting > 0 && state.in_background == 0 {
                state.native = NativeThread::StandsBy;
                return;
            }
        }
    }

    /// Blocks the native thread until it has to drive.
    fn block_until_needed(&self) {
        let mut state = self.state();
        loop {
            let left = TAKE_OVER_AFTER.saturating_sub(state.idle());
            state = self.resume.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            let idle = state.idle() >= TAKE_OVER_AFTER;
            if idle && state.waiting > 0 {
                state.native = NativeThread::Sleeps;
                state =
                    self.resume.wait_while(state, |state| state.waiting > 0).unwrap_or_else(PoisonError::into_inner);
                state.native = NativeThread::StandsBy;
            } else if idle {
                break;
            }
            if state.waiting == 0 && (state.woken || state.in_background > 0) {
                break;
            }
        }
        state.native = NativeThread::Drives;
        state.woken = false;
    }

    /// Makes Python threads check for signals at regular intervals, while any waits.
    async fn tick(&self) {
        loop {
            self.has_waiters.notified().await;
            while self.keeps_ticking() {
                tokio::time::sleep(SIGNAL_CHECK_INTERVAL).await;
                self.check_signals.notify_waiters();
            }
        }
    }

    fn keeps_ticking(&self) -> bool {
        let mut state = self.state();
        state.ticking = state.waiting > 0;
        state.ticking
    }

    fn state(&self) -> MutexGuard<'_, DriverState> {
        lock(&self.state)
    }
}

impl DriverState {
    /// For how long no Python thread has started or stopped waiting.
    fn idle(&self) -> Duration {
        self.last_change.map_or(Duration::MAX, |last| last.elapsed())
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.waiting -= 1;
        state.last_change = Some(Instant::now());
        let resumes = state.native == NativeThread::Sleeps || state.woken || state.in_background > 0;
        if state.waiting == 0 && resumes {
            self.0.resume.notify_one();
        }
    }
}

impl Drop for InBackground<'_> {
    fn drop(&mut self) {
        self.0.state().in_background -= 1;
    }
}
