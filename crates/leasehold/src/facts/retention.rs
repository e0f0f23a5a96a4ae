use std::time::Duration;

use super::invalid::{Invalid, duration_problem};

/// How long a store keeps a binding or a stored result: whole milliseconds, 1 s to 400 days.
///
/// ```
/// use std::time::Duration;
/// use leasehold::bindings::Retention;
///
/// assert!(Retention::new(Duration::from_secs(30)).is_ok());
/// assert!(Retention::new(Duration::from_millis(999)).is_err(), "too short");
/// assert!(Retention::new(Duration::MAX).is_err(), "too long");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Retention(Duration);

impl Retention {
    /// The shortest retention. A second caller must have time to read the value.
    pub const MIN: Duration = Duration::from_secs(1);
    /// The longest retention. Values that are needed for longer belong in a database.
    pub const MAX: Duration = Duration::from_secs(400 * 24 * 60 * 60);

    /// Creates a retention.
    ///
    /// # Errors
    /// [`Invalid::Retention`] outside [`Retention::MIN`]`..=`[`Retention::MAX`], or with a fraction of a millisecond.
    pub const fn new(given: Duration) -> Result<Self, Invalid> {
        let (shortest, longest) = ((Self::MIN, "is shorter than 1 s"), (Self::MAX, "is longer than 400 days"));
        match duration_problem(given, shortest, longest) {
            Some(problem) => Err(Invalid::Retention { given, problem }),
            None => Ok(Self(given)),
        }
    }

    /// Returns the duration.
    pub const fn duration(self) -> Duration {
        self.0
    }

    /// Returns whole milliseconds.
    #[expect(clippy::cast_possible_truncation, reason = "at most 400 days")]
    pub const fn as_millis(self) -> u64 {
        self.0.as_millis() as u64
    }
}

impl TryFrom<Duration> for Retention {
    type Error = Invalid;
    fn try_from(given: Duration) -> Result<Self, Invalid> {
        Self::new(given)
    }
}
