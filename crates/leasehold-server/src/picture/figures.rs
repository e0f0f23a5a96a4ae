//! The five numbers, and how they went over the last hour. No clock and no I/O.

use std::collections::VecDeque;

use serde::Serialize;

use super::record::{Count, Seen};

/// One point stands for so long.
const STEP_MS: u64 = 30_000;
/// Points kept: an hour of them. Half of them are shown.
const KEPT: usize = 120;
const SHOWN: usize = 60;
const MINUTE_MS: u64 = 60_000;
/// Hand-offs of the last minute that are counted one by one.
const MINUTE_KEPT: usize = 10_000;

/// One point of the sparklines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub(crate) struct Point {
    /// When it began; it stands for half a minute.
    pub(crate) at_ms: u64,
    /// Locks held, at its end.
    held: usize,
    /// Most that waited at once.
    waiting: usize,
    /// The longest wait seen.
    longest_wait_ms: u64,
    /// Hand-offs within it.
    handoffs: u64,
    /// Bad ends within it.
    bad_ends: u64,
}

/// What is known now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Now {
    pub(crate) held: usize,
    pub(crate) waiting: usize,
    pub(crate) longest_wait_ms: u64,
}

impl Now {
    /// Of locks as they were last seen to change: whoever waited then has gone on waiting.
    pub(crate) fn of<'a>(locks: impl Iterator<Item = &'a Seen>, now_ms: u64) -> Self {
        let mut now = Self::default();
        for Seen { lock, at_ms } in locks {
            now.held += usize::from(lock.held);
            now.waiting += lock.waiters.len();
            if let Some(longest) = lock.waiters.iter().map(|waiter| waiter.waiting_ms).max() {
                now.longest_wait_ms = now.longest_wait_ms.max(longest + now_ms.saturating_sub(*at_ms));
            }
        }
        now
    }
}

#[derive(Debug, Default)]
pub(crate) struct Figures {
    pub(crate) now: Now,
    points: VecDeque<Point>,
    handoffs: VecDeque<u64>,
}

impl Figures {
    pub(crate) fn looked(&mut self, at_ms: u64, now: Now) {
        self.now = now;
        let point = self.point(at_ms);
        point.held = now.held;
        point.waiting = point.waiting.max(now.waiting);
        point.longest_wait_ms = point.longest_wait_ms.max(now.longest_wait_ms);
    }

    pub(crate) fn count(&mut self, at_ms: u64, counts: &[Count]) {
        for count in counts {
            let point = self.point(at_ms);
            match count {
                Count::BadEnd => point.bad_ends += 1,
                Count::HandOff => {
                    point.handoffs += 1;
                    self.handoffs.push_back(at_ms);
                }
            }
        }
        while self.handoffs.len() > MINUTE_KEPT {
            self.handoffs.pop_front();
        }
    }

    pub(crate) fn handoffs_per_minute(&self, at_ms: u64) -> usize {
        self.handoffs.iter().filter(|at| **at + MINUTE_MS > at_ms).count()
    }

    pub(crate) fn bad_ends(&self) -> u64 {
        self.points.iter().map(|point| point.bad_ends).sum()
    }

    pub(crate) fn shown(&self) -> Vec<Point> {
        let skipped = self.points.len().saturating_sub(SHOWN);
        self.points.iter().skip(skipped).copied().collect()
    }

    /// The point of a moment: the newest one, after those that were missed.
    fn point(&mut self, at_ms: u64) -> &mut Point {
        let at_ms = at_ms / STEP_MS * STEP_MS;
        let newest = self.points.back().map_or(0, |point| point.at_ms);
        if newest < at_ms {
            // Nobody looked meanwhile (the machine slept): it stays empty.
            let missed = (at_ms - newest) / STEP_MS;
            if newest > 0 && missed < KEPT as u64 {
                self.points.extend((1..missed).map(|n| Point { at_ms: newest + n * STEP_MS, ..Point::default() }));
            }
            let (held, waiting) = (self.now.held, self.now.waiting);
            self.points.push_back(Point { at_ms, held, waiting, ..Point::default() });
        }
        let first = at_ms.saturating_sub(STEP_MS * KEPT as u64);
        while self.points.len() > 1 && self.points.front().is_some_and(|point| point.at_ms <= first) {
            self.points.pop_front();
        }
        self.points.back_mut().expect("pushed")
    }
}

#[cfg(test)]
mod tests {
    use leasehold::{LockView, WaiterView};

    use super::*;

    #[test]
    fn a_wait_goes_on_while_nothing_changes() {
        let waiter = |waiting_ms| WaiterView { owner: "o".into(), ticket: waiting_ms, waiting_ms };
        let seen = |at_ms, waiting: &[u64]| {
            let waiters = waiting.iter().map(|waiting_ms| waiter(*waiting_ms)).collect();
            let lock = LockView { name: "a".into(), held: true, waiters, ..free() };
            Seen { lock, at_ms }
        };
        let locks = [seen(10_000, &[40, 30]), seen(17_000, &[2_000]), seen(1_000, &[])];
        let longest = |now_ms| Now::of(locks.iter(), now_ms).longest_wait_ms;
        assert_eq!((longest(17_500), longest(9_000)), (7_540, 2_000));
        assert_eq!(Now::of(locks.iter(), 0), Now { held: 3, waiting: 3, longest_wait_ms: 2_000 });
    }

    fn free() -> LockView {
        let name = leasehold::LockName::new("a").expect("a name");
        leasehold::LockInfo { name, holder: None, waiters: Vec::new() }.view()
    }

    #[test]
    fn points_are_half_minutes_and_an_hour_of_them_is_kept() {
        let mut figures = Figures::default();
        let base = 1_700_000_010_000;
        let look = |figures: &mut Figures, at_ms, held, waiting, longest_wait_ms| {
            figures.looked(at_ms, Now { held, waiting, longest_wait_ms });
        };
        look(&mut figures, base, 3, 2, 500);
        look(&mut figures, base + 5_000, 4, 1, 300);
        figures.count(base + 6_000, &[Count::HandOff, Count::BadEnd, Count::HandOff]);
        let shown = figures.shown();
        assert_eq!(shown.len(), 1);
        assert_eq!((shown[0].held, shown[0].waiting, shown[0].longest_wait_ms), (4, 2, 500));
        assert_eq!((shown[0].handoffs, shown[0].bad_ends), (2, 1));
        assert_eq!((figures.handoffs_per_minute(base + 7_000), figures.handoffs_per_minute(base + 67_000)), (2, 0));
        look(&mut figures, base + 125_000, 1, 0, 0);
        assert_eq!(figures.shown().len(), 5, "the half minutes nobody looked are there");
        assert_eq!(figures.bad_ends(), 1);
        look(&mut figures, base + 3_700_000, 1, 0, 0);
        assert_eq!(figures.bad_ends(), 0, "an hour later");
        look(&mut figures, base + 360_000_000, 1, 0, 0);
        for n in 0..1_000 {
            look(&mut figures, base + 360_000_000 + n * STEP_MS, 1, 0, 0);
        }
        assert_eq!((figures.points.len(), figures.shown().len()), (KEPT, SHOWN));
    }
}
