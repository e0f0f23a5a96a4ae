//! Carries out what the waiting rooms decide ([`Rooms`]).
//!
//! A message of the store is delivered where it was read: a grant wakes its task from there. Acquires and leaves are
//! tasks of their own, and one task fires the timers of all rooms.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::{AbortHandle, abortable};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::core::{Core, lock};
use super::held_lease::HeldLease;
use super::lease_cell::LeaseCell;
use super::leaving::{self, GivenUp};
use super::releasing::Releases;
use super::wish::Wish;
use crate::client::rooms::{Effect, Rooms, Seat, SeatId};
use crate::client::{Context, Seen};
use crate::clock::{Moment, sleep_until, timeout};
use crate::error::Error;
use crate::facts::{LockName, Token};
use crate::store::{Acquire, AcquireRequest, Operation, Push, StoreError, Ticket};

/// How long the last task of a room that timed out waits for the store to confirm that the room left the queue.
/// Otherwise the lock could still be granted, and passed on, after its call has ended.
const LEAVES_WITHIN: Duration = Duration::from_millis(100);

/// The waiting rooms of a manager, and what they have in flight.
pub(crate) struct WaitingRooms {
    core: Arc<Core>,
    releases: Arc<Releases>,
    inner: Mutex<Inner>,
    /// Wakes the timer task: a timer was set that fires before the one it sleeps for.
    timer_set: Notify,
}

#[derive(Default)]
struct Inner {
    rooms: Rooms<WaitingTask>,
    /// The acquires in flight.
    asks: HashMap<Token, AcquireInFlight>,
    /// Wakes the leaves in progress.
    leaves: HashMap<Token, Arc<Notify>>,
    /// What the timer task sleeps for.
    sleeps_until: Option<Moment>,
}

/// An acquire that was sent, or waits for a connection.
struct AcquireInFlight {
    abort: AbortHandle,
    /// Ends when the request is dropped.
    ended: oneshot::Receiver<()>,
}

/// A task that waits.
struct WaitingTask {
    wish: Wish,
    reply: Reply,
}

/// The way back to a task that waits. If the task is gone when its lease arrives, or has what it wants, dropping the
/// lease releases the lock.
pub(super) enum Reply {
    One(oneshot::Sender<Result<HeldLease, Error>>),
    /// For one of several seats of a task. The number says which.
    Some(mpsc::UnboundedSender<Arrival>, usize),
}

/// What a task that sits in several rooms receives, and from which of them.
pub(super) type Arrival = (usize, Result<HeldLease, Error>);

impl Reply {
    fn send(self, answer: Result<HeldLease, Error>) {
        match self {
            Self::One(reply) => drop(reply.send(answer)),
            Self::Some(reply, which) => drop(reply.send((which, answer))),
        }
    }
}

/// A task's seat in a waiting room. Dropping it leaves the room.
pub(super) struct Seated {
    waiting: Arc<WaitingRooms>,
    name: LockName,
    id: Option<SeatId>,
}

impl Seated {
    /// Leaves the room. If it is empty now, gives the store a moment to confirm that. `false`: the task was answered before,
    /// and its answer is there or about to be.
    pub(super) async fn leave(&mut self) -> bool {
        let Some((was_waiting, left)) = self.leave_seat() else { return false };
        if let Some(left) = left {
            let _ = timeout(LEAVES_WITHIN, left).await;
        }
        was_waiting
    }

    /// Returns what is known about the lock, if the store has answered or failed.
    pub(super) fn seen(&self) -> Option<Seen> {
        lock(&self.waiting.inner).rooms.seen(Moment::now(), &self.name)
    }

    fn leave_seat(&mut self) -> Option<(bool, Option<oneshot::Receiver<()>>)> {
        let id = self.id.take()?;
        let (task, left) = self.waiting.change(|rooms, cx| rooms.leave_seat(cx, &self.name, id));
        Some((task.is_some(), left))
    }
}

