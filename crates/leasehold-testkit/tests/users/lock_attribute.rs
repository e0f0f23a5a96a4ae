//! `#[lock]` on every store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use leasehold::inspect::EvictMode;
use leasehold::{Error, LockManager, LossReason, Options, current_fence, lock};
use leasehold_testkit::{Arena, Kind, on_every_store};
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
/// A limit that is reached only if a test fails.
const LONG: Duration = Duration::from_secs(20);

on_every_store!(
    one_at_a_time_and_the_other_fails_at_once,
    whoever_waits_enters_next,
    released_on_every_way_out,
    a_dropped_call_stops_the_body_and_frees_the_lock,
    a_lost_lease_cancels_the_body,
    a_lost_lease_can_be_ignored,
    a_bounded_call_ends_with_its_lease,
    a_renewed_call_outlives_its_lease_up_to_its_cap,
    a_bad_name_is_an_error_before_the_body_runs,
    the_fence_is_at_hand_and_rises,
);

/// A record of what a body did.
#[derive(Clone, Default)]
struct Traces {
    inside: Arc<AtomicUsize>,
    most_inside: Arc<AtomicUsize>,
    finished: Arc<AtomicBool>,
    entered: Arc<Notify>,
}

/// Counts the end of a body, however it ends.
struct Inside(Traces);

impl Traces {
    fn enter(&self) -> Inside {
        let now = self.inside.fetch_add(1, SeqCst) + 1;
        self.most_inside.fetch_max(now, SeqCst);
        self.entered.notify_one();
        Inside(self.clone())
    }

    fn nobody_inside(&self) -> bool {
        self.inside.load(SeqCst) == 0
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, SeqCst);
    }
}

/// Checks that the lock is free within a tenth of a second.
async fn free_at_once(locks: &LockManager, name: &str, after: &str) {
    let guard = locks.lock(name).wait_up_to(ms(100)).await.unwrap_or_else(|error| panic!("after {after}: {error}"));
    guard.release().await.expect("answered");
}

#[derive(Debug)]
enum Failed {
    Lock(Error),
    Body(&'static str),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Lock(error)
    }
}

#[lock(key = "order:{id}", locks = locks)]
async fn hold(locks: &LockManager, id: u32, traces: &Traces, until: oneshot::Receiver<()>) -> Result<u32, Error> {
    let _inside = traces.enter();
    let _ = until.await;
    traces.finished.store(true, SeqCst);
    Ok(id)
}

async fn one_at_a_time_and_the_other_fails_at_once(arena: Arena) {
    let (locks, traces) = (arena.manager().await, Traces::default());
    let (done, until) = oneshot::channel();
    let first = tokio::spawn({
        let (locks, traces) = (locks.clone(), traces.clone());
        async move { hold(&locks, 1, &traces, until).await }
    });
    traces.entered.notified().await;
    let (_never, until) = oneshot::channel();
    let second = timeout(LONG, hold(&locks, 1, &traces, until)).await.expect("at once");
    let Err(Error::NotAcquired { name, .. }) = second else { panic!("{second:?}") };
    assert_eq!(name.as_str(), "order:1");
    // Another order is another lock.
    drop(locks.lock("order:2").no_wait().await.expect("free"));
    done.send(()).expect("waited for");
    assert_eq!(first.await.expect("no panic").expect("held"), 1);
    assert_eq!(traces.most_inside.load(SeqCst), 1);
    free_at_once(&locks, "order:1", "a return").await;
}

#[lock(key = "queue", locks = locks, wait_ms = 20_000)]
async fn pass(locks: &LockManager, traces: &Traces) -> Result<(), Error> {
    let _inside = traces.enter();
    tokio::time::sleep(ms(2)).await;
    Ok(())
}

async fn whoever_waits_enters_next(arena: Arena) {
    let traces = Traces::default();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let locks = arena.manager().await;
        for _ in 0..8 {
            let (locks, traces) = (locks.clone(), traces.clone());
            tasks.spawn(async move { pass(&locks, &traces).await });
        }
    }
    for result in tasks.join_all().await {
        result.expect("its turn came");
    }
    assert_eq!(traces.most_inside.load(SeqCst), 1, "two at once");
}

