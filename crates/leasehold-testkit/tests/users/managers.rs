//! `LockManager` and `Guard` on every store.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use leasehold::events::EventKind;
use leasehold::inspect::{EvictMode, Evicted};
use leasehold::lease::{Token, Ttl};
use leasehold::{Error, Fence, Guard, LockManager, LossReason, Owner};
use leasehold_testkit::{Arena, on_every_store};
use tokio::time::timeout;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
/// A limit that is reached only if a test fails.
const LONG: Duration = Duration::from_secs(20);

on_every_store!(
    a_lock_has_one_holder_that_can_be_read,
    waiters_enter_in_order_without_overlap,
    a_dropped_guard_releases_the_lock,
    a_dropped_request_keeps_no_lock,
    a_waiter_that_gives_up_leaves_no_trace,
    waiting_ends_at_its_deadline,
    a_lease_is_renewed_while_the_guard_lives,
    a_lease_without_renewal_ends_and_is_reported,
    max_hold_ends_a_lease_that_is_renewed,
    a_late_release_does_not_touch_the_successor,
    a_late_renewal_does_not_touch_the_successor,
    an_eviction_that_names_an_old_holder_does_nothing,
    a_revoked_holder_and_its_successor_never_overlap,
    force_frees_at_once_and_notifies_the_holder,
    a_holder_can_be_asked_to_finish,
    extend_prolongs_and_is_recorded,
    a_lock_held_for_a_while_shows_its_fence,
    with_lock_releases_whatever_happens,
    with_lock_cancels_work_whose_lease_is_lost,
    work_may_borrow_and_be_spawned,
    a_panic_in_the_section_releases,
    polling_works_without_events,
    tasks_of_one_process_share_one_place_in_the_queue,
    unfenced_locks_exclude_too,
    shutdown_notifies_holders_and_releases_everything,
    bad_input_is_refused_before_anything_is_written,
    owner_and_stranger_release_at_once,
    releases_and_evictions_are_published,
    counters_reach_the_fleet,
    long_held_locks_can_be_listed,
    ten_tasks_never_meet_inside,
);

/// Waits until the queue has `wanted` waiters.
pub(crate) async fn wait_for_waiters(manager: &LockManager, name: &str, waiters: usize) {
    let waiting = async {
        while manager.info(name).await.expect("answered").waiters.len() != waiters {
            tokio::time::sleep(ms(1)).await;
        }
    };
    timeout(LONG, waiting).await.unwrap_or_else(|_| panic!("never {waiters} in line for {name}"));
}

async fn a_lock_has_one_holder_that_can_be_read(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let guard = a.lock("one").owner("alice").await.expect("free");
    assert!(guard.is_valid() && guard.is_protected() && guard.try_fence().is_some());
    assert!(b.try_lock("one").await.expect("answered").is_none());
    let Err(Error::NotAcquired { name, holder, store, waited }) = b.lock("one").no_wait().await else {
        panic!("held");
    };
    assert_eq!((name.as_str(), waited), ("one", Duration::ZERO));
    let holder = holder.expect("known");
    assert_eq!((holder.owner.task(), holder.id), ("alice", guard.holder_id()));
    assert_eq!(store, b.store());
    let info = b.info("one").await.expect("answered");
    assert_eq!(info.holder.expect("held").owner, Owner::named("alice").expect("valid"));
    assert!(b.ttl_left("one").await.expect("answered").is_some_and(|left| left > Duration::from_secs(25)));
    assert!(guard.release().await.expect("answered"));
    assert!(!a.is_locked("one").await.expect("answered"));
}

