//! Metrics of the whole fleet: what all clients of the store counted, and gauges of the locks in the store.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use leasehold::inspect::{LockInfo, fleet_counts, fleet_histograms};
use leasehold::{LockManager, LockName};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// The fleet's counters without labels. Other counters in the store belong to versions that this one does not know.
const COUNTERS: [(&str, &str); 10] = [
    ("total_locks", "Locks acquired"),
    ("not_acquired", "Requests that ended without the lock because another holder had it"),
    ("normal_release_failures", "Releases whose first attempt failed"),
    ("emergency_releases", "Releases done by a fallback"),
    ("release_script_errors", "Releases that failed because the store could not run the script"),
    ("ownership_violations", "Releases of a lock that the caller no longer held"),
    ("journalled_releases", "Releases that failed and were written to a journal"),
    ("lost_leases", "Leases lost"),
    ("unprotected_runs", "Work that ran without a lock because the store was unreachable"),
    ("evictions", "Locks evicted, by revocation or by force"),
];

/// How long the gauges of the locks are cached: reading them asks the store for every queue.
const REFRESH_INTERVAL: Duration = Duration::from_secs(10);
/// The most queues that are read, and how many at the same time.
const MAX_QUEUES: usize = 2_000;
const CONCURRENCY: usize = 64;

/// The fleet's counters as last read from the store.
#[derive(Debug, Default)]
pub(crate) struct FleetCounters(Mutex<Vec<(String, u64)>>);

impl FleetCounters {
    pub(crate) fn set(&self, counted: Vec<(String, u64)>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = counted;
    }
}

impl Collector for FleetCounters {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let counted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, help) in COUNTERS {
            let value = counted.iter().find(|(counter, _)| counter == name).map_or(0, |(_, value)| *value);
            let counter = ConstCounter::new(value);
            let name = format!("fleet_{name}");
            counter.encode(encoder.encode_descriptor(&name, help, None, counter.metric_type())?)?;
        }
        for same_name in fleet_counts(&counted).chunk_by(|a, b| a.name == b.name) {
            let name = format!("fleet_{}", same_name[0].name);
            let mut metric = encoder.encode_descriptor(&name, same_name[0].help, None, MetricType::Counter)?;
            for count in same_name {
                ConstCounter::new(count.count).encode(metric.encode_family(&[count.label])?)?;
            }
        }
        for same_name in fleet_histograms(&counted).chunk_by(|a, b| a.name == b.name) {
            let name = format!("fleet_{}", same_name[0].name);
            let mut metric = encoder.encode_descriptor(&name, same_name[0].help, None, MetricType::Histogram)?;
            for histogram in same_name {
                let count = histogram.buckets.iter().map(|(_, count)| *count).sum();
                let (sum, buckets) = (histogram.sum, histogram.buckets.as_slice());
                match histogram.label {
                    None => metric.encode_histogram::<NoLabelSet>(sum, count, buckets, None)?,
                    Some(label) => {
                        metric.encode_family(&[label])?.encode_histogram::<NoLabelSet>(sum, count, buckets, None)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Gauges of the locks in the store: held locks, waiters, and the longest times.
#[derive(Debug, Default)]
pub(crate) struct LockGauges {
    refreshed_at: Mutex<Option<Instant>>,
    held: Gauge,
    waiting: Gauge,
    longest_queue: Gauge,
    longest_wait_seconds: Gauge,
    longest_held_seconds: Gauge,
}

impl LockGauges {
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register("locks_held", "Locks held for longer than half a second", self.held.clone());
        registry.register("waiters", "Waiters for these locks", self.waiting.clone());
        registry.register("longest_queue", "The most waiters of one lock", self.longest_queue.clone());
        let help = "How long the longest waiter has waited";
        registry.register("longest_wait_seconds", help, self.longest_wait_seconds.clone());
        let help = "How long the longest-held lock has been held";
        registry.register("longest_held_seconds", help, self.longest_held_seconds.clone());
    }

    /// Refreshes the gauges unless they are recent. Gauges that cannot be refreshed keep their values.
    pub(crate) async fn refresh(&self, locks: &LockManager) {
        {
            let mut refreshed_at = self.refreshed_at.lock().unwrap_or_else(PoisonError::into_inner);
            if refreshed_at.is_some_and(|at| at.elapsed() < REFRESH_INTERVAL) {
                return;
            }
            *refreshed_at = Some(Instant::now());
        }
        let Ok(held) = locks.long_held().await else { return };
        let mut queues = Vec::new();
        let names: Vec<LockName> = held.iter().map(|(name, _)| name.clone()).take(MAX_QUEUES).collect();
        for names in names.chunks(CONCURRENCY) {
            queues.extend(join_all(names.iter().map(async |name| locks.info(name).await)).await.into_iter().flatten());
        }
        let views: Vec<_> = queues.iter().map(LockInfo::view).collect();
        let lengths = || views.iter().map(|view| view.waiters.len());
        let gauge = |gauge: &Gauge, value: usize| {
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        let seconds = |gauge: &Gauge, ms: u64| {
            gauge.set(i64::try_from(ms / 1_000).unwrap_or(i64::MAX));
        };
        gauge(&self.held, held.len());
        gauge(&self.waiting, lengths().sum());
        gauge(&self.longest_queue, lengths().max().unwrap_or(0));
        let waits = views.iter().flat_map(|view| &view.waiters).map(|waiter| waiter.waiting_ms);
        seconds(&self.longest_wait_seconds, waits.max().unwrap_or(0));
        seconds(&self.longest_held_seconds, views.iter().filter_map(|view| view.held_ms).max().unwrap_or(0));
    }
}
