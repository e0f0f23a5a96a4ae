//! A server under load, and a restart of its Redis under load.
//!
//! Requests are sent when they are due, even if earlier ones have no response yet, and latency counts from the due time:
//! a server that stalls for a second cannot hide it (coordinated omission).

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold_testkit::{RedisServer, full_or, report};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::common::Place;
use crate::serve::{Serving, memory_kb};

/// The load, and its duration.
#[derive(Clone, Copy)]
struct Load {
    streams: usize,
    a_second: u32,
    lasts: Duration,
    holders: usize,
    /// When Redis is stopped, and for how long.
    away: Option<(Duration, Duration)>,
}

/// The requests, in rotation. A request that needs a lease is replaced by an acquire if there is none.
const MIX: [Route; 20] = [
    Route::List,
    Route::Acquire,
    Route::Get,
    Route::Renew,
    Route::Overview,
    Route::Get,
    Route::Acquire,
    Route::Release,
    Route::Metrics,
    Route::Renew,
    Route::List,
    Route::Get,
    Route::Acquire,
    Route::Evict,
    Route::Health,
    Route::Renew,
    Route::Overview,
    Route::Get,
    Route::Release,
    Route::List,
];
/// The server closes an idle connection after 15 s; the clients close theirs before.
const REUSED_WITHIN: Duration = Duration::from_secs(10);
/// The number of leases at the start, so that each is held for seconds.
const LEASES: usize = 200;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Route {
    List,
    Get,
    Acquire,
    Renew,
    Release,
    Evict,
    Health,
    Overview,
    Metrics,
}

/// A lease of the load generator.
struct Lease {
    name: String,
    token: String,
    holder_id: String,
}

/// A request and its result.
struct Done {
    route: Route,
    due: Instant,
    done: Instant,
    /// The status and the error code, or how the connection failed.
    outcome: Result<(u16, String), String>,
}

/// The clients.
struct Clients {
    at: SocketAddr,
    idle: Mutex<Vec<(Instant, TcpStream)>>,
    leases: Mutex<VecDeque<Lease>>,
    names: AtomicU64,
}

impl Clients {
    async fn exchange(&self, method: &str, path: &str, body: &str) -> Result<(u16, Vec<u8>), String> {
        let idle = self.idle.lock().expect("whole").pop();
        let mut stream = match idle.filter(|(since, _)| since.elapsed() < REUSED_WITHIN) {
            Some((_, stream)) => stream,
            None => TcpStream::connect(self.at).await.map_err(|error| format!("connect: {error}"))?,
        };
        let head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n", self.at);
        let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
        stream.write_all(request.as_bytes()).await.map_err(|error| format!("send: {error}"))?;
        let mut read = Vec::with_capacity(4_096);
        loop {
            if stream.read_buf(&mut read).await.map_err(|error| format!("receive: {error}"))? == 0 {
                return Err("receive: closed".into());
            }
            let Some(head) = read.windows(4).position(|four| four == b"\r\n\r\n") else { continue };
            let text = String::from_utf8_lossy(&read[..head]).to_lowercase();
            let length = text.split("content-length: ").nth(1).and_then(|rest| rest.lines().next()?.parse().ok());
            let length: usize = length.ok_or_else(|| format!("no length: {text}"))?;
            if read.len() < head + 4 + length {
                continue;
            }
            let status = text.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or("no status")?;
            self.idle.lock().expect("whole").push((Instant::now(), stream));
            return Ok((status, read.split_off(head + 4)));
        }
    }

