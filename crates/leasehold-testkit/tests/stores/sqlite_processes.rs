//! The SQLite store in several processes, some of which are killed.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use leasehold::lease::{Token, Ttl};
use leasehold::store::sqlite::SqliteStore;
use leasehold::store::*;
use leasehold::{LockName, Owner};

const ROLE: &str = "LEASEHOLD_TEST_ROLE";
const FILE: &str = "LEASEHOLD_TEST_FILE";

fn name(text: &str) -> LockName {
    LockName::new(text).expect("a valid name")
}

fn claim(text: &str) -> AcquireRequest {
    AcquireRequest {
        name: name(text),
        token: Token::random(),
        ttl: Ttl::new(Duration::from_secs(60)).expect("valid"),
        owner: Owner::default(),
        fenced: true,
        listens: true,
        since_ms: 1,
    }
}

/// A process that runs [`child`]. Killed on drop.
struct Process {
    child: Child,
    says: BufReader<ChildStdout>,
}

impl Process {
    fn start(role: &str, file: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this test"))
            .args(["sqlite_processes::child", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(FILE, file)
            // A killed process would leave an incomplete coverage file, which no tool can read.
            .env("LLVM_PROFILE_FILE", "/dev/null")
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let says = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, says }
    }

    /// Reads until the process prints this word, and returns the text after it.
    fn hears(&mut self, word: &str) -> String {
        let mut all = String::new();
        loop {
            let mut line = String::new();
            let read = self.says.read_line(&mut line).expect("reads");
            assert!(read > 0, "the process ended without saying {word}: {all}");
            if let Some(at) = line.find(&format!("@{word}")) {
                return line[at + word.len() + 1..].trim().to_owned();
            }
            all += &line;
        }
    }

    fn kill(&mut self) {
        self.child.kill().expect("kills");
        self.child.wait().expect("reaps");
    }

    fn ends_well(mut self) {
        let mut rest = String::new();
        self.says.read_to_string(&mut rest).expect("reads");
        assert!(self.child.wait().expect("reaps").success(), "{rest}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the role of a started process; does nothing in an ordinary run of the tests.
#[tokio::test]
async fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let file = PathBuf::from(std::env::var_os(FILE).expect("given"));
    let store = SqliteStore::open(&file).expect("opens");
    match role.as_str() {
        "hold" => {
            assert!(matches!(store.try_acquire(&claim("k")).await, Ok(Try::Granted(_))));
            println!("@held");
            std::future::pending::<()>().await;
        }
        "wait" => {
            let claim = claim("k");
            assert!(matches!(store.acquire(&claim, None).await, Ok(Acquire::Queued(_))));
            println!("@waits");
            let grant = wait_for(&store, &claim).await;
            println!("@granted {}", grant.fence.expect("fenced"));
            assert_eq!(store.release(&claim.name, &claim.token).await, Ok(Release::Released));
        }
        "storm" => storm(&store, &file).await,
        "write" => {
            let until = Instant::now() + Duration::from_secs(3);
            let mut pairs = 0;
            while Instant::now() < until {
                for _ in 0..50 {
                    let claim = claim(&format!("p{}:{}", std::process::id(), pairs % 100));
                    assert!(matches!(store.try_acquire(&claim).await, Ok(Try::Granted(_))));
                    assert_eq!(store.release(&claim.name, &claim.token).await, Ok(Release::Released));
                    pairs += 1;
                }
            }
            println!("@pairs {pairs}");
        }
        "idle" => {}
        "lock" => {
            for n in 0..WRITES {
                let claim = claim(&format!("k{n}"));
                assert!(matches!(store.try_acquire(&claim).await, Ok(Try::Granted(_))));
                assert_eq!(store.release(&claim.name, &claim.token).await, Ok(Release::Released));
            }
        }
        "bind" => {
            for n in 0..WRITES {
                assert_eq!(store.create(&binding(n)).await, Ok(Create::Created));
            }
        }
        "bind-together" => {
            let bindings: Vec<_> = (0..WRITES).map(binding).collect();
            let created = futures_util::future::join_all(bindings.iter().map(|new| store.create(new))).await;
            assert!(created.iter().all(|answer| *answer == Ok(Create::Created)));
        }
        other => panic!("no such role: {other}"),
    }
}

/// The writes of a process whose syncs are counted.
const WRITES: usize = 40;

fn binding(n: usize) -> NewBinding {
    NewBinding {
        id: BindingId { kind: leasehold::store::BindingKind::Bindings, id: name(&format!("r{n}")) },
        claim: leasehold::bindings::ClaimId::random(),
        keep: leasehold::bindings::Retention::new(Duration::from_secs(60)).expect("valid"),
        slot: None,
        value: b"v".to_vec(),
    }
}

/// Counts how often a process waits for the disk. Returns `None` and prints the reason if that cannot be counted.
fn syncs_of(role: &str) -> Option<usize> {
    let dir = tempfile::tempdir().expect("a directory");
    let (file, log) = (dir.path().join("locks.db"), dir.path().join("strace"));
    drop(SqliteStore::open(&file).expect("opens"));
    let mut strace = Command::new("strace");
    strace.args(["-f", "-e", "trace=fsync,fdatasync", "-o"]).arg(&log);
    strace.arg(std::env::current_exe().expect("this test"));
    strace.args(["sqlite_processes::child", "--exact", "--test-threads=1"]).env(ROLE, role).env(FILE, &file);
    let ran = strace.env("LLVM_PROFILE_FILE", "/dev/null").output();
    if !ran.as_ref().is_ok_and(|ran| ran.status.success()) {
        println!("skipped: strace cannot count here: {ran:?}");
        return None;
    }
    let lines = std::fs::read_to_string(log).expect("written");
    // A call that another thread interrupts has two lines.
    Some(lines.lines().filter(|line| line.contains("sync(")).count())
}

#[test]
fn bindings_are_on_the_disk_before_they_are_acknowledged() {
    let Some(idle) = syncs_of("idle") else { return };
    let more = |role: &str| syncs_of(role).map_or(0, |syncs| syncs.saturating_sub(idle));
    let (locks, bindings, together) = (more("lock"), more("bind"), more("bind-together"));
    println!("{WRITES} locks: {locks} syncs; {WRITES} bindings: {bindings}, at once: {together}");
    assert!(bindings >= WRITES, "{bindings} syncs for {WRITES} bindings");
    assert!((1..WRITES / 2).contains(&together), "{together} syncs for {WRITES} bindings at once");
    assert!(locks < WRITES / 2, "a lease does not wait for the disk: {locks} syncs");
}

async fn wait_for(store: &SqliteStore, claim: &AcquireRequest) -> Grant {
    let mut pushes = store.pushes();
    loop {
        match pushes.recv().await.expect("store is open") {
            Push::Granted { token, grant } if token == claim.token => return grant,
            _ => {}
        }
    }
}

/// Acquires and releases one of three locks in an endless loop, and leaves a witness while it holds one.
async fn storm(store: &SqliteStore, file: &Path) {
    let mut pushes = store.pushes();
    for round in 0_u64.. {
        let claim = claim(&format!("storm:{}", (round + u64::from(std::process::id())) % 3));
        let grant = match store.acquire(&claim, None).await.expect("answers") {
            Acquire::Granted(grant) => grant,
            Acquire::Revoked => panic!("nobody revokes"),
            Acquire::Queued(_) => loop {
                match pushes.recv().await.expect("store is open") {
                    Push::Granted { token, grant } if token == claim.token => break grant,
                    _ => {}
                }
            },
        };
        let renewal = Renewal {
            name: claim.name.clone(),
            token: claim.token.clone(),
            fence: grant.fence,
            ttl: claim.ttl,
            prolong: true,
            rewrite: Some(claim.owner.clone()),
            hand_to: None,
        };
        if store.renew(&[renewal]).await != [Renewed::Renewed] {
            // The process hung for longer than the provisional lease, so the hold ended before it began.
            continue;
        }
        let witness = file.with_file_name(claim.name.as_str().replace(':', "-"));
        enter(&witness, grant.fence.expect("fenced").get());
        tokio::task::yield_now().await;
        std::fs::remove_file(&witness).expect("only we remove it");
        assert_eq!(store.release(&claim.name, &claim.token).await, Ok(Release::Released));
        if round % 20 == 0 {
            println!("@round");
        }
    }
}

/// Checks that one process holds the lock. The witness of a dead process is replaced.
fn enter(witness: &Path, fence: u64) {
    let fence_file = witness.with_extension("fence");
    let last: u64 = std::fs::read_to_string(&fence_file).ok().and_then(|t| t.parse().ok()).unwrap_or(0);
    // A symlink is created in one step, with the pid in it, so a killed process leaves no empty witness.
    let mine = witness.with_extension(format!("pid{}", std::process::id()));
    std::fs::write(&mine, std::process::id().to_string()).expect("writes");
    if std::fs::hard_link(&mine, witness).is_err() {
        let pid = std::fs::read_to_string(witness).expect("there while somebody is inside");
        assert!(!pid.is_empty(), "a witness always has a pid");
        let dead = || {
            let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            state.is_empty() || state.rsplit(')').next().is_some_and(|rest| rest.trim().starts_with(['Z', 'X']))
        };
        // A killed process closes its FIFO a little before it appears as dead.
        let until = Instant::now() + Duration::from_millis(200);
        while !dead() {
            assert!(Instant::now() < until, "two holders at once: {pid} is inside");
            std::thread::yield_now();
        }
        std::fs::rename(&mine, witness).expect("takes over");
    }
    assert!(fence > last, "fence did not rise: {fence} after {last}");
    let new = witness.with_extension(format!("fence{}", std::process::id()));
    std::fs::write(&new, fence.to_string()).expect("writes");
    std::fs::rename(&new, &fence_file).expect("renames");
}

#[test]
fn a_killed_holders_lock_goes_to_the_waiter_at_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("locks.db");
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let mut holder = Process::start("hold", &file);
        holder.hears("held");
        let mut waiter = Process::start("wait", &file);
        waiter.hears("waits");
        std::thread::sleep(Duration::from_millis(50));
        let killed = Instant::now();
        holder.kill();
        waiter.hears("granted");
        let took = killed.elapsed();
        assert!(took < Duration::from_secs(1), "{took:?} though the holder was dead");
        best = best.min(took);
        waiter.ends_well();
    }
    println!("waiter inside {best:?} after the kill, at best");
    assert!(best < Duration::from_millis(500), "only the one-second backstop works");
}

#[tokio::test]
async fn a_killed_holders_lock_can_be_taken_at_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("locks.db");
    let mut holder = Process::start("hold", &file);
    holder.hears("held");
    let store = SqliteStore::open(&file).expect("opens");
    assert!(matches!(store.try_acquire(&claim("k")).await, Ok(Try::Held(Some(_)))));
    holder.kill();
    assert_eq!(store.holder(&name("k")).await, Ok(None));
    assert!(matches!(store.try_acquire(&claim("k")).await, Ok(Try::Granted(_))));
}

