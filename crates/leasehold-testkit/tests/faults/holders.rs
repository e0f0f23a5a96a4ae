//! Holders that die, stop or panic while they hold the lock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::LockManager;
use leasehold_testkit::history::EventKind as Happened;
use leasehold_testkit::{Arena, Kind, WorkerProcess, full_or, report};

use crate::common::*;

/// How a holder dies.
#[derive(Clone, Copy)]
enum Death {
    Kill,
    Abort,
}

/// Kills workers that hold a lock each, while a waiter waits for each lock. Returns how long after the death each waiter got
/// the lock.
async fn deaths_in_the_section(arena: &Arena, death: Death, times: usize, at_once: usize) -> Vec<Duration> {
    let url = arena.url().expect("a store that processes can share");
    let chronicle = Arc::new(Chronicle::new());
    let waiters = [arena.manager().await, arena.manager().await];
    let mut latencies = Vec::new();
    while latencies.len() < times {
        let (mut workers, mut tasks) = (Vec::new(), Vec::new());
        for i in 0..at_once {
            let name = format!("section-{i}");
            workers.push(holding_worker(&chronicle.job(&url, &name)).await);
            tasks.push(tokio::spawn(enter(waiters[i % 2].clone(), name.clone(), i as u64, chronicle.clone())));
            wait_for_waiters(&waiters[0], &name, 1).await;
        }
        let mut died = Vec::new();
        for worker in &mut workers {
            died.push(Instant::now());
            match death {
                Death::Kill => chronicle.kill(worker),
                Death::Abort => {
                    chronicle.dies(worker);
                    worker.send_line("abort");
                    assert!(!worker.wait(LONG).await.expect("it ends").success(), "it aborted");
                }
            }
        }
        for (task, died) in tasks.into_iter().zip(died) {
            let entered = tokio::time::timeout(LONG, task).await.expect("in time").expect("no panic");
            latencies.push(entered.saturating_duration_since(died));
        }
    }
    chronicle.check();
    assert_no_locks_left(&waiters[0]).await;
    latencies
}

