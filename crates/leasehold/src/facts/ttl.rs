use std::time::Duration;

use super::invalid::{Invalid, duration_problem};

/// How long the store keeps a lease without a renewal: whole milliseconds, 50 ms to 24 h.
///
/// ```
/// use std::time::Duration;
/// use leasehold::lease::Ttl;
///
/// assert_eq!(Ttl::default().duration(), Duration::from_secs(30));
/// assert!(Ttl::new(Duration::ZERO).is_err(), "too short");
/// assert!(Ttl::new(Duration::MAX).is_err(), "too long");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ttl(Duration);

impl Ttl {
    /// The shortest lease. A shorter one could expire within a round trip.
    pub const MIN: Duration = Duration::from_millis(50);
    /// The longest lease. A crash must not block a name for more than a day.
    pub const MAX: Duration = Duration::from_secs(24 * 60 * 60);

    /// Creates a ttl.
    ///
    /// # Errors
    /// [`Invalid::Ttl`] outside [`Ttl::MIN`]`..=`[`Ttl::MAX`], or with a fraction of a millisecond.
    pub const fn new(given: Duration) -> Result<Self, Invalid> {
        let (shortest, longest) = ((Self::MIN, "is shorter than 50 ms"), (Self::MAX, "is longer than 24 h"));
        match duration_problem(given, shortest, longest) {
            Some(problem) => Err(Invalid::Ttl { given, problem }),
            None => Ok(Self(given)),
        }
    }

    /// Returns the duration.
    pub const fn duration(self) -> Duration {
        self.0
    }

    /// Returns whole milliseconds.
    #[expect(clippy::cast_possible_truncation, reason = "at most 24 h")]
    pub const fn as_millis(self) -> u64 {
        self.0.as_millis() as u64
    }
}

impl Default for Ttl {
    /// 30 s: survives a garbage collection or a slow store, and is short enough to wait for after a crash.
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
    fn a_ttl_has_bounds() {
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
