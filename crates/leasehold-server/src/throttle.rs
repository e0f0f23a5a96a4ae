//! Log lines that a stranger can cause, limited: a flood of them must not fill the disk.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lines that are written within one window.
const LINES: u32 = 10;
const WINDOW: Duration = Duration::from_secs(10);

/// The limit of one kind of log line, in the whole process.
#[derive(Debug)]
pub(crate) struct Throttle(Mutex<Option<Window>>);

#[derive(Debug, Clone, Copy)]
struct Window {
    began: Instant,
    lines: u32,
    suppressed: u64,
}

impl Throttle {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// `Some` when a line may be written now, with how many were suppressed since the window before it.
    pub(crate) fn pass(&self) -> Option<u64> {
        self.pass_at(Instant::now())
    }

    fn pass_at(&self, now: Instant) -> Option<u64> {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *window {
            Some(open) if now.duration_since(open.began) < WINDOW => {
                if open.lines >= LINES {
                    open.suppressed += 1;
                    return None;
                }
                open.lines += 1;
                Some(0)
            }
            over => {
                let suppressed = over.map_or(0, |before| before.suppressed);
                *over = Some(Window { began: now, lines: 1, suppressed: 0 });
                Some(suppressed)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_some_lines_and_a_count() {
        let (throttle, now) = (Throttle::new(), Instant::now());
        let passed = (0..1_000).filter_map(|_| throttle.pass_at(now)).count();
        assert_eq!(passed, LINES as usize);
        assert_eq!(throttle.pass_at(now + WINDOW), Some(990), "the next line says how many are missing");
        assert_eq!(throttle.pass_at(now + WINDOW), Some(0));
    }
}
