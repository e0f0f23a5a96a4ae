//! SQLite on a full disk.

use std::future::IntoFuture;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use leasehold::lease::{Token, Ttl};
use leasehold::store::sqlite::SqliteStore;
use leasehold::store::{Acquire, AcquireRequest, Inspect, Push, Release, Store, StoreError, StoreErrorKind, Try};
use leasehold::{Error, LockManager, LockName, Owner};
use leasehold_testkit::{WorkerProcess, full_or, report};
use serde_json::{Value, json};

use crate::common::*;
use crate::sqlite::integrity;

/// A small filesystem in memory, unmounted when dropped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount(kib: u32) -> Option<Self> {
        let disk = Self(tempfile::tempdir().expect("a directory"));
        let size = format!("size={kib}k");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "none"]).arg(disk.0.path()).status();
        if mounted.is_ok_and(|status| status.success()) { Some(disk) } else { None }
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Fills the disk.
    fn fill(&self) {
        let filler = self.path().join("filler");
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(filler).expect("a file");
        for size in [64 << 10, 4 << 10, 512] {
            while file.write_all(&vec![0; size]).is_ok() {}
        }
    }

    fn empty(&self) {
        std::fs::remove_file(self.path().join("filler")).expect("removed");
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f41_a_full_disk_refuses_new_locks_and_releases_all_old_ones() {
    let mounted = if is_root() { SmallDisk::mount(2_048) } else { None };
    let Some(disk) = mounted else {
        report("F41", "not run: a small filesystem can be mounted by root only".into());
        return;
    };
    let path = disk.path().join("locks.db");
    let url = format!("sqlite:{}", path.display());
    let (rounds, held) = full_or((2, 100), (20, 200));
    let (mut released, mut refused) = (0, 0);
    for _ in 0..rounds {
        let managers = [connect(&url).await, connect(&url).await];
        let mut guards = Vec::new();
        for i in 0..held {
            let manager = &managers[i % 2];
            guards.push(manager.lock(format!("held-{i}")).ttl(ms(30_000)).no_wait().await.expect("room enough"));
        }
        let waiters: Vec<_> = (0..5).map(|i| waiting(&managers[1 - i % 2], i)).collect();
        for i in 0..5 {
            wait_for_waiters(&managers[0], &format!("held-{i}"), 1).await;
        }
        disk.fill();
        // Under load: others keep requesting more than fits.
        let mut full = 0;
        for i in 0..2_000 {
            let long = format!("new-{i}-{}", "x".repeat(400));
            match managers[i % 2].lock(long).ttl(ms(30_000)).no_wait().await {
                // There was still a page for it; it is released like the others.
                Ok(guard) => guards.push(guard),
                Err(Error::Store { source, .. }) => {
                    assert_eq!(source.kind(), StoreErrorKind::DiskFull, "{source}");
                    full += 1;
                }
                Err(other) => panic!("{other}"),
            }
            if full == 20 {
                break;
            }
        }
        assert_eq!(full, 20, "the disk was full");
        refused += full;
        for guard in guards {
            let name = guard.name().clone();
            assert!(guard.release().await.unwrap_or_else(|error| panic!("{name}: {error}")));
            released += 1;
        }
        for waiter in waiters {
            let guard = tokio::time::timeout(LONG, waiter).await.expect("handed on").expect("no panic");
            assert!(guard.expect("its turn").release().await.expect("answered"));
            released += 1;
        }
        disk.empty();
        let guard = managers[0].lock("room-again").ttl(TTL).no_wait().await.expect("there is room again");
        assert!(guard.release().await.expect("answered"));
        assert_no_locks_left(&managers[1]).await;
        for manager in managers {
            manager.shutdown().await;
        }
        assert_eq!(integrity(&path).await, "ok");
    }
    report(
        "F41",
        format!("disk full {rounds} times: {released} of {released} released, {refused} acquires typed, integrity ok"),
    );
}

fn waiting(manager: &LockManager, i: usize) -> tokio::task::JoinHandle<Result<leasehold::Guard, Error>> {
    let request = manager.lock(format!("held-{i}")).ttl(ms(30_000)).wait_up_to(LONG);
    tokio::spawn(request.into_future())
}

const ROLE: &str = "LEASEHOLD_TEST_ROLE";
const FILE: &str = "LEASEHOLD_TEST_FILE";
/// The locks of a holder, and how many of them have a waiter.
const HELD: usize = 120;
const AWAITED: usize = 12;
/// The locks that a requester keeps before it releases the oldest.
const KEPT: usize = 30;

/// Starts a process with a role; see [`child`].
async fn start(role: &str, file: &Path) -> WorkerProcess {
    let mut command = Command::new(std::env::current_exe().expect("this test"));
    command.args(["full_disk::child", "--exact", "--nocapture", "--test-threads=1"]).env(ROLE, role).env(FILE, file);
    let mut process = WorkerProcess::run(&mut command);
    said(&mut process, "ready").await;
    process
}

/// Waits for a message of a process and returns it.
async fn said(process: &mut WorkerProcess, word: &str) -> Value {
    let line = process.wait_for_line(|line| !line[word].is_null(), LONG).await;
    line.unwrap_or_else(|| panic!("a process did not say {word}"))[word].clone()
}

/// Takes every byte that becomes free, until it is stopped.
fn keep_full(disk: &SmallDisk, stop: &AtomicBool) {
    while !stop.load(Relaxed) {
        disk.fill();
        std::thread::sleep(ms(1));
    }
}

/// Stops [`keep_full`], even if the test fails.
struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// The worst case: two processes release locks with names of all lengths; others wait for some of these, request more than
/// fits, and inspect; one of them is killed, one starts late; and another program takes every byte that becomes free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f41_no_release_is_refused_while_others_press() {
    let mounted = if is_root() { SmallDisk::mount(4_096) } else { None };
    let Some(disk) = mounted else { return };
    let (mut released, mut refused) = (0, 0);
    let rounds = full_or(2, 25);
    for round in 0..rounds {
        // The holders and requesters of the last round left too many rows for such a disk.
        let dir = tempfile::tempdir_in(disk.path()).expect("a directory");
        let file = dir.path().join("locks.db");
        let mut holders = Vec::new();
        let mut waiters = Vec::new();
        for who in ["a", "b"] {
            let mut holder = start(&format!("hold {who}"), &file).await;
            holder.send_line("hold");
            assert_eq!(said(&mut holder, "held").await, HELD);
            holders.push(holder);
            let mut waiter = start(&format!("wait {who}"), &file).await;
            waiter.send_line("wait");
            said(&mut waiter, "waits").await;
            waiters.push(waiter);
        }
        let mut others = Vec::new();
        for role in ["ask", "ask", "look"] {
            others.push(start(role, &file).await);
        }
        let stop = AtomicBool::new(false);
        disk.fill();
        let served = std::thread::scope(|threads| {
            threads.spawn(|| keep_full(&disk, &stop));
            let _stops = Stops(&stop);
            let round = async {
                for other in &mut others {
                    other.send_line("go");
                }
                said(&mut others[0], "full").await;
                said(&mut others[1], "full").await;
                let mut late = start("ask", &file).await;
                late.send_line("go");
                for holder in &mut holders {
                    holder.send_line("release");
                }
                others[0].kill9();
                others[0] = late;
                let mut served = Vec::new();
                for process in holders.iter_mut().chain(&mut waiters) {
                    served.push(said(process, "served").await);
                }
                for mut other in others {
                    other.send_line("stop");
                    served.push(said(&mut other, "served").await);
                }
                served
            };
            tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(round))
        });
        for part in &served {
            assert_eq!(part["errors"], json!([]), "round {round}: {served:#?}");
            released += part["released"].as_u64().expect("a number");
            refused += part["full"].as_u64().expect("a number");
        }
        disk.empty();
        let manager = connect(&format!("sqlite:{}", file.display())).await;
        assert_no_locks_left(&manager).await;
        let guard = manager.lock("room-again".repeat(40)).ttl(TTL).no_wait().await.expect("there is room again");
        assert!(guard.release().await.expect("answered"));
        manager.shutdown().await;
        assert_eq!(integrity(&file).await, "ok");
    }
    report(
        "F41",
        format!("disk full under pressure {rounds} times: {released} of {released} released, {refused} acquires typed"),
    );
}

