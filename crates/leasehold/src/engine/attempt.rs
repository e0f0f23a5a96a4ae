//! One attempt of a room under one token: it asks, waits for its turn, and asks again.

use std::time::Duration;

use tokio::sync::mpsc;

use super::rooms::{Knock, Room, Seen, jittered};
use super::{Core, lock};
use crate::clock::{Moment, sleep_until};
use crate::facts::Fence;
use crate::lease::Belief;
use crate::store::{Acquire, Claim, Grant, Place, Push, StoreError, StoreErrorKind, Ticket};

/// However sure the messages are: near the head of a queue ask again this often.
const ASK_EVERY: Duration = Duration::from_secs(5);
/// Waiters before this position are near the head.
const NEAR: usize = 8;
/// Each place further back adds this much to the interval, up to the longest, so that a thousand waiters are no load on
/// the store. A waiter that comes to the head is notified, and a queue outlives twice the longest interval.
const LESS_OFTEN: Duration = Duration::from_millis(500);
const ASK_AT_LEAST_EVERY: Duration = Duration::from_secs(30);
/// Those further back ask a little later after a lease has ended, so that they do not all come at once.
const PER_POSITION: Duration = Duration::from_millis(20);
/// Behind a holder that sends no message when it is done, the head of the queue asks this often.
const BEHIND_FOREIGN: Duration = Duration::from_millis(100);

/// How one attempt of a room ended.
pub(super) enum Attempt {
    /// The lock is ours. `confirm`: provisionally, by a message.
    Granted {
        grant: Grant,
        confirm: bool,
    },
    /// Everybody got up.
    Deserted,
    /// The token is used up: the room goes on with another one.
    UsedUp,
    /// The store failed for longer than our patience, or in a way that waiting does not mend.
    Failed(StoreError),
    Closed,
}

/// How an attempt ended, and what the room has to know to give it up or go on.
pub(super) struct Ended {
    pub(super) attempt: Attempt,
    /// The store may know the token.
    pub(super) sent: bool,
    /// A request was not answered, and may still be carried out.
    pub(super) unanswered: bool,
    pub(super) carried: Carried,
}

/// What a room's next attempt takes over from the one before.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Carried {
    /// The room's place in the queue, for a token that had to be replaced.
    pub(super) ticket: Option<Ticket>,
    /// When the store began to fail.
    pub(super) failing_since: Option<Moment>,
}

/// One attempt of a room: asks, waits for its turn, asks again.
pub(super) struct Waiting<'a> {
    core: &'a Core,
    room: &'a Room,
    claim: &'a Claim,
    /// That of the task it is made for, where it has one of its own.
    own_ticket: Option<Ticket>,
    ticket: Option<Ticket>,
    ask_at: Moment,
    /// Consecutive polls, for the backoff.
    polls: u32,
    /// When the store began to fail, and its last error.
    failing_since: Option<Moment>,
    failed: StoreError,
    /// When the open question was asked.
    asked_at: Option<Moment>,
    sent: bool,
    unanswered: bool,
    /// For the next attempt.
    carried: Carried,
    /// The highest fence of a grant that was read too late. Further copies of such a grant are ignored.
    stale: Option<Fence>,
    /// A grant that came by message while a question was still open.
    pushed: Option<Grant>,
    /// A message asked for a look by then; the answer to an older question does not undo it.
    look_by: Option<Moment>,
}

impl<'a> Waiting<'a> {
    pub(super) fn new(
        core: &'a Core,
        room: &'a Room,
        claim: &'a Claim,
        own_ticket: Option<Ticket>,
        carried: Carried,
    ) -> Self {
        Self {
            core,
            room,
            claim,
            own_ticket,
            ticket: own_ticket.or(carried.ticket),
            ask_at: Moment::now(),
            polls: 0,
            failing_since: carried.failing_since,
            failed: StoreErrorKind::NoAnswer.into(),
            asked_at: None,
            sent: false,
            unanswered: false,
            carried: Carried::default(),
            stale: None,
            pushed: None,
            look_by: None,
        }
    }

