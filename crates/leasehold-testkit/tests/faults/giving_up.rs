//! Attempts that are given up: during an outage, without the permission to end a connection, and by dropping a future.

use std::future::{IntoFuture, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use leasehold::lease::{Token, Ttl};
use leasehold::store::redis::{RedisOptions, RedisStore};
use leasehold::store::{Acquire, AcquireRequest, KeySpace, Store};
use leasehold::{Error, LockManager, LockName, Options, Owner};
use leasehold_testkit::{FaultProxy, RedisServer, full_or, report};
use redis::Value;
use tokio::time::timeout;

use crate::common::*;

/// Returns the token and the inbox of the first waiter in a queue.
async fn first_waiter(server: &RedisServer, name: &str) -> (String, String) {
    let queue = format!("lh1:queue:leasehold:lock:{name}");
    let entry: Vec<String> =
        redis::from_redis_value(server.command(&["ZRANGE", &queue, "0", "0"]).await).expect("an entry");
    let mut parts = entry.first().expect("somebody waits").split(' ').map(ToOwned::to_owned);
    (parts.next().expect("a token"), parts.next().expect("an inbox"))
}

async fn connect_as(url: &str, change: impl FnOnce(&mut Options)) -> LockManager {
    let mut options = options();
    change(&mut options);
    LockManager::connect_with(url, options).await.expect("a manager")
}

/// Creates a user with all permissions except to end its own connections.
async fn user_without_kill(server: &RedisServer) -> String {
    let rules = ["ACL", "SETUSER", "meek", "reset", "on", ">pass", "~*", "&*", "+@all", "-client|kill"];
    server.command(&rules).await;
    "redis://meek:pass@".to_owned()
}

/// Waiters give up while the server is down. It restarts with its data, where they are still in the queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f48_waiters_that_gave_up_in_an_outage_cost_next_to_nothing() {
    let server = RedisServer::with(&["--appendonly", "yes", "--appendfsync", "always"]).await;
    let waiters = full_or(20, 100);
    let mut costs = Vec::new();
    for _ in 0..full_or(1, 5) {
        let holder = connect(&server.url()).await;
        let guard = holder.lock("haunted").ttl(TTL).no_wait().await.expect("free");
        let (quick, name) = (ms(500), "haunted");
        let mut impatient = Vec::new();
        let mut asked = Vec::new();
        for i in 0..waiters {
            let manager = connect_as(&server.url(), |o| (o.outage_timeout, o.request_timeout) = (quick, quick)).await;
            asked.push(tokio::spawn(manager.lock(name).ttl(TTL).into_future()));
            wait_for_waiters(&holder, name, i + 1).await;
            impatient.push(manager);
        }
        let patient = connect_as(&server.url(), |o| o.outage_timeout = LONG).await;
        let next = tokio::spawn(patient.lock(name).ttl(TTL).into_future());
        wait_for_waiters(&holder, name, waiters + 1).await;
        server.kill9();
        for task in asked {
            let outcome = timeout(LONG, task).await.expect("in time").expect("no panic");
            assert!(matches!(outcome, Err(Error::Store { .. })), "{outcome:?}");
        }
        // Longer than the lease and the outage timeout together.
        tokio::time::sleep(TTL + quick * 3).await;
        drop(guard);
        server.restart().await;
        let back = Instant::now();
        let guard = timeout(LONG, next).await.expect("served").expect("no panic").expect("its turn");
        costs.push(back.elapsed());
        assert!(guard.release().await.expect("answered"));
        for manager in &impatient {
            manager.shutdown().await;
        }
        assert_no_keys_left(&server).await;
    }
    assert!(longest(&costs) <= ms(3_000), "idle for {}", spread(&costs));
    report("F48", format!("{waiters} waiters gave up in an outage: the next one was served after {}", spread(&costs)));
}

