//! Futures that are dropped at every possible point, and releases that race with renewals.

use std::future::{Future, IntoFuture, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::Poll;
use std::time::Duration;

use leasehold::lease::Ttl;
use leasehold::{Error, Guard, LockManager};
use leasehold_testkit::{Arena, Kind, full_or, report};

use crate::common::*;

/// Polls a future `polls` times with a pause after each, then drops it. Returns whether it was done before.
async fn poll_and_drop<T>(mut future: Pin<Box<dyn Future<Output = T> + Send>>, polls: usize, pause: Duration) -> bool {
    for _ in 0..polls {
        if poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await.is_ready() {
            return true;
        }
        // Without a pause there is certainly no reply yet.
        if pause > Duration::ZERO {
            tokio::time::sleep(pause).await;
        }
    }
    false
}

/// The pauses between polls: from "no reply yet" to "a reply that was not read".
const PAUSES_US: [u64; 5] = [0, 60, 200, 700, 2_000];

/// The calls that are dropped.
#[derive(Clone, Copy, Debug)]
enum Call {
    Acquire,
    /// For a lock that another holder releases at about the same time.
    Wait,
    Extend,
    Release,
}

/// Drops a call after every number of polls, with every pause. Returns the number of points.
async fn drop_everywhere(call: Call, holder: LockManager, other: LockManager, name: String) -> usize {
    let mut points = 0;
    for pause in PAUSES_US.map(Duration::from_micros) {
        // Without a pause no reply arrives between two polls, so a few polls are enough.
        for polls in 0..if pause.is_zero() { 4 } else { 64 } {
            points += 1;
            if drop_once(call, &holder, &other, &name, polls, pause).await {
                break;
            }
        }
    }
    points
}

async fn drop_once(
    call: Call,
    holder: &LockManager,
    other: &LockManager,
    name: &str,
    polls: usize,
    pause: Duration,
) -> bool {
    let take = async |manager: &LockManager| -> Guard {
        // What the previous point left behind is released soon; the lease of 30 s is far longer.
        let free = manager.lock(name).wait_up_to(ms(5_000)).await;
        free.unwrap_or_else(|error| panic!("{call:?} dropped after {polls} polls, {pause:?} apart: {error}"))
    };
    match call {
        Call::Acquire => poll_and_drop(holder.lock(name).into_future(), polls, pause).await,
        Call::Wait => {
            let guard = take(other).await;
            let waiting = tokio::spawn(poll_and_drop(holder.lock(name).into_future(), polls, pause));
            // So that the grant sometimes arrives during the drop.
            tokio::time::sleep(pause * u32::try_from(polls).expect("few")).await;
            drop(guard);
            waiting.await.expect("no panic")
        }
        Call::Extend => {
            let guard = Arc::new(take(holder).await);
            let future = Box::pin({
                let guard = guard.clone();
                async move { guard.extend(ms(40_000)).await }
            });
            let done = poll_and_drop(future, polls, pause).await;
            assert!(guard.is_valid(), "an extend that was dropped ends no lease");
            done
        }
        Call::Release => {
            let guard = take(holder).await;
            poll_and_drop(Box::pin(guard.release()), polls, pause).await
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f06_a_dropped_future_leaves_no_lock() {
    let wanted = full_or(240, 1_000);
    for kind in [Kind::Memory, Kind::Sqlite, Kind::Redis] {
        let arena = Arena::new(kind).await;
        let (holder, other) = (arena.manager().await, arena.manager().await);
        let mut points = 0;
        let mut round = 0;
        while points < wanted {
            let mut tasks = Vec::new();
            for call in [Call::Acquire, Call::Wait, Call::Extend, Call::Release] {
                for i in 0..4 {
                    let name = format!("dropped-{call:?}-{round}-{i}");
                    tasks.push(tokio::spawn(drop_everywhere(call, holder.clone(), other.clone(), name)));
                }
            }
            for task in tasks {
                points += tokio::time::timeout(LONG, task).await.expect("no hang").expect("no panic");
            }
            round += 1;
        }
        // Without a shutdown: what was dropped is released by itself.
        let gone = assert_no_locks_left(&other).await;
        if kind == Kind::Redis {
            assert_no_keys_left(arena.server()).await;
        }
        assert_eq!(holder.statistics().lost_leases, 0);
        report("F06", format!("{kind:?}: 0 keys left by {points} dropped futures, {gone:.0?} after the last"));
    }
}

/// A renewal is in flight when the lock is released.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f10_a_renewal_in_flight_resurrects_nothing() {
    let times = full_or(120, 1_000);
    for kind in [Kind::Memory, Kind::Sqlite, Kind::Redis] {
        let arena = Arena::new(kind).await;
        let mut options = arena.options();
        // The shortest renewal interval, so that releases also race with renewals of the renewal task.
        options.heartbeat = ms(1);
        let (manager, looker) = (arena.manager_with(options).await, arena.manager().await);
        let resurrected = Arc::new(AtomicUsize::new(0));
        let (before, after) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let mut tasks = Vec::new();
        for lane in 0..8 {
            let (manager, looker, resurrected) = (manager.clone(), looker.clone(), resurrected.clone());
            let (before, after) = (before.clone(), after.clone());
            tasks.push(tokio::spawn(async move {
                for i in 0..times / 8 {
                    let name = format!("raced-{lane}-{i}");
                    let guard = manager.lock(name.as_str()).ttl(TTL).no_wait().await.expect("free");
                    // Sent without waiting for its reply: the release follows or overtakes it, at once or a little later.
                    let pause = Duration::from_micros(PAUSES_US[i % PAUSES_US.len()]);
                    {
                        let mut extend = Box::pin(guard.extend(ms(20_000)));
                        let _ = poll_fn(|cx| Poll::Ready(extend.as_mut().poll(cx))).await;
                        tokio::time::sleep(pause).await;
                    }
                    // And one on another connection, so its order relative to the release is not fixed.
                    let token = guard.token().clone();
                    let lease = looker.lease(name.as_str(), &token).expect("a name");
                    let renew = lease.renew(Ttl::default());
                    let (released, renewed) = if i % 2 == 0 {
                        tokio::join!(guard.release(), renew)
                    } else {
                        let (renewed, released) = tokio::join!(renew, guard.release());
                        (released, renewed)
                    };
                    assert!(released.expect("answered"), "its own until now");
                    match renewed {
                        Ok(_) => before.fetch_add(1, SeqCst),
                        Err(Error::Lost { .. }) => after.fetch_add(1, SeqCst),
                        Err(other) => panic!("{other}"),
                    };
                    resurrected.fetch_add(usize::from(looker.is_locked(&name).await.expect("answered")), SeqCst);
                }
            }));
        }
        for task in tasks {
            tokio::time::timeout(LONG, task).await.expect("no hang").expect("no panic");
        }
        // A late renewal would have arrived by now.
        tokio::time::sleep(ms(100)).await;
        let left = looker.list("raced", None, 10).await.expect("answered").locks;
        assert!(left.is_empty(), "{left:?}");
        assert_eq!(resurrected.load(SeqCst), 0);
        if kind == Kind::Redis {
            assert_no_keys_left(arena.server()).await;
        }
        let (before, after) = (before.load(SeqCst), after.load(SeqCst));
        assert!(after > 0, "no renewal ever came after its release: nothing was raced");
        let total = before + after;
        report(
            "F10",
            format!("{kind:?}: 0 of {total} released locks resurrected; {after} renewals came after the release"),
        );
    }
}
