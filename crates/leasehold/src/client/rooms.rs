//! The waiting rooms of a process. All its tasks that wait for one name share a room, and the room, not the task, is in
//! the store's queue: it has one token and one ticket, and only it asks and leaves. A task that gives up just gets up.
//!
//! A task that waits for some of several locks sits in the room of each, under a ticket of its own. While it is the
//! first there the room is in the queue under that ticket, and for no other task: the next task has another place in
//! the store's order, and the room takes that place when the first task is gone.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use super::attempt::{Attempt, Carried, End, Finished, Next};
use super::renewal::Record;
use super::{Context, Seen};
use crate::clock::Moment;
use crate::facts::{LockName, Owner, Token, Ttl};
use crate::rules::Rule;
use crate::store::{Acquire, Claim, Grant, Push, StoreError, Ticket};

/// A task that handed a lock to the next in line, and wants it again within this, waits in line without a try.
const CONTENDED_FOR: Duration = Duration::from_secs(1);
/// How many names are remembered for that.
const CONTENDED_KEPT: usize = 256;

/// The waiting rooms of a process. `T` is what the engine has to know of a waiting task.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Rooms<T> {
    rooms: BTreeMap<LockName, Room<T>>,
    /// When each room's timer fires.
    timers: BTreeSet<(Moment, LockName)>,
    /// Locks that this process handed on, and when.
    contended: HashMap<LockName, Moment>,
    next_seat: u64,
    closed: bool,
    out: Out<T>,
}

/// What all rooms share.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Out<T> {
    /// Every token under which this process is, or may still be, in a queue.
    tokens: BTreeMap<Token, Queued>,
    /// Messages do not arrive: rooms have to poll.
    deaf: bool,
    effects: Vec<Effect<T>>,
    /// Whether the number or the positions of the rooms changed since the store was last told.
    moved: bool,
    standing: Standing,
}

/// The state of a token that the store may grant a lock to by message. A token is entered before its first request. It is
/// removed when the lock is given to a task, or when the store has confirmed that the token left.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Queued {
    /// Waiting: a grant goes to the room of this name.
    Waits(LockName),
    /// Given up, and not yet confirmed by the store: a grant has to be passed on at once.
    Leaves,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
struct Room<T> {
    name: LockName,
    seats: VecDeque<(SeatId, Seat<T>)>,
    attempt: Option<Attempt>,
    carried: Carried,
    seen: Seen,
    /// Its entry among the timers.
    timer: Option<Moment>,
}

/// A task's place in a room.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct Seat<T> {
    pub(crate) ttl: Ttl,
    pub(crate) owner: Owner,
    /// The pause between two polls that the task asked for.
    pub(crate) retry_every: Option<Duration>,
    /// The task's own place in the store's order, drawn before. Without one the store gives the room a place when it
    /// asks.
    pub(crate) ticket: Option<Ticket>,
    pub(crate) task: T,
}

/// Names a seat within its process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SeatId(u64);

/// What the engine has to carry out, in this order.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) enum Effect<T> {
    /// Send an acquire, and pass its answer to [`Rooms::answered`].
    Ask { claim: Claim, ticket: Option<Ticket> },
    /// The lock belongs to this task.
    Give { task: T, token: Token, grant: Grant, record: Record },
    /// The task waited in vain: the store failed, or (`None`) the process shuts down.
    Fail { task: T, name: LockName, error: Option<StoreError> },
    /// Cancel the acquire that is in flight for this token, if any. Then leave the queue, until the store confirms it,
    /// and call [`Rooms::left`].
    Leave { claim: Claim, unanswered: bool },
    /// A leave that is in progress has to be sent again now.
    HurryLeave(Token),
    /// Tell the store which waiters it has to probe its messages for.
    Tell(Standing),
}

/// How many rooms wait, and what the store has to know to probe its messages for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Standing {
    pub(crate) rooms: usize,
    /// The position of the room nearest to its turn.
    pub(crate) nearest: usize,
    /// The shortest ttl that a room asks for.
    pub(crate) shortest: Option<Ttl>,
}