    pub(super) async fn wait(mut self, knocks: &mut mpsc::UnboundedReceiver<Knock>) -> Ended {
        let attempt = self.wait_for_end(knocks).await;
        if self.asked_at.take().is_some() {
            (self.sent, self.unanswered) = (true, true);
        }
        Ended { attempt, sent: self.sent, unanswered: self.unanswered, carried: self.carried }
    }

    async fn wait_for_end(&mut self, knocks: &mut mpsc::UnboundedReceiver<Knock>) -> Attempt {
        loop {
            if Moment::now() < self.ask_at {
                tokio::select! {
                    biased;
                    Some(knock) = knocks.recv() => if let Some(end) = self.knocked(knock) { return end },
                    () = sleep_until(self.patience_ends()) => return Attempt::Failed(self.failed.clone()),
                    () = sleep_until(Some(self.ask_at)) => {}
                }
                continue;
            }
            let answer = match self.ask(knocks).await {
                Ok(answer) => answer,
                Err(end) => return end,
            };
            if let Some(end) = self.answered(answer) {
                return end;
            }
        }
    }

    /// Asks once. `Err` ends the attempt.
    ///
    /// A push may overtake the answer, so both are listened to. But an attempt never ends in a grant with a question
    /// of its own still open: after a release that question would put a dead token into the queue.
    async fn ask(
        &mut self,
        knocks: &mut mpsc::UnboundedReceiver<Knock>,
    ) -> Result<Result<Acquire, StoreError>, Attempt> {
        let core = self.core;
        let asked_at = Moment::now();
        self.asked_at = Some(asked_at);
        lock(&self.room.seen).asking_since.get_or_insert(asked_at);
        let asking = core.within(core.store.acquire(self.claim, self.ticket));
        tokio::pin!(asking);
        loop {
            tokio::select! {
                biased;
                Some(knock) = knocks.recv() => match self.knocked(knock) {
                    Some(Attempt::Granted { grant, .. }) => self.pushed = Some(grant),
                    Some(end) => return Err(end),
                    None => {}
                },
                answer = &mut asking => return Ok(answer),
                () = sleep_until(self.patience_ends()) => return Err(Attempt::Failed(self.failed.clone())),
            }
        }
    }

    fn patience_ends(&self) -> Option<Moment> {
        self.failing_since.map(|since| since + self.core.options.patience)
    }

    /// Records a failure of the store that began at `since` or earlier.
    fn fails(&mut self, since: Moment, error: &StoreError) {
        lock(&self.room.seen).failed = Some(error.clone());
        self.failing_since.get_or_insert(since);
        self.failed = error.clone();
    }

    /// A knock at the door. `Some` ends the attempt.
    fn knocked(&mut self, knock: Knock) -> Option<Attempt> {
        match knock {
            Knock::Push(Push::Granted { token, grant }) if token == self.claim.token => {
                if grant.fence <= self.stale {
                    return None;
                }
                if believable(&grant) {
                    return Some(Attempt::Granted { grant, confirm: true });
                }
                // Read too late: asked for again, which proves it anew, or hands it on.
                self.stale = grant.fence;
                self.look_by(Moment::now());
            }
            Knock::Push(Push::LookAgain { token, after }) if token == self.claim.token => {
                self.look_by(Moment::now() + after);
                // Said to the first in line: however far back it was when it last asked, from now on its
                // messages are proven as often as the head's.
                self.moved_to(0);
            }
            Knock::Push(_) => {}
            Knock::Seats => {
                if self.room.deserted() {
                    return Some(Attempt::Deserted);
                }
                if self.room.stands_for_another_than(self.own_ticket) {
                    return Some(Attempt::UsedUp);
                }
                if self.polling() {
                    self.ask_at = self.ask_at.min(Moment::now() + self.poll_pause());
                }
            }
            Knock::Disconnected => {
                // Often it is the open question that showed it.
                let since = self.asked_at.unwrap_or_else(Moment::now);
                self.fails(since, &StoreErrorKind::Unreachable.into());
            }
            Knock::Resync => self.look_by(Moment::now()),
            Knock::Close => return Some(Attempt::Closed),
        }
        None
    }

