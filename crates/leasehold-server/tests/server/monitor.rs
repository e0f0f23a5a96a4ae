//! The monitor on a real store: what it reports, which holders it asks to finish, and which it evicts.

use std::path::Path;
use std::time::Duration;

use leasehold::config::{GpuLockMonitor, Setting};
use leasehold::events::{EventKind, LockEvent};
use leasehold::lease::Ttl;
use leasehold_server::Settings;
use serde_json::{Value, json};
use tokio::sync::mpsc::Receiver;
use tokio::time::timeout;

use crate::support::Place;

/// The timeout of every wait.
const LONG: Duration = Duration::from_secs(20);
/// The token of leases that a test writes into Redis itself.
const TOKEN: &str = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA";

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A monitor with ten passes a second, for levels of seconds.
fn impatient(audit: &Path) -> Settings {
    let mut monitor = GpuLockMonitor::default();
    monitor.monitor_interval = ms(100);
    monitor.timeout_levels.warning = ms(200);
    monitor.timeout_levels.soft_timeout = ms(400);
    monitor.timeout_levels.hard_timeout = ms(800);
    monitor.heartbeat.interval = ms(150);
    monitor.heartbeat.timeout = Ttl::new(ms(400)).expect("in bounds");
    let mut settings = Settings::default();
    settings.monitor = monitor;
    settings.audit = Some(audit.to_owned());
    settings
}

async fn shown(place: &Place) -> Value {
    place.get("/api/v1/monitor").await.ok()
}

/// Polls until the response is as expected.
async fn until(place: &Place, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let mut last = Value::Null;
    let found = timeout(LONG, async {
        loop {
            last = shown(place).await;
            if wanted(&last) {
                return last.clone();
            }
            tokio::time::sleep(ms(10)).await;
        }
    });
    let found = found.await;
    found.unwrap_or_else(|_| panic!("{}: {what}: {last}", place.kind))
}

fn did<'a>(shown: &'a Value, action: &str, outcome: &str) -> Option<&'a Value> {
    let actions = shown["actions"].as_array().expect("a list");
    actions.iter().find(|done| done["action"] == action && done["outcome"] == outcome)
}

async fn next(events: &mut Receiver<LockEvent>, kind: EventKind) -> LockEvent {
    let found = async {
        loop {
            let event = events.recv().await.expect("open");
            if event.kind == kind {
                return event;
            }
        }
    };
    timeout(LONG, found).await.unwrap_or_else(|_| panic!("no event {kind:?}"))
}

