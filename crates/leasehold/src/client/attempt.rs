//! One token in a queue: when to ask the store, and what a reply, a push or a timer means.

use std::time::Duration;

use super::{Context, Seen, may_still_run};
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::facts::Fence;
use crate::lease::belief::Belief;
use crate::rules::Rule;
use crate::store::{Acquire, AcquireRequest, Grant, Place, StoreError, StoreErrorKind, Ticket};

/// Near the head of a queue a waiter asks again at least this often, however reliable the messages are.
const ASK_EVERY: Duration = Duration::from_secs(5);
/// Waiters before this position are near the head.
const NEAR: usize = 8;
/// Each place further back adds this much to the interval, up to the longest, so that a thousand waiters are no load on
/// the store. A waiter that comes to the head is notified, and a queue outlives twice the longest interval.
const LESS_OFTEN: Duration = Duration::from_millis(500);
const ASK_AT_LEAST_EVERY: Duration = Duration::from_secs(30);
/// Waiters further back ask a little later after a lease has ended, so that they do not all ask at once.
const PER_POSITION: Duration = Duration::from_millis(20);
/// Behind a holder that sends no message when it is done, the head of the queue asks this often.
const BEHIND_FOREIGN: Duration = Duration::from_millis(100);

/// Finds the shortest pause between polls that a task of the room asked for. A function, because it looks at every seat
/// and only a room that polls needs it.
type RetryEvery<'a> = &'a dyn Fn() -> Option<Duration>;

/// What a room does next about its attempt.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Wait for an event or for [`Attempt::wakes_at`].
    Wait,
    /// Send an acquire with this ticket now.
    Ask(Option<Ticket>),
    /// The attempt is over.
    End(End),
}

/// How an attempt ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The lock is ours. `provisional`: it was granted by a message, and has to be confirmed.
    Granted { grant: Grant, provisional: bool },
    /// The token cannot be used any more. The room goes on with another one.
    TokenUsedUp,
    /// The store failed for longer than the policy allows, or in a way that waiting does not repair.
    Failed(StoreError),
}

/// What a room's next attempt takes over from the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct Carried {
    /// The room's place in the queue, for a token that had to be replaced.
    pub(crate) ticket: Option<Ticket>,
    /// When the store began to fail.
    pub(crate) failing_since: Option<Moment>,
}

/// One attempt of a waiting room to get its lock, under one token.
#[derive(Debug, Clone)]
pub(crate) struct Attempt {
    pub(crate) claim: AcquireRequest,
    /// The ticket of the task that the attempt is made for, where that task has one of its own.
    pub(crate) own_ticket: Option<Ticket>,
    ticket: Option<Ticket>,
    /// Position in the queue, as far as is known.
    pub(crate) position: usize,
    ask_at: Moment,
    /// When the request in flight was sent.
    asked_at: Option<Moment>,
    /// Consecutive polls, for the backoff.
    polls: u32,
    failing_since: Option<Moment>,
    last_error: StoreError,
    /// The store may know the token.
    sent: bool,
    /// A request was not answered, and may still be carried out.
    unanswered: bool,
    carried: Carried,
    /// The highest fence of a grant that was read too late. Further copies of such a grant are ignored.
    stale: Option<Fence>,
    /// A grant that came by message while a request was in flight.
    pushed: Option<Grant>,
    /// A message asked for another request by then. The answer to an older request does not cancel it.
    look_by: Option<Moment>,
}

impl Attempt {
    pub(crate) fn new(now: Moment, claim: AcquireRequest, own_ticket: Option<Ticket>, carried: Carried) -> Self {
        Self {
            claim,
            own_ticket,
            ticket: own_ticket.or(carried.ticket),
            position: 0,
            ask_at: now,
            asked_at: None,
            polls: 0,
            failing_since: carried.failing_since,
            last_error: StoreErrorKind::NoAnswer.into(),
            sent: false,
            unanswered: false,
            carried: Carried::default(),
            stale: None,
            pushed: None,
            look_by: None,
        }
    }

    /// When a timer has to fire, unless an event comes first.
    pub(crate) fn wakes_at(&self, cx: &Context<'_>) -> Option<Moment> {
        let ask_at = self.asked_at.is_none().then_some(self.ask_at);
        self.gives_up_at(cx).into_iter().chain(ask_at).min()
    }

    /// Sends what is due. To be called after every event, and when the timer fires.
    pub(crate) fn next(&mut self, cx: &Context<'_>, seen: &mut Seen) -> Next {
        if self.gives_up_at(cx).is_some_and(|end| cx.now >= end) {
            return Next::End(End::Failed(self.last_error.clone()));
        }
        if self.asked_at.is_some() || cx.now < self.ask_at {
            return Next::Wait;
        }
        self.asked_at = Some(cx.now);
        seen.asking_since.get_or_insert(cx.now);
        Next::Ask(self.ticket)
    }