    /// The store answered an acquire. `Some` ends the attempt.
    fn answered(&mut self, answer: Result<Acquire, StoreError>) -> Option<Attempt> {
        let now = Moment::now();
        let asked_at = self.asked_at.take().unwrap_or(now);
        lock(&self.room.seen).asking_since = None;
        let lost = answer.as_ref().is_err_and(|error| error.may_have_happened() && !error.was_refused());
        self.sent |= answer.as_ref().map_or_else(|error| !error.was_refused(), |_| true);
        self.unanswered |= lost;
        if let Some(grant) = self.pushed.take() {
            match &answer {
                // Asked before the grant: the grant stands.
                Ok(Acquire::Queued(_)) if believable(&grant) => {
                    return Some(Attempt::Granted { grant, confirm: true });
                }
                // Whether the question was heard is unknown: the token is given back.
                Err(_) => return Some(Attempt::UsedUp),
                Ok(_) => {
                    self.stale = self.stale.max(grant.fence);
                    self.look_by(now);
                }
            }
        }
        match answer {
            Ok(Acquire::Granted(grant)) if believable(&grant) => {
                return Some(Attempt::Granted { grant, confirm: false });
            }
            // Too slow an answer: ask again, which starts the lease anew.
            Ok(Acquire::Granted(_)) => self.ask_at = now,
            Ok(Acquire::Revoked) => return Some(Attempt::UsedUp),
            Ok(Acquire::Queued(place)) => {
                self.failing_since = None;
                self.ticket = Some(place.ticket);
                self.moved_to(place.position);
                let by_itself = now + self.pause(&place);
                self.ask_at = self.look_by.take().map_or(by_itself, |by| by.min(by_itself));
                *lock(&self.room.seen) = Seen::held_by(place.holder);
            }
            Err(error) => {
                self.fails(asked_at, &error);
                if !error.is_passing() || self.patience_ends().is_some_and(|end| now >= end) {
                    return Some(Attempt::Failed(error));
                }
                // Where the connection cannot be ended, the question may still be carried out at any later time, so its
                // token is not used again.
                if lost && !self.core.store.may_resend_try() {
                    self.carried = Carried { ticket: self.ticket, failing_since: self.failing_since };
                    return Some(Attempt::UsedUp);
                }
                tracing::debug!(name = %self.room.name, %error, "waiting goes on");
                self.ask_at = now + self.poll_pause();
            }
        }
        None
    }

    /// Where we stand now, as far as is known.
    fn moved_to(&self, position: usize) {
        let before = std::mem::replace(&mut lock(&self.room.place).0, position);
        if before != position {
            self.core.rooms.tell_store(self.core);
        }
    }

    fn look_by(&mut self, by: Moment) {
        self.look_by = Some(self.look_by.map_or(by, |old| old.min(by)));
        self.ask_at = self.ask_at.min(by);
    }

    /// How long until the next question.
    fn pause(&mut self, place: &Place) -> Duration {
        if self.polling() {
            // At the head of the queue the lock can be free any moment.
            return self.poll_pause();
        }
        self.polls = 0;
        // However short a time was set: never a busy loop.
        let at_most = self.core.options.ask_again_within.max(PER_POSITION);
        let pause = ask_again_after(place).min(at_most);
        // Those that came together do not march in step; near the head nothing is late or early.
        if place.position < NEAR { pause } else { jittered(pause) }
    }

    fn polling(&self) -> bool {
        !self.claim.listens || self.core.rooms.is_deaf()
    }

