//! A rate limit for log lines that any client can cause: a flood must not fill the disk.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The most lines written within one window.
const LINES_PER_WINDOW: u32 = 10;
const WINDOW: Duration = Duration::from_secs(10);

/// The rate limit of one kind of log line in this process.
#[derive(Debug)]
pub(crate) struct LogThrottle(Mutex<Option<LogWindow>>);

#[derive(Debug, Clone, Copy)]
struct LogWindow {
    began: Instant,
    lines: u32,
    suppressed: u64,
}

impl LogThrottle {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Returns `None` if the line must be suppressed, else the number of lines suppressed in the previous window.
    pub(crate) fn pass(&self) -> Option<u64> {
        self.pass_at(Instant::now())
    }

    fn pass_at(&self, now: Instant) -> Option<u64> {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *window {
            Some(open) if now.duration_since(open.began) < WINDOW => {
                if open.lines >= LINES_PER_WINDOW {
                    open.suppressed += 1;
                    return None;
                }
                open.lines += 1;
                Some(0)
            }
            over => {
                let suppressed = over.map_or(0, |before| before.suppressed);
                *over = Some(LogWindow { began: now, lines: 1, suppressed: 0 });
                Some(suppressed)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_logs_some_lines_and_a_count() {
        let (throttle, now) = (LogThrottle::new(), Instant::now());
        let passed = (0..1_000).filter_map(|_| throttle.pass_at(now)).count();
        assert_eq!(passed, LINES_PER_WINDOW as usize);
        assert_eq!(throttle.pass_at(now + WINDOW), Some(990), "the next line says how many are missing");
        assert_eq!(throttle.pass_at(now + WINDOW), Some(0));
    }
}
