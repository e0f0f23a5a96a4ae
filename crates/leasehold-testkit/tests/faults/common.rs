//! Helpers of the rows of the fault board.
#![allow(dead_code, reason = "each row's file uses a part of it")]

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold::{Guard, LockManager, Options};
use leasehold_testkit::history::{Event, EventKind, now_ns};
use leasehold_testkit::job::Job;
use leasehold_testkit::{History, HistoryWriter, RedisServer, WorkerProcess};
use redis::Value;
use tempfile::TempDir;

pub(crate) const WORKER: &str = env!("CARGO_BIN_EXE_worker");
/// The default lease of the rows.
pub(crate) const TTL: Duration = Duration::from_secs(2);
/// A limit that is reached only if a test fails.
pub(crate) const LONG: Duration = Duration::from_secs(60);
/// K4: the time by which a call may exceed its deadline.
pub(crate) const OVERRUN: Duration = Duration::from_millis(250);
/// K5: the time after which nothing is left once all clients have stopped.
pub(crate) const GONE_WITHIN: Duration = Duration::from_secs(2);

pub(crate) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Default options without a journal: what a row leaves behind must be released without it.
pub(crate) fn options() -> Options {
    let mut options = Options::default();
    options.journal = None;
    options
}

pub(crate) async fn connect(url: &str) -> LockManager {
    LockManager::connect_with(url, options()).await.expect("a manager")
}

/// Waits until the queue has `wanted` waiters.
pub(crate) async fn wait_for_waiters(looker: &LockManager, name: &str, count: usize) {
    let there = async {
        while looker.info(name).await.expect("answered").waiters.len() < count {
            tokio::time::sleep(ms(2)).await;
        }
    };
    tokio::time::timeout(LONG, there).await.expect("they stand in line");
}

/// Starts a worker that holds the lock.
pub(crate) async fn holding_worker(job: &Job) -> WorkerProcess {
    let mut job = job.clone();
    job.hold = true;
    let mut worker = WorkerProcess::spawn(WORKER, &job);
    worker.wait_for_line(|line| line["granted"].is_u64(), LONG).await.expect("granted");
    worker
}