    async fn ask(&self, route: Route) -> Result<(u16, String), String> {
        let lease = match route {
            Route::Renew | Route::Release | Route::Evict => self.leases.lock().expect("whole").pop_front(),
            _ => None,
        };
        let (route, path, body) = match (route, &lease) {
            (Route::List, _) => (route, "/api/v1/locks?prefix=load&limit=100".into(), Value::Null),
            (Route::Get, _) => (route, "/api/v1/locks/held%3A0".to_owned(), Value::Null),
            (Route::Health, _) => (route, "/api/v1/monitoring/gpu-lock/health".into(), Value::Null),
            (Route::Overview, _) => (route, "/api/v1/overview".into(), Value::Null),
            (Route::Metrics, _) => (route, "/metrics".into(), Value::Null),
            (Route::Renew, Some(lease)) => (route, lease.path("renew"), json!({ "token": lease.token })),
            (Route::Release, Some(lease)) => (route, lease.path("release"), json!({ "token": lease.token })),
            (Route::Evict, Some(lease)) => {
                (route, lease.path("evict"), json!({ "holder_id": lease.holder_id, "mode": "force", "reason": "load" }))
            }
            (Route::Acquire, _) | (_, None) => {
                let name = self.names.fetch_add(1, Ordering::Relaxed);
                let path = format!("/api/v1/locks/load%3A{name}/acquire");
                (Route::Acquire, path, json!({ "ttl_ms": 600_000, "owner": "load" }))
            }
        };
        let (method, body) = if body.is_null() { ("GET", String::new()) } else { ("POST", body.to_string()) };
        let answered = self.exchange(method, &path, &body).await;
        let (status, said) = match answered {
            Ok((status, bytes)) => (status, serde_json::from_slice(&bytes).unwrap_or(Value::Null)),
            Err(error) => {
                // The result is unknown, except for requests that take nothing away.
                self.leases.lock().expect("whole").extend(lease.filter(|_| route == Route::Renew));
                return Err(error);
            }
        };
        let text = |field: &str| said[field].as_str().unwrap_or_default().to_owned();
        let taken = (route == Route::Acquire && status == 200).then(|| Lease {
            name: text("name"),
            token: text("token"),
            holder_id: text("holder_id"),
        });
        let kept = lease.filter(|_| route == Route::Renew);
        self.leases.lock().expect("whole").extend(taken.into_iter().chain(kept));
        // The health endpoint answers with its report even if the status is an error.
        Ok((status, text(if status == 200 || route != Route::Health { "code" } else { "status" })))
    }
}

impl Lease {
    fn path(&self, verb: &str) -> String {
        format!("/api/v1/locks/{}/{verb}", self.name.replace(':', "%3A"))
    }
}

/// The event streams: how many events each has read, and whether it is open.
struct Streams {
    read: Arc<Vec<AtomicU64>>,
    ended: Arc<AtomicU64>,
    /// Stops the readers.
    _tasks: JoinSet<()>,
}

impl Streams {
    async fn open(at: SocketAddr, count: usize) -> Self {
        let read: Arc<Vec<AtomicU64>> = Arc::new((0..count).map(|_| AtomicU64::new(0)).collect());
        let (ended, mut tasks) = (Arc::new(AtomicU64::new(0)), JoinSet::new());
        for n in 0..count {
            let mut stream = TcpStream::connect(at).await.expect("listening");
            let request = format!("GET /api/v1/events HTTP/1.1\r\nHost: {at}\r\n\r\n");
            stream.write_all(request.as_bytes()).await.expect("sent");
            let mut buffer = vec![0; 16 * 1024];
            let first = stream.read(&mut buffer).await.expect("an answer");
            assert!(buffer[..first].starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&buffer[..first]));
            let (read, ended) = (read.clone(), ended.clone());
            tasks.spawn(async move {
                let mut last = b'\n';
                while let Ok(length @ 1..) = stream.read(&mut buffer).await {
                    // Each event has one id line.
                    let mut ids = 0;
                    let mut line_begins = last == b'\n';
                    for (at, byte) in buffer[..length].iter().enumerate() {
                        ids += u64::from(line_begins && buffer[at..length].starts_with(b"id:"));
                        line_begins = *byte == b'\n';
                    }
                    last = buffer[length - 1];
                    read[n].fetch_add(ids, Ordering::Relaxed);
                }
                ended.fetch_add(1, Ordering::Relaxed);
            });
        }
        Self { read, ended, _tasks: tasks }
    }

    /// Waits until the last event has reached all of them.
    async fn settle(&self) {
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(10) {
            let before = self.range();
            tokio::time::sleep(Duration::from_secs(1)).await;
            if self.range() == before && before.0 == before.1 && before.0 > 0 {
                break;
            }
        }
    }

    /// Returns the fewest and the most events that a stream has read.
    fn range(&self) -> (u64, u64) {
        let all = || self.read.iter().map(|read| read.load(Ordering::Relaxed));
        (all().min().unwrap_or(0), all().max().unwrap_or(0))
    }
}

/// The result of a run.
struct Run {
    done: Vec<Done>,
    /// The fewest and the most events that a stream has read, and the number of streams that ended.
    read: (u64, u64),
    ended: u64,
    /// The number of events read when Redis answered again.
    read_before: u64,
    /// When Redis was stopped, and when it answered again.
    away: Option<(Instant, Instant)>,
    memory_mb: (u64, u64),
    /// The number of holders that kept their lease, and of all holders.
    holders: (usize, usize),
}

