//! `leasehold serve`: messages, addresses, keys, logs, the monitor and shutdown.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use leasehold_testkit::server::RedisValue;
use leasehold_testkit::{RedisServer, full_or, report};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::{Place, bare, ran};

/// A server, killed when dropped.
pub(crate) struct Serving {
    pub(crate) child: Child,
    pub(crate) at: SocketAddr,
}

impl Serving {
    pub(crate) fn start(place: &Place, args: &[&str]) -> Self {
        let mut command = place.command(&[&["serve", "--json", "--listen", "127.0.0.1:0"], args].concat());
        Self::spawn(command.stderr(Stdio::piped()))
    }

    pub(crate) fn spawn(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().expect("a pipe")).read_line(&mut line).expect("a line");
        let said: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
        let at = said["url"].as_str().and_then(|url| url.strip_prefix("http://")?.parse().ok());
        Self { child, at: at.unwrap_or_else(|| panic!("{said}")) }
    }

    pub(crate) fn get(&self, path: &str) -> (String, Value) {
        self.ask("GET", path, "")
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> (String, Value) {
        self.ask("POST", path, body)
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (String, Value) {
        let (head, body) = self.exchange(method, path, body);
        let value = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{head} {body}: {error}"));
        (head, value)
    }

    /// Gets a response that is not JSON.
    pub(crate) fn text(&self, path: &str) -> (String, String) {
        self.exchange("GET", path, "")
    }

    fn exchange(&self, method: &str, path: &str, body: &str) -> (String, String) {
        let mut stream = TcpStream::connect(self.at).expect("listening");
        let head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", self.at);
        let kind = format!("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        stream.write_all((head + &kind).as_bytes()).expect("sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        (head.to_owned(), body.to_owned())
    }

    pub(crate) fn end(mut self, signal: Signal) -> (Option<i32>, String) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("it lives");
        let status = self.child.wait().expect("it ends");
        let mut said = String::new();
        self.child.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
        (status.code(), said)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn serve_shows_the_locks_of_other_processes_and_ends_on_signals() {
    for (place, signal) in Place::each().await.into_iter().zip([Signal::TERM, Signal::INT]) {
        let serving = Serving::start(&place, &[]);
        place.ok(&["acquire", "deploy", "--ttl", "1m"]);
        let (head, list) = serving.get("/api/v1/locks?prefix=dep");
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        let mut served = list["locks"].clone();
        let mut listed = place.json(&["ls", "dep"]);
        for view in [&mut served[0], &mut listed[0]] {
            for moving in ["held_ms", "ttl_left_ms", "last_seen_ms"] {
                view.as_object_mut().and_then(|fields| fields.remove(moving)).expect("is there");
            }
        }
        assert_eq!(served, listed, "the fields of --json");
        let (code, said) = serving.end(signal);
        assert_eq!((code, said.contains("panic")), (Some(0), false), "{said}");
    }
}

#[test]
fn serve_prints_its_address_or_why_it_cannot_start() {
    let place = Place::sqlite();
    let other = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = other.local_addr().expect("bound").to_string();
    let table: [(&[&str], i32, &str); 7] = [
        (&["serve", "--listen", &taken], 69, "is in use"),
        (&["serve", "--listen", "0.0.0.0:0"], 78, "no keys"),
        (&["serve", "--listen", "[::]:0"], 78, "no keys"),
        (&["serve", "--listen", "nonsense"], 64, "not a valid address"),
        (&["serve", "--listen", "192.0.2.1:80"], 78, "no keys"),
        (
            &["serve", "--tls-cert", "/nowhere/cert.pem", "--tls-key", "/nowhere/key.pem"],
            78,
            "/nowhere/cert.pem cannot be read: No such file or directory (os error 2)\n",
        ),
        (&["serve", "--tls-cert", "/nowhere/cert.pem"], 64, "--tls-key"),
    ];
    for (args, code, text) in table {
        let began = Instant::now();
        let ran = place.run(args);
        assert_eq!((ran.code, ran.err.contains(text), ran.err.lines().count()), (code, true, 1), "{args:?}: {ran:?}");
        assert!(began.elapsed() < Duration::from_secs(5), "{args:?}");
    }
    let mut command = place.command(&["serve"]);
    command.env("LEASEHOLD_LISTEN", "0.0.0.0:0");
    assert_eq!(ran(command).code, 78);
    let mut command = bare(&["serve", "--listen", "127.0.0.1:0"]);
    command.env("LEASEHOLD_STORE", "redis://127.0.0.1:1");
    let ran = ran(command);
    assert_eq!((ran.code, ran.err.contains("redis://127.0.0.1:1")), (69, true), "{ran:?}");
}

#[test]
fn keys_are_created_listed_revoked_and_required() {
    let place = Place::sqlite();
    let made = place.run(&["keys", "create", "ops", "--role", "operator"]);
    assert_eq!((made.code, made.out.lines().count()), (0, 1), "{made:?}");
    let key = made.out.trim();
    assert!(key.starts_with("lhk_") && key.len() >= 56 && !made.err.contains(key), "{made:?}");
    let viewer = place.json(&["keys", "create", "page"]);
    assert_eq!(viewer["role"], "viewer");
    let listed = place.json(&["keys", "list"]);
    let names: Vec<&Value> = listed.as_array().expect("a list").iter().map(|entry| &entry["name"]).collect();
    assert_eq!(names, ["ops", "page"]);
    for said in [listed.to_string(), place.ok(&["keys", "list"])] {
        assert!(!said.contains(key) && !said.contains("sha256"), "{said}");
    }

    let serving = Serving::start(&place, &[]);
    let status = |path: &str| serving.get(path).0.split(' ').nth(1).expect("a status").to_owned();
    assert_eq!(status("/api/v1/locks"), "401", "the default file is used where it exists");
    assert_eq!(status(&format!("/api/v1/locks?api_key={key}")), "200");
    let (code, said) = serving.end(Signal::TERM);
    assert_eq!((code, said.contains(key)), (Some(0), false), "a key is never logged");

    let mut command = place.command(&["serve", "--json", "--listen", "0.0.0.0:0"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    child.kill().and_then(|()| child.wait()).expect("ended");
    assert!(line.contains("http://0.0.0.0:"), "with keys it may listen anywhere: {line:?}");

    for entry in listed.as_array().expect("a list") {
        place.ok(&["keys", "revoke", entry["id"].as_str().expect("an id")]);
    }
    let ran = place.run(&["serve", "--listen", "127.0.0.1:0"]);
    assert_eq!((ran.code, ran.err.contains("no keys")), (78, true), "no keys left is not open to all: {ran:?}");
    let gone = place.run(&["keys", "revoke", "000000000000"]);
    assert_eq!((gone.code, gone.err.contains("has no key")), (64, true), "{gone:?}");
    assert_eq!(place.run(&["keys", "create", ""]).code, 64);
    let ran = place.run(&["serve", "--keys", "/nowhere/keys.json"]);
    assert_eq!((ran.code, ran.err.contains("/nowhere/keys.json")), (78, true), "{ran:?}");
    let bad = place.home.path().join("bad.json");
    std::fs::write(&bad, "{").expect("written");
    let ran = place.run(&["serve", "--keys", bad.to_str().expect("text")]);
    assert_eq!((ran.code, ran.err.contains("is not a key file"), ran.err.lines().count()), (78, true, 1), "{ran:?}");
}

#[test]
fn no_log_shows_a_key_or_a_token() {
    let place = Place::sqlite();
    let key = place.ok(&["keys", "create", "ops", "--role", "operator"]).trim().to_owned();
    let mut command = place.command(&["serve", "--json", "--listen", "127.0.0.1:0"]);
    // Into a file: a full pipe would block the server.
    let log = place.home.path().join("log");
    let serving = Serving::spawn(command.env("RUST_LOG", "trace").stderr(std::fs::File::create(&log).expect("a file")));
    let body = "{\"ttl_ms\": 60000, \"request_id\": \"a-canary-that-nobody-may-see\"}";
    let (_, taken) = serving.post(&format!("/api/v1/locks/a/acquire?api_key={key}"), body);
    let token = taken["token"].as_str().unwrap_or_else(|| panic!("{taken}")).to_owned();
    serving.post(&format!("/api/v1/locks/a/renew?api_key={key}"), &format!("{{\"token\": \"{token}\"}}"));
    serving.get(&format!("/api/v1/locks?api_key={key}x"));
    let cmdline = std::fs::read_to_string(format!("/proc/{}/cmdline", serving.child.id())).expect("it runs");
    drop(serving);
    let said = std::fs::read_to_string(&log).expect("written");
    assert!(said.contains("acquired") && said.contains("answered"), "trace says much: {said}");
    for secret in [key.as_str(), token.as_str(), "a-canary-that-nobody-may-see"] {
        assert!(!said.contains(secret) && !cmdline.contains(secret), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s11_control_characters_leave_no_raw_byte_in_a_log() {
    let names = full_or(600, 10_000);
    let place = Place::redis().await;
    let redis = place.server.as_ref().expect("a server");
    // Foreign clients can write anything into a key or a value.
    for n in 0..20 {
        let key = format!("gpu_lock:{n}{}", if n % 2 == 0 { "\u{1b}[2J\r\n\u{7f}\u{9b}" } else { "" });
        redis.command(&["SET", &key, &format!("\u{7}evil\u{1b}]0;x\u{7}\n{n}"), "PX", "600000"]).await;
    }
    let config = impatient(&place);
    let mut command = place.command(&["serve", "--json", "--listen", "127.0.0.1:0", "--config", &config]);
    let log = place.home.path().join("log");
    let serving = Serving::spawn(command.env("RUST_LOG", "trace").stderr(std::fs::File::create(&log).expect("a file")));
    let mut answers = String::new();
    for first in (0..names).step_by(100) {
        let mut stream = TcpStream::connect(serving.at).expect("listening");
        for n in first..first + 100 {
            let raw = char::from_u32(n % 32).expect("a control character");
            let (path, body) = match n % 3 {
                0 => (format!("a%{:02X}{n}", n % 32), "{\"ttl_ms\": 1000}".to_owned()),
                1 => (format!("b{n}%1B%5B2J%0D%0Ax"), "{\"ttl_ms\": 1000}".to_owned()),
                _ => (
                    format!("c{n}"),
                    serde_json::json!({ "ttl_ms": 1_000, "owner": format!("o{raw}\u{1b}[2J") }).to_string(),
                ),
            };
            let end = if n == first + 99 { "close" } else { "keep-alive" };
            let head =
                format!("POST /api/v1/locks/{path}/acquire HTTP/1.1\r\nHost: {}\r\nConnection: {end}\r\n", serving.at);
            let kind = format!("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len());
            stream.write_all((head + &kind).as_bytes()).expect("sent");
        }
        stream.read_to_string(&mut answers).expect("answers");
    }
    let refused = answers.matches("HTTP/1.1 400").count();
    assert_eq!(refused, names as usize, "every one of them");
    until(&serving, "/api/v1/alerts", |page| page.to_string().contains("gpu_lock"));
    drop(serving);
    let said = std::fs::read_to_string(&log).expect("text");
    let raw = |text: &str| text.chars().filter(|c| c.is_control() && !"\r\n".contains(*c)).count();
    assert!(said.contains("evil"), "foreign holders are logged: {said}");
    report(
        "S11",
        format!(
            "{names} names and owners with control characters: {refused} refused; 20 locks of other clients with some: {} raw \
             bytes in {} kB of log, {} in the answers",
            raw(&said),
            said.len() / 1_024,
            raw(&answers)
        ),
    );
    assert_eq!((raw(&said), raw(&answers)), (0, 0));
}

/// A monitor that runs five times a second and considers a holder dead after a second.
fn impatient(place: &Place) -> String {
    let path = place.home.path().join("leasehold.yaml");
    let text = "gpu_lock_monitor:\n  monitor_interval: 0.2\n  heartbeat: {interval: 0.5, timeout: 1}\n  \
                timeout_levels: {warning: 1, soft_timeout: 2, hard_timeout: 3}\n";
    std::fs::write(&path, text).expect("written");
    path.to_str().expect("text").to_owned()
}

/// Repeats a request until the response is as expected.
fn until(serving: &Serving, path: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let began = Instant::now();
    loop {
        let (_, said) = serving.get(path);
        if wanted(&said) {
            return said;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "{path}: {said}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A killed holder's GPU is free when its lease ends. A holder with a long lease is revoked at the hard level, and excludes
/// others until its ttl is over.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_gpu_holder_is_freed_by_expiry_and_a_live_one_is_kept() {
    let place = Place::redis().await;
    let config = impatient(&place);
    let serving = Serving::start(&place, &["--config", &config]);
    let run = |gpu: &str, ttl: &str| {
        let mut command = place.command(&["run", "--gpu", gpu, "--gpus", "3", "--ttl", ttl, "--", "sleep", "600"]);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts")
    };
    let mut runs = [run("0", "1s"), run("1", "10m"), run("2", "10m")];
    for gpu in 0..3 {
        until(&serving, &format!("/api/v1/locks/gpu_lock:{gpu}"), |lock| lock["held"] == true);
    }
    for dies in &runs[..2] {
        // The keeper holds the lease; a killed front would end in an orderly release.
        let keeper = children(dies.id()).into_iter().next().expect("a keeper");
        kill_process(Pid::from_raw(keeper.cast_signed()).expect("an id"), Signal::KILL).expect("it lives");
    }
    let died = Instant::now();
    until(&serving, "/api/v1/locks/gpu_lock:0", |lock| lock["held"] == false);
    let freed_in = died.elapsed();
    let revoked = until(&serving, "/api/v1/locks/gpu_lock:1", |lock| lock["revoked"] == true);
    assert_eq!((&revoked["held"], &revoked["connected"]), (&true.into(), &false.into()), "{revoked}");
    let shown = serving.get("/api/v1/monitor").1;
    let actions = shown["actions"].as_array().expect("a list");
    assert!(actions.iter().all(|done| done["action"] != "force"), "{shown}");
    let done = actions.iter().find(|done| done["action"] == "revoke").expect("revoked");
    assert_eq!((&done["name"], &done["outcome"]), (&"gpu_lock:1".into(), &"revoked".into()), "{shown}");
    let living = serving.get("/api/v1/locks/gpu_lock:2").1;
    assert_eq!((&living["held"], &living["revoked"]), (&true.into(), &false.into()), "{living}");
    println!("a killed holder was freed in {freed_in:?} by its lease of 1 s");
    assert!(freed_in < Duration::from_secs(10), "{freed_in:?}");
    for child in &mut runs {
        kill_process(Pid::from_child(child), Signal::TERM).ok();
        child.wait().expect("it ends");
    }
}

/// Returns the children of a process.
fn children(of: u32) -> Vec<u32> {
    let listed = std::fs::read_to_string(format!("/proc/{of}/task/{of}/children")).expect("it lives");
    listed.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn another_server_takes_over_the_monitor_when_the_leader_is_killed() {
    for place in Place::each().await {
        let config = impatient(&place);
        let mut servers =
            [Serving::start(&place, &["--config", &config]), Serving::start(&place, &["--config", &config])];
        let leads = |serving: &Serving| serving.get("/api/v1/monitor").1["leader"] == true;
        let began = Instant::now();
        while !servers.iter().any(leads) {
            assert!(began.elapsed() < Duration::from_secs(20), "nobody leads");
        }
        assert_eq!(servers.iter().filter(|serving| leads(serving)).count(), 1, "one of them");
        if leads(&servers[1]) {
            servers.swap(0, 1);
        }
        let [mut leader, other] = servers;
        let owner = other.get("/api/v1/monitor").1["leader_owner"].as_str().expect("somebody leads").to_owned();
        assert!(owner.contains(&format!("pid {}", leader.child.id())), "{owner}");
        leader.child.kill().and_then(|()| leader.child.wait()).expect("killed");
        let passed =
            until(&other, "/api/v1/monitor", |shown| shown["leader"] == true && shown["last_pass_ms"].is_u64());
        assert!(passed["leader_owner"].as_str().is_some_and(|owner| owner.contains(&other.child.id().to_string())));
    }
}

/// Returns the slow commands since the last `SLOWLOG RESET` and their durations in microseconds, slowest first.
async fn slow_commands(redis: &RedisServer) -> Vec<(i64, String)> {
    let RedisValue::Array(entries) = redis.command(&["SLOWLOG", "GET", "-1"]).await else { panic!("a list") };
    let entry = |entry: RedisValue| match entry {
        RedisValue::Array(fields) => match (&fields[2], &fields[3]) {
            (RedisValue::Int(us), RedisValue::Array(args)) => match args.first()? {
                RedisValue::BulkString(name) => Some((*us, String::from_utf8_lossy(name).into_owned())),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    };
    let mut slow: Vec<(i64, String)> = entries.into_iter().filter_map(entry).collect();
    slow.sort_by(|a, b| b.cmp(a));
    slow
}

/// Returns a field of `/proc/PID/status`, in kB.
pub(crate) fn memory_kb(pid: u32, field: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a figure");
    line.trim_matches([':', ' ', '\t']).trim_end_matches(" kB").parse().expect("a number")
}

#[tokio::test(flavor = "multi_thread")]
async fn m01_monitor_and_dashboard_do_not_block_a_large_store() {
    let (locks, keys) = full_or((500, 20_000), (10_000, 1_000_000));
    let place = Place::redis().await;
    let redis = place.server.as_ref().expect("a server");
    redis.command(&["DEBUG", "POPULATE", &keys.to_string(), "other", "20"]).await;
    let manager = place.manager().await;
    let mut guards = Vec::new();
    for chunk in (0..locks).collect::<Vec<_>>().chunks(250) {
        let asked = chunk.iter().map(|n| {
            let name = if n % 10 == 0 { format!("gpu_lock:{n}") } else { format!("job:{n}") };
            manager.lock(name).ttl(Duration::from_secs(3_600)).renew(false).into_future()
        });
        guards.extend(join_all(asked).await.into_iter().map(|guard| guard.expect("free")));
    }
    for n in 0..10 {
        redis.command(&["SET", &format!("task_lock:{n}"), "locked_by_somebody", "PX", "3600000"]).await;
    }
    while manager.long_held().await.expect("answered").len() < locks {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    redis.command(&["CONFIG", "RESETSTAT"]).await;
    redis.command(&["SLOWLOG", "RESET"]).await;
    let config = place.home.path().join("leasehold.yaml");
    std::fs::write(&config, "gpu_lock_monitor: {monitor_interval: 2}\n").expect("written");
    let began = Instant::now();
    let serving = Serving::start(&place, &["--config", config.to_str().expect("text")]);
    let passed = loop {
        let (_, shown) = serving.get("/api/v1/monitor");
        if shown["foreign_seen"] == 10 {
            break shown;
        }
        assert!(began.elapsed() < Duration::from_secs(240), "{shown}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    // The leader's own lock is one more.
    let seen = passed["locks_seen"].as_u64().and_then(|seen| usize::try_from(seen).ok()).expect("a number");
    assert_eq!(seen, locks + 10 + 1, "{passed}");
    let searched_in = began.elapsed();
    let mut took = Vec::new();
    for _ in 0..20 {
        let asked_at = Instant::now();
        let (head, page) = serving.get("/api/v1/locks");
        took.push(asked_at.elapsed());
        assert!(head.starts_with("HTTP/1.1 200") && page["locks"].is_array(), "{head}");
    }
    took.sort();
    let slow = slow_commands(redis).await;
    let (slowest_us, command) = slow.first().cloned().unwrap_or_default();
    let over_a_ms = slow.iter().filter(|(us, _)| *us > 1_000).count();
    let slowest = |slow: &[(i64, String)]| {
        let three: Vec<String> = slow.iter().take(3).map(|(us, command)| format!("{command} {us} us")).collect();
        three.join(", ")
    };
    // The requests of an open dashboard. Reported separately and without a bound: they keep a small machine busy, and the
    // time that Redis waits for a processor counts as its command's.
    redis.command(&["SLOWLOG", "RESET"]).await;
    let mut page = String::new();
    for path in ["/api/v1/overview", "/api/v1/timeline", "/api/v1/live"] {
        let mut took = Vec::new();
        for _ in 0..20 {
            let asked_at = Instant::now();
            let (head, _) = serving.get(path);
            took.push(asked_at.elapsed());
            assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        }
        took.sort();
        page += &format!("{} {:.1?} (slowest {:.1?}), ", path.trim_start_matches("/api/v1/"), took[10], took[19]);
    }
    let (slow_then, peak_kb) = (slow_commands(redis).await, memory_kb(serving.child.id(), "VmHWM"));
    let called = redis.commandstats().await;
    for forbidden in ["keys", "smembers", "flushall"] {
        assert!(!called.contains_key(forbidden), "{called:?}");
    }
    report(
        "M01",
        format!(
            "{locks} locks among {keys} other keys: a pass {} ms, the first page {:.1?} (median of 20, slowest {:.1?}), \
             all foreign locks found in {:.1?}, the slowest commands {} ({over_a_ms} over 1 ms); {page}the slowest \
             commands then {}; memory of the server at \
             most {} MB",
            passed["pass_took_ms"],
            took[10],
            took[19],
            searched_in,
            slowest(&slow),
            slowest(&slow_then),
            peak_kb / 1_024,
        ),
    );
    assert!(peak_kb < 200 * 1_024, "{peak_kb} kB");
    // On a busy machine any server pauses for longer than that; the full run has a machine to itself.
    assert!(slowest_us <= full_or(100_000, 5_000), "{slowest_us} us: {command}");
    drop(guards);
    manager.shutdown().await;
}
