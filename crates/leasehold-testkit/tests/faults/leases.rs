//! Leases that cannot be renewed, or that others remove from the store.

use std::time::{Duration, Instant};

use leasehold::{Guard, LockManager, LossReason};
use leasehold_testkit::{FaultProxy, RedisServer, full_or, report};
use redis::Value;

use crate::common::*;

/// How renewals fail.
#[derive(Clone, Copy, Debug)]
enum Outage {
    /// The server replies with errors.
    Refused,
    /// Nothing passes, and everything arrives later.
    Silent,
    /// Connections break, new ones too.
    Cut,
}

/// Starts an outage right after a renewal.
async fn outage(server: &RedisServer, proxy: &FaultProxy, how: Outage, lasts: Duration) {
    match how {
        Outage::Refused => {
            server.command(&["ACL", "SETUSER", "default", "-evalsha", "-eval"]).await;
            tokio::time::sleep(lasts).await;
            server.command(&["ACL", "SETUSER", "default", "+evalsha", "+eval"]).await;
        }
        Outage::Silent => {
            proxy.blackhole(true);
            tokio::time::sleep(lasts).await;
            proxy.blackhole(false);
        }
        Outage::Cut => {
            proxy.refuse(true);
            proxy.reset_all();
            tokio::time::sleep(lasts).await;
            proxy.refuse(false);
        }
    }
}

/// Waits for the next renewal.
async fn renewed(guard: &Guard) {
    let known = guard.valid_until();
    while guard.valid_until() == known {
        tokio::time::sleep(ms(1)).await;
    }
}

/// Runs one lease through one outage. Returns how long it took until the next renewal, or how far from the lease's end its
/// holder was notified.
async fn one_outage(how: Outage, tenths: u32) -> Duration {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let manager = connect(&proxy.url()).await;
    let guard = manager.lock("renewed").ttl(TTL).no_wait().await.expect("free");
    renewed(&guard).await;
    // Just before the next renewal is due, which is the worst moment. A cut connection is back a little after the outage has
    // ended, so that kind begins earlier.
    tokio::time::sleep(if matches!(how, Outage::Cut) { TTL / 10 } else { TTL * 3 / 10 }).await;
    server.command(&["CONFIG", "RESETSTAT"]).await;
    let lasts = TTL * tenths / 10;
    let began = Instant::now();
    if tenths < 10 {
        outage(&server, &proxy, how, lasts).await;
        let before = guard.valid_until();
        tokio::time::timeout(TTL, async {
            while guard.valid_until() == before && guard.loss().is_none() {
                tokio::time::sleep(ms(1)).await;
            }
        })
        .await
        .expect("renewed or lost");
        assert!(guard.is_valid() && guard.loss().is_none(), "{how:?} for {lasts:?}: {:?}", guard.loss());
        let kept = began.elapsed();
        assert!(guard.release().await.expect("answered"), "it was its own all the time");
        return kept;
    }
    let expired = expired_keys(&server).await;
    let (why, off) = tokio::join!(
        async {
            let why = guard.lost().await;
            let end = Duration::from_nanos(until_ns(&guard));
            let told = Duration::from_nanos(leasehold_testkit::history::now_ns());
            (why, told.abs_diff(end))
        },
        outage(&server, &proxy, how, lasts),
    )
    .0;
    assert_eq!(why, LossReason::Expired);
    assert!(off <= ms(50), "{how:?}: told {off:?} off its end");
    // The guard still exists, so the lock is not released before the work has stopped.
    let stats = server.commandstats().await;
    assert_eq!(stats.get("del"), None, "released by itself: {stats:?}");
    assert_eq!(expired_keys(&server).await, expired + 1, "it ended by its ttl");
    assert!(!guard.release().await.expect("answered"), "not its own any more");
    off
}