impl<T> Default for Rooms<T> {
    fn default() -> Self {
        let out = Out {
            tokens: BTreeMap::new(),
            deaf: false,
            effects: Vec::new(),
            moved: false,
            standing: Standing::default(),
        };
        Self {
            rooms: BTreeMap::new(),
            timers: BTreeSet::new(),
            contended: HashMap::new(),
            next_seat: 0,
            closed: false,
            out,
        }
    }
}

impl<T> Rooms<T> {
    /// A task joins the room of a name. The first one opens it.
    pub(crate) fn sit(&mut self, cx: &mut Context<'_>, name: &LockName, seat: Seat<T>) -> SeatId {
        let id = SeatId(self.next_seat);
        self.next_seat += 1;
        if self.closed {
            self.out.effects.push(Effect::Fail { task: seat.task, name: name.clone(), error: None });
            return id;
        }
        let room = self.rooms.entry(name.clone()).or_insert_with(|| Room::new(name.clone()));
        room.add(id, seat);
        self.with_room(cx, name, |room, cx, out| {
            room.seats_changed(cx, out);
            None
        });
        id
    }

    /// A task leaves its room. `None`: it had left before, or was answered.
    ///
    /// The task is returned, because dropping it may run code that uses the rooms: they have to be unlocked first.
    pub(crate) fn get_up(&mut self, cx: &mut Context<'_>, name: &LockName, id: SeatId) -> Option<T> {
        let room = self.rooms.get_mut(name)?;
        let place = room.seats.iter().position(|(seat, _)| *seat == id)?;
        let (_, seat) = room.seats.remove(place)?;
        self.with_room(cx, name, |room, cx, out| {
            room.seats_changed(cx, out);
            None
        });
        Some(seat.task)
    }

    /// A message of the store arrived. Those about leases are not for the rooms, and are ignored.
    pub(crate) fn deliver(&mut self, cx: &mut Context<'_>, push: Push) {
        match push {
            Push::Granted { token, grant } => match self.out.tokens.get(&token).cloned() {
                Some(Queued::Waits(name)) => self.with_attempt(cx, &name, &token, |room, cx, _| {
                    room.attempt.as_mut().and_then(|attempt| attempt.pushed(cx, grant))
                }),
                Some(Queued::Leaves) => self.out.effects.push(Effect::HurryLeave(token)),
                // A second copy of a grant that a task has already got.
                None => {}
            },
            Push::LookAgain { token, after } => {
                let Some(Queued::Waits(name)) = self.out.tokens.get(&token).cloned() else { return };
                self.with_attempt(cx, &name, &token, |room, cx, _| {
                    room.attempt.as_mut()?.told_to_look(cx, after);
                    None
                });
            }
            Push::Hearing(hears) => {
                self.out.deaf = !hears;
                self.with_all(cx, Room::seats_changed);
            }
            Push::Disconnected => self.with_all(cx, |room, cx, _| {
                if let Some(attempt) = &mut room.attempt {
                    attempt.disconnected(cx, &mut room.seen);
                }
            }),
            Push::Resync => {
                self.with_all(cx, |room, cx, _| {
                    if let Some(attempt) = &mut room.attempt {
                        attempt.reconnected(cx);
                    }
                });
                let leaving = self.out.tokens.iter().filter(|(_, queued)| **queued == Queued::Leaves);
                let hurried: Vec<_> = leaving.map(|(token, _)| Effect::HurryLeave(token.clone())).collect();
                self.out.effects.extend(hurried);
            }
            Push::Revoked { .. } | Push::Finish { .. } => {}
        }
    }

    /// The store answered an acquire of a room, or failed to.
    pub(crate) fn answered(&mut self, cx: &mut Context<'_>, token: &Token, answer: Result<Acquire, StoreError>) {
        let Some(Queued::Waits(name)) = self.out.tokens.get(token).cloned() else { return };
        self.with_attempt(cx, &name, token, |room, cx, out| {
            let retry_every = || shortest_retry(&room.seats);
            room.attempt.as_mut()?.answered(cx, answer, out.deaf, &retry_every, &mut room.seen)
        });
    }

