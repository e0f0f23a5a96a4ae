//! Alerts: from clients, from the fleet's counters, from the store.

use std::time::Duration;

use leasehold::LockManager;
use leasehold::inspect::EvictMode;
use serde_json::{Value, json};

use super::{alert, settings};
use crate::support::{Place, quiet};

fn fires(kind: &'static str) -> impl Fn(&Value) -> bool {
    move |alert| alert["type"] == kind && alert["resolved_ms"].is_null()
}

fn resolved(kind: &'static str) -> impl Fn(&Value) -> bool {
    move |alert| alert["type"] == kind && alert["resolved_ms"].is_u64()
}

/// A holder releases a lock from which it was evicted.
async fn violate(locks: &LockManager) {
    let guard = locks.lock("taken").renew(false).await.expect("free");
    locks.evict("taken", guard.holder_id(), EvictMode::Force, "test").await.expect("answered");
    assert!(!guard.release().await.expect("answered"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_alert_names_the_lock_and_the_task() {
    let mut options = quiet();
    options.max_release_retries = 0;
    options.emergency_release_delay = Duration::ZERO;
    let place = Place::redis_between(options, settings("alerts:\n  window: 2s\n")).await;
    let redis = place.redis.as_ref().expect("a server");
    let guard = place.locks.lock("gpu_lock:0").owner("tts").await.expect("free");
    let holder = guard.holder_id().to_string();
    redis.command(&["ACL", "SETUSER", "default", "-eval", "-evalsha", "-script"]).await;
    assert!(guard.release().await.is_err(), "its script cannot run");

    let script = alert(&place, "the script's error", fires("lua_script_error")).await;
    assert_eq!((&script["level"], &script["name"]), (&json!("critical"), &json!("gpu_lock:0")));
    assert!(script["message"].as_str().is_some_and(|text| text.contains("eval")), "with the error: {script}");
    let emergency = alert(&place, "the emergency", fires("gpu_lock_emergency_release")).await;
    assert!(emergency["owner"].as_str().is_some_and(|owner| owner.starts_with("tts@")), "the task: {emergency}");
    assert_eq!((&emergency["name"], &emergency["holder_id"]), (&json!("gpu_lock:0"), &json!(holder)));
    // The same from the fleet's counters: resolved within the window, because the counters no longer rise.
    let rate = alert(&place, "the rate", fires("high_emergency_release_rate")).await;
    assert_eq!((&rate["level"], &rate["value"]), (&json!("critical"), &json!(1.0)));
    let errors = alert(&place, "the errors", |a| a["type"] == "lua_script_errors").await;
    assert_eq!((&errors["level"], &errors["value"]), (&json!("critical"), &json!(1.0)));
    alert(&place, "the rate's end", resolved("high_emergency_release_rate")).await;
    alert(&place, "the errors' end", resolved("lua_script_errors")).await;
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn alerts_cover_the_time_without_a_server_on_every_store() {
    for place in Place::each().await {
        // Counted and published when it shuts down.
        violate(&place.locks).await;
        place.locks.shutdown().await;
        let fired = alert(&place, "the violation", fires("ownership_violations")).await;
        assert_eq!((&fired["level"], &fired["value"]), (&json!("warning"), &json!(1.0)), "{}", place.kind);
        assert!(fired["name"].is_null() && fired["since_ms"].is_u64() && fired["count"] == 1, "{fired}");
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_outage_raises_an_alert_and_its_end_resolves_it() {
    let place = Place::redis().await;
    let redis = place.redis.as_ref().expect("a server");
    redis.kill9();
    let down = alert(&place, "the store's end", fires("store_down")).await;
    assert_eq!(down["level"], "critical");
    redis.restart().await;
    alert(&place, "its return", resolved("store_down")).await;
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn risky_store_settings_raise_an_alert() {
    let place = Place::redis().await;
    let redis = place.redis.as_ref().expect("a server");
    redis.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).await;
    redis.command(&["CONFIG", "SET", "maxmemory", "1gb"]).await;
    let risky = alert(&place, "risky settings", fires("risky_store_settings")).await;
    assert_eq!(risky["level"], "critical");
    assert!(risky["message"].as_str().is_some_and(|text| text.contains("allkeys-lru")), "{risky}");
    place.end().await;
}