/// Waits for a lock and returns when it was granted.
async fn enter(manager: LockManager, name: String, task: u64, chronicle: Arc<Chronicle>) -> Instant {
    let guard = manager.lock(name).ttl(TTL).wait_up_to(LONG).await.expect("its turn");
    let entered = Instant::now();
    chronicle.granted(task, &guard);
    chronicle.ends(task, &guard, Happened::ReleaseCalled);
    assert!(guard.release().await.expect("answered"));
    entered
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f01_a_killed_holder_is_followed_within_ttl_plus_a_second_on_redis() {
    let arena = Arena::new(Kind::Redis).await;
    let times = full_or(4, 100);
    let after = deaths_in_the_section(&arena, Death::Kill, times, full_or(4, 10)).await;
    assert!(longest(&after) <= TTL + ms(1_000), "{}", spread(&after));
    assert_no_keys_left(arena.server()).await;
    report("F01", format!("Redis: {} kills, next holder inside after {} (ttl 2 s)", after.len(), spread(&after)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f01_a_killed_holder_is_followed_at_once_on_sqlite() {
    let arena = Arena::new(Kind::Sqlite).await;
    let after = deaths_in_the_section(&arena, Death::Kill, full_or(8, 100), 4).await;
    assert!(longest(&after) <= ms(1_000), "{}", spread(&after));
    report("F01", format!("SQLite: {} kills, next holder inside after {}", after.len(), spread(&after)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f07_an_aborted_holder_is_followed_as_a_killed_one() {
    let redis = Arena::new(Kind::Redis).await;
    let on_redis = deaths_in_the_section(&redis, Death::Abort, full_or(3, 50), full_or(3, 10)).await;
    assert!(longest(&on_redis) <= TTL + ms(1_000), "{}", spread(&on_redis));
    let sqlite = Arena::new(Kind::Sqlite).await;
    let on_sqlite = deaths_in_the_section(&sqlite, Death::Abort, full_or(3, 50), 3).await;
    assert!(longest(&on_sqlite) <= ms(1_000), "{}", spread(&on_sqlite));
    let (n, m) = (on_redis.len(), on_sqlite.len());
    report("F07", format!("abort: Redis {n}: {}; SQLite {m}: {}", spread(&on_redis), spread(&on_sqlite)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f07_a_panic_in_the_section_releases_within_a_tenth_of_a_second() {
    for kind in [Kind::Memory, Kind::Sqlite, Kind::Redis] {
        let arena = Arena::new(kind).await;
        let (holder, next) = (arena.manager().await, arena.manager().await);
        let chronicle = Chronicle::new();
        let mut after = Vec::new();
        for _ in 0..full_or(20, 200) {
            let guard = holder.lock("panics").ttl(TTL).await.expect("free");
            chronicle.granted(0, &guard);
            let waiter = tokio::spawn({
                let next = next.clone();
                async move { (next.lock("panics").ttl(TTL).wait_up_to(LONG).await.expect("its turn"), Instant::now()) }
            });
            wait_for_waiters(&holder, "panics", 1).await;
            chronicle.ends(0, &guard, Happened::ReleaseCalled);
            let panicked = Instant::now();
            let section = tokio::spawn(async move {
                let _inside = guard;
                // A panic without a message on the test's output.
                std::panic::resume_unwind(Box::new("on purpose"));
            });
            assert!(section.await.expect_err("it panics").is_panic());
            let (guard, entered) = waiter.await.expect("no panic");
            after.push(entered.saturating_duration_since(panicked));
            chronicle.granted(1, &guard);
            chronicle.ends(1, &guard, Happened::ReleaseCalled);
            assert!(guard.release().await.expect("answered"));
        }
        chronicle.check();
        assert_no_locks_left(&holder).await;
        assert!(longest(&after) <= ms(100), "{kind:?}: {}", spread(&after));
        report("F07", format!("unwind on {kind:?}: {} panics, next holder after {}", after.len(), spread(&after)));
    }
}

/// Processes are stopped for three ttls while others take their locks, and then resume.
async fn stopped_holders(kind: Kind) {
    let arena = Arena::new(kind).await;
    let url = arena.url().expect("a store that processes can share");
    let (processes, writes) = full_or((4, 5), (20, 10));
    let chronicle = Chronicle::new();
    let mut workers = Vec::new();
    for i in 0..processes {
        let mut job = chronicle.job(&url, &format!("stopped-{i}"));
        job.stubborn = true;
        workers.push(holding_worker(&job).await);
    }
    workers.iter_mut().for_each(WorkerProcess::pause);
    let stopped = Instant::now();
    let manager = arena.manager().await;
    let mut successors = Vec::new();
    for i in 0..processes {
        let name = format!("stopped-{i}");
        let request = manager.lock(name).owner("successor").ttl(TTL).wait_up_to(TTL + ms(1_000));
        let guard = request.await.expect("the lease ends");
        chronicle.granted(u64::try_from(i).expect("few"), &guard);
        // The resource has seen this holder's fence and rejects lower ones from now on.
        successors.push((guard.fence().get(), guard));
    }
    tokio::time::sleep((3 * TTL).saturating_sub(stopped.elapsed())).await;
    let mut accepted = 0;
    for (worker, (fence, guard)) in workers.iter_mut().zip(&successors) {
        worker.resume();
        worker.send_line("renew");
        let renewed = worker.wait_for_line(|line| line["renewed"].is_boolean(), LONG).await.expect("answered");
        assert_eq!(renewed["lost"], true, "told at its first call: {renewed}");
        for _ in 0..writes {
            worker.send_line("write");
            let wrote = worker.wait_for_line(|line| line["wrote"].is_u64(), LONG).await.expect("written");
            assert_eq!(wrote["valid"], false, "it knows");
            accepted += usize::from(wrote["wrote"].as_u64().expect("a fence") >= *fence);
        }
        worker.send_line("release");
        let released = worker.wait_for_line(|line| line["task"] == 0 && !line["released"].is_null(), LONG).await;
        assert_eq!(released.expect("answered")["released"], false, "not its own any more");
        let holder = manager.holder(guard.name()).await.expect("answered").expect("held");
        assert_eq!((holder.id, holder.owner.task()), (guard.holder_id(), "successor"), "it is untouched");
        assert!(guard.is_valid() && guard.loss().is_none());
    }
    assert_eq!(accepted, 0, "stale writes got through");
    for (i, (_, guard)) in successors.into_iter().enumerate() {
        chronicle.ends(u64::try_from(i).expect("few"), &guard, Happened::ReleaseCalled);
        assert!(guard.release().await.expect("answered"), "still its own");
    }
    chronicle.check();
    assert_no_locks_left(&manager).await;
    let stale = processes * writes;
    report(
        "F02",
        format!("{kind:?}: 0 of {stale} stale writes accepted, {processes} of {processes} told at the first call"),
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f02_a_stopped_holder_learns_of_its_loss_at_its_first_call_on_redis() {
    stopped_holders(Kind::Redis).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f02_a_stopped_holder_learns_of_its_loss_at_its_first_call_on_sqlite() {
    stopped_holders(Kind::Sqlite).await;
}
