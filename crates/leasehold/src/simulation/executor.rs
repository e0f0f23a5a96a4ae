//! Runs the tasks of a world one at a time, in virtual time.
//!
//! Woken tasks run in random order, some of them late, as on a busy machine. A task of a stopped process runs when the
//! process continues.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use super::random::Random;
use super::world::World;
use crate::clock::Moment;

type Work = Pin<Box<dyn Future<Output = ()>>>;
type Event = Box<dyn FnOnce(&Rc<World>)>;
type TaskId = u64;
/// The time of an event, and its number among the events of that time.
type EventKey = (Moment, u64);

/// Whether a process is running, stopped or dead.
#[derive(Debug, Default)]
pub(super) struct Life {
    pub(super) is_dead: Cell<bool>,
    pub(super) is_paused: Cell<bool>,
}

pub(super) struct Executor {
    now: Cell<Moment>,
    next: Cell<u64>,
    events: RefCell<BTreeMap<EventKey, Event>>,
    tasks: RefCell<BTreeMap<TaskId, Task>>,
    woken: Arc<Mutex<Vec<TaskId>>>,
    random: RefCell<Random>,
    /// Whether woken tasks sometimes run late.
    pub(super) lags: Cell<bool>,
    /// Events and polls so far.
    pub(super) steps: Cell<u64>,
}

struct Task {
    /// `None` while it runs.
    work: Option<Work>,
    life: Option<Rc<Life>>,
    waker: Waker,
    state: Arc<Woken>,
    /// It was woken while its process was stopped.
    stalled: bool,
}

struct Woken {
    task: TaskId,
    is_woken: AtomicBool,
    woken: Arc<Mutex<Vec<TaskId>>>,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        if !self.is_woken.swap(true, Ordering::Relaxed) {
            self.woken.lock().unwrap_or_else(PoisonError::into_inner).push(self.task);
        }
    }
}

/// A handle that aborts a task.
#[derive(Debug, Clone, Copy)]
pub(super) struct Handle(TaskId);

impl Executor {
    pub(super) fn new(random: Random) -> Self {
        Self {
            // Not at the boot of the machine: stamps of 0 mean that nothing was answered yet.
            now: Cell::new(Moment::from_boot(Duration::from_secs(1_000))),
            next: Cell::new(0),
            events: RefCell::default(),
            tasks: RefCell::default(),
            woken: Arc::default(),
            random: RefCell::new(random),
            lags: Cell::new(false),
            steps: Cell::new(0),
        }
    }

    pub(super) fn now(&self) -> Moment {
        self.now.get()
    }

    pub(super) fn at(&self, when: Moment, event: impl FnOnce(&Rc<World>) + 'static) -> EventKey {
        let key = (when.max(self.now.get()), self.fresh());
        self.events.borrow_mut().insert(key, Box::new(event));
        key
    }

    pub(super) fn spawn(&self, life: Option<Rc<Life>>, work: impl Future<Output = ()> + 'static) -> Handle {
        let id = self.fresh();
        let state = Arc::new(Woken { task: id, is_woken: AtomicBool::new(false), woken: self.woken.clone() });
        let waker = Waker::from(state.clone());
        waker.wake_by_ref();
        let task = Task { work: Some(Box::pin(work)), life, waker, state, stalled: false };
        self.tasks.borrow_mut().insert(id, task);
        Handle(id)
    }

    /// Drops a task's future, as a runtime does with one that is aborted.
    pub(super) fn abort(&self, handle: Handle) {
        let task = self.tasks.borrow_mut().remove(&handle.0);
        // Its destructors may access the tasks.
        drop(task);
    }

    /// Drops the tasks of a process that died.
    pub(super) fn drop_dead(&self) {
        let is_dead = |task: &Task| task.life.as_ref().is_some_and(|life| life.is_dead.get());
        let mut tasks = self.tasks.borrow_mut();
        let dead: Vec<TaskId> = tasks.iter().filter(|(_, task)| is_dead(task)).map(|(id, _)| *id).collect();
        let dropped: Vec<Task> = dead.into_iter().filter_map(|id| tasks.remove(&id)).collect();
        drop(tasks);
        drop(dropped);
    }

