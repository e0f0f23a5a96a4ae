//! The blocking API on every store, inside a runtime, after a fork, and at the end of a program.

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use leasehold::bindings::Claimed;
use leasehold::blocking::{Guard, LockManager};
use leasehold::inspect::{EvictMode, Evicted};
use leasehold::store::StoreErrorKind;
use leasehold::{Error, Fence, LossReason, Options};
use leasehold_testkit::{Arena, Kind};
use tokio::runtime::{Builder, Runtime};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
/// A limit that is reached only if a test fails.
const LONG: Duration = Duration::from_secs(20);

/// A store, and the runtime of its server, if it has one.
struct Place {
    arena: Arena,
    runtime: Runtime,
}

impl Place {
    fn new(kind: Kind) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        Self { arena: runtime.block_on(Arena::new(kind)), runtime }
    }

    fn url(&self) -> String {
        self.arena.url().unwrap_or_else(|| "memory:".into())
    }

    fn connect(&self) -> LockManager {
        let mut options = Options::default();
        options.journal = None;
        LockManager::connect_with(&self.url(), options).expect("a manager")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _entered = self.runtime.enter();
    }
}

macro_rules! on_every_store {
    ($($test:ident),* $(,)?) => {
        mod memory { $( #[test] fn $test() { super::$test(&super::Place::new(super::Kind::Memory)); } )* }
        mod sqlite { $( #[test] fn $test() { super::$test(&super::Place::new(super::Kind::Sqlite)); } )* }
        mod redis { $( #[test] fn $test() { super::$test(&super::Place::new(super::Kind::Redis)); } )* }
    };
}

on_every_store!(
    every_verb_answers,
    a_dropped_guard_is_released_when_the_drop_returns,
    threads_never_meet_inside,
    work_is_released_whatever_happens,
    a_lost_lease_is_reported,
    a_runtime_is_not_blocked,
    a_forked_child_touches_nothing,
    a_shutdown_notifies_holders,
);

fn every_verb_answers(place: &Place) {
    let locks = place.connect();
    let guard = locks.lock("one").owner("alice").ttl(LONG).acquire().expect("free");
    assert!(guard.is_valid() && guard.is_protected() && guard.remaining() > ms(10_000) && guard.loss().is_none());
    assert!(locks.is_locked("one").expect("answered"));
    assert!(locks.try_lock("one").expect("answered").is_none(), "one at a time");
    let Err(Error::NotAcquired { holder: Some(holder), waited, .. }) = locks.lock("one").wait_up_to(ms(50)).acquire()
    else {
        panic!("acquired twice")
    };
    assert!(waited >= ms(50));
    assert_eq!((holder.owner.task(), holder.id), ("alice", guard.holder_id()));
    assert_eq!(locks.holder("one").expect("answered").expect("held").id, guard.holder_id());
    assert_eq!(locks.info("one").expect("answered").view().owner.as_deref(), Some(holder.owner.to_string().as_str()));
    let listed = locks.list("o", None, 10).expect("answered").locks;
    assert_eq!(listed.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["one"]);
    guard.extend(Duration::from_secs(60)).expect("prolonged");
    assert!(guard.remaining() > ms(50_000));
    assert!(guard.asked_to_finish_within(ms(1)).expect("waited").is_none());
    let evicted = locks.evict("one", guard.holder_id(), EvictMode::Revoke, "a test").expect("answered");
    assert!(matches!(evicted, Evicted::Done(_)), "{evicted:?}");
    assert_eq!(guard.lost_within(LONG).expect("waited"), Some(LossReason::Revoked));
    assert!(!guard.is_valid());
    assert!(matches!(guard.extend(LONG), Err(Error::Lost { .. })));
    guard.release().expect("answered");
    assert!(!locks.is_locked("one").expect("answered"));
    // The other features of a manager.
    let claimed = |value: u32| {
        locks
            .block_on(async |locks| locks.bindings::<u32>().try_create("request", &value, LONG).await)
            .expect("answered")
    };
    assert!(matches!(claimed(7), Claimed::Created(_)));
    assert!(matches!(claimed(8), Claimed::Exists(found) if found.value == 7));
    let permit = locks.block_on(async |locks| locks.pool("gpus", 0..2)?.acquire().await).expect("free");
    assert!(locks.is_locked("gpus:0").expect("answered") && permit.index() == 0);
    assert!(locks.block_on(async |_| permit.release().await).expect("answered"));
    assert!(!locks.is_locked("gpus:0").expect("answered"));
    let led = locks.block_on(async |locks| locks.elect("boss").run(async |term| Ok::<_, Error>(term.is_valid())).await);
    assert!(led.expect("elected"));
    assert!(matches!(locks.lock("").acquire(), Err(Error::Invalid(_))));
    assert!(matches!(LockManager::connect("nonsense:"), Err(Error::Connect { .. })));
}

fn a_dropped_guard_is_released_when_the_drop_returns(place: &Place) {
    let locks = place.connect();
    let mut last = Fence::NONE;
    for _ in 0..50 {
        let guard = locks.lock("again").no_wait().acquire().expect("given back");
        assert!(guard.fence() > last, "fences rise");
        last = guard.fence();
    }
}

fn threads_never_meet_inside(place: &Place) {
    let locks = place.connect();
    let (inside, last_fence) = (AtomicUsize::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..10 {
                    let work = |guard: &Guard| {
                        assert_eq!(inside.fetch_add(1, SeqCst), 0, "two holders at once");
                        let fence = guard.fence().get();
                        assert!(last_fence.swap(fence, SeqCst) < fence, "fence did not rise");
                        inside.fetch_sub(1, SeqCst);
                    };
                    locks.lock("busy").wait_up_to(LONG).run(work).expect("its turn");
                }
            });
        }
    });
}

fn work_is_released_whatever_happens(place: &Place) {
    let locks = place.connect();
    assert_eq!(locks.with_lock("work", |guard| guard.name().to_string()).expect("done"), "work");
    let failed: Result<u32, &str> = locks.with_lock("work", |_| Err("its own")).expect("locked");
    assert_eq!(failed, Err("its own"));
    let panicked =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| locks.with_lock("work", |_| panic!("on purpose"))));
    assert!(panicked.is_err());
    drop(locks.lock("work").no_wait().acquire().expect("free after a panic"));
}

