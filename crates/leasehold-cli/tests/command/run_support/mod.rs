//! Helpers for the tests of `leasehold run`.

#![allow(dead_code, reason = "each test file uses its part")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use leasehold_testkit::RedisServer;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// The timeout of every wait, generous for busy machines.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// A store and a directory, removed when dropped.
pub(crate) struct World {
    pub(crate) dir: TempDir,
    pub(crate) url: String,
    pub(crate) redis: Option<RedisServer>,
    runtime: tokio::runtime::Runtime,
}

impl World {
    pub(crate) fn sqlite() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let url = format!("sqlite:{}", dir.path().join("locks.db").display());
        Self { dir, url, redis: None, runtime: runtime() }
    }

    pub(crate) fn redis() -> Self {
        let runtime = runtime();
        let redis = runtime.block_on(RedisServer::start());
        Self { dir: tempfile::tempdir().expect("a directory"), url: redis.url(), redis: Some(redis), runtime }
    }

    /// Returns a world for each kind of store.
    pub(crate) fn all() -> [Self; 2] {
        [Self::sqlite(), Self::redis()]
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns the command `leasehold run ARGS`, in the directory, on the store.
    pub(crate) fn run(&self, args: &[&str]) -> Command {
        let mut command = self.leasehold(&["run"]);
        command.args(args);
        command
    }

    pub(crate) fn leasehold(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold"));
        command.args(args).current_dir(self.dir.path()).env("LEASEHOLD_STORE", &self.url).stdin(Stdio::null());
        command.env("XDG_STATE_HOME", self.dir.path());
        command
    }

    /// Runs `leasehold run ARGS` to its end.
    pub(crate) fn output(&self, args: &[&str]) -> Ended {
        Ended::of(&mut self.run(args))
    }

    /// Uses the library on the same store.
    pub(crate) fn with<R>(&self, work: impl AsyncFnOnce(&leasehold::LockManager) -> R) -> R {
        self.runtime.block_on(async {
            let locks = leasehold::LockManager::connect(&self.url).await.expect("the store is there");
            let result = work(&locks).await;
            locks.shutdown().await;
            result
        })
    }

    pub(crate) fn redis_command(&self, parts: &[&str]) {
        self.runtime.block_on(self.redis.as_ref().expect("a Redis world").command(parts));
    }

    /// Returns the number of waiters.
    pub(crate) fn waiters(&self, name: &str) -> usize {
        self.with(async |locks| locks.info(name).await.expect("an answer").waiters.len())
    }

    pub(crate) fn is_held(&self, name: &str) -> bool {
        self.with(async |locks| locks.is_locked(name).await.expect("an answer"))
    }

    /// Waits until a file has this many lines, and returns them.
    pub(crate) fn lines(&self, file: &str, at_least: usize) -> Vec<String> {
        let path = self.path(file);
        wait_for(&format!("{at_least} lines in {file}"), || {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            let whole = text.rfind('\n').map_or("", |end| &text[..=end]);
            let lines: Vec<String> = whole.lines().map(str::to_owned).collect();
            (lines.len() >= at_least).then_some(lines)
        })
    }
}

/// The result of a command.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ended {
    pub(crate) fn of(command: &mut Command) -> Self {
        command.output().expect("leasehold starts").into()
    }
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        use std::os::unix::process::ExitStatusExt;
        Self {
            code: output.status.code(),
            signal: output.status.signal(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// A process of a test, killed when dropped.
pub(crate) struct Job(pub(crate) Child);

impl Job {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.spawn().expect("it starts"))
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("a child of ours");
    }

    /// Waits for the end. Returns the exit code, or minus the signal.
    pub(crate) fn wait(&mut self) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        let status = wait_for("a process to end", || self.0.try_wait().expect("a child of ours"));
        status.code().unwrap_or_else(|| -status.signal().expect("ended one way or the other"))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Polls until there is a value.
pub(crate) fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < WAIT_TIMEOUT, "timed out waiting for {what}");
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Returns whether a process runs (a zombie does not).
pub(crate) fn is_alive(pid: &str) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid).join("stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

/// Returns whether a process is stopped by a signal.
pub(crate) fn is_stopped(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}

pub(crate) fn kill(pid: &str) {
    if let Some(pid) = pid.parse().ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// Returns the keeper of a front.
pub(crate) fn keeper_of(front: Pid) -> Option<Pid> {
    first_child(front)
}

/// Returns the guardian of a keeper.
pub(crate) fn guardian_of(keeper: Pid) -> Option<Pid> {
    first_child(keeper)
}

fn first_child(parent: Pid) -> Option<Pid> {
    let parent = parent.as_raw_nonzero().to_string();
    let mut children: Vec<i32> = Vec::new();
    // Any thread may have started it.
    for thread in std::fs::read_dir(format!("/proc/{parent}/task")).ok()?.flatten() {
        let text = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        children.extend(text.split_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
    }
    children.into_iter().min().and_then(Pid::from_raw)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
}