    /// Wakes the tasks that were woken while their process was stopped.
    pub(super) fn resume(&self) {
        for task in self.tasks.borrow_mut().values_mut() {
            if std::mem::take(&mut task.stalled) {
                task.waker.wake_by_ref();
            }
        }
    }

    /// Drops all tasks. They hold references to the world.
    pub(super) fn clear(&self) {
        let tasks = std::mem::take(&mut *self.tasks.borrow_mut());
        drop(tasks);
        let events = std::mem::take(&mut *self.events.borrow_mut());
        drop(events);
    }

    /// Runs a woken task or advances time to the next event. `false`: nothing is left to do before `end`.
    pub(super) fn step(&self, world: &Rc<World>, end: Moment) -> bool {
        self.steps.set(self.steps.get() + 1);
        if let Some(id) = self.take_woken() {
            self.run(id);
            return true;
        }
        let first = self.events.borrow().first_key_value().map(|(key, _)| *key);
        let Some(key) = first.filter(|(at, _)| *at <= end) else { return false };
        let event = self.events.borrow_mut().remove(&key);
        self.now.set(key.0);
        if let Some(event) = event {
            event(world);
        }
        true
    }

    fn take_woken(&self) -> Option<TaskId> {
        let mut woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        if woken.is_empty() {
            return None;
        }
        let which = self.random.borrow_mut().index(woken.len());
        Some(woken.swap_remove(which))
    }

    fn run(&self, id: TaskId) {
        let (mut work, waker) = {
            let mut tasks = self.tasks.borrow_mut();
            let Some(task) = tasks.get_mut(&id) else { return };
            if task.life.as_ref().is_some_and(|life| life.is_paused.get()) {
                task.state.is_woken.store(false, Ordering::Relaxed);
                task.stalled = true;
                return;
            }
            let mut random = self.random.borrow_mut();
            if self.lags.get() && random.one_in(12) {
                let late = self.now() + random.ms(0, 4);
                let woken = self.woken.clone();
                drop((tasks, random));
                self.at(late, move |_| woken.lock().unwrap_or_else(PoisonError::into_inner).push(id));
                return;
            }
            task.state.is_woken.store(false, Ordering::Relaxed);
            let Some(work) = task.work.take() else { return };
            (work, task.waker.clone())
        };
        let done = work.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
        let mut tasks = self.tasks.borrow_mut();
        if done {
            tasks.remove(&id);
        } else if let Some(task) = tasks.get_mut(&id) {
            task.work = Some(work);
            return;
        }
        drop(tasks);
        drop(work);
    }

    fn fresh(&self) -> u64 {
        let id = self.next.get();
        self.next.set(id + 1);
        id
    }
}

/// Sleeps until a moment; for ever without one.
pub(super) struct Sleep {
    world: Rc<World>,
    until: Option<Moment>,
    event: Option<EventKey>,
}

impl World {
    pub(super) fn now(&self) -> Moment {
        self.executor.now()
    }

    pub(super) fn sleep_until(self: &Rc<Self>, until: Option<Moment>) -> Sleep {
        Sleep { world: self.clone(), until, event: None }
    }

    pub(super) fn sleep(self: &Rc<Self>, pause: Duration) -> Sleep {
        self.sleep_until(Some(self.now() + pause))
    }

    /// Waits for a result until a moment.
    pub(super) async fn timeout<T>(self: &Rc<Self>, limit: Duration, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            done = work => Some(done),
            () = self.sleep(limit) => None,
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(until) = self.until else { return Poll::Pending };
        if self.world.now() >= until {
            return Poll::Ready(());
        }
        if let Some(event) = self.event.take() {
            self.world.executor.events.borrow_mut().remove(&event);
        }
        let waker = cx.waker().clone();
        let event = self.world.executor.at(until, move |_| waker.wake());
        self.event = Some(event);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(event) = self.event.take()
            && let Ok(mut events) = self.world.executor.events.try_borrow_mut()
        {
            events.remove(&event);
        }
    }
}
