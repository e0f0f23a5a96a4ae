//! Many processes claim one request id, or do one piece of work, at the same time.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use leasehold_testkit::job::{ClaimJob, OnceJob};
use leasehold_testkit::{Arena, Kind, WorkerProcess, report};
use serde_json::Value;

const CLAIMER: &str = env!("CARGO_BIN_EXE_claimer");
const LONG: Duration = Duration::from_secs(120);
const PROCESSES: usize = 50;

fn spawn(arena: &Arena, id: &str, lease_ms: u64) -> WorkerProcess {
    let url = arena.url().expect("a store that processes can share");
    WorkerProcess::spawn(CLAIMER, &ClaimJob { url, id: id.into(), lease_ms, once: None })
}

async fn ready(worker: &mut WorkerProcess) {
    worker.wait_for_line(|line| line["ready"] == true, LONG).await.expect("ready");
}

async fn claims(worker: &mut WorkerProcess) -> Value {
    worker.send_line("go");
    worker.next_line(LONG).await.expect("an answer")
}

async fn fifty_processes_claim_one_id(kind: Kind) {
    let arena = Arena::new(kind).await;
    let commands = async || match kind {
        Kind::Redis => Some(arena.server().commandstats().await),
        _ => None,
    };
    let at_first = commands().await;
    let mut workers: Vec<_> = (0..PROCESSES).map(|_| spawn(&arena, "req-1", 60_000)).collect();
    for worker in &mut workers {
        ready(worker).await;
    }
    let before = commands().await;
    let began = Instant::now();
    workers.iter_mut().for_each(|worker| worker.send_line("go"));
    let mut answers = Vec::new();
    for worker in &mut workers {
        answers.push(worker.next_line(LONG).await.expect("an answer"));
    }
    let took = began.elapsed();
    assert_eq!(answers.iter().filter(|answer| answer["created"] == true).count(), 1, "{answers:?}");
    let values: BTreeSet<_> = answers.iter().map(|answer| answer["value"].as_str().expect("a value")).collect();
    let claims: BTreeSet<_> = answers.iter().map(|answer| answer["claim"].as_str().expect("a claim")).collect();
    assert_eq!((values.len(), claims.len()), (1, 1), "everybody has the same: {answers:?}");
    if let (Some(at_first), Some(before), Some(after)) = (at_first, before, commands().await) {
        let sets = after.get("set").unwrap_or(&0) - at_first.get("set").unwrap_or(&0);
        assert_eq!(sets, PROCESSES as u64, "one SET each, and none for the connection");
        let rose = |command: &str| after.get(command).unwrap_or(&0) - before.get(command).unwrap_or(&0);
        for other in ["get", "setnx", "eval", "evalsha", "exists", "pttl"] {
            assert_eq!(rose(other), 0, "{other}");
        }
    }
    report("claims", format!("{kind:?}: {PROCESSES} processes, 1 created, 49 read the same, in {took:.0?}"));
}

async fn the_next_one_comes_in_when_a_dead_creators_lease_is_over(kind: Kind) {
    let arena = Arena::new(kind).await;
    let lease = Duration::from_secs(2);
    let mut creator = spawn(&arena, "req-1", 2_000);
    ready(&mut creator).await;
    let asked = Instant::now();
    assert_eq!(claims(&mut creator).await["created"], true);
    creator.kill9();
    loop {
        let mut next = spawn(&arena, "req-1", 60_000);
        ready(&mut next).await;
        let at = asked.elapsed();
        let answer = claims(&mut next).await;
        if answer["created"] == true {
            // Stores count whole milliseconds.
            let ended = asked.elapsed() + Duration::from_millis(2);
            assert!(ended >= lease, "let in {at:?} after a lease of {lease:?} began");
            return;
        }
        assert_eq!(answer["value"], creator.pid().to_string());
        assert!(at < lease + Duration::from_secs(10), "not let in after {at:?}");
    }
}

