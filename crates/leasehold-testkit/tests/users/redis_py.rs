//! redis-py's `Lock` and leasehold's on one key: they exclude each other, and a waiter does not change a foreign lock.
//!
//! Needs a Python with `redis`: `LEASEHOLD_TEST_PYTHON`, or an environment that is made for these tests. Without any Python
//! nothing is tested.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use leasehold::inspect::{EvictMode, Evicted, Holder};
use leasehold::{Error, Guard, LockManager, Options};
use leasehold_testkit::RedisServer;
use redis::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::task::JoinHandle;
use tokio::time::timeout;

const PYTHON_VAR: &str = "LEASEHOLD_TEST_PYTHON";
/// A raw name, which is its own key, as other kinds of clients use it.
const KEY: &str = "gpu_lock:7";
/// A limit that is reached only if a test fails.
const LONG: Duration = Duration::from_secs(30);
/// The head of a queue sends several requests in this time.
const SOON: Duration = Duration::from_secs(1);

#[tokio::test]
async fn a_redis_py_lock_excludes_leasehold() {
    let Some(mut meeting) = Meeting::new().await else { return };
    let token = meeting.python.acquire(60).await;
    let locks = &meeting.locks;
    assert!(locks.try_lock(KEY).await.expect("an answer").is_none());
    let Err(Error::NotAcquired { holder: Some(holder), .. }) = locks.lock(KEY).no_wait().await else {
        panic!("two holders");
    };
    assert!(holder.foreign);
    for seen in [locks.info(KEY).await.expect("an answer").holder, locks.holder(KEY).await.expect("an answer")] {
        let seen = seen.expect("held");
        assert!(seen.foreign && !seen.listens && !seen.revoked && seen.fence.is_none(), "{seen:?}");
        assert_eq!(seen.id, holder.id, "known by the hash of the value it wrote");
        assert_eq!(seen.owner.task(), "another client", "whoever knows the value could release the lock");
        assert!(seen.ttl_left.is_some_and(|left| left <= Duration::from_secs(60)), "{seen:?}");
    }
    assert_eq!(meeting.value().await, Some(token));
    assert_eq!(meeting.python.ask("release").await, "released");
    let guard = locks.try_lock(KEY).await.expect("an answer").expect("free");
    assert!(guard.release().await.expect("an answer"));
}

#[tokio::test]
async fn our_lock_keeps_redis_py_out_until_it_is_released() {
    let Some(mut meeting) = Meeting::new().await else { return };
    let guard = meeting.locks.lock(KEY).await.expect("free");
    let ours = meeting.value().await;
    assert_eq!(meeting.python.ask("acquire 60 0").await, "refused");
    meeting.python.send("acquire 60 30").await;
    meeting.until_asked("set", 3).await;
    assert_eq!(meeting.value().await, ours, "theirs does not touch ours");
    assert!(guard.is_valid());
    assert!(guard.release().await.expect("an answer"));
    let token = meeting.python.answer().await.strip_prefix("acquired ").expect("its turn").to_owned();
    assert_eq!(meeting.value().await, Some(token));
    assert!(meeting.locks.try_lock(KEY).await.expect("an answer").is_none());
    assert_eq!(meeting.python.ask("release").await, "released");
}

#[tokio::test]
async fn a_waiter_leaves_a_redis_py_lock_as_it_is_and_gets_in_soon_after_its_release() {
    let Some(mut meeting) = Meeting::new().await else { return };
    // With and without an expiry: waiting adds none.
    for timeout_s in [60, 0] {
        let token = meeting.python.acquire(timeout_s).await;
        let waiter = meeting.wait_in_line().await;
        meeting.until_asked("evalsha", 4).await;
        assert_eq!(meeting.value().await, Some(token.clone()));
        let left_ms = meeting.pttl().await;
        assert!(if timeout_s == 0 { left_ms == -1 } else { (1..=60_000).contains(&left_ms) }, "{left_ms} ms left");
        assert_eq!(meeting.python.ask("owned").await, "owned");
        // The holder can change its lock.
        if timeout_s > 0 {
            assert_eq!(meeting.python.ask("extend 90").await, "extended");
            meeting.until_asked("evalsha", 2).await;
            assert!((60_001..=90_000).contains(&meeting.pttl().await), "its extension stands");
            assert_eq!(meeting.value().await, Some(token));
        }
        assert_eq!(meeting.python.ask("release").await, "released");
        let released = Instant::now();
        let guard = arrives(waiter).await;
        let after = released.elapsed();
        println!("inside {after:?} after a redis-py holder released");
        assert!(after < SOON, "{after:?}");
        assert_eq!(meeting.python.ask("acquire 60 0").await, "refused");
        assert!(guard.release().await.expect("an answer"));
    }
}