/// A grant that arrives twice never releases a held lock, whatever its token does meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_duplicated_grant_gives_nothing_away() {
    let server = RedisServer::start().await;
    let (one, two) = (connect(&server.url()).await, connect(&server.url()).await);
    for round in 0..full_or(30, 300) {
        let guard = one.lock("twice").no_wait().await.expect("free");
        let waiting = tokio::spawn(two.lock("twice").into_future());
        wait_for_waiters(&one, "twice", 1).await;
        let (token, inbox) = first_waiter(&server, "twice").await;
        let again = async |fence: u64| {
            for _ in 0..3 {
                server.command(&["SPUBLISH", &inbox, &format!("G {token} {fence:016} 2000")]).await;
            }
        };
        assert!(guard.release().await.expect("answered"));
        // At once, so that some arrive while the grant is passed from the room to the task.
        let fence = match server.command(&["GET", "leasehold:lock:twice"]).await {
            Value::BulkString(value) => String::from_utf8_lossy(&value)[39..55].parse().expect("a fence"),
            other => panic!("{other:?}"),
        };
        again(fence).await;
        let guard = waiting.await.expect("no panic").expect("its turn");
        again(fence).await;
        let holder = async || one.info("twice").await.expect("answered").holder.map(|holder| holder.id);
        assert_eq!(holder().await, Some(guard.holder_id()), "round {round}");
        assert!(guard.is_valid() && guard.loss().is_none());
        if round % 3 == 0 {
            let token = guard.detach().await.expect("handed on").into_token();
            again(fence).await;
            assert_eq!(holder().await, Some(token.holder_id()), "round {round}: it belongs to the token");
            assert!(two.lease("twice", &token).expect("a name").release_without_event().await.expect("answered"));
        } else {
            assert!(guard.release().await.expect("answered"));
        }
        let other = one.lock("twice").no_wait().await.expect("free");
        again(fence).await;
        assert_eq!(holder().await, Some(other.holder_id()), "round {round}: its successor's");
        assert!(other.release().await.expect("answered"));
    }
    assert_no_keys_left(&server).await;
}

/// A request is lost with its connection, which cannot be ended, and reaches the server long after its waiter got the lock and
/// released it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_question_that_comes_late_keeps_no_lock() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let url = proxy.url().replace("redis://", &user_without_kill(&server).await);
    let waiter = connect_as(&url, |o| {
        o.request_timeout = ms(300);
        // Behind a lease of 30 s the first request is soon sent again.
        o.recheck_interval = ms(200);
    })
    .await;
    let holder = connect(&server.url()).await;
    let guard = holder.lock("late").no_wait().await.expect("free");
    let waiting = tokio::spawn(waiter.lock("late").ttl(LONG).into_future());
    wait_for_waiters(&holder, "late", 1).await;
    let asked = proxy.commands_seen("EVALSHA");
    proxy.delay_commands(ms(2_000));
    while proxy.commands_seen("EVALSHA") == asked {
        tokio::time::sleep(ms(5)).await;
    }
    let sent = Instant::now();
    proxy.delay_commands(Duration::ZERO);
    // Until the waiter has sent its request again on another connection.
    while proxy.connections_made() < 2 {
        tokio::time::sleep(ms(5)).await;
    }
    tokio::time::sleep(ms(300)).await;
    assert!(guard.release().await.expect("answered"));
    let guard = timeout(LONG, waiting).await.expect("served").expect("no panic").expect("its turn");
    assert!(guard.release().await.expect("answered"));
    assert!(sent.elapsed() < ms(2_000), "the question has not arrived yet: {:?}", sent.elapsed());
    tokio::time::sleep(ms(2_100).saturating_sub(sent.elapsed())).await;
    // Its lease would last a minute.
    let began = Instant::now();
    let guard = holder.lock("late").wait_up_to(LONG).await.expect("free again");
    let cost = began.elapsed();
    assert!(cost <= ms(2_500), "a dead attempt kept the lock for {cost:?}");
    println!("free after {cost:?}");
    drop(guard);
}

/// Ends an interrupted wait and a manager with interrupted attempts, as a user that may not end connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f49_without_permission_to_end_connections_no_call_waits_for_the_undo() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let user = user_without_kill(&server).await;
    let holder = connect(&server.url()).await;
    let guard = holder.lock("long").no_wait().await.expect("free");
    let mut took = Vec::new();
    for cut_off in [false, true] {
        let manager = connect_as(&proxy.url().replace("redis://", &user), |_| ()).await;
        let waiting = tokio::spawn(manager.lock("long").into_future());
        wait_for_waiters(&holder, "long", 1).await;
        if cut_off {
            // A try whose reply was lost.
            let cut = proxy.cut_after_forwarding(leasehold_testkit::proxy::on("SET"), 1);
            let _ = manager.lock("cut").no_wait().await;
            assert_eq!(cut.hits(), 1);
        }
        waiting.abort();
        let began = Instant::now();
        manager.shutdown().await;
        took.push(began.elapsed());
        assert!(holder.info("long").await.expect("answered").waiters.is_empty(), "nobody stands in line");
    }
    assert!(longest(&took) <= ms(2_000), "{took:?}");
    report("F49", format!("without client|kill an interrupted wait and a shutdown took {took:.1?}"));
    drop(guard);
}

