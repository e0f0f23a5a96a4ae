//! Runs the tasks of a world one at a time, in virtual time.
//!
//! Woken tasks run in random order, some of them late, as on a busy machine. A task of a stopped process runs when the
//! process continues. Sleeps are timers of the [virtual clock](crate::clock::simulated).

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Wake, Waker};

use super::random::Random;
use super::world::World;
use crate::clock::Moment;
use crate::clock::simulated::VirtualTime;

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
    /// Something of the process has run since this was last taken.
    pub(super) has_run: Cell<bool>,
}

pub(super) struct Executor {
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
    life: Rc<Life>,
    /// Whether it sometimes runs late.
    lags: bool,
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

impl Executor {
    pub(super) fn new(random: Random) -> Self {
        Self {
            next: Cell::new(0),
            events: RefCell::default(),
            tasks: RefCell::default(),
            woken: Arc::default(),
            random: RefCell::new(random),
            lags: Cell::new(false),
            steps: Cell::new(0),
        }
    }

    pub(super) fn at(&self, when: Moment, event: impl FnOnce(&Rc<World>) + 'static) {
        let key = (when.max(Moment::now()), self.fresh());
        self.events.borrow_mut().insert(key, Box::new(event));
    }

    /// Starts a task, which runs later.
    pub(super) fn spawn(&self, life: &Rc<Life>, work: impl Future<Output = ()> + 'static) {
        let id = self.add(life, true, Box::pin(work));
        let waker = self.tasks.borrow()[&id].waker.clone();
        waker.wake();
    }

    /// Starts a task that runs now, up to its first pause, and never late.
    pub(super) fn begin(&self, life: &Rc<Life>, work: Work) {
        let id = self.add(life, false, work);
        self.run(id);
    }

    fn add(&self, life: &Rc<Life>, lags: bool, work: Work) -> TaskId {
        let id = self.fresh();
        let state = Arc::new(Woken { task: id, is_woken: AtomicBool::new(false), woken: self.woken.clone() });
        let waker = Waker::from(state.clone());
        let task = Task { work: Some(work), life: life.clone(), lags, waker, state, stalled: false };
        self.tasks.borrow_mut().insert(id, task);
        id
    }

    /// Drops the tasks of a process that died.
    pub(super) fn drop_dead(&self) {
        let is_dead = |task: &Task| task.life.is_dead.get();
        let mut tasks = self.tasks.borrow_mut();
        let dead: Vec<TaskId> = tasks.iter().filter(|(_, task)| is_dead(task)).map(|(id, _)| *id).collect();
        let dropped: Vec<Task> = dead.into_iter().filter_map(|id| tasks.remove(&id)).collect();
        drop(tasks);
        // Their destructors may access the tasks.
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
    pub(super) fn step(&self, world: &Rc<World>, time: &VirtualTime, end: Moment) -> bool {
        self.steps.set(self.steps.get() + 1);
        if let Some(id) = self.take_woken() {
            self.run(id);
            return true;
        }
        let event = self.events.borrow().first_key_value().map(|((at, _), _)| *at);
        let timer = time.first_timer();
        let first = event.into_iter().chain(timer).min();
        let Some(at) = first.filter(|at| *at <= end) else { return false };
        if timer == Some(at) {
            time.fire();
            return true;
        }
        let event = self.events.borrow_mut().pop_first();
        time.advance(at);
        if let Some((_, event)) = event {
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
            if task.life.is_paused.get() {
                task.state.is_woken.store(false, Ordering::Relaxed);
                task.stalled = true;
                return;
            }
            let mut random = self.random.borrow_mut();
            if task.lags && self.lags.get() && random.one_in(12) {
                let late = Moment::now() + random.ms(0, 4);
                let woken = self.woken.clone();
                drop((tasks, random));
                self.at(late, move |_| woken.lock().unwrap_or_else(PoisonError::into_inner).push(id));
                return;
            }
            task.state.is_woken.store(false, Ordering::Relaxed);
            task.life.has_run.set(true);
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