    /// A message says that the lock is ours.
    ///
    /// It may overtake the answer to a request in flight. An attempt never ends in a grant with such a request open: after
    /// a release that request would put a dead token into the queue.
    pub(crate) fn pushed(&mut self, cx: &Context<'_>, grant: Grant) -> Option<End> {
        if grant.fence <= self.stale {
            return None;
        }
        if !is_believable(&grant, cx.now) {
            // Read too late. Asking again proves the grant, or hands it on.
            self.stale = grant.fence;
            self.look_by(cx.now);
            return None;
        }
        if self.asked_at.is_some() && Rule::PushWaitsForAnswer.applies() {
            self.pushed = Some(grant);
            return None;
        }
        Some(End::Granted { grant, provisional: true })
    }

    /// A message says that the waiter is first in the queue, and has to ask again after a while.
    pub(crate) fn look_again(&mut self, cx: &Context<'_>, after: Duration) {
        self.look_by(cx.now + after);
        // However far back it was when it last asked: from now on its messages are probed as often as the head's.
        self.position = 0;
    }

    /// Tasks joined or left the room: a poll may be due sooner.
    pub(crate) fn seats_changed(&mut self, cx: &mut Context<'_>, polling: bool, retry_every: RetryEvery<'_>) {
        if self.polls_now(polling) {
            self.ask_at = self.ask_at.min(cx.now + self.poll_pause(cx, retry_every()));
        }
    }

    pub(crate) fn disconnected(&mut self, cx: &Context<'_>, seen: &mut Seen) {
        // Often it is the request in flight that showed it.
        let since = self.asked_at.unwrap_or(cx.now);
        self.fails(since, &StoreErrorKind::Unreachable.into(), seen);
    }

    pub(crate) fn reconnected(&mut self, cx: &Context<'_>) {
        self.look_by(cx.now);
    }

    /// The store answered an acquire, or failed to. `Some` ends the attempt.
    pub(crate) fn answered(
        &mut self,
        cx: &mut Context<'_>,
        answer: Result<Acquire, StoreError>,
        polling: bool,
        retry_every: RetryEvery<'_>,
        seen: &mut Seen,
    ) -> Option<End> {
        let now = cx.now;
        let asked_at = self.asked_at.take().unwrap_or(now);
        seen.asking_since = None;
        let lost = answer.as_ref().is_err_and(may_still_run);
        self.sent |= answer.as_ref().map_or_else(|error| !error.was_refused(), |_| true);
        self.unanswered |= lost;
        if let Some(grant) = self.pushed.take() {
            match &answer {
                Ok(Acquire::Queued(place)) if is_believable(&grant, now) && is_older(place, &grant) => {
                    return Some(End::Granted { grant, provisional: true });
                }
                // Whether the request was carried out is unknown, so the token is given up.
                Err(_) if Rule::PushWithLostAnswerIsGivenBack.applies() => return Some(End::TokenUsedUp),
                Err(_) if is_believable(&grant, now) => return Some(End::Granted { grant, provisional: true }),
                // Asking again returns the grant, or a place in the queue.
                _ => {
                    self.stale = self.stale.max(grant.fence);
                    self.look_by(now);
                }
            }
        }
        match answer {
            Ok(Acquire::Granted(grant)) if is_believable(&grant, now) => {
                return Some(End::Granted { grant, provisional: false });
            }
            // The answer was too slow. Asking again restarts the lease.
            Ok(Acquire::Granted(_)) => self.ask_at = now,
            Ok(Acquire::Revoked) => return Some(End::TokenUsedUp),
            Ok(Acquire::Queued(place)) => {
                self.failing_since = None;
                self.ticket = Some(place.ticket);
                self.position = place.position;
                let by_itself = now + self.pause(cx, &place, polling, retry_every);
                self.ask_at = self.look_by.take().map_or(by_itself, |by| by.min(by_itself));
                *seen = Seen::held_by(place.holder);
            }
            Err(error) => {
                self.fails(asked_at, &error, seen);
                if !error.is_passing() || self.gives_up_at(cx).is_some_and(|end| now >= end) {
                    return Some(End::Failed(error));
                }
                // Where the connection cannot be ended for certain, the request may still be carried out at any later
                // time. So its token is not used again.
                if lost && !cx.may_resend && Rule::LostAcquireGetsNewToken.applies() {
                    self.carried = Carried { ticket: self.ticket, failing_since: self.failing_since };
                    return Some(End::TokenUsedUp);
                }
                self.ask_at = now + self.poll_pause(cx, retry_every());
            }
        }
        None
    }

    /// Ends the attempt for good: what has to be given up, and what the next attempt takes over.
    pub(crate) fn finish(mut self) -> Finished {
        if self.asked_at.take().is_some() {
            (self.sent, self.unanswered) = (true, true);
        }
        Finished { claim: self.claim, sent: self.sent, unanswered: self.unanswered, carried: self.carried }
    }

    /// Whether no answer is awaited.
    #[cfg(test)]
    pub(crate) fn may_ask(&self) -> bool {
        self.asked_at.is_none()
    }

