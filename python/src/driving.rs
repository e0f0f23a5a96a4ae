//! Who drives the engine: its own thread, or a Python thread that waits for it.
//!
//! Whoever drives reads the sockets and runs the tasks of all. A Python thread that waits for an answer does so
//! meanwhile: it reads the answer itself, instead of being woken up by a thread that had to be woken up first. As
//! long as Python threads keep waiting, the engine's own thread stands by. It drives again when none has waited
//! for a moment, and at once when somebody needs it who cannot drive: an event loop, or a guard that was dropped.
//!
//! Who goes on when a driver is done is tokio's business: many may call `block_on` of a runtime of one thread, and
//! one of them drives.

use std::pin::Pin;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::sync::Notify;

/// No Python thread has waited for so long: the engine's own drives again. Leases are renewed after a third of their
/// time, so even the shortest are in time; and what a program does between two locks that it takes in a loop is
/// usually less.
const STANDS_BY: Duration = Duration::from_millis(10);

/// A thread that waits looks this often whether Python has a signal for it.
const LOOK_FOR_SIGNALS: Duration = Duration::from_millis(50);

#[derive(Default)]
pub(crate) struct Driving {
    /// Another thread may have it at a fork: then it is the parent's, as all of this.
    state: Mutex<State>,
    /// The engine's thread is to look whether it should drive again.
    drive: Condvar,
    /// It is to stand by.
    stand_by: Notify,
    /// Python threads wait, and have to be told when to look for signals.
    is_waited: Notify,
    look: Notify,
}

#[derive(Default)]
struct State {
    thread: OwnThread,
    /// Python threads that wait, and when the last one has begun or ended.
    waiting: usize,
    last: Option<Instant>,
    /// What event loops have asked for and not been told yet.
    started: usize,
    /// Something else came up that nobody may have done.
    is_needed: bool,
    /// Those who wait are told when to look for signals.
    ticks: bool,
}

#[derive(Default, PartialEq, Eq)]
enum OwnThread {
    #[default]
    Drives,
    StandsBy,
    /// Until the last of those who wait is done.
    Sleeps,
}

/// A Python thread waits, for as long as this lives.
struct Waiting<'a>(&'a Driving);

/// An event loop has asked for something, for as long as this lives.
pub(crate) struct Started<'a>(&'a Driving);

impl Driving {
    /// What the engine's own thread does until the process ends.
    pub(crate) fn run(&'static self, runtime: &Runtime) {
        drop(runtime.spawn(self.tick()));
        loop {
            runtime.block_on(self.until_others_drive());
            self.until_nobody_does();
        }
    }

    /// Waits in a Python thread, without the interpreter's lock, until it is done or time to look for signals.
    pub(crate) fn wait_for<T>(&self, runtime: &Runtime, mut work: impl Future<Output = T> + Unpin) -> Poll<T> {
        if self.state().thread == OwnThread::Drives {
            // What is answered at once needs nobody to drive.
            let _entered = runtime.enter();
            let asked = Pin::new(&mut work).poll(&mut Context::from_waker(Waker::noop()));
            if asked.is_ready() {
                return asked;
            }
        }
        let _waiting = self.waiting();
        runtime.block_on(async {
            tokio::select! {
                biased;
                answer = work => Poll::Ready(answer),
                () = self.look.notified() => Poll::Pending,
            }
        })
    }

    /// To be held by what an event loop asked for, which can only wait to be told: until then the engine's own
    /// thread drives.
    pub(crate) fn started(&self) -> Started<'_> {
        self.state().started += 1;
        self.drive.notify_one();
        Started(self)
    }

    /// Something is to be done in the background, now.
    pub(crate) fn is_needed(&self) {
        let mut state = self.state();
        if state.thread != OwnThread::Drives {
            state.is_needed = true;
            self.drive.notify_one();
        }
    }

    fn waiting(&self) -> Waiting<'_> {
        let mut state = self.state();
        state.waiting += 1;
        state.last = Some(Instant::now());
        let has_to_stand_by = state.thread == OwnThread::Drives && state.started == 0;
        let ticks = std::mem::replace(&mut state.ticks, true);
        drop(state);
        if has_to_stand_by {
            self.stand_by.notify_one();
        }
        if !ticks {
            self.is_waited.notify_one();
        }
        Waiting(self)
    }

    async fn until_others_drive(&self) {
        loop {
            self.stand_by.notified().await;
            let mut state = self.state();
            // Whoever said so may be done already.
            if state.waiting > 0 && state.started == 0 {
                state.thread = OwnThread::StandsBy;
                return;
            }
        }
    }

    fn until_nobody_does(&self) {
        let mut state = self.state();
        loop {
            let left = STANDS_BY.saturating_sub(state.idle());
            state = self.drive.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            let nobody_came = state.idle() >= STANDS_BY;
            if nobody_came && state.waiting > 0 {
                state.thread = OwnThread::Sleeps;
                state = self.drive.wait_while(state, |state| state.waiting > 0).unwrap_or_else(PoisonError::into_inner);
                state.thread = OwnThread::StandsBy;
            } else if nobody_came {
                break;
            }
            if state.waiting == 0 && (state.is_needed || state.started > 0) {
                break;
            }
        }
        state.thread = OwnThread::Drives;
        state.is_needed = false;
    }

    /// Tells Python threads that wait when to look for signals.
    async fn tick(&self) {
        loop {
            self.is_waited.notified().await;
            while self.is_waited() {
                tokio::time::sleep(LOOK_FOR_SIGNALS).await;
                self.look.notify_waiters();
            }
        }
    }

    fn is_waited(&self) -> bool {
        let mut state = self.state();
        state.ticks = state.waiting > 0;
        state.ticks
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// For how long nobody has begun or ended to wait.
    fn idle(&self) -> Duration {
        self.last.map_or(Duration::MAX, |last| last.elapsed())
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.waiting -= 1;
        state.last = Some(Instant::now());
        let is_to_look = state.thread == OwnThread::Sleeps || state.is_needed || state.started > 0;
        if state.waiting == 0 && is_to_look {
            self.0.drive.notify_one();
        }
    }
}

impl Drop for Started<'_> {
    fn drop(&mut self) {
        self.0.state().started -= 1;
    }
}
