//! One process: its waiting rooms and leases, and the code that carries out their decisions. Replaces
//! `engine/waiting.rs`.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot};

use super::coverage::Situation;
use super::executor::{Handle, Life};
use super::lease::{Guard, NewLease};
use super::leases::Leases;
use super::link::Link;
use super::random::Random;
use super::story::process_name;
use super::world::World;
use crate::client::rooms::{Effect, Rooms, Seat, SeatId};
use crate::client::{Context, Policy, RandomSource, Seen};
use crate::clock::Moment;
use crate::facts::{LockName, Owner, Token, Ttl};
use crate::machine::InboxId;
use crate::store::{AcquireRequest, Push, StoreError, Ticket};

/// The request timeout.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
const LEAVES_WITHIN: Duration = Duration::from_millis(100);

pub(super) struct Process {
    pub(super) world: Rc<World>,
    /// Its index among the processes of the world.
    pub(super) which: usize,
    /// How many times it was started before.
    pub(super) incarnation: u64,
    pub(super) life: Rc<Life>,
    pub(super) policy: Policy,
    pub(super) link: Link,
    pub(super) leases: Leases,
    waiting: RefCell<Waiting>,
    timer_set: Notify,
    source: RefCell<Tokens>,
}

#[derive(Default)]
struct Waiting {
    rooms: Rooms<Waiter>,
    /// The acquires in flight.
    asks: BTreeMap<Token, Handle>,
    /// Wakes the leaves in progress.
    leaves: BTreeMap<Token, Rc<Notify>>,
    sleeps_until: Option<Moment>,
}

/// A waiting task.
pub(super) struct Waiter {
    lease: NewLease,
    reply: SeatReply,
}

/// How to answer a waiting task.
pub(super) enum SeatReply {
    One(oneshot::Sender<Result<Guard, CallError>>),
    /// For one of several seats of a task. The number says which.
    Some(mpsc::UnboundedSender<Arrival>, usize),
}

pub(super) type Arrival = (usize, Result<Guard, CallError>);

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CallError {
    Store(StoreError),
    ShutDown,
    Lost(crate::LossReason),
}

impl SeatReply {
    fn send(self, answer: Result<Guard, CallError>) {
        match self {
            Self::One(reply) => drop(reply.send(answer)),
            Self::Some(reply, which) => drop(reply.send((which, answer))),
        }
    }
}

/// A task's request for a lock.
#[derive(Debug, Clone)]
pub(super) struct Wish {
    pub(super) name: LockName,
    pub(super) ttl: Ttl,
    pub(super) owner: Owner,
    pub(super) fenced: bool,
    pub(super) renew_every: Option<Duration>,
    pub(super) max_hold: Option<Duration>,
    pub(super) wait: Wait,
    pub(super) retry_every: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    Not,
    UpTo(Duration),
    Forever,
}

/// Tokens and jitter from the seed.
struct Tokens {
    random: Random,
    process: u64,
    next: u64,
}

impl RandomSource for Tokens {
    fn token(&mut self) -> Token {
        self.next += 1;
        let text = format!("{:04}-{:08}-{:018x}", self.process, self.next, self.random.next());
        Token::parse(&text).expect("32 characters")
    }

    fn byte(&mut self) -> u32 {
        u32::try_from(self.random.below(256)).expect("a byte")
    }

    fn wall_ms(&mut self) -> u64 {
        0
    }
}

impl Process {
    /// Starts a process.
    pub(super) fn start(world: &Rc<World>, which: usize, incarnation: u64) -> Rc<Self> {
        let number = world.incarnations.get();
        world.incarnations.set(number + 1);
        let setup = &world.plan.setup;
        let inbox = InboxId(format!("inbox-{number}").into());
        let source = Tokens { random: Random::new(setup.seed, 100 + number), process: number, next: 0 };
        let process = Rc::new(Self {
            world: world.clone(),
            which,
            incarnation,
            life: Rc::default(),
            policy: setup.policy(which),
            link: Link::new(inbox, Random::new(setup.seed, 500 + number)),
            leases: Leases::default(),
            waiting: RefCell::default(),
            timer_set: Notify::new(),
            source: RefCell::new(source),
        });
        process.spawn(process.clone().supervise());
        process.spawn(process.clone().probe());
        process.spawn(process.clone().run_timers());
        process.spawn(process.clone().run_renewals());
        process
    }

    pub(super) fn name(&self) -> String {
        process_name(self.which, self.incarnation)
    }

    pub(super) fn now(&self) -> Moment {
        self.world.now()
    }

    pub(super) fn spawn(&self, work: impl Future<Output = ()> + 'static) -> Handle {
        self.world.executor.spawn(Some(self.life.clone()), work)
    }

    pub(super) fn token(&self) -> Token {
        self.source.borrow_mut().token()
    }