async fn waiters_enter_in_order_without_overlap(arena: Arena) {
    let first = arena.manager().await.lock("line").await.expect("free");
    let inside = Arc::new(AtomicUsize::new(0));
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for i in 0..5 {
        let manager = arena.manager().await;
        let (inside, order) = (inside.clone(), order.clone());
        let looker = manager.clone();
        tasks.push(tokio::spawn(async move {
            let guard = manager.lock("line").wait_up_to(LONG).await.expect("its turn");
            assert_eq!(inside.fetch_add(1, SeqCst), 0, "two holders at once");
            order.lock().expect("no panic before").push((i, guard.fence()));
            inside.fetch_sub(1, SeqCst);
            guard.release().await.expect("answered");
        }));
        // It is in the queue before the next one starts.
        wait_for_waiters(&looker, "line", i + 1).await;
    }
    assert!(first.release().await.expect("answered"));
    for task in tasks {
        timeout(LONG, task).await.expect("in time").expect("no panic");
    }
    let order = order.lock().expect("no panic before");
    assert_eq!(order.iter().map(|(i, _)| *i).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    assert!(order.is_sorted_by(|a, b| a.1 < b.1), "fences rise: {order:?}");
}

async fn a_dropped_guard_releases_the_lock(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    drop(a.lock("dropped").await.expect("free"));
    b.lock("dropped").wait_up_to(LONG).await.expect("given up").release().await.expect("answered");
}

async fn a_dropped_request_keeps_no_lock(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    // Dropped at every possible point: polled once more each time, until it is done.
    for polls in 0.. {
        let mut request = Box::pin(a.lock("cancelled").into_future());
        let mut done = None;
        for _ in 0..polls {
            if let Poll::Ready(guard) = poll_fn(|cx| Poll::Ready(request.as_mut().poll(cx))).await {
                done = Some(guard.expect("free"));
                break;
            }
            tokio::time::sleep(ms(1)).await;
        }
        drop(request);
        let finished = done.take().is_some();
        let guard = b.lock("cancelled").wait_up_to(LONG).await.expect("nothing is left behind");
        guard.release().await.expect("answered");
        if finished {
            break;
        }
    }
}

async fn a_waiter_that_gives_up_leaves_no_trace(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let guard = a.lock("given-up").await.expect("free");
    let Err(Error::NotAcquired { waited, .. }) = b.lock("given-up").wait_up_to(ms(100)).await else { panic!("held") };
    assert!(waited >= ms(100), "{waited:?}");
    wait_for_waiters(&a, "given-up", 0).await;
    guard.release().await.expect("answered");
    assert!(a.try_lock("given-up").await.expect("answered").is_some());
}

async fn waiting_ends_at_its_deadline(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let _guard = a.lock("deadline").await.expect("free");
    let began = std::time::Instant::now();
    assert!(b.lock("deadline").wait_up_to(ms(300)).optional().await.expect("answered").is_none());
    assert!(began.elapsed() >= ms(300) && began.elapsed() < ms(550), "{:?}", began.elapsed());
}

async fn a_lease_is_renewed_while_the_guard_lives(arena: Arena) {
    let manager = arena.manager().await;
    let guard = manager.lock("renewed").ttl(ms(300)).await.expect("free");
    let first = guard.valid_until();
    tokio::time::sleep(ms(900)).await;
    assert!(guard.valid_until() > first && guard.is_valid());
    assert_eq!(guard.loss(), None);
    assert!(guard.release().await.expect("answered"), "ours to the end");
}

async fn a_lease_without_renewal_ends_and_is_reported(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let guard = a.lock("ends").ttl(ms(200)).renew(false).await.expect("free");
    let until = guard.valid_until();
    assert_eq!(timeout(LONG, guard.lost()).await.expect("told"), LossReason::Expired);
    let late = until.until(leasehold::lease::Moment::now());
    assert!(late < ms(100), "told {late:?} late");
    assert!(!guard.is_valid() && guard.cancellation().is_cancelled());
    let next = b.lock("ends").wait_up_to(LONG).await.expect("free soon");
    assert!(!guard.release().await.expect("answered"), "not ours any more");
    assert!(next.is_valid() && next.release().await.expect("answered"));
}

async fn max_hold_ends_a_lease_that_is_renewed(arena: Arena) {
    let manager = arena.manager().await;
    let guard = manager.lock("max").ttl(ms(200)).max_hold(ms(500)).await.expect("free");
    let began = std::time::Instant::now();
    assert_eq!(timeout(LONG, guard.lost()).await.expect("told"), LossReason::MaxHold);
    assert!(began.elapsed() >= ms(450), "{:?}", began.elapsed());
}

async fn a_late_release_does_not_touch_the_successor(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let late = a.lock("late").renew(false).await.expect("free");
    arena.expire("late").await;
    let successor = b.lock("late").wait_up_to(LONG).await.expect("expired");
    assert!(late.fence() < successor.fence());
    assert!(!late.release().await.expect("answered"), "not owner");
    assert_eq!(a.statistics().ownership_violations, 1);
    assert_eq!(b.holder("late").await.expect("answered").expect("held").id, successor.holder_id());
    assert!(successor.release().await.expect("answered"));
}

async fn a_late_renewal_does_not_touch_the_successor(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let late = a.lock("late").renew(false).await.expect("free");
    arena.expire("late").await;
    let successor = b.lock("late").ttl(ms(5_000)).wait_up_to(LONG).await.expect("expired");
    assert!(matches!(late.extend(Duration::from_secs(600)).await, Err(Error::Lost { why: LossReason::Gone, .. })));
    assert_eq!(late.loss(), Some(LossReason::Gone));
    let token = late.token().clone();
    let renewed = a.lease("late", &token).expect("a name").renew(Ttl::default()).await;
    assert!(matches!(renewed, Err(Error::Lost { .. })), "{renewed:?}");
    assert!(b.ttl_left("late").await.expect("answered").expect("held") <= ms(5_000));
    assert!(successor.release().await.expect("answered"));
}

async fn an_eviction_that_names_an_old_holder_does_nothing(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let old = a.lock("evict").await.expect("free");
    let looked_at = old.holder_id();
    old.release().await.expect("answered");
    let free = a.evict("evict", looked_at, EvictMode::Force, "test").await.expect("answered");
    assert_eq!(free, Evicted::Free);
    let new = b.lock("evict").await.expect("free");
    for mode in [EvictMode::Revoke, EvictMode::Force] {
        let Evicted::ChangedHands(found) = a.evict("evict", looked_at, mode, "test").await.expect("answered") else {
            panic!("somebody else holds it");
        };
        assert_eq!(found.id, new.holder_id());
    }
    assert!(new.is_valid() && new.loss().is_none());
    assert!(new.release().await.expect("answered"));
}

async fn a_revoked_holder_and_its_successor_never_overlap(arena: Arena) {
    let (a, b, c) = (arena.manager().await, arena.manager().await, arena.manager().await);
    let inside = Arc::new(AtomicUsize::new(1));
    let holder = a.lock("revoked").ttl(ms(2_000)).await.expect("free");
    let waiter = tokio::spawn({
        let inside = inside.clone();
        async move {
            let guard = b.lock("revoked").wait_up_to(LONG).await.expect("its turn");
            assert_eq!(inside.fetch_add(1, SeqCst), 0, "two holders at once");
            guard
        }
    });
    wait_for_waiters(&c, "revoked", 1).await;
    let evicted = c.evict("revoked", holder.holder_id(), EvictMode::Revoke, "test").await.expect("answered");
    assert!(matches!(evicted, Evicted::Done(old) if old.id == holder.holder_id()));
    assert_eq!(timeout(LONG, holder.lost()).await.expect("told"), LossReason::Revoked);
    assert!(!holder.is_valid());
    assert!(c.holder("revoked").await.expect("answered").is_some_and(|h| h.revoked));
    // The work needs a moment to stop and holds the lock until then.
    tokio::time::sleep(ms(50)).await;
    inside.fetch_sub(1, SeqCst);
    assert!(matches!(holder.extend(ms(1_000)).await, Err(Error::Lost { why: LossReason::Revoked, .. })));
    assert!(holder.release().await.expect("answered"), "it was still its own to give back");
    let next = timeout(LONG, waiter).await.expect("handed on").expect("no overlap");
    assert!(next.release().await.expect("answered"));
}

async fn force_frees_at_once_and_notifies_the_holder(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let holder = a.lock("forced").await.expect("free");
    let evicted = b.evict("forced", holder.holder_id(), EvictMode::Force, "it hangs").await.expect("answered");
    assert!(matches!(evicted, Evicted::Done(_)));
    let next = b.lock("forced").no_wait().await.expect("free at once");
    assert_eq!(timeout(LONG, holder.lost()).await.expect("told"), LossReason::Revoked);
    assert!(holder.fence() < next.fence());
    assert!(!holder.release().await.expect("answered"));
    assert!(next.release().await.expect("answered"));
}

async fn a_holder_can_be_asked_to_finish(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let holder = a.lock("finish").await.expect("free");
    let asked = b.ask_to_finish("finish", holder.holder_id(), "over an hour").await.expect("answered");
    assert!(matches!(asked, leasehold::inspect::FinishRequest::Delivered(_)), "{asked:?}");
    assert_eq!(timeout(LONG, holder.asked_to_finish()).await.expect("told"), "over an hour");
    assert!(holder.is_valid(), "asked, not told");
    let stranger = Token::random().holder_id();
    let asked = b.ask_to_finish("finish", stranger, "").await.expect("answered");
    assert!(matches!(asked, leasehold::inspect::FinishRequest::ChangedHands(_)), "{asked:?}");
    holder.release().await.expect("answered");
    assert_eq!(
        b.ask_to_finish("finish", stranger, "").await.expect("answered"),
        leasehold::inspect::FinishRequest::Free
    );
}

async fn extend_prolongs_and_is_recorded(arena: Arena) {
    let manager = arena.manager().await;
    let guard = manager.lock("extend").ttl(ms(1_000)).renew(false).await.expect("free");
    guard.extend(Duration::from_secs(60)).await.expect("prolonged");
    assert!(guard.remaining() > Duration::from_secs(50));
    let holder = manager.holder("extend").await.expect("answered").expect("held");
    assert_eq!(holder.ttl, Some(Duration::from_secs(60)));
    assert!(holder.ttl_left.expect("ends") > Duration::from_secs(50));
    guard.extend(ms(1_000)).await.expect("answered");
    assert!(guard.remaining() > Duration::from_secs(50), "never shortened");
}

async fn a_lock_held_for_a_while_shows_its_fence(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    // Long before its first renewal is due.
    let guard = a.lock("gpu_lock:0").ttl(Duration::from_secs(3_600)).await.expect("free");
    let shown = async {
        while b.holder("gpu_lock:0").await.expect("answered").expect("held").fence != guard.try_fence() {
            tokio::time::sleep(ms(10)).await;
        }
    };
    timeout(LONG, shown).await.expect("its fence is written");
}

async fn with_lock_releases_whatever_happens(arena: Arena) {
    let manager = arena.manager().await;
    let failed: Result<Result<(), &str>, Error> = manager.with_lock("work", async |_| Err("the work's own")).await;
    assert_eq!(failed.expect("the lock was fine"), Err("the work's own"));
    assert!(!manager.is_locked("work").await.expect("answered"));
    let told = manager.with_lock("work", async |guard| guard.fence().get()).await;
    assert!(told.expect("answered") > 0);
}

/// Futures that run work under a lock are `Send`, even if the work borrows from the task and its guard, so that they can be
/// part of tasks and handlers.
async fn work_may_borrow_and_be_spawned(arena: Arena) {
    async fn write(log: &Mutex<Vec<String>>, what: &str, guard: &Guard) -> usize {
        tokio::task::yield_now().await;
        let mut log = log.lock().expect("no panic");
        log.push(format!("{what} under {}", guard.fence()));
        log.len()
    }
    fn boxed<'a>(
        locks: &'a LockManager,
        log: &'a Mutex<Vec<String>>,
    ) -> Pin<Box<dyn Future<Output = Result<usize, Error>> + Send + 'a>> {
        Box::pin(async move { locks.with_lock("a", async |guard| write(log, "boxed", guard).await).await })
    }
    let locks = arena.manager().await;
    let task = tokio::spawn(async move {
        let (log, name) = (Mutex::new(Vec::new()), String::from("a"));
        let mut count = 0;
        locks.with_lock(&*name, async |guard| count += write(&log, &name, guard).await).await?;
        locks.lock(&*name).run(async |guard| count += write(&log, &name, guard).await).await?;
        locks.lock(&*name).run_reentrant(async |guard| count += write(&log, &name, guard).await).await?;
        count += boxed(&locks, &log).await?;
        let pool = locks.pool("pool", 0..2)?;
        pool.acquire().run(async |permit| count += write(&log, &name, permit).await).await?;
        pool.any(2).run(async |permits| count += write(&log, &name, &permits[1]).await).await?;
        locks.once("id").run(async |guard| write(&log, &name, guard).await).await?;
        let led = locks.elect("boss").run(async |term| {
            tokio::task::yield_now().await;
            Ok::<_, Error>(term.fence().get() > 0 && !name.is_empty())
        });
        assert!(led.await?);
        Ok::<_, Error>((count, log.into_inner().expect("no panic").len()))
    });
    assert_eq!(timeout(LONG, task).await.expect("in time").expect("no panic").expect("answered"), (21, 7));
}

