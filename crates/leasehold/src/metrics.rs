//! Latencies and outcomes, for the whole fleet. They are counted in atomics on the lock path and added to the store's
//! counters every few seconds. The number of fields is bounded; none contains the name of a lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::events::{ReleaseLayer, Transition};
use crate::loss::LossReason;
use crate::store::Operation;
use crate::store::StoreErrorKind;

/// The upper bounds of all histograms, in microseconds. One more bucket has no bound.
const BOUNDS_US: [u64; 14] = [
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    100_000,
    500_000,
    1_000_000,
    5_000_000,
    30_000_000,
    300_000_000,
    1_800_000_000,
    3_600_000_000,
];
const BUCKETS: usize = BOUNDS_US.len() + 1;

/// The fields of a histogram: one per bucket, named by its upper bound in seconds and not cumulative, and the sum.
macro_rules! fields {
    ($name:literal) => {
        (
            [
                concat!($name, ":0.0005"),
                concat!($name, ":0.001"),
                concat!($name, ":0.0025"),
                concat!($name, ":0.005"),
                concat!($name, ":0.01"),
                concat!($name, ":0.025"),
                concat!($name, ":0.1"),
                concat!($name, ":0.5"),
                concat!($name, ":1"),
                concat!($name, ":5"),
                concat!($name, ":30"),
                concat!($name, ":300"),
                concat!($name, ":1800"),
                concat!($name, ":3600"),
                concat!($name, ":inf"),
            ],
            concat!($name, ":sum_us"),
        )
    };
}

type Fields = ([&'static str; BUCKETS], &'static str);

/// A metric: its name, its label, its fields in the store, and its help text.
type Metric<F> = (&'static str, Option<(&'static str, &'static str)>, F, &'static str);

const ACQUIRE: usize = 0;
const WAIT: usize = 1;
const GAVE_UP: usize = 2;
const HOLD: usize = 3;
const HANDOFF: usize = 4;
const RENEW_SLACK: usize = 5;
const STORE_ACQUIRE: usize = 6;
const STORE_RELEASE: usize = 7;
const STORE_RENEW: usize = 8;

const HISTOGRAMS: [Metric<Fields>; 9] = [
    ("acquire_seconds", None, fields!("acquire_seconds"), "Time from the request to the lock"),
    ("wait_seconds", None, fields!("wait_seconds"), "Time from the request to the lock, for requests that waited"),
    (
        "gave_up_seconds",
        None,
        fields!("gave_up_seconds"),
        "Time from the request to its end, for requests that did not get the lock",
    ),
    ("hold_seconds", None, fields!("hold_seconds"), "Time from the grant to the release"),
    (
        "handoff_seconds",
        None,
        fields!("handoff_seconds"),
        "Time from the message that grants a lock to the task that gets it",
    ),
    ("renew_slack_seconds", None, fields!("renew_slack_seconds"), "Time left of a lease when it was renewed"),
    ("store_seconds", Some(("operation", "acquire")), fields!("store_acquire_seconds"), STORE_SECONDS),
    ("store_seconds", Some(("operation", "release")), fields!("store_release_seconds"), STORE_SECONDS),
    ("store_seconds", Some(("operation", "renew")), fields!("store_renew_seconds"), STORE_SECONDS),
];

const STORE_SECONDS: &str = "Time from a request to the store's reply";

const LOSSES: [(LossReason, &str, &str); 6] = [
    (LossReason::Expired, "losses:expired", "expired"),
    (LossReason::Gone, "losses:gone", "gone"),
    (LossReason::Revoked, "losses:revoked", "revoked"),
    (LossReason::MaxHold, "losses:max_hold", "max_hold"),
    (LossReason::Shutdown, "losses:shutdown", "shutdown"),
    (LossReason::Displaced, "losses:displaced", "displaced"),
];

const RELEASES: [(ReleaseLayer, &str, &str); 5] = [
    (ReleaseLayer::Normal, "releases:normal", "normal"),
    (ReleaseLayer::Retried, "releases:retried", "retried"),
    (ReleaseLayer::Emergency, "releases:emergency", "emergency"),
    (ReleaseLayer::Journalled, "releases:journalled", "journalled"),
    (ReleaseLayer::NotOwner, "releases:not_owner", "not_owner"),
];

const STORE_ERRORS: [(StoreErrorKind, &str, &str); 22] = {
    use StoreErrorKind as K;
    [
        (K::Unreachable, "store_errors:unreachable", "unreachable"),
        (K::NoAnswer, "store_errors:no_answer", "no_answer"),
        (K::OutOfMemory, "store_errors:out_of_memory", "out_of_memory"),
        (K::ReadOnly, "store_errors:read_only", "read_only"),
        (K::Busy, "store_errors:busy", "busy"),
        (K::Loading, "store_errors:loading", "loading"),
        (K::CannotSave, "store_errors:cannot_save", "cannot_save"),
        (K::NotAuthenticated, "store_errors:not_authenticated", "not_authenticated"),
        (K::NotPermitted, "store_errors:not_permitted", "not_permitted"),
        (K::WrongType, "store_errors:wrong_type", "wrong_type"),
        (K::TooManyClients, "store_errors:too_many_clients", "too_many_clients"),
        (K::Cluster, "store_errors:cluster", "cluster"),
        (K::TryAgain, "store_errors:try_again", "try_again"),
        (K::FenceUnusable, "store_errors:fence_unusable", "fence_unusable"),
        (K::Script, "store_errors:script", "script"),
        (K::NewerVersion, "store_errors:newer_version", "newer_version"),
        (K::DiskFull, "store_errors:disk_full", "disk_full"),
        (K::File, "store_errors:file", "file"),
        (K::Forked, "store_errors:forked", "forked"),
        (K::Closed, "store_errors:closed", "closed"),
        (K::Refused, "store_errors:refused", "refused"),
        (K::Other, "store_errors:other", "other"),
    ]
};

/// What was counted since the last report to the store.
#[derive(Default)]
pub(crate) struct Metrics {
    histograms: [Histogram; HISTOGRAMS.len()],
    losses: [AtomicU64; LOSSES.len()],
    releases: [AtomicU64; RELEASES.len()],
    store_errors: [AtomicU64; STORE_ERRORS.len()],
}

#[derive(Default)]
struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    sum_us: AtomicU64,
}