    /// Makes a decision with the current time and options.
    pub(super) fn decide<R>(&self, decide: impl FnOnce(&mut Context<'_>) -> R) -> R {
        let mut cx = Context {
            now: self.now(),
            policy: &self.policy,
            may_resend: self.link.may_resend(),
            source: &mut *self.source.borrow_mut(),
        };
        decide(&mut cx)
    }

    /// Bounds a request to the store by the request timeout.
    pub(super) async fn within<T>(&self, ask: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        let answer = self.world.timeout(ANSWER_WITHIN, ask).await;
        answer.unwrap_or_else(|| Err(crate::store::StoreErrorKind::NoAnswer.into()))
    }

    pub(super) async fn timed<T>(&self, ask: impl Future<Output = T>) -> Option<T> {
        self.world.timeout(ANSWER_WITHIN, ask).await
    }

    /// Passes a push to its room or lease.
    pub(super) fn receive(self: &Rc<Self>, push: Push) {
        match push {
            Push::Revoked { token } => self.revoked(&token),
            Push::Finish { token, .. } => self.asked_to_finish(&token),
            Push::Resync => {
                self.change(|rooms, cx| rooms.deliver(cx, Push::Resync));
                self.look_at_all();
            }
            for_waiters => {
                let granted = match &for_waiters {
                    Push::Granted { token, grant } => Some((token.clone(), *grant)),
                    _ => None,
                };
                let before = granted.as_ref().map(|(token, _)| self.is_known(token));
                self.change(|rooms, cx| rooms.deliver(cx, for_waiters));
                if let (Some((token, grant)), Some(before)) = (granted, before) {
                    self.note_grant(&token, &grant, before);
                }
            }
        }
    }

    fn note_grant(&self, token: &Token, grant: &crate::store::Grant, (asks, leaves): (bool, bool)) {
        let late = !crate::lease::belief::Belief::new(self.now(), grant.asked_at, grant.lasts)
            .is_valid(self.now() + grant.lasts / 4);
        let (still_asks, still_leaves) = self.is_known(token);
        if leaves {
            self.world.saw(Situation::GrantToLeaving);
        } else if late {
            self.world.saw(Situation::LateGrant);
        } else if asks && still_asks && !still_leaves {
            self.world.saw(Situation::PushedWhileAsking);
        } else if !self.leases.knows(token) && !asks {
            self.world.saw(Situation::SecondPush);
        }
        self.world.tell(|| {
            let how = if late { ", too late" } else { "" };
            format!("{} reads that the lock was granted to {}{how}", self.name(), token.holder_id())
        });
    }

    /// Whether an acquire is in flight for a token, and whether the token is leaving.
    fn is_known(&self, token: &Token) -> (bool, bool) {
        let waiting = self.waiting.borrow();
        (waiting.asks.contains_key(token), waiting.leaves.contains_key(token))
    }

    /// Whether tasks of this process wait for a name.
    pub(super) fn is_open(&self, name: &LockName) -> bool {
        self.waiting.borrow().rooms.is_open(name)
    }

    /// A lock that was handed to this process is released again.
    pub(super) fn handed_on(&self, name: &LockName) {
        let now = self.now();
        self.waiting.borrow_mut().rooms.handed_on(now, name);
    }

    /// Whether tasks of this process wait for a name, or tasks of others probably do.
    pub(super) fn is_contended(&self, name: &LockName) -> bool {
        let now = self.now();
        let rooms = &mut self.waiting.borrow_mut().rooms;
        rooms.is_open(name) || rooms.take_recent_contention(now, name)
    }

    /// Whether nothing is left behind.
    pub(super) fn is_idle(&self) -> Result<(), String> {
        let waiting = self.waiting.borrow();
        if !waiting.rooms.is_idle() {
            return Err(format!("{} still has a waiting room", self.name()));
        }
        if !waiting.asks.is_empty() || !waiting.leaves.is_empty() {
            return Err(format!("{} still asks or leaves", self.name()));
        }
        self.leases.is_idle().map_err(|what| format!("{} {what}", self.name()))
    }

    /// Changes the rooms and carries out the result. The receiver ends when the store has answered the leave that
    /// followed, if there is one.
    pub(super) fn change<R>(
        self: &Rc<Self>,
        change: impl FnOnce(&mut Rooms<Waiter>, &mut Context<'_>) -> R,
    ) -> (R, Option<oneshot::Receiver<()>>) {
        let mut waiting = self.waiting.borrow_mut();
        let changed = self.decide(|cx| change(&mut waiting.rooms, cx));
        let mut left = None;
        let mut answers = Vec::new();
        for effect in waiting.rooms.take_effects() {
            match effect {
                Effect::Ask { claim, ticket } => {
                    let token = claim.token.clone();
                    let ask = self.spawn(self.clone().acquire_for_room(claim, ticket));
                    waiting.asks.insert(token, ask);
                }
                Effect::Leave { claim, unanswered } => left = Some(self.leave_queue(&mut waiting, claim, unanswered)),
                Effect::HurryLeave(token) => {
                    if let Some(wake) = waiting.leaves.get(&token) {
                        wake.notify_one();
                    }
                }
                Effect::Report(standing) => self.link.tell(standing),
                Effect::Give { .. } | Effect::Fail { .. } => answers.push(effect),
            }
        }
        let wakes_at = waiting.rooms.wakes_at();
        let sooner = wakes_at.is_some_and(|at| waiting.sleeps_until.is_none_or(|until| at < until));
        drop(waiting);
        if sooner {
            self.timer_set.notify_one();
        }
        for answer in answers {
            self.carry_out(answer);
        }
        (changed, left)
    }

    /// Sends an acquire, and passes its answer to the rooms.
    async fn acquire_for_room(self: Rc<Self>, claim: AcquireRequest, ticket: Option<Ticket>) {
        let answer = self.within(self.ask_acquire(&claim, ticket)).await;
        self.waiting.borrow_mut().asks.remove(&claim.token);
        self.change(|rooms, cx| rooms.answered(cx, &claim.token, answer));
    }

    fn leave_queue(
        self: &Rc<Self>,
        waiting: &mut Waiting,
        claim: AcquireRequest,
        unanswered: bool,
    ) -> oneshot::Receiver<()> {
        // An acquire that is still waiting for a connection must not reach the store after the leave.
        let in_flight = waiting.asks.remove(&claim.token);
        let wake = Rc::new(Notify::new());
        waiting.leaves.insert(claim.token.clone(), wake.clone());
        let (answered, left) = oneshot::channel();
        let process = self.clone();
        self.spawn(async move {
            if let Some(ask) = in_flight {
                process.world.executor.abort(ask);
            }
            process.clone().leave(claim.clone(), true, unanswered, &wake, answered).await;
            let mut waiting = process.waiting.borrow_mut();
            waiting.leaves.remove(&claim.token);
            waiting.rooms.left(&claim.token);
        });
        left
    }

    /// Answers a waiting task. Must not be called while the rooms are borrowed.
    fn carry_out(self: &Rc<Self>, answer: Effect<Waiter>) {
        match answer {
            Effect::Give { task, token, grant, record } => {
                let by_message = record == crate::client::renewal::Record::Provisional;
                self.world.saw(if by_message { Situation::GrantByMessage } else { Situation::GrantByReply });
                let lease = NewLease { token, waited: true, ..task.lease };
                task.reply.send(Ok(Guard::begin(self.clone(), lease, &grant, record)));
            }
            Effect::Fail { task, error: Some(error), .. } => task.reply.send(Err(CallError::Store(error))),
            Effect::Fail { task, error: None, .. } => task.reply.send(Err(CallError::ShutDown)),
            Effect::Ask { .. } | Effect::Leave { .. } | Effect::HurryLeave(_) | Effect::Report(_) => {}
        }
    }

    /// Fires the timers of all rooms.
    async fn run_timers(self: Rc<Self>) {
        loop {
            let at = {
                let mut waiting = self.waiting.borrow_mut();
                waiting.sleeps_until = waiting.rooms.wakes_at();
                waiting.sleeps_until
            };
            tokio::select! {
                biased;
                () = self.timer_set.notified() => {}
                () = self.world.sleep_until(at) => drop(self.change(Rooms::tick)),
            }
        }
    }
}

/// A task's seat in a waiting room. Dropping it leaves the room.
pub(super) struct Seated {
    process: Rc<Process>,
    name: LockName,
    id: Option<SeatId>,
}

impl Seated {
    pub(super) fn sit(process: &Rc<Process>, wish: &Wish, ticket: Option<Ticket>, reply: SeatReply) -> Self {
        let waiter = Waiter { lease: wish.lease(process.token()), reply };
        let seat =
            Seat { ttl: wish.ttl, owner: wish.owner.clone(), retry_every: wish.retry_every, ticket, task: waiter };
        if process.is_open(&wish.name) {
            process.world.saw(Situation::TwoTasksInRoom);
        }
        let (id, _) = process.change(|rooms, cx| rooms.sit(cx, &wish.name, seat));
        Self { process: process.clone(), name: wish.name.clone(), id: Some(id) }
    }

    /// Leaves the room, and waits briefly for the store's confirmation. `false`: the task was answered before.
    pub(super) async fn leave(&mut self) -> bool {
        let Some((was_waiting, left)) = self.leave_seat() else { return false };
        if let Some(left) = left {
            let _ = self.process.world.timeout(LEAVES_WITHIN, left).await;
        }
        was_waiting
    }

    /// What is known about the lock.
    pub(super) fn seen(&self) -> Option<Seen> {
        let now = self.process.now();
        self.process.waiting.borrow().rooms.seen(now, &self.name)
    }

    fn leave_seat(&mut self) -> Option<(bool, Option<oneshot::Receiver<()>>)> {
        let id = self.id.take()?;
        let (task, left) = self.process.change(|rooms, cx| rooms.leave_seat(cx, &self.name, id));
        Some((task.is_some(), left))
    }
}

impl Drop for Seated {
    fn drop(&mut self) {
        if !self.process.life.is_dead.get() {
            self.leave_seat();
        }
    }
}
