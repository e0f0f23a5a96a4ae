//! One SQLite database with two paths, in containers, removed while it is in use, and its file modes. Some tests need mounts
//! and namespaces; they print what they skip.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use leasehold::store::StoreErrorKind;
use leasehold::store::sqlite::SqliteStore;
use leasehold::{Error, LockManager, LossReason};
use leasehold_testkit::job::Job;
use leasehold_testkit::{WorkerProcess, full_or, report};

use crate::common::*;

fn url(path: &Path) -> String {
    format!("sqlite:{}", path.display())
}

/// Runs a command that must succeed. Returns `false` and prints the reason if it is not permitted.
fn permitted(program: &str, args: &[&str]) -> bool {
    let done = Command::new(program).args(args).output();
    let done_well = done.as_ref().is_ok_and(|out| out.status.success());
    if !done_well {
        println!("skipped: {program} {args:?}: {done:?}");
    }
    done_well
}

/// A mount that is unmounted on drop.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

fn bind_mount(from: &Path, to: &Path) -> Option<Mounted> {
    let paths = [from, to].map(|p| p.to_str().expect("text").to_owned());
    permitted("mount", &["--bind", &paths[0], &paths[1]]).then(|| Mounted(to.to_owned()))
}

/// Starts a worker in namespaces of its own that holds the lock.
async fn holding_in(unshare: &[&str], before: &str, job: &Job) -> WorkerProcess {
    let spec = serde_json::to_string(&Job { hold: true, ..job.clone() }).expect("a job");
    let mut command = Command::new("unshare");
    command.args(unshare).args(["sh", "-c", &format!("{before} exec \"$0\" \"$1\""), WORKER, &spec]);
    let mut worker = WorkerProcess::run(&mut command);
    worker.wait_for_line(|line| line["granted"].is_u64(), LONG).await.expect("granted");
    worker
}

async fn is_held(path: &Path) -> bool {
    let manager = connect(&url(path)).await;
    let tried = manager.lock("k").ttl(TTL).wait_up_to(Duration::ZERO).await;
    let held = matches!(tried, Err(Error::NotAcquired { .. }));
    drop(tried);
    manager.shutdown().await;
    held
}

