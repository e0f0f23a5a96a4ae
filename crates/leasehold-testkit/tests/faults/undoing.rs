//! Unfinished and unwanted acquires leave nothing behind.

use std::time::Duration;

use leasehold::store::StoreErrorKind;
use leasehold::{Error, LockManager, LossReason, Options};
use leasehold_testkit::proxy::on;
use leasehold_testkit::{Arena, FaultProxy, Kind, RedisServer, full_or, on_every_store};
use tokio::time::timeout;

use crate::common::{GONE_WITHIN, assert_no_keys_left, assert_no_locks_left, ms};

/// A limit that is reached only if a test fails.
const LONG: Duration = Duration::from_secs(20);

on_every_store!(a_shutdown_that_races_acquires_leaves_nothing_behind);

/// How one acquire ended.
#[derive(Debug, Default)]
struct Ends {
    told: usize,
    released: usize,
    refused: usize,
}

/// Acquires locks until the manager is shut down; most are free, some are contended.
async fn ask(manager: LockManager, task: usize) -> Ends {
    let mut ends = Ends::default();
    for i in 0.. {
        let name = if i % 4 == 3 { format!("fought-{}", task % 3) } else { format!("own-{task}-{i}") };
        let request = manager.lock(name.as_str());
        let request = if i % 3 == 0 { request.no_wait() } else { request.wait_up_to(LONG) };
        match request.await {
            Ok(guard) if i % 5 == 4 => {
                assert_eq!(guard.lost().await, LossReason::Shutdown, "nothing else happens to {name}");
                ends.told += 1;
            }
            // Released by a call or by the drop.
            Ok(guard) if i % 2 == 0 => {
                let _ = guard.release().await;
                ends.released += 1;
            }
            Ok(guard) => {
                drop(guard);
                ends.released += 1;
            }
            Err(Error::ShutDown { .. }) => {
                ends.refused += 1;
                return ends;
            }
            Err(Error::NotAcquired { .. }) => tokio::task::yield_now().await,
            Err(error) => panic!("{name}: {error}"),
        }
    }
    unreachable!("it goes on until it is shut down")
}

async fn a_shutdown_that_races_acquires_leaves_nothing_behind(arena: Arena) {
    let looker = arena.manager().await;
    let mut all = Ends::default();
    for round in 0..full_or(60, 400) {
        let manager = arena.manager().await;
        let tasks: Vec<_> = (0..8).map(|task| tokio::spawn(ask(manager.clone(), task))).collect();
        tokio::time::sleep(Duration::from_micros(round * 97 % 4_000)).await;
        timeout(LONG, manager.shutdown()).await.expect("a shutdown ends");
        for task in tasks {
            let ends = timeout(LONG, task).await.expect("nobody is stuck").expect("no panic");
            all.told += ends.told;
            all.released += ends.released;
            all.refused += ends.refused;
        }
        // At once, long before any lease ends: the shutdown has waited for all releases.
        let left = looker.list("", None, 10).await.expect("answered").locks;
        assert!(left.is_empty(), "round {round}: {left:?}");
        assert_eq!(manager.statistics().journalled_releases, 0);
    }
    println!("{:?}: {all:?}", arena.kind());
    assert!(all.told > 0 && all.released > 0 && all.refused > 0, "nothing was raced: {all:?}");
    if arena.kind() == Kind::Redis {
        assert_no_keys_left(arena.server()).await;
    }
}

/// Tries are in flight when the shutdown begins: it waits for their replies and releases what they got.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_waits_for_what_is_on_its_way() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    for _ in 0..5 {
        let manager = LockManager::connect_with(&proxy.url(), options()).await.expect("a manager");
        proxy.delay_replies(ms(50));
        let seen = proxy.commands_seen("SET");
        let ask = |i| tokio::spawn(manager.lock(format!("on-its-way-{i}")).no_wait().into_future());
        let asked: Vec<_> = (0..20).map(ask).collect();
        while proxy.commands_seen("SET") == seen {
            tokio::task::yield_now().await;
        }
        timeout(LONG, manager.shutdown()).await.expect("a shutdown ends");
        assert_eq!(crate::common::keys_left(&server).await, [""; 0], "the shutdown has waited");
        for task in asked {
            let outcome = timeout(LONG, task).await.expect("in time").expect("no panic");
            assert!(matches!(outcome, Err(Error::ShutDown { .. })), "{outcome:?}");
        }
        proxy.heal();
    }
}

fn options() -> Options {
    let mut options = Options::default();
    options.journal = None;
    options
}

/// Every step of a try but the first is rejected, and so are the scripts that would release the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_that_is_refused_half_way_leaves_no_key() {
    let server = RedisServer::start().await;
    for forbidden in [&["-incr"][..], &["-incr", "-eval", "-evalsha"], &["-exists", "-eval", "-evalsha"]] {
        server.command(&["ACL", "SETUSER", "half", "reset", "on", ">pass", "~*", "&*", "+@all"]).await;
        let url = server.url().replace("redis://", "redis://half:pass@");
        let mut options = options();
        // An unfenced lock is granted nevertheless, and must be released by a fallback.
        options.emergency_release_delay = ms(10);
        let manager = LockManager::connect_with(&url, options).await.expect("a manager");
        server.command(&[&["ACL", "SETUSER", "half"], forbidden].concat()).await;
        for fenced in [true, false] {
            let request = manager.lock("half").wait_up_to(ms(300));
            match if fenced { request } else { request.unfenced() }.await {
                Err(Error::Store { .. }) => {}
                Ok(guard) => drop(guard),
                Err(other) => panic!("{forbidden:?}: {other}"),
            }
            // The lease of 30 s is far longer.
            assert_no_keys_left(&server).await;
        }
        manager.shutdown().await;
    }
}

/// The reply to the first request is lost, and the second request is rejected because the server is out of memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_after_a_lost_answer_is_undone() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let manager = LockManager::connect_with(&proxy.url(), options()).await.expect("a manager");
    for i in 0..5 {
        let name = format!("lost-{i}");
        let cut = proxy.cut_after_forwarding(on("SET"), 1);
        let full = async {
            while cut.hits() == 0 {
                tokio::task::yield_now().await;
            }
            server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
        };
        let (outcome, ()) = tokio::join!(manager.lock(name.as_str()).no_wait().into_future(), full);
        match outcome {
            Err(Error::Store { source, .. }) => println!("{:?}", source.kind()),
            // Sent again before the memory was used up: it found its own grant.
            Ok(guard) => drop(guard),
            Err(other) => panic!("{other}"),
        }
        assert_no_keys_left(&server).await;
        server.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
        // Everything works again.
        let guard = manager.lock(name.as_str()).wait_up_to(LONG).await.expect("free");
        assert!(guard.release().await.expect("answered"));
    }
    assert_no_locks_left(&manager).await;
}

/// The server has memory for the lock, but not for the steps after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_that_runs_out_of_memory_half_way_leaves_no_key() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let manager = LockManager::connect_with(&proxy.url(), options()).await.expect("a manager");
    let guard = manager.lock("before").await.expect("free");
    server.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let refused = manager.lock("full").no_wait().await.expect_err("no room");
    let Error::Store { source, .. } = refused else { panic!("{refused}") };
    assert_eq!(source.kind(), StoreErrorKind::OutOfMemory);
    assert!(guard.release().await.expect("answered"), "a release needs no memory");
    tokio::time::timeout(GONE_WITHIN, assert_no_keys_left(&server)).await.expect("gone");
}
