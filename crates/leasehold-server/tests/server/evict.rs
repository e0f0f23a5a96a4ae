//! Evictions over HTTP: only the named holder is evicted.

use std::time::Duration;

use crate::support::Place;
use leasehold_testkit::http::Answer;
use serde_json::{Value, json};

async fn evict(place: &Place, name: &str, holder: &Value, mode: &str) -> Answer {
    let body = json!({ "holder_id": holder, "mode": mode, "reason": "stuck since noon" });
    place.post(&format!("/api/v1/locks/{name}/evict"), &body).await
}

#[tokio::test(flavor = "multi_thread")]
async fn revoke_notifies_the_holder_and_force_frees_the_lock() {
    for place in Place::each().await {
        let guard = place.locks.lock("gpu_lock:0").owner("tts").await.expect("free");
        let seen = place.get("/api/v1/locks/gpu_lock:0").await.ok();
        let response = evict(&place, "gpu_lock:0", &seen["holder_id"], "revoke").await.ok();
        assert_eq!(
            (&response["outcome"], &response["released"]),
            (&json!("revoked"), &json!(false)),
            "it waits for its holder"
        );
        for same in ["owner", "holder_id", "since_ms"] {
            assert_eq!(response[same], seen[same], "{same} on {}", place.kind);
        }
        let lost = tokio::time::timeout(Duration::from_secs(10), guard.lost()).await;
        assert_eq!(lost.ok(), Some(leasehold::LossReason::Revoked), "{}", place.kind);
        drop(guard);

        let waited = place.locks.lock("gpu_lock:0").owner("tts").wait_up_to(Duration::from_secs(10));
        let guard = waited.await.expect("passed on");
        let holder = json!(guard.holder_id().to_string());
        let freed = evict(&place, "gpu_lock:0", &holder, "force").await.ok();
        assert_eq!((&freed["outcome"], &freed["released"]), (&json!("forced"), &json!(true)));
        assert!(place.locks.try_lock("gpu_lock:0").await.expect("answered").is_some(), "{}: free at once", place.kind);

        let free = evict(&place, "nobodys", &holder, "force").await.ok();
        assert_eq!(
            (&free["outcome"], &free["released"], &free["owner"]),
            (&json!("free"), &json!(false), &Value::Null)
        );
        drop(guard);
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_eviction_with_a_stale_holder_id_changes_nothing() {
    for place in Place::each().await {
        let mut refused = 0;
        for n in 0..100 {
            let looked_at = place.locks.lock("gpu_lock:0").await.expect("free");
            let stale = json!(looked_at.holder_id().to_string());
            looked_at.release().await.expect("answered");
            let now = place.locks.lock("gpu_lock:0").await.expect("free");
            let answer = evict(&place, "gpu_lock:0", &stale, if n % 2 == 0 { "force" } else { "revoke" }).await;
            assert_eq!(answer.code(), (409, "changed_hands".into()), "{}", place.kind);
            assert_eq!(answer.json()["holder_id"], json!(now.holder_id().to_string()));
            assert!(now.release().await.expect("answered"), "{}: unharmed", place.kind);
            refused += 1;
        }
        println!("{}: {refused}/100 stale evictions refused", place.kind);
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_holder_can_only_be_forced() {
    let place = Place::redis().await;
    let redis = place.redis.as_ref().expect("a server");
    redis.command(&["SET", "gpu_lock:1", "locked_by_tts", "PX", "60000"]).await;
    let seen = place.get("/api/v1/locks/gpu_lock:1").await.ok();
    assert_eq!((&seen["foreign"], &seen["owner"]), (&json!(true), &json!("locked_by_tts")));
    let revoked = evict(&place, "gpu_lock:1", &seen["holder_id"], "revoke").await;
    assert_eq!(revoked.code(), (409, "foreign_holder".into()));
    assert_eq!(evict(&place, "gpu_lock:1", &seen["holder_id"], "force").await.ok()["outcome"], "forced");
    assert_eq!(place.get("/api/v1/locks/gpu_lock:1").await.ok()["held"], false);
    place.end().await;
}
