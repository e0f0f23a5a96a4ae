//! Alerts from the operator's side: a configuration file, `leasehold serve` and the receivers.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::{Place, ran};
use crate::serve::Serving;

const SECRET: &str = "a-secret-of-a-webhook";

/// A webhook receiver: answers the first request with `first`, all others with 200, and records them.
struct Hook {
    at: SocketAddr,
    got: Arc<Mutex<Vec<(String, Value)>>>,
}

impl Hook {
    fn start(first: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let at = listener.local_addr().expect("bound");
        let got: Arc<Mutex<Vec<(String, Value)>>> = Arc::default();
        let keep = got.clone();
        // Ends with the test's process.
        std::thread::spawn(move || {
            let mut answer = first;
            for stream in listener.incoming() {
                let mut stream = stream.expect("accepted");
                let (mut text, mut block) = (String::new(), [0; 4_096]);
                let (head, body) = loop {
                    let read = stream.read(&mut block).unwrap_or(0);
                    text += &String::from_utf8_lossy(&block[..read]);
                    let whole = text.split_once("\r\n\r\n").and_then(|(head, body)| {
                        Some((head.to_lowercase(), serde_json::from_str::<Value>(body).ok()?))
                    });
                    match whole {
                        Some(whole) => break whole,
                        None => assert!(read > 0, "{text}"),
                    }
                };
                keep.lock().expect("whole").push((format!("{answer}\n{head}"), body));
                let _ = stream.write_all(format!("HTTP/1.1 {answer}\r\nContent-Length: 0\r\n\r\n").as_bytes());
                answer = "200 OK";
            }
        });
        Self { at, got }
    }

    /// Returns the accepted alerts by type and lock: the ids that fired and the ids that were resolved.
    fn received(&self) -> BTreeMap<(String, String), (Vec<String>, Vec<String>)> {
        let mut received: BTreeMap<_, (Vec<String>, Vec<String>)> = BTreeMap::new();
        for (_, body) in self.got.lock().expect("whole").iter().filter(|(head, _)| head.starts_with("200")) {
            let text = |field: &str| body[field].as_str().unwrap_or_default().to_owned();
            let entry = received.entry((text("type"), text("name"))).or_default();
            if text("state") == "firing" { &mut entry.0 } else { &mut entry.1 }.push(text("id"));
        }
        received
    }

    /// Returns the accepted alerts about locks.
    fn received_about_locks(&self) -> BTreeMap<(String, String), (Vec<String>, Vec<String>)> {
        self.received().into_iter().filter(|((_, name), _)| !name.is_empty()).collect()
    }
}

/// Waits until a condition holds.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(30), "never came: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn file(place: &Place, text: &str) -> String {
    let path = place.home.path().join("leasehold.yaml");
    std::fs::write(&path, text).expect("written");
    path.to_str().expect("text").to_owned()
}

/// Returns the firing alerts about locks of a server, by id.
fn shown(serving: &Serving) -> BTreeMap<String, Value> {
    let (_, page) = serving.get("/api/v1/alerts");
    let alerts = page["alerts"].as_array().expect("a list").iter();
    let fires = alerts.filter(|alert| alert["resolved_ms"].is_null() && !alert["name"].is_null());
    fires.map(|alert| (alert["id"].as_str().expect("an id").to_owned(), alert.clone())).collect()
}

fn leads(serving: &Serving) -> bool {
    serving.get("/api/v1/monitor").1["leader"] == true
}