#[tokio::test]
async fn a_waiter_gets_in_soon_after_a_redis_py_lock_has_run_out() {
    let Some(mut meeting) = Meeting::new().await else { return };
    let token = meeting.python.acquire(1).await;
    let taken = Instant::now();
    let waiter = meeting.wait_in_line().await;
    assert_eq!(meeting.value().await, Some(token));
    let guard = arrives(waiter).await;
    let after = taken.elapsed();
    println!("inside {after:?} after a redis-py holder took the lock for 1 s");
    // Its countdown began before the reply.
    assert!(after > Duration::from_millis(800) && after < Duration::from_secs(1) + SOON, "{after:?}");
    let ours = meeting.value().await;
    assert_eq!(meeting.python.ask("release").await, "not owned", "a late release does not touch ours");
    assert_eq!(meeting.python.ask("extend 60").await, "not owned");
    assert_eq!(meeting.value().await, ours);
    assert!(guard.is_valid() && guard.release().await.expect("an answer"));
}

#[tokio::test]
async fn a_redis_py_lock_can_only_be_forced_by_its_id() {
    let Some(mut meeting) = Meeting::new().await else { return };
    let first = meeting.python.acquire(60).await;
    let old = meeting.holder().await;
    assert_eq!(meeting.python.ask("release").await, "released");
    let second = meeting.python.acquire(60).await;
    assert_ne!(first, second);
    let holder = meeting.holder().await;
    let evict = async |id, mode| meeting.locks.evict(KEY, id, mode, "a test").await.expect("an answer");
    let Evicted::Foreign(found) = evict(holder.id, EvictMode::Revoke).await else { panic!("it cannot be asked") };
    assert_eq!(found.id, holder.id);
    for mode in [EvictMode::Revoke, EvictMode::Force] {
        let Evicted::ChangedHands(found) = evict(old.id, mode).await else { panic!("that one is gone") };
        assert_eq!(found.id, holder.id);
    }
    assert_eq!(meeting.value().await, Some(second));
    assert_eq!(meeting.python.ask("owned").await, "owned");

    let evict = async |id, mode| meeting.locks.evict(KEY, id, mode, "a test").await.expect("an answer");
    let Evicted::Done(found) = evict(holder.id, EvictMode::Force).await else { panic!("looked at, and forced") };
    assert!(found.foreign && found.id == holder.id);
    assert_eq!(meeting.value().await, None, "free");
    assert_eq!(evict(holder.id, EvictMode::Force).await, Evicted::Free);
    assert_eq!(meeting.python.ask("release").await, "not owned");
}

#[tokio::test]
async fn a_forced_redis_py_lock_goes_to_the_waiter() {
    let Some(mut meeting) = Meeting::new().await else { return };
    meeting.python.acquire(60).await;
    let waiter = meeting.wait_in_line().await;
    let holder = meeting.holder().await;
    let forced = meeting.locks.evict(KEY, holder.id, EvictMode::Force, "a test").await.expect("an answer");
    assert!(matches!(forced, Evicted::Done(_)), "{forced:?}");
    let guard = arrives(waiter).await;
    assert_eq!(meeting.python.ask("owned").await, "not owned");
    assert_eq!(meeting.python.ask("release").await, "not owned");
    assert!(guard.is_valid() && guard.release().await.expect("an answer"));
}

/// A server, a manager, and a redis-py client.
struct Meeting {
    server: RedisServer,
    locks: LockManager,
    python: Python,
}

impl Meeting {
    /// Returns `None` without a Python.
    async fn new() -> Option<Self> {
        let python = tokio::task::spawn_blocking(python).await.expect("no panic")?;
        let server = RedisServer::start().await;
        let mut options = Options::default();
        options.journal = Some(server.dir().join("journal"));
        let locks = LockManager::connect_with(&server.url(), options).await.expect("a manager");
        let python = Python::start(&python, server.port());
        Some(Self { server, locks, python })
    }