async fn with_lock_cancels_work_whose_lease_is_lost(arena: Arena) {
    let manager = arena.manager().await;
    let steps = Arc::new(AtomicUsize::new(0));
    let request = manager.lock("lost").ttl(ms(200)).renew(false);
    let outcome = request
        .run(async |_| {
            loop {
                steps.fetch_add(1, SeqCst);
                tokio::time::sleep(ms(10)).await;
            }
        })
        .await;
    let outcome: Result<(), Error> = outcome;
    assert!(matches!(outcome, Err(Error::Lost { why: LossReason::Expired, .. })), "{outcome:?}");
    let steps_then = steps.load(SeqCst);
    assert!(steps_then > 3);
    tokio::time::sleep(ms(50)).await;
    assert_eq!(steps.load(SeqCst), steps_then, "the work has ended");
}

async fn a_panic_in_the_section_releases(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let task = tokio::spawn(async move {
        let _guard = a.lock("panic").await.expect("free");
        panic!("on purpose");
    });
    assert!(task.await.is_err());
    let began = std::time::Instant::now();
    b.lock("panic").wait_up_to(LONG).await.expect("released").release().await.expect("answered");
    assert!(began.elapsed() < LONG / 2);
}

async fn polling_works_without_events(arena: Arena) {
    let mut options = arena.options();
    options.notifications = false;
    let (a, b) = (arena.manager().await, arena.manager_with(options).await);
    let guard = a.lock("polled").await.expect("free");
    let waiter = tokio::spawn({
        let b = b.clone();
        async move { b.lock("polled").wait_up_to(LONG).retry_every(ms(20)).await }
    });
    wait_for_waiters(&b, "polled", 1).await;
    assert!(!b.info("polled").await.expect("answered").waiters[0].listens);
    guard.release().await.expect("answered");
    let guard = timeout(LONG, waiter).await.expect("in time").expect("no panic").expect("its turn");
    assert!(guard.release().await.expect("answered"));
}