/// The server dies while a task waits: it keeps trying for the outage timeout, counted from then on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f50_the_outage_timeout_counts_from_the_outage() {
    let mut took = Vec::new();
    for stopped in [false, true] {
        let server = RedisServer::start().await;
        let patience = ms(3_000);
        let manager = connect_as(&server.url(), |o| o.outage_timeout = patience).await;
        let holder = connect(&server.url()).await;
        let guard = holder.lock("patient").no_wait().await.expect("free");
        let waiting = tokio::spawn(manager.lock("patient").into_future());
        wait_for_waiters(&holder, "patient", 1).await;
        let began = Instant::now();
        if stopped {
            server.pause();
        } else {
            server.kill9();
        }
        let outcome = timeout(LONG, waiting).await.expect("in time").expect("no panic");
        let waited = began.elapsed();
        assert!(matches!(outcome, Err(Error::Store { .. })), "{outcome:?}");
        // A server that hangs is noticed by a missing push probe, after at most a second.
        let noticed = if stopped { ms(1_000) } else { Duration::ZERO };
        assert!(waited >= patience && waited <= patience + noticed + ms(500), "stopped {stopped}: {waited:?}");
        took.push(waited);
        if stopped {
            server.resume();
        }
        drop(guard);
    }
    report("F50", format!("patience of 3 s: killed server {:.1?}, stopped server {:.1?}", took[0], took[1]));
}

/// A waiter whose store is unreachable at its deadline does not know the holder.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_whose_store_died_reports_an_unknown_outcome() {
    for stopped in [false, true] {
        let server = RedisServer::start().await;
        let (manager, holder) = (connect(&server.url()).await, connect(&server.url()).await);
        let guard = holder.lock("gone").no_wait().await.expect("free");
        let by_token = Token::random();
        let waiting = tokio::spawn(manager.lock("gone").wait_up_to(ms(2_500)).into_future());
        let request = manager.lock("gone").wait_up_to(ms(2_500));
        let for_token = tokio::spawn(async move { request.under_token(&by_token).await });
        wait_for_waiters(&holder, "gone", 1).await;
        if stopped {
            server.pause();
        } else {
            server.kill9();
        }
        let outcome = timeout(LONG, waiting).await.expect("in time").expect("no panic");
        assert!(matches!(outcome, Err(Error::Store { .. })), "stopped {stopped}: {outcome:?}");
        let outcome = timeout(LONG, for_token).await.expect("in time").expect("no panic");
        assert!(matches!(outcome, Err(Error::Store { .. })), "stopped {stopped}, by token: {outcome:?}");
        if stopped {
            server.resume();
        }
        drop(guard);
    }
}

/// A release whose future is dropped continues and does not count as failed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_is_dropped_has_not_failed() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let manager = connect(&proxy.url()).await;
    for i in 0..10 {
        let guard = manager.lock("dropped").no_wait().await.expect("free");
        proxy.delay_replies(ms(30));
        {
            let mut releasing = pin!(guard.release());
            let polled = poll_fn(|cx| Poll::Ready(releasing.as_mut().poll(cx))).await;
            assert!(polled.is_pending(), "not answered yet");
        }
        proxy.delay_replies(Duration::ZERO);
        assert_no_locks_left(&connect(&server.url()).await).await;
        while server.command(&["EXISTS", "leasehold:lock:dropped"]).await != Value::Int(0) {
            tokio::time::sleep(ms(1)).await;
        }
        let seen = manager.statistics();
        assert_eq!((seen.normal_release_failures, seen.ownership_violations), (0, 0), "round {i}: {seen:?}");
    }
    manager.shutdown().await;
    let seen = manager.statistics();
    assert_eq!((seen.normal_release_failures, seen.ownership_violations), (0, 0), "{seen:?}");
}

