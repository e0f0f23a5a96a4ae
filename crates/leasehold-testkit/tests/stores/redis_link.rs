//! The connection to Redis: connecting, rejection, loss and reconnecting.

use std::time::Duration;

use crate::support::{RedisHere, World, acquires, claim, eventually, is_granted, queues, renewal, takes, ttl};
use leasehold::LockManager;
use leasehold::store::redis::{RedisOptions, RedisStore};
use leasehold::store::{Inspect, KeySpace, Push, Release, Renewed, Store, StoreError, StoreErrorKind};
use leasehold_testkit::{FaultProxy, RedisServer};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

const SECRET: &str = "hunter2-canary";

fn quick() -> RedisOptions {
    RedisOptions::default().connect_timeout(Duration::from_millis(500)).response_timeout(Duration::from_millis(500))
}

async fn connect(url: &str) -> Result<RedisStore, StoreError> {
    RedisStore::connect(url, KeySpace::default(), quick()).await
}

/// Waits for one message and skips others.
async fn hears(pushes: &mut mpsc::UnboundedReceiver<Push>, wanted: &Push) {
    let wait = async { while pushes.recv().await.expect("the store is there") != *wanted {} };
    timeout(Duration::from_secs(10), wait).await.unwrap_or_else(|_| panic!("never said: {wanted:?}"));
}

/// The password of a URL is never shown.
fn keeps_the_secret(error: &StoreError) {
    assert!(!format!("{error} {error:?}").contains(SECRET), "{error:?}");
}

#[tokio::test]
async fn a_server_that_is_not_there_is_unreachable() {
    let error = connect(&format!("redis://:{SECRET}@127.0.0.1:1")).await.expect_err("nobody there");
    assert_eq!(error.kind(), StoreErrorKind::Unreachable);
    keeps_the_secret(&error);
}

#[tokio::test]
async fn passwords_are_asked_for_and_kept() {
    let server = RedisServer::start().await;
    let mut url = server.url().replace("redis://", "redis://:wrong-hunter2-canary@");
    server.command(&["CONFIG", "SET", "requirepass", SECRET]).await;
    for refused in [server.url(), url.clone()] {
        let error = connect(&refused).await.expect_err("not let in");
        assert_eq!(error.kind(), StoreErrorKind::NotAuthenticated, "{error}");
        keeps_the_secret(&error);
    }
    url = server.url().replace("redis://", &format!("redis://:{SECRET}@"));
    let store = connect(&url).await.expect("let in");
    takes(&store, &claim("a")).await;
    let shown = format!("{store:?} {}", store.describe());
    assert!(!shown.contains(SECRET) && shown.contains(&server.port().to_string()), "{shown}");
}

#[tokio::test]
async fn missing_permissions_are_reported() {
    let server = RedisServer::start().await;
    server.command(&["ACL", "SETUSER", "meek", "on", &format!(">{SECRET}"), "~*", "&*", "+@all", "-eval"]).await;
    let url = server.url().replace("redis://", &format!("redis://meek:{SECRET}@"));
    let error = connect(&url).await.expect_err("not permitted");
    assert_eq!(error.kind(), StoreErrorKind::NotPermitted, "{error}");
    keeps_the_secret(&error);
    // Optional commands may be forbidden.
    server
        .command(&["ACL", "SETUSER", "meek", "+eval", "-client|kill", "-client|info", "-client|setname", "-script"])
        .await;
    let store = connect(&url).await.expect("let in");
    acquires(&store, &claim("a")).await;
}

/// The subscribers of a waiter's inbox are counted before a lock is handed to it.
#[tokio::test]
async fn without_permission_to_count_subscribers_connecting_is_refused() {
    let server = RedisServer::start().await;
    let user = ["ACL", "SETUSER", "meek", "on", &format!(">{SECRET}"), "~*", "&*", "+@all", "-pubsub|shardnumsub"];
    server.command(&user).await;
    let url = server.url().replace("redis://", &format!("redis://meek:{SECRET}@"));
    let error = connect(&url).await.expect_err("not permitted");
    assert_eq!(error.kind(), StoreErrorKind::NotPermitted, "{error}");
    assert!(error.to_string().contains("+pubsub|shardnumsub"), "says what to do: {error}");
    keeps_the_secret(&error);
    server.command(&["ACL", "SETUSER", "meek", "+pubsub|shardnumsub"]).await;
    takes(&connect(&url).await.expect("let in"), &claim("a")).await;
}