impl Histogram {
    fn observe(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_US.partition_point(|bound| *bound < us);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(us, Ordering::Relaxed);
    }
}

impl Metrics {
    /// Counts a transition.
    pub(crate) fn count(&self, transition: &Transition<'_>) {
        let observe = |which: usize, took: Duration| self.histograms[which].observe(took);
        match *transition {
            Transition::Acquired { waited, handed_over, .. } => {
                observe(ACQUIRE, waited);
                if handed_over {
                    observe(WAIT, waited);
                }
            }
            Transition::NotAcquired { waited, .. } => observe(GAVE_UP, waited),
            Transition::Renewed { slack, .. } => observe(RENEW_SLACK, slack),
            Transition::Lost { why, .. } => add_one(&self.losses, LOSSES.iter().position(|(it, ..)| *it == why)),
            Transition::Released { held, layer, .. } => {
                observe(HOLD, held);
                add_one(&self.releases, RELEASES.iter().position(|(it, ..)| *it == layer));
            }
            Transition::StoreFailed { kind, .. } => {
                add_one(&self.store_errors, STORE_ERRORS.iter().position(|(it, ..)| *it == kind));
            }
            Transition::Answered { operation, took } => match operation {
                Operation::Acquire => observe(STORE_ACQUIRE, took),
                Operation::Release => observe(STORE_RELEASE, took),
                Operation::Renew => observe(STORE_RENEW, took),
                _ => {}
            },
            Transition::Alert { .. } | Transition::Unprotected { .. } => {}
        }
    }

    /// Counts the time from the message that granted a lock to its task.
    pub(crate) fn handed_over(&self, took: Duration) {
        self.histograms[HANDOFF].observe(took);
    }

    /// Takes what was counted since the last call, by field.
    pub(crate) fn take_deltas(&self) -> Vec<(&'static str, u64)> {
        self.fields().map(|(field, count)| (field, count.swap(0, Ordering::Relaxed))).filter(|(_, n)| *n > 0).collect()
    }