    async fn value(&self) -> Option<String> {
        match self.server.command(&["GET", KEY]).await {
            Value::Nil => None,
            Value::BulkString(value) => Some(String::from_utf8(value).expect("text")),
            other => panic!("GET answered {other:?}"),
        }
    }

    async fn pttl(&self) -> i64 {
        match self.server.command(&["PTTL", KEY]).await {
            Value::Int(ms) => ms,
            other => panic!("PTTL answered {other:?}"),
        }
    }

    async fn holder(&self) -> Holder {
        self.locks.holder(KEY).await.expect("an answer").expect("held")
    }

    /// Starts a task that waits. It is in the queue when this returns.
    async fn wait_in_line(&self) -> JoinHandle<Guard> {
        let locks = self.locks.clone();
        let waiter = tokio::spawn(async move { locks.lock(KEY).wait_up_to(LONG).await.expect("its turn") });
        let in_line = async { while self.locks.info(KEY).await.expect("an answer").waiters.is_empty() {} };
        timeout(LONG, in_line).await.expect("a place in line");
        waiter
    }

    /// Waits until the server has run a command `more` more times.
    async fn until_asked(&self, command: &str, times: u64) {
        let calls = async || self.server.commandstats().await.get(command).copied().unwrap_or(0);
        let enough = calls().await + times;
        timeout(LONG, async { while calls().await < enough {} }).await.expect("they go on asking");
    }
}

async fn arrives(waiter: JoinHandle<Guard>) -> Guard {
    timeout(LONG, waiter).await.expect("in time").expect("no panic")
}

/// A process with a redis-py lock. Killed on drop.
struct Python {
    _process: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Python {
    fn start(python: &Path, port: u16) -> Self {
        let mut process = tokio::process::Command::new(python)
            .args(["-c", include_str!("redis_py/lock.py"), &port.to_string(), KEY])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("a Python that could just be started");
        let stdin = process.stdin.take().expect("piped");
        let lines = BufReader::new(process.stdout.take().expect("piped")).lines();
        Self { _process: process, stdin, lines }
    }

    async fn send(&mut self, line: &str) {
        self.stdin.write_all(format!("{line}\n").as_bytes()).await.expect("a living Python");
    }

    async fn answer(&mut self) -> String {
        let line = timeout(LONG, self.lines.next_line()).await.expect("an answer in time");
        line.expect("text").expect("an answer; see Python's own words above")
    }

    async fn ask(&mut self, line: &str) -> String {
        self.send(line).await;
        self.answer().await
    }

    /// Acquires the free lock and returns its token. 0 seconds means without an expiry.
    async fn acquire(&mut self, timeout_s: u32) -> String {
        let answer = self.ask(&format!("acquire {timeout_s} 0")).await;
        answer.strip_prefix("acquired ").expect("a free lock").to_owned()
    }
}

/// Returns a Python with redis-py; `None` if there is no Python.
fn python() -> Option<PathBuf> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOUND.get_or_init(find_python).clone()
}

fn find_python() -> Option<PathBuf> {
    if let Some(given) = std::env::var_os(PYTHON_VAR) {
        let given = PathBuf::from(given);
        run(Command::new(&given).args(["-c", "import redis"]))
            .unwrap_or_else(|why| panic!("{PYTHON_VAR} names a Python that cannot import redis: {why}"));
        return Some(given);
    }
    if let Err(error) = Command::new("python3").arg("--version").output()
        && error.kind() == ErrorKind::NotFound
    {
        println!("not tested: there is no python3 here, and {PYTHON_VAR} names none");
        return None;
    }
    let environment = Path::new(env!("CARGO_TARGET_TMPDIR")).join("redis-py");
    let python = environment.join("bin/python");
    if run(Command::new(&python).args(["-c", "import redis"])).is_err() {
        let made = run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&environment))
            .and_then(|()| run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "redis>=5"])));
        made.unwrap_or_else(|why| {
            panic!("no Python with redis-py; set {PYTHON_VAR} to one, or make one possible: {why}");
        });
    }
    Some(python)
}

/// Runs a command to its end, and returns its output if it failed.
fn run(command: &mut Command) -> Result<(), String> {
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{command:?}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr)))
}
