//! The sinks: a signed webhook with retries that reaches no forbidden address, and a command.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_server::Settings;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::{alert, settings};
use crate::support::Place;

const SECRET: &str = "secret-canary-of-a-webhook";

/// A receiver with configured responses that keeps what it received.
struct Receiver {
    at: SocketAddr,
    got: Arc<Mutex<Vec<(String, String)>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Receiver {
    async fn start(answers: &'static [&'static str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let at = listener.local_addr().expect("bound");
        let got: Arc<Mutex<Vec<(String, String)>>> = Arc::default();
        let keep = got.clone();
        let task = tokio::spawn(async move {
            for n in 0.. {
                let (mut stream, _) = listener.accept().await.expect("accepted");
                let mut text = String::new();
                let mut block = [0; 4_096];
                let whole = |text: &str| {
                    let (head, body) = text.split_once("\r\n\r\n")?;
                    let length =
                        head.to_lowercase().lines().find_map(|l| l.strip_prefix("content-length: ")?.parse().ok());
                    (body.len() >= length.unwrap_or(0)).then(|| (head.to_lowercase(), body.to_owned()))
                };
                let request = loop {
                    if let Some(request) = whole(&text) {
                        break Some(request);
                    }
                    match stream.read(&mut block).await {
                        Ok(n) if n > 0 => text += &String::from_utf8_lossy(&block[..n]),
                        _ => break None,
                    }
                };
                keep.lock().expect("no panic").extend(request);
                let answer = answers.get(n).or(answers.last()).expect("an answer");
                let _ = stream.write_all(format!("HTTP/1.1 {answer}\r\nContent-Length: 0\r\n\r\n").as_bytes()).await;
            }
        });
        Self { at, got, task }
    }

    /// The received alerts about the journal; an in-memory store causes an alert, too.
    fn got(&self) -> Vec<(String, Value)> {
        let got = self.got.lock().expect("no panic");
        let read = got.iter().map(|(head, body)| (head.clone(), serde_json::from_str::<Value>(body).expect("JSON")));
        read.filter(|(_, body)| body["type"] == "journal_not_empty").collect()
    }

    async fn until(&self, count: usize) -> Vec<(String, Value)> {
        let waiting = async {
            while self.got().len() < count {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), waiting).await.unwrap_or_else(|_| panic!("{:?}", self.got()));
        self.got()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn hooked(at: SocketAddr, more: &str) -> Settings {
    settings(&format!(
        "alerts:\n  webhook:\n    url: http://{at}/hook/path-canary?key=query-canary\n    secret: {SECRET}\n    allow_private: true\n{more}"
    ))
}

fn header<'a>(head: &'a str, name: &str) -> &'a str {
    head.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
        .unwrap_or_else(|| panic!("{name}: {head}"))
}

/// HMAC-SHA256 written from its standard, independent of the server.
fn hmac(key: &[u8], text: &[u8]) -> String {
    let mut block = [0_u8; 64];
    block[..key.len()].copy_from_slice(key);
    let inner = Sha256::new().chain_update(block.map(|b| b ^ 0x36)).chain_update(text).finalize();
    let outer = Sha256::new().chain_update(block.map(|b| b ^ 0x5c)).chain_update(inner).finalize();
    outer.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Waits until the metrics contain a line.
pub(crate) async fn counted(place: &Place, line: &str) {
    let waiting = async {
        while !place.get("/metrics").await.body.contains(line) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    if tokio::time::timeout(Duration::from_secs(30), waiting).await.is_err() {
        let metrics = place.get("/metrics").await.body;
        let lines: Vec<&str> = metrics.lines().filter(|line| line.contains("_notifications_total")).collect();
        panic!("missing: {line} {lines:#?}");
    }
}

/// A journal with an entry, which causes an alert and can be removed again.
pub(crate) fn journal(dir: &std::path::Path) -> std::path::PathBuf {
    let journal = dir.join("journal");
    std::fs::create_dir(&journal).expect("made");
    let entry = json!({
        "id": "1-7f3a91c2b04d", "kind": "unprotected", "name": "gpu_lock:0", "store": "memory:", "namespace": "leasehold", "owner": "tts",
        "holder_id": "7f3a91c2b04d", "fence": null, "ttl_ms": 1, "at_ms": 1, "why": "a test", "token": null,
    });
    std::fs::write(journal.join("1-7f3a91c2b04d.json"), entry.to_string()).expect("written");
    journal
}

#[tokio::test(flavor = "multi_thread")]
async fn an_alert_is_sent_signed_retried_once_and_resolved() {
    let dir = tempfile::tempdir().expect("a directory");
    let receiver = Receiver::start(&["503 Service Unavailable", "204 No Content"]).await;
    let place = Place::memory_with_journal(journal(dir.path()), hooked(receiver.at, "")).await;
    let got = receiver.until(2).await;
    let id = alert(&place, "it", |a| a["type"] == "journal_not_empty").await["id"].clone();
    for (head, body) in &got {
        assert!(head.starts_with("post /hook/path-canary?key=query-canary http/1.1"), "{head}");
        assert_eq!(
            (&body["kind"], &body["state"], &body["type"]),
            (&json!("alert"), &json!("firing"), &json!("journal_not_empty"))
        );
        assert_eq!((header(head, "x-leasehold-delivery"), &body["id"]), (id.as_str().expect("text"), &id));
        let signed = header(head, "x-leasehold-signature").strip_prefix("v1=").expect("version 1");
        let text = receiver.got.lock().expect("no panic").iter().find(|(h, _)| h == head).expect("it").1.clone();
        let text = format!("{}.{text}", header(head, "x-leasehold-timestamp"));
        assert_eq!(signed, hmac(SECRET.as_bytes(), text.as_bytes()));
    }
    place.post("/api/v1/journal/1-7f3a91c2b04d/settle", &json!({ "reason": "test" })).await.ok();
    let got = receiver.until(3).await;
    assert_eq!((&got[2].1["state"], &got[2].1["id"]), (&json!("resolved"), &id));
    assert!(got[2].1["resolved_ms"].is_u64());
    counted(&place, "{sink=\"webhook\",outcome=\"failed\"} 1\n").await;
    place.end().await;
    assert_eq!(receiver.got().len(), 3, "each once");
}

#[tokio::test(flavor = "multi_thread")]
async fn redirects_are_not_followed_and_rejections_not_retried() {
    let dir = tempfile::tempdir().expect("a directory");
    let elsewhere = Receiver::start(&["204 No Content"]).await;
    let location = format!("302 Found\r\nLocation: http://{}/", elsewhere.at).leak();
    let receiver = Receiver::start(vec![&*location].leak()).await;
    let place = Place::memory_with_journal(journal(dir.path()), hooked(receiver.at, "")).await;
    receiver.until(1).await;
    counted(&place, "{sink=\"webhook\",outcome=\"failed\"} 1\n").await;
    place.end().await;
    assert_eq!((receiver.got().len(), elsewhere.got().len()), (1, 0));
}

/// Spellings of private addresses, which the server must not connect to. `PORT` is the port of a listener of the test.
const FORBIDDEN: [&str; 66] = [
    "http://127.0.0.1:PORT/",
    "http://127.0.0.1:PORT",
    "http://127.0.0.1.:PORT/",
    "http://127.1:PORT/",
    "http://127.0.1:PORT/",
    "http://127.1.2.3:PORT/",
    "http://127.255.255.254:PORT/",
    "http://2130706433:PORT/",
    "http://0x7f000001:PORT/",
    "http://0X7F000001:PORT/",
    "http://017700000001:PORT/",
    "http://0177.0.0.1:PORT/",
    "http://0177.1:PORT/",
    "http://0x7f.0.0.1:PORT/",
    "http://0x7f.1:PORT/",
    "http://127.0x0.0.1:PORT/",
    "http://127.0.0.0x1:PORT/",
    "http://00000177.0.0.01:PORT/",
    "http://0:PORT/",
    "http://0.0.0.0:PORT/",
    "http://0x0:PORT/",
    "http://00.0.0.0:PORT/",
    "http://localhost:PORT/",
    "http://LOCALHOST:PORT/",
    "http://LocalHost:PORT/",
    "http://localhost.:PORT/",
    "http://localhost:PORT/?x=@93.184.215.14",
    "http://localhost:PORT#@93.184.215.14/",
    "http://127.0.0.1:PORT?http://93.184.215.14/",
    "http://[::1]:PORT/",
    "http://[0:0:0:0:0:0:0:1]:PORT/",
    "http://[0000:0000:0000:0000:0000:0000:0000:0001]:PORT/",
    "http://[::0001]:PORT/",
    "http://[::]:PORT/",
    "http://[0:0:0:0:0:0:0:0]:PORT/",
    "http://[::ffff:127.0.0.1]:PORT/",
    "http://[::FFFF:127.0.0.1]:PORT/",
    "http://[::ffff:7f00:1]:PORT/",
    "http://[0:0:0:0:0:ffff:127.0.0.1]:PORT/",
    "http://[0:0:0:0:0:ffff:7f00:0001]:PORT/",
    "http://[::127.0.0.1]:PORT/",
    "http://[::7f00:1]:PORT/",
    "http://[::ffff:0:127.0.0.1]:PORT/",
    "http://[64:ff9b::127.0.0.1]:PORT/",
    "http://[64:ff9b::7f00:1]:PORT/",
    "http://[64:ff9b:1::127.0.0.1]:PORT/",
    "http://[2002:7f00:1::]:PORT/",
    "http://[::ffff:0.0.0.0]:PORT/",
    "http://[::ffff:10.0.0.1]:PORT/",
    "http://[::ffff:169.254.169.254]:PORT/",
    "http://[fe80::1]:PORT/",
    "http://[fd00:ec2::254]:PORT/",
    "http://[fc00::1]:PORT/",
    "http://[ff02::1]:PORT/",
    "http://[2001:db8::1]:PORT/",
    "http://10.0.0.1:PORT/",
    "http://10.255.255.255:PORT/",
    "http://167772161:PORT/",
    "http://172.16.0.1:PORT/",
    "http://192.168.1.1:PORT/",
    "http://169.254.169.254/latest/meta-data/",
    "http://2852039166/latest/meta-data/",
    "http://0xa9fea9fe/",
    "http://100.64.0.1:PORT/",
    "http://198.18.0.1:PORT/",
    "https://127.0.0.1:PORT/",
];

#[tokio::test(flavor = "multi_thread")]
async fn private_addresses_are_blocked_in_every_spelling() {
    // On all addresses of this machine, so that every attempt arrives.
    let listener = TcpListener::bind("[::]:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port().to_string();
    let knocked = Arc::new(Mutex::new(Vec::new()));
    let count = knocked.clone();
    let listening = tokio::spawn(async move {
        loop {
            let (mut stream, peer) = listener.accept().await.expect("accepted");
            count.lock().expect("no panic").push(peer);
            // Head and body come in one or two pieces; unread data would reset the connection.
            let mut text = Vec::new();
            while !text.ends_with(b"}") && stream.read_buf(&mut text).await.is_ok_and(|n| n > 0) {}
            let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").await;
        }
    });
    let try_to_send = async |url: &str| {
        let url = url.replace("PORT", &port);
        let dir = tempfile::tempdir().expect("a directory");
        let yaml = format!("alerts:\n  webhook:\n    url: \"{url}\"\n    timeout: 5s\n    retries: 0\n");
        let mut read = leasehold::config::Settings::new().yaml("test.yaml", &yaml);
        let alerts = leasehold_server::AlertSettings::read(&mut read);
        read.finish().unwrap_or_else(|error| panic!("{url}: {error}"));
        let mut settings = Settings::default();
        settings.alerts = alerts;
        let place = Place::memory_with_journal(journal(dir.path()), settings).await;
        alert(&place, "something to tell", |a| a["type"] == "journal_not_empty").await;
        let outcome = loop {
            let metrics = place.get("/metrics").await.body;
            let counted = |line: &&str| line.contains("_notifications_total{sink=\"webhook\"") && !line.ends_with(" 0");
            if let Some(line) = metrics.lines().find(counted) {
                break line.to_owned();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        assert!(outcome.contains("outcome=\"failed\"") || outcome.contains("outcome=\"given_up\""), "{url}: {outcome}");
        place.end().await;
    };
    // On the heap: this many servers do not fit on a stack.
    let tried = FORBIDDEN.iter().map(|url| Box::pin(try_to_send(url)));
    let tried = futures_util::future::join_all(tried).await.len();
    assert_eq!(*knocked.lock().expect("no panic"), [], "a private address was reached");
    println!("{tried} of {} webhook targets blocked when an alert was sent", FORBIDDEN.len());

    // The listener is reachable: the same path with permission arrives.
    for url in [
        "http://127.0.0.1:PORT/",
        "http://2130706433:PORT/",
        "http://localhost:PORT/",
        "http://[::ffff:127.0.0.1]:PORT/",
    ] {
        let before = knocked.lock().expect("no panic").len();
        let yaml =
            format!("alerts:\n  webhook:\n    url: \"{}\"\n    allow_private: true\n", url.replace("PORT", &port));
        let dir = tempfile::tempdir().expect("a directory");
        let place = Place::memory_with_journal(journal(dir.path()), settings(&yaml)).await;
        counted(&place, "{sink=\"webhook\",outcome=\"sent\"} 1\n").await;
        assert_eq!(knocked.lock().expect("no panic").len(), before + 1, "{url}");
        place.end().await;
    }
    listening.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_alert_command_receives_the_alert_but_no_secrets() {
    let dir = tempfile::tempdir().expect("a directory");
    let out = dir.path().join("out");
    let script = dir.path().join("page");
    let text =
        format!("#!/bin/sh\n{{ cat; env | grep '^LEASEHOLD_' | sort; echo \"arg:$1\"; }} >> {}\n", out.display());
    std::fs::write(&script, text).expect("written");
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("changed");
    let yaml = format!("alerts:\n  command:\n    run: [\"{}\", \"$HOME; ls\"]\n", script.display());
    let place = Place::memory_with_journal(journal(dir.path()), settings(&yaml)).await;
    let read = || std::fs::read_to_string(&out).unwrap_or_default();
    while !read().contains("arg:") {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    place.end().await;
    let said = read();
    let notice: Value = serde_json::from_str(said.lines().next().expect("a line")).expect("JSON on standard input");
    assert_eq!((&notice["state"], &notice["type"]), (&json!("firing"), &json!("journal_not_empty")));
    assert!(
        said.contains("LEASEHOLD_ALERT_TYPE=journal_not_empty\n") && said.contains("LEASEHOLD_ALERT_STATE=firing\n"),
        "{said}"
    );
    assert!(said.contains("LEASEHOLD_ALERT_LEVEL=warning\n") && said.contains("LEASEHOLD_ALERT_VALUE=1\n"), "{said}");
    assert!(said.contains("arg:$HOME; ls\n"), "no shell reads it: {said}");
    let others: Vec<&str> =
        said.lines().filter(|l| l.starts_with("LEASEHOLD_") && !l.starts_with("LEASEHOLD_ALERT_")).collect();
    assert_eq!(others, Vec::<&str>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hung_alert_command_is_killed_with_its_children() {
    let dir = tempfile::tempdir().expect("a directory");
    let pids = dir.path().join("pids");
    let line = format!("sleep 1000 & echo $! > {0}.new; mv {0}.new {0}; wait", pids.display());
    let yaml = format!("alerts:\n  command:\n    run: \"{line}\"\n    shell: true\n    timeout: 1s\n");
    let place = Place::memory_with_journal(journal(dir.path()), settings(&yaml)).await;
    counted(&place, "{sink=\"command\",outcome=\"failed\"} 1\n").await;
    let pid = std::fs::read_to_string(&pids).expect("written");
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
    assert!(stat.as_ref().map_or(true, |stat| stat.contains(") Z ")), "it is gone: {stat:?}");
    place.end().await;
}
