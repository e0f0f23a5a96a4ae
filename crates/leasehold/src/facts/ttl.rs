use std::time::Duration;

use super::Invalid;

/// How long the store keeps a lease that nobody renews: whole milliseconds, 50 ms to 24 h.
///
/// ```
/// use std::time::Duration;
/// use leasehold::lease::Ttl;
///
/// assert_eq!(Ttl::default().duration(), Duration::from_secs(30));
/// assert!(Ttl::new(Duration::ZERO).is_err(), "a lock that is over before it began");
/// assert!(Ttl::new(Duration::MAX).is_err(), "a lock without an end");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ttl(Duration);

impl Ttl {
    /// The shortest lease: below it a round trip eats the lease.
    pub const MIN: Duration = Duration::from_millis(50);
    /// The longest lease: a crash must not block a name for longer than a day.
    pub const MAX: Duration = Duration::from_secs(24 * 60 * 60);

    /// Checks a duration.
    ///
    /// # Errors
    /// [`Invalid::Ttl`] outside [`Ttl::MIN`]`..=`[`Ttl::MAX`], or with a fraction of a millisecond.
    pub const fn new(given: Duration) -> Result<Self, Invalid> {
        let problem = if given.as_nanos() < Self::MIN.as_nanos() {
            "is shorter than 50 ms"
        } else if given.as_nanos() > Self::MAX.as_nanos() {
            "is longer than 24 h"
        } else if !given.subsec_nanos().is_multiple_of(1_000_000) {
            "is not a whole number of milliseconds"
        } else {
            return Ok(Self(given));
        };
        Err(Invalid::Ttl { given, problem })
    }

    /// The duration.
    pub const fn duration(self) -> Duration {
        self.0
    }

    /// Whole milliseconds, as the stores count.
    #[expect(clippy::cast_possible_truncation, reason = "at most 24 h")]
    pub const fn as_millis(self) -> u64 {
        self.0.as_millis() as u64
    }
}

impl Default for Ttl {
    /// 30 s: long enough for a garbage collection or a slow store, short enough to wait out after
    /// a crash.
    fn default() -> Self {
        Self(Duration::from_secs(30))
    }
}

impl TryFrom<Duration> for Ttl {
    type Error = Invalid;
    fn try_from(given: Duration) -> Result<Self, Invalid> {
        Self::new(given)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_its_bounds_and_nothing_beyond() {
        assert_eq!(Ttl::new(Ttl::MIN).expect("min").as_millis(), 50);
        assert_eq!(Ttl::new(Ttl::MAX).expect("max").as_millis(), 86_400_000);
        for bad in [
            Duration::ZERO,
            Duration::from_millis(49),
            Ttl::MAX + Duration::from_millis(1),
            Duration::from_micros(50_001),
            Duration::MAX,
        ] {
            assert!(Ttl::new(bad).is_err(), "{bad:?}");
        }
    }
}
