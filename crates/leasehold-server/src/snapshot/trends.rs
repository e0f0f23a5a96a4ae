//! The totals of all locks and their trends over the last hour. No clock and no I/O.

use std::collections::VecDeque;

use serde::Serialize;

use super::record::{Count, ObservedLock};

/// The time that one point covers.
const STEP_MS: u64 = 30_000;
/// The points kept: one hour.
const MAX_POINTS: usize = 120;
/// The points shown: half an hour.
const SHOWN_POINTS: usize = 60;
const MINUTE_MS: u64 = 60_000;
/// The most hand-offs of the last minute that are remembered individually.
const MAX_HANDOFFS: usize = 10_000;

/// One point of the sparklines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub(crate) struct Point {
    /// When the point begins, in wall-clock milliseconds; it covers half a minute.
    pub(crate) at_ms: u64,
    /// Held locks, at the end of the point.
    held: usize,
    /// The most waiters at one time.
    waiting: usize,
    /// The longest observed wait.
    longest_wait_ms: u64,
    /// Hand-offs within the point.
    handoffs: u64,
    /// Bad ends within the point.
    bad_ends: u64,
}

/// The current totals of all locks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) held: usize,
    pub(crate) waiting: usize,
    pub(crate) longest_wait_ms: u64,
}

impl Totals {
    /// Sums up locks as they were when they last changed. Waiters have gone on waiting since then.
    pub(crate) fn of<'a>(locks: impl Iterator<Item = &'a ObservedLock>, now_ms: u64) -> Self {
        let mut now = Self::default();
        for ObservedLock { lock, at_ms } in locks {
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
pub(crate) struct Trends {
    pub(crate) totals: Totals,
    points: VecDeque<Point>,
    handoffs: VecDeque<u64>,
}

impl Trends {
    pub(crate) fn record_totals(&mut self, at_ms: u64, totals: Totals) {
        self.totals = totals;
        let point = self.point(at_ms);
        point.held = totals.held;
        point.waiting = point.waiting.max(totals.waiting);
        point.longest_wait_ms = point.longest_wait_ms.max(totals.longest_wait_ms);
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
        while self.handoffs.len() > MAX_HANDOFFS {
            self.handoffs.pop_front();
        }
    }

    pub(crate) fn handoffs_per_minute(&self, at_ms: u64) -> usize {
        self.handoffs.iter().filter(|at| **at + MINUTE_MS > at_ms).count()
    }

    pub(crate) fn bad_ends(&self) -> u64 {
        self.points.iter().map(|point| point.bad_ends).sum()
    }

    pub(crate) fn recent_points(&self) -> Vec<Point> {
        let skipped = self.points.len().saturating_sub(SHOWN_POINTS);
        self.points.iter().skip(skipped).copied().collect()
    }

    /// Returns the newest point, which covers `at_ms`, after filling in missed points.
    fn point(&mut self, at_ms: u64) -> &mut Point {
        let at_ms = at_ms / STEP_MS * STEP_MS;
        let newest = self.points.back().map_or(0, |point| point.at_ms);
        if newest < at_ms {
            // Points without a scan, for example while the machine slept, stay empty.
            let missed = (at_ms - newest) / STEP_MS;
            if newest > 0 && missed < MAX_POINTS as u64 {
                self.points.extend((1..missed).map(|n| Point { at_ms: newest + n * STEP_MS, ..Point::default() }));
            }
            let (held, waiting) = (self.totals.held, self.totals.waiting);
            self.points.push_back(Point { at_ms, held, waiting, ..Point::default() });
        }
        let first = at_ms.saturating_sub(STEP_MS * MAX_POINTS as u64);
        while self.points.len() > 1 && self.points.front().is_some_and(|point| point.at_ms <= first) {
            self.points.pop_front();
        }
        self.points.back_mut().expect("pushed")
    }
}

#[cfg(test)]
mod tests {
    use leasehold::inspect::{LockView, WaiterView};

    use super::*;

    #[test]
    fn a_wait_goes_on_while_nothing_changes() {
        let waiter = |waiting_ms| WaiterView { owner: "o".into(), ticket: waiting_ms, waiting_ms };
        let seen = |at_ms, waiting: &[u64]| {
            let waiters = waiting.iter().map(|waiting_ms| waiter(*waiting_ms)).collect();
            let lock = LockView { name: "a".into(), held: true, waiters, ..free() };
            ObservedLock { lock, at_ms }
        };
        let locks = [seen(10_000, &[40, 30]), seen(17_000, &[2_000]), seen(1_000, &[])];
        let longest = |now_ms| Totals::of(locks.iter(), now_ms).longest_wait_ms;
        assert_eq!((longest(17_500), longest(9_000)), (7_540, 2_000));
        assert_eq!(Totals::of(locks.iter(), 0), Totals { held: 3, waiting: 3, longest_wait_ms: 2_000 });
    }

    fn free() -> LockView {
        let name = leasehold::LockName::new("a").expect("a name");
        leasehold::inspect::LockInfo { name, holder: None, waiters: Vec::new() }.view()
    }

    #[test]
    fn points_are_half_minutes_and_an_hour_of_them_is_kept() {
        let mut trends = Trends::default();
        let base = 1_700_000_010_000;
        let record = |trends: &mut Trends, at_ms, held, waiting, longest_wait_ms| {
            trends.record_totals(at_ms, Totals { held, waiting, longest_wait_ms });
        };
        record(&mut trends, base, 3, 2, 500);
        record(&mut trends, base + 5_000, 4, 1, 300);
        trends.count(base + 6_000, &[Count::HandOff, Count::BadEnd, Count::HandOff]);
        let shown = trends.recent_points();
        assert_eq!(shown.len(), 1);
        assert_eq!((shown[0].held, shown[0].waiting, shown[0].longest_wait_ms), (4, 2, 500));
        assert_eq!((shown[0].handoffs, shown[0].bad_ends), (2, 1));
        assert_eq!((trends.handoffs_per_minute(base + 7_000), trends.handoffs_per_minute(base + 67_000)), (2, 0));
        record(&mut trends, base + 125_000, 1, 0, 0);
        assert_eq!(trends.recent_points().len(), 5, "half minutes without a scan are filled in");
        assert_eq!(trends.bad_ends(), 1);
        record(&mut trends, base + 3_700_000, 1, 0, 0);
        assert_eq!(trends.bad_ends(), 0, "an hour later");
        record(&mut trends, base + 360_000_000, 1, 0, 0);
        for n in 0..1_000 {
            record(&mut trends, base + 360_000_000 + n * STEP_MS, 1, 0, 0);
        }
        assert_eq!((trends.points.len(), trends.recent_points().len()), (MAX_POINTS, SHOWN_POINTS));
    }
}
