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

use super::acquiring::Wish;
use super::environment::Environment;
use super::lease_cell::NewLease;
use super::leaving::GivenUp;
use super::{Core, EngineHandle, lock};
use crate::client::rooms::{Effect, Rooms, Seat, SeatId};
use crate::client::{Context, RandomSource, Seen};
use crate::clock::{Moment, sleep_until, timeout, wall_ms};
use crate::engine::guard::Guard;
use crate::error::Error;
use crate::facts::{LockName, Token};
use crate::store::{Acquire, Claim, Operation, Push, StoreError, Ticket};

/// A task whose time is over, and that was the last of its room, waits at most this long until the store has confirmed
/// that the room left the queue. Otherwise the lock could still be granted, and passed on, after its call has ended.
const LEAVES_WITHIN: Duration = Duration::from_millis(100);

/// The waiting rooms of a manager, and what they have in flight.
#[derive(Default)]
pub(crate) struct WaitingRooms {
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
pub(crate) struct WaitingTask {
    engine: Arc<EngineHandle>,
    lease: NewLease,
    reply: Reply,
}

/// The way back to a task that waits. The guard itself is sent: if the task is gone when it arrives, or has what it
/// wants, dropping the guard gives the lock back.
pub(crate) enum Reply {
    One(oneshot::Sender<Result<Guard, Error>>),
    /// For one of several seats of a task. The number says which.
    Some(mpsc::UnboundedSender<Arrival>, usize),
}

/// What a task that sits in several rooms receives, and from which of them.
pub(crate) type Arrival = (usize, Result<Guard, Error>);

impl Reply {
    fn send(self, answer: Result<Guard, Error>) {
        match self {
            Self::One(reply) => drop(reply.send(answer)),
            Self::Some(reply, which) => drop(reply.send((which, answer))),
        }
    }
}

/// A task's seat in a waiting room. Dropped, the task gets up.
pub(crate) struct Seated {
    core: Arc<Core>,
    name: LockName,
    id: Option<SeatId>,
}

impl Seated {
    /// Gets up, and gives the store a moment to confirm it where the room is empty now. `false`: the task was answered
    /// before, and its answer is there or about to be.
    pub(crate) async fn leave(&mut self) -> bool {
        let Some((was_waiting, left)) = self.get_up() else { return false };
        if let Some(left) = left {
            let _ = timeout(LEAVES_WITHIN, left).await;
        }
        was_waiting
    }

    /// What is known of the lock, where the store has answered or failed.
    pub(crate) fn seen(&self) -> Option<Seen> {
        lock(&self.core.waiting.inner).rooms.seen(Moment::now(), &self.name)
    }

    fn get_up(&mut self) -> Option<(bool, Option<oneshot::Receiver<()>>)> {
        let id = self.id.take()?;
        let (task, left) = self.core.waiting.change(&self.core, |rooms, cx| rooms.get_up(cx, &self.name, id));
        Some((task.is_some(), left))
    }
}

impl Drop for Seated {
    fn drop(&mut self) {
        self.get_up();
    }
}

impl WaitingRooms {
    /// Sits down in the room of the name that is wished for.
    pub(crate) fn sit(&self, engine: &Arc<EngineHandle>, wish: &Wish, ticket: Option<Ticket>, reply: Reply) -> Seated {
        let waiter = WaitingTask { engine: engine.clone(), lease: wish.lease(engine.core.environment.token()), reply };
        let seat =
            Seat { ttl: wish.ttl, owner: wish.owner.clone(), retry_every: wish.retry_every, ticket, task: waiter };
        let core = engine.core.clone();
        let (id, _) = self.change(&core, |rooms, cx| rooms.sit(cx, &wish.name, seat));
        Seated { core, name: wish.name.clone(), id: Some(id) }
    }

    /// Passes on a message of the store.
    pub(crate) fn deliver(&self, core: &Arc<Core>, push: Push) {
        self.change(core, |rooms, cx| rooms.deliver(cx, push));
    }

    /// Turns every waiting task away, now and from now on.
    pub(crate) fn close(&self, core: &Arc<Core>) {
        self.change(core, Rooms::close);
    }

    /// Whether tasks of this process wait for a name.
    pub(crate) fn is_open(&self, name: &LockName) -> bool {
        lock(&self.inner).rooms.is_open(name)
    }

    /// A lock that was handed over to this process is given back.
    pub(crate) fn handed_on(&self, name: &LockName) {
        lock(&self.inner).rooms.handed_on(Moment::now(), name);
    }

    /// Whether tasks of this process wait for a name, or others are likely to.
    pub(crate) fn is_contended(&self, name: &LockName) -> bool {
        let rooms = &mut lock(&self.inner).rooms;
        rooms.is_open(name) || rooms.take_recent_contention(Moment::now(), name)
    }

