//! The arithmetic of a lease as its holder sees it: when it ends, when to renew, and whether it may still be believed.
//! No clock, no I/O: every case is a unit test, and the exploration and the simulation run the same code.

use std::time::Duration;

use crate::clock::Moment;
use crate::rules::Rule;

/// The part of a lease that is not believed, because clocks run at different rates (1 %) and the stores count in whole
/// milliseconds.
pub(crate) fn drift(lasts: Duration) -> Duration {
    lasts / 100 + Duration::from_millis(2)
}

/// The longest interval between two checks of a lease, however long it is and whether it is renewed or not.
const CHECKED_AT_LEAST_EVERY: Duration = Duration::from_secs(10);

/// The interval between two checks that a lease is still its holder's.
pub(crate) fn check_every(ttl: Duration) -> Duration {
    (ttl / 3).min(CHECKED_AT_LEAST_EVERY)
}

/// A holder's belief in its lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Belief {
    /// The belief ends here, unless a renewal is answered before.
    valid_until: Moment,
    /// The belief was given up, whatever a late answer says.
    over: bool,
}

impl Belief {
    /// A belief that begins `now`, when the answer is read. `asked_at` is a moment before the store began to count
    /// `lasts`.
    pub(crate) fn new(now: Moment, asked_at: Moment, lasts: Duration) -> Self {
        Self { valid_until: end(now, asked_at, lasts), over: false }
    }

    pub(crate) fn valid_until(&self) -> Moment {
        self.valid_until
    }

    pub(crate) fn is_valid(&self, now: Moment) -> bool {
        !self.over && now < self.valid_until
    }

    /// Prolongs the belief by a renewal that was sent at `asked_at` and answered with yes. `false`: the belief had ended
    /// before, and is never revived, because the holder may have acted upon its end.
    pub(crate) fn renewed(&mut self, now: Moment, asked_at: Moment, lasts: Duration) -> bool {
        if Rule::EndedBeliefStaysEnded.applies() && !self.is_valid(now) {
            self.over = true;
            return false;
        }
        self.over = false;
        // A slow answer must not shorten what a newer one has given.
        self.valid_until = self.valid_until.max(end(now, asked_at, lasts));
        true
    }

    /// Released, lost or revoked.
    pub(crate) fn give_up(&mut self) {
        self.over = true;
    }

    #[cfg(test)]
    pub(crate) fn visit(&mut self, visit: &mut dyn crate::client::visit::Visit) {
        visit.flag(self.over);
        if !self.over {
            visit.end(&mut self.valid_until);
        }
    }
}

fn end(now: Moment, asked_at: Moment, lasts: Duration) -> Moment {
    let counts_from = if Rule::LeaseCountsFromRequest.applies() { asked_at } else { now };
    counts_from + lasts.saturating_sub(drift(lasts))
}

/// When a lease is renewed, and its latest end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The interval between two renewals; `None`: the lease is not renewed.
    pub(crate) every: Option<Duration>,
    /// The lease is not held beyond this moment.
    pub(crate) at_most_until: Option<Moment>,
}

/// What to do next about a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaseStep {
    /// The belief has ended.
    Lost,
    /// The lease was held for as long as its holder allowed.
    MaxHold,
    /// Send a renewal now.
    Renew,
    /// Check now whether the lease is still ours.
    Check,
    /// Look again at this moment.
    Sleep(Moment),
}

impl Plan {
    /// Decides what is due. `renew_at`: when the next renewal is due; `None` for a lease that is not renewed. `check_at`:
    /// when the next check is due; `None` while an answer is awaited.
    pub(crate) fn next_step(
        &self,
        belief: &Belief,
        renew_at: Option<Moment>,
        check_at: Option<Moment>,
        now: Moment,
    ) -> LeaseStep {
        if !belief.is_valid(now) {
            return LeaseStep::Lost;
        }
        if self.at_most_until.is_some_and(|end| now >= end) {
            return LeaseStep::MaxHold;
        }
        let mut next = belief.valid_until();
        if let Some(end) = self.at_most_until {
            next = next.min(end);
        }
        if let Some(due) = renew_at {
            if now >= due {
                return LeaseStep::Renew;
            }
            next = next.min(due);
        }
        if let Some(due) = check_at {
            if now >= due {
                return LeaseStep::Check;
            }
            next = next.min(due);
        }
        LeaseStep::Sleep(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(ms: u64) -> Moment {
        Moment::from_boot(Duration::from_millis(ms))
    }
    const SEC: Duration = Duration::from_secs(1);

    #[test]
    fn counts_from_the_asking_less_drift() {
        let belief = Belief::new(at(400), at(100), SEC);
        assert_eq!(belief.valid_until(), at(100 + 1000 - 12));
        assert!(belief.is_valid(at(1087)));
        assert!(!belief.is_valid(at(1088)));
    }

    #[test]
    fn a_renewal_counts_from_its_own_asking_and_never_shortens() {
        let mut belief = Belief::new(at(0), at(0), SEC);
        assert!(belief.renewed(at(500), at(400), SEC));
        assert_eq!(belief.valid_until(), at(1388));
        assert!(belief.renewed(at(600), at(100), SEC));
        assert_eq!(belief.valid_until(), at(1388));
    }

    #[test]
    fn a_lapsed_belief_is_never_revived() {
        let mut belief = Belief::new(at(0), at(0), SEC);
        assert!(!belief.renewed(at(990), at(900), SEC));
        assert!(!belief.is_valid(at(991)));
        assert!(!belief.renewed(at(992), at(985), SEC));
        let mut given_up = Belief::new(at(0), at(0), SEC);
        given_up.give_up();
        assert!(!given_up.renewed(at(10), at(5), SEC));
        assert!(!given_up.is_valid(at(11)));
    }

    #[test]
    fn every_lease_is_checked_three_times_or_every_ten_seconds() {
        assert_eq!(check_every(3 * SEC), SEC);
        assert_eq!(check_every(30 * SEC), 10 * SEC);
        assert_eq!(check_every(3_600 * SEC), 10 * SEC);
    }

    #[test]
    fn every_step_of_a_plan() {
        let plan = Plan { every: Some(Duration::from_millis(300)), at_most_until: Some(at(700)) };
        let belief = Belief::new(at(0), at(0), SEC);
        assert_eq!(plan.next_step(&belief, Some(at(300)), None, at(10)), LeaseStep::Sleep(at(300)));
        assert_eq!(plan.next_step(&belief, Some(at(300)), None, at(300)), LeaseStep::Renew);
        assert_eq!(plan.next_step(&belief, Some(at(600)), None, at(450)), LeaseStep::Sleep(at(600)));
        assert_eq!(plan.next_step(&belief, Some(at(900)), None, at(650)), LeaseStep::Sleep(at(700)));
        assert_eq!(plan.next_step(&belief, Some(at(900)), None, at(700)), LeaseStep::MaxHold);
        assert_eq!(plan.next_step(&belief, Some(at(900)), None, at(990)), LeaseStep::Lost);
        let never = Plan { every: None, at_most_until: None };
        assert_eq!(never.next_step(&belief, None, None, at(500)), LeaseStep::Sleep(at(988)));
        assert_eq!(never.next_step(&belief, None, Some(at(600)), at(500)), LeaseStep::Sleep(at(600)));
        assert_eq!(never.next_step(&belief, None, Some(at(600)), at(600)), LeaseStep::Check);
        assert_eq!(never.next_step(&belief, Some(at(600)), Some(at(600)), at(600)), LeaseStep::Renew);
        assert_eq!(never.next_step(&belief, None, Some(at(600)), at(990)), LeaseStep::Lost);
    }
}