fn spawn_once(arena: &Arena, lease_ms: u64, log: &Path, work_ms: u64) -> WorkerProcess {
    let url = arena.url().expect("a store that processes can share");
    let once = Some(OnceJob { log: log.to_owned(), work_ms });
    WorkerProcess::spawn(CLAIMER, &ClaimJob { url, id: "migrate-7".into(), lease_ms, once })
}

async fn done(worker: &mut WorkerProcess) -> Value {
    let done = |line: &Value| line["fresh"].is_boolean() || line["error"].is_string();
    worker.wait_for_line(done, LONG).await.expect("an end")
}

async fn fifty_processes_do_it_once(kind: Kind) {
    let (arena, dir) = (Arena::new(kind).await, tempfile::tempdir().expect("a directory"));
    let log = dir.path().join("log");
    let mut workers: Vec<_> = (0..PROCESSES).map(|_| spawn_once(&arena, 30_000, &log, 50)).collect();
    for worker in &mut workers {
        ready(worker).await;
    }
    workers.iter_mut().for_each(|worker| worker.send_line("go"));
    let mut answers = Vec::new();
    for worker in &mut workers {
        answers.push(done(worker).await);
    }
    let ran = std::fs::read_to_string(&log).expect("somebody worked");
    assert_eq!(ran.lines().count(), 1, "it ran more than once: {ran}");
    assert_eq!(answers.iter().filter(|answer| answer["fresh"] == true).count(), 1, "{answers:?}");
    let pid: u32 = ran.trim().parse().expect("a process id");
    assert!(answers.iter().all(|answer| answer["value"] == pid), "{answers:?}");
    report("once", format!("{kind:?}: {PROCESSES} processes, the work ran once, everybody has its result"));
}

async fn the_next_one_works_when_the_runner_is_killed(kind: Kind) {
    let (arena, dir) = (Arena::new(kind).await, tempfile::tempdir().expect("a directory"));
    let log = dir.path().join("log");
    let mut runner = spawn_once(&arena, 2_000, &log, 600_000);
    let mut waiters: Vec<_> = (0..3).map(|_| spawn_once(&arena, 2_000, &log, 10)).collect();
    ready(&mut runner).await;
    runner.send_line("go");
    runner.wait_for_line(|line| line["working"] == true, LONG).await.expect("at work");
    for waiter in &mut waiters {
        ready(waiter).await;
        waiter.send_line("go");
    }
    runner.kill9();
    let mut answers = Vec::new();
    for waiter in &mut waiters {
        answers.push(done(waiter).await);
    }
    assert_eq!(answers.iter().filter(|answer| answer["fresh"] == true).count(), 1, "{answers:?}");
    let ran = std::fs::read_to_string(&log).expect("somebody worked");
    let pids: Vec<u32> = ran.lines().map(|pid| pid.parse().expect("a process id")).collect();
    assert!(pids.len() == 2 && pids[0] == runner.pid(), "{pids:?}");
    assert!(answers.iter().all(|answer| answer["value"] == pids[1]), "{answers:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_processes_do_it_once_on_redis() {
    fifty_processes_do_it_once(Kind::Redis).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_processes_do_it_once_on_sqlite() {
    fifty_processes_do_it_once(Kind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_runner_is_followed_on_redis() {
    the_next_one_works_when_the_runner_is_killed(Kind::Redis).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_runner_is_followed_on_sqlite() {
    the_next_one_works_when_the_runner_is_killed(Kind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_processes_claim_one_id_on_redis() {
    fifty_processes_claim_one_id(Kind::Redis).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_processes_claim_one_id_on_sqlite() {
    fifty_processes_claim_one_id(Kind::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_creators_claim_ends_on_redis() {
    the_next_one_comes_in_when_a_dead_creators_lease_is_over(Kind::Redis).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_creators_claim_ends_on_sqlite() {
    the_next_one_comes_in_when_a_dead_creators_lease_is_over(Kind::Sqlite).await;
}