#[tokio::test]
async fn a_release_reaches_a_waiter_in_another_process_past_a_dead_one() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("locks.db");
    let store = SqliteStore::open(&file).expect("opens");
    let mine = claim("k");
    assert!(matches!(store.try_acquire(&mine).await, Ok(Try::Granted(_))));
    let mut dead = Process::start("wait", &file);
    dead.hears("waits");
    let mut waiter = Process::start("wait", &file);
    waiter.hears("waits");
    dead.kill();
    let released = Instant::now();
    assert_eq!(store.release(&mine.name, &mine.token).await, Ok(Release::Released));
    waiter.hears("granted");
    println!("hand-off past a dead waiter, with the pipe to this test: {:?}", released.elapsed());
    assert!(released.elapsed() < Duration::from_secs(1));
    waiter.ends_well();
}

#[tokio::test]
async fn kills_in_a_storm_make_no_second_holder_and_harm_no_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("locks.db");
    let mut storm: Vec<Process> = (0..6).map(|_| Process::start("storm", &file)).collect();
    storm.iter_mut().for_each(|p| drop(p.hears("round")));
    for kill in 0..40 {
        let victim = kill % storm.len();
        storm[victim].kill();
        storm[victim] = Process::start("storm", &file);
        let watched = (kill + 1) % storm.len();
        // A process that found a second holder has panicked and prints nothing, so this fails.
        storm[watched].hears("round");
    }
    storm.iter_mut().for_each(|p| drop(p.hears("round")));
    drop(storm);
    let store = SqliteStore::open(&file).expect("opens");
    assert_eq!(store.integrity().await, Ok("ok".into()));
    let dir = file.with_file_name("locks.db.alive");
    assert_eq!(crate::support::open_fifos(&dir), 1, "the dead count as dead");
    let left = std::fs::read_dir(dir).expect("reads").count();
    assert!(left <= 33, "the dead are swept from time to time: {left} of 47 files are left");
    for i in 0..3 {
        assert!(matches!(store.try_acquire(&claim(&format!("storm:{i}"))).await, Ok(Try::Granted(_))));
    }
}

#[tokio::test]
async fn the_log_stays_short_under_four_writers() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("locks.db");
    let mut writers: Vec<Process> = (0..4).map(|_| Process::start("write", &file)).collect();
    let pairs: u64 = writers.iter_mut().map(|w| w.hears("pairs").parse::<u64>().expect("a number")).sum();
    writers.into_iter().for_each(Process::ends_well);
    let log = std::fs::metadata(file.with_file_name("locks.db-wal")).expect("there").len();
    let db = std::fs::metadata(&file).expect("there").len();
    println!("{pairs} pairs by 4 processes in 3 s; log {log} bytes, file {db} bytes");
    // Without checkpoints each pair adds two frames.
    assert!(pairs * 2 > 8_000, "too few writes to say anything");
    assert!(log < 9 << 20, "the log has grown to {log} bytes");
    assert!(db < 2 << 20, "the file has grown to {db} bytes");
    let store = SqliteStore::open(&file).expect("opens");
    assert_eq!(store.integrity().await, Ok("ok".into()));
}