async fn run(load: Load) -> Run {
    let home = tempfile::tempdir().expect("a directory");
    let redis = RedisServer::with(&["--appendonly", "yes"]).await;
    let place = Place { store: redis.url(), home, server: Some(redis) };
    let mut command = place.command(&["serve", "--json", "--listen", "127.0.0.1:0"]);
    let log = place.home.path().join("log");
    let serving = Serving::spawn(command.stderr(std::fs::File::create(&log).expect("a file")));
    let mut held: Vec<Child> = (0..load.holders).map(|n| hold(&place, n)).collect();
    let before = holder_ids(&serving, load.holders).await;

    let clients = Arc::new(Clients {
        at: serving.at,
        idle: Mutex::default(),
        leases: Mutex::default(),
        names: AtomicU64::new(0),
    });
    // Their events come before the streams are open; otherwise only some streams would read them.
    let first = Streams::open(serving.at, 1).await;
    for _ in 0..LEASES {
        assert_eq!(clients.ask(Route::Acquire).await, Ok((200, String::new())));
    }
    first.settle().await;
    let streams = Streams::open(serving.at, load.streams).await;
    let restarting = async {
        let (after, away) = load.away?;
        tokio::time::sleep(after).await;
        let redis = place.server.as_ref().expect("a server");
        let ended = Instant::now();
        redis.stop().await;
        tokio::time::sleep(away).await;
        redis.relaunch();
        redis.ready().await;
        Some((ended, Instant::now(), streams.range().1))
    };
    let (done, away) = tokio::join!(ask(clients.clone(), load), restarting);

    streams.settle().await;
    let (read, ended) = (streams.range(), streams.ended.load(Ordering::Relaxed));
    let after = holder_ids(&serving, load.holders).await;
    let alive = held.iter_mut().map(|child| child.try_wait().expect("asked").is_none());
    let kept =
        before.iter().zip(&after).zip(alive).filter(|((before, after), alive)| before == after && *alive).count();
    let pid = serving.child.id();
    let memory_mb = (memory_kb(pid, "VmRSS") / 1_024, memory_kb(pid, "VmHWM") / 1_024);
    for child in &mut held {
        let _ = kill_process(Pid::from_child(child), Signal::TERM);
    }
    for child in &mut held {
        child.wait().expect("it ends");
    }
    drop(serving);
    let said = std::fs::read_to_string(&log).expect("written");
    assert!(!said.contains("panicked"), "{said}");
    let read_before = away.map_or(0, |(.., read)| read);
    let away = away.map(|(ended, ready, _)| (ended, ready));
    Run { done, read, ended, read_before, away, memory_mb, holders: (kept, load.holders) }
}