async fn expired_keys(server: &RedisServer) -> u64 {
    // Reading an expired key makes the server count it.
    server.command(&["EXISTS", "leasehold:lock:renewed"]).await;
    let info: String = redis::from_redis_value(server.command(&["INFO", "stats"]).await).expect("a text");
    let line = info.lines().find_map(|line| line.strip_prefix("expired_keys:")).expect("a figure");
    line.trim().parse().expect("a number")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f09_a_lease_survives_short_outages_and_ends_on_time_in_long_ones() {
    let mut measured = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..full_or(1, 10) {
        let mut tasks = Vec::new();
        for how in [Outage::Refused, Outage::Silent, Outage::Cut] {
            for (i, tenths) in [3, 6, 12].into_iter().enumerate() {
                tasks.push((i, tokio::spawn(one_outage(how, tenths))));
            }
        }
        for (i, task) in tasks {
            measured[i].push(task.await.expect("no panic"));
        }
    }
    let [short, longer, too_long] = &measured;
    let (n, short, longer, too_long) = (short.len(), spread(short), spread(longer), spread(too_long));
    report(
        "F09",
        format!(
            "{n} outages each: 0.6 s kept, renewed {short}; 1.2 s kept, renewed {longer}; 2.4 s lost, told {too_long} from its end"
        ),
    );
}

/// Removes the lease from the store without its holder.
async fn take_away(server: &RedisServer, how: &[&str]) {
    let answer = server.command(how).await;
    assert!(!matches!(answer, Value::ServerError(_)), "{how:?}: {answer:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f13_a_lease_taken_out_of_the_store_is_lost_on_time() {
    let server = RedisServer::start().await;
    let manager = connect(&server.url()).await;
    let key = "leasehold:lock:taken";
    let ways: [(&[&str], Option<&str>); 5] = [
        (&["FLUSHALL"], None),
        (&["DEL", key], None),
        (&["SET", key, "a foreign value"], Some("a foreign value")),
        (&["SET", key, "lh1 0 looks like ours"], Some("lh1 0 looks like ours")),
        (&["SET", key, "short", "PX", "60000"], Some("short")),
    ];
    let mut after = Vec::new();
    let mut fences = Vec::new();
    for _ in 0..full_or(1, 20) {
        for (how, foreign) in ways {
            let guard = manager.lock("taken").ttl(TTL).no_wait().await.expect("free");
            fences.push(guard.fence());
            take_away(&server, how).await;
            let taken = Instant::now();
            let why = tokio::time::timeout(LONG, guard.lost()).await.expect("told");
            after.push(taken.elapsed());
            assert_eq!(why, LossReason::Gone, "{how:?}");
            assert!(!guard.is_valid());
            // No late call of the old holder changes the new value.
            assert!(matches!(guard.extend(TTL).await, Err(leasehold::Error::Lost { .. })), "{how:?}");
            assert!(!guard.release().await.expect("answered"), "{how:?}: not its own any more");
            assert_untouched(&server, &manager, key, foreign).await;
            server.command(&["DEL", key]).await;
        }
        // Not a string.
        let guard = manager.lock("taken").ttl(TTL).no_wait().await.expect("free");
        server.command(&["DEL", key]).await;
        server.command(&["RPUSH", key, "a", "b"]).await;
        assert_eq!(tokio::time::timeout(LONG, guard.lost()).await.expect("told"), LossReason::Gone);
        assert!(!guard.release().await.expect("answered"));
        assert_eq!(server.command(&["LLEN", key]).await, Value::Int(2), "the list is untouched");
        server.command(&["DEL", key]).await;
    }
    assert!(fences.is_sorted_by(|a, b| a < b), "K3, also over FLUSHALL: {fences:?}");
    assert!(longest(&after) <= TTL / 3 + ms(500), "{}", spread(&after));
    assert_no_keys_left(&server).await;
    report(
        "F13",
        format!("{} leases taken away, told after {}; foreign values untouched", after.len(), spread(&after)),
    );
}

async fn assert_untouched(server: &RedisServer, manager: &LockManager, key: &str, foreign: Option<&str>) {
    let now = server.command(&["GET", key]).await;
    let Some(foreign) = foreign else {
        assert_eq!(now, Value::Nil, "nothing was written again");
        return;
    };
    assert_eq!(now, Value::BulkString(foreign.into()));
    // It holds the lock like any other holder.
    assert!(manager.try_lock("taken").await.expect("answered").is_none());
    assert_eq!(server.command(&["GET", key]).await, Value::BulkString(foreign.into()));
}