fn end(mut child: Child) {
    let _ = kill_process(Pid::from_child(&child), Signal::TERM);
    child.wait().expect("it ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_leader_sends_alerts_and_the_next_leader_continues() {
    for place in Place::each().await {
        let hook = Hook::start("200 OK");
        let config = file(
            &place,
            &format!(
                "gpu_lock_monitor:\n  monitor_interval: 0.2\n  auto_recovery: false\n  \
                 timeout_levels: {{warning: 0.5, soft_timeout: 1, hard_timeout: 600}}\n\
                 alerts:\n  webhook: {{url: 'http://{}/', allow_private: true}}\n",
                hook.at
            ),
        );
        let mut servers =
            [Serving::start(&place, &["--config", &config]), Serving::start(&place, &["--config", &config])];
        let mut command = place.command(&["run", "gpu_lock:1", "--", "sleep", "600"]);
        let holder = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
        if let Some(redis) = &place.server {
            // A foreign holder, whose age only the leader knows.
            redis.command(&["SET", "gpu_lock:0", "somebody", "PX", "600000"]).await;
        }
        let expected = if place.server.is_some() { 4 } else { 2 };
        until("every alert once", || hook.received_about_locks().len() == expected);
        until("both servers show them", || servers.iter().all(|server| shown(server).len() == expected));
        let before = shown(&servers[0]);
        assert!(before.keys().eq(shown(&servers[1]).keys()), "the same alerts, whoever is asked");
        let fired = |received: &BTreeMap<_, (Vec<String>, Vec<String>)>| {
            let ids = received.values().flat_map(|(fired, over)| {
                assert!(over.is_empty(), "{received:?}");
                fired.clone()
            });
            let mut ids: Vec<String> = ids.collect();
            ids.sort();
            ids
        };
        assert!(fired(&hook.received_about_locks()).iter().eq(before.keys()), "each sent once: {:?}", hook.received());

        if leads(&servers[1]) {
            servers.swap(0, 1);
        }
        let [mut leader, other] = servers;
        assert!(leads(&leader) && !leads(&other), "one of them");
        leader.child.kill().and_then(|()| leader.child.wait()).expect("killed");
        // From here on the alerts must not change, not even for a moment.
        let mut passes = std::collections::BTreeSet::new();
        until("three passes of the other", || {
            let now = shown(&other);
            assert!(now.keys().eq(before.keys()), "{now:#?}");
            passes.extend(other.get("/api/v1/monitor").1["last_pass_ms"].as_u64());
            passes.len() >= 3
        });
        assert!(
            fired(&hook.received_about_locks()).iter().eq(before.keys()),
            "nothing is sent again: {:?}",
            hook.received()
        );
        for (id, alert) in shown(&other) {
            assert_eq!(alert["since_ms"], before[&id]["since_ms"], "since when is not forgotten");
        }

        end(holder);
        if let Some(redis) = &place.server {
            redis.command(&["DEL", "gpu_lock:0"]).await;
        }
        until("their end is sent", || hook.received_about_locks().values().all(|(_, over)| over.len() == 1));
        for (key, (fired, over)) in hook.received_about_locks() {
            assert_eq!((fired.len(), &fired), (1, &over), "{key:?}: the same id");
        }
        assert!(shown(&other).is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_sink_receives_a_store_outage_and_its_end() {
    let place = Place::redis().await;
    let redis = place.server.as_ref().expect("a server");
    let (hook, command_output) = (Hook::start("500 Oops"), place.home.path().join("output"));
    let config = file(
        &place,
        &format!(
            "alerts:\n  level: critical\n  webhook:\n    url: http://{}/hook\n    secret: {SECRET}\n    allow_private: true\n  \
             command:\n    shell: true\n    run: 'echo $LEASEHOLD_ALERT_TYPE $LEASEHOLD_ALERT_STATE >> {}'\n",
            hook.at,
            command_output.display()
        ),
    );
    let log = place.home.path().join("log");
    let mut command = place.command(&["serve", "--json", "--listen", "127.0.0.1:0", "--config", &config]);
    let serving = Serving::spawn(command.stderr(std::fs::File::create(&log).expect("a file")));
    until("it leads", || leads(&serving));
    redis.kill9();
    let key = ("store_down".to_owned(), String::new());
    // Without a store there is no leader, but the alert is sent.
    until("the store is down", || hook.received().contains_key(&key));
    redis.restart().await;
    until("the store is back", || hook.received()[&key].1.len() == 1);
    let (fired, over) = &hook.received()[&key];
    assert_eq!((fired.len(), fired), (1, over));
    let got = hook.got.lock().expect("whole").clone();
    assert!(got[0].0.starts_with("500") && got[0].1 == got[1].1, "tried again after a 500: {got:?}");
    for (head, _) in &got {
        let signature = head.lines().find_map(|line| line.strip_prefix("x-leasehold-signature: "));
        assert!(signature.is_some_and(|text| text.len() >= 64), "{head}");
    }
    until("the command is run", || {
        std::fs::read_to_string(&command_output)
            .is_ok_and(|received| received == "store_down firing\nstore_down resolved\n")
    });
    until("it leads again", || leads(&serving));
    drop(serving);
    let said = std::fs::read_to_string(&log).expect("written");
    let lines = |state: &str| {
        let is_so = |line: &&str| line.contains("alert=\"store_down\"") && line.contains(&format!("state=\"{state}\""));
        said.lines().filter(is_so).count()
    };
    assert_eq!((lines("firing"), lines("resolved")), (1, 1), "{said}");
    assert!(!said.contains(SECRET) && !said.contains("/hook"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn private_targets_need_permission_in_the_configuration() {
    let place = Place::redis().await;
    let redis = place.server.as_ref().expect("a server");
    let hook = Hook::start("200 OK");
    let config = file(&place, &format!("alerts:\n  level: critical\n  webhook: {{url: 'http://{}/'}}\n", hook.at));
    let log = place.home.path().join("log");
    let mut command = place.command(&["serve", "--json", "--listen", "127.0.0.1:0", "--config", &config]);
    let serving = Serving::spawn(command.stderr(std::fs::File::create(&log).expect("a file")));
    redis.kill9();
    let said = || std::fs::read_to_string(&log).expect("written");
    until("it is said", || said().contains("an alert was not delivered"));
    assert!(said().contains("allow_private"), "with what to do: {}", said());
    assert!(hook.got.lock().expect("whole").is_empty());
    drop(serving);
}

#[test]
fn each_invalid_alert_setting_prints_one_line() {
    let place = Place::sqlite();
    for (text, at, says) in [
        ("alerts: {level: loud}", "1:17", "alerts.level: "),
        ("alerts: {log: 7}", "1:15", "alerts.log: "),
        ("alerts: {window: soon}", "1:18", "alerts.window: "),
        ("alerts: {window: 0}", "1:18", "alerts.window: "),
        ("alerts:\n  webhook: {url: 'ftp://a.example'}", "2:18", "alerts.webhook.url: "),
        ("alerts:\n  webhook: {url: nonsense}", "2:18", "alerts.webhook.url: "),
        ("alerts:\n  webhook: {url: 'http://a.example', secret: short}", "2:46", "alerts.webhook.secret: "),
        ("alerts:\n  webhook: {secret: a-secret-for-nobody}", "2:21", "alerts.webhook.secret: "),
        ("alerts:\n  webhook: {url: 'http://a.example', retries: 99}", "2:47", "alerts.webhook.retries: "),
        ("alerts:\n  webhook: {url: 'http://a.example', timeout: 0}", "2:47", "alerts.webhook.timeout: "),
        (
            "alerts:\n  webhook: {url: 'http://a.example', allow_private: maybe}",
            "2:53",
            "alerts.webhook.allow_private: ",
        ),
        ("alerts:\n  webhook: {ulr: 'http://a.example'}", "2:13", "did you mean alerts.webhook.url?"),
        ("alerts:\n  command: {run: [a, b], shell: true}", "2:18", "alerts.command.run: "),
        ("alerts:\n  command: {run: []}", "2:18", "alerts.command.run: "),
        ("alerts:\n  sink: log", "2:3", "alerts.sink"),
    ] {
        let path = file(&place, text);
        let checked = place.run(&["config", "check", &path]);
        let line = format!("{path}:{at}: ");
        assert_eq!((checked.code, checked.out.lines().count()), (78, 1), "{text}: {checked:?}");
        assert!(checked.out.starts_with(&line) && checked.out.contains(says), "{text}: {checked:?}");
        let mut command = place.command(&["serve", "--listen", "127.0.0.1:0", "--config", &path]);
        command.stdin(Stdio::null());
        let served = ran(command);
        assert_eq!((served.code, served.out.as_str(), served.err.lines().count()), (78, "", 1), "{text}: {served:?}");
        assert!(served.err.contains(says), "{text}: {served:?}");
    }
}