/// Starts a process that holds a lock with a short ttl.
fn hold(place: &Place, n: usize) -> Child {
    let mut command = place.command(&["run", &format!("held:{n}"), "--ttl", "10s", "--", "sleep", "600"]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts")
}

/// Waits until all locks are held. Returns the holder ids.
async fn holder_ids(serving: &Serving, count: usize) -> Vec<String> {
    let began = Instant::now();
    let mut ids = Vec::new();
    while ids.len() < count {
        let (_, lock) = serving.get(&format!("/api/v1/locks/held:{}", ids.len()));
        match lock["holder_id"].as_str() {
            Some(id) => ids.push(id.to_owned()),
            None => assert!(began.elapsed() < Duration::from_secs(20), "{lock}"),
        }
    }
    ids
}

/// Sends each request when it is due.
async fn ask(clients: Arc<Clients>, load: Load) -> Vec<Done> {
    let began = Instant::now();
    let mut asking = JoinSet::new();
    let count = load.a_second * u32::try_from(load.lasts.as_secs()).expect("minutes");
    for n in 0..count {
        let due = began + Duration::from_secs(1) * n / load.a_second;
        tokio::time::sleep_until(due.into()).await;
        let (clients, route) = (clients.clone(), MIX[n as usize % MIX.len()]);
        asking.spawn(async move {
            let outcome = clients.ask(route).await;
            Done { route, due, done: Instant::now(), outcome }
        });
    }
    asking.join_all().await
}

/// Returns the median and the 99th percentile.
fn percentiles(done: &[&Done]) -> String {
    let mut took: Vec<Duration> = done.iter().map(|done| done.done - done.due).collect();
    took.sort();
    let at = |part: usize| took.get(took.len() * part / 100).or(took.last()).copied().unwrap_or_default();
    format!("p50 {:.1?} p99 {:.1?} max {:.1?}", at(50), at(99), took.last().copied().unwrap_or_default())
}

/// Counts the results other than 200.
fn failures(done: &[Done]) -> BTreeMap<String, usize> {
    let mut failures = BTreeMap::new();
    for done in done {
        match &done.outcome {
            Ok((200, _)) => {}
            Ok((status, code)) => *failures.entry(format!("{status} {code}")).or_default() += 1,
            Err(error) => *failures.entry(error.clone()).or_default() += 1,
        }
    }
    failures
}

#[tokio::test(flavor = "multi_thread")]
async fn l01_mixed_requests_next_to_many_event_streams() {
    let small = Load { streams: 50, a_second: 100, lasts: Duration::from_secs(2), holders: 2, away: None };
    let full = Load { streams: 500, a_second: 200, lasts: Duration::from_secs(60), holders: 10, away: None };
    let load = full_or(small, full);
    let run = run(load).await;
    let failed = failures(&run.done);
    let mut by_route: BTreeMap<Route, Vec<&Done>> = BTreeMap::new();
    for done in &run.done {
        by_route.entry(done.route).or_default().push(done);
    }
    for (route, done) in &by_route {
        println!("  {:<9} {:>5}  {}", format!("{route:?}").to_lowercase(), done.len(), percentiles(done));
    }
    let ((least, most), ended) = (run.read, run.ended);
    report(
        "L01",
        format!(
            "{} requests at {} a second next to {} event streams: {} errors, {}; each stream read {least} to {most} \
             events, {ended} ended; memory of the server {} MB, at most {} MB",
            run.done.len(),
            load.a_second,
            load.streams,
            failed.values().sum::<usize>(),
            percentiles(&run.done.iter().collect::<Vec<_>>()),
            run.memory_mb.0,
            run.memory_mb.1,
        ),
    );
    assert!(failed.is_empty(), "{failed:?}");
    assert_eq!((run.holders.0, ended), (run.holders.1, 0));
    assert!(least == most && least > 0, "every stream reads every event: {least} to {most}");
}

#[tokio::test(flavor = "multi_thread")]
async fn l02_redis_restarts_under_load() {
    let away = |after, away| Some((Duration::from_millis(after), Duration::from_millis(away)));
    let small = Load { streams: 50, a_second: 100, lasts: Duration::from_secs(4), holders: 2, away: away(1_000, 500) };
    let full =
        Load { streams: 500, a_second: 200, lasts: Duration::from_secs(60), holders: 10, away: away(30_000, 2_000) };
    let load = full_or(small, full);
    let run = run(load).await;
    let (ended, ready) = run.away.expect("restarted");
    let failed = failures(&run.done);
    let is_good = |done: &&Done| matches!(done.outcome, Ok((200, _)));
    // The routes that query the store for each request.
    let asks_store = |done: &&Done| !matches!(done.route, Route::Overview | Route::Metrics | Route::Health);
    let first_good = run.done.iter().filter(asks_store).filter(is_good).filter(|done| done.due >= ready);
    let first_good = first_good.map(|done| done.done - ready).min().expect("it goes on");
    let last_bad = run.done.iter().filter(|done| !is_good(done)).map(|done| done.due).max();
    let last_bad = last_bad.map_or(Duration::ZERO, |last| last.saturating_duration_since(ready));
    let after = run.done.iter().filter(|done| done.due > ready + Duration::from_secs(3));
    let (least, most) = run.read;
    let read_after = least.saturating_sub(run.read_before);
    report(
        "L02",
        format!(
            "Redis away for {:.1?} in the middle of {} requests at {} a second: {failed:?}; the first success {:.1?} after \
             it answered again, the last failure sent {:.1?} after; from 3 s after on {}; {} of {} holders (ttl 10 s) \
             kept their leases; {} of {} event streams went on and read {read_after} events more; memory of the server at most {} MB",
            ready - ended,
            run.done.len(),
            load.a_second,
            first_good,
            last_bad,
            percentiles(&after.collect::<Vec<_>>()),
            run.holders.0,
            run.holders.1,
            load.streams as u64 - run.ended,
            load.streams,
            run.memory_mb.1,
        ),
    );
    let is_right = |failure: &String| ["503 store_unreachable", "503 unhealthy"].contains(&failure.as_str());
    assert!(failed.keys().all(is_right), "{failed:?}");
    assert!(last_bad < Duration::from_secs(3), "it recovers by itself: {last_bad:?}");
    assert_eq!((run.holders.0, run.ended), (run.holders.1, 0));
    assert!(least == most && read_after > 0, "every stream goes on: {least} to {most}");
}
