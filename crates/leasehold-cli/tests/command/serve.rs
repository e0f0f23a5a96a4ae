//! `leasehold serve`: what it says, where it listens, and how it ends.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::{Place, bare, ran};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A server of one's own; killed when dropped.
struct Serving {
    child: Child,
    at: SocketAddr,
}

impl Serving {
    fn start(place: &Place, args: &[&str]) -> Self {
        let mut command = place.command(&[&["serve", "--json", "--listen", "127.0.0.1:0"], args].concat());
        Self::spawn(command.stderr(Stdio::piped()))
    }

    fn spawn(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().expect("a pipe")).read_line(&mut line).expect("a line");
        let said: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
        let at = said["url"].as_str().and_then(|url| url.strip_prefix("http://")?.parse().ok());
        Self { child, at: at.unwrap_or_else(|| panic!("{said}")) }
    }

    fn get(&self, path: &str) -> (String, Value) {
        self.ask("GET", path, "")
    }

    fn post(&self, path: &str, body: &str) -> (String, Value) {
        self.ask("POST", path, body)
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (String, Value) {
        let mut stream = TcpStream::connect(self.at).expect("listening");
        let head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", self.at);
        let kind = format!("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        stream.write_all((head + &kind).as_bytes()).expect("sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        (head.to_owned(), serde_json::from_str(body).unwrap_or_else(|error| panic!("{text}: {error}")))
    }

    fn end(mut self, signal: Signal) -> (Option<i32>, String) {
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
async fn what_others_take_is_served_and_signals_end_it() {
    for (place, signal) in Place::each().await.into_iter().zip([Signal::TERM, Signal::INT]) {
        let serving = Serving::start(&place, &[]);
        place.ok(&["acquire", "deploy", "--ttl", "1m"]);
        let (head, list) = serving.get("/api/v1/locks");
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        let mut served = list["locks"].clone();
        let mut listed = place.json(&["ls"]);
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
fn it_says_where_and_why_not() {
    let place = Place::sqlite();
    let other = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = other.local_addr().expect("bound").to_string();
    let table: [(&[&str], i32, &str); 7] = [
        (&["serve", "--listen", &taken], 69, "is taken"),
        (&["serve", "--listen", "0.0.0.0:0"], 78, "no keys"),
        (&["serve", "--listen", "[::]:0"], 78, "no keys"),
        (&["serve", "--listen", "nonsense"], 64, "no address to listen on"),
        (&["serve", "--listen", "192.0.2.1:80"], 78, "no keys"),
        (
            &["serve", "--tls-cert", "/nowhere/cert.pem", "--tls-key", "/nowhere/key.pem"],
            78,
            "/nowhere/cert.pem cannot be read",
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
fn keys_are_made_listed_and_revoked_and_open_the_door() {
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
    assert_eq!((ran.code, ran.err.contains("is no key file"), ran.err.lines().count()), (78, true, 1), "{ran:?}");
}

#[test]
fn no_log_shows_a_key_or_a_token() {
    let place = Place::sqlite();
    let key = place.ok(&["keys", "create", "ops", "--role", "operator"]).trim().to_owned();
    let mut command = place.command(&["serve", "--json", "--listen", "127.0.0.1:0"]);
    // Into a file: a pipe that nobody reads would stop it.
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
