//! A live primary becomes a replica, and connections to it stay open.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use leasehold::lease::Token;
use leasehold::store::StoreErrorKind;
use leasehold::{Error, LockManager, LossReason};
use leasehold_testkit::history::EventKind as Happened;
use leasehold_testkit::proxy::Rule;
use leasehold_testkit::{FaultProxy, RedisServer, full_or, report};
use redis::Value;
use tokio::task::JoinHandle;

use crate::common::*;

/// Longer than the work of the new primary's waiter, so that a false grant overlaps with it.
const WORK: Duration = ms(30);

/// Waiters left at the old primary in each round: the release skips the first, and the search for the next waiter the second.
const AT_ONCE: u64 = 2;

/// Connects a manager whose request timeout is longer than a demotion takes.
async fn patient(url: &str) -> LockManager {
    let mut options = options();
    options.request_timeout = ms(10_000);
    LockManager::connect_with(url, options).await.expect("a manager")
}

/// Who enters, and where it is recorded.
struct Entering {
    task: u64,
    wait: Duration,
    inside: Arc<AtomicUsize>,
    chronicle: Arc<Chronicle>,
}

/// Waits for the lock, holds it, releases it.
fn enters(manager: LockManager, entering: Entering) -> JoinHandle<Result<(), Error>> {
    tokio::spawn(async move {
        let Entering { task, wait, inside, chronicle } = entering;
        let guard = manager.lock("passed on").wait_up_to(wait).await?;
        let others = inside.fetch_add(1, SeqCst);
        chronicle.granted(task, &guard);
        assert_eq!(others, 0, "two holders at once: task {task} entered");
        tokio::time::sleep(WORK).await;
        chronicle.ends(task, &guard, Happened::ReleaseCalled);
        inside.fetch_sub(1, SeqCst);
        assert!(guard.release().await?, "the lock was its own");
        Ok(())
    })
}

