//! One lease of this process: when to renew or check it, what the answer means, and when it is lost.

use std::time::Duration;

use crate::clock::Moment;
use crate::facts::{Owner, Ttl};
use crate::lease::belief::{Belief, LeaseStep, Plan, check_every};
use crate::loss::LossReason;
use crate::rules::Rule;
use crate::store::{Grant, Renewed};

/// Leases due within this are renewed in the same pass.
pub(crate) const PASS: Duration = Duration::from_millis(10);
/// A lease held for longer than this is entered in the index and its grant is published. Shorter ones cost nothing.
pub(crate) const PUBLISHED_AFTER: Duration = Duration::from_millis(500);
/// A grant by message is confirmed this long after it came, or sooner where it lasts less. A holder that is done by then,
/// as most are where many want the same lock, needs no confirmation. It is a small part of what the grant lasts.
const CONFIRM_AFTER: Duration = Duration::from_millis(20);

/// What the store's record of a new lease lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Record {
    /// Nothing.
    Complete,
    /// The fence, which is written when the lock has been held for long enough to be looked at.
    Fence,
    /// Its confirmation: the grant is provisional.
    Provisional,
    /// The ttl and owner of the task that holds it: it carries another task's, and is written at once.
    Anothers,
}

/// A lease as its holder sees it.
#[derive(Debug, Clone)]
pub(crate) struct LeaseState {
    granted_at: Moment,
    pub(crate) belief: Belief,
    pub(crate) plan: Plan,
    pub(crate) ttl: Ttl,
    pub(crate) owner: Owner,
    /// When to renew next.
    pub(crate) renew_at: Option<Moment>,
    /// When to ask the store next whether the lease is still ours, unless a renewal shows it before.
    pub(crate) check_at: Moment,
    /// A renewal or check is in flight.
    renewing: bool,
    /// The record in the store does not carry our ttl and owner yet.
    pub(crate) rewrite: bool,
    /// Entered in the index.
    pub(crate) published: bool,
    pub(crate) lost: Option<LossReason>,
    pub(crate) finish_reason: Option<String>,
}

/// What a look at a lease found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Look {
    /// The lease has to be published and entered in the index now.
    pub(crate) publish: bool,
    pub(crate) then: Then,
}

/// What to do about a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// Look again at this moment.
    Wait(Moment),
    /// Send a renewal (`prolong`) or a check, and look again at this moment whether it is answered or not.
    Ask { prolong: bool, look_again: Moment },
    /// It is over.
    Lost(LossReason),
}

/// What was sent to the store for a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sent {
    /// A renewal; otherwise a check.
    pub(crate) prolong: bool,
    pub(crate) ttl: Ttl,
    /// The owner that was written into the record.
    pub(crate) rewrote: Option<Owner>,
}

/// What an answer means for a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Renewed, with this much left.
    Renewed { slack: Duration },
    /// It is still ours.
    Checked,
    /// It is over.
    Lost(LossReason),
    /// Neither: it is asked again soon, until the deadline.
    Unanswered,
}

impl LeaseState {
    pub(crate) fn new(
        now: Moment,
        (ttl, owner): (Ttl, Owner),
        renew_every: Option<Duration>,
        max_hold: Option<Duration>,
        grant: &Grant,
        record: Record,
    ) -> Self {
        let plan = Plan { every: renew_every, at_most_until: max_hold.map(|hold| now + hold) };
        let renew_at = match record {
            Record::Complete => plan.every.map(|every| grant.asked_at + every),
            Record::Fence => plan.every.map(|every| grant.asked_at + every.min(PUBLISHED_AFTER)),
            Record::Provisional if Rule::ProvisionalGrantIsConfirmed.applies() => {
                Some(now + CONFIRM_AFTER.min(grant.lasts / 16))
            }
            Record::Provisional => plan.every.map(|every| grant.asked_at + every),
            Record::Anothers => Some(now),
        };
        Self {
            granted_at: now,
            belief: Belief::new(now, grant.asked_at, grant.lasts),
            plan,
            ttl,
            owner,
            renew_at,
            check_at: grant.asked_at + check_every(ttl.duration()),
            renewing: false,
            rewrite: matches!(record, Record::Provisional | Record::Anothers),
            published: false,
            lost: None,
            finish_reason: None,
        }
    }

    /// When a new lease needs attention for the first time.
    pub(crate) fn first_look(&self) -> Moment {
        let published = self.granted_at + PUBLISHED_AFTER;
        let first = published.min(self.belief.valid_until()).min(self.check_at);
        self.renew_at.into_iter().chain(self.plan.at_most_until).fold(first, Moment::min)
    }

