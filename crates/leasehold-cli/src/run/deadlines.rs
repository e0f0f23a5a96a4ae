//! When a command whose lease is not renewed is terminated, and when it is killed. No clock, no I/O.

use std::time::Duration;

use leasehold::lease::Moment;

use super::guardian_messages::KillSchedule;

/// The most time between SIGTERM and SIGKILL by default.
const DEFAULT_GRACE_MAX: Duration = Duration::from_secs(10);
/// The bounds of the time between SIGKILL and the end of the lease.
const MARGIN_MIN: Duration = Duration::from_millis(10);
const MARGIN_MAX: Duration = Duration::from_secs(1);

/// The grace and the margin of one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Deadlines {
    grace: Duration,
    margin: Duration,
}

impl Deadlines {
    /// Returns `None` if that much grace leaves a lease of `ttl` no time to be renewed.
    pub(super) fn new(ttl: Duration, grace: Option<Duration>) -> Option<Self> {
        let grace = match grace {
            Some(grace) if grace > ttl / 2 => return None,
            Some(grace) => grace,
            None => (ttl / 4).min(DEFAULT_GRACE_MAX),
        };
        // A renewal is due after a third of the ttl. The store has two thirds of the time from then until the grace
        // begins to answer it. The last third is for the kill: on a busy machine the guardian wakes up late, looks
        // for what it must kill slowly, and even a killed process has to be scheduled once more to die.
        let margin = ((ttl - ttl / 3 - grace) / 3).clamp(MARGIN_MIN, MARGIN_MAX);
        Some(Self { grace, margin })
    }

    /// Returns when a lease that is proven until `valid_until` is given up unless it is renewed before.
    pub(super) fn give_up_at(&self, valid_until: Moment) -> Moment {
        valid_until - self.margin - self.grace
    }

    /// Returns the schedule of a guardian that receives no other order. The keeper acts half a margin earlier.
    pub(super) fn unattended(&self, valid_until: Moment) -> KillSchedule {
        KillSchedule {
            terminate_at: self.give_up_at(valid_until) + self.margin / 2,
            kill_at: valid_until - self.margin,
            lease_ends_at: valid_until,
        }
    }

    /// Returns the schedule of a lease that is lost now.
    pub(super) fn lost(&self, now: Moment, valid_until: Moment) -> KillSchedule {
        KillSchedule { terminate_at: now, kill_at: self.kill_at(now, valid_until), lease_ends_at: valid_until }
    }

    /// Returns when a guardian that was to kill at `kill_at` and has not reported must have been stopped.
    pub(super) fn overdue_at(&self, now: Moment, kill_at: Moment) -> Moment {
        kill_at.max(now) + self.margin / 2
    }

    /// Returns when a command that is terminated now is killed.
    fn kill_at(&self, now: Moment, valid_until: Moment) -> Moment {
        (now + self.grace).min(valid_until - self.margin)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(ms: u64) -> Moment {
        Moment::from_boot(Duration::from_millis(ms))
    }
    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn the_command_is_killed_before_the_lease_ends() {
        let short = Deadlines::new(ms(2_400), None).expect("fits");
        assert_eq!((short.grace, short.margin), (ms(600), Duration::from_millis(1_000) / 3));
        let short = Deadlines { margin: ms(300), ..short };
        assert_eq!(short.give_up_at(at(2_378)), at(1_478));
        assert_eq!(short.kill_at(at(1_478), at(2_378)), at(2_078));
        // Terminated late, the command has the grace that is left.
        assert_eq!(short.kill_at(at(1_700), at(2_378)), at(2_078));
        // Terminated early, as by a revocation, it has no more than the full grace.
        assert_eq!(short.kill_at(at(100), at(2_378)), at(700));
        assert_eq!(short.kill_at(at(5_000), at(2_378)), at(2_078));
    }

    #[test]
    fn a_silent_keeper_gets_half_a_margin() {
        let short = Deadlines { grace: ms(500), margin: ms(100) };
        let schedule = short.unattended(at(1_978));
        assert_eq!(
            (schedule.terminate_at, schedule.kill_at, schedule.lease_ends_at),
            (at(1_428), at(1_878), at(1_978))
        );
        assert_eq!(short.overdue_at(at(100), at(1_878)), at(1_928));
        assert_eq!(short.overdue_at(at(1_900), at(1_878)), at(1_950));
    }

    #[test]
    fn grace_must_leave_time_for_renewals() {
        assert!(Deadlines::new(ms(30_000), Some(ms(15_000))).is_some());
        assert!(Deadlines::new(ms(30_000), Some(ms(15_001))).is_none());
        let none = Deadlines::new(ms(30_000), Some(ms(0))).expect("fits");
        assert_eq!(none.give_up_at(at(29_000)), at(28_000));
        let long = Deadlines::new(Duration::from_secs(3_600), None).expect("fits");
        assert_eq!(long.give_up_at(at(100_000)), at(89_000));
    }

    #[test]
    fn every_lease_is_due_for_renewal_before_it_is_given_up() {
        for ttl in [100, 500, 1_000, 5_000, 30_000, 3_600_000].map(ms) {
            for grace in [None, Some(ms(0)), Some(ttl / 4), Some(ttl / 2)] {
                let deadlines = Deadlines::new(ttl, grace).expect("fits");
                let given_up_after = deadlines.give_up_at(Moment::from_boot(ttl)).since_boot();
                assert!(given_up_after > ttl / 3, "{ttl:?} {grace:?}: {given_up_after:?}");
                // At least as long as a loaded machine took to kill a handful of processes: 74 ms.
                assert!(ttl < ms(1_000) || deadlines.margin > ms(100) || grace == Some(ttl / 2), "{ttl:?} {grace:?}");
            }
        }
    }
}
