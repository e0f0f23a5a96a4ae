//! SQLite with killed and forked processes.

use std::path::Path;
use std::time::{Duration, Instant};

use leasehold::lease::{Token, Ttl};
use leasehold::store::redis::{RedisOptions, RedisStore};
use leasehold::store::sqlite::SqliteStore;
use leasehold::store::{AcquireRequest, KeySpace, Store, StoreErrorKind, Try};
use leasehold::{LockName, Owner};
use leasehold_testkit::{RedisServer, WorkerProcess, full_or, report};

use crate::common::*;

pub(crate) async fn integrity(path: &Path) -> String {
    SqliteStore::open(path).expect("a database").integrity().await.expect("answered")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f37_kills_leave_a_sound_file_and_never_two_holders() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("locks.db");
    let url = format!("sqlite:{}", path.display());
    let (processes, kills) = full_or((8, 24), (32, 200));
    let chronicle = Chronicle::new();
    let start = |i: usize| {
        // Few names, so that the workers contend, wait and write at the same time.
        let mut job = chronicle.job(&url, &format!("busy-{}", i % 3));
        (job.tasks, job.cycles, job.inside_us) = (2, usize::MAX, 200);
        WorkerProcess::spawn(WORKER, &job)
    };
    let mut workers: Vec<WorkerProcess> = (0..processes).map(start).collect();
    for worker in &mut workers {
        worker.wait_for_line(|line| line["ready"] == true, LONG).await.expect("ready");
    }
    for kill in 0..kills {
        let victim = kill * 7 % processes;
        chronicle.kill(&mut workers[victim]);
        workers[victim] = start(victim);
        workers[victim].wait_for_line(|line| line["ready"] == true, LONG).await.expect("ready");
    }
    for worker in &mut workers {
        chronicle.kill(worker);
    }
    let history = chronicle.check();
    let errors = errors_of(workers).await;
    assert!(errors.is_empty(), "{errors:?}");
    assert_eq!(integrity(&path).await, "ok");
    // All workers are dead, so all locks are free at once.
    let manager = connect(&url).await;
    for i in 0..3 {
        let began = Instant::now();
        let guard = manager.lock(format!("busy-{i}")).ttl(TTL).wait_up_to(LONG).await.expect("free");
        assert!(began.elapsed() <= ms(1_000), "a dead holder's lock is free at once: {:?}", began.elapsed());
        assert!(guard.release().await.expect("answered"));
    }
    assert_no_locks_left(&manager).await;
    let grants = history.grants();
    report(
        "F37",
        format!("{processes} processes, {kills} kills, {grants} grants: 0 overlaps, 0 fence inversions, integrity ok"),
    );
}

/// Returns the errors of the workers.
async fn errors_of(workers: Vec<WorkerProcess>) -> Vec<String> {
    let mut errors = Vec::new();
    for mut worker in workers {
        while let Some(line) = worker.next_line(ms(100)).await {
            errors.extend(line["error"].as_str().map(str::to_owned));
        }
    }
    errors
}

fn claim(name: &str) -> AcquireRequest {
    AcquireRequest {
        name: LockName::new(name).expect("a name"),
        token: Token::random(),
        ttl: Ttl::default(),
        owner: Owner::default(),
        fenced: true,
        listens: true,
        since_ms: 1,
    }
}

/// Checks that every call of a store in a forked child fails at once and changes nothing.
async fn says_that_it_is_forked(store: &dyn Store, held: &AcquireRequest) -> Duration {
    let began = Instant::now();
    let other = claim("in-the-child");
    let forked = |error: leasehold::store::StoreError| assert_eq!(error.kind(), StoreErrorKind::Forked, "{error}");
    forked(store.try_acquire(&other).await.expect_err("forked"));
    forked(store.acquire(&other, None).await.expect_err("forked"));
    forked(store.release(&held.name, &held.token).await.expect_err("forked"));
    forked(store.release_emergency(&held.name, &held.token).await.expect_err("forked"));
    forked(store.leave(held).await.expect_err("forked"));
    forked(store.holder(&held.name).await.expect_err("forked"));
    forked(store.queue(&held.name).await.expect_err("forked"));
    forked(store.list("", None, 10).await.expect_err("forked"));
    store.close().await;
    began.elapsed()
}

/// Checks that the store still works in the parent.
async fn goes_on(store: &dyn Store, held: &AcquireRequest) {
    let holder = store.holder(&held.name).await.expect("answered").expect("held");
    assert_eq!(holder.id, held.token.holder_id());
    assert!(store.holder(&claim("in-the-child").name).await.expect("answered").is_none());
    assert!(matches!(store.try_acquire(&claim("afterwards")).await, Ok(Try::Granted(_))));
    assert_eq!(store.release(&held.name, &held.token).await.expect("answered"), leasehold::store::Release::Released);
}

/// A process cannot fork without `unsafe`, so the fork is simulated.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f40_a_store_in_a_forked_child_fails() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("locks.db");
    let sqlite = SqliteStore::open(&path).expect("a database");
    let server = RedisServer::start().await;
    let redis =
        RedisStore::connect(&server.url(), KeySpace::default(), RedisOptions::default()).await.expect("a store");
    let held = claim("parents");
    let mut slowest = Duration::ZERO;
    for _ in 0..full_or(5, 100) {
        assert!(matches!(sqlite.try_acquire(&held).await, Ok(Try::Granted(_))));
        sqlite.pretend_forked(true);
        slowest = slowest.max(says_that_it_is_forked(&sqlite, &held).await);
        sqlite.pretend_forked(false);
        goes_on(&sqlite, &held).await;
        assert!(matches!(redis.try_acquire(&held).await, Ok(Try::Granted(_))));
        redis.pretend_forked(true);
        slowest = slowest.max(says_that_it_is_forked(&redis, &held).await);
        redis.pretend_forked(false);
        goes_on(&redis, &held).await;
        for store in [&sqlite as &dyn Store, &redis] {
            let left = store.list("afterwards", None, 10).await.expect("answered").locks;
            assert_eq!(left.len(), 1);
            let holder = left[0].1.id;
            let name = claim("afterwards").name;
            store.evict(&name, holder, leasehold::inspect::EvictMode::Force).await.expect("answered");
        }
    }
    // Dropping the store in the child does not affect the parent.
    let child = SqliteStore::open(&path).expect("a database");
    child.pretend_forked(true);
    drop(child);
    assert_eq!(sqlite.integrity().await.expect("answered"), "ok");
    assert!(slowest <= ms(100), "all verbs said so after {slowest:?}");
    report(
        "F40",
        format!("pretended forks: every verb says so, all of them within {slowest:.1?}; the parent keeps its lease"),
    );
}
