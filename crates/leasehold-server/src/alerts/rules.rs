//! Rules over the fleet's counters. Counters only rise, so the rules use the increase within a window. No clock, no
//! I/O.

use std::collections::VecDeque;
use std::time::Duration;

use super::condition::{Condition, Level};

/// A higher rate of emergency releases raises an alert.
pub(crate) const EMERGENCY_RATE: f64 = 0.05;

/// The counters that the rules use, and the store's marks of how far they were evaluated. Thanks to the marks, a
/// restart neither hides what happened meanwhile nor repeats old alerts.
pub(super) const COUNTERS: [(&str, &str); 4] = [
    ("total_locks", "alerted_total_locks"),
    ("emergency_releases", "alerted_emergency_releases"),
    ("ownership_violations", "alerted_ownership_violations"),
    ("release_script_errors", "alerted_release_script_errors"),
];

/// The values of [`COUNTERS`].
pub(super) type Counts = [u64; 4];

/// The samples of the counters within the window.
#[derive(Debug)]
pub(super) struct CounterWindow {
    length_ms: u64,
    /// Oldest first. The newest sample is compared with the first.
    samples: VecDeque<(u64, Counts)>,
}

impl CounterWindow {
    pub(super) fn new(length: Duration) -> Self {
        Self { length_ms: u64::try_from(length.as_millis()).unwrap_or(u64::MAX), samples: VecDeque::new() }
    }

    /// Adds a sample and returns the conditions that are true now.
    pub(super) fn sample(&mut self, counted: &[(String, u64)], now_ms: u64) -> Vec<Condition> {
        let of = |name: &str| counted.iter().find(|(counter, _)| counter == name).map_or(0, |(_, count)| *count);
        let now = COUNTERS.map(|(counter, _)| of(counter));
        // The counters fell, so the store was emptied: everything it counts now is new.
        if self.samples.back().is_some_and(|(_, last)| now.iter().zip(last).any(|(now, last)| now < last)) {
            self.samples = VecDeque::from([(now_ms, Counts::default())]);
        }
        if self.samples.is_empty() {
            let looked_at = COUNTERS.map(|(_, mark)| of(mark));
            let known = std::array::from_fn(|n| looked_at[n].min(now[n]));
            self.samples.push_back((now_ms, known));
        }
        self.samples.push_back((now_ms, now));
        // The baseline is the newest sample that is at least one window old.
        while self.samples.get(1).is_some_and(|(at, _)| now_ms.saturating_sub(*at) >= self.length_ms) {
            self.samples.pop_front();
        }
        let before = self.baseline();
        conditions(std::array::from_fn(|n| now[n].saturating_sub(before[n])), self.length_ms)
    }

    /// Returns what to add to the store's marks. Everything older than the window has been evaluated.
    pub(super) fn marks(&self, counted: &[(String, u64)]) -> Vec<(&'static str, u64)> {
        let of = |name: &str| counted.iter().find(|(counter, _)| counter == name).map_or(0, |(_, count)| *count);
        let behind = COUNTERS.iter().zip(self.baseline()).map(|((_, mark), now)| (*mark, now.saturating_sub(of(mark))));
        behind.filter(|(_, add)| *add > 0).collect()
    }

    fn baseline(&self) -> Counts {
        self.samples.front().map_or_else(Counts::default, |(_, counts)| *counts)
    }
}

#[expect(clippy::cast_precision_loss, reason = "numbers for people")]
fn conditions([locks, emergencies, violations, script_errors]: Counts, window_ms: u64) -> Vec<Condition> {
    let within = format!("in the last {}", window_name(window_ms));
    let mut found = Vec::new();
    let rate = emergencies as f64 / locks.max(1) as f64;
    if rate > EMERGENCY_RATE {
        let text = format!(
            "too many emergency releases: {:.2} % of all locks ({emergencies} of {locks}) {within}; find out why releases fail",
            rate * 100.0
        );
        found.push(Condition::new("high_emergency_release_rate", Level::Critical, text).value(rate));
    }
    if violations > 0 {
        let text = format!(
            "{} of a lock that the caller no longer held {within}; nothing was changed, but work may have outlived its lease",
            releases(violations)
        );
        found.push(Condition::new("ownership_violations", Level::Warning, text).value(violations as f64));
    }
    if script_errors > 0 {
        let text = format!(
            "{} failed {within} because the store could not run the script; see `leasehold doctor`",
            releases(script_errors)
        );
        found.push(Condition::new("lua_script_errors", Level::Critical, text).value(script_errors as f64));
    }
    found
}

fn releases(count: u64) -> String {
    if count == 1 { "1 release".to_owned() } else { format!("{count} releases") }
}

