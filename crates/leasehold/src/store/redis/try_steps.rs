//! The steps of a try on Redis: which command follows which reply, and what a try returns. No I/O and no clock.
//!
//! Most tries need one step: SET NX, INCR and EXISTS in one write. The other steps follow when the key exists, when the
//! fence counter was lost, or when a queue exists. `try_acquire` sends the commands.

use std::time::Duration;

use crate::clock::Moment;
use crate::facts::Fence;
use crate::rules::Rule;
use crate::store::{Grant, Holder, StoreError, Try};

/// A try in progress.
#[derive(Debug, Clone)]
pub(crate) struct TrySteps {
    fenced: bool,
    ttl: Duration,
    /// When the newest command was sent that started or restarted the countdown of the lease.
    asked_at: Moment,
    /// The fence of the grant: read from the value, or drawn from the counter.
    fence: Option<Fence>,
    /// The value at the key carried a fence.
    was_written: bool,
    /// A queue existed.
    queue: bool,
}

/// What a try does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TryStep {
    /// Read the value at the key.
    Read,
    /// Renew the lease, with this fence.
    Renew(Option<Fence>),
    /// Draw a fence and raise the counter.
    RepairFence,
    /// Hand the lock to a waiter that has an earlier ticket than this fence.
    Yield(Fence),
    /// Return this answer.
    Done(Try),
}

/// The reply to a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StepReply {
    /// The reply to the first step, sent at `asked_at`. Without a fence the try draws none and looks for no queue.
    Set { asked_at: Moment, written: bool, counted: Option<Fence>, queue: bool },
    /// The key is gone by now.
    Gone,
    /// The value is the one that an earlier send of this try wrote. It carries a fence if the lease was handed off,
    /// confirmed or renewed since.
    Ours { written_fence: Option<Fence> },
    /// The value is another holder's.
    Others(Option<Holder>),
    /// The lease was renewed by a request that was sent at `asked_at`.
    Renewed { asked_at: Moment },
    /// This fence was drawn and written into the value.
    Repaired(Fence),
    /// No earlier waiter receives messages.
    Kept,
    /// Dead waiters were passed over, and more may follow.
    YieldAgain,
    /// The lock does not belong to this token any more.
    Lost(Option<Holder>),
    /// The lease was revoked.
    Revoked,
}

impl TrySteps {
    /// A try that has sent its first step.
    pub(crate) fn new(fenced: bool, ttl: Duration) -> Self {
        let asked_at = Moment::from_boot(Duration::ZERO);
        Self { fenced, ttl, asked_at, fence: None, was_written: false, queue: false }
    }

    /// Returns the step after a reply.
    pub(crate) fn answered(&mut self, reply: StepReply) -> TryStep {
        match reply {
            StepReply::Set { asked_at, written, counted, queue } => {
                self.asked_at = asked_at;
                // A counter that was lost restarts at 1; fences must not.
                self.fence = counted.filter(|fence| fence.get() >= Fence::SANE_MIN);
                self.queue = queue;
                if written { self.holds() } else { TryStep::Read }
            }
            StepReply::Ours { written_fence } => {
                self.was_written = written_fence.is_some();
                self.fence = written_fence.or(self.fence);
                // The later send did not restart the countdown of the earlier one.
                if Rule::ResentTryRenewsFirst.applies() { TryStep::Renew(self.fence) } else { self.holds() }
            }
            StepReply::Renewed { asked_at } => {
                self.asked_at = asked_at;
                self.holds()
            }
            StepReply::Repaired(fence) => {
                self.fence = Some(fence);
                self.holds()
            }
            StepReply::Kept => self.granted(),
            StepReply::YieldAgain => self.holds(),
            StepReply::Gone => TryStep::Done(Try::Held(None)),
            StepReply::Others(holder) | StepReply::Lost(holder) => TryStep::Done(Try::Held(holder)),
            StepReply::Revoked => TryStep::Done(Try::Revoked),
        }
    }

    #[cfg(test)]
    pub(crate) fn visit(&mut self, visit: &mut dyn crate::client::visit::Visit) {
        visit.start(&mut self.asked_at);
        visit.fence(&mut self.fence);
        visit.flag(self.was_written);
        visit.flag(self.queue);
    }

    /// Whether the token has to be released because fence repair failed with this error: without a fence nothing is
    /// granted, so nothing may stay held. After a temporary error the caller tries again with the same token.
    pub(crate) fn releases_after(step: &TryStep, error: &StoreError) -> bool {
        *step == TryStep::RepairFence && !error.is_passing()
    }

    /// Returns the step for a try whose token holds the lock.
    fn holds(&self) -> TryStep {
        match self.fence {
            _ if !self.fenced => self.granted(),
            None => TryStep::RepairFence,
            // The holder of a value with a fence may rely on it, so it does not yield.
            Some(fence) if self.queue && !self.was_written && Rule::TryYieldsToQueue.applies() => TryStep::Yield(fence),
            Some(_) => self.granted(),
        }
    }