fn audited(audit: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(audit).expect("written");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_holder_is_forced_at_the_hard_level_or_only_reported() {
    for auto_recovery in [true, false] {
        let dir = tempfile::tempdir().expect("a directory");
        let audit = dir.path().join("audit.jsonl");
        let mut settings = impatient(&audit);
        settings.monitor.auto_recovery = auto_recovery;
        let place = Place::redis_with(settings).await;
        let redis = place.redis.as_ref().expect("a server");
        let mut events = place.locks.events().await.expect("following");
        redis.command(&["SET", "gpu_lock:1", "locked_by_tts", "PX", "600000"]).await;
        redis.command(&["SET", "task_lock:1", "locked_by_tts", "PX", "600000"]).await;
        redis.command(&["SET", "session:1", "not a lock"]).await;
        let seen = until(&place, "seen", |shown| shown["foreign_seen"] == 2).await;
        assert!(seen["leader"] == true && seen["locks_seen"].as_u64().is_some_and(|n| n >= 2), "{seen}");
        if !auto_recovery {
            // Far over every level.
            tokio::time::sleep(ms(1_500)).await;
            let shown = shown(&place).await;
            assert_eq!((&shown["actions"], &shown["auto_recovery"]), (&json!([]), &json!(false)));
            assert_eq!(place.get("/api/v1/locks/gpu_lock:1").await.ok()["owner"], "locked_by_tts");
            place.end().await;
            continue;
        }
        let shown = until(&place, "freed", |shown| did(shown, "force", "forced").is_some()).await;
        let done = did(&shown, "force", "forced").expect("done");
        assert_eq!((&done["name"], &done["owner"]), (&json!("gpu_lock:1"), &json!("locked_by_tts")));
        let event = next(&mut events, EventKind::Forced).await;
        assert_eq!(event.reason, "forced_by_monitor");
        assert_eq!((event.name.as_str(), event.owner.as_str()), ("gpu_lock:1", "locked_by_tts"));
        let lines = audited(&audit);
        assert_eq!(lines.len(), 2, "before and after: {lines:?}");
        assert_eq!((&lines[1]["who"], &lines[1]["outcome"]), (&json!("monitor"), &json!("forced")));
        assert_eq!((&lines[1]["owner"], &lines[1]["holder_id"]), (&done["owner"], &done["holder_id"]));
        assert!(lines[0]["reason"].as_str().is_some_and(|why| why.contains("over the hard level")), "{lines:?}");
        assert_eq!(place.get("/api/v1/locks/task_lock:1").await.ok()["held"], true, "whatever its age");
        let metrics = place.get("/metrics").await.body;
        let line = "leasehold_monitor_actions_total{action=\"force\",outcome=\"forced\"} 1";
        assert!(metrics.contains(line) && metrics.contains("leasehold_monitor_leader 1"), "{metrics}");
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn live_holders_are_asked_to_finish_and_evicted_only_if_configured() {
    for evict_living in [false, true] {
        let dir = tempfile::tempdir().expect("a directory");
        let audit = dir.path().join("audit.jsonl");
        let mut settings = impatient(&audit);
        settings.monitor.evict_living = evict_living;
        // This test is not about missing heartbeats.
        settings.monitor.heartbeat.timeout = Ttl::new(LONG).expect("in bounds");
        let place = Place::redis_with(settings).await;
        let mut events = place.locks.events().await.expect("following");
        let guard = place.locks.lock("gpu_lock:0").owner("tts").await.expect("free");
        let other = place.locks.lock("nightly").owner("report").await.expect("free");
        let why = timeout(LONG, guard.asked_to_finish()).await.expect("asked");
        assert!(why.contains("please finish"), "{why}");
        assert_eq!(next(&mut events, EventKind::AskedToFinish).await.name, "gpu_lock:0");
        if evict_living {
            let lost = timeout(LONG, guard.lost()).await.expect("notified");
            assert_eq!(lost, leasehold::LossReason::Revoked);
            until(&place, "revoked", |shown| did(shown, "revoke", "revoked").is_some()).await;
        } else {
            let shown = until(&place, "asked again at the hard level", |shown| {
                shown["actions"].as_array().is_some_and(|done| done.len() >= 2)
            });
            shown.await;
            tokio::time::sleep(ms(1_000)).await;
            let actions = &self::shown(&place).await["actions"];
            assert_eq!(actions.as_array().expect("a list").len(), 2, "and no more: {actions}");
            assert!(guard.is_valid() && guard.loss().is_none());
            let lines = audited(&audit);
            assert_eq!((&lines[1]["action"], &lines[1]["outcome"]), (&json!("ask"), &json!("told")));
        }
        assert!(other.is_valid() && timeout(ms(10), other.asked_to_finish()).await.is_err(), "not one of `names`");
        drop((guard, other));
        place.end().await;
    }
}

/// A task of an hour, written as a record: with a heartbeat it is left alone; without one it is revoked, and stays
/// until its ttl is over.
#[tokio::test(flavor = "multi_thread")]
async fn an_hour_long_task_keeps_its_lock_while_it_gives_signs_of_life() {
    let dir = tempfile::tempdir().expect("a directory");
    let audit = dir.path().join("audit.jsonl");
    let mut settings = Settings::default();
    // The defaults, with more frequent passes.
    settings.monitor = GpuLockMonitor::default();
    settings.monitor.monitor_interval = ms(100);
    settings.audit = Some(audit.clone());
    let place = Place::redis_with(settings).await;
    let redis = place.redis.as_ref().expect("a server");
    let hour_ago = since_now_ms() - 3_600_000;
    // Renewed ten seconds ago, with a ttl of five minutes.
    let alive = format!("lh1 0 {TOKEN} 0000000000000007 - {hour_ago} 300000 tts@gpu-a:1");
    redis.command(&["SET", "gpu_lock:0", &alive, "PX", "290000"]).await;
    // Renewed ten minutes ago, with a ttl of two hours.
    let dead = alive.replace("AAAA", "BBBB").replace("300000", "7200000");
    redis.command(&["SET", "gpu_lock:1", &dead, "PX", "6600000"]).await;
    let shown = until(&place, "revoked", |shown| did(shown, "revoke", "revoked").is_some()).await;
    let done = did(&shown, "revoke", "revoked").expect("done");
    assert_eq!((&done["name"], &done["owner"]), (&json!("gpu_lock:1"), &json!("tts@gpu-a (pid 1)")));
    let line = audited(&audit).pop().expect("a line");
    assert_eq!(line["since_ms"], json!(hour_ago), "since when it had it");
    let ago = since_now_ms() - line["last_seen_ms"].as_u64().expect("its last sign of life");
    assert!((590_000..660_000).contains(&ago), "{line}");
    passes(&place, 3).await;
    let left = place.get("/api/v1/locks/gpu_lock:1").await.ok();
    assert_eq!((&left["held"], &left["revoked"]), (&json!(true), &json!(true)), "its ttl is the promise: {left}");
    assert_eq!(place.get("/api/v1/locks/gpu_lock:0").await.ok()["revoked"], false, "the living one is left alone");
    place.end().await;
}

/// Waits until the monitor has finished this many more passes.
async fn passes(place: &Place, times: usize) {
    for _ in 0..times {
        let before = shown(place).await["last_pass_ms"].clone();
        until(place, "another pass", |shown| shown["last_pass_ms"] != before).await;
    }
}

/// A lease by token and a guard that is not renewed, both far over the hard level and without a heartbeat.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_of_ours_is_revoked_at_the_hard_level_and_freed_by_its_ttl_alone() {
    let dir = tempfile::tempdir().expect("a directory");
    let audit = dir.path().join("audit.jsonl");
    let place = Place::redis_with(impatient(&audit)).await;
    let redis = place.redis.as_ref().expect("a server");
    let mut events = place.locks.events().await.expect("following");
    let began = std::time::Instant::now();
    let body = json!({ "ttl_ms": 4_000, "owner": "script" });
    let token = place.post("/api/v1/locks/gpu_lock:0/acquire", &body).await.ok()["token"].clone();
    // To the store its process is gone: the inbox that its record names has no subscriber.
    let since = since_now_ms();
    let gone = format!("lh1 0 {TOKEN} 0000000000000007 lh1:inbox:gone {since} 600000 tts@gpu-a:1");
    redis.command(&["SET", "gpu_lock:1", &gone, "PX", "600000"]).await;
    let both = |shown: &Value| {
        let revoked = |done: &&Value| done["action"] == "revoke" && done["outcome"] == "revoked";
        shown["actions"].as_array().expect("a list").iter().filter(revoked).count() == 2
    };
    until(&place, "both are revoked", both).await;
    passes(&place, 5).await;
    for name in ["gpu_lock:0", "gpu_lock:1"] {
        let lock = place.get(&format!("/api/v1/locks/{name}")).await.ok();
        assert_eq!((&lock["held"], &lock["revoked"]), (&json!(true), &json!(true)), "{lock}");
        assert!(place.locks.lock(name).no_wait().await.is_err(), "{name} is not grantable inside its ttl");
    }
    assert!(audited(&audit).iter().all(|line| line["action"] != "force"), "nothing is forced");
    assert_eq!(next(&mut events, EventKind::Revoked).await.reason, "revoked_by_monitor");
    let renewed = place.post("/api/v1/locks/gpu_lock:0/renew", &json!({ "token": token })).await;
    assert_eq!(renewed.status, 409, "{}", renewed.body);
    // The ttl frees the lock, and an operator can force the other one by its holder id.
    let freed = timeout(LONG, place.locks.lock("gpu_lock:0")).await.expect("by its ttl").expect("granted");
    assert!(began.elapsed() >= ms(4_000), "{:?}", began.elapsed());
    let looked = place.get("/api/v1/locks/gpu_lock:1").await.ok();
    let force = json!({ "holder_id": looked["holder_id"], "mode": "force", "reason": "the machine is gone" });
    let forced = place.post("/api/v1/locks/gpu_lock:1/evict", &force).await.ok();
    assert_eq!((&forced["outcome"], &forced["released"]), (&json!("forced"), &json!(true)));
    drop(freed);
    place.end().await;
}

fn since_now_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    u64::try_from(since.as_millis()).expect("not so far")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_monitor_runs_on_every_store_and_shows_its_rules() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut settings = impatient(&dir.path().join("audit.jsonl"));
    settings.monitor.names = Setting::parse("gpu_lock:*, nightly").expect("valid");
    for place in [Place::memory_with(settings.clone()).await, Place::sqlite_with(settings).await] {
        let guard = place.locks.lock("nightly").owner("report").await.expect("free");
        timeout(LONG, guard.asked_to_finish()).await.unwrap_or_else(|_| panic!("{}: asked", place.kind));
        let shown = until(&place, "looked", |s| s["pass_took_ms"].is_u64() && did(s, "ask", "told").is_some()).await;
        let owner = shown["leader_owner"].as_str().expect("it leads");
        assert!(owner.starts_with("leasehold serve@"), "{owner}");
        assert_eq!(shown["levels"], json!({ "warning_ms": 200, "soft_ms": 400, "hard_ms": 800 }));
        assert_eq!((&shown["heartbeat_timeout_ms"], &shown["enabled"]), (&json!(400), &json!(true)));
        let done = did(&shown, "ask", "told").expect("asked");
        assert_eq!(done["holder_id"], json!(guard.holder_id().to_string()));
        drop(guard);
        place.end().await;
    }
    let off = Place::memory().await;
    let shown = shown(&off).await;
    assert_eq!(
        (&shown["enabled"], &shown["leader"], &shown["leader_owner"]),
        (&json!(false), &json!(false), &Value::Null)
    );
    assert!(off.locks.overview("").await.expect("answered").is_empty(), "nobody stands for election");
    off.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_eviction_that_fails_is_tried_again_as_often_as_configured() {
    // It can be opened but not written.
    let mut settings = impatient(Path::new("/dev/full"));
    settings.monitor.cleanup.max_retry = 2;
    settings.monitor.cleanup.retry_delay = ms(250);
    let place = Place::redis_with(settings).await;
    let redis = place.redis.as_ref().expect("a server");
    redis.command(&["SET", "gpu_lock:1", "locked_by_tts", "PX", "600000"]).await;
    let failed = |shown: &Value| shown["actions"].as_array().expect("a list").len();
    let shown = until(&place, "tried again", |shown| failed(shown) >= 3).await;
    let times: Vec<u64> =
        shown["actions"].as_array().expect("a list").iter().filter_map(|a| a["at_ms"].as_u64()).collect();
    assert!(times.windows(2).all(|pair| pair[0] - pair[1] >= 250), "the newest first, with pauses: {times:?}");
    assert!(did(&shown, "force", "failed").is_some(), "{shown}");
    tokio::time::sleep(ms(800)).await;
    assert_eq!(failed(&self::shown(&place).await), 3, "once, and twice more");
    assert_eq!(place.get("/api/v1/locks/gpu_lock:1").await.ok()["held"], true, "what is not written down is not done");
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_monitor_continues_after_a_store_outage() {
    let dir = tempfile::tempdir().expect("a directory");
    let place = Place::redis_with(impatient(&dir.path().join("audit.jsonl"))).await;
    let redis = place.redis.as_ref().expect("a server");
    until(&place, "leads", |shown| shown["last_pass_ms"].is_u64()).await;
    redis.restart().await;
    let back_ms = since_now_ms();
    redis.command(&["SET", "gpu_lock:1", "locked_by_tts", "PX", "600000"]).await;
    let looked = |shown: &Value| shown["last_pass_ms"].as_u64().is_some_and(|at_ms| at_ms > back_ms);
    until(&place, "looks again", |shown| looked(shown) && did(shown, "force", "forced").is_some()).await;
    place.end().await;
}