/// Runs the role of a started process; does nothing in an ordinary run of the tests.
#[tokio::test]
async fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let file = PathBuf::from(std::env::var_os(FILE).expect("given"));
    let mut part = Part::open(&file);
    // After the output of the test runner.
    println!();
    part.say("ready", &json!(true));
    match role.split_once(' ') {
        Some(("hold", who)) => part.hold(who).await,
        Some(("wait", who)) => part.wait(who).await,
        None if role == "ask" => part.ask().await,
        None if role == "look" => part.look().await,
        _ => panic!("no such role: {role}"),
    }
}

/// A process with a role, and its results.
struct Part {
    store: SqliteStore,
    told: Receiver<String>,
    stop: Arc<AtomicBool>,
    released: u64,
    full: u64,
    errors: Vec<String>,
}

impl Part {
    fn open(file: &Path) -> Self {
        let store = SqliteStore::open(file).expect("opens");
        let (tell, told) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = stop.clone();
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                stopping.store(line == "stop", Relaxed);
                let _ = tell.send(line);
            }
            std::process::exit(0);
        });
        Self { store, told, stop, released: 0, full: 0, errors: Vec::new() }
    }

    fn say(&self, word: &str, what: &Value) {
        println!("{}", json!({ word: what }));
    }

    fn wait_until_told(&self, line: &str) {
        assert_eq!(self.told.recv().expect("somebody tells"), line);
    }

    fn served(&self) {
        self.say("served", &json!({ "released": self.released, "full": self.full, "errors": self.errors }));
        // The parent has sent more input, or ended it.
        let _ = self.told.recv();
    }

    async fn release(&mut self, claim: &AcquireRequest) {
        match self.store.release(&claim.name, &claim.token).await {
            Ok(Release::Released) => self.released += 1,
            // Granted to a process that hung for longer than an unconfirmed grant lasts.
            Ok(Release::NotOwner) if claim.since_ms == 2 => {}
            other => self.errors.push(format!("release of {} bytes: {other:?}", claim.name.as_str().len())),
        }
    }

    async fn hold(&mut self, who: &str) {
        self.wait_until_told("hold");
        let claims: Vec<AcquireRequest> = (0..HELD).map(|i| claim(&held_name(who, i))).collect();
        for claim in &claims {
            let answer = self.store.try_acquire(claim).await;
            assert!(matches!(answer, Ok(Try::Granted(_))), "{answer:?}");
        }
        self.say("held", &json!(claims.len()));
        self.wait_until_told("release");
        for claim in &claims {
            self.release(claim).await;
        }
        self.served();
    }

    /// Waits under a long owner name: the row becomes longer when the lock is handed off.
    async fn wait(&mut self, who: &str) {
        self.wait_until_told("wait");
        let mut pushes = self.store.pushes();
        let mut waiting = Vec::new();
        for i in 0..AWAITED {
            let owner = Owner::named("o".repeat(Owner::MAX_BYTES)).expect("valid");
            let claim = AcquireRequest { owner, since_ms: 2, ..claim(&held_name(who, i * 7)) };
            let answer = self.store.acquire(&claim, None).await;
            assert!(matches!(answer, Ok(Acquire::Queued(_))), "{answer:?}");
            waiting.push(claim);
        }
        self.say("waits", &json!(true));
        while !waiting.is_empty() {
            if let Some(Push::Granted { token, .. }) = pushes.recv().await
                && let Some(at) = waiting.iter().position(|claim| claim.token == token)
            {
                self.release(&waiting.swap_remove(at)).await;
            }
        }
        self.served();
    }

    async fn ask(&mut self) {
        self.wait_until_told("go");
        let mut kept = Vec::new();
        for i in 0.. {
            if self.stop.load(Relaxed) {
                break;
            }
            let name = format!("new-{}-{i}-", std::process::id());
            let claim = claim(&format!("{name}{}", "x".repeat(LockName::MAX_BYTES - name.len())));
            match self.store.try_acquire(&claim).await {
                Ok(Try::Granted(_)) => kept.push(claim),
                Err(error) if error.kind() == StoreErrorKind::DiskFull => {
                    self.full += 1;
                    if self.full == 1 {
                        self.say("full", &json!(true));
                    }
                }
                other => self.errors.push(format!("acquire: {other:?}")),
            }
            if kept.len() > KEPT {
                let oldest = kept.remove(0);
                self.release(&oldest).await;
            }
        }
        for claim in &kept {
            self.release(claim).await;
        }
        self.served();
    }

    async fn look(&mut self) {
        self.wait_until_told("go");
        while !self.stop.load(Relaxed) {
            let looked: Result<(), StoreError> = async {
                self.store.list("", None, 1_000).await?;
                self.store.holder(&claim("held-a-1").name).await?;
                self.store.queue(&claim(&held_name("a", 0)).name).await?;
                self.store.counters().await?;
                Ok(())
            }
            .await;
            if let Err(error) = looked {
                self.errors.push(format!("look: {error}"));
            }
        }
        self.served();
    }
}

/// Returns names of all lengths.
fn held_name(who: &str, i: usize) -> String {
    let name = format!("held-{who}-{i}-");
    let more = i * 37 % (LockName::MAX_BYTES - name.len());
    format!("{name}{}", "y".repeat(more))
}

fn claim(name: &str) -> AcquireRequest {
    AcquireRequest {
        name: LockName::new(name).expect("a name"),
        token: Token::random(),
        ttl: Ttl::new(Duration::from_secs(600)).expect("a time"),
        owner: Owner::default(),
        fenced: true,
        listens: true,
        since_ms: 1,
    }
}