impl Drop for Seated {
    fn drop(&mut self) {
        self.leave_seat();
    }
}

impl WaitingRooms {
    pub(super) fn new(core: Arc<Core>, releases: Arc<Releases>) -> Arc<Self> {
        Arc::new(Self { core, releases, inner: Mutex::default(), timer_set: Notify::new() })
    }

    /// Takes a seat in the room of the lock that is requested.
    pub(super) fn sit(self: &Arc<Self>, wish: &Wish, ticket: Option<Ticket>, reply: Reply) -> Seated {
        let task = WaitingTask { wish: wish.clone(), reply };
        let seat = Seat { ttl: wish.ttl, owner: wish.owner.clone(), retry_every: wish.retry_every, ticket, task };
        let (id, _) = self.change(|rooms, cx| rooms.sit(cx, &wish.name, seat));
        Seated { waiting: self.clone(), name: wish.name.clone(), id: Some(id) }
    }

    /// Passes on a message of the store.
    pub(super) fn deliver(self: &Arc<Self>, push: Push) {
        self.change(|rooms, cx| rooms.deliver(cx, push));
    }

    /// Ends every wait with a shutdown error, now and from now on.
    pub(super) fn close(self: &Arc<Self>) {
        self.change(Rooms::close);
    }

    /// Whether tasks of this process wait for a name.
    pub(crate) fn is_open(&self, name: &LockName) -> bool {
        lock(&self.inner).rooms.is_open(name)
    }

    /// Whether no task waits, and no acquire or leave is in progress.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        let inner = lock(&self.inner);
        inner.rooms.is_idle() && inner.asks.is_empty() && inner.leaves.is_empty()
    }

    /// Records that a lock was released that another holder had handed over to this process.
    pub(super) fn handed_on(&self, name: &LockName) {
        lock(&self.inner).rooms.handed_on(Moment::now(), name);
    }

    /// Whether tasks of this process wait for a name, or other processes are likely to.
    pub(super) fn is_contended(&self, name: &LockName) -> bool {
        let rooms = &mut lock(&self.inner).rooms;
        rooms.is_open(name) || rooms.take_recent_contention(Moment::now(), name)
    }

    /// Changes the rooms and carries out what follows. The receiver ends when the store has answered a leave that
    /// followed.
    fn change<R>(
        self: &Arc<Self>,
        change: impl FnOnce(&mut Rooms<WaitingTask>, &mut Context<'_>) -> R,
    ) -> (R, Option<oneshot::Receiver<()>>) {
        let mut inner = lock(&self.inner);
        let changed = self.core.decide(|cx| change(&mut inner.rooms, cx));
        let mut left = None;
        let mut answers = Vec::new();
        for effect in inner.rooms.take_effects() {
            match effect {
                // Requests are begun before the rooms can change again, so that no acquire follows its leave.
                Effect::Ask { claim, ticket } => self.ask(&mut inner, claim, ticket),
                Effect::Leave { claim, unanswered } => left = Some(self.leave(&mut inner, claim, unanswered)),
                Effect::HurryLeave(token) => {
                    if let Some(wake) = inner.leaves.get(&token) {
                        wake.notify_one();
                    }
                }
                Effect::Report(standing) => {
                    self.core.store.waiting(standing.rooms, standing.nearest, standing.shortest);
                }
                Effect::Give { .. } | Effect::Fail { .. } => answers.push(effect),
            }
        }
        let wakes_at = inner.rooms.wakes_at();
        let sooner = wakes_at.is_some_and(|at| inner.sleeps_until.is_none_or(|until| at < until));
        // The manager does not shut down between the decision and its lease.
        let _call = (!answers.is_empty()).then(|| self.core.call());
        drop(inner);
        if sooner {
            self.timer_set.notify_one();
        }
        for answer in answers {
            self.answer(answer);
        }
        (changed, left)
    }

    fn ask(self: &Arc<Self>, inner: &mut Inner, claim: AcquireRequest, ticket: Option<Ticket>) {
        let token = claim.token.clone();
        let (ask, abort) = abortable(ask(self.clone(), claim, ticket));
        let (ending, ended) = oneshot::channel();
        self.core.spawn(async move {
            // Dropped after the request.
            let _ending = ending;
            let _ = ask.await;
        });
        inner.asks.insert(token, AcquireInFlight { abort, ended });
    }

    fn leave(self: &Arc<Self>, inner: &mut Inner, claim: AcquireRequest, unanswered: bool) -> oneshot::Receiver<()> {
        let in_flight = inner.asks.remove(&claim.token);
        let wake = Arc::new(Notify::new());
        inner.leaves.insert(claim.token.clone(), wake.clone());
        let (answered, left) = oneshot::channel();
        let waiting = self.clone();
        self.core.spawn(async move {
            // An acquire that is still waiting for a connection must not reach the store after the leave.
            if let Some(ask) = in_flight {
                ask.abort.abort();
                let _ = ask.ended.await;
            }
            let given_up = GivenUp { claim, queued: true, unanswered };
            leaving::leave(&waiting.core, &given_up, &wake, answered).await;
            let mut inner = lock(&waiting.inner);
            inner.leaves.remove(&given_up.claim.token);
            inner.rooms.left(&given_up.claim.token);
        });
        left
    }

    /// Answers a task that waited. Not to be called while the rooms are locked: a lease that no task takes is released
    /// here.
    fn answer(&self, answer: Effect<WaitingTask>) {
        match answer {
            Effect::Give { task, token, grant, record } => {
                let cell = LeaseCell::new(Moment::now(), task.wish, token, true, &grant, record);
                task.reply.send(Ok(HeldLease::begin(&self.releases, cell)));
            }
            Effect::Fail { task, name, error: Some(error) } => {
                // From a task of its own: this may be a thread of the store, and the observer is the user's code.
                let core = self.core.clone();
                self.core.spawn(async move {
                    task.reply.send(Err(core.store_error(Operation::Acquire, &name, error)));
                });
            }
            Effect::Fail { task, name, error: None } => task.reply.send(Err(Error::ShutDown { name })),
            Effect::Ask { .. } | Effect::Leave { .. } | Effect::HurryLeave(_) | Effect::Report(_) => {}
        }
    }
}