    /// Exponential backoff with jitter, never a busy loop.
    fn poll_pause(&mut self) -> Duration {
        let options = &self.core.options;
        let pause = match self.room.retry_every() {
            Some(fixed) => fixed,
            None => options.poll_interval.saturating_mul(1 << self.polls.min(16)).min(options.max_poll_interval),
        };
        self.polls = self.polls.saturating_add(1);
        // A waiter that has not asked for three seconds is passed over.
        jittered(pause.clamp(Duration::from_millis(1), Duration::from_secs(1)))
    }
}

/// How long a waiter that relies on messages waits before it asks again by itself.
fn ask_again_after(place: &Place) -> Duration {
    let behind_foreign = place.holder.as_ref().is_some_and(|h| h.foreign || h.ttl_left.is_none());
    if behind_foreign && place.position == 0 {
        return BEHIND_FOREIGN;
    }
    let back = |position: usize| u32::try_from(position).unwrap_or(u32::MAX);
    let longest = LESS_OFTEN.saturating_mul(back(place.position.saturating_sub(NEAR - 1)));
    let longest = ASK_EVERY.saturating_add(longest).min(ASK_AT_LEAST_EVERY);
    // Behind a key without expiry only the head asks often.
    let left = place.holder.as_ref().map_or(Duration::ZERO, |h| h.ttl_left.unwrap_or(longest));
    let after_end = left.saturating_add(Duration::from_millis(1));
    after_end.saturating_add(PER_POSITION.saturating_mul(back(place.position))).min(longest)
}

/// Enough of the lease is left to begin with it.
fn believable(grant: &Grant) -> bool {
    Belief::new(grant.asked_at, grant.lasts).is_valid(Moment::now() + grant.lasts / 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{HolderId, Owner};
    use crate::store::Holder;

    fn place(position: usize, ttl_left: Option<Duration>) -> Place {
        let holder = Holder {
            id: HolderId::of(b"x"),
            owner: Owner::default(),
            fence: None,
            since_ms: 0,
            ttl: ttl_left,
            ttl_left,
            revoked: false,
            foreign: false,
            listens: true,
            connected: None,
        };
        Place { ticket: Ticket(1), position, holder: Some(holder) }
    }

    #[test]
    fn those_further_back_ask_less_often() {
        let hour = Some(Duration::from_secs(3_600));
        let after = |position| ask_again_after(&place(position, hour));
        assert_eq!([0, 7, 8, 27].map(after), [5_000, 5_000, 5_500, 15_000].map(Duration::from_millis));
        assert_eq!([57, 58, 1_000, usize::MAX].map(after), [30; 4].map(Duration::from_secs));
    }

    #[test]
    fn everybody_asks_soon_after_the_end_of_a_lease() {
        let left = Some(Duration::from_secs(2));
        let after = |position| ask_again_after(&place(position, left));
        assert_eq!([0, 1, 100].map(after), [2_001, 2_021, 4_001].map(Duration::from_millis));
        let nobody = Place { holder: None, ..place(3, None) };
        assert_eq!(ask_again_after(&nobody), Duration::from_millis(61));
    }

    #[test]
    fn only_the_head_asks_often_behind_what_sends_no_message() {
        assert_eq!(ask_again_after(&place(0, None)), BEHIND_FOREIGN);
        assert_eq!(ask_again_after(&place(1, None)), ASK_EVERY);
        assert_eq!(ask_again_after(&place(500, None)), ASK_AT_LEAST_EVERY);
    }

    #[test]
    fn a_pause_is_shortened_by_a_quarter_at_most() {
        for pause in [Duration::ZERO, Duration::from_nanos(5), Duration::from_secs(30), Duration::MAX] {
            for _ in 0..200 {
                let some = jittered(pause);
                assert!(some <= pause && some >= pause / 4 * 3, "{some:?} of {pause:?}");
            }
        }
    }
}