/// A release removes the index entry that a renewal by token has made.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewed_token_leaves_the_index_with_its_release() {
    let server = RedisServer::start().await;
    let manager = connect(&server.url()).await;
    let entries = async || server.command(&["ZCARD", "lh1:index:leasehold"]).await;
    let token = manager.lock("indexed").no_wait().await.expect("free").detach().await.expect("handed on").into_token();
    manager.lease("indexed", &token).expect("a name").renew(None).await.expect("renewed");
    let entered = async {
        while entries().await != Value::Int(1) {
            tokio::time::sleep(ms(5)).await;
        }
    };
    timeout(LONG, entered).await.expect("entered");
    assert!(manager.lease("indexed", &token).expect("a name").release_without_event().await.expect("answered"));
    let gone = async {
        while entries().await != Value::Int(0) {
            tokio::time::sleep(ms(5)).await;
        }
    };
    timeout(GONE_WITHIN, gone).await.expect("taken out of the index");
}

/// A waiter polls and dies without leaving the queue: the store treats it as alive until its next poll is overdue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f51_a_dead_waiter_that_polled_costs_two_seconds_at_most() {
    let server = RedisServer::start().await;
    let (holder, next) = (connect(&server.url()).await, connect(&server.url()).await);
    let store =
        RedisStore::connect(&server.url(), KeySpace::default(), RedisOptions::default()).await.expect("a store");
    let mut costs = Vec::new();
    for _ in 0..full_or(1, 10) {
        let guard = holder.lock("polled").no_wait().await.expect("free");
        let dead = AcquireRequest {
            name: LockName::new("polled").expect("a name"),
            token: Token::random(),
            ttl: Ttl::default(),
            owner: Owner::named("dead").expect("an owner"),
            fenced: true,
            listens: false,
            since_ms: 0,
        };
        assert!(matches!(store.acquire(&dead, None).await, Ok(Acquire::Queued(_))));
        let waiting = tokio::spawn(next.lock("polled").into_future());
        wait_for_waiters(&holder, "polled", 2).await;
        assert!(guard.release().await.expect("answered"));
        let released = Instant::now();
        drop(timeout(LONG, waiting).await.expect("served").expect("no panic").expect("its turn"));
        costs.push(released.elapsed());
        assert_no_keys_left(&server).await;
    }
    assert!(longest(&costs) <= ms(2_500), "{}", spread(&costs));
    report("F51", format!("a dead waiter that polled cost {}", spread(&costs)));
}

/// A grant that was read too late stays invalid: a second copy of it, read after newer replies, makes no holder.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_copy_of_a_late_grant_makes_no_holder() {
    let server = RedisServer::start().await;
    let (holder, manager) = (connect(&server.url()).await, connect(&server.url()).await);
    let guard = holder.lock("copied").no_wait().await.expect("free");
    let mut waiting = tokio::spawn(manager.lock("copied").into_future());
    wait_for_waiters(&holder, "copied", 1).await;
    let (token, inbox) = first_waiter(&server, "copied").await;
    let fence = guard.fence().get();
    // One that has expired when it is read, and the same one with more time left.
    for lasts in [1, 2_000] {
        server.command(&["SPUBLISH", &inbox, &format!("G {token} {fence:016} {lasts}")]).await;
    }
    let entered = timeout(ms(300), &mut waiting).await;
    assert!(entered.is_err() && guard.is_valid(), "two holders: {entered:?}");
    assert!(guard.release().await.expect("answered"));
    drop(timeout(LONG, waiting).await.expect("served").expect("no panic").expect("its turn"));
}