    /// What is due now, or within the present pass.
    pub(crate) fn look(&mut self, now: Moment) -> Look {
        let publish = !self.published && now >= self.granted_at + PUBLISHED_AFTER;
        self.published |= publish;
        let renew_at = self.renew_at.filter(|_| !self.renewing);
        let check_at = Some(self.check_at).filter(|_| !self.renewing);
        let step = self.plan.next_step(&self.belief, renew_at, check_at, now + PASS);
        let over = !self.belief.is_valid(now) || self.plan.at_most_until.is_some_and(|end| now >= end);
        let then = match step {
            LeaseStep::Renew | LeaseStep::Check => {
                self.renewing = true;
                Then::Ask { prolong: step == LeaseStep::Renew, look_again: self.with_publishing(self.ends_at()) }
            }
            LeaseStep::Sleep(until) => Then::Wait(self.with_publishing(until)),
            // A pass looks a little ahead. The end itself is never reported early.
            LeaseStep::Lost | LeaseStep::MaxHold if !over => Then::Wait(self.with_publishing(self.ends_at())),
            LeaseStep::Lost => Then::Lost(LossReason::Expired),
            LeaseStep::MaxHold => Then::Lost(LossReason::MaxHold),
        };
        Look { publish, then }
    }

    /// A renewal or check that was sent at `asked_at` was answered, or failed.
    pub(crate) fn answered(&mut self, now: Moment, sent: &Sent, asked_at: Moment, answer: &Renewed) -> Verdict {
        self.renewing = false;
        match answer {
            Renewed::Renewed if !sent.prolong => {
                self.check_at = asked_at + check_every(self.ttl.duration());
                Verdict::Checked
            }
            Renewed::Renewed => {
                if !self.belief.renewed(now, asked_at, sent.ttl.duration()) {
                    return Verdict::Lost(LossReason::Expired);
                }
                if sent.rewrote.as_ref() == Some(&self.owner) && sent.ttl == self.ttl {
                    self.rewrite = false;
                }
                self.check_at = asked_at + check_every(self.ttl.duration());
                self.renew_at = if self.rewrite { Some(now) } else { self.plan.every.map(|every| asked_at + every) };
                Verdict::Renewed { slack: now.until(self.belief.valid_until()) }
            }
            Renewed::Lost => Verdict::Lost(LossReason::Gone),
            Renewed::Revoked => Verdict::Lost(LossReason::Revoked),
            Renewed::Displaced => Verdict::Lost(LossReason::Displaced),
            Renewed::Unknown(_) => {
                let pause = self.ttl.duration() / 20;
                let again = now + pause.clamp(Duration::from_millis(5), Duration::from_secs(1));
                self.check_at = again;
                if sent.prolong {
                    self.renew_at = Some(again);
                }
                Verdict::Unanswered
            }
        }
    }

    /// The lease is held on other terms from now on. They are written with the next renewal.
    pub(crate) fn change_terms(&mut self, ttl: Ttl, plan: Plan) {
        self.ttl = ttl;
        self.plan = plan;
        self.rewrite = true;
    }

    /// A renewal that the holder asked for itself was answered, or failed. One of the renewal task may be in flight, too.
    pub(crate) fn extended(&mut self, now: Moment, sent: &Sent, asked_at: Moment, answer: &Renewed) -> Verdict {
        let (renewing, renew_at) = (self.renewing, self.renew_at);
        let verdict = self.answered(now, sent, asked_at, answer);
        self.renewing = renewing;
        if verdict == Verdict::Unanswered && self.plan.every.is_none() {
            // The holder received the error, and nothing else renews this lease.
            self.renew_at = renew_at;
        }
        verdict
    }

    /// The connection was lost and is back. The store may have forgotten everything, so the lease is proven now.
    pub(crate) fn reconnected(&mut self, now: Moment) {
        if self.renew_at.is_some() {
            self.renew_at = Some(now);
        }
        self.check_at = now;
    }

    /// The holder releases the lock. The belief ends before the release is sent, so that no work relies on a lease that is
    /// being released.
    pub(crate) fn give_up(&mut self) {
        if Rule::BeliefEndsBeforeRelease.applies() {
            self.belief.give_up();
        }
    }

    /// Marks the lease as lost. `false`: it was before.
    pub(crate) fn lose(&mut self, why: LossReason) -> bool {
        self.belief.give_up();
        if self.lost.is_some() {
            return false;
        }
        self.lost = Some(why);
        true
    }

    /// What a renewal or a check of the present terms sends.
    pub(crate) fn request(&self, prolong: bool) -> Sent {
        let rewrote = (prolong && self.rewrite).then(|| self.owner.clone());
        Sent { prolong, ttl: self.ttl, rewrote }
    }

    /// Makes the next renewal, or otherwise the next check, due now. `false`: neither is due by itself.
    #[cfg(test)]
    pub(crate) fn make_due(&mut self, now: Moment, prolong: bool) -> bool {
        if self.renewing || self.lost.is_some() || (prolong && self.renew_at.is_none()) {
            return false;
        }
        if prolong {
            self.renew_at = Some(now);
        } else {
            self.check_at = now;
        }
        true
    }

    #[cfg(test)]
    pub(crate) fn visit(&mut self, visit: &mut dyn super::visit::Visit) {
        self.belief.visit(visit);
        visit.flag(self.renewing);
        visit.flag(self.rewrite);
        visit.flag(self.lost.is_some());
        visit.timer(&mut self.granted_at);
        visit.timer(&mut self.check_at);
        visit.flag(self.renew_at.is_some());
        self.renew_at.iter_mut().for_each(|at| visit.timer(at));
    }

