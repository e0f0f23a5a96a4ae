//! The arithmetic of a lease as its holder sees it: when it ends, when to renew, whether it may
//! still be believed. No clock, no I/O: every case is a unit test, and the exhaustive exploration
//! runs the same code.

use std::time::Duration;

use crate::clock::Moment;

/// What of a lease is not believed, because clocks run at different rates (1 %) and the stores
/// count in whole milliseconds.
pub(crate) fn drift(lasts: Duration) -> Duration {
    lasts / 100 + Duration::from_millis(2)
}

/// However long a lease is, and whether it is renewed or not: the store is asked at least this often whether it is
/// still the holder's.
const CHECKED_AT_LEAST_EVERY: Duration = Duration::from_secs(10);

/// How often the store is asked whether a lease is still its holder's.
pub(crate) fn check_every(ttl: Duration) -> Duration {
    (ttl / 3).min(CHECKED_AT_LEAST_EVERY)
}

/// A holder's belief in its lease.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Belief {
    /// The belief ends here, unless a renewal is answered before.
    valid_until: Moment,
    /// Given up: never again, whatever a late answer says.
    over: bool,
}

impl Belief {
    /// `asked_at` is a moment before the store began to count `lasts`.
    pub(crate) fn new(asked_at: Moment, lasts: Duration) -> Self {
        Self { valid_until: end(asked_at, lasts), over: false }
    }

    /// A belief as it stands, for a world that keeps only its end.
    #[cfg(test)]
    pub(crate) fn until(valid_until: Moment) -> Self {
        Self { valid_until, over: false }
    }

    pub(crate) fn valid_until(&self) -> Moment {
        self.valid_until
    }

    pub(crate) fn is_valid(&self, now: Moment) -> bool {
        !self.over && now < self.valid_until
    }

    /// A renewal that was asked for at `asked_at` has been answered with yes. Whether the lease is
    /// still believed: one that lapsed meanwhile is never revived, because its end may have been
    /// acted upon.
    pub(crate) fn renewed(&mut self, now: Moment, asked_at: Moment, lasts: Duration) -> bool {
        if !self.is_valid(now) {
            self.over = true;
            return false;
        }
        // An answer that was long on its way must not shorten what a newer one has given.
        self.valid_until = self.valid_until.max(end(asked_at, lasts));
        true
    }

    /// Released, lost or revoked.
    pub(crate) fn give_up(&mut self) {
        self.over = true;
    }

    #[cfg(test)]
    pub(crate) fn is_over(&self) -> bool {
        self.over
    }
}

fn end(asked_at: Moment, lasts: Duration) -> Moment {
    asked_at + lasts.saturating_sub(drift(lasts))
}

/// When a lease is renewed, and until when at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plan {
    /// `None`: never.
    pub(crate) every: Option<Duration>,
    /// Not beyond this moment.
    pub(crate) at_most_until: Option<Moment>,
}

/// What to do next about a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// It is over.
    Lost,
    /// It was held for as long as its holder allowed.
    MaxHold,
    /// Ask for a renewal now.
    Renew,
    /// Ask now whether it is still ours.
    Check,
    /// Look again then.
    Sleep(Moment),
}

impl Plan {
    /// `renew_at`: when the next renewal is due; `None` for a lease that is never renewed. `check_at`: when the store
    /// is asked next whether it is still ours; `None` while an answer is on its way.
    pub(crate) fn next_step(
        &self,
        belief: &Belief,
        renew_at: Option<Moment>,
        check_at: Option<Moment>,
        now: Moment,
    ) -> Step {
        if !belief.is_valid(now) {
            return Step::Lost;
        }
        if self.at_most_until.is_some_and(|end| now >= end) {
            return Step::MaxHold;
        }
        let mut next = belief.valid_until();
        if let Some(end) = self.at_most_until {
            next = next.min(end);
        }
        if let Some(due) = renew_at {
            if now >= due {
                return Step::Renew;
            }
            next = next.min(due);
        }
        if let Some(due) = check_at {
            if now >= due {
                return Step::Check;
            }
            next = next.min(due);
        }
        Step::Sleep(next)
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
        let belief = Belief::new(at(100), SEC);
        assert_eq!(belief.valid_until(), at(100 + 1000 - 12));
        assert!(belief.is_valid(at(1087)));
        assert!(!belief.is_valid(at(1088)));
    }

    #[test]
    fn a_renewal_counts_from_its_own_asking_and_never_shortens() {
        let mut belief = Belief::new(at(0), SEC);
        assert!(belief.renewed(at(500), at(400), SEC));
        assert_eq!(belief.valid_until(), at(1388));
        assert!(belief.renewed(at(600), at(100), SEC));
        assert_eq!(belief.valid_until(), at(1388));
    }

    #[test]
    fn a_lapsed_belief_is_never_revived() {
        let mut belief = Belief::new(at(0), SEC);
        assert!(!belief.renewed(at(990), at(900), SEC));
        assert!(!belief.is_valid(at(991)));
        assert!(!belief.renewed(at(992), at(985), SEC));
        let mut given_up = Belief::new(at(0), SEC);
        given_up.give_up();
        assert!(!given_up.renewed(at(10), at(5), SEC));
        assert!(given_up.is_over());
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
        let belief = Belief::new(at(0), SEC);
        assert_eq!(plan.next_step(&belief, Some(at(300)), None, at(10)), Step::Sleep(at(300)));
        assert_eq!(plan.next_step(&belief, Some(at(300)), None, at(300)), Step::Renew);
        assert_eq!(plan.next_step(&belief, Some(at(600)), None, at(450)), Step::Sleep(at(600)));
        assert_eq!(plan.next_step(&belief, Some(at(900)), None, at(650)), Step::Sleep(at(700)));
        assert_eq!(plan.next_step(&belief, Some(at(900)), None, at(700)), Step::MaxHold);
        assert_eq!(plan.next_step(&belief, Some(at(900)), None, at(990)), Step::Lost);
        let never = Plan { every: None, at_most_until: None };
        assert_eq!(never.next_step(&belief, None, None, at(500)), Step::Sleep(at(988)));
        assert_eq!(never.next_step(&belief, None, Some(at(600)), at(500)), Step::Sleep(at(600)));
        assert_eq!(never.next_step(&belief, None, Some(at(600)), at(600)), Step::Check);
        assert_eq!(never.next_step(&belief, Some(at(600)), Some(at(600)), at(600)), Step::Renew);
        assert_eq!(never.next_step(&belief, None, Some(at(600)), at(990)), Step::Lost);
    }
}