/// Formats the window so that it fits after "the last": `hour`, `10 min`.
fn window_name(ms: u64) -> String {
    match ms / 1_000 {
        3_600 => "hour".to_owned(),
        seconds if seconds >= 3_600 && seconds % 3_600 == 0 => format!("{} h", seconds / 3_600),
        seconds if seconds >= 60 && seconds % 60 == 0 => format!("{} min", seconds / 60),
        seconds => format!("{seconds} s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u64 = 3_600_000;

    fn counted(counts: &[(&str, u64)]) -> Vec<(String, u64)> {
        counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    }

    fn kinds(found: &[Condition]) -> Vec<(&'static str, Level, f64)> {
        found.iter().map(|c| (c.kind, c.level, c.value.expect("a value"))).collect()
    }

    #[test]
    fn the_bounds_are_exact() {
        let holds = |locks, emergencies| {
            let counts = counted(&[("total_locks", locks), ("emergency_releases", emergencies)]);
            !CounterWindow::new(Duration::from_secs(60)).sample(&counts, 0).is_empty()
        };
        assert!(!holds(100, 5), "5 % is not more than 5 %");
        assert!(holds(100, 6) && holds(0, 1) && holds(19, 1) && !holds(20, 1) && !holds(0, 0));
        let counts = counted(&[("ownership_violations", 1), ("release_script_errors", 2), ("total_locks", 9)]);
        let found = CounterWindow::new(Duration::from_secs(60)).sample(&counts, 0);
        assert_eq!(
            kinds(&found),
            [("ownership_violations", Level::Warning, 1.0), ("lua_script_errors", Level::Critical, 2.0)]
        );
        assert!(
            found[0].message.starts_with("1 release of a lock") && found[1].message.starts_with("2 releases failed")
        );
        let counts = counted(&[("total_locks", 40), ("emergency_releases", 3)]);
        let found = CounterWindow::new(Duration::from_secs(60)).sample(&counts, 0);
        assert_eq!(kinds(&found), [("high_emergency_release_rate", Level::Critical, 0.075)]);
        assert!(found[0].message.contains("7.50 %") && found[0].message.contains("1 min"), "{}", found[0].message);
    }

    #[test]
    fn a_counter_that_stops_rising_resolves_after_the_window() {
        let mut window = CounterWindow::new(Duration::from_secs(3_600));
        let none = counted(&[("total_locks", 5)]);
        assert!(window.sample(&none, 0).is_empty());
        let one = counted(&[("total_locks", 6), ("ownership_violations", 1)]);
        assert_eq!(window.sample(&one, 1_000).len(), 1);
        assert_eq!(window.sample(&one, HOUR).len(), 1, "still within");
        assert!(window.sample(&one, HOUR + 1_000).is_empty(), "what was counted is a window old");
        let two = counted(&[("total_locks", 6), ("ownership_violations", 2)]);
        assert_eq!(window.sample(&two, HOUR + 2_000).len(), 1, "it happened again");
    }

    #[test]
    fn a_restart_neither_hides_nor_repeats() {
        let mut window = CounterWindow::new(Duration::from_secs(3_600));
        let old = counted(&[("total_locks", 5), ("ownership_violations", 3)]);
        assert_eq!(window.sample(&old, 0).len(), 1);
        assert_eq!(window.marks(&old), [], "within the window everything is still news");
        assert!(window.sample(&old, HOUR).is_empty());
        assert_eq!(window.marks(&old), [("alerted_total_locks", 5), ("alerted_ownership_violations", 3)]);
        let marked = |violations| {
            counted(&[
                ("total_locks", 5),
                ("ownership_violations", violations),
                ("alerted_total_locks", 5),
                ("alerted_ownership_violations", 3),
            ])
        };
        assert_eq!(window.marks(&marked(3)), [], "marked already");
        let mut restarted = CounterWindow::new(Duration::from_secs(3_600));
        assert!(restarted.sample(&marked(3), 2 * HOUR).is_empty(), "sent long ago");
        let mut restarted = CounterWindow::new(Duration::from_secs(3_600));
        assert_eq!(restarted.sample(&marked(4), 2 * HOUR)[0].value, Some(1.0), "happened while no server ran");
    }

    #[test]
    fn an_emptied_store_counts_from_zero() {
        let mut window = CounterWindow::new(Duration::from_secs(60));
        window.sample(&counted(&[("total_locks", 500), ("ownership_violations", 9)]), 0);
        let found = window.sample(&counted(&[("total_locks", 2), ("ownership_violations", 1)]), 1_000);
        assert_eq!(kinds(&found), [("ownership_violations", Level::Warning, 1.0)]);
    }
}
