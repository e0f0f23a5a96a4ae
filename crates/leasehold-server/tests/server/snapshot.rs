//! The cached view of all locks, and the dashboard that shows it.

use std::time::{Duration, Instant};

use crate::support::Place;
use leasehold_server::{KeyFile, Role, Settings};
use serde_json::{Value, json};

/// Polls until the response is as expected.
async fn until(place: &Place, path: &str, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let began = Instant::now();
    loop {
        let answer = place.get(path).await.ok();
        if wanted(&answer) {
            return answer;
        }
        assert!(began.elapsed() < Duration::from_secs(15), "{}: not {what}: {answer}", place.kind);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn tenure<'a>(answer: &'a Value, owner: &str) -> &'a Value {
    let all = answer["tenures"].as_array().expect("tenures");
    all.iter().find(|tenure| tenure["owner"].as_str().is_some_and(|is| is.starts_with(owner))).unwrap_or(&Value::Null)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_snapshot_shows_holders_waiters_and_hand_offs_on_every_store() {
    for place in Place::each().await {
        let alice = place.locks.lock("deploy").owner("alice").await.expect("free");
        let waiting = {
            let request = place.locks.lock("deploy").owner("bob");
            tokio::spawn(async move { request.await.expect("granted") })
        };
        let seen = until(&place, "/api/v1/live", "waited for", |live| live["overview"]["waiting"] == 1).await;
        assert_eq!((&seen["complete"], &seen["overview"]["held"]), (&json!(true), &json!(1)), "{}", place.kind);
        assert_eq!(seen["locks"][0]["name"], "deploy");
        assert!(seen["locks"][0]["at_ms"].is_u64() && seen["locks"][0]["waiters"][0]["ticket"].is_u64(), "{seen}");
        let changes = format!("/api/v1/live?after={}", seen["after"].as_str().expect("text"));
        until(&place, &changes, "unchanged", |live| live["complete"] == json!(false)).await;

        let (fence, alice_id) = (alice.fence().get(), alice.holder_id().to_string());
        alice.release().await.expect("ours");
        let bob = waiting.await.expect("no panic");
        let shown = until(&place, "/api/v1/timeline", "handed over", |timeline| {
            !tenure(timeline, "alice")["end"].is_null() && !tenure(timeline, "bob")["after"].is_null()
        });
        let shown = shown.await;
        let (first, second) = (tenure(&shown, "alice"), tenure(&shown, "bob"));
        assert_eq!((&first["end"], &first["fence"]), (&json!("released"), &json!(fence)), "{}: {shown}", place.kind);
        assert_eq!((&second["after"], &second["end"]), (&json!(alice_id), &Value::Null), "{}: {shown}", place.kind);
        assert_eq!(shown["waits"][0]["ended_ms"], second["since_ms"], "{}: {shown}", place.kind);
        let live = place.get(&changes).await.ok();
        assert_eq!(live["locks"][0]["holder_id"], bob.holder_id().to_string(), "only what has changed: {live}");

        let evict = json!({ "holder_id": bob.holder_id().to_string(), "mode": "force", "reason": "stuck" });
        place.post("/api/v1/locks/deploy/evict", &evict).await.ok();
        let forced = |timeline: &Value| tenure(timeline, "bob")["end"] == "forced";
        until(&place, "/api/v1/timeline", "forced", forced).await;
        let gone = until(&place, &changes, "gone", |live| live["gone"] == json!(["deploy"])).await;
        assert_eq!(gone["overview"]["bad_ends_last_hour"], 1, "{}: {gone}", place.kind);
        assert_eq!(gone["overview"]["handoffs_per_minute"], 1, "{}: {gone}", place.kind);
        let later = json!(now_ms() + 60_000);
        let none = place.get(&format!("/api/v1/timeline?since_ms={later}")).await.ok();
        assert_eq!((&none["tenures"], &none["waits"]), (&json!([]), &json!([])), "both have ended before");
        // Another server's version, and one that was never returned.
        for unknown in ["000000000000-1", "nonsense", &format!("{}9", seen["after"].as_str().expect("text"))] {
            assert_eq!(place.get(&format!("/api/v1/live?after={unknown}")).await.ok()["complete"], true, "{unknown}");
        }
        let secret = format!("{gone}{shown}");
        assert!(!secret.contains("token"), "no token is in it");
        drop(bob);
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_store_is_reported_with_the_last_snapshot() {
    let place = Place::redis().await;
    let guard = place.locks.lock("deploy").owner("alice").ttl(Duration::from_secs(60)).await.expect("free");
    until(&place, "/api/v1/overview", "held", |overview| overview["held"] == 1).await;
    let redis = place.redis.as_ref().expect("a server");
    redis.pause();
    let down = until(&place, "/api/v1/overview", "down", |overview| overview["status"] == "unhealthy").await;
    assert!(down["store_down_since_ms"].is_u64() && down["held"] == 1, "{down}");
    assert_eq!(place.get("/api/v1/live").await.ok()["locks"][0]["name"], "deploy", "what was known");
    redis.resume();
    let up = until(&place, "/api/v1/overview", "up", |overview| overview["store_down_since_ms"].is_null()).await;
    assert_eq!((&up["status"], &up["held"]), (&json!("healthy"), &json!(1)), "{up}");
    drop(guard);
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_dashboard_is_public_and_its_data_is_not() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = KeyFile::new(dir.path().join("keys.json"));
    let (_, viewer) = file.create("looker", Role::Viewer).expect("made");
    let mut settings = Settings::default();
    settings.keys = Some(file);
    let mut place = Place::memory_with(settings).await;
    let page = place.get("/").await;
    assert_eq!(page.status, 200);
    for wanted in ["script-src 'self'", "require-trusted-types-for 'script'", "cache-control: no-cache", "nosniff"] {
        assert!(page.head.contains(wanted), "{wanted}: {}", page.head);
    }
    for never in ["unsafe", "style=", "http://", "https://", "<script>"] {
        assert!(!page.body.contains(never) && !page.head.contains(never), "{never}");
    }
    for part in page.body.split("/assets/").skip(1) {
        let part = part.split('"').next().expect("quoted");
        let asset = place.get(&format!("/assets/{part}")).await;
        assert_eq!(asset.status, 200, "{part}");
        assert!(asset.head.contains("immutable") && asset.head.contains("nosniff"), "{part}: {}", asset.head);
    }
    for data in ["/api/v1/overview", "/api/v1/timeline", "/api/v1/live"] {
        assert_eq!(place.get(data).await.status, 401, "{data}");
    }
    assert_eq!(place.ask("POST", "/", "", "").await.status, 401, "only looking is open");
    place.headers = format!("Authorization: Bearer {viewer}\r\n");
    let overview = place.get("/api/v1/overview").await.ok();
    assert_eq!((&overview["role"], &overview["keyed"]), (&json!("viewer"), &json!(true)));
    assert_eq!((&overview["namespace"], &overview["status"]), (&json!("leasehold"), &json!("healthy")));
    place.end().await;
}

fn now_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
