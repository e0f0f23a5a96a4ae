//! Replies that are late or lost.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::store::StoreErrorKind;
use leasehold::{Error, LockManager, LossReason};
use leasehold_testkit::proxy::on;
use leasehold_testkit::{FaultProxy, RedisServer, full_or, report};
use redis::Value;

use crate::common::*;

async fn exists(server: &RedisServer, name: &str) -> bool {
    server.command(&["EXISTS", &format!("leasehold:lock:{name}")]).await == Value::Int(1)
}

/// Returns how long a key still exists.
async fn gone_after(server: &RedisServer, name: &str) -> Duration {
    let began = Instant::now();
    while exists(server, name).await && began.elapsed() < LONG {
        tokio::time::sleep(ms(1)).await;
    }
    began.elapsed()
}

/// Replies to tries are held for longer than the ttl: no guard is returned, and no lock stays in the store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f03_a_reply_later_than_the_ttl_makes_no_guard() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let (times, at_once) = full_or((10, 10), (100, 50));
    let answer_within = ms(4_000);
    let (mut expired, mut asked, mut undone) = (0, 0, Vec::new());
    let mut managers = Vec::new();
    for _ in 0..at_once {
        let mut options = options();
        options.request_timeout = answer_within;
        managers.push(LockManager::connect_with(&proxy.url(), options).await.expect("a manager"));
    }
    for _ in 0..times / at_once {
        let rule = proxy.hold_reply_to(on("SET"), TTL + ms(500));
        let began = Instant::now();
        let tries = managers.iter().enumerate().map(|(i, manager)| {
            let request = manager.lock(format!("late-{i}")).ttl(TTL).no_wait();
            tokio::spawn(async move { (request.await, began.elapsed()) })
        });
        for (i, task) in tries.collect::<Vec<_>>().into_iter().enumerate() {
            let (outcome, took) = task.await.expect("no panic");
            asked += 1;
            assert!(took <= answer_within + OVERRUN, "K4: {took:?}");
            match outcome {
                // A valid guard would be fine, but every reply was late.
                Ok(guard) => expired += usize::from(!guard.is_valid()),
                Err(Error::Store { source, .. }) => assert!(source.may_have_happened(), "{source}"),
                Err(other) => panic!("{other}"),
            }
            if i == 0 {
                // The try was sent again half a second before, so without an undo the key would stay for more than a second.
                undone.push(gone_after(&server, "late-0").await);
            }
        }
        rule.remove();
        assert!(rule.hits() >= at_once, "the replies were held");
        // Frames in flight arrive, so that the next round starts with idle connections.
        for manager in &managers {
            while manager.is_locked("late-0").await.is_err() {}
        }
        assert_no_keys_left(&server).await;
    }
    assert_eq!(expired, 0, "an expired guard was returned");
    assert!(longest(&undone) < ms(250), "undone after {}", spread(&undone));
    report("F03", format!("tries: 0 of {asked} expired guards returned; grant undone after {}", spread(&undone)));
}