#[lock(key = "ways", locks = locks)]
async fn leave_by(locks: &LockManager, traces: Traces, way: &str) -> Result<&'static str, Failed> {
    let _inside = traces.enter();
    tokio::task::yield_now().await;
    if way == "early return" {
        return Ok("early");
    }
    if way == "question mark" {
        Err(Failed::Body("question mark"))?;
    }
    assert_ne!(way, "panic", "as asked");
    if way == "error" { Err(Failed::Body("error")) } else { Ok("end") }
}

async fn released_on_every_way_out(arena: Arena) {
    let (locks, other) = (arena.manager().await, arena.manager().await);
    for way in ["end", "early return", "question mark", "error", "panic"] {
        let (locks, traces) = (locks.clone(), Traces::default());
        let seen = traces.clone();
        let outcome = tokio::spawn(async move { leave_by(&locks, traces, way).await }).await;
        match (way, outcome) {
            ("end", Ok(Ok("end"))) | ("early return", Ok(Ok("early"))) => {}
            ("question mark" | "error", Ok(Err(Failed::Body(said)))) if said == way => {}
            ("panic", Err(error)) if error.is_panic() => {}
            (_, outcome) => panic!("{way}: {outcome:?}"),
        }
        assert!(seen.nobody_inside(), "{way}");
        free_at_once(&other, "ways", way).await;
    }
    let held = other.lock("ways").await.expect("free");
    let refused = leave_by(&locks, Traces::default(), "end").await;
    assert!(matches!(refused, Err(Failed::Lock(Error::NotAcquired { .. }))), "converted: {refused:?}");
    drop(held);
}

async fn a_dropped_call_stops_the_body_and_frees_the_lock(arena: Arena) {
    let (locks, other, traces) = (arena.manager().await, arena.manager().await, Traces::default());
    let (_never, until) = oneshot::channel();
    tokio::select! {
        biased;
        _ = hold(&locks, 3, &traces, until) => panic!("nobody let it go on"),
        () = traces.entered.notified() => {}
    }
    assert!(traces.nobody_inside(), "dropped with its caller");
    free_at_once(&other, "order:3", "a drop").await;
}

async fn revoke(locks: &LockManager, name: &str) {
    let holder = locks.holder(name).await.expect("answered").expect("held");
    locks.evict(name, holder.id, EvictMode::Revoke, "test").await.expect("answered");
}

async fn a_lost_lease_cancels_the_body(arena: Arena) {
    let (locks, other, traces) = (arena.manager().await, arena.manager().await, Traces::default());
    let (_never, until) = oneshot::channel();
    let call = tokio::spawn({
        let (locks, traces) = (locks.clone(), traces.clone());
        async move { hold(&locks, 4, &traces, until).await }
    });
    traces.entered.notified().await;
    revoke(&other, "order:4").await;
    let outcome = timeout(LONG, call).await.expect("told").expect("no panic");
    assert!(matches!(outcome, Err(Error::Lost { why: LossReason::Revoked, .. })), "{outcome:?}");
    assert!(traces.nobody_inside() && !traces.finished.load(SeqCst), "the body has stopped");
    free_at_once(&other, "order:4", "a loss").await;
}

#[lock(key = "stubborn", locks = locks, on_lost = "continue")]
async fn go_on(locks: &LockManager, traces: &Traces, until: oneshot::Receiver<()>) -> Result<&'static str, Error> {
    let _inside = traces.enter();
    let _ = until.await;
    Ok("done all the same")
}

async fn a_lost_lease_can_be_ignored(arena: Arena) {
    let (locks, other, traces) = (arena.manager().await, arena.manager().await, Traces::default());
    let (done, until) = oneshot::channel();
    let call = tokio::spawn({
        let (locks, traces) = (locks.clone(), traces.clone());
        async move { go_on(&locks, &traces, until).await }
    });
    traces.entered.notified().await;
    revoke(&other, "stubborn").await;
    done.send(()).expect("still there");
    assert_eq!(call.await.expect("no panic").expect("its own result"), "done all the same");
    free_at_once(&other, "stubborn", "an ignored loss").await;
}

#[lock(key = "bounded", locks = locks, ttl_ms = 200)]
async fn never_ends(locks: &LockManager, traces: &Traces) -> Result<(), Error> {
    let _inside = traces.enter();
    std::future::pending().await
}

