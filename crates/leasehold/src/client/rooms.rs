//! The waiting rooms of a process. All its tasks that wait for one name share a room, and the room, not the task, is in
//! the store's queue: it has one token and one ticket, and only it asks and leaves. A task that gives up only leaves its seat.
//!
//! A task that waits for some of several locks sits in the room of each, under a ticket of its own. While it is the
//! first there the room is in the queue under that ticket, and for no other task: the next task has another place in
//! the store's order, and the room takes that place when the first task is gone.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use super::attempt::End;
pub(crate) use super::room::{Effect, Seat, SeatId, Standing};
use super::room::{Out, Queued, Room, shortest_retry};
use super::{Context, Seen};
use crate::clock::Moment;
use crate::facts::{LockName, Token};
use crate::store::{Acquire, Push, StoreError};

/// A process that passed a lock on to a waiter, and wants it again within this time, waits without a try.
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
    /// What the store was last notified of.
    standing: Standing,
    out: Out<T>,
}

impl<T> Default for Rooms<T> {
    fn default() -> Self {
        Self {
            rooms: BTreeMap::new(),
            timers: BTreeSet::new(),
            contended: HashMap::new(),
            next_seat: 0,
            closed: false,
            standing: Standing::default(),
            out: Out::default(),
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
    pub(crate) fn leave_seat(&mut self, cx: &mut Context<'_>, name: &LockName, id: SeatId) -> Option<T> {
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
                    room.attempt.as_mut()?.look_again(cx, after);
                    None
                });
            }
            Push::Hearing(hears) => {
                self.out.polling = !hears;
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
            room.attempt.as_mut()?.answered(cx, answer, out.polling, &retry_every, &mut room.seen)
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

    /// The process shuts down: every wait ends, now and from now on.
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
            if standing != self.standing {
                self.standing = standing;
                self.out.effects.push(Effect::Report(standing));
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

    /// Records that a lock was released that another holder had handed over to this process: others are likely to wait.
    pub(crate) fn handed_on(&mut self, now: Moment, name: &LockName) {
        if self.contended.len() >= CONTENDED_KEPT {
            self.contended.retain(|_, since| since.until(now) < CONTENDED_FOR);
        }
        if self.contended.len() < CONTENDED_KEPT {
            self.contended.insert(name.clone(), now);
        }
    }

    /// Returns whether others are likely to wait for a name, and forgets it: without other waiters the next request is
    /// granted at once, and the call after it tries again.
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
            room.end_attempt(out, Some(end));
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

#[cfg(test)]
mod tests;