/// Sends an acquire, and passes its answer to the rooms.
async fn ask(waiting: Arc<WaitingRooms>, claim: AcquireRequest, ticket: Option<Ticket>) {
    let core = &waiting.core;
    let answer: Result<Acquire, StoreError> = core.within(core.store.acquire(&claim, ticket)).await;
    if let Err(error) = &answer {
        tracing::debug!(name = %claim.name, %error, "an acquire of a waiter failed");
    }
    lock(&waiting.inner).asks.remove(&claim.token);
    waiting.change(|rooms, cx| rooms.answered(cx, &claim.token, answer));
}

/// Fires the timers of all rooms until the manager ends.
pub(super) fn run_timers(waiting: Arc<WaitingRooms>, ended: CancellationToken) -> impl Future<Output = ()> {
    // If the runtime ends before the manager, even before the first poll, no task is left that answers the waiters.
    let closes = Closes(waiting);
    async move {
        let waiting = &closes.0;
        loop {
            let at = {
                let mut inner = lock(&waiting.inner);
                inner.sleeps_until = inner.rooms.wakes_at();
                inner.sleeps_until
            };
            tokio::select! {
                biased;
                () = ended.cancelled() => return,
                () = waiting.timer_set.notified() => {}
                () = sleep_until(at) => drop(waiting.change(Rooms::tick)),
            }
        }
    }
}

struct Closes(Arc<WaitingRooms>);

impl Drop for Closes {
    fn drop(&mut self) {
        self.0.close();
    }
}
