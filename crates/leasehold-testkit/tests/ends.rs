//! The ends of managers, guards and runtimes: everything is released, and nothing panics. These tests run one after the other in
//! a program of their own, because they count descriptors and threads of the whole process.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use leasehold::{Guard, LockManager};
use leasehold_testkit::{Arena, Kind, full_or, report};

#[path = "faults/common.rs"]
mod common;
use common::{LONG, longest, ms, spread};

/// Makes tests run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

const KINDS: [Kind; 3] = [Kind::Memory, Kind::Sqlite, Kind::Redis];

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime")
}

fn entries(dir: &str) -> usize {
    std::fs::read_dir(dir).expect("of this process").count()
}

/// Returns the numbers of file descriptors and threads of this process and of tasks of this runtime.
fn has() -> (usize, usize, usize) {
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    (entries("/proc/self/fd"), entries("/proc/self/task"), tasks)
}

/// Uses a manager: holds, waits, drops work, subscribes to events.
async fn use_it(manager: &LockManager, other: &LockManager, round: usize) {
    let held = manager.lock(format!("held-{round}")).await.expect("free");
    let waiting = tokio::spawn(manager.lock("waited-for").wait_up_to(LONG).into_future());
    let events = manager.events().await.expect("following");
    let theirs = other.lock("theirs").await.expect("free");
    let gave_up = manager.lock("theirs").wait_up_to(ms(5)).optional().await.expect("answered");
    assert!(gave_up.is_none());
    theirs.release().await.expect("answered");
    drop(waiting.await.expect("no panic").expect("its turn"));
    drop((held, events));
}

/// K6: managers that are shut down or dropped leave no descriptors, threads or tasks behind.
#[test]
fn managers_that_ended_leave_nothing_behind() {
    let _alone = alone();
    runtime().block_on(async {
        for kind in KINDS {
            let arena = Arena::new(kind).await;
            // Things that exist once per process (a file, a thread pool) are not leaks.
            open_and_end(&arena, 2).await;
            let before = settled(&(usize::MAX, usize::MAX, usize::MAX)).await;
            let rounds = full_or(20, 200);
            open_and_end(&arena, rounds).await;
            let after = settled(&before).await;
            assert!(
                after.0 <= before.0 && after.1 <= before.1 && after.2 <= before.2,
                "{kind:?}: {before:?} became {after:?} after {rounds} managers (descriptors, threads, tasks)"
            );
        }
    });
}

/// Opens managers one after the other, while one stays open. Every other one is only dropped.
async fn open_and_end(arena: &Arena, rounds: usize) {
    let other = arena.manager().await;
    for round in 0..rounds {
        let manager = arena.manager().await;
        use_it(&manager, &other, round).await;
        if round % 2 == 0 {
            tokio::time::timeout(LONG, manager.shutdown()).await.expect("a shutdown ends");
        }
    }
    other.shutdown().await;
}

/// Waits for some seconds until there are no more than before. Threads for blocking calls stay for a while after their last
/// call.
async fn settled(before: &(usize, usize, usize)) -> (usize, usize, usize) {
    let began = Instant::now();
    let (mut last, mut same_since) = (has(), Instant::now());
    loop {
        tokio::time::sleep(ms(20)).await;
        let now = has();
        if now != last {
            (last, same_since) = (now, Instant::now());
        }
        let back = now.0 <= before.0 && now.1 <= before.1 && now.2 <= before.2;
        if (back && same_since.elapsed() > ms(300)) || began.elapsed() > Duration::from_secs(15) {
            return now;
        }
    }
}

/// Counts panics of all threads, including those of detached tasks.
static PANICS: AtomicUsize = AtomicUsize::new(0);

fn count_panics() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, SeqCst);
        usual(info);
    }));
}

#[test]
fn f08_a_runtime_may_end_before_its_guards() {
    let _alone = alone();
    count_panics();
    let guards_each = 1_000;
    for kind in KINDS {
        let mut took = Vec::new();
        for round in 0..full_or(3, 50) {
            let outside = runtime();
            let arena = outside.block_on(Arena::new(kind));
            let inside = runtime();
            let (manager, guards) = inside.block_on(async {
                let manager = arena.manager().await;
                let mut guards = Vec::new();
                for i in 0..guards_each {
                    let request = manager.lock(format!("alive-{i}"));
                    guards.push(if i % 2 == 0 { request.unfenced() } else { request }.await.expect("free"));
                }
                (manager, guards)
            });
            let began = Instant::now();
            drop(inside);
            // They are then used on a thread without a runtime.
            let dropped = std::thread::spawn(move || {
                for guard in &guards {
                    let _ = (guard.is_valid(), guard.fence(), guard.loss(), guard.remaining());
                }
                drop(guards);
                drop(manager);
            });
            dropped.join().expect("no panic");
            took.push(began.elapsed());
            assert!(took[took.len() - 1] < ms(1_000), "{kind:?}, round {round}: {:?}", took[took.len() - 1]);
            if kind == Kind::Sqlite {
                // Their process is alive, but its store is closed, so the locks are free.
                outside.block_on(async { common::assert_no_locks_left(&arena.manager().await).await });
            }
            drop(arena);
        }
        report("F08", format!("{kind:?}: a runtime gone before {guards_each} guards: {}", spread(&took)));
        assert!(longest(&took) < ms(1_000));
    }
    assert_eq!(PANICS.load(SeqCst), 0, "somebody panicked");
}

/// A guard that is dropped on a thread without a runtime is released by the runtime of its manager.
#[test]
fn f08_a_guard_dropped_on_a_foreign_thread_is_released() {
    let _alone = alone();
    let runtime = runtime();
    for kind in KINDS {
        let arena = runtime.block_on(Arena::new(kind));
        let (manager, looker) = runtime.block_on(async { (arena.manager().await, arena.manager().await) });
        let mut took = Vec::new();
        for i in 0..full_or(20, 200) {
            let name = format!("foreign-{i}");
            let guard: Guard = runtime.block_on(manager.lock(name.as_str()).into_future()).expect("free");
            let began = Instant::now();
            std::thread::spawn(move || drop(guard)).join().expect("no panic");
            let next = runtime.block_on(looker.lock(name.as_str()).wait_up_to(LONG).into_future()).expect("released");
            took.push(began.elapsed());
            runtime.block_on(next.release()).expect("answered");
        }
        assert!(longest(&took) < ms(1_000), "{kind:?}: {}", spread(&took));
        report("F08", format!("{kind:?}: dropped on a foreign thread, free after {}", spread(&took)));
        runtime.block_on(async { tokio::join!(manager.shutdown(), looker.shutdown()) });
    }
}