async fn tasks_of_one_process_share_one_place_in_the_queue(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let first = a.lock("room").await.expect("free");
    let order = std::sync::Mutex::new(Vec::new());
    let one = async |i| {
        let guard = b.lock("room").owner(format!("task-{i}")).wait_up_to(LONG).await.expect("its turn");
        order.lock().expect("no panic before").push(i);
        // The record has the owner at the latest when the confirmation has arrived.
        guard.extend(ms(30_000)).await.expect("ours");
        let confirmed = b.holder("room").await.expect("answered").expect("held");
        assert_eq!(confirmed.owner.task(), format!("task-{i}"));
        guard.release().await.expect("answered");
    };
    // Once there is a queue, one task polls them in order, so their requests are in order.
    let others = async {
        wait_for_waiters(&a, "room", 1).await;
        futures_util::future::join_all((1..6).map(&one)).await
    };
    let release = async {
        wait_for_waiters(&a, "room", 1).await;
        // The other tasks ask too, but add nothing to the queue.
        tokio::time::sleep(ms(100)).await;
        assert_eq!(a.info("room").await.expect("answered").waiters.len(), 1, "one entry per process and name");
        first.release().await.expect("answered");
    };
    timeout(LONG, async { tokio::join!(one(0), others, release) }).await.expect("in time");
    assert_eq!(*order.lock().expect("no panic before"), [0, 1, 2, 3, 4, 5]);
    assert!(!a.is_locked("room").await.expect("answered"));
}