#[tokio::test]
async fn a_replica_is_refused_before_anything_is_subscribed() {
    let primary = RedisServer::start().await;
    let replica = RedisServer::replica_of(&primary).await;
    // Also a replica that accepts writes: they would be lost without an error.
    for read_only in ["yes", "no"] {
        replica.command(&["CONFIG", "SET", "replica-read-only", read_only]).await;
        let error = connect(&replica.url()).await.expect_err("a replica");
        assert_eq!(error.kind(), StoreErrorKind::ReadOnly, "{error}");
        assert!(error.is_passing(), "a name may point to the primary later");
    }
    let seen = replica.commandstats().await;
    assert!(!seen.contains_key("ssubscribe"), "{seen:?}");
}

#[tokio::test]
async fn a_node_of_a_cluster_is_refused_in_words() {
    let server = RedisServer::with(&["--cluster-enabled", "yes"]).await;
    let error = connect(&server.url()).await.expect_err("a cluster");
    assert_eq!(error.kind(), StoreErrorKind::Refused, "{error}");
    assert!(error.to_string().contains("Cluster"), "{error}");
}

/// A process that only waits sends no writes, so it gets no READONLY.
#[tokio::test]
async fn a_waiter_notices_by_itself_that_its_server_became_a_replica() {
    let primary = RedisServer::start().await;
    let replica = RedisServer::replica_of(&primary).await;
    let store = connect(&primary.url()).await.expect("up");
    let mut pushes = store.pushes();
    takes(&store, &claim("a")).await;
    let waiter = claim("a");
    queues(&store, &waiter).await;
    store.waiting(1, 0, Some(waiter.ttl));
    // Writes are accepted, so only the role shows it.
    primary.command(&["CONFIG", "SET", "replica-read-only", "no"]).await;
    replica.take_over_from(&primary).await;
    let noticed = async {
        while primary.command(&["PUBSUB", "SHARDCHANNELS"]).await != redis::Value::Array(Vec::new()) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(Duration::from_secs(10), noticed).await.expect("it left the replica");
    let error = store.try_acquire(&claim("b")).await.expect_err("no primary here");
    assert_eq!(error.kind(), StoreErrorKind::ReadOnly, "{error}");
    primary.command(&["REPLICAOF", "NO", "ONE"]).await;
    hears(&mut pushes, &Push::Resync).await;
    takes(&store, &claim("b")).await;
}

/// A user that may not subscribe gets no pushes; its waiters poll and it logs that.
#[tokio::test]
async fn without_permission_to_subscribe_waiters_poll() {
    let server = RedisServer::start().await;
    server.command(&["ACL", "SETUSER", "meek", "on", ">p", "~*", "&*", "+@all", "-ssubscribe"]).await;
    let url = server.url().replace("redis://", "redis://meek:p@");
    let store = connect(&url).await.expect("let in");
    hears(&mut store.pushes(), &Push::Hearing(false)).await;

    let manager = async || LockManager::connect(&url).await.expect("let in");
    let (holder, waiter) = (manager().await, manager().await);
    let guard = holder.lock("a").await.expect("free");
    let seen = waiter.holder("a").await.expect("answered").expect("held");
    assert_eq!((seen.listens, seen.connected), (false, None), "it never subscribed, so nobody can say that it is gone");
    let waiting = tokio::spawn(async move { waiter.lock("a").await.map(|guard| (waiter, guard)) });
    while holder.info("a").await.expect("answered").waiters.is_empty() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let listens = holder.info("a").await.expect("answered").waiters[0].listens;
    assert!(!listens, "the queue says that it polls");
    guard.release().await.expect("answered");
    drop(waiting.await.expect("no panic").expect("its turn, found by asking"));
}

#[tokio::test]
async fn a_full_pool_is_an_error() {
    let server = RedisServer::with(&["--maxclients", "1"]).await;
    let _first = connect(&server.url()).await.expect("let in");
    let error = connect(&server.url()).await.expect_err("no room");
    assert_eq!(error.kind(), StoreErrorKind::TooManyClients, "{error}");
}

#[tokio::test]
async fn a_killed_connection_comes_back() {
    let world = RedisHere::start().await;
    let (store, other) = (world.store().await, world.store().await);
    let mut pushes = store.pushes();
    for _ in 0..3 {
        let (holder, waiter) = (claim("a"), claim("a"));
        let fence = takes(&other, &holder).await.fence;
        queues(&store, &waiter).await;
        world.0.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
        hears(&mut pushes, &Push::Resync).await;
        // Nothing was lost, and pushes arrive again.
        assert_eq!(other.renew(&[renewal(&holder, fence)]).await, [Renewed::Renewed]);
        queues(&store, &waiter).await;
        assert_eq!(other.release(&holder.name, &holder.token).await, Ok(Release::Released));
        is_granted(&mut pushes, &waiter).await;
        assert_eq!(store.release(&waiter.name, &waiter.token).await, Ok(Release::Released));
    }
}

#[tokio::test]
async fn a_restarted_server_is_found_again() {
    let world = RedisHere::start().await;
    let store = world.store().await;
    let mut pushes = store.pushes();
    let before = takes(&store, &claim("a")).await.fence;
    world.0.kill9();
    let asked = Instant::now();
    let error = store.try_acquire(&claim("b")).await.expect_err("nobody there");
    assert_eq!(error.kind(), StoreErrorKind::Unreachable, "{error}");
    assert!(asked.elapsed() < Duration::from_millis(2_250), "{:?}", asked.elapsed());
    world.0.restart().await;
    hears(&mut pushes, &Push::Resync).await;
    let after = takes(&store, &claim("a")).await.fence;
    assert!(after > before, "{after:?} after {before:?}");
}

#[tokio::test]
async fn a_changed_password_is_reported_and_does_not_cause_fast_retries() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let store = connect(&proxy.url()).await.expect("up");
    server.command(&["CONFIG", "SET", "requirepass", SECRET]).await;
    proxy.reset_all();
    let until = Instant::now() + Duration::from_secs(3);
    let made = proxy.connections_made();
    while Instant::now() < until {
        let error = store.try_acquire(&claim("a")).await.expect_err("not let in");
        let kind = error.kind();
        assert!(matches!(kind, StoreErrorKind::NotAuthenticated | StoreErrorKind::Unreachable), "{error}");
    }
    let attempts = proxy.connections_made() - made;
    assert!((1..=5).contains(&attempts), "{attempts} attempts in 3 s");
    let error = store.release(&claim("a").name, &claim("a").token).await.expect_err("not let in");
    assert_eq!(error.kind(), StoreErrorKind::NotAuthenticated);
    assert!(!error.may_have_happened(), "it was never sent");
}

