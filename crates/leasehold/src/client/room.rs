//! The waiting room of one name: its tasks, and the attempt that represents them in the store's queue.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::attempt::{Attempt, Carried, End, Finished, Next};
use super::renewal::Record;
use super::{Context, Seen};
use crate::clock::Moment;
use crate::facts::{LockName, Owner, Token, Ttl};
use crate::rules::Rule;
use crate::store::{AcquireRequest, Grant, StoreError, Ticket};

/// The waiting room of one name.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Room<T> {
    pub(super) name: LockName,
    pub(super) seats: VecDeque<(SeatId, Seat<T>)>,
    pub(super) attempt: Option<Attempt>,
    pub(super) carried: Carried,
    pub(super) seen: Seen,
    /// Its entry among the timers.
    pub(super) timer: Option<Moment>,
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
pub(crate) struct SeatId(pub(super) u64);

/// What all rooms share.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Out<T> {
    /// Every token under which this process is, or may still be, in a queue.
    pub(super) tokens: BTreeMap<Token, Queued>,
    /// Messages do not arrive, so rooms have to poll.
    pub(super) polling: bool,
    pub(super) effects: Vec<Effect<T>>,
    /// Whether the number or the positions of the rooms changed since the store was last notified.
    pub(super) moved: bool,
}

/// The state of a token that the store may grant a lock to by message. A token is entered before its first request. It is
/// removed when the lock is given to a task, or when the store has confirmed that the token left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Queued {
    /// Waiting: a grant goes to the room of this name.
    Waits(LockName),
    /// Given up, and not yet confirmed by the store: a grant has to be passed on at once.
    Leaves,
}

/// What the engine has to carry out, in this order.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) enum Effect<T> {
    /// Send an acquire, and pass its answer to `Rooms::answered`.
    Ask { claim: AcquireRequest, ticket: Option<Ticket> },
    /// The lock belongs to this task.
    Give { task: T, token: Token, grant: Grant, record: Record },
    /// The task did not get the lock: the store failed, or (`None`) the process shuts down.
    Fail { task: T, name: LockName, error: Option<StoreError> },
    /// Cancel the acquire that is in flight for this token, if any. Then leave the queue, until the store confirms it,
    /// and call `Rooms::left`.
    Leave { claim: AcquireRequest, unanswered: bool },
    /// A leave that is in progress has to be sent again now.
    HurryLeave(Token),
    /// Report to the store which waiters need push probes.
    Report(Standing),
}

/// How many rooms wait, and what the store has to know to probe its messages for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Standing {
    pub(crate) rooms: usize,
    /// The best queue position of all rooms.
    pub(crate) nearest: usize,
    /// The shortest ttl that a room asks for.
    pub(crate) shortest: Option<Ttl>,
}

impl<T> Room<T> {
    pub(super) fn new(name: LockName) -> Self {
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
    pub(super) fn add(&mut self, id: SeatId, seat: Seat<T>) {
        let later = |(_, other): &&(SeatId, Seat<T>)| {
            seat.ticket.is_some_and(|mine| other.ticket.is_some_and(|theirs| theirs > mine))
        };
        let place = self.seats.len() - self.seats.iter().rev().take_while(later).count();
        self.seats.insert(place, (id, seat));
    }

    pub(super) fn seats_changed(&mut self, cx: &mut Context<'_>, out: &mut Out<T>) {
        if let Some(attempt) = &mut self.attempt {
            attempt.seats_changed(cx, out.polling, &|| shortest_retry(&self.seats));
        }
    }

    /// Does what is due. `false`: no task is left, and the room is over.
    pub(super) fn proceed(&mut self, cx: &mut Context<'_>, out: &mut Out<T>) -> bool {
        loop {
            let Some((_, first)) = self.seats.front() else {
                self.end_attempt(out, None);
                return false;
            };
            // The first task has another place in the store's order than the one the attempt was made for.
            if self.attempt.as_ref().is_some_and(|attempt| attempt.own_ticket != first.ticket) {
                self.end_attempt(out, None);
                continue;
            }
            let Some(attempt) = &mut self.attempt else {
                let claim = AcquireRequest {
                    name: self.name.clone(),
                    token: cx.source.token(),
                    ttl: first.ttl,
                    owner: first.owner.clone(),
                    // A queued grant always has a fence: the hand-off writes it anyway.
                    fenced: true,
                    // Where messages do not arrive, the store has to know that this waiter polls.
                    listens: cx.policy.events && !out.polling,
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
                Next::End(end) => self.end_attempt(out, Some(end)),
            }
        }
    }

    /// Ends the attempt, if there is one. `None`: no task needs it any more.
    pub(super) fn end_attempt(&mut self, out: &mut Out<T>, end: Option<End>) {
        let Some(attempt) = self.attempt.take() else { return };
        let own_ticket = attempt.own_ticket;
        let finished = attempt.finish();
        self.carried = finished.carried;
        match end {
            Some(End::Granted { grant, provisional }) => {
                let given = self.give(out, &finished.claim, own_ticket, grant, provisional);
                if given {
                    // From here on only the task's guard releases the lock.
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
        claim: &AcquireRequest,
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
pub(super) fn shortest_retry<T>(seats: &VecDeque<(SeatId, Seat<T>)>) -> Option<Duration> {
    seats.iter().filter_map(|(_, seat)| seat.retry_every).min()
}

impl<T> Default for Out<T> {
    fn default() -> Self {
        Self { tokens: BTreeMap::new(), polling: false, effects: Vec::new(), moved: false }
    }
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
