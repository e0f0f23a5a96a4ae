//! The only file that reads time.
//!
//! Leases are measured with `CLOCK_BOOTTIME`, which goes on while the machine sleeps: Rust's
//! `Instant` stops in suspend, and a laptop that wakes up would believe in leases long over.

use std::fmt;
use std::io;
use std::ops::{Add, Sub};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime, timerfd_create,
    timerfd_settime,
};
use tokio::io::unix::AsyncFd;

#[cfg(test)]
pub(crate) mod simulated;

/// A moment on this machine's boot clock.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(Duration);

impl Moment {
    /// Returns the present moment.
    pub fn now() -> Self {
        #[cfg(test)]
        if let Some(now) = simulated::now() {
            return now;
        }
        let t = clock_gettime(ClockId::Boottime);
        // Neither part is ever negative: the clock counts from boot.
        Self(Duration::new(t.tv_sec.unsigned_abs(), u32::try_from(t.tv_nsec).unwrap_or(0)))
    }

    /// Returns the moment at a distance from boot, for arithmetic without a clock.
    pub const fn from_boot(since_boot: Duration) -> Self {
        Self(since_boot)
    }

    /// Returns the distance from boot.
    pub const fn since_boot(self) -> Duration {
        self.0
    }

    /// Returns the time until `later`, or zero when that has passed.
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

/// A descriptor that becomes readable at a moment of the boot clock: at once when the machine wakes up after it.
#[derive(Debug)]
pub struct Alarm(OwnedFd);

impl Alarm {
    /// Creates an alarm that is not set.
    ///
    /// # Errors
    ///
    /// The process or the system has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?))
    }

    /// Sets the alarm and clears an earlier signal; `None` switches it off.
    pub fn set(&self, at: Option<Moment>) {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let at = at.map_or(zero, |Moment(at)| Timespec {
            tv_sec: at.as_secs().try_into().unwrap_or(i64::MAX),
            // Zero would switch it off.
            tv_nsec: at.subsec_nanos().max(1).into(),
        });
        // It fails only for an invalid time.
        let _ = timerfd_settime(&self.0, TimerfdTimerFlags::ABSTIME, &Itimerspec { it_interval: zero, it_value: at });
    }
}

impl AsFd for Alarm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Alarm {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Sleeps by an [`Alarm`], for one task that has many deadlines.
pub(crate) struct Sleeper {
    /// `None` where there is no descriptor left, or no use for one.
    alarm: Option<AsyncFd<Alarm>>,
    set_to: Option<Moment>,
}

impl Sleeper {
    /// To be called inside a runtime with I/O.
    #[expect(deprecated, reason = "its successor is `unsafe`; an alarm owns its descriptor, so this is sound")]
    pub(crate) fn with_alarm() -> Self {
        #[cfg(test)]
        if simulated::now().is_some() {
            return Self::without_alarm();
        }
        Self { alarm: Alarm::new().and_then(AsyncFd::new).ok(), set_to: None }
    }

    /// Without a descriptor: a sleep that spans a suspend ends up to a second late.
    pub(crate) const fn without_alarm() -> Self {
        Self { alarm: None, set_to: None }
    }

    /// Sleeps until a moment of the boot clock.
    ///
    /// Cancel safe.
    pub(crate) async fn until(&mut self, moment: Moment) {
        while Moment::now() < moment {
            let Some(alarm) = &self.alarm else { return sleep_until(Some(moment)).await };
            if self.set_to != Some(moment) {
                alarm.get_ref().set(Some(moment));
                self.set_to = Some(moment);
            }
            match alarm.readable().await {
                Ok(mut ready) => ready.clear_ready(),
                Err(_) => return sleep_until(Some(moment)).await,
            }
        }
    }
}

/// Wall-clock time in milliseconds since 1970, for people and for `since_ms`; no lease depends on it.
pub(crate) fn wall_ms() -> u64 {
    #[cfg(test)]
    if let Some(now) = simulated::now() {
        return u64::try_from(now.since_boot().as_millis()).unwrap_or(u64::MAX);
    }
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
    #[cfg(test)]
    if simulated::now().is_some() {
        return simulated::VirtualSleep::until(moment).await;
    }
    loop {
        let left = Moment::now().until(moment);
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(Duration::from_secs(1))).await;
    }
}

/// Sleeps for a short while, by the runtime's timer.
pub(crate) async fn sleep(pause: Duration) {
    #[cfg(test)]
    if let Some(now) = simulated::now() {
        return simulated::VirtualSleep::until(now + pause).await;
    }
    tokio::time::sleep(pause).await;
}

/// Waits for a result for at most `limit`, by the runtime's timer.
pub(crate) async fn timeout<T>(limit: Duration, work: impl Future<Output = T>) -> Option<T> {
    #[cfg(test)]
    if simulated::now().is_some() {
        return tokio::select! {
            biased;
            done = work => Some(done),
            () = sleep(limit) => None,
        };
    }
    tokio::time::timeout(limit, work).await.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel knows of a descriptor.
    fn fdinfo(alarm: &Alarm) -> String {
        std::fs::read_to_string(format!("/proc/self/fdinfo/{}", alarm.as_raw_fd())).expect("fdinfo")
    }

    /// The kernel's name for `CLOCK_BOOTTIME` is 7. A suspend cannot be had in a test; that the alarm runs on the
    /// clock that goes on in it can be seen.
    #[tokio::test]
    async fn an_alarm_is_set_on_the_boot_clock_and_wakes_at_its_moment() {
        let mut sleeper = Sleeper::with_alarm();
        let until = Moment::now() + Duration::from_secs(3_600);
        let waited = tokio::time::timeout(Duration::from_millis(20), sleeper.until(until)).await;
        assert!(waited.is_err(), "woken an hour early");
        let alarm = sleeper.alarm.as_ref().expect("a descriptor").get_ref();
        let info = fdinfo(alarm);
        assert!(info.contains("clockid: 7\n"), "{info}");
        assert!(info.contains("it_value: (3599, "), "{info}");
        alarm.set(None);
        assert!(fdinfo(alarm).contains("it_value: (0, 0)"));

        // An earlier one replaces it; each is slept through to its end, and one that is past not at all.
        for ms in [30, 20, 0] {
            let until = Moment::now() + Duration::from_millis(ms);
            sleeper.until(until).await;
            assert!(Moment::now() >= until);
        }
    }
}