    /// Makes the next request due now.
    #[cfg(test)]
    pub(crate) fn make_due(&mut self, now: Moment) {
        self.ask_at = now;
    }

    #[cfg(test)]
    pub(crate) fn visit(&mut self, visit: &mut dyn super::visit::Visit) {
        visit.token(&mut self.claim.token);
        visit.ticket(&mut self.ticket);
        visit.flag(self.asked_at.is_some());
        visit.flag(self.sent);
        visit.flag(self.unanswered);
        visit.ticket(&mut self.carried.ticket);
        visit.fence(&mut self.stale);
        visit.flag(self.pushed.is_some());
        self.pushed.iter_mut().for_each(|grant| visit.grant(grant));
        visit.timer(&mut self.ask_at);
        self.look_by.iter_mut().for_each(|at| visit.timer(at));
    }

    fn gives_up_at(&self, cx: &Context<'_>) -> Option<Moment> {
        self.failing_since.map(|since| since + cx.policy.patience)
    }

    /// Records a failure of the store that began at `since` or earlier.
    fn fails(&mut self, since: Moment, error: &StoreError, seen: &mut Seen) {
        seen.failed = Some(error.clone());
        self.failing_since.get_or_insert(since);
        self.last_error = error.clone();
    }

    fn look_by(&mut self, by: Moment) {
        self.look_by = Some(self.look_by.map_or(by, |old| old.min(by)));
        self.ask_at = self.ask_at.min(by);
    }

    /// How long until the next request.
    fn pause(&mut self, cx: &mut Context<'_>, place: &Place, polling: bool, retry_every: RetryEvery<'_>) -> Duration {
        if self.polls_now(polling) {
            // At the head of the queue the lock can be free any moment.
            return self.poll_pause(cx, retry_every());
        }
        self.polls = 0;
        // However short the configured interval is, this is never a busy loop.
        let at_most = cx.policy.ask_again_within.max(PER_POSITION);
        let pause = ask_again_after(place).min(at_most);
        if place.position < NEAR { pause } else { cx.jittered(pause) }
    }

    fn polls_now(&self, polling: bool) -> bool {
        !self.claim.listens || polling
    }

    /// Exponential backoff with jitter, never a busy loop.
    fn poll_pause(&mut self, cx: &mut Context<'_>, retry_every: Option<Duration>) -> Duration {
        let pause = match retry_every {
            Some(fixed) => fixed,
            None => Backoff::new(cx.policy.poll_interval, cx.policy.max_poll_interval).after(self.polls).pause(),
        };
        self.polls = self.polls.saturating_add(1);
        // The store passes over a polling waiter that has not asked for three seconds.
        cx.jittered(pause.clamp(Duration::from_millis(1), Duration::from_secs(1)))
    }
}

/// What is left of an attempt that is over.
pub(crate) struct Finished {
    pub(crate) claim: AcquireRequest,
    /// The store may know the token.
    pub(crate) sent: bool,
    /// A request was not answered, and may still be carried out.
    pub(crate) unanswered: bool,
    pub(crate) carried: Carried,
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

/// Whether a place in the queue is older than a grant by message, so that the grant stands. The message may have overtaken
/// the answer, or the lock may have been taken away since and the token queued again. Fences rise, so the fence of the
/// holder shows which.
fn is_older(place: &Place, grant: &Grant) -> bool {
    let holder = place.holder.as_ref().and_then(|holder| holder.fence);
    !Rule::QueuedGrantIsProven.applies() || (holder.is_some() && holder < grant.fence)
}

/// Whether enough of the lease is left to begin with it.
fn is_believable(grant: &Grant, now: Moment) -> bool {
    Belief::new(now, grant.asked_at, grant.lasts).is_valid(now + grant.lasts / 4)
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
    fn waiters_further_back_ask_less_often() {
        let hour = Some(Duration::from_secs(3_600));
        let after = |position| ask_again_after(&place(position, hour));
        assert_eq!([0, 7, 8, 27].map(after), [5_000, 5_000, 5_500, 15_000].map(Duration::from_millis));
        assert_eq!([57, 58, 1_000, usize::MAX].map(after), [30; 4].map(Duration::from_secs));
    }

    #[test]
    fn every_waiter_asks_soon_after_the_end_of_a_lease() {
        let left = Some(Duration::from_secs(2));
        let after = |position| ask_again_after(&place(position, left));
        assert_eq!([0, 1, 100].map(after), [2_001, 2_021, 4_001].map(Duration::from_millis));
        let nobody = Place { holder: None, ..place(3, None) };
        assert_eq!(ask_again_after(&nobody), Duration::from_millis(61));
    }

    #[test]
    fn only_the_head_asks_often_behind_a_holder_that_sends_no_message() {
        assert_eq!(ask_again_after(&place(0, None)), BEHIND_FOREIGN);
        assert_eq!(ask_again_after(&place(1, None)), ASK_EVERY);
        assert_eq!(ask_again_after(&place(500, None)), ASK_AT_LEAST_EVERY);
    }
}
