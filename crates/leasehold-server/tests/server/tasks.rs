//! Task locks by the id of their task, and the health of the GPU locks.

use std::time::Duration;

use crate::support::Place;
use leasehold::LockManager;
use leasehold::lease::Token;
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread")]
async fn task_locks_are_listed_and_released_by_task() {
    for place in Place::each().await {
        let guard =
            place.locks.lock("task_lock:6").owner("nightly").ttl(Duration::from_secs(3_600)).await.expect("free");
        let _other = place.locks.lock("order:6").await.expect("free");
        let shown = place.get("/api/v1/tasks/6/lock").await.ok();
        assert_eq!(
            (&shown["name"], &shown["holder_id"]),
            (&json!("task_lock:6"), &json!(guard.holder_id().to_string()))
        );
        assert!(shown["ttl_left_ms"].as_u64().is_some_and(|left| left > 3_500_000), "{shown}");
        let list = place.get("/api/v1/tasks/locks").await.ok();
        let names: Vec<&Value> = list["locks"].as_array().expect("a list").iter().map(|lock| &lock["name"]).collect();
        assert_eq!(names, ["task_lock:6"], "{}", place.kind);
        if let Some(redis) = &place.redis {
            let value = format!("{:?}", redis.command(&["GET", "task_lock:6"]).await);
            assert!(value.contains("nightly@"), "readable for people with plain commands: {value}");
        }
        let freed = place.ask("POST", "/api/v1/tasks/6/release-lock", "", "").await.ok();
        assert_eq!((&freed["outcome"], &freed["released"]), (&json!("forced"), &json!(true)), "{}", place.kind);
        assert_eq!(freed["holder_id"], shown["holder_id"], "whose it was");
        let again = place.ask("POST", "/api/v1/tasks/6/release-lock", "", "").await.ok();
        assert_eq!((&again["outcome"], &again["released"]), (&json!("free"), &json!(false)));
        assert_eq!(place.get("/api/v1/tasks/6/lock").await.ok()["held"], false);
        assert_eq!(place.get("/api/v1/tasks/%0A/lock").await.code(), (400, "invalid_name".into()));
        drop((guard, _other));
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_health_covers_the_whole_store() {
    let path = "/api/v1/monitoring/gpu-lock/health";
    for place in Place::each().await {
        let health = place.get(path).await.ok();
        let fields: Vec<&String> = health.as_object().expect("an object").keys().collect();
        let expected = ["exception_stats", "long_held_locks", "redis_connected", "status", "timestamp", "zombie_locks"];
        assert_eq!(fields, expected);
        assert_eq!(
            (&health["status"], &health["redis_connected"]),
            (&json!("healthy"), &json!(true)),
            "{}",
            place.kind
        );
        assert!(health["timestamp"].as_f64().is_some_and(|now| now > 1.7e9), "{health}");
        // Counted by a process other than the server.
        assert!(
            !place
                .locks
                .lease("gpu_lock:0", &Token::random())
                .expect("a name")
                .release_without_event()
                .await
                .expect("answered")
        );
        let stats = loop {
            let health = place.get(path).await.ok();
            if health["exception_stats"]["ownership_violations"] == 1 {
                break health["exception_stats"].clone();
            }
        };
        for counter in ["normal_release_failures", "emergency_releases", "release_script_errors"] {
            assert_eq!(stats[counter], 0, "{stats}");
        }
        assert_eq!((&stats["exception_rate"], &stats["emergency_release_rate"]), (&json!(0.0), &json!(0.0)));
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn zombies_degrade_the_health_and_a_store_outage_makes_it_unhealthy() {
    let path = "/api/v1/monitoring/gpu-lock/health";
    let place = Place::redis().await;
    let redis = place.redis.as_ref().expect("a server");
    let url = redis.url();
    // A holder whose process ends without releasing its lock.
    let dies = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let locks = LockManager::connect(&url).await.expect("a store");
            let guard = locks.lock("gpu_lock:0").owner("tts").ttl(Duration::from_secs(60)).await.expect("free");
            while locks.long_held().await.expect("answered").is_empty() {
                tokio::task::yield_now().await;
            }
            std::mem::forget(guard);
        });
        runtime.shutdown_background();
    });
    dies.join().expect("no panic");
    let health = loop {
        let health = place.get(path).await.ok();
        if health["status"] != "healthy" {
            break health;
        }
    };
    assert_eq!((&health["status"], &health["zombie_locks"][0]["name"]), (&json!("degraded"), &json!("gpu_lock:0")));
    assert_eq!(health["zombie_locks"][0]["connected"], false);
    redis.kill9();
    let down = place.get(path).await;
    assert_eq!(down.status, 503);
    assert_eq!((&down.json()["status"], &down.json()["redis_connected"]), (&json!("unhealthy"), &json!(false)));
    place.end().await;
}