    /// The store confirmed that a token left, or must have forgotten it.
    pub(crate) fn left(&mut self, token: &Token) {
        if self.out.tokens.get(token) == Some(&Queued::Leaves) {
            self.out.tokens.remove(token);
        }
    }

    /// Carries out the timers that are due.
    pub(crate) fn tick(&mut self, cx: &mut Context<'_>) {
        while let Some((at, name)) = self.timers.first().cloned() {
            if at > cx.now {
                return;
            }
            self.timers.remove(&(at, name.clone()));
            if let Some(room) = self.rooms.get_mut(&name) {
                room.timer = None;
            }
            self.with_room(cx, &name, |_, _, _| None);
        }
    }

    /// When the next timer fires.
    pub(crate) fn wakes_at(&self) -> Option<Moment> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// The process shuts down: every task is turned away, now and from now on.
    pub(crate) fn close(&mut self, cx: &mut Context<'_>) {
        self.closed = true;
        self.with_all(cx, |room, _, out| {
            for (_, seat) in room.seats.drain(..) {
                out.effects.push(Effect::Fail { task: seat.task, name: room.name.clone(), error: None });
            }
        });
    }

    /// Takes what the engine has to carry out.
    pub(crate) fn take_effects(&mut self) -> Vec<Effect<T>> {
        if std::mem::take(&mut self.out.moved) {
            let attempts = || self.rooms.values().filter_map(|room| room.attempt.as_ref());
            let standing = Standing {
                rooms: self.rooms.len(),
                nearest: attempts().map(|attempt| attempt.position).min().unwrap_or(0),
                shortest: attempts().map(|attempt| attempt.claim.ttl).min(),
            };
            if standing != self.out.standing {
                self.out.standing = standing;
                self.out.effects.push(Effect::Tell(standing));
            }
        }
        std::mem::take(&mut self.out.effects)
    }

    /// Whether tasks of this process wait for a name.
    pub(crate) fn is_open(&self, name: &LockName) -> bool {
        self.rooms.contains_key(name)
    }

    /// What is known of a lock that tasks of this process wait for, where the store has answered or failed.
    pub(crate) fn seen(&self, now: Moment, name: &LockName) -> Option<Seen> {
        let seen = &self.rooms.get(name)?.seen;
        (seen.answered || seen.is_failing(now)).then(|| seen.clone())
    }

    /// A lock that was handed over to this process is given back: others are likely to wait for it.
    pub(crate) fn handed_on(&mut self, now: Moment, name: &LockName) {
        if self.contended.len() >= CONTENDED_KEPT {
            self.contended.retain(|_, since| since.until(now) < CONTENDED_FOR);
        }
        if self.contended.len() < CONTENDED_KEPT {
            self.contended.insert(name.clone(), now);
        }
    }

    /// Whether others are likely to wait for a name. Forgets it: if nobody waits, the answer to the next request is the
    /// lock itself, and the call after that tries again.
    pub(crate) fn take_recent_contention(&mut self, now: Moment, name: &LockName) -> bool {
        self.contended.remove(name).is_some_and(|since| since.until(now) < CONTENDED_FOR)
    }