/// Waits until every thread of a process has stopped, because a signal takes a moment.
pub(crate) async fn wait_until_stopped(pid: u32) {
    let stands_still = || {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
        let stat = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // `pid (name) state …`
        threads.flatten().map(stat).all(|stat| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T')))
    };
    while !stands_still() {
        tokio::time::sleep(ms(1)).await;
    }
}

/// Returns the lock keys, queues and marks in a Redis.
pub(crate) async fn keys_left(server: &RedisServer) -> Vec<String> {
    let all: Vec<String> = match server.command(&["KEYS", "*"]).await {
        Value::Array(keys) => keys.iter().map(|key| redis::from_redis_value_ref(key).expect("a key")).collect(),
        other => panic!("KEYS answered {other:?}"),
    };
    let apart = ["lh1:fence", "lh1:stats:", "lh1:index:", "lh1:events:"];
    all.into_iter().filter(|key| !apart.iter().any(|known| key.starts_with(known))).collect()
}

/// K5: waits for at most two seconds until no key is left.
pub(crate) async fn assert_no_keys_left(server: &RedisServer) -> Duration {
    let began = Instant::now();
    loop {
        let left = keys_left(server).await;
        if left.is_empty() {
            return began.elapsed();
        }
        assert!(began.elapsed() < GONE_WITHIN, "{} keys left, such as {:?}", left.len(), &left[..left.len().min(5)]);
        tokio::time::sleep(ms(5)).await;
    }
}

/// K5 through a manager, for any store: waits until no lock is left.
pub(crate) async fn assert_no_locks_left(looker: &LockManager) -> Duration {
    let began = Instant::now();
    loop {
        let left = looker.list("", None, 10).await.expect("answered").locks;
        if left.is_empty() {
            return began.elapsed();
        }
        assert!(began.elapsed() < GONE_WITHIN, "locks left: {left:?}");
        tokio::time::sleep(ms(5)).await;
    }
}

/// The history of a row: of this process and its workers.
pub(crate) struct Chronicle {
    dir: TempDir,
    writer: HistoryWriter,
    killed: Mutex<Vec<(u32, u64)>>,
}

impl Chronicle {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let writer = HistoryWriter::open(dir.path()).expect("a history");
        Self { dir, writer, killed: Mutex::default() }
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn job(&self, url: &str, name: &str) -> Job {
        Job::new(url, name, self.dir().to_owned())
    }

    pub(crate) fn asked(&self, task: u64, name: &str) {
        self.writer.record(&Event::now(task, name, EventKind::Asked));
    }

    pub(crate) fn granted(&self, task: u64, guard: &Guard) {
        let event = Event::now(task, guard.name().as_str(), EventKind::Granted).valid_until_ns(until_ns(guard));
        self.writer.record(&event.fence(guard.fence().get()));
    }

    /// The holder stops relying on the lock.
    pub(crate) fn ends(&self, task: u64, guard: &Guard, how: EventKind) {
        let event = Event::now(task, guard.name().as_str(), how);
        self.writer.record(&event.fence(guard.fence().get()));
    }

    /// Records the death of a worker, which no longer holds a lock.
    pub(crate) fn dies(&self, worker: &WorkerProcess) {
        self.killed.lock().expect("no panic meanwhile").push((worker.pid(), now_ns()));
    }

    pub(crate) fn kill(&self, worker: &mut WorkerProcess) {
        self.dies(worker);
        worker.kill9();
    }

    /// Returns all events so far. A killed holder held the lock until the kill, or until a grant that came while the signal was
    /// in flight.
    pub(crate) fn read(&self) -> History {
        let mut events = History::read(self.dir()).expect("a history").events().to_vec();
        for &(pid, killed_ns) in self.killed.lock().expect("no panic meanwhile").iter() {
            let mut last = std::collections::HashMap::new();
            for event in events.iter().filter(|event| event.pid == pid) {
                last.insert((event.task, event.name.clone()), event.clone());
            }
            let inside =
                last.into_values().filter(|event| matches!(event.kind, EventKind::Granted | EventKind::Renewed));
            let ends = inside.map(|mut event| {
                event.at_ns = killed_ns.max(event.at_ns + 1);
                (event.kind, event.valid_until_ns) = (EventKind::Lost, None);
                event
            });
            events.extend(ends.collect::<Vec<_>>());
        }
        History::from_events(events)
    }

    /// Checks K1 and K3.
    pub(crate) fn check(&self) -> History {
        let history = self.read();
        assert!(history.grants() > 0, "an empty history shows nothing");
        assert!(history.overlaps().is_empty(), "K1: {:?}", history.overlaps());
        assert!(history.fence_inversions().is_empty(), "K3: {:?}", history.fence_inversions());
        history
    }
}

pub(crate) fn until_ns(guard: &Guard) -> u64 {
    u64::try_from(guard.valid_until().since_boot().as_nanos()).expect("some centuries")
}

/// Returns the median and the maximum of durations, for a report.
pub(crate) fn spread(durations: &[Duration]) -> String {
    let mut sorted = durations.to_vec();
    sorted.sort();
    let (Some(last), Some(middle)) = (sorted.last(), sorted.get(sorted.len() / 2)) else {
        return "none".into();
    };
    format!("median {middle:.1?}, longest {last:.1?}")
}

pub(crate) fn longest(durations: &[Duration]) -> Duration {
    durations.iter().max().copied().unwrap_or_default()
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Measures stalls of the machine: a thread and a task sleep for a millisecond and see how late they wake. A stall is added to
/// the time bounds of a row and reported with the result.
pub(crate) struct Metronome {
    longest_us: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Metronome {
    pub(crate) fn start() -> Self {
        let (longest_us, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (on_thread, on_task) = ((longest_us.clone(), stop.clone()), (longest_us.clone(), stop.clone()));
        let late =
            |slept: Instant| u64::try_from(slept.elapsed().as_micros()).unwrap_or(u64::MAX).saturating_sub(1_000);
        std::thread::spawn(move || {
            while !on_thread.1.load(Relaxed) {
                let slept = Instant::now();
                std::thread::sleep(ms(1));
                on_thread.0.fetch_max(late(slept), Relaxed);
            }
        });
        tokio::spawn(async move {
            while !on_task.1.load(Relaxed) {
                let slept = Instant::now();
                tokio::time::sleep(ms(1)).await;
                on_task.0.fetch_max(late(slept), Relaxed);
            }
        });
        Self { longest_us, stop }
    }

    /// Returns the longest stall since the start.
    pub(crate) fn longest_stall(&self) -> Duration {
        Duration::from_micros(self.longest_us.load(Relaxed))
    }
}

impl Drop for Metronome {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}
