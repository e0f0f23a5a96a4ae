//! The only file that reads time.
//!
//! Leases are measured with `CLOCK_BOOTTIME`, which goes on while the machine sleeps: Rust's
//! `Instant` stops in suspend, and a laptop that wakes up would believe in leases long over.

use std::fmt;
use std::ops::{Add, Sub};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};

/// A moment on this machine's boot clock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(Duration);

impl Moment {
    /// Now.
    pub fn now() -> Self {
        let t = clock_gettime(ClockId::Boottime);
        // Neither part is ever negative: the clock counts from boot.
        Self(Duration::new(t.tv_sec.unsigned_abs(), u32::try_from(t.tv_nsec).unwrap_or(0)))
    }

    /// A moment given by its distance from boot, for arithmetic without a clock.
    pub const fn from_boot(since_boot: Duration) -> Self {
        Self(since_boot)
    }

    /// The distance from boot.
    pub const fn since_boot(self) -> Duration {
        self.0
    }

    /// How long until `later`; zero when it is past.
    pub fn until(self, later: Self) -> Duration {
        later.0.saturating_sub(self.0)
    }
}

impl Add<Duration> for Moment {
    type Output = Self;
    fn add(self, by: Duration) -> Self {
        Self(self.0.saturating_add(by))
    }
}

impl Sub<Duration> for Moment {
    type Output = Self;
    fn sub(self, by: Duration) -> Self {
        Self(self.0.saturating_sub(by))
    }
}

impl fmt::Debug for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "boot+{:?}", self.0)
    }
}

/// Wall-clock time in milliseconds since 1970, for people and for `since_ms`; no lease depends on it.
pub(crate) fn wall_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Wall-clock time in microseconds since 1970: what fences are raised to.
pub(crate) fn wall_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// Sleeps until a moment of the boot clock; for ever when there is none.
///
/// The runtime's timer stops in suspend, so a long sleep looks at the clock every second.
pub(crate) async fn sleep_until(moment: Option<Moment>) {
    let Some(moment) = moment else { return std::future::pending().await };
    loop {
        let left = Moment::now().until(moment);
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(Duration::from_secs(1))).await;
    }
}
