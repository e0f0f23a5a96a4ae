//! Counters of this process, which are added to the store's.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of one manager since it began.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        #[non_exhaustive]
        pub struct Statistics { $($(#[$doc])* pub $name: u64),* }

        #[derive(Default)]
        pub(crate) struct Stats { $(pub(crate) $name: Counter),* }

        impl Stats {
            pub(crate) fn snapshot(&self) -> Statistics {
                Statistics { $($name: self.$name.total.load(Ordering::Relaxed)),* }
            }

            /// Takes what was counted since the last time, by name.
            pub(crate) fn take_deltas(&self) -> Vec<(&'static str, u64)> {
                let all = [$((stringify!($name), self.$name.unwritten.swap(0, Ordering::Relaxed))),*];
                all.into_iter().filter(|(_, delta)| *delta > 0).collect()
            }

            /// Keeps what could not be written, for the next time.
            pub(crate) fn put_back(&self, deltas: &[(&'static str, u64)]) {
                for (name, delta) in deltas {
                    match *name {
                        $(stringify!($name) => { self.$name.unwritten.fetch_add(*delta, Ordering::Relaxed); })*
                        _ => {}
                    }
                }
            }
        }
    };
}

counters! {
    /// Locks acquired.
    total_locks,
    /// Requests that ended without the lock because another holder had it.
    not_acquired,
    /// Releases whose first try failed.
    normal_release_failures,
    /// Releases done by other means.
    emergency_releases,
    /// Releases that failed because the server could not run the script.
    release_script_errors,
    /// Releases of a lock that was not ours any more.
    ownership_violations,
    /// Releases that failed in every way and were written to the journal.
    journalled_releases,
    /// Leases lost.
    lost_leases,
    /// Work that ran without protection because the store was unreachable.
    unprotected_runs,
    /// Locks taken away from others, by revocation or force.
    evictions,
}

#[derive(Default)]
pub(crate) struct Counter {
    total: AtomicU64,
    unwritten: AtomicU64,
}

impl Counter {
    pub(crate) fn add_one(&self) {
        self.total.fetch_add(1, Ordering::Relaxed);
        self.unwritten.fetch_add(1, Ordering::Relaxed);
    }
}

impl Statistics {
    /// Failed releases over all locks.
    pub fn exception_rate(&self) -> f64 {
        rate(self.normal_release_failures, self.total_locks)
    }

    /// Emergency releases over all locks.
    pub fn emergency_release_rate(&self) -> f64 {
        rate(self.emergency_releases, self.total_locks)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a rate for people")]
fn rate(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deltas_are_taken_once_and_can_be_put_back() {
        let stats = Stats::default();
        stats.total_locks.add_one();
        stats.total_locks.add_one();
        stats.emergency_releases.add_one();
        let deltas = stats.take_deltas();
        assert_eq!(deltas, [("total_locks", 2), ("emergency_releases", 1)]);
        assert!(stats.take_deltas().is_empty());
        stats.put_back(&deltas);
        assert_eq!(stats.take_deltas(), deltas);
        assert_eq!(stats.snapshot().total_locks, 2);
        assert!((stats.snapshot().emergency_release_rate() - 0.5).abs() < 1e-9);
        assert!(Statistics::default().exception_rate().abs() < 1e-9, "no locks, no rate");
    }
}
