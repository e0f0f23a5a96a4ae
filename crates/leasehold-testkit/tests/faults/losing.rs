//! Leases that are not renewed and are lost in the store.

use std::time::{Duration, Instant};

use leasehold::inspect::EvictMode;
use leasehold::{Guard, LockManager, LossReason};
use leasehold_testkit::{FaultProxy, RedisServer, full_or, report};
use redis::Value;

use crate::common::*;

/// How a lease is removed from the store.
#[derive(Clone, Copy, Debug)]
enum Way {
    Flushed,
    Deleted,
    /// Without persistence.
    Restarted,
    /// While the server rejects commands that need memory.
    DeletedInFullMemory,
    Revoked,
}

const WAYS: [Way; 5] = [Way::Flushed, Way::Deleted, Way::Restarted, Way::DeletedInFullMemory, Way::Revoked];

async fn take_away(server: &RedisServer, manager: &LockManager, guard: &Guard, how: Way) {
    let key = format!("leasehold:lock:{}", guard.name());
    match how {
        Way::Flushed => drop(server.command(&["FLUSHALL"]).await),
        Way::Deleted => assert_eq!(server.command(&["DEL", &key]).await, Value::Int(1)),
        Way::Restarted => server.restart().await,
        Way::DeletedInFullMemory => {
            server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
            assert_eq!(server.command(&["DEL", &key]).await, Value::Int(1));
        }
        Way::Revoked => {
            let mode = EvictMode::Revoke;
            manager.evict(guard.name().as_str(), guard.holder_id(), mode, "a test").await.expect("answered");
        }
    }
}

/// Loses one lease that is not renewed. Returns how long it took until its holder was notified.
async fn one_loss(how: Way, ttl: Duration) -> Duration {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let (manager, other) = (connect(&proxy.url()).await, connect(&server.url()).await);
    let guard = manager.lock("kept").ttl(ttl).renew(false).no_wait().await.expect("free");
    let until = guard.valid_until();
    // Without pushes: a revocation has to be found too.
    proxy.mute_pushes(true);
    take_away(&server, &other, &guard, how).await;
    let taken = Instant::now();
    let why = tokio::time::timeout(LONG, guard.lost()).await.expect("told");
    let told = taken.elapsed();
    let expected = if matches!(how, Way::Revoked) { LossReason::Revoked } else { LossReason::Gone };
    assert_eq!(why, expected, "{how:?}");
    assert_eq!(guard.valid_until(), until, "it was never prolonged");
    told
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f47_the_loss_of_a_lease_that_is_not_renewed_is_noticed() {
    let ttl = full_or(ms(6_000), Duration::from_secs(3_600));
    let bound = (ttl / 3).min(ms(10_000)) + ms(2_000);
    let mut told = Vec::new();
    for _ in 0..full_or(1, 10) {
        let tasks = WAYS.map(|how| tokio::spawn(one_loss(how, ttl)));
        for task in tasks {
            told.push(task.await.expect("no panic"));
        }
    }
    assert!(longest(&told) <= bound, "{}", spread(&told));
    report(
        "F47",
        format!("{} leases of {ttl:?} that nobody renews were gone: told after {}", told.len(), spread(&told)),
    );
}

/// Checks cost a short section nothing, and they neither extend a lease nor end it early.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f47_a_check_costs_little_and_prolongs_nothing() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let manager = connect(&proxy.url()).await;
    let left = async || match server.command(&["PTTL", "leasehold:lock:kept"]).await {
        Value::Int(ms) => ms,
        other => panic!("{other:?}"),
    };
    let scripts = || proxy.commands_seen("EVALSHA") + proxy.commands_seen("EVAL");
    // Released before its first check: no command but the release.
    let before = scripts();
    let guard = manager.lock("kept").ttl(ms(3_000)).renew(false).no_wait().await.expect("free");
    tokio::time::sleep(ms(700)).await;
    assert_eq!(scripts(), before, "a section that is shorter than the interval is not checked");
    assert!(guard.release().await.expect("answered"));
    // Checked twice; the expiry is unchanged.
    let guard = manager.lock("kept").ttl(ms(3_000)).renew(false).no_wait().await.expect("free");
    let (before, began, until) = (scripts(), Instant::now(), guard.valid_until());
    tokio::time::sleep(ms(2_300)).await;
    assert_eq!(scripts() - before, 2, "one check for each third of the lease");
    assert!(left().await <= 3_000 - i64::try_from(began.elapsed().as_millis()).expect("few") + 50, "not prolonged");
    assert_eq!(guard.valid_until(), until);
    assert!(guard.is_valid());
    assert_eq!(tokio::time::timeout(LONG, guard.lost()).await.expect("told"), LossReason::Expired);
    drop(guard);
    // A store that does not answer ends no lease early.
    let guard = manager.lock("kept").ttl(ms(3_000)).renew(false).wait_up_to(LONG).await.expect("free");
    let until = until_ns(&guard);
    proxy.blackhole(true);
    assert_eq!(tokio::time::timeout(LONG, guard.lost()).await.expect("told"), LossReason::Expired);
    assert!(leasehold_testkit::history::now_ns() >= until, "not before its proven end");
    proxy.blackhole(false);
}
