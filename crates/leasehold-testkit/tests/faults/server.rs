//! Servers that lose their data or their scripts, or run out of memory.

use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use leasehold::store::StoreErrorKind;
use leasehold::{Error, LossReason};
use leasehold_testkit::history::EventKind as Happened;
use leasehold_testkit::{RedisServer, full_or, report};
use redis::Value;

use crate::common::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f11_a_holder_learns_of_a_restart_without_data() {
    let server = RedisServer::start().await;
    let (manager, other) = (connect(&server.url()).await, connect(&server.url()).await);
    let chronicle = Chronicle::new();
    let mut after = Vec::new();
    for _ in 0..full_or(5, 50) {
        let guard = manager.lock("forgotten").ttl(TTL).wait_up_to(LONG).await.expect("free");
        chronicle.granted(0, &guard);
        server.restart().await;
        let up = Instant::now();
        let why = tokio::time::timeout(LONG, guard.lost()).await.expect("told");
        after.push(up.elapsed());
        chronicle.ends(0, &guard, Happened::Lost);
        assert!(matches!(why, LossReason::Gone | LossReason::Expired), "{why}");
        // Another holder acquires it meanwhile, with a higher fence; the old holder's release does not affect it.
        let next = other.lock("forgotten").ttl(TTL).wait_up_to(LONG).await.expect("free");
        chronicle.granted(1, &next);
        assert!(!guard.release().await.expect("answered"));
        chronicle.ends(1, &next, Happened::ReleaseCalled);
        assert!(next.release().await.expect("answered"), "still its own");
    }
    chronicle.check();
    assert_no_keys_left(&server).await;
    assert!(longest(&after) <= TTL / 3 + ms(500), "{}", spread(&after));
    report("F11", format!("{} restarts, holder told after {}; fences rose across all", after.len(), spread(&after)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f14_forgotten_scripts_are_never_noticed() {
    let server = Arc::new(RedisServer::start().await);
    let chronicle = Arc::new(Chronicle::new());
    let (over, inside) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = Vec::new();
    for task in 0..6 {
        let manager = connect(&server.url()).await;
        let (over, inside, chronicle) = (over.clone(), inside.clone(), chronicle.clone());
        tasks.push(tokio::spawn(async move {
            let mut calls = 0;
            while !over.load(SeqCst) {
                // Half of them share one lock and hand it off; the others have one each.
                let shared = task % 2 == 0;
                let name = if shared { "shared".into() } else { format!("own-{task}") };
                let guard = manager.lock(name).ttl(TTL).wait_up_to(LONG).await.expect("no visible error");
                if shared {
                    assert_eq!(inside.fetch_add(1, SeqCst), 0, "two holders at once");
                    chronicle.granted(task, &guard);
                }
                guard.extend(TTL).await.expect("no visible error");
                if shared {
                    inside.fetch_sub(1, SeqCst);
                    chronicle.ends(task, &guard, Happened::ReleaseCalled);
                }
                assert!(guard.release().await.expect("no visible error"));
                calls += 3;
            }
            assert_eq!(manager.statistics().normal_release_failures, 0);
            calls
        }));
    }
    let began = Instant::now();
    let mut flushes = 0;
    while began.elapsed() < Duration::from_secs(full_or(3, 30)) {
        server.command(&["SCRIPT", "FLUSH"]).await;
        flushes += 1;
        tokio::time::sleep(ms(50)).await;
    }
    over.store(true, SeqCst);
    let mut calls = 0;
    for task in tasks {
        calls += tokio::time::timeout(LONG, task).await.expect("no hang").expect("no error");
    }
    chronicle.check();
    assert_no_keys_left(&server).await;
    let noscript = server.commandstats().await.get("eval").copied().unwrap_or(0);
    assert!(noscript > 0, "the scripts were missed, and sent again");
    report(
        "F14",
        format!("0 visible errors in {calls} calls during {flushes} SCRIPT FLUSH; {noscript} scripts sent whole"),
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f15_out_of_memory_refuses_new_locks_and_keeps_old_ones() {
    let server = RedisServer::with(&["--maxmemory-policy", "noeviction"]).await;
    let (manager, other) = (connect(&server.url()).await, connect(&server.url()).await);
    let (held, waited, tries) = full_or((100, 5, 50), (1_000, 50, 500));
    let mut guards = Vec::new();
    for i in 0..held {
        guards.push(manager.lock(format!("held-{i}")).ttl(ms(10_000)).no_wait().await.expect("free"));
    }
    let mut waiters = Vec::new();
    for i in 0..waited {
        let name = format!("held-{i}");
        let request = other.lock(name.as_str()).ttl(TTL).wait_up_to(LONG);
        waiters.push(tokio::spawn(request.into_future()));
        wait_for_waiters(&manager, &name, 1).await;
    }
    server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let refused = server.command(&["SET", "x", "y"]).await;
    assert!(matches!(refused, Value::ServerError(_)), "memory is full: {refused:?}");

    let mut took = Vec::new();
    for i in 0..tries {
        let began = Instant::now();
        // With and without waiting: a wait does not hide the error.
        let request = other.lock(format!("new-{i}")).ttl(TTL);
        let request = if i % 2 == 0 { request.no_wait() } else { request.wait_up_to(ms(1_000)) };
        let error = request.await.expect_err("no room");
        took.push(began.elapsed());
        let Error::Store { source, .. } = &error else { panic!("{error}") };
        assert_eq!(source.kind(), StoreErrorKind::OutOfMemory, "{error}");
    }
    assert!(longest(&took) <= ms(50), "{}", spread(&took));
    for guard in &guards {
        guard.extend(ms(20_000)).await.expect("renewed without memory");
        assert!(guard.remaining() > ms(15_000));
    }
    for guard in guards {
        assert!(guard.release().await.expect("released without memory"));
    }
    for waiter in waiters {
        let guard = tokio::time::timeout(ms(5_000), waiter).await.expect("handed on").expect("no panic");
        let guard = guard.expect("its turn");
        guard.extend(TTL).await.expect("confirmed without memory");
        assert!(guard.release().await.expect("released without memory"));
    }
    assert_no_keys_left(&server).await;
    assert_eq!((manager.statistics().lost_leases, other.statistics().lost_leases), (0, 0));
    server.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    assert!(other.try_lock("new-0").await.expect("there is room again").is_some());
    let refused = spread(&took);
    report(
        "F15",
        format!("{tries} acquires refused, {refused}; {held} of {held} renewed and released, {waited} handed on"),
    );
}