    fn granted(&self) -> TryStep {
        let fence = self.fence.filter(|_| self.fenced);
        TryStep::Done(Try::Granted(Grant { fence, asked_at: self.asked_at, lasts: self.ttl }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreErrorKind;

    const TTL: Duration = Duration::from_secs(30);

    fn at(ms: u64) -> Moment {
        Moment::from_boot(Duration::from_millis(ms))
    }

    fn fence(number: u64) -> Fence {
        Fence::new(Fence::SANE_MIN + number)
    }

    fn granted(number: u64, asked_at_ms: u64) -> TryStep {
        TryStep::Done(Try::Granted(Grant { fence: Some(fence(number)), asked_at: at(asked_at_ms), lasts: TTL }))
    }

    fn set(written: bool, queue: bool) -> StepReply {
        StepReply::Set { asked_at: at(1), written, counted: Some(fence(7)), queue }
    }

    /// The step after each of these replies to a fenced try.
    fn steps<const N: usize>(replies: [StepReply; N]) -> [TryStep; N] {
        let mut steps = TrySteps::new(true, TTL);
        replies.map(|reply| steps.answered(reply))
    }

    #[test]
    fn a_free_lock_needs_one_step() {
        assert_eq!(steps([set(true, false)]), [granted(7, 1)]);
        let unfenced = StepReply::Set { asked_at: at(1), written: true, counted: None, queue: false };
        let grant = Grant { fence: None, asked_at: at(1), lasts: TTL };
        assert_eq!(TrySteps::new(false, TTL).answered(unfenced), TryStep::Done(Try::Granted(grant)));
    }

    #[test]
    fn a_try_yields_to_the_queue_until_no_earlier_waiter_is_left() {
        let again = [set(true, true), StepReply::YieldAgain, StepReply::Kept];
        assert_eq!(steps(again), [TryStep::Yield(fence(7)), TryStep::Yield(fence(7)), granted(7, 1)]);
        assert_eq!(steps([set(true, true), StepReply::Lost(None)])[1], TryStep::Done(Try::Held(None)));
    }

    #[test]
    fn a_lease_of_an_earlier_send_is_renewed_first_and_counts_from_there() {
        let mine = StepReply::Ours { written_fence: None };
        let renewed = StepReply::Renewed { asked_at: at(5) };
        let replies = [set(false, true), mine.clone(), renewed, StepReply::Kept];
        let expected = [TryStep::Read, TryStep::Renew(Some(fence(7))), TryStep::Yield(fence(7)), granted(7, 5)];
        assert_eq!(steps(replies), expected);
        assert_eq!(steps([set(false, false), mine, StepReply::Revoked])[2], TryStep::Done(Try::Revoked));
    }

    #[test]
    fn a_holder_whose_fence_was_written_does_not_yield() {
        let mine = StepReply::Ours { written_fence: Some(fence(3)) };
        let replies = [set(false, true), mine, StepReply::Renewed { asked_at: at(5) }];
        assert_eq!(steps(replies), [TryStep::Read, TryStep::Renew(Some(fence(3))), granted(3, 5)]);
    }

    #[test]
    fn an_unfenced_try_renews_with_the_fence_that_was_written() {
        let mut steps = TrySteps::new(false, TTL);
        steps.answered(StepReply::Set { asked_at: at(1), written: false, counted: None, queue: false });
        assert_eq!(steps.answered(StepReply::Ours { written_fence: Some(fence(3)) }), TryStep::Renew(Some(fence(3))));
        let grant = Grant { fence: None, asked_at: at(5), lasts: TTL };
        let renewed = steps.answered(StepReply::Renewed { asked_at: at(5) });
        assert_eq!(renewed, TryStep::Done(Try::Granted(grant)));
    }

    #[test]
    fn the_fence_of_a_lost_counter_is_replaced() {
        let lost = StepReply::Set { asked_at: at(1), written: true, counted: Some(Fence::new(1)), queue: true };
        let replies = [lost.clone(), StepReply::Repaired(fence(9)), StepReply::Kept];
        assert_eq!(steps(replies), [TryStep::RepairFence, TryStep::Yield(fence(9)), granted(9, 1)]);
        assert_eq!(steps([lost, StepReply::Lost(None)])[1], TryStep::Done(Try::Held(None)));
    }

    #[test]
    fn only_a_fence_that_cannot_be_repaired_releases_the_token() {
        let releases = |step, kind: StoreErrorKind| TrySteps::releases_after(&step, &kind.into());
        assert!(releases(TryStep::RepairFence, StoreErrorKind::FenceUnusable));
        assert!(!releases(TryStep::RepairFence, StoreErrorKind::NoAnswer), "the caller tries again with this token");
        assert!(!releases(TryStep::Yield(fence(1)), StoreErrorKind::FenceUnusable));
    }

    #[test]
    fn another_holder_is_reported() {
        let other = Holder::foreign(b"x", None);
        let replies = [set(false, false), StepReply::Others(Some(other.clone()))];
        assert_eq!(steps(replies), [TryStep::Read, TryStep::Done(Try::Held(Some(other)))]);
        assert_eq!(steps([set(false, false), StepReply::Gone])[1], TryStep::Done(Try::Held(None)));
    }
}
