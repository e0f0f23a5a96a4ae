//! The clock of a simulation: virtual time for everything that runs on one thread. It moves only when the simulation
//! moves it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use super::Moment;

/// The time of a timer, and its number among the timers of that time.
type TimerKey = (Moment, u64);

thread_local! {
    /// The virtual time; `None` where the thread runs in real time.
    static NOW: Cell<Option<Moment>> = const { Cell::new(None) };
    static TIMERS: RefCell<BTreeMap<TimerKey, Waker>> = const { RefCell::new(BTreeMap::new()) };
    static NEXT: Cell<u64> = const { Cell::new(0) };
}

/// Virtual time on this thread. It ends when this is dropped.
pub(crate) struct VirtualTime(());

impl VirtualTime {
    /// Starts virtual time on this thread.
    pub(crate) fn start(now: Moment) -> Self {
        assert!(NOW.get().is_none(), "virtual time runs on this thread already");
        NOW.set(Some(now));
        NEXT.set(0);
        Self(())
    }

    /// Moves the clock.
    pub(crate) fn advance(&self, to: Moment) {
        NOW.set(Some(to));
    }

    /// Returns the time of the first timer.
    pub(crate) fn first_timer(&self) -> Option<Moment> {
        TIMERS.with_borrow(|timers| timers.first_key_value().map(|((at, _), _)| *at))
    }

    /// Moves the clock to the first timer and fires it.
    pub(crate) fn fire(&self) {
        let Some(((at, _), waker)) = TIMERS.with_borrow_mut(BTreeMap::pop_first) else { return };
        self.advance(at);
        waker.wake();
    }
}

impl Drop for VirtualTime {
    fn drop(&mut self) {
        NOW.set(None);
        // Outside of the borrow: the last waker of a task drops it, and its sleeps with it.
        let timers = TIMERS.take();
        drop(timers);
    }
}

/// Returns the virtual time, if it runs on this thread.
pub(super) fn now() -> Option<Moment> {
    NOW.get()
}

/// Sleeps until a moment of virtual time.
pub(super) struct VirtualSleep {
    until: Moment,
    timer: Option<TimerKey>,
}

impl VirtualSleep {
    pub(super) fn until(until: Moment) -> Self {
        Self { until, timer: None }
    }

    fn cancel(&mut self) {
        if let Some(timer) = self.timer.take() {
            let waker = TIMERS.with_borrow_mut(|timers| timers.remove(&timer));
            drop(waker);
        }
    }
}

impl Future for VirtualSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.cancel();
        if now().is_none_or(|now| now >= self.until) {
            return Poll::Ready(());
        }
        let timer = (self.until, NEXT.replace(NEXT.get() + 1));
        TIMERS.with_borrow_mut(|timers| timers.insert(timer, cx.waker().clone()));
        self.timer = Some(timer);
        Poll::Pending
    }
}

impl Drop for VirtualSleep {
    fn drop(&mut self) {
        self.cancel();
    }
}