#[tokio::test]
async fn a_request_cut_on_its_way_is_unknown_and_can_be_sent_again() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let store = connect(&proxy.url()).await.expect("up");
    let mine = claim("a");
    proxy.cut_after_forwarding(|command| command.name() == "SET", 1);
    let error = store.try_acquire(&mine).await.expect_err("cut");
    assert!(error.may_have_happened(), "{error}");
    // An attempt does not block itself.
    let grant = takes(&store, &mine).await;
    assert_eq!(store.renew(&[renewal(&mine, grant.fence)]).await, [Renewed::Renewed]);
    proxy.swallow_reply_to(|command| command.name() == "EVALSHA", 1);
    let asked = Instant::now();
    let error = store.release(&mine.name, &mine.token).await.expect_err("swallowed");
    assert!(error.may_have_happened() && asked.elapsed() < Duration::from_millis(750), "{error}");
    assert_eq!(store.release(&mine.name, &mine.token).await, Ok(Release::NotOwner), "it had happened");
}

#[tokio::test]
async fn the_previous_connection_is_ended_first() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let store = connect(&proxy.url()).await.expect("up");
    let mut pushes = store.pushes();
    for _ in 0..3 {
        proxy.reset_all();
        hears(&mut pushes, &Push::Resync).await;
    }
    let killed = server.commandstats().await.get("client|kill").copied();
    // The first connection checks the permission, without ending a connection.
    assert_eq!(killed, Some(1 + 3));
    takes(&store, &claim("a")).await;
}

