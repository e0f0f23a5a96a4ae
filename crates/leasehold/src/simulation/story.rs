//! What happened in a world, in words.

use std::cell::RefCell;

use crate::clock::Moment;

pub(super) struct Story {
    began: Moment,
    tells: bool,
    lines: RefCell<Vec<String>>,
}

impl Story {
    pub(super) fn new(began: Moment, tells: bool) -> Self {
        Self { began, tells, lines: RefCell::default() }
    }

    pub(super) fn tells(&self) -> bool {
        self.tells
    }

    pub(super) fn add(&self, at: Moment, line: impl AsRef<str>) {
        if self.tells {
            let seconds = self.began.until(at).as_secs_f64();
            self.lines.borrow_mut().push(format!("{seconds:>10.4} s  {}", line.as_ref()));
        }
    }

    pub(super) fn take(&self) -> Vec<String> {
        self.lines.take()
    }
}

/// Processes by letter, incarnations by number: `P1`, and after a crash `P1'`.
pub(super) fn process_name(which: usize, incarnation: u64) -> String {
    let marks = usize::try_from(incarnation).unwrap_or(0);
    format!("P{}{}", which + 1, "'".repeat(marks))
}