fn refusal(path: &Path) -> String {
    let error = SqliteStore::open(path).err().expect("refused");
    assert_eq!(error.kind(), StoreErrorKind::File, "{error}");
    error.to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f42_one_database_by_two_paths_has_one_holder() {
    let (rounds, mut mounts) = (full_or(2, 50), 0);
    for _ in 0..rounds {
        let chronicle = Chronicle::new();
        let home = tempfile::tempdir().expect("a directory");
        let at = |name: &str| home.path().join(name);
        fs::create_dir(at("a")).expect("made");
        fs::create_dir(at("b")).expect("made");
        let mut job = chronicle.job(&url(&at("a/locks.db")), "k");
        job.ttl_ms = 3_600_000;
        let mut holder = holding_worker(&job).await;

        symlink(at("a/locks.db"), at("b/link.db")).expect("linked");
        symlink(at("a"), at("c")).expect("linked");
        for alias in ["b/link.db", "c/locks.db", "b/../a/locks.db"] {
            assert!(is_held(&at(alias)).await, "{alias}");
        }
        fs::hard_link(at("a/locks.db"), at("b/hard.db")).expect("linked");
        let refused = refusal(&at("b/hard.db"));
        assert!(refused.contains("hard links"), "{refused}");
        fs::remove_file(at("b/hard.db")).expect("removed");
        fs::write(at("b/file.db"), "").expect("made");
        if let Some(_mounted) = bind_mount(&at("a/locks.db"), &at("b/file.db")) {
            let refused = refusal(&at("b/file.db"));
            assert!(refused.contains("mount point"), "{refused}");
            mounts += 1;
        }
        fs::create_dir(at("whole")).expect("made");
        if let Some(_mounted) = bind_mount(&at("a"), &at("whole")) {
            assert!(is_held(&at("whole/locks.db")).await, "a mount of the whole directory is the same place");
        }
        // The lock of a killed holder with a lease of one hour is free at once, because its FIFO proves its death.
        chronicle.kill(&mut holder);
        assert!(!is_held(&at("a/locks.db")).await, "a dead holder's lock is free at once");
    }
    report("F42", format!("{rounds} times a symlink, a hard link and ({mounts} times) a bind mount: 0 second holders"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f42_a_missing_or_other_directory_does_not_prove_a_death() {
    let chronicle = Chronicle::new();
    let home = tempfile::tempdir().expect("a directory");
    let (db, copy) = (home.path().join("locks.db"), home.path().join("copy.db"));
    let mut job = chronicle.job(&url(&db), "k");
    job.ttl_ms = 3_000;
    let mut holder = holding_worker(&job).await;
    // A copy has the rows but not the directory.
    assert!(
        permitted("sqlite3", &[db.to_str().expect("text"), &format!(".backup {}", copy.display())]) || {
            fs::copy(&db, &copy).expect("copied");
            fs::copy(db.with_file_name("locks.db-wal"), copy.with_file_name("copy.db-wal")).expect("copied");
            true
        }
    );
    let refused = refusal(&copy);
    assert!(refused.contains("doctor --adopt"), "{refused}");
    let busy = SqliteStore::adopt(&copy).expect_err("a lease lasts");
    assert_eq!(busy.kind(), StoreErrorKind::Busy, "{busy}");

    fs::remove_dir_all(home.path().join("locks.db.alive")).expect("removed");
    for _ in 0..20 {
        assert!(is_held(&db).await, "a FIFO that is missing proves nothing");
        tokio::time::sleep(ms(200)).await;
    }
    // Now only the end of its lease frees it.
    chronicle.kill(&mut holder);
    let killed = Instant::now();
    while is_held(&db).await {
        assert!(killed.elapsed() < ms(5_000), "its lease is over");
        tokio::time::sleep(ms(50)).await;
    }
    SqliteStore::adopt(&copy).expect("its lease has ended");
    assert!(!is_held(&copy).await, "adopted");
    report(
        "F42",
        format!("directory removed: held while its holder renews, free {:.1?} after a kill", killed.elapsed()),
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f43_containers_and_time_namespaces_share_one_clock() {
    const OTHER_BOOT: &str = "mount --bind \"$BOOT\" /proc/sys/kernel/random/boot_id &&";
    let mut seen = Vec::new();
    for round in 0..full_or(1, 10) {
        let home = tempfile::tempdir().expect("a directory");
        let boot = home.path().join("boot_id");
        fs::write(&boot, format!("{round:08x}-1111-4222-8333-444444444444\n")).expect("written");
        let other_boot = OTHER_BOOT.replace("$BOOT", boot.to_str().expect("text"));
        let spaces: [(&str, &[&str], &str); 3] = [
            ("another boot id", &["--mount"], &other_boot),
            ("a clock a day ahead", &["--time", "--boottime", "86400", "--fork", "--kill-child"], ""),
            ("a clock behind", &["--time", "--boottime", "-20", "--fork", "--kill-child"], ""),
        ];
        for (what, unshare, before) in spaces {
            let script = format!("{before} true");
            let test = [unshare, &["sh", "-c", &script]].concat();
            if !permitted("unshare", &test) {
                continue;
            }
            let chronicle = Chronicle::new();
            let db = home.path().join(format!("{}.db", what.replace(' ', "-")));
            let mut job = chronicle.job(&url(&db), "k");
            job.ttl_ms = 3_600_000;
            // The holder is in the other namespace, in both directions.
            let mut there = holding_in(unshare, before, &job).await;
            assert!(is_held(&db).await, "{what}: its holder is alive");
            there.send_line("release");
            there.wait(LONG).await.expect("ends");
            let mut here = holding_worker(&job).await;
            (job.wait_ms, job.hold) = (300, true);
            let spec = serde_json::to_string(&job).expect("a job");
            let mut command = Command::new("unshare");
            command.args(unshare).args(["sh", "-c", &format!("{before} exec \"$0\" \"$1\""), WORKER, &spec]);
            let mut waiter = WorkerProcess::run(&mut command);
            let line = waiter.wait_for_line(|line| line["granted"].is_u64() || line["error"].is_string(), LONG).await;
            let line = line.expect("an answer");
            assert!(line["error"].is_string(), "{what}: it entered beside the holder here: {line}");
            drop(waiter);
            chronicle.kill(&mut here);
            assert!(!is_held(&db).await, "{what}: a dead holder's lock is free at once");
            seen.push(what);
        }
    }
    report("F43", format!("{} namespaces, each holding and asking: 0 second holders ({seen:?})", seen.len()));
}

/// Removes a database, replaces it or moves it away, in turn.
fn displace(db: &Path, round: usize) {
    match round % 3 {
        0 => fs::remove_file(db).expect("removed"),
        1 => {
            fs::write(db.with_file_name("new"), "").expect("written");
            fs::rename(db.with_file_name("new"), db).expect("replaced");
        }
        _ => fs::rename(db, db.with_file_name("moved.db")).expect("moved"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f44_a_holder_learns_that_its_database_was_removed_or_replaced() {
    let mut told = Vec::new();
    for round in 0..full_or(3, 51) {
        let home = tempfile::tempdir().expect("a directory");
        let db = home.path().join("locks.db");
        let manager = LockManager::connect_with(&url(&db), options()).await.expect("a manager");
        let guard = manager.lock("k").ttl(TTL).await.expect("free");
        let waiter = tokio::spawn({
            let manager = manager.clone();
            async move { manager.lock("k").ttl(TTL).wait_up_to(LONG).await.map(drop) }
        });
        wait_for_waiters(&manager, "k", 1).await;
        displace(&db, round);
        let began = Instant::now();
        let why = tokio::time::timeout(TTL, guard.lost()).await.expect("told before its lease is over");
        assert_eq!(why, LossReason::Displaced);
        told.push(began.elapsed());
        assert!(!guard.release().await.expect("answered"), "it was not held any more");
        let waited = tokio::time::timeout(TTL * 4, waiter).await.expect("in time").expect("no panic");
        assert!(
            matches!(&waited, Err(Error::Store { source, .. }) if source.kind() == StoreErrorKind::File),
            "{waited:?}"
        );
        let asked =
            manager.lock("k").ttl(TTL).wait_up_to(Duration::ZERO).await.expect_err("no lock in a file that is gone");
        assert!(asked.to_string().contains("k"), "{asked}");
        manager.shutdown().await;
    }
    report(
        "F44",
        format!("{} databases removed, replaced or moved: the holder is told, {}", told.len(), spread(&told)),
    );
}

/// Like a deployment that replaces a symlink to its current directory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f44_a_holder_learns_that_its_path_leads_to_another_database() {
    let home = tempfile::tempdir().expect("a directory");
    let at = |name: &str| home.path().join(name);
    fs::create_dir(at("first")).expect("made");
    fs::create_dir(at("second")).expect("made");
    symlink(at("first"), at("current")).expect("linked");
    let manager = connect(&url(&at("current/locks.db"))).await;
    let guard = manager.lock("k").ttl(TTL).await.expect("free");
    drop(SqliteStore::open(&at("second/locks.db")).expect("opens"));
    symlink(at("second"), at("new")).expect("linked");
    fs::rename(at("new"), at("current")).expect("swapped");
    let began = Instant::now();
    let why = tokio::time::timeout(TTL, guard.lost()).await.expect("told before its lease is over");
    assert_eq!(why, LossReason::Displaced);
    report("F44", format!("the path leads to another database: the holder is told after {:.1?}", began.elapsed()));
    drop(guard);
    manager.shutdown().await;
}

/// The only lease of its manager, so that no renewal of another lease notices first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f44_a_lease_that_is_not_renewed_is_lost_too() {
    let ttl = full_or(ms(3_000), Duration::from_secs(3_600));
    let bound = (ttl / 3).min(ms(10_000)) + ms(1_000);
    let mut told = Vec::new();
    for round in 0..full_or(3, 9) {
        let home = tempfile::tempdir().expect("a directory");
        let db = home.path().join("locks.db");
        let manager = connect(&url(&db)).await;
        let guard = manager.lock("k").ttl(ttl).renew(false).no_wait().await.expect("free");
        displace(&db, round);
        let began = Instant::now();
        let why = tokio::time::timeout(bound, guard.lost()).await.expect("told by the next check");
        assert_eq!(why, LossReason::Displaced);
        told.push(began.elapsed());
        drop(guard);
        manager.shutdown().await;
    }
    report("F44", format!("{} leases of {ttl:?} that are not renewed: told, {}", told.len(), spread(&told)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s29_files_are_for_their_user_and_group_alone() {
    let (mut places, mut files) = (0, 0);
    for mode in [0o700, 0o750, 0o755, 0o770, 0o775, 0o777, 0o1777, 0o2750, 0o2770, 0o2775] {
        for umask in ["000", "002", "007", "022", "077"] {
            let chronicle = Chronicle::new();
            let home = tempfile::tempdir().expect("a directory");
            let dir = home.path().join("d");
            fs::create_dir(&dir).expect("made");
            fs::set_permissions(&dir, Permissions::from_mode(mode)).expect("set");
            let spec = Job { hold: true, ..chronicle.job(&url(&dir.join("locks.db")), "k") };
            let spec = serde_json::to_string(&spec).expect("a job");
            let mut command = Command::new("sh");
            let mut holder =
                WorkerProcess::run(command.args(["-c", &format!("umask {umask}; exec \"$0\" \"$1\""), WORKER, &spec]));
            holder.wait_for_line(|line| line["granted"].is_u64(), LONG).await.expect("granted");
            let group = mode & 0o020 != 0;
            for (path, meta) in walk(&dir) {
                let wanted = match (meta.is_dir(), group) {
                    (true, true) => 0o770 | (mode & 0o2000),
                    (true, false) => 0o700,
                    (false, true) => 0o660,
                    (false, false) => 0o600,
                };
                let found = meta.mode() & 0o7777;
                assert!(found == wanted, "{path:?} in {mode:o} with umask {umask}: {found:o}, not {wanted:o}");
                files += 1;
            }
            places += 1;
        }
    }
    // Files of an earlier version with open permissions are restricted.
    let home = tempfile::tempdir().expect("a directory");
    let db = home.path().join("locks.db");
    drop(SqliteStore::open(&db).expect("opens"));
    fs::set_permissions(&db, Permissions::from_mode(0o644)).expect("set");
    drop(SqliteStore::open(&db).expect("opens"));
    assert_eq!(fs::metadata(&db).expect("there").mode() & 0o777, 0o640);
    report("S29", format!("{places} directories and umasks, {files} files: nothing for others"));
}

/// In a directory without the setgid bit a new file gets its creator's own group, which other users are not in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s29_users_of_one_group_share_a_database() {
    const GROUP: u32 = 64_000;
    let home = tempfile::tempdir().expect("a directory");
    let at = |name: &str| home.path().join(name);
    let (dir, worker) = (at("d"), at("worker"));
    fs::set_permissions(home.path(), Permissions::from_mode(0o755)).expect("set");
    fs::create_dir(&dir).expect("made");
    fs::set_permissions(&dir, Permissions::from_mode(0o770)).expect("set");
    fs::copy(WORKER, &worker).expect("copied");
    let as_user = |user: u32| {
        ["--reuid", "--regid"].map(|id| format!("{id}={user}")).into_iter().chain([format!("--groups={GROUP}")])
    };
    let test: Vec<String> = as_user(64_001).chain(["true".to_owned()]).collect();
    let test: Vec<&str> = test.iter().map(String::as_str).collect();
    if std::os::unix::fs::chown(&dir, None, Some(GROUP)).is_err() || !permitted("setpriv", &test) {
        println!("skipped: this user cannot act as others");
        return;
    }
    let start = |user: u32, wait_ms: u64| {
        let history = at(&user.to_string());
        fs::create_dir(&history).expect("made");
        std::os::unix::fs::chown(&history, Some(user), None).expect("given");
        let job = Job { hold: true, wait_ms, ..Job::new(url(&dir.join("locks.db")), "k", history) };
        let mut command = Command::new("setpriv");
        command.args(as_user(user)).arg(&worker).arg(serde_json::to_string(&job).expect("a job"));
        WorkerProcess::run(&mut command)
    };
    let mut holder = start(64_001, 60_000);
    holder.wait_for_line(|line| line["granted"].is_u64(), LONG).await.expect("granted");
    for (path, meta) in walk(&dir) {
        assert_eq!((meta.uid(), meta.gid()), (64_001, GROUP), "{path:?}");
    }
    let mut other = start(64_002, 60_000);
    holder.send_line("release");
    other.wait_for_line(|line| line["granted"].is_u64(), LONG).await.expect("granted to another user of the group");
}

fn walk(dir: &Path) -> Vec<(PathBuf, fs::Metadata)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).expect("read").flatten() {
        let meta = fs::symlink_metadata(entry.path()).expect("there");
        if meta.is_dir() {
            found.extend(walk(&entry.path()));
        }
        found.push((entry.path(), meta));
    }
    found
}