async fn unfenced_locks_exclude_too(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let guard = a.lock("plain").unfenced().await.expect("free");
    assert_eq!((guard.try_fence(), guard.fence()), (None, Fence::NONE));
    assert!(b.try_lock("plain").await.expect("answered").is_none());
    assert!(b.lock("plain").unfenced().no_wait().optional().await.expect("answered").is_none());
    let waiter = tokio::spawn(async move { b.lock("plain").unfenced().wait_up_to(LONG).await });
    wait_for_waiters(&a, "plain", 1).await;
    guard.release().await.expect("answered");
    let guard = timeout(LONG, waiter).await.expect("in time").expect("no panic").expect("its turn");
    assert_eq!(guard.try_fence(), None, "asked for none");
    assert!(guard.release().await.expect("answered"));
}

async fn shutdown_notifies_holders_and_releases_everything(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let guard = a.lock("down").await.expect("free");
    let waiting = tokio::spawn({
        let a = a.clone();
        async move { a.lock("down").await }
    });
    wait_for_waiters(&b, "down", 1).await;
    let worker = tokio::spawn(async move {
        let why = guard.lost().await;
        drop(guard);
        why
    });
    timeout(LONG, a.shutdown()).await.expect("in time");
    assert_eq!(worker.await.expect("no panic"), LossReason::Shutdown);
    assert!(matches!(waiting.await.expect("no panic"), Err(Error::ShutDown { .. })));
    assert!(matches!(a.lock("down").await, Err(Error::ShutDown { .. })));
    assert!(b.try_lock("down").await.expect("answered").is_some(), "given back");
}

