//! The journal and how it is settled, the audit, GPUs.

use leasehold::{LockManager, Options};
use leasehold_server::{KeyFile, Role, Settings};
use leasehold_testkit::RedisServer;
use serde_json::{Value, json};

use super::alert;
use crate::support::{Place, encoded, quiet};

/// A journal with one entry of a release that failed by every means.
async fn journalled(dir: &std::path::Path) -> String {
    let redis = RedisServer::start().await;
    let mut options: Options = quiet();
    options.journal = Some(dir.to_owned());
    options.max_release_retries = 0;
    options.emergency_release_delay = std::time::Duration::ZERO;
    options.request_timeout = std::time::Duration::from_millis(200);
    let locks = LockManager::connect_with(&redis.url(), options).await.expect("a store");
    let guard = locks.lock("gpu_lock:0").owner("tts").await.expect("free");
    let token = guard.token().reveal().to_owned();
    redis.kill9();
    drop(guard);
    while locks.journal().expect("kept").entries().expect("readable").is_empty() {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    token
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_releases_are_shown_alerted_and_settled_by_an_operator() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = dir.path().join("journal");
    let token = journalled(&journal).await;
    let keys = KeyFile::new(dir.path().join("keys.json"));
    let (_, viewer) = keys.create("page", Role::Viewer).expect("made");
    let (_, operator) = keys.create("ops", Role::Operator).expect("made");
    let mut settings = Settings::default();
    settings.keys = Some(keys);
    settings.audit = Some(dir.path().join("audit.jsonl"));
    let mut place = Place::memory_with_journal(journal, settings).await;
    place.headers = format!("X-API-Key: {viewer}\r\n");

    let listed = place.get("/api/v1/journal").await;
    assert!(!listed.body.contains(&token) && !listed.body.contains("token"), "{}", listed.body);
    let listed = listed.ok();
    let entry = &listed["entries"][0];
    assert_eq!((&entry["kind"], &entry["name"]), (&json!("unreleased"), &json!("gpu_lock:0")));
    assert!(entry["owner"].as_str().expect("text").starts_with("tts@") && entry["why"].is_string(), "{entry}");
    let fires = alert(&place, "the journal", |a| a["type"] == "journal_not_empty" && a["resolved_ms"].is_null()).await;
    assert_eq!((&fires["level"], &fires["value"]), (&json!("warning"), &json!(1.0)));

    let settle = format!("/api/v1/journal/{}/settle", encoded(entry["id"].as_str().expect("an id")));
    let why = json!({ "reason": "seen to by hand" });
    assert_eq!(place.post(&settle, &why).await.code(), (403, "needs_operator".into()));
    place.headers = format!("X-API-Key: {operator}\r\n");
    assert_eq!(place.post(&settle, &json!({ "reason": " " })).await.code(), (400, "invalid_reason".into()));
    assert_eq!(place.post("/api/v1/journal/..%2Fkeys/settle", &why).await.code(), (404, "no_such_entry".into()));
    assert_eq!(place.get("/api/v1/audit").await.ok()["lines"], json!([]), "nothing was done yet");
    let settled = place.post(&settle, &why).await.ok();
    assert_eq!(settled["id"], entry["id"]);
    assert_eq!(place.post(&settle, &why).await.code(), (404, "no_such_entry".into()), "it is gone");
    assert_eq!(place.get("/api/v1/journal").await.ok()["entries"], json!([]));
    alert(&place, "its end", |a| a["type"] == "journal_not_empty" && a["resolved_ms"].is_u64()).await;

    let audit = place.get("/api/v1/audit?limit=10").await.ok();
    let lines: Vec<(&Value, &Value, &Value)> =
        audit["lines"].as_array().expect("lines").iter().map(|l| (&l["outcome"], &l["action"], &l["who"])).collect();
    let line = |outcome: &str| (json!(outcome), json!("settle"), json!("ops"));
    let (done, asked) = (line("settled"), line("asked"));
    assert_eq!(lines, [(&done.0, &done.1, &done.2), (&asked.0, &asked.1, &asked.2)], "newest first");
    assert_eq!(audit["lines"][0]["reason"], "seen to by hand");
    assert_eq!(place.get("/api/v1/audit?limit=0").await.code(), (400, "invalid_limit".into()));
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_entry_is_not_settled_without_an_audit_line() {
    let dir = tempfile::tempdir().expect("a directory");
    let journal = dir.path().join("journal");
    journalled(&journal).await;
    let mut settings = Settings::default();
    // Every write to it fails.
    settings.audit = Some("/dev/full".into());
    let place = Place::memory_with_journal(journal, settings).await;
    let id = place.get("/api/v1/journal").await.ok()["entries"][0]["id"].as_str().expect("an id").to_owned();
    let refused = place.post(&format!("/api/v1/journal/{id}/settle"), &json!({ "reason": "x" })).await;
    assert_eq!(refused.code(), (503, "not_audited".into()));
    assert_eq!(place.get("/api/v1/journal").await.ok()["entries"].as_array().map(Vec::len), Some(1));
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn gpus_that_are_held_or_waited_for_are_shown() {
    for place in Place::each().await {
        let guard = place.locks.lock("gpu_lock:0").owner("tts").await.expect("free");
        if let Some(redis) = &place.redis {
            redis.command(&["SET", "gpu_lock:1", "locked_by_asr", "NX", "EX", "60"]).await;
        }
        let shown = place.get("/api/v1/gpus").await.ok();
        // Without a driver the response says so, and still lists the locks.
        assert!(shown["driver"].is_null() && shown["message"].is_string(), "{shown}");
        let gpus = shown["gpus"].as_array().expect("a list");
        assert_eq!((&gpus[0]["id"], &gpus[0]["lock"]["name"]), (&json!(0), &json!("gpu_lock:0")), "{}", place.kind);
        assert_eq!(gpus[0]["lock"]["holder_id"], json!(guard.holder_id().to_string()));
        if place.redis.is_some() {
            assert_eq!((&gpus[1]["id"], &gpus[1]["lock"]["foreign"]), (&json!(1), &json!(true)));
        }
        drop(guard);
        place.end().await;
    }
}