/// Returns the number of shard channel subscribers of a server.
async fn subscribers(server: &RedisServer) -> usize {
    match server.command(&["PUBSUB", "SHARDCHANNELS"]).await {
        Value::Array(channels) => channels.len(),
        other => panic!("PUBSUB answered {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f20b_a_waiter_left_behind_at_a_demoted_primary_is_never_granted_a_held_lock() {
    let mut primary = RedisServer::start().await;
    let mut replica = RedisServer::replica_of(&primary).await;
    let chronicle = Arc::new(Chronicle::new());
    let (mut left_behind, mut moved, mut unavailable, mut after) = (0, 0, 0, Vec::new());
    let rounds = full_or(4, 200);
    for round in 0..rounds {
        // The proxy points at the new primary in every other round.
        let (by_failover, name_moves) = (round % 2 == 0, round / 2 % 2 == 0);
        let inside = Arc::new(AtomicUsize::new(0));
        let entering = |nth, wait| {
            let task = (AT_ONCE + 1) * round + nth;
            Entering { task, wait, inside: inside.clone(), chronicle: chronicle.clone() }
        };
        let token = Token::random();
        let (mut names, mut behind) = (Vec::new(), Vec::new());
        for nth in 0..AT_ONCE {
            let name = FaultProxy::in_front_of(&primary);
            let manager = patient(&name.url()).await;
            names.push(name);
            if nth == 0 {
                manager.lock("passed on").ttl(LONG).no_wait().under_token(&token).await.expect("free");
            }
            behind.push(enters(manager.clone(), entering(nth, if name_moves { LONG } else { ms(3_000) })));
            wait_for_waiters(&manager, "passed on", behind.len()).await;
        }
        // They notice nothing before the lock is passed on.
        let unnoticed: Vec<_> = names.iter().map(|name| name.hold_back(|_| true)).collect();
        for rule in &unnoticed {
            rule.wait_for_hits(1).await;
        }
        if by_failover {
            replica.fail_over_from(&primary).await;
        } else {
            replica.take_over_from(&primary).await;
        }
        std::mem::swap(&mut primary, &mut replica);
        let here = connect(&primary.url()).await;
        let listening = enters(here.clone(), entering(AT_ONCE, LONG));
        wait_for_waiters(&here, "passed on", behind.len() + 1).await;
        left_behind += subscribers(&replica).await.min(behind.len());
        if name_moves {
            names.iter().for_each(|name| name.point_at(&primary));
        }
        let released = Instant::now();
        assert!(
            here.lease("passed on", &token).expect("a name").release_without_event().await.expect("answered"),
            "the holder's own"
        );
        listening.await.expect("never two inside").expect("granted where it listens");
        unnoticed.iter().for_each(Rule::remove);
        for waiter in behind {
            match waiter.await.expect("never two inside") {
                Ok(()) => {
                    assert!(name_moves, "it entered without a way to the primary");
                    moved += 1;
                    after.push(released.elapsed());
                }
                // A holder that it knew before the demotion must not be reported.
                Err(Error::Store { source, .. }) if !name_moves => {
                    let kind = source.kind();
                    assert!(matches!(kind, StoreErrorKind::ReadOnly | StoreErrorKind::Unreachable), "{source}");
                    unavailable += 1;
                }
                Err(error) => panic!("round {round}: {error}"),
            }
        }
    }
    chronicle.check();
    let waiters = AT_ONCE * rounds;
    assert_eq!(left_behind as u64, waiters, "waiters that were still subscribed at the old primary");
    let how = format!("{left_behind} waiters still subscribed at the old primary");
    let ends = format!("{moved} reconnected and entered, {unavailable} failed as unavailable");
    report("F20b", format!("{rounds} demotions, {how}: never two inside; {ends}; entered after {}", spread(&after)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f20_a_demoted_primary_is_left_and_the_new_one_found() {
    let mut primary = RedisServer::start().await;
    let mut replica = RedisServer::replica_of(&primary).await;
    let name = FaultProxy::in_front_of(&primary);
    let manager = connect(&name.url()).await;
    let held = manager.lock("kept").ttl(ms(10_000)).no_wait().await.expect("free");
    let mut after = Vec::new();
    for round in 0..full_or(2, 20) {
        replica.take_over_from(&primary).await;
        std::mem::swap(&mut primary, &mut replica);
        let refused = manager.lock(format!("new-{round}")).no_wait().await.expect_err("a replica takes no locks");
        assert!(matches!(&refused, Error::Store { source, .. } if source.is_passing()), "{refused}");
        name.point_at(&primary);
        let moved = Instant::now();
        let guard = loop {
            match manager.lock(format!("new-{round}")).no_wait().await {
                Ok(guard) => break guard,
                Err(Error::Store { .. }) => assert!(moved.elapsed() < LONG, "the new primary was never found"),
                Err(error) => panic!("{error}"),
            }
        };
        after.push(moved.elapsed());
        guard.release().await.expect("answered");
        held.extend(ms(10_000)).await.expect("renewed at the new primary");
    }
    assert!(longest(&after) <= ms(2_000), "{}", spread(&after));
    assert!(held.release().await.expect("answered"), "never lost");
    report(
        "F20",
        format!("{} demotions, the new primary found after {}; the lease was kept", after.len(), spread(&after)),
    );
}

/// A check writes nothing, so its reply is not READONLY: the demoted server replies with data from before the failover.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f20_a_lease_that_is_not_renewed_is_checked_at_the_new_primary() {
    const BOUND: Duration = ms(2_000 + 2_000);
    // Also with a replica that accepts writes, where no request fails.
    for read_only in ["yes", "no"] {
        let (old, new) = (RedisServer::start().await, RedisServer::start().await);
        old.command(&["CONFIG", "SET", "replica-read-only", read_only]).await;
        let name = FaultProxy::in_front_of(&old);
        let manager = connect(&name.url()).await;
        let guard = manager.lock("lost").ttl(ms(6_000)).renew(false).no_wait().await.expect("free");
        // Its entry in the index is a write. After it there are only checks.
        while old.command(&["ZCARD", "lh1:index:leasehold"]).await != Value::Int(1) {
            tokio::time::sleep(ms(5)).await;
        }
        // The new primary never gets the lease. The old one is not its replica and keeps its data.
        let gone = FaultProxy::in_front_of(&new);
        gone.refuse(true);
        old.command(&["REPLICAOF", "127.0.0.1", &gone.port().to_string()]).await;
        name.point_at(&new);
        let demoted = Instant::now();
        let why = tokio::time::timeout(LONG, guard.lost()).await.expect("told");
        assert_eq!(why, LossReason::Gone, "read-only {read_only}: after {:?}", demoted.elapsed());
        assert!(demoted.elapsed() <= BOUND, "{:?}", demoted.elapsed());
        drop(guard);
        manager.shutdown().await;
    }
}