    /// Whether nothing is left behind: no room, no token, no timer.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.rooms.is_empty() && self.out.tokens.is_empty() && self.timers.is_empty()
    }

    /// Whether the store may grant a lock to this token by message.
    #[cfg(test)]
    pub(crate) fn knows(&self, token: &Token) -> bool {
        self.out.tokens.contains_key(token)
    }

    /// Whether a room waits under this token.
    #[cfg(test)]
    pub(crate) fn waits(&self, token: &Token) -> bool {
        matches!(self.out.tokens.get(token), Some(Queued::Waits(_)))
    }

    /// The tokens of attempts that await an answer (`true`), or none.
    #[cfg(test)]
    pub(crate) fn attempts(&self, asking: bool) -> impl Iterator<Item = &Token> {
        let attempts = self.rooms.values().filter_map(|room| room.attempt.as_ref());
        attempts.filter(move |attempt| attempt.may_ask() != asking).map(|attempt| &attempt.claim.token)
    }

    /// Fires the timers of all rooms now.
    #[cfg(test)]
    pub(crate) fn make_due(&mut self, cx: &mut Context<'_>) {
        self.with_all(cx, |room, cx, _| room.attempt.iter_mut().for_each(|attempt| attempt.make_due(cx.now)));
    }

    #[cfg(test)]
    pub(crate) fn visit(&mut self, visit: &mut dyn super::visit::Visit) {
        for room in self.rooms.values_mut() {
            visit.count(room.seats.len());
            visit.ticket(&mut room.carried.ticket);
            visit.flag(room.attempt.is_some());
            room.attempt.iter_mut().for_each(|attempt| attempt.visit(visit));
        }
        visit.count(self.out.tokens.len());
        let mut visited = BTreeMap::new();
        for (token, queued) in &self.out.tokens {
            let mut token = token.clone();
            visit.flag(*queued == Queued::Leaves);
            visit.token(&mut token);
            visited.insert(token, queued.clone());
        }
        self.out.tokens = visited;
    }

    fn with_all(&mut self, cx: &mut Context<'_>, mut change: impl FnMut(&mut Room<T>, &mut Context<'_>, &mut Out<T>)) {
        let names: Vec<LockName> = self.rooms.keys().cloned().collect();
        for name in names {
            self.with_room(cx, &name, |room, cx, out| {
                change(room, cx, out);
                None
            });
        }
    }

    /// An event for one token. Ignored where the room has another one by now.
    fn with_attempt(
        &mut self,
        cx: &mut Context<'_>,
        name: &LockName,
        token: &Token,
        change: impl FnOnce(&mut Room<T>, &mut Context<'_>, &mut Out<T>) -> Option<End>,
    ) {
        self.with_room(cx, name, |room, cx, out| {
            if room.attempt.as_ref().is_none_or(|attempt| attempt.claim.token != *token) {
                return None;
            }
            change(room, cx, out)
        });
    }

    /// Changes a room, carries out what follows from that, and sets its timer.
    fn with_room(
        &mut self,
        cx: &mut Context<'_>,
        name: &LockName,
        change: impl FnOnce(&mut Room<T>, &mut Context<'_>, &mut Out<T>) -> Option<End>,
    ) {
        let Some(room) = self.rooms.get_mut(name) else { return };
        let out = &mut self.out;
        let position = |room: &Room<T>| room.attempt.as_ref().map(|attempt| (attempt.position, attempt.claim.ttl));
        let before = position(room);
        if let Some(end) = change(room, cx, out) {
            room.end_attempt(cx, out, Some(end));
        }
        let waits = room.proceed(cx, out);
        out.moved |= !waits || position(room) != before;
        let timer = room.attempt.as_ref().and_then(|attempt| attempt.wakes_at(cx)).filter(|_| waits);
        if room.timer != timer {
            if let Some(old) = room.timer.take() {
                self.timers.remove(&(old, name.clone()));
            }
            if let Some(new) = timer {
                self.timers.insert((new, name.clone()));
            }
            room.timer = timer;
        }
        if !waits {
            self.rooms.remove(name);
        }
    }
}

impl<T> Room<T> {
    fn new(name: LockName) -> Self {
        Self {
            name,
            seats: VecDeque::new(),
            attempt: None,
            carried: Carried::default(),
            seen: Seen::default(),
            timer: None,
        }
    }

    /// Adds a task behind those that came before. Where both have tickets of their own, the tickets decide.
    fn add(&mut self, id: SeatId, seat: Seat<T>) {
        let later = |(_, other): &&(SeatId, Seat<T>)| {
            seat.ticket.is_some_and(|mine| other.ticket.is_some_and(|theirs| theirs > mine))
        };
        let place = self.seats.len() - self.seats.iter().rev().take_while(later).count();
        self.seats.insert(place, (id, seat));
    }

    fn seats_changed(&mut self, cx: &mut Context<'_>, out: &mut Out<T>) {
        if let Some(attempt) = &mut self.attempt {
            attempt.seats_changed(cx, out.deaf, &|| shortest_retry(&self.seats));
        }
    }

    /// Does what is due. `false`: no task is left, and the room is over.
    fn proceed(&mut self, cx: &mut Context<'_>, out: &mut Out<T>) -> bool {
        loop {
            let Some((_, first)) = self.seats.front() else {
                self.end_attempt(cx, out, None);
                return false;
            };
            // The first task has another place in the store's order than the one the attempt was made for.
            if self.attempt.as_ref().is_some_and(|attempt| attempt.own_ticket != first.ticket) {
                self.end_attempt(cx, out, None);
                continue;
            }
            let Some(attempt) = &mut self.attempt else {
                let claim = Claim {
                    name: self.name.clone(),
                    token: cx.source.token(),
                    ttl: first.ttl,
                    owner: first.owner.clone(),
                    // A queued grant always has a fence: the hand-off writes it anyway.
                    fenced: true,
                    // Where messages do not arrive, the store has to know that this waiter polls.
                    listens: cx.policy.events && !out.deaf,
                    since_ms: cx.source.wall_ms(),
                };
                out.tokens.insert(claim.token.clone(), Queued::Waits(self.name.clone()));
                let carried = std::mem::take(&mut self.carried);
                self.attempt = Some(Attempt::new(cx.now, claim, first.ticket, carried));
                continue;
            };
            match attempt.next(cx, &mut self.seen) {
                Next::Wait => return true,
                Next::Ask(ticket) => out.effects.push(Effect::Ask { claim: attempt.claim.clone(), ticket }),
                Next::End(end) => self.end_attempt(cx, out, Some(end)),
            }
        }
    }

    /// Ends the attempt, if there is one. `None`: no task needs it any more.
    fn end_attempt(&mut self, _cx: &mut Context<'_>, out: &mut Out<T>, end: Option<End>) {
        let Some(attempt) = self.attempt.take() else { return };
        let own_ticket = attempt.own_ticket;
        let finished = attempt.finish();
        self.carried = finished.carried;
        match end {
            Some(End::Granted { grant, provisional }) => {
                let given = self.give(out, &finished.claim, own_ticket, grant, provisional);
                if given {
                    // From here on the task's guard alone gives the lock back.
                    out.tokens.remove(&finished.claim.token);
                    return;
                }
                // Every task that it was for gave up before the grant arrived: the store passes it on.
                out.leave(finished);
            }
            Some(End::Failed(error)) => {
                out.leave(finished);
                for (_, seat) in self.seats.drain(..) {
                    let error = Some(error.clone());
                    out.effects.push(Effect::Fail { task: seat.task, name: self.name.clone(), error });
                }
            }
            Some(End::TokenUsedUp) | None => out.leave(finished),
        }
    }

    /// Gives the lock to the first task, if the attempt was made for its place in the store's order.
    fn give(
        &mut self,
        out: &mut Out<T>,
        claim: &Claim,
        own_ticket: Option<Ticket>,
        grant: Grant,
        provisional: bool,
    ) -> bool {
        if self.seats.front().is_none_or(|(_, first)| first.ticket != own_ticket) {
            return false;
        }
        let Some((_, seat)) = self.seats.pop_front() else { return false };
        let record = match (seat.ttl == claim.ttl && seat.owner == claim.owner, provisional) {
            (false, _) => Record::Anothers,
            (true, true) => Record::Provisional,
            (true, false) => Record::Complete,
        };
        out.effects.push(Effect::Give { task: seat.task, token: claim.token.clone(), grant, record });
        true
    }
}

/// The shortest pause between polls that a task asked for.
fn shortest_retry<T>(seats: &VecDeque<(SeatId, Seat<T>)>) -> Option<Duration> {
    seats.iter().filter_map(|(_, seat)| seat.retry_every).min()
}

impl<T> Out<T> {
    /// Gives up an attempt, unless the store never got a request of it.
    fn leave(&mut self, finished: Finished) {
        let Finished { claim, sent, unanswered, .. } = finished;
        if !sent || !Rule::GivenUpTokenLeaves.applies() {
            self.tokens.remove(&claim.token);
            return;
        }
        self.tokens.insert(claim.token.clone(), Queued::Leaves);
        self.effects.push(Effect::Leave { claim, unanswered });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::Policy;
    use crate::facts::Fence;
    use crate::store::{Holder, Place, StoreErrorKind};

    /// A process with waiting rooms, on a clock that the test moves.
    struct Process {
        rooms: Rooms<&'static str>,
        now_ms: u64,
        policy: Policy,
        may_resend: bool,
        source: Counter,
        name: LockName,
    }

    /// Tokens that count up, and no jitter.
    struct Counter(u32);

    impl crate::client::RandomSource for Counter {
        fn token(&mut self) -> Token {
            self.0 += 1;
            token(self.0)
        }
        fn byte(&mut self) -> u32 {
            0
        }
        fn wall_ms(&mut self) -> u64 {
            0
        }
    }

    fn token(number: u32) -> Token {
        Token::parse(&format!("{number:0width$}", width = Token::LEN)).expect("digits")
    }

    fn grant(fence: u64, asked_at_ms: u64) -> Grant {
        let asked_at = Moment::from_boot(Duration::from_millis(asked_at_ms));
        Grant { fence: Some(Fence::new(fence)), asked_at, lasts: Duration::from_secs(2) }
    }

    fn queued(ticket: u64, position: usize) -> Result<Acquire, StoreError> {
        Ok(Acquire::Queued(Place { ticket: Ticket(ticket), position, holder: None }))
    }

    fn queued_behind(ticket: u64, holder_fence: u64) -> Result<Acquire, StoreError> {
        let holder = Holder { fence: Some(Fence::new(holder_fence)), ..Holder::foreign(b"", None) };
        Ok(Acquire::Queued(Place { ticket: Ticket(ticket), position: 0, holder: Some(holder) }))
    }

    impl Process {
        fn new() -> Self {
            Self {
                rooms: Rooms::default(),
                now_ms: 1_000,
                policy: Policy {
                    events: true,
                    poll_interval: Duration::from_millis(10),
                    max_poll_interval: Duration::from_millis(100),
                    ask_again_within: Duration::from_secs(30),
                    patience: Duration::from_secs(10),
                },
                may_resend: true,
                source: Counter(0),
                name: LockName::new("a").expect("a name"),
            }
        }

        /// What an event leads to, in a line per effect.
        fn after<R>(
            &mut self,
            event: impl FnOnce(&mut Rooms<&'static str>, &mut Context<'_>, &LockName) -> R,
        ) -> (R, Vec<String>) {
            let mut cx = Context {
                now: Moment::from_boot(Duration::from_millis(self.now_ms)),
                policy: &self.policy,
                may_resend: self.may_resend,
                source: &mut self.source,
            };
            let result = event(&mut self.rooms, &mut cx, &self.name);
            let number = |token: &Token| token.reveal().trim_start_matches('0').to_owned();
            let line = |effect| match effect {
                Effect::Ask { claim, ticket } => {
                    format!("ask {} with {:?}", number(&claim.token), ticket.map(|Ticket(ticket)| ticket))
                }
                Effect::Give { task, token, record, .. } => format!("give {} to {task}, {record:?}", number(&token)),
                Effect::Fail { task, error, .. } => format!("fail {task}: {:?}", error.map(|error| error.kind())),
                Effect::Leave { claim, unanswered } => {
                    format!("leave {}{}", number(&claim.token), if unanswered { ", unanswered" } else { "" })
                }
                Effect::HurryLeave(token) => format!("hurry {}", number(&token)),
                Effect::Tell(standing) => format!("tell {} rooms", standing.rooms),
            };
            let lines = self.rooms.take_effects().into_iter().map(line).filter(|line| !line.starts_with("tell"));
            (result, lines.collect())
        }

        fn sit(&mut self, task: &'static str, ticket: Option<u64>) -> (SeatId, Vec<String>) {
            let ttl = Ttl::new(Duration::from_secs(30)).expect("a ttl");
            let ticket = ticket.map(Ticket);
            let seat = Seat { ttl, owner: Owner::default(), retry_every: None, ticket, task };
            self.after(|rooms, cx, name| rooms.sit(cx, name, seat))
        }

        fn answered(&mut self, number: u32, answer: Result<Acquire, StoreError>) -> Vec<String> {
            self.after(|rooms, cx, _| rooms.answered(cx, &token(number), answer)).1
        }

        fn pushed(&mut self, number: u32, grant: Grant) -> Vec<String> {
            self.after(|rooms, cx, _| rooms.deliver(cx, Push::Granted { token: token(number), grant })).1
        }

        fn get_up(&mut self, id: SeatId) -> (bool, Vec<String>) {
            self.after(|rooms, cx, name| rooms.get_up(cx, name, id).is_some())
        }
    }

    #[test]
    fn many_tasks_have_one_place_in_the_queue() {
        let mut process = Process::new();
        assert_eq!(process.sit("first", None).1, ["ask 1 with None"]);
        assert_eq!(process.sit("second", None).1, [""; 0]);
        assert_eq!(process.answered(1, queued(7, 0)), [""; 0]);
        // A grant goes to the first task, and the second gets a place of its own at once.
        assert_eq!(process.pushed(1, grant(8, 900)), ["give 1 to first, Provisional", "ask 2 with None"]);
        // A second copy of the grant changes nothing.
        assert_eq!(process.pushed(1, grant(8, 900)), [""; 0]);
        assert_eq!(process.answered(2, Ok(Acquire::Granted(grant(9, 1_000)))), ["give 2 to second, Complete"]);
        assert!(process.rooms.is_idle());
    }

    #[test]
    fn a_grant_waits_for_the_answer_to_a_request_in_flight() {
        let mut process = Process::new();
        process.sit("task", None);
        assert_eq!(process.pushed(1, grant(8, 900)), [""; 0], "the acquire could still put the token into the queue");
        assert_eq!(process.answered(1, queued_behind(7, 6)), ["give 1 to task, Provisional"]);

        // Without an answer nobody knows whether the acquire was carried out: the token is given up.
        process.sit("task", None);
        process.pushed(2, grant(9, 900));
        let lost = Err(StoreErrorKind::NoAnswer.into());
        assert_eq!(process.answered(2, lost), ["leave 2, unanswered", "ask 3 with None"]);
    }

    /// The lock was taken away from the token before its acquire was carried out, which put the token into the queue again.
    #[test]
    fn a_grant_that_is_over_when_its_token_is_queued_again_is_not_believed() {
        for answer in [queued_behind(7, 9), queued(7, 0)] {
            let mut process = Process::new();
            let seat = process.sit("task", None).0;
            process.pushed(1, grant(8, 900));
            assert_eq!(process.answered(1, answer), ["ask 1 with Some(7)"], "only the store knows");
            assert_eq!(process.answered(1, queued_behind(7, 9)), [""; 0]);
            assert_eq!(process.get_up(seat), (true, vec!["leave 1".to_owned()]), "the queue forgets the token");
        }
    }

    #[test]
    fn a_task_that_gets_up_is_dropped_outside_the_rooms() {
        let mut rooms = Rooms::default();
        let (policy, name) = (Process::new().policy, LockName::new("a").expect("a name"));
        let mut cx = Context {
            now: Moment::from_boot(Duration::ZERO),
            policy: &policy,
            may_resend: true,
            source: &mut Counter(0),
        };
        let ttl = Ttl::new(Duration::from_secs(30)).expect("a ttl");
        let task = std::rc::Rc::new(());
        let seat = Seat { ttl, owner: Owner::default(), retry_every: None, ticket: None, task: task.clone() };
        let id = rooms.sit(&mut cx, &name, seat);
        let returned = rooms.get_up(&mut cx, &name, id);
        assert_eq!(std::rc::Rc::strong_count(&task), 2, "the caller drops it");
        drop(returned);
        assert_eq!(std::rc::Rc::strong_count(&task), 1, "the rooms have kept nothing");
    }

    #[test]
    fn the_last_task_that_gets_up_leaves_the_queue() {
        let mut process = Process::new();
        let first = process.sit("first", None).0;
        let second = process.sit("second", None).0;
        process.answered(1, queued(7, 0));
        assert_eq!(process.get_up(first), (true, vec![]));
        assert_eq!(process.get_up(first), (false, vec![]), "only once");
        assert_eq!(process.get_up(second), (true, vec!["leave 1".to_owned()]));
        // A grant that crossed the leave is passed on at once.
        assert_eq!(process.pushed(1, grant(8, 900)), ["hurry 1"]);
        assert!(!process.rooms.is_idle());
        process.rooms.left(&token(1));
        assert!(process.rooms.is_idle());
        assert_eq!(process.pushed(1, grant(8, 900)), [""; 0]);
    }

    #[test]
    fn a_room_is_in_line_under_the_ticket_of_its_first_task() {
        let mut process = Process::new();
        assert_eq!(process.sit("younger", Some(20)).1, ["ask 1 with Some(20)"]);
        assert_eq!(process.sit("older", Some(10)).1, ["leave 1, unanswered", "ask 2 with Some(10)"]);
        process.answered(2, queued(10, 0));
        assert_eq!(process.pushed(2, grant(30, 900)), ["give 2 to older, Provisional", "ask 3 with Some(20)"]);
    }

    #[test]
    fn a_late_grant_is_asked_for_again() {
        let mut process = Process::new();
        process.sit("task", None);
        process.answered(1, queued(7, 0));
        process.now_ms = 10_000;
        assert_eq!(process.pushed(1, grant(8, 8_100)), ["ask 1 with Some(7)"], "less than a quarter is left");
        assert_eq!(process.answered(1, Ok(Acquire::Granted(grant(8, 9_900)))), ["give 1 to task, Complete"]);
    }

    #[test]
    fn a_lost_message_is_found_by_asking_again() {
        let mut process = Process::new();
        process.sit("task", None);
        process.answered(1, queued(7, 0));
        // Nobody is known to hold it: asked again at once.
        assert_eq!(process.rooms.wakes_at(), Some(Moment::from_boot(Duration::from_millis(1_001))));
        assert_eq!(process.after(|rooms, cx, _| rooms.tick(cx)).1, [""; 0], "not yet");
        process.now_ms = 1_001;
        assert_eq!(process.after(|rooms, cx, _| rooms.tick(cx)).1, ["ask 1 with Some(7)"]);
        assert_eq!(process.rooms.wakes_at(), None, "an answer is on its way");
    }

    #[test]
    fn an_outage_that_is_too_long_fails_every_task() {
        let mut process = Process::new();
        process.sit("first", None);
        process.sit("second", None);
        process.after(|rooms, cx, _| rooms.deliver(cx, Push::Disconnected));
        process.now_ms = 10_999;
        assert_eq!(process.after(|rooms, cx, _| rooms.tick(cx)).1, [""; 0]);
        process.now_ms = 11_000;
        let failed = ["leave 1, unanswered", "fail first: Some(Unreachable)", "fail second: Some(Unreachable)"];
        assert_eq!(process.after(|rooms, cx, _| rooms.tick(cx)).1, failed);
    }

    #[test]
    fn an_unanswered_token_is_not_used_again_where_its_request_may_still_run() {
        let mut process = Process::new();
        process.may_resend = false;
        process.sit("task", None);
        process.answered(1, queued(7, 0));
        process.now_ms = 1_001;
        process.after(|rooms, cx, _| rooms.tick(cx));
        // The next token keeps the place in the queue.
        let lost = Err(StoreErrorKind::NoAnswer.into());
        assert_eq!(process.answered(1, lost), ["leave 1, unanswered", "ask 2 with Some(7)"]);
    }

    #[test]
    fn a_shutdown_turns_every_task_away() {
        let mut process = Process::new();
        process.sit("task", None);
        process.answered(1, queued(7, 0));
        assert_eq!(process.after(|rooms, cx, _| rooms.close(cx)).1, ["fail task: None", "leave 1"]);
        assert_eq!(process.sit("late", None).1, ["fail late: None"]);
    }

    #[test]
    fn contention_is_remembered_once_and_for_a_second() {
        let mut process = Process::new();
        let at = |ms| Moment::from_boot(Duration::from_millis(ms));
        let name = process.name.clone();
        process.rooms.handed_on(at(0), &name);
        assert!(process.rooms.take_recent_contention(at(999), &name));
        assert!(!process.rooms.take_recent_contention(at(999), &name));
        process.rooms.handed_on(at(0), &name);
        assert!(!process.rooms.take_recent_contention(at(1_000), &name));
    }
}
