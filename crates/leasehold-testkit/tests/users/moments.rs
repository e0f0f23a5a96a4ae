//! Events between two steps: a pause between a grant and its use, a message that arrives before its guard, a store that hangs
//! while a lease ends.

use std::future::{IntoFuture, poll_fn};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use leasehold::inspect::EvictMode;
use leasehold::lease::{Moment, Token, Ttl};
use leasehold::store::memory::MemoryWorld;
use leasehold::store::{AcquireRequest, Store};
use leasehold::{LockManager, LockName, LossReason, Options, Owner};
use leasehold_testkit::{Arena, RedisServer, on_every_store};
use tokio::time::timeout;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
/// A limit that is reached only if a test fails.
const LONG: Duration = Duration::from_secs(20);

on_every_store!(a_lease_that_ended_before_its_task_looked_is_no_guard, a_wait_that_is_over_brings_no_ended_lease);

/// Creates a waiting request that is not polled any more, like that of a stopped process, and returns when the lease of its
/// grant has ended.
async fn handed_over_and_ended(
    arena: &Arena,
    wait: Duration,
) -> std::pin::Pin<Box<dyn Future<Output = Result<leasehold::Guard, leasehold::Error>> + Send>> {
    let (a, b) = (arena.manager().await, arena.manager().await);
    let first = a.lock("stopped").await.expect("free");
    let mut request = b.lock("stopped").ttl(ms(200)).renew(false).wait_up_to(wait).into_future();
    let look = async {
        while a.info("stopped").await.expect("answered").waiters.is_empty() {
            assert!(poll_fn(|cx| Poll::Ready(request.as_mut().poll(cx))).await.is_pending(), "held");
            tokio::time::sleep(ms(1)).await;
        }
    };
    timeout(LONG, look).await.expect("it stands in line");
    let old = first.holder_id();
    assert!(first.release().await.expect("answered"));
    // Granted to a task that is not polled, until the lease has ended.
    timeout(LONG, async {
        while a.holder("stopped").await.expect("answered").is_some_and(|h| h.id != old)
            || b.statistics().lost_leases == 0
        {
            tokio::time::sleep(ms(5)).await;
        }
    })
    .await
    .expect("it ends by itself");
    request
}

async fn a_lease_that_ended_before_its_task_looked_is_no_guard(arena: Arena) {
    let request = handed_over_and_ended(&arena, LONG).await;
    let guard = timeout(LONG, request).await.expect("in time").expect("asked for again, and free");
    assert!(guard.is_valid() && guard.loss().is_none(), "{guard:?} {:?}", guard.loss());
    assert!(guard.release().await.expect("answered"), "ours");
}

async fn a_wait_that_is_over_brings_no_ended_lease(arena: Arena) {
    let request = handed_over_and_ended(&arena, ms(250)).await;
    tokio::time::sleep(ms(250)).await;
    match timeout(LONG, request).await.expect("in time") {
        Ok(guard) => assert!(guard.is_valid(), "{guard:?} {:?}", guard.loss()),
        Err(error) => assert!(matches!(error, leasehold::Error::NotAcquired { .. }), "{error}"),
    }
}

/// A lock in memory that a plain store holds, while a task of the manager waits for it. The runtime has one thread and the
/// store never awaits, so changes here take effect before any task runs.
struct Line {
    store: Arc<dyn Store>,
    held: AcquireRequest,
    waiting: tokio::task::JoinHandle<leasehold::Guard>,
}

async fn line() -> Line {
    let world = MemoryWorld::new();
    let store: Arc<dyn Store> = Arc::new(world.open());
    let manager = LockManager::with_store(Arc::new(world.open()), Options::default());
    let held = AcquireRequest {
        name: LockName::new("early").expect("a name"),
        token: Token::random(),
        ttl: Ttl::default(),
        owner: Owner::default(),
        fenced: true,
        listens: true,
        since_ms: 1,
    };
    store.try_acquire(&held).await.expect("answered");
    let request = manager.lock("early").wait_up_to(LONG);
    let waiting = tokio::spawn(async move {
        let _manager = manager;
        request.await.expect("its turn")
    });
    while store.queue(&held.name).await.expect("answered").is_empty() {
        tokio::task::yield_now().await;
    }
    Line { store, held, waiting }
}

#[tokio::test(flavor = "current_thread")]
async fn a_request_to_finish_that_arrives_before_the_guard_is_reported() {
    let Line { store, held, waiting } = line().await;
    store.release(&held.name, &held.token).await.expect("answered");
    let next = store.holder(&held.name).await.expect("answered").expect("handed on");
    let asked = store.ask_to_finish(&held.name, next.id, "at once").await.expect("answered");
    assert!(matches!(asked, leasehold::inspect::FinishRequest::Delivered(_)), "{asked:?}");
    let guard = waiting.await.expect("no panic");
    assert_eq!(guard.holder_id(), next.id, "the very one that was asked");
    let told = timeout(ms(500), guard.asked_to_finish()).await;
    assert_eq!(told.as_deref(), Ok("at once"));
}

#[tokio::test(flavor = "current_thread")]
async fn a_revocation_that_comes_before_the_guard_is_not_lost() {
    for mode in [EvictMode::Revoke, EvictMode::Force] {
        let Line { store, held, waiting } = line().await;
        store.release(&held.name, &held.token).await.expect("answered");
        let next = store.holder(&held.name).await.expect("answered").expect("handed on");
        store.evict(&held.name, next.id, mode).await.expect("answered");
        let guard = timeout(LONG, waiting).await.expect("in time").expect("no panic");
        assert_ne!(guard.holder_id(), next.id, "{mode:?}: what was taken away is not given to a task");
        assert!(guard.is_valid(), "asked for again");
    }
}

/// Returns how long after a moment a guard was notified. Fails if it was before.
async fn told_after(guard: &leasehold::Guard, end: Moment) -> (LossReason, Duration) {
    let why = timeout(LONG, guard.lost()).await.expect("told");
    let now = Moment::now();
    assert!(now >= end, "told {:?} before the end", now.until(end));
    (why, end.until(now))
}

const LATE: Duration = Duration::from_millis(50);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_max_hold_is_noticed_on_time_while_the_store_hangs() {
    let server = RedisServer::start().await;
    let manager = LockManager::connect_with(&server.url(), options()).await.expect("a manager");
    let asked = Moment::now();
    let guard = manager.lock("max").ttl(ms(3_000)).max_hold(ms(1_400)).await.expect("free");
    let granted = Moment::now();
    // The renewal after a second gets no reply.
    server.pause();
    let (why, late) = told_after(&guard, asked + ms(1_400)).await;
    assert_eq!(why, LossReason::MaxHold);
    assert!(late < asked.until(granted) + LATE, "told {late:?} late");
    server.resume();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_lease_is_noticed_on_time_while_a_renewal_gets_no_reply() {
    let server = RedisServer::start().await;
    let mut options = options();
    // Far beyond the lease, so only its end can show the loss.
    options.request_timeout = Duration::from_secs(60);
    let manager = LockManager::connect_with(&server.url(), options).await.expect("a manager");
    let guard = manager.lock("ends").ttl(ms(1_500)).await.expect("free");
    let began = Instant::now();
    server.pause();
    let (why, late) = told_after(&guard, guard.valid_until()).await;
    assert_eq!(why, LossReason::Expired);
    assert!(late < LATE, "told {late:?} late");
    assert!(began.elapsed() > ms(1_000));
    server.resume();
}

fn options() -> Options {
    let mut options = Options::default();
    options.journal = None;
    options
}
