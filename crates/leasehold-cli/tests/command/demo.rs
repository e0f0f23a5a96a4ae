//! `leasehold demo`: it reports the failures, and cleans up however it ends.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};

use leasehold_testkit::http;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::bare;

/// A demo with a temporary directory of its own, killed when dropped.
struct Demo {
    child: Child,
    url: String,
    temp: TempDir,
}

impl Demo {
    fn start(lasts: &str) -> Self {
        let temp = tempfile::tempdir().expect("a directory");
        let mut command = bare(&["demo", "--json", "--for", lasts, "--listen", "127.0.0.1:0"]);
        command.env("TMPDIR", temp.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().expect("a pipe")).read_line(&mut line).expect("a line");
        let said: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"));
        Self { child, url: said["url"].as_str().expect("a URL").to_owned(), temp }
    }

    /// Returns the number of locks that are held.
    async fn held(&self) -> usize {
        let at = self.url.strip_prefix("http://").and_then(|at| at.parse().ok()).expect("an address");
        let answer = http::ask(at, "GET /api/v1/locks", &format!("Host: {at}\r\n"), "").await;
        answer.ok()["locks"].as_array().map_or(0, Vec::len)
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the number of processes with this directory in their command line.
fn workers_of(dir: &Path) -> usize {
    let processes = fs::read_dir("/proc").expect("processes").filter_map(Result::ok);
    let lines = processes.filter_map(|process| fs::read(process.path().join("cmdline")).ok());
    let dir = dir.to_str().expect("text").to_owned();
    lines.filter(|line| String::from_utf8_lossy(line).contains(&dir)).count()
}

#[tokio::test]
async fn the_demo_reports_a_crash_and_ctrl_c_cleans_up() {
    let mut demo = Demo::start("5m");
    while demo.held().await < 4 {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert_eq!(workers_of(demo.temp.path()), 12);
    let mut messages = Vec::new();
    for line in BufReader::new(demo.child.stderr.take().expect("a pipe")).lines() {
        messages.push(line.expect("text"));
        if messages.last().is_some_and(|line| line.contains("holds gpu_lock:0 now")) {
            break;
        }
    }
    assert!(messages.iter().any(|line| line.contains("crashes while it holds gpu_lock:0")), "{messages:?}");
    kill_process(Pid::from_child(&demo.child), Signal::INT).expect("it lives");
    assert!(demo.child.wait().expect("it ends").success());
    assert_eq!(workers_of(demo.temp.path()), 0);
    assert_eq!(fs::read_dir(demo.temp.path()).expect("its directory").count(), 0, "files are left");
}

#[tokio::test]
async fn the_demo_ends_on_time_and_its_workers_end_when_it_is_killed() {
    let mut demo = Demo::start("1s");
    assert!(demo.child.wait().expect("it ends").success());
    assert_eq!(fs::read_dir(demo.temp.path()).expect("its directory").count(), 0, "files are left");

    let mut killed = Demo::start("5m");
    while workers_of(killed.temp.path()) < 12 {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    killed.child.kill().expect("it lives");
    killed.child.wait().expect("it ends");
    let gone = async {
        while workers_of(killed.temp.path()) > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(10), gone).await.expect("nobody works on");
}