async fn a_bounded_call_ends_with_its_lease(arena: Arena) {
    let (locks, traces) = (arena.manager().await, Traces::default());
    let outcome = timeout(LONG, never_ends(&locks, &traces)).await.expect("bounded");
    assert!(matches!(outcome, Err(Error::Lost { why: LossReason::Expired, .. })), "{outcome:?}");
    assert!(traces.nobody_inside());
    free_at_once(&locks, "bounded", "its end").await;
}

#[lock(key = "renewed", locks = locks, ttl_ms = 300, renew = true, max_hold_ms = 1_500)]
async fn long(locks: &LockManager, lasts: Duration) -> Result<(), Error> {
    tokio::time::sleep(lasts).await;
    Ok(())
}

async fn a_renewed_call_outlives_its_lease_up_to_its_cap(arena: Arena) {
    let locks = arena.manager().await;
    long(&locks, ms(700)).await.expect("renewed");
    let outcome = timeout(LONG, long(&locks, LONG * 2)).await.expect("capped");
    assert!(matches!(outcome, Err(Error::Lost { why: LossReason::MaxHold, .. })), "{outcome:?}");
}

#[lock(key = "{name}", locks = locks)]
async fn named(locks: &LockManager, name: &str, ran: &AtomicBool) -> Result<(), Error> {
    ran.store(true, SeqCst);
    Ok(())
}

async fn a_bad_name_is_an_error_before_the_body_runs(arena: Arena) {
    let (locks, ran) = (arena.manager().await, AtomicBool::new(false));
    for bad in ["", "two\nlines", &"x".repeat(513)] {
        let outcome = named(&locks, bad, &ran).await;
        assert!(matches!(outcome, Err(Error::Invalid(_))), "{outcome:?}");
    }
    assert!(!ran.load(SeqCst));
}

#[lock(key = "fenced", locks = locks)]
async fn fenced(locks: &LockManager) -> Result<u64, Error> {
    async fn deep() -> u64 {
        current_fence().expect("inside").get()
    }
    let spawned = tokio::spawn(async { current_fence() }).await.expect("no panic");
    assert!(spawned.is_none(), "a task of its own holds nothing");
    Ok(deep().await)
}

async fn the_fence_is_at_hand_and_rises(arena: Arena) {
    let locks = arena.manager().await;
    let (first, second) = (fenced(&locks).await.expect("free"), fenced(&locks).await.expect("free"));
    assert!(first < second, "{first} {second}");
    assert!(current_fence().is_none());
}

/// Options with short timeouts.
fn impatient(arena: &Arena) -> Options {
    let mut options = arena.options();
    (options.request_timeout, options.outage_timeout) = (ms(300), ms(300));
    (options.max_release_retries, options.emergency_release_delay) = (0, ms(10));
    options
}

#[lock(key = "till", locks = locks, on_unavailable = "closed")]
async fn closed(locks: &LockManager) -> Result<bool, Error> {
    Ok(current_fence().is_some())
}

#[lock(key = "till", locks = locks, on_unavailable = "open")]
async fn open(locks: &LockManager) -> Result<bool, Error> {
    Ok(current_fence().is_some())
}

#[tokio::test]
async fn each_call_chooses_what_happens_without_a_store() {
    let arena = Arena::new(Kind::Redis).await;
    let locks = arena.manager_with(impatient(&arena)).await;
    assert!(closed(&locks).await.expect("reachable") && open(&locks).await.expect("reachable"));
    arena.server().kill9();
    let refused = closed(&locks).await;
    assert!(matches!(refused, Err(Error::Store { .. })), "{refused:?}");
    assert!(!open(&locks).await.expect("runs without protection"), "and without a fence");
    assert_eq!(locks.statistics().unprotected_runs, 1);
}

#[lock(key = "hidden", locks = locks)]
async fn kill_the_store(locks: &LockManager, arena: &Arena) -> Result<u32, Error> {
    arena.server().kill9();
    Ok(7)
}

#[tokio::test]
async fn a_release_that_fails_does_not_hide_the_result() {
    let arena = Arena::new(Kind::Redis).await;
    let locks = arena.manager_with(impatient(&arena)).await;
    assert_eq!(kill_the_store(&locks, &arena).await.expect("the body's own result"), 7);
}
