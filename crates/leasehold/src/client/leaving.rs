//! Giving up a token: it is removed from the store wherever it is, queued or granted. The request is repeated until the
//! store has confirmed it, or must have forgotten the token. A store that refuses it (no permission, no scripts) is
//! asked until the lease of the token would have ended.

use std::time::Duration;

use super::Context;
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::rules::Rule;
use crate::store::AcquireRequest;

/// The first pause between two requests; each one is twice the last.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The pause once the lease has ended and the store still does not answer. A reconnect, or a grant, ends it early.
const PAUSE_IN_AN_OUTAGE: Duration = Duration::from_secs(10);

/// A token that is given up.
#[derive(Debug, Clone)]
pub(crate) struct PendingLeave {
    /// Whether it may be in a queue. A queue lives for as long as others ask, so only an answer of the store ends such a
    /// token; any other ends with its lease.
    queued: bool,
    /// Whether one of its requests was not answered. Where the connection cannot be ended for certain, that request may
    /// still be carried out after this one.
    unanswered: bool,
    lease_ends: Moment,
    confirmed: bool,
    hurried: bool,
    backoff: Backoff,
}

/// How a request to leave ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaveReply {
    /// The token is unknown to the store now.
    Confirmed,
    /// It was released by other means, or the store is closed: nothing is left to do.
    Settled,
    /// No answer.
    Failed,
    /// The store refuses such requests.
    Forbidden,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterLeave {
    /// The token has left. Nothing is to be done.
    Done,
    /// The process shuts down before it is certain that the token has left.
    Abandoned,
    /// Send the request again after this pause, or when something happens.
    Again(Duration),
}

impl PendingLeave {
    pub(crate) fn new(cx: &Context<'_>, claim: &AcquireRequest, queued: bool, unanswered: bool) -> Self {
        let lease_ends = cx.now + claim.ttl.duration() + cx.policy.patience;
        let backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        Self { queued, unanswered, lease_ends, confirmed: false, hurried: false, backoff }
    }

    /// Whether the store has confirmed it at least once.
    pub(crate) fn is_confirmed(&self) -> bool {
        self.confirmed
    }

    /// A request to leave was answered, or failed. `closing`: the process shuts down.
    pub(crate) fn answered(&mut self, cx: &mut Context<'_>, reply: LeaveReply, closing: bool) -> AfterLeave {
        match reply {
            LeaveReply::Settled => return AfterLeave::Done,
            LeaveReply::Confirmed => {
                self.confirmed = true;
                if !self.unanswered || cx.may_resend || !Rule::LeaveIsRepeated.applies() {
                    return AfterLeave::Done;
                }
                if closing {
                    return AfterLeave::Abandoned;
                }
                // A lost connection may still carry out what it was sent, so once is not enough.
                self.backoff = Backoff::new(LONGEST_PAUSE, LONGEST_PAUSE);
            }
            LeaveReply::Failed | LeaveReply::Forbidden => {}
        }
        if cx.now >= self.lease_ends {
            // A refusal does not pass by itself, so the request is not repeated beyond the lease.
            if !self.queued || self.confirmed || reply == LeaveReply::Forbidden {
                return AfterLeave::Done;
            }
            self.backoff = Backoff::new(PAUSE_IN_AN_OUTAGE, PAUSE_IN_AN_OUTAGE);
        }
        AfterLeave::Again(cx.jittered(self.backoff.pause()))
    }

    #[cfg(test)]
    pub(crate) fn visit(&mut self, visit: &mut dyn super::visit::Visit) {
        visit.flag(self.unanswered);
    }

    /// Whether a shutdown still has to shorten the pauses.
    pub(crate) fn may_hurry(&self) -> bool {
        !self.hurried
    }

    /// The process shuts down: from now on the pauses are short again.
    pub(crate) fn hurry(&mut self) {
        self.hurried = true;
        self.backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE).after(1);
    }
}