/// A request to a pool waits in the queue of every member, and may be granted a second member when it gets its first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_that_everybody_has_left_is_free_at_once() {
    // Less than the 2 s of an unconfirmed grant.
    const AT_ONCE: Duration = ms(1_000);
    let dir = tempfile::tempdir().expect("a directory");
    let server = RedisServer::start().await;
    for url in [format!("sqlite:{}", dir.path().join("locks.db").display()), server.url()] {
        let manager = connect(&url).await;
        let pool = manager.pool("gpu", 0..2).expect("a pool");
        let mut free = Vec::new();
        for _ in 0..full_or(20, 500) {
            let tasks: Vec<_> = (0..6)
                .map(|_| {
                    let pool = pool.clone();
                    tokio::spawn(async move {
                        for _ in 0..5 {
                            let permit = pool.acquire().ttl(TTL).wait_up_to(LONG).await.expect("in turn");
                            tokio::time::sleep(ms(1)).await;
                            permit.release().await.expect("answered");
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await.expect("no panic");
            }
            free.push(assert_no_locks_left(&manager).await);
        }
        println!("{url}: free after {}", spread(&free));
        assert!(longest(&free) < AT_ONCE, "a member was granted to a request that had gone: {}", spread(&free));
        manager.shutdown().await;
    }
}

/// A user that may not use the queue gets an error for every wait, and its attempts end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attempt_that_may_not_be_given_up_ends_with_its_lease() {
    let server = RedisServer::start().await;
    let rules = ["ACL", "SETUSER", "meek", "reset", "on", ">pass", "~*", "&*", "+@all", "-@sortedset"];
    server.command(&rules).await;
    let proxy = FaultProxy::in_front_of(&server);
    let url = proxy.url().replace("redis://", "redis://meek:pass@");
    let (ttl, patience) = (ms(300), ms(200));
    let manager = connect_as(&url, |o| o.outage_timeout = patience).await;
    let holder = connect(&server.url()).await;
    let guard = holder.lock("forbidden").no_wait().await.expect("free");
    for _ in 0..5 {
        let refused = manager.lock("forbidden").ttl(ttl).wait_up_to(ms(100)).await.expect_err("held");
        assert!(matches!(refused, Error::Store { .. }), "{refused}");
    }
    let seen = || proxy.commands_seen("EVALSHA");
    // Each request is repeated at least once a second, until its lease and the outage timeout are over.
    tokio::time::sleep(ttl + patience + ms(1_200)).await;
    let before = (seen(), proxy.connections_made());
    let began = Instant::now();
    manager.shutdown().await;
    assert_eq!((seen(), proxy.connections_made()), before, "attempts go on");
    assert!(began.elapsed() < ms(1_000), "a shutdown waits for attempts: {:?}", began.elapsed());
    assert!(guard.release().await.expect("answered"));
}

/// A request of a token that was given up is carried out late and puts the token into the queue again. A grant to it is passed
/// on as soon as the push arrives, not with the next repeated request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_to_a_token_that_was_given_up_is_passed_on_at_once() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let url = proxy.url().replace("redis://", &user_without_kill(&server).await);
    let manager = connect_as(&url, |o| o.recheck_interval = ms(100)).await;
    let holder = connect(&server.url()).await;
    let guard = holder.lock("ghost").no_wait().await.expect("free");
    let waiting = tokio::spawn(manager.lock("ghost").ttl(LONG).into_future());
    wait_for_waiters(&holder, "ghost", 1).await;
    let (queue, key) = ("lh1:queue:leasehold:lock:ghost", "leasehold:lock:ghost");
    let entries = async || -> Vec<String> {
        redis::from_redis_value(server.command(&["ZRANGE", queue, "0", "-1"]).await).expect("entries")
    };
    let given_up = entries().await.pop().expect("it waits");
    proxy.cut_after_forwarding(leasehold_testkit::proxy::on("EVALSHA"), 1).wait_for_hits(1).await;
    // It waits with another token, and then gives up.
    let only_another = async { while !matches!(&entries().await[..], [another] if *another != given_up) {} };
    timeout(LONG, only_another).await.expect("another token");
    waiting.abort();
    let nobody = async { while !entries().await.is_empty() {} };
    timeout(LONG, nobody).await.expect("it left");
    assert!(guard.release().await.expect("answered"));
    let mut costs = Vec::new();
    for _ in 0..full_or(6, 30) {
        let guard = holder.lock("ghost").no_wait().await.expect("free");
        // What the late request does: it adds to the queue and marks the holder's record.
        server.command(&["ZADD", queue, "1", &given_up]).await;
        server.command(&["SETRANGE", key, "4", "1"]).await;
        assert!(guard.release().await.expect("answered"));
        let released = Instant::now();
        let free = async { while server.command(&["EXISTS", key]).await != Value::Int(0) {} };
        timeout(LONG, free).await.expect("free");
        costs.push(released.elapsed());
    }
    assert!(longest(&costs) <= ms(250), "{}", spread(&costs));
    println!("free after {}", spread(&costs));
}
