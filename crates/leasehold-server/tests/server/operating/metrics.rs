//! The fleet's metrics: `/metrics` shows what clients did.

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold::inspect::EvictMode;

use crate::support::Place;

/// Series by name and labels.
pub(crate) fn series(text: &str) -> BTreeMap<String, f64> {
    let line = |line: &str| {
        let (name, value) = line.rsplit_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    text.lines().filter(|line| !line.starts_with('#')).filter_map(line).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_metrics_match_what_the_clients_did() {
    for place in Place::each().await {
        let locks = &place.locks;
        for n in 0..20 {
            locks.lock(format!("free-{n}")).await.expect("free").release().await.expect("answered");
        }
        // One client holds for a tenth of a second while one waits and one gives up.
        let held = locks.lock("wanted").await.expect("free");
        let waits = {
            let locks = locks.clone();
            tokio::spawn(
                async move { locks.lock("wanted").wait_up_to(Duration::from_secs(20)).await.expect("its turn") },
            )
        };
        while locks.info("wanted").await.expect("answered").waiters.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(locks.try_lock("wanted").await.expect("answered").is_none());
        tokio::time::sleep(Duration::from_millis(110)).await;
        held.release().await.expect("answered");
        let waited = waits.await.expect("no panic");
        waited.release().await.expect("answered");
        // One is renewed, and one is lost.
        let renewed = locks.lock("renewed").ttl(Duration::from_millis(1_500)).await.expect("free");
        // Renewed every half second; a busy machine does not cost it its lease.
        for _ in 0..2 {
            let proven = renewed.valid_until();
            while renewed.valid_until() == proven {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        renewed.release().await.expect("answered");
        let lost = locks.lock("lost").await.expect("free");
        locks.evict("lost", lost.holder_id(), EvictMode::Revoke, "test").await.expect("answered");
        lost.lost().await;
        // A notification may arrive before the counter is updated.
        while locks.statistics().lost_leases == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        lost.release().await.expect("answered");
        // Its counts reach the store when it ends at the latest.
        locks.shutdown().await;

        let text = place.get("/metrics").await.body;
        let series = series(&text);
        let of =
            |name: &str| *series.get(&format!("leasehold_fleet_{name}")).unwrap_or_else(|| panic!("{name}: {text}"));
        let taken = 24.0;
        assert_eq!(of("total_locks_total"), taken, "{}", place.kind);
        assert_eq!((of("acquire_seconds_count"), of("hold_seconds_count")), (taken, taken), "{}", place.kind);
        assert_eq!(of("acquire_seconds_bucket{le=\"+Inf\"}"), taken);
        assert_eq!((of("wait_seconds_count"), of("handoff_seconds_count")), (1.0, 1.0), "{}", place.kind);
        assert!(of("wait_seconds_sum") >= 0.1 && of("wait_seconds_bucket{le=\"0.1\"}") == 0.0, "{}", place.kind);
        assert!(of("hold_seconds_sum") >= 0.5, "{}", of("hold_seconds_sum"));
        assert_eq!((of("gave_up_seconds_count"), of("not_acquired_total")), (1.0, 1.0));
        assert!(of("renew_slack_seconds_count") >= 2.0 && of("renew_slack_seconds_bucket{le=\"300.0\"}") >= 2.0);
        assert_eq!(of("losses_total{reason=\"revoked\"}"), 1.0);
        assert_eq!(of("releases_total{layer=\"normal\"}"), taken, "a revoked lock is given back like any other");
        assert_eq!(of("store_seconds_count{operation=\"release\"}"), taken);
        assert!(of("store_seconds_count{operation=\"acquire\"}") >= taken, "{}", place.kind);
        assert!(of("store_seconds_count{operation=\"renew\"}") >= 1.0);
        let buckets: Vec<f64> =
            [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0, 300.0, 1800.0, 3600.0]
                .iter()
                .map(|bound| of(&format!("acquire_seconds_bucket{{le=\"{bound:?}\"}}")))
                .collect();
        assert!(buckets.is_sorted(), "cumulative: {buckets:?}");
        println!("{}: {} series", place.kind, series.len());
        assert!(series.len() <= 1_000);
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_are_counted() {
    for place in Place::each().await {
        let held = place.locks.lock("wanted").await.expect("free");
        let waiting = {
            let locks = place.locks.clone();
            tokio::spawn(async move { drop(locks.lock("wanted").await) })
        };
        while place.locks.info("wanted").await.expect("answered").waiters.is_empty()
            || place.locks.long_held().await.expect("answered").is_empty()
        {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let series = series(&place.get("/metrics").await.body);
        let of = |name: &str| series[&format!("leasehold_{name}")];
        assert_eq!((of("locks_held"), of("waiters"), of("longest_queue")), (1.0, 1.0, 1.0), "{}", place.kind);
        held.release().await.expect("answered");
        waiting.await.expect("no panic");
        place.end().await;
    }
}