fn a_lost_lease_is_reported(place: &Place) {
    let locks = place.connect();
    let outlived = locks.lock("short").ttl(ms(200)).renew(false).run(|guard| {
        assert_eq!(guard.lost_within(LONG).expect("waited"), Some(LossReason::Expired));
    });
    assert!(matches!(outlived, Err(Error::Lost { why: LossReason::Expired, .. })), "{outlived:?}");
    // A renewed lease continues.
    locks
        .lock("short")
        .ttl(ms(200))
        .run(|guard| assert!(guard.lost_within(ms(600)).expect("waited").is_none()))
        .expect("renewed");
}

fn a_runtime_is_not_blocked(place: &Place) {
    let locks = place.connect();
    let url = place.url();
    let refused = |locks: &LockManager, url: &str| {
        assert!(matches!(LockManager::connect(url), Err(Error::InsideRuntime)));
        assert!(matches!(locks.lock("a").acquire(), Err(Error::InsideRuntime)));
        assert!(matches!(locks.try_lock("a"), Err(Error::InsideRuntime)));
        assert!(matches!(locks.with_lock("a", |_| panic!("not locked")), Err(Error::InsideRuntime)));
        assert!(matches!(locks.holder("a"), Err(Error::InsideRuntime)));
        assert!(matches!(locks.shutdown(), Err(Error::InsideRuntime)));
        let text = locks.shutdown().expect_err("inside").to_string();
        assert!(text.contains("spawn_blocking") && text.contains("leasehold::LockManager"), "{text}");
    };
    let held = locks.lock("held").acquire().expect("free");
    for runtime in [
        Builder::new_current_thread().enable_all().build().expect("a runtime"),
        Builder::new_multi_thread().worker_threads(1).build().expect("a runtime"),
    ] {
        let (in_task, in_blocking, task_url) = (locks.clone(), locks.clone(), url.clone());
        runtime.block_on(async {
            refused(&locks, &url);
            // Repeatedly, and with an exhausted budget.
            for _ in 0..300 {
                refused(&locks, &url);
                tokio::task::consume_budget().await;
            }
            tokio::spawn(async move { refused(&in_task, &task_url) }).await.expect("no panic");
            // Waiting is allowed there.
            let blocking = tokio::task::spawn_blocking(move || {
                assert!(in_blocking.try_lock("held").expect("answered").is_none());
                assert!(in_blocking.with_lock("free", Guard::is_valid).expect("free"));
            });
            blocking.await.expect("no panic");
        });
        // An entered runtime without a task allows waiting.
        let _entered = runtime.enter();
        assert!(locks.with_lock("free", Guard::is_valid).expect("free"));
    }
    let runtime = Builder::new_multi_thread().worker_threads(1).build().expect("a runtime");
    let worker = locks.clone();
    let worked = runtime.block_on(
        runtime.spawn(async move { tokio::task::block_in_place(|| worker.with_lock("free", Guard::is_valid)) }),
    );
    assert!(worked.expect("no panic").expect("free"));
    // A guard may be dropped there; the manager's thread releases it.
    runtime.block_on(async move { drop(held) });
    drop(locks.lock("held").wait_up_to(LONG).acquire().expect("given back"));
    let held = locks.lock("held").acquire().expect("free");
    assert!(matches!(runtime.block_on(async move { held.release() }), Err(Error::InsideRuntime)));
    drop(locks.lock("held").wait_up_to(LONG).acquire().expect("given back"));
    // The last handle can be dropped there too.
    runtime.block_on(async move { drop(locks) });
}

