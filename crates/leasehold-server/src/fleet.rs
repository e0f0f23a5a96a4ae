//! Figures of the whole fleet: what all clients of the store counted, and what a look at the locks finds.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use leasehold::{LockInfo, LockManager, LockName, fleet_counts, fleet_histograms};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// What the fleet counts without labels; anything else in the store is of a version that is not known here.
const COUNTERS: [(&str, &str); 10] = [
    ("total_locks", "Locks acquired"),
    ("not_acquired", "Requests that ended without the lock because somebody else had it"),
    ("normal_release_failures", "Releases whose first try failed"),
    ("emergency_releases", "Releases done by other means"),
    ("release_script_errors", "Releases that failed because the server could not run the script"),
    ("ownership_violations", "Releases of a lock that was not the releaser's any more"),
    ("journalled_releases", "Releases that failed by all means and stand in a journal"),
    ("lost_leases", "Leases lost"),
    ("unprotected_runs", "Work that ran without protection because the store was unreachable"),
    ("evictions", "Locks taken away, by revocation or force"),
];

/// A look at the locks counts for so long: it asks the store for every queue.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Queues looked at, and at once.
const MOST_QUEUES: usize = 2_000;
const AT_ONCE: usize = 64;

/// What the whole fleet counted, as the store last said it.
#[derive(Debug, Default)]
pub(crate) struct Fleet(Mutex<Vec<(String, u64)>>);

impl Fleet {
    pub(crate) fn set(&self, counted: Vec<(String, u64)>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = counted;
    }
}

impl Collector for Fleet {
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

/// What a look at the locks found: how many, how many wait, how long.
#[derive(Debug, Default)]
pub(crate) struct Census {
    looked: Mutex<Option<Instant>>,
    held: Gauge,
    waiting: Gauge,
    longest_queue: Gauge,
    longest_wait_seconds: Gauge,
    longest_held_seconds: Gauge,
}

impl Census {
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register("locks_held", "Locks held for longer than half a second", self.held.clone());
        registry.register("waiters", "Who waits for them", self.waiting.clone());
        registry.register("longest_queue", "The most that wait for one lock", self.longest_queue.clone());
        let help = "For how long the longest of them has waited";
        registry.register("longest_wait_seconds", help, self.longest_wait_seconds.clone());
        let help = "For how long the longest of the locks has been held";
        registry.register("longest_held_seconds", help, self.longest_held_seconds.clone());
    }

    /// Looks, if the last look is a while ago. What could not be looked at stays as it was.
    pub(crate) async fn take(&self, locks: &LockManager) {
        {
            let mut looked = self.looked.lock().unwrap_or_else(PoisonError::into_inner);
            if looked.is_some_and(|at| at.elapsed() < LOOK_EVERY) {
                return;
            }
            *looked = Some(Instant::now());
        }
        let Ok(held) = locks.long_held().await else { return };
        let mut queues = Vec::new();
        let names: Vec<LockName> = held.iter().map(|(name, _)| name.clone()).take(MOST_QUEUES).collect();
        for names in names.chunks(AT_ONCE) {
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
