//! When a command whose lease is not renewed must be told, and when it must be dead. No clock, no I/O.

use std::time::Duration;

use leasehold::clock::Moment;

/// How long a command gets between SIGTERM and SIGKILL unless the caller says.
const LONGEST_GRACE: Duration = Duration::from_secs(10);

/// The times of one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Deadlines {
    grace: Duration,
    margin: Duration,
}

impl Deadlines {
    /// `None`: that much grace leaves a lease of `ttl` no time to be renewed.
    pub(super) fn new(ttl: Duration, grace: Option<Duration>) -> Option<Self> {
        // What killing, burying and a busy machine may take.
        let margin = (ttl / 20).clamp(Duration::from_millis(10), Duration::from_secs(1));
        let grace = match grace {
            // A renewal is due after a third; from then until the grace begins the store may answer.
            Some(grace) if grace > ttl / 2 => return None,
            Some(grace) => grace,
            None => (ttl / 4).min(LONGEST_GRACE),
        };
        Some(Self { grace, margin })
    }

    /// A lease proven until then is given up from here on, unless it is renewed before.
    pub(super) fn give_up_at(&self, valid_until: Moment) -> Moment {
        valid_until - self.margin - self.grace
    }

    /// Told now, the command is killed then.
    pub(super) fn kill_at(&self, now: Moment, valid_until: Moment) -> Moment {
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
    fn the_command_is_dead_before_the_lease_is_over() {
        let short = Deadlines::new(ms(2_000), None).expect("fits");
        assert_eq!(short.give_up_at(at(1_978)), at(1_378));
        assert_eq!(short.kill_at(at(1_378), at(1_978)), at(1_878));
        // Told late, the grace is what is left.
        assert_eq!(short.kill_at(at(1_700), at(1_978)), at(1_878));
        // Told early, as by a revocation, it is not longer than promised.
        assert_eq!(short.kill_at(at(100), at(1_978)), at(600));
        assert_eq!(short.kill_at(at(5_000), at(1_978)), at(1_878));
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
}