/// The reply that grants a lock to a waiter is held for longer than the lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f03_a_grant_later_than_its_lease_makes_no_guard() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let direct = connect(&server.url()).await;
    let (times, at_once) = full_or((10, 10), (100, 50));
    let wait = TTL + ms(2_000);
    let (mut expired, mut valid, mut asked) = (0, 0, 0);
    let mut managers = Vec::new();
    for _ in 0..at_once {
        let mut options = options();
        options.request_timeout = ms(4_000);
        managers.push(LockManager::connect_with(&proxy.url(), options).await.expect("a manager"));
    }
    for _ in 0..times / at_once {
        let mut holders = Vec::new();
        for i in 0..at_once {
            holders.push(direct.lock(format!("told-late-{i}")).await.expect("free"));
        }
        let rule = proxy.hold_reply_to(on("EVALSHA"), TTL + ms(500));
        let waits = managers.iter().enumerate().map(|(i, manager)| {
            let request = manager.lock(format!("told-late-{i}")).ttl(TTL).wait_up_to(wait);
            tokio::spawn(async move {
                let began = Instant::now();
                let outcome = request.await;
                (outcome.map(|guard| (guard.is_valid(), guard)), began.elapsed())
            })
        });
        let waits: Vec<_> = waits.collect();
        for (i, holder) in holders.into_iter().enumerate() {
            wait_for_waiters(&direct, &format!("told-late-{i}"), 1).await;
            assert!(holder.release().await.expect("answered"), "handed on, in a push behind the held reply");
        }
        for task in waits {
            let (outcome, took) = task.await.expect("no panic");
            asked += 1;
            assert!(took <= wait + OVERRUN, "K4: {took:?}");
            match outcome {
                Ok((true, _)) => valid += 1,
                Ok((false, _)) => expired += 1,
                Err(Error::NotAcquired { .. } | Error::Store { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
        rule.remove();
        assert!(rule.hits() >= at_once, "the replies were held");
        for manager in &managers {
            while manager.is_locked("told-late-0").await.is_err() {}
        }
        assert_no_keys_left(&server).await;
    }
    assert_eq!(expired, 0, "an expired guard was returned");
    report("F03", format!("waits: 0 of {asked} expired guards returned ({valid} valid ones), nothing left"));
}

/// The server granted the lock, but the reply was dropped and the connection reset: the caller gets "outcome unknown", and the
/// key does not stay for its ttl.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f04_an_unanswered_grant_is_unknown_and_undone() {
    let server = RedisServer::start().await;
    let (times, at_once) = full_or((10, 5), (100, 25));
    let mut after = Vec::new();
    for round in 0..times / at_once {
        let proxy = FaultProxy::in_front_of(&server);
        let mut managers = Vec::new();
        for _ in 0..at_once {
            managers.push(connect(&proxy.url()).await);
        }
        let rule = if round % 2 == 0 {
            proxy.swallow_reply_to(on("SET"), at_once)
        } else {
            proxy.cut_after_forwarding(on("SET"), at_once)
        };
        proxy.refuse(true);
        let began = Instant::now();
        let tries = managers.iter().enumerate().map(|(i, manager)| {
            let request = manager.lock(format!("unknown-{i}")).ttl(ms(30_000)).no_wait();
            tokio::spawn(async move { (request.await, began.elapsed()) })
        });
        let tries: Vec<_> = tries.collect();
        rule.wait_for_hits(at_once).await;
        proxy.reset_all();
        for (i, task) in tries.into_iter().enumerate() {
            let (outcome, took) = task.await.expect("no panic");
            assert!(took <= ms(2_000) + OVERRUN, "K4: {took:?}");
            let Err(error) = outcome else { panic!("nobody answered") };
            let Error::Store { source, .. } = &error else { panic!("{error}") };
            assert!(source.may_have_happened(), "{error}");
            assert!(error.to_string().contains("has no answer"), "{error}");
            assert!(exists(&server, &format!("unknown-{i}")).await, "it was granted");
        }
        let healed = Instant::now();
        proxy.refuse(false);
        for i in 0..at_once {
            gone_after(&server, &format!("unknown-{i}")).await;
            after.push(healed.elapsed());
        }
        assert_no_keys_left(&server).await;
    }
    assert!(longest(&after) <= ms(2_000), "{}", spread(&after));
    report("F04", format!("{0} of {0} unknown grants gone after {1} (ttl 30 s)", after.len(), spread(&after)));
}

/// The connection breaks after the command was carried out: it is sent again and finds its own grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f05_a_command_sent_twice_does_not_block_itself() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let (manager, direct) = (connect(&proxy.url()).await, connect(&server.url()).await);
    let times = full_or(12, 100);
    let chronicle = Arc::new(Chronicle::new());
    let mut took = Vec::new();
    for _ in 0..times {
        // A try that was granted.
        let cut = proxy.cut_after_forwarding(on("SET"), 1);
        let began = Instant::now();
        let guard = manager.lock("again").ttl(ms(30_000)).no_wait().await.expect("its own grant is no obstacle");
        assert_eq!(cut.hits(), 1);
        took.push(began.elapsed());
        assert!(guard.is_valid());
        let holder = direct.holder("again").await.expect("answered").expect("held");
        assert_eq!(holder.id, guard.holder_id());
        assert!(holder.ttl_left.expect("ends") > ms(29_000), "renewed before it was believed");
        chronicle.granted(0, &guard);

        // A waiter that is already in the queue.
        let cut = proxy.cut_after_forwarding(on("EVALSHA"), 1);
        let waiter = tokio::spawn({
            let request = manager.lock("again").ttl(TTL).wait_up_to(LONG);
            let chronicle = chronicle.clone();
            async move {
                let guard = request.await.expect("its turn");
                chronicle.granted(1, &guard);
                guard
            }
        });
        cut.wait_for_hits(1).await;
        wait_for_waiters(&direct, "again", 1).await;
        // The waiter sent the same request again: it is not in the queue twice.
        let queue = direct.info("again").await.expect("answered").waiters;
        assert_eq!(queue.len(), 1, "{queue:?}");

        // A release that was carried out.
        let cut = proxy.cut_after_forwarding(on("EVALSHA"), 1);
        chronicle.ends(0, &guard, leasehold_testkit::history::EventKind::ReleaseCalled);
        match guard.release().await {
            Ok(released) => assert!(released),
            Err(Error::Store { source, .. }) => {
                assert!(matches!(source.kind(), StoreErrorKind::Unreachable | StoreErrorKind::NoAnswer), "{source}");
            }
            Err(other) => panic!("{other}"),
        }
        let next = tokio::time::timeout(ms(3_000), waiter).await.expect("nobody blocks it").expect("no panic");
        cut.remove();
        chronicle.ends(1, &next, leasehold_testkit::history::EventKind::ReleaseCalled);
        assert!(next.release().await.expect("answered"));
    }
    chronicle.check();
    assert_no_keys_left(&server).await;
    assert_eq!(manager.statistics().ownership_violations, 0, "a release sent twice is no violation");
    assert!(longest(&took) <= ms(2_000), "{}", spread(&took));
    report("F05", format!("0 of {times} self-blocks (try, wait and release each); granted after {}", spread(&took)));
}

/// A try is several commands in one write. If the network splits them, and the lock is taken by force and granted to another
/// holder in between, the first holder draws the higher fence. Its first renewal reports the loss, and it never changes the
/// next holder's lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_split_try_learns_of_its_loss_and_does_not_affect_the_next_holder() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let (parted, other) = (connect(&proxy.url()).await, connect(&server.url()).await);
    for held_back in ["INCR", "EXISTS"] {
        let rule = proxy.hold_back(move |command| command.name() == held_back);
        let request = parted.lock("parted").ttl(ms(3_000)).no_wait();
        let trying = tokio::spawn(request.into_future());
        rule.wait_for_hits(1).await;
        server.command(&["DEL", "leasehold:lock:parted"]).await;
        let next = other.lock("parted").ttl(ms(30_000)).no_wait().await.expect("deleted, so free");
        rule.remove();
        let guard = trying.await.expect("no panic").expect("it cannot know yet");
        assert_eq!(guard.fence() > next.fence(), held_back == "INCR", "{:?} {:?}", guard.fence(), next.fence());
        let why = tokio::time::timeout(ms(1_500), guard.lost()).await.expect("by its first renewal");
        assert_eq!(why, LossReason::Gone);
        assert!(!guard.release().await.expect("answered"), "it is not its own");
        assert!(next.release().await.expect("answered"), "nothing of it was touched");
    }
    assert_no_keys_left(&server).await;
}