    /// Adds back what could not be sent to the store.
    pub(crate) fn put_back(&self, deltas: &[(&'static str, u64)]) {
        for (field, count) in self.fields() {
            if let Some((_, delta)) = deltas.iter().find(|(taken, _)| *taken == field) {
                count.fetch_add(*delta, Ordering::Relaxed);
            }
        }
    }

    fn fields(&self) -> impl Iterator<Item = (&'static str, &AtomicU64)> {
        let histograms = HISTOGRAMS.iter().zip(&self.histograms).flat_map(|((_, _, (fields, sum), _), histogram)| {
            fields.iter().copied().zip(&histogram.buckets).chain([(*sum, &histogram.sum_us)])
        });
        let losses = LOSSES.iter().map(|(_, field, _)| *field).zip(&self.losses);
        let releases = RELEASES.iter().map(|(_, field, _)| *field).zip(&self.releases);
        let errors = STORE_ERRORS.iter().map(|(_, field, _)| *field).zip(&self.store_errors);
        histograms.chain(losses).chain(releases).chain(errors)
    }
}

fn add_one(counts: &[AtomicU64], which: Option<usize>) {
    if let Some(count) = which.and_then(|which| counts.get(which)) {
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// A histogram of the whole fleet.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct FleetHistogram {
    /// The name, for example `acquire_seconds`.
    pub name: &'static str,
    /// The label that distinguishes it from others with the same name.
    pub label: Option<(&'static str, &'static str)>,
    /// The help text.
    pub help: &'static str,
    /// Per bucket: its upper bound in seconds (the last one is infinite) and its count, not cumulative.
    pub buckets: Vec<(f64, u64)>,
    /// The sum of all observations, in seconds.
    pub sum: f64,
}

/// A counter of the whole fleet.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FleetCount {
    /// The name: `losses`, `releases` or `store_errors`.
    pub name: &'static str,
    /// The label that distinguishes it from others with the same name.
    pub label: (&'static str, &'static str),
    /// The help text.
    pub help: &'static str,
    /// The count.
    pub count: u64,
}

/// Reads histograms from [`fleet_counters`](crate::LockManager::fleet_counters). A histogram without observations is
/// empty.
#[expect(clippy::cast_precision_loss, reason = "seconds, for people")]
pub fn fleet_histograms(counted: &[(String, u64)]) -> Vec<FleetHistogram> {
    let of = |field: &str| counted.iter().find(|(name, _)| name == field).map_or(0, |(_, count)| *count);
    let bounds = BOUNDS_US.map(|us| us as f64 / 1e6);
    let read = |(name, label, (fields, sum), help): &Metric<Fields>| FleetHistogram {
        name,
        label: *label,
        help,
        buckets: bounds.iter().copied().chain([f64::INFINITY]).zip(fields.map(of)).collect(),
        sum: of(sum) as f64 / 1e6,
    };
    HISTOGRAMS.iter().map(read).collect()
}

/// Reads counters by reason, layer and kind from [`fleet_counters`](crate::LockManager::fleet_counters).
pub fn fleet_counts(counted: &[(String, u64)]) -> Vec<FleetCount> {
    let of = |field: &str| counted.iter().find(|(name, _)| name == field).map_or(0, |(_, count)| *count);
    let losses = LOSSES.map(|(_, field, why)| ("losses", ("reason", why), field, "Leases lost"));
    let releases = RELEASES.map(|(_, field, layer)| ("releases", ("layer", layer), field, "Locks released, by how"));
    let errors = STORE_ERRORS
        .map(|(_, field, kind)| ("store_errors", ("kind", kind), field, "Requests to the store that failed"));
    let all = losses.into_iter().chain(releases).chain(errors);
    all.map(|(name, label, field, help)| FleetCount { name, label, help, count: of(field) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(metrics: &Metrics) -> Vec<(String, u64)> {
        metrics.take_deltas().into_iter().map(|(field, count)| (field.to_owned(), count)).collect()
    }

    #[test]
    fn counts_are_read_back_from_the_fields() {
        let metrics = Metrics::default();
        let ms = Duration::from_millis;
        for waited in [ms(0), ms(1), ms(2), ms(7_200_000)] {
            metrics.count(&Transition::Acquired { name: "a", waited, handed_over: waited > ms(1) });
        }
        metrics.count(&Transition::Lost { name: "a", why: LossReason::Gone });
        metrics.count(&Transition::Released { name: "a", held: ms(30), layer: ReleaseLayer::Emergency });
        metrics.count(&Transition::StoreFailed { operation: Operation::Renew, kind: StoreErrorKind::Script });
        let counted = take(&metrics);
        assert!(take(&metrics).is_empty(), "taken once");
        let histograms = fleet_histograms(&counted);
        let of = |name: &str| histograms.iter().find(|histogram| histogram.name == name).expect("known");
        let filled = |name: &str| {
            let filled = of(name).buckets.iter().filter(|(_, count)| *count > 0);
            filled.map(|(bound, count)| (bound.to_string(), *count)).collect::<Vec<_>>()
        };
        assert_eq!(
            filled("acquire_seconds"),
            [("0.0005".into(), 1), ("0.001".into(), 1), ("0.0025".into(), 1), ("inf".into(), 1)]
        );
        assert_eq!(filled("wait_seconds").len(), 2);
        assert_eq!(filled("hold_seconds"), [("0.1".into(), 1)]);
        assert!((of("acquire_seconds").sum - 7_200.003).abs() < 1e-9, "{:?}", of("acquire_seconds"));
        let counts: Vec<_> = fleet_counts(&counted).into_iter().filter(|count| count.count > 0).collect();
        assert_eq!(
            counts.iter().map(|count| (count.name, count.label.1)).collect::<Vec<_>>(),
            [("losses", "gone"), ("releases", "emergency"), ("store_errors", "script")]
        );
    }

    #[test]
    fn counts_that_could_not_be_sent_are_sent_the_next_time() {
        let metrics = Metrics::default();
        metrics.handed_over(Duration::from_micros(10));
        let deltas = metrics.take_deltas();
        metrics.put_back(&deltas);
        metrics.handed_over(Duration::from_micros(10));
        assert_eq!(take(&metrics), [("handoff_seconds:0.0005".into(), 2), ("handoff_seconds:sum_us".into(), 20)]);
    }

    #[test]
    fn field_names_are_unique_and_bounded() {
        let metrics = Metrics::default();
        let fields: Vec<&str> = metrics.fields().map(|(field, _)| field).collect();
        let mut distinct = fields.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), fields.len());
        assert!(fields.len() < 200, "{}", fields.len());
        for (bound, field) in BOUNDS_US.iter().zip(HISTOGRAMS[ACQUIRE].2.0) {
            let named: f64 = field.rsplit_once(':').expect("a bound").1.parse().expect("a number");
            assert_eq!((named * 1e6).round(), *bound as f64, "{field}");
        }
    }
}