async fn bad_input_is_refused_before_anything_is_written(arena: Arena) {
    let manager = arena.manager().await;
    assert!(matches!(manager.lock("").await, Err(Error::Invalid(_))));
    assert!(matches!(manager.lock("x".repeat(513)).await, Err(Error::Invalid(_))));
    assert!(matches!(manager.lock("a\u{1b}[2J").await, Err(Error::Invalid(_))));
    assert!(matches!(manager.lock("a").ttl(ms(49)).await, Err(Error::Invalid(_))));
    assert!(matches!(manager.lock("a").ttl(Duration::MAX).await, Err(Error::Invalid(_))));
    assert!(matches!(manager.lock("a").owner("\n").await, Err(Error::Invalid(_))));
    assert!(matches!(manager.holder("").await, Err(Error::Invalid(_))));
    assert!(manager.list("", None, 10).await.expect("answered").locks.is_empty());
}

async fn owner_and_stranger_release_at_once(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    for _ in 0..50 {
        let guard = a.lock("gpu_lock:0").await.expect("free");
        let stranger = tokio::spawn({
            let b = b.clone();
            async move { b.lease("gpu_lock:0", &Token::random()).expect("a name").release_without_event().await }
        });
        let owner = tokio::spawn(guard.release());
        assert!(owner.await.expect("no panic").expect("answered"));
        assert!(!stranger.await.expect("no panic").expect("answered"));
        assert!(!a.is_locked("gpu_lock:0").await.expect("answered"));
    }
    assert_eq!(b.statistics().ownership_violations, 50);
    assert_eq!(a.statistics().ownership_violations, 0);
}

