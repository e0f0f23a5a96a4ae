//! `deploy/` is correct: the metrics it names exist, the systemd unit is valid, and the Redis user has the permissions
//! it needs.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use leasehold::inspect::{EvictMode, Level};
use leasehold::{LockManager, Options};
use leasehold_testkit::RedisServer;
use redis::Value as Reply;
use serde_json::{Value, json};

use crate::support::{Place, quiet};

fn deploy(file: &str) -> (PathBuf, String) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    (path, text)
}

/// The metric names in a text.
fn named(text: &str) -> BTreeSet<String> {
    let part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = text.split(|c| !part(c)).filter(|word| word.starts_with("leasehold_"));
    words.map(str::to_owned).collect()
}

/// A metric under the name of its descriptor.
fn without_suffix(name: &str, known: &BTreeSet<String>) -> String {
    let bases = ["_bucket", "_sum", "_count", "_total"].iter().filter_map(|suffix| name.strip_suffix(suffix));
    bases.map(str::to_owned).find(|base| known.contains(base)).unwrap_or_else(|| name.to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_metric_in_dashboards_and_rules_exists() {
    let place = Place::memory().await;
    place.get("/api/v1/locks").await.ok();
    let served = place.ask("GET", "/metrics", "Accept: application/openmetrics-text\r\n", "").await.body;
    let known: BTreeSet<String> =
        served.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).map(str::to_owned).collect();
    let (_, dashboard) = deploy("grafana/leasehold.json");
    let (_, rules) = deploy("prometheus/rules.yml");
    let dashboard: Value = serde_json::from_str(&dashboard).expect("JSON");
    let exprs: Vec<String> = dashboard["panels"]
        .as_array()
        .expect("panels")
        .iter()
        .flat_map(|panel| panel["targets"].as_array().cloned().unwrap_or_default())
        .map(|target| target["expr"].as_str().expect("an expression").to_owned())
        .collect();
    assert!(exprs.len() > 30, "{}", exprs.len());
    let rules: Value = serde_saphyr::from_str(&rules).expect("YAML");
    let rules = rules["groups"][0]["rules"].as_array().expect("rules").clone();
    let watched: Vec<String> = rules
        .iter()
        .map(|rule| {
            assert!(rule["alert"].is_string() && rule["annotations"]["summary"].is_string(), "{rule}");
            assert!(["warning", "critical"].contains(&rule["labels"]["severity"].as_str().unwrap_or("")), "{rule}");
            rule["expr"].as_str().expect("an expression").to_owned()
        })
        .collect();
    let mut used = BTreeSet::new();
    for expr in exprs.iter().chain(&watched) {
        for (open, close) in [('(', ')'), ('{', '}'), ('[', ']')] {
            let count = |which| expr.chars().filter(|c| *c == which).count();
            assert_eq!(count(open), count(close), "{expr}");
        }
        let names = named(expr);
        assert!(!names.is_empty(), "{expr}");
        for name in names {
            let base = without_suffix(&name, &known);
            assert!(known.contains(&base), "{name} is not served: {known:?}");
            // Counters and parts of histograms are queried by their suffix; gauges have none.
            let kind = served.lines().find_map(|line| line.strip_prefix(&format!("# TYPE {base} "))).expect("a type");
            assert_eq!(base != name, kind != "gauge", "{name} is a {kind}");
            used.insert(base);
        }
    }
    // And every served metric is used somewhere.
    let unused: Vec<_> = known.difference(&used).collect();
    assert_eq!(unused, Vec::<&String>::new());
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn promtool_accepts_the_rules_and_the_metrics() {
    if Command::new("promtool").arg("--version").output().is_err() {
        println!("promtool is not installed: rules and metrics were not checked");
        return;
    }
    let said = |output: &Output| {
        let texts = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
        texts.concat()
    };
    let (cases, _) = deploy("prometheus/rules_test.yml");
    let tested = Command::new("promtool").args(["test", "rules"]).arg(&cases).output().expect("it runs");
    assert!(tested.status.success(), "{}", said(&tested));

    let place = Place::memory().await;
    let taken = place.post("/api/v1/locks/a/acquire", &json!({})).await.ok();
    place.post("/api/v1/locks/a/acquire", &json!({})).await;
    place.post("/api/v1/locks/a/release", &json!({ "token": taken["token"] })).await.ok();
    let served = place.get("/metrics").await.body;
    let text = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(text.path(), &served).expect("written");
    let read = std::fs::File::open(text.path()).expect("there");
    let checked = Command::new("promtool").args(["check", "metrics"]).stdin(read).output().expect("it runs");
    assert!(checked.status.success() && said(&checked).is_empty(), "{}", said(&checked));
    place.end().await;
}

#[test]
fn the_systemd_unit_is_valid() {
    let (_, unit) = deploy("systemd/leasehold.service");
    assert!(unit.contains("ExecStart=/usr/local/bin/leasehold serve\n"));
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        println!("systemd-analyze is not installed: the unit was not checked");
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("leasehold.service");
    // A program that exists here.
    std::fs::write(&file, unit.replace("/usr/local/bin/leasehold serve", "/bin/true")).expect("written");
    let checked = Command::new("systemd-analyze").arg("verify").arg(&file).output().expect("it runs");
    let said = String::from_utf8_lossy(&checked.stderr).into_owned();
    assert!(checked.status.success() && !said.contains("leasehold.service:"), "{said}");
}

/// Uses every operation of the library.
async fn battery(redis: &RedisServer, url: &str) {
    let options = || {
        let mut options: Options = quiet();
        options.max_release_retries = 0;
        options.emergency_release_delay = Duration::ZERO;
        options
    };
    let a = LockManager::connect_with(url, options()).await.expect("a store");
    let b = LockManager::connect_with(url, options()).await.expect("a store");
    let mut events = a.events().await.expect("answered");
    // Acquired, refused, waited for, handed over, renewed, released.
    let held = a.lock("gpu_lock:0").ttl(Duration::from_millis(900)).await.expect("free");
    assert!(b.try_lock("gpu_lock:0").await.expect("answered").is_none());
    let waits = tokio::spawn({
        let b = b.clone();
        async move { b.lock("gpu_lock:0").wait_up_to(Duration::from_secs(20)).await.expect("its turn") }
    });
    while a.info("gpu_lock:0").await.expect("answered").waiters.is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert_eq!(a.long_held().await.expect("answered").len(), 1);
    held.release().await.expect("answered");
    let handed = waits.await.expect("no panic");
    // Asked to finish, revoked, forced.
    b.ask_to_finish("gpu_lock:0", handed.holder_id(), "please").await.expect("answered");
    b.evict("gpu_lock:0", handed.holder_id(), EvictMode::Revoke, "test").await.expect("answered");
    handed.lost().await;
    handed.release().await.expect("answered");
    let held = a.lock("task_lock:6").await.expect("free");
    b.evict("task_lock:6", held.holder_id(), EvictMode::Force, "test").await.expect("answered");
    drop(held);
    // Forced while a polling client waits: it is served by polling.
    let mut polls = options();
    polls.notifications = false;
    let c = LockManager::connect_with(url, polls).await.expect("a store");
    let held = a.lock("task_lock:7").await.expect("free");
    let waits = tokio::spawn({
        let c = c.clone();
        async move { c.lock("task_lock:7").wait_up_to(Duration::from_secs(20)).await.expect("its turn") }
    });
    while a.info("task_lock:7").await.expect("answered").waiters.is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    b.evict("task_lock:7", held.holder_id(), EvictMode::Force, "test").await.expect("answered");
    waits.await.expect("no panic").release().await.expect("answered");
    drop(held);
    c.shutdown().await;
    // A waiter that gives up, a pool, a claim, a once, a lease without a process.
    let held = a.lock("plain").await.expect("free");
    assert!(b.lock("plain").wait_up_to(Duration::from_millis(100)).await.is_err());
    drop(held);
    let pool = a.pool("seats", 0..3).expect("a pool");
    drop(pool.any(2).await.expect("free"));
    a.once("report").run(async |_| 7).await.expect("done");
    a.once("report").run(async |_| 8).await.expect("found");
    assert_eq!(redis.command(&["ACL", "LOG"]).await, Reply::Array(Vec::new()), "0 NOPERM");
    // Released without scripts, as when they fail.
    let held = a.lock("gpu_lock:1").await.expect("free");
    redis.command(&["ACL", "SETUSER", "leasehold", "-evalsha", "-eval"]).await;
    assert!(held.release().await.is_err());
    while b.is_locked("gpu_lock:1").await.expect("answered") {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    redis.command(&["ACL", "SETUSER", "leasehold", "+evalsha", "+eval"]).await;
    // These refusals are intended.
    redis.command(&["ACL", "LOG", "RESET"]).await;
    drop(a.lock("last").await.expect("free"));
    assert!(!a.list("", None, 100).await.expect("answered").locks.is_empty() || a.fleet_counters().await.is_ok());
    assert!(events.recv().await.is_some());
    a.shutdown().await;
    b.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_published_redis_user_has_enough_permissions_and_no_dangerous_ones() {
    let (_, file) = deploy("redis/users.acl");
    let redis = RedisServer::start().await;
    let rules: Vec<&str> = file.split_whitespace().skip(2).collect();
    let user = [&["ACL", "SETUSER", "leasehold"], rules.as_slice()].concat();
    assert_eq!(redis.command(&user).await, Reply::Okay);
    let url = format!("redis://leasehold:change-me@127.0.0.1:{}", redis.port());
    battery(&redis, &url).await;
    // A database other than 0, too.
    let elsewhere = LockManager::connect(&format!("{url}/1")).await.expect("let in");
    drop(elsewhere.lock("a").await.expect("free"));
    elsewhere.shutdown().await;
    let log = redis.command(&["ACL", "LOG"]).await;
    assert_eq!(log, Reply::Array(Vec::new()), "0 NOPERM");

    // No needless permission: commands that were not called here are listed with the reason.
    let called = redis.commandstats().await;
    let uncalled = rules.iter().filter_map(|rule| rule.strip_prefix('+')).filter(|name| !called.contains_key(*name));
    let uncalled: Vec<&str> = uncalled.collect();
    println!("allowed and not called: {uncalled:?}");
    // Whether the index is swept depends on timing; a password is sent with HELLO.
    assert!(uncalled.iter().all(|name| ["auth", "zremrangebyscore"].contains(name)), "{uncalled:?}");

    let Reply::Array(dangerous) = redis.command(&["ACL", "CAT", "dangerous"]).await else { panic!("a list") };
    let dangerous: BTreeSet<String> = dangerous
        .iter()
        .map(|name| match name {
            Reply::BulkString(name) => String::from_utf8_lossy(name).into_owned(),
            other => format!("{other:?}"),
        })
        .collect();
    let allowed = rules.iter().filter_map(|rule| rule.strip_prefix('+'));
    let risky: Vec<&str> = allowed.filter(|rule| dangerous.contains(*rule)).collect();
    assert_eq!(risky, ["client|kill"], "and that is optional");
    assert!(!file.contains("+@") && !file.contains("~*") && !file.contains("&*"), "{file}");
    // The documentation has the same list.
    let (_, protocol) = deploy("../docs/protocol.md");
    for rule in rules.iter().filter(|rule| rule.starts_with(['+', '~', '&'])) {
        assert!(protocol.contains(rule.trim_start_matches('+')), "{rule} is not in docs/protocol.md");
    }

    // A checkup says what it was not allowed to inspect, and finds nothing bad.
    let locks = LockManager::connect_with(&url, quiet()).await.expect("a store");
    let findings = locks.checkup().await;
    assert!(findings.iter().all(|finding| finding.level < Level::Bad), "{findings:?}");
    let said = findings.iter().map(|finding| finding.text.as_str()).collect::<Vec<_>>().join("\n");
    assert!(said.contains("INFO") && said.contains("not checked"), "{said}");
    locks.shutdown().await;
}
