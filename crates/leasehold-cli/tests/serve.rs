//! `leasehold serve`: what it says, where it listens, and how it ends.

mod common;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::{Place, bare, ran};
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
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().expect("a pipe")).read_line(&mut line).expect("a line");
        let said: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
        let at = said["url"].as_str().and_then(|url| url.strip_prefix("http://")?.parse().ok());
        Self { child, at: at.unwrap_or_else(|| panic!("{said}")) }
    }

    fn get(&self, path: &str) -> (String, Value) {
        let mut stream = TcpStream::connect(self.at).expect("listening");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.at).expect("sent");
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
    let table: [(&[&str], i32, &str); 5] = [
        (&["serve", "--listen", &taken], 69, "is taken"),
        (&["serve", "--listen", "0.0.0.0:0"], 78, "no keys"),
        (&["serve", "--listen", "[::]:0"], 78, "no keys"),
        (&["serve", "--listen", "nonsense"], 64, "no address to listen on"),
        (&["serve", "--listen", "192.0.2.1:80"], 78, "no keys"),
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