async fn releases_and_evictions_are_published(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let mut events = b.events().await.expect("following");
    let mut next = async |kind: EventKind| {
        let event = timeout(LONG, events.recv()).await.expect("told").expect("open");
        assert_eq!(event.kind, kind, "{event:?}");
        event
    };
    // Every release of a raw name is published, even after a short hold.
    let guard = a.lock("gpu_lock:3").owner("tts").await.expect("free");
    let id = guard.holder_id();
    guard.release().await.expect("answered");
    let event = next(EventKind::Released).await;
    assert_eq!((event.name.as_str(), event.reason.as_str()), ("gpu_lock:3", "normal"));
    assert_eq!(event.holder_id, id.to_string());
    assert!(event.owner.starts_with("tts@"));
    // Others are published once they have lasted half a second.
    let guard = a.lock("long").await.expect("free");
    assert_eq!(next(EventKind::Granted).await.name, "long");
    b.evict("long", guard.holder_id(), EvictMode::Force, "forced_by_monitor").await.expect("answered");
    let mut kinds = Vec::new();
    while kinds.len() < 2 {
        let event = timeout(LONG, events.recv()).await.expect("told").expect("open");
        if event.kind == EventKind::Forced {
            assert_eq!(event.reason, "forced_by_monitor");
        }
        kinds.push(event.kind);
    }
    assert!(kinds.contains(&EventKind::Forced) && kinds.contains(&EventKind::Lost), "{kinds:?}");
}

async fn counters_reach_the_fleet(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    for _ in 0..3 {
        a.lock("counted").await.expect("free").release().await.expect("answered");
    }
    a.shutdown().await;
    let counters = b.fleet_counters().await.expect("answered");
    let total = counters.iter().find(|(name, _)| name == "total_locks").map(|(_, n)| *n);
    assert_eq!(total, Some(3), "{counters:?}");
}

async fn long_held_locks_can_be_listed(arena: Arena) {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let guard = a.lock("long-held").await.expect("free");
    timeout(LONG, async {
        while b.long_held().await.expect("answered").iter().all(|(name, _)| name.as_str() != "long-held") {
            tokio::time::sleep(ms(20)).await;
        }
    })
    .await
    .expect("entered within half a second or so");
    let page = b.list("long", None, 10).await.expect("answered");
    assert_eq!(page.locks.len(), 1);
    assert_eq!(page.locks[0].1.id, guard.holder_id());
    guard.release().await.expect("answered");
    assert!(b.long_held().await.expect("answered").is_empty(), "readers check each entry against the lock");
}

async fn ten_tasks_never_meet_inside(arena: Arena) {
    let inside = Arc::new(AtomicUsize::new(0));
    let last_fence = Arc::new(AtomicU64::new(0));
    let mut tasks = Vec::new();
    let managers = [arena.manager().await, arena.manager().await, arena.manager().await];
    for i in 0..10 {
        let (manager, inside, last_fence) = (managers[i % 3].clone(), inside.clone(), last_fence.clone());
        tasks.push(tokio::spawn(async move {
            for _ in 0..50 {
                let guard = manager.lock("busy").wait_up_to(LONG).await.expect("its turn");
                assert_eq!(inside.fetch_add(1, SeqCst), 0, "two holders at once");
                let fence = guard.fence().get();
                assert!(last_fence.swap(fence, SeqCst) < fence, "fence did not rise");
                tokio::task::yield_now().await;
                inside.fetch_sub(1, SeqCst);
                assert!(guard.release().await.expect("answered"));
            }
        }));
    }
    for task in tasks {
        timeout(Duration::from_secs(60), task).await.expect("in time").expect("no overlap");
    }
    assert!(managers[0].list("", None, 10).await.expect("answered").locks.is_empty(), "no key left");
}