    /// When the holder has to learn that it is over, as things are.
    fn ends_at(&self) -> Moment {
        let believed = self.belief.valid_until();
        self.plan.at_most_until.map_or(believed, |end| end.min(believed))
    }

    fn with_publishing(&self, at: Moment) -> Moment {
        if self.published { at } else { at.min(self.granted_at + PUBLISHED_AFTER) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{StoreError, StoreErrorKind};

    fn at(ms: u64) -> Moment {
        Moment::from_boot(Duration::from_millis(ms))
    }

    fn lease(record: Record) -> LeaseState {
        let ttl = Ttl::new(Duration::from_secs(3)).expect("a ttl");
        let grant = Grant { fence: None, asked_at: at(1_000), lasts: ttl.duration() };
        LeaseState::new(at(1_010), (ttl, Owner::default()), Some(Duration::from_secs(1)), None, &grant, record)
    }

    #[test]
    fn a_renewal_counts_from_its_request() {
        let mut lease = lease(Record::Complete);
        let look = lease.look(at(2_000));
        assert!(look.publish, "held for a second");
        let Then::Ask { prolong: true, look_again } = look.then else { panic!("{look:?}") };
        assert_eq!(look_again, lease.belief.valid_until());
        // Nothing more is sent while it is in flight.
        assert_eq!(lease.look(at(2_100)).then, Then::Wait(lease.belief.valid_until()));
        let sent = lease.request(true);
        let verdict = lease.answered(at(2_500), &sent, at(2_000), &Renewed::Renewed);
        assert_eq!(verdict, Verdict::Renewed { slack: Duration::from_millis(2_468) });
        assert_eq!((lease.renew_at, lease.check_at), (Some(at(3_000)), at(3_000)));
    }

    #[test]
    fn an_answer_after_the_end_does_not_revive_a_lease() {
        let mut lease = lease(Record::Complete);
        lease.look(at(2_000));
        let sent = lease.request(true);
        let end = lease.belief.valid_until();
        assert_eq!(lease.answered(end, &sent, at(2_000), &Renewed::Renewed), Verdict::Lost(LossReason::Expired));
        assert_eq!(lease.look(end).then, Then::Lost(LossReason::Expired));
    }

    #[test]
    fn an_end_is_never_reported_early() {
        let mut lease = lease(Record::Complete);
        lease.renew_at = None;
        lease.look(at(2_000));
        let end = lease.belief.valid_until();
        assert_eq!(lease.look(end - PASS / 2).then, Then::Wait(end));
        assert_eq!(lease.look(end).then, Then::Lost(LossReason::Expired));
    }

    #[test]
    fn an_unanswered_renewal_is_sent_again_soon() {
        let mut lease = lease(Record::Complete);
        lease.look(at(2_000));
        let sent = lease.request(true);
        let unknown = Renewed::Unknown(StoreError::from(StoreErrorKind::NoAnswer));
        assert_eq!(lease.answered(at(2_200), &sent, at(2_000), &unknown), Verdict::Unanswered);
        assert_eq!(lease.renew_at, Some(at(2_350)));
    }

    #[test]
    fn an_extension_that_failed_is_repeated_only_for_a_lease_that_is_renewed() {
        for every in [None, Some(Duration::from_secs(1))] {
            let mut lease = lease(Record::Complete);
            (lease.renew_at, lease.plan.every) = (every.map(|every| at(1_000) + every), every);
            let ttl = Ttl::new(Duration::from_secs(60)).expect("a ttl");
            lease.change_terms(ttl, lease.plan);
            let unknown = Renewed::Unknown(StoreError::from(StoreErrorKind::NoAnswer));
            let sent = lease.request(true);
            assert_eq!(lease.extended(at(1_500), &sent, at(1_100), &unknown), Verdict::Unanswered);
            assert_eq!(lease.renew_at.is_some(), every.is_some());
            // It is asked soon whether it is still ours.
            assert!(lease.check_at <= at(2_500));
            assert!(matches!(lease.look(at(2_500)).then, Then::Ask { prolong, .. } if prolong == every.is_some()));
        }
    }

    #[test]
    fn a_provisional_grant_is_confirmed_and_written_with_the_present_terms() {
        let mut lease = lease(Record::Provisional);
        assert_eq!(lease.renew_at, Some(at(1_030)));
        assert_eq!(lease.first_look(), at(1_030));
        lease.look(at(1_030));
        let sent = lease.request(true);
        assert_eq!(sent.rewrote, Some(Owner::default()));
        // The terms change while the confirmation is in flight: they are written at once.
        lease.ttl = Ttl::new(Duration::from_secs(9)).expect("a ttl");
        lease.answered(at(1_040), &sent, at(1_030), &Renewed::Renewed);
        assert_eq!((lease.rewrite, lease.renew_at), (true, Some(at(1_040))));
        lease.look(at(1_040));
        let sent = lease.request(true);
        lease.answered(at(1_050), &sent, at(1_040), &Renewed::Renewed);
        assert_eq!((lease.rewrite, lease.renew_at), (false, Some(at(2_040))));
    }
}
