//! Extreme durations work and cause no panics.

use std::time::Duration;

use leasehold::lease::Token;
use leasehold::store::{StoreError, StoreErrorKind};
use leasehold::{Error, LossReason};
use leasehold_testkit::{Arena, on_every_store};
use tokio::time::timeout;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
/// A limit that is reached only if a test fails.
const LONG: Duration = Duration::from_secs(20);
const EXTREMES: [Duration; 5] =
    [Duration::ZERO, Duration::from_nanos(1), ms(1), Duration::from_secs(u64::MAX), Duration::MAX];

on_every_store!(
    any_wait_and_any_pause_hand_the_lock_on,
    extreme_waits_end_on_time,
    extreme_max_holds_end_on_time,
    any_options_are_lived_with,
);

/// Checks that a waiter with these pauses gets the lock when it is free, or reports that it did not wait.
async fn any_wait_and_any_pause_hand_the_lock_on(arena: Arena) {
    let mut polls = arena.options();
    polls.notifications = false;
    let (a, told, polling) = (arena.manager().await, arena.manager().await, arena.manager_with(polls).await);
    for wait in EXTREMES {
        for pause in EXTREMES {
            for waiter in [&told, &polling] {
                let guard = a.lock("extreme").wait_up_to(LONG).await.expect("free");
                let request = waiter.lock("extreme").wait_up_to(wait).retry_every(pause);
                let waiting = tokio::spawn(request.into_future());
                if wait > LONG {
                    timeout(LONG, async {
                        while a.info("extreme").await.expect("answered").waiters.is_empty() {
                            tokio::task::yield_now().await;
                        }
                    })
                    .await
                    .expect("it stands in line");
                    guard.release().await.expect("answered");
                    let next = timeout(LONG, waiting).await.expect("in time").expect("no panic").expect("its turn");
                    next.release().await.expect("answered");
                } else {
                    let outcome = timeout(LONG, waiting).await.expect("in time").expect("no panic");
                    // A call returns by its deadline even if a busy machine delays the store's reply.
                    let unanswered = |error: &StoreError| error.kind() == StoreErrorKind::NoAnswer;
                    let ended = match &outcome {
                        Err(Error::NotAcquired { .. }) => true,
                        Err(Error::Store { source, .. }) => unanswered(source),
                        _ => false,
                    };
                    assert!(ended, "{wait:?} {pause:?}: {outcome:?}");
                    guard.release().await.expect("answered");
                }
            }
        }
    }
}

async fn extreme_waits_end_on_time(arena: Arena) {
    let a = arena.manager().await;
    for pause in EXTREMES {
        for (poll, max_poll) in
            [(Duration::MAX, Duration::MAX), (Duration::ZERO, Duration::ZERO), (ms(50), Duration::MAX)]
        {
            let mut options = arena.options();
            (options.poll_interval, options.max_poll_interval) = (poll, max_poll);
            let b = arena.manager_with(options).await;
            let guard = a.lock("nobody").wait_up_to(LONG).await.expect("free");
            let began = std::time::Instant::now();
            let token = Token::random();
            let outcome = b.lock("nobody").retry_every(pause).wait_up_to(ms(30)).under_token(&token).await;
            assert!(matches!(outcome, Err(Error::NotAcquired { .. })), "{outcome:?}");
            let outcome = b.lock("nobody").wait_up_to(ms(30)).under_token(&token).await;
            assert!(matches!(outcome, Err(Error::NotAcquired { .. })), "{outcome:?}");
            assert!(began.elapsed() >= ms(60), "{:?}", began.elapsed());
            guard.release().await.expect("answered");
            b.shutdown().await;
        }
    }
}

async fn extreme_max_holds_end_on_time(arena: Arena) {
    let manager = arena.manager().await;
    for hold in EXTREMES {
        let guard = manager.lock("hold").wait_up_to(LONG).max_hold(hold).await.expect("free");
        if hold > LONG {
            assert_eq!(timeout(ms(50), guard.lost()).await.ok(), None, "{hold:?}");
            assert!(guard.is_valid());
        } else {
            assert_eq!(timeout(LONG, guard.lost()).await.expect("told"), LossReason::MaxHold, "{hold:?}");
        }
        assert!(matches!(guard.extend(Duration::MAX).await, Err(Error::Invalid(_))), "a ttl has its bounds");
        guard.release().await.expect("answered");
    }
}

async fn any_options_are_lived_with(arena: Arena) {
    for extreme in [Duration::ZERO, Duration::MAX] {
        let mut options = arena.options();
        options.outage_timeout = extreme;
        options.heartbeat = extreme;
        options.recheck_interval = extreme;
        options.emergency_release_delay = extreme;
        if extreme == Duration::MAX {
            options.request_timeout = extreme;
        }
        let (a, b) = (arena.manager_with(options.clone()).await, arena.manager_with(options).await);
        let guard = a.lock("any").ttl(ms(500)).await.expect("free");
        assert!(b.try_lock("any").await.expect("answered").is_none());
        let waiting = tokio::spawn(b.lock("any").wait_up_to(Duration::MAX).into_future());
        timeout(LONG, async {
            while a.info("any").await.expect("answered").waiters.is_empty() {
                tokio::time::sleep(ms(1)).await;
            }
        })
        .await
        .expect("it stands in line");
        // Longer than the lease, which is renewed.
        tokio::time::sleep(ms(700)).await;
        assert!(guard.is_valid());
        drop(guard);
        let guard = timeout(LONG, waiting).await.expect("in time").expect("no panic").expect("its turn");
        assert!(guard.release().await.expect("answered"));
        timeout(LONG, async { tokio::join!(a.shutdown(), b.shutdown()) }).await.expect("in time");
    }
}