    /// Changes the rooms and carries out what follows. The receiver ends when the store has answered a leave that
    /// followed.
    fn change<R>(
        &self,
        core: &Arc<Core>,
        change: impl FnOnce(&mut Rooms<WaitingTask>, &mut Context<'_>) -> R,
    ) -> (R, Option<oneshot::Receiver<()>>) {
        let mut inner = lock(&self.inner);
        let changed = core.decide(|cx| change(&mut inner.rooms, cx));
        let mut left = None;
        let mut answers = Vec::new();
        for effect in inner.rooms.take_effects() {
            match effect {
                // Requests are begun before the rooms can change again, so that no acquire follows its leave.
                Effect::Ask { claim, ticket } => inner.ask(core, claim, ticket),
                Effect::Leave { claim, unanswered } => left = Some(inner.leave(core, claim, unanswered)),
                Effect::HurryLeave(token) => {
                    if let Some(wake) = inner.leaves.get(&token) {
                        wake.notify_one();
                    }
                }
                Effect::Tell(standing) => core.store.waiting(standing.rooms, standing.nearest, standing.shortest),
                Effect::Give { .. } | Effect::Fail { .. } => answers.push(effect),
            }
        }
        let wakes_at = inner.rooms.wakes_at();
        let sooner = wakes_at.is_some_and(|at| inner.sleeps_until.is_none_or(|until| at < until));
        // The manager does not shut down between the decision and its guard.
        let _call = (!answers.is_empty()).then(|| core.call());
        drop(inner);
        if sooner {
            self.timer_set.notify_one();
        }
        for answer in answers {
            carry_out(core, answer);
        }
        (changed, left)
    }
}

impl Inner {
    fn ask(&mut self, core: &Arc<Core>, claim: Claim, ticket: Option<Ticket>) {
        let token = claim.token.clone();
        let (ask, abort) = abortable(ask(core.clone(), claim, ticket));
        let (ending, ended) = oneshot::channel();
        core.spawn(async move {
            // Dropped after the request.
            let _ending = ending;
            let _ = ask.await;
        });
        self.asks.insert(token, AcquireInFlight { abort, ended });
    }

    fn leave(&mut self, core: &Arc<Core>, claim: Claim, unanswered: bool) -> oneshot::Receiver<()> {
        let in_flight = self.asks.remove(&claim.token);
        let wake = Arc::new(Notify::new());
        self.leaves.insert(claim.token.clone(), wake.clone());
        let (answered, left) = oneshot::channel();
        let leaving = core.clone();
        core.spawn(async move {
            // An acquire that is still waiting for a connection must not reach the store after the leave.
            if let Some(ask) = in_flight {
                ask.abort.abort();
                let _ = ask.ended.await;
            }
            leaving.leave(&GivenUp { claim: claim.clone(), queued: true, unanswered }, &wake, answered).await;
            let mut inner = lock(&leaving.waiting.inner);
            inner.leaves.remove(&claim.token);
            inner.rooms.left(&claim.token);
        });
        left
    }
}

/// Sends an acquire, and passes its answer to the rooms.
async fn ask(core: Arc<Core>, claim: Claim, ticket: Option<Ticket>) {
    let answer: Result<Acquire, StoreError> = core.within(core.store.acquire(&claim, ticket)).await;
    if let Err(error) = &answer {
        tracing::debug!(name = %claim.name, %error, "an acquire of a waiter failed");
    }
    lock(&core.waiting.inner).asks.remove(&claim.token);
    core.waiting.change(&core, |rooms, cx| rooms.answered(cx, &claim.token, answer));
}

/// Answers a task that waited. Not to be called while the rooms are locked: a guard that nobody takes is dropped here,
/// and an observer may be called.
fn carry_out(core: &Core, answer: Effect<WaitingTask>) {
    match answer {
        Effect::Give { task, token, grant, record } => {
            let lease = NewLease { token, waited: true, ..task.lease };
            task.reply.send(Ok(Guard::begin(task.engine, lease, &grant, record)));
        }
        Effect::Fail { task, name, error: Some(error) } => {
            task.reply.send(Err(core.store_error(Operation::Acquire, &name, error)));
        }
        Effect::Fail { task, name, error: None } => task.reply.send(Err(Error::ShutDown { name })),
        Effect::Ask { .. } | Effect::Leave { .. } | Effect::HurryLeave(_) | Effect::Tell(_) => {}
    }
}

/// Fires the timers of all rooms until the manager ends.
pub(crate) fn run_timers(core: Arc<Core>, ended: CancellationToken) -> impl Future<Output = ()> {
    // If the runtime ends before the manager, even before the first poll, no task is left that answers the waiters.
    let closes = Closes(core.clone());
    async move {
        let _closes = closes;
        loop {
            let at = {
                let mut inner = lock(&core.waiting.inner);
                inner.sleeps_until = inner.rooms.wakes_at();
                inner.sleeps_until
            };
            tokio::select! {
                biased;
                () = ended.cancelled() => return,
                () = core.waiting.timer_set.notified() => {}
                () = sleep_until(at) => drop(core.waiting.change(&core, Rooms::tick)),
            }
        }
    }
}

struct Closes(Arc<Core>);

impl Drop for Closes {
    fn drop(&mut self) {
        self.0.waiting.close(&self.0);
    }
}

impl Core {
    /// Lets a decision be made, with the time and the options as they are now.
    pub(super) fn decide<R>(&self, decide: impl FnOnce(&mut Context<'_>) -> R) -> R {
        let mut cx = Context {
            now: Moment::now(),
            policy: &self.policy,
            may_resend: self.store.may_resend_try(),
            source: &mut &self.environment,
        };
        decide(&mut cx)
    }
}

impl RandomSource for &Environment {
    fn token(&mut self) -> Token {
        Environment::token(self)
    }

    fn byte(&mut self) -> u32 {
        Environment::byte(self)
    }

    fn wall_ms(&mut self) -> u64 {
        wall_ms()
    }
}