#[tokio::test]
async fn messages_that_do_not_arrive_are_noticed() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let store = connect(&proxy.url()).await.expect("up");
    let mut pushes = store.pushes();
    proxy.mute_pushes(true);
    store.waiting(1, 0, Some(ttl(Duration::from_secs(1))));
    let muted = Instant::now();
    hears(&mut pushes, &Push::Hearing(false)).await;
    hears(&mut pushes, &Push::Resync).await;
    assert!(muted.elapsed() < Duration::from_millis(2_500), "{:?}", muted.elapsed());
    takes(&store, &claim("a")).await;
    proxy.mute_pushes(false);
    hears(&mut pushes, &Push::Hearing(true)).await;
}

#[tokio::test]
async fn a_release_without_waiters_sends_no_pushes() {
    let server = RedisServer::start().await;
    let store = connect(&server.url()).await.expect("up");
    eventually("the first echo", async || server.commandstats().await.contains_key("spublish")).await;
    tokio::time::sleep(Duration::from_millis(700)).await;
    assert_eq!(server.commandstats().await["spublish"], 1);
    store.waiting(1, 0, None);
    eventually("more of them", async || server.commandstats().await["spublish"] >= 3).await;
    store.waiting(1, 100, None);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let far = server.commandstats().await["spublish"];
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    assert_eq!(server.commandstats().await["spublish"], far);
}

#[tokio::test]
async fn a_pushed_grant_is_fresh_while_echoes_come() {
    let world = RedisHere::start().await;
    let (here, there) = (world.open().await, world.store().await);
    let mut pushes = there.pushes();
    let (holder, waiter) = (claim("a"), claim("a"));
    takes(&*here, &holder).await;
    queues(&there, &waiter).await;
    let queued = leasehold::lease::Moment::now();
    there.waiting(1, 0, Some(waiter.ttl));
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    here.release(&holder.name, &holder.token).await.expect("an answer");
    let grant = is_granted(&mut pushes, &waiter).await;
    assert!(queued.until(grant.asked_at) > Duration::from_millis(400), "{:?}", grant.asked_at);
}

#[tokio::test]
async fn a_closed_store_fails_and_frees_its_resources() {
    let world = RedisHere::start().await;
    let store = world.store().await;
    assert_eq!(world.listeners().await, 1);
    store.close().await;
    assert_eq!(world.listeners().await, 0);
    let error = store.try_acquire(&claim("a")).await.expect_err("closed");
    assert_eq!(error.kind(), StoreErrorKind::Closed);
    assert!(matches!(&store.renew(&[renewal(&claim("a"), None)]).await[..], [Renewed::Unknown(_)]));
    assert_eq!(store.follow().await.expect_err("closed").kind(), StoreErrorKind::Closed);
    store.close().await;
}

/// A subscriber must learn that it missed events, or it would show a released lock as held.
#[tokio::test]
async fn a_subscriber_learns_of_a_cut_and_subscribes_again() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let store = connect(&proxy.url()).await.expect("up");
    let mut events = store.follow().await.expect("a follower");
    proxy.reset_all();
    assert_eq!(timeout(Duration::from_secs(10), events.recv()).await.expect("told"), None);
    let mut events = store.follow().await.expect("a follower");
    let event: leasehold::events::LockEvent = serde_json::from_str(
        r#"{"kind":"lost","name":"a","owner":"b","holder_id":"0123456789ab","fence":null,"at_ms":1,"reason":""}"#,
    )
    .expect("an event");
    store.note(vec![leasehold::store::Note::Tell(event.clone())]).await.expect("told");
    assert_eq!(timeout(Duration::from_secs(10), events.recv()).await.expect("an event"), Some(event));
}

/// The server must not treat a process that gets no pushes as a waiter that does.
#[tokio::test]
async fn a_connection_that_is_given_up_listens_no_longer() {
    let server = RedisServer::start().await;
    let proxy = FaultProxy::in_front_of(&server);
    let store = connect(&proxy.url()).await.expect("let in");
    let listening = async || match server.command(&["PUBSUB", "SHARDCHANNELS"]).await {
        redis::Value::Array(channels) => channels.len(),
        other => panic!("{other:?}"),
    };
    assert_eq!(listening().await, 1);
    proxy.refuse(true);
    proxy.swallow_reply_to(|command| command.name() == "GETRANGE", 1);
    let error = store.holder(&claim("a").name).await.expect_err("no answer");
    assert_eq!(error.kind(), StoreErrorKind::NoAnswer);
    eventually("nobody listens", async || listening().await == 0).await;
}