fn a_forked_child_touches_nothing(place: &Place) {
    let locks = place.connect();
    let guard = locks.lock("parents").acquire().expect("free");
    let childs = locks.lock("childs").acquire().expect("free");
    locks.pretend_forked(true);
    let forked = |error: Option<Error>| matches!(error, Some(Error::Connect { source, .. }) if source.kind() == StoreErrorKind::Forked);
    assert!(forked(locks.lock("a").acquire().err()));
    assert!(forked(locks.holder("a").err()));
    assert!(forked(locks.shutdown().err()));
    assert!(forked(guard.extend(LONG).err()));
    assert!(!guard.is_valid() && guard.remaining().is_zero() && guard.loss().is_none());
    // Drops and releases in the child do not affect the parent.
    assert!(forked(childs.release().err()));
    locks.pretend_forked(false);
    assert!(guard.is_valid());
    assert!(locks.is_locked("childs").expect("answered"), "the child gave the parent's lock back");
    assert!(guard.release().expect("answered"));
}

fn a_shutdown_notifies_holders(place: &Place) {
    let locks = place.connect();
    let guard = locks.lock("held").acquire().expect("free");
    std::thread::scope(|scope| {
        let shutdown = scope.spawn(|| locks.shutdown());
        assert_eq!(guard.lost_within(LONG).expect("waited"), Some(LossReason::Shutdown));
        drop(guard);
        shutdown.join().expect("no panic").expect("done");
    });
    assert!(matches!(locks.lock("held").acquire(), Err(Error::ShutDown { .. })));
    locks.shutdown().expect("twice is as good as once");
}

const WORKER: &str = env!("CARGO_BIN_EXE_sync_worker");

fn program(place: &Place, what: &str) -> Command {
    let mut command = Command::new(WORKER);
    command.args([&place.url(), "mains", what]).stdout(Stdio::piped());
    command
}

fn programs(kind: Kind) {
    let place = Place::new(kind);
    let locks = place.connect();
    // A program that ends has released its locks, however it ends.
    for (what, ends_well) in [("return", true), ("panic", false), ("threads", true)] {
        let ended = program(&place, what).status().expect("a program");
        assert_eq!(ended.success(), ends_well, "{what}");
        drop(locks.lock("mains").no_wait().acquire().unwrap_or_else(|error| panic!("after `{what}`: {error}")));
    }
    // A killed one has not; the store notices its death.
    let mut child = program(&place, "wait").spawn().expect("a program");
    let granted = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().expect("piped"))).next();
    assert!(granted.expect("a line").expect("text").contains("granted"));
    assert!(locks.try_lock("mains").expect("answered").is_none());
    child.kill().expect("alive");
    child.wait().expect("gone");
    if kind == Kind::Sqlite {
        drop(locks.lock("mains").wait_up_to(LONG).acquire().expect("a dead holder's lock is free at once"));
    }
}

#[test]
fn a_program_that_ends_leaves_nothing_behind_on_sqlite() {
    programs(Kind::Sqlite);
}

#[test]
fn a_program_that_ends_leaves_nothing_behind_on_redis() {
    programs(Kind::Redis);
}
