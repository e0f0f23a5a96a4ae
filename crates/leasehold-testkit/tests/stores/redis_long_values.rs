//! Values at leasehold's keys that are longer than anything leasehold writes.

use std::time::Duration;

use leasehold::bindings::{ClaimId, Retention};
use leasehold::inspect::{EvictMode, Evicted};
use leasehold::store::redis::RedisStore;
use leasehold::store::{
    Acquire, Bind, BindingId, BindingKind, Change, Expected, Inspect, KeySpace, NewBinding, NodeSlot, Release, Step,
    Store, StoreError, StoreErrorKind, Try,
};
use leasehold::{Error, Guard, LockManager, LockName};
use leasehold_testkit::{FaultProxy, RedisServer, report};
use redis::Value;
use tokio::time::timeout;

use crate::support::{claim, takes};

const LONG_VALUE: u64 = 100_000_000;

/// Makes the server create a long value of zeros.
async fn plant(server: &RedisServer, key: &str) {
    server.command(&["SETRANGE", key, &(LONG_VALUE - 1).to_string(), "x"]).await;
}

/// Returns the ids of the connections with a subscription.
async fn subscribed(server: &RedisServer) -> Vec<String> {
    let clients = format!("{:?}", server.command(&["CLIENT", "LIST", "TYPE", "pubsub"]).await);
    let ids = clients.split("id=").skip(1).map(|rest| rest.chars().take_while(char::is_ascii_digit).collect());
    ids.collect()
}

/// Returns the peak resident memory of this process, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("the field");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s27_a_long_value_at_our_keys_is_a_foreign_holder_and_costs_no_connection() {
    let server = RedisServer::start().await;
    let counted = FaultProxy::in_front_of(&server);
    let store = RedisStore::connect(&server.url(), KeySpace::default(), Default::default()).await.expect("up");
    let ours = claim("ours");
    let fence = takes(&store, &ours).await.fence;
    for key in ["leasehold:lock:long", "lh1:queue:leasehold:lock:waited"] {
        plant(&server, key).await;
    }
    let id_of = |answer: Try| match answer {
        Try::Held(Some(holder)) => holder,
        other => panic!("{other:?}"),
    };
    let before = peak();
    let holder = id_of(store.try_acquire(&claim("long")).await.expect("answered"));
    assert!(holder.foreign && holder.owner.to_string().contains("more than 65536 bytes"), "{holder:?}");
    assert_eq!(store.holder(&claim("long").name).await.expect("answered").map(|found| found.id), Some(holder.id));
    // The head of a queue sends ten requests a second, and a GET of 100 MB in a script takes tenths of a second.
    server.command(&["CONFIG", "RESETSTAT"]).await;
    let waiter = claim("long");
    match store.acquire(&waiter, None).await.expect("answered") {
        Acquire::Queued(place) => assert_eq!(place.holder.map(|found| found.id), Some(holder.id)),
        other => panic!("{other:?}"),
    }
    store.leave(&waiter).await.expect("answered");
    let seen = server.commandstats().await;
    assert!(!seen.contains_key("get"), "the server never reads it as a whole: {seen:?}");
    assert_eq!(store.list("", None, 10).await.expect("answered").locks.len(), 2);
    // The value is not a queue of leasehold; the lock is acquired and released nevertheless.
    assert!(store.queue(&claim("waited").name).await.is_err());
    let waited = claim("waited");
    takes(&store, &waited).await;
    assert_eq!(store.release(&waited.name, &waited.token).await, Ok(Release::Released));
    // It can be evicted by its id.
    assert!(matches!(store.evict(&claim("long").name, holder.id, EvictMode::Force).await, Ok(Evicted::Done(_))));
    takes(&store, &claim("long")).await;
    let grew = peak().saturating_sub(before);
    assert!(grew < LONG_VALUE / 2, "{grew} bytes for values that are not kept");

    // All on the first connection.
    let clients = server.command(&["CLIENT", "LIST", "TYPE", "pubsub"]).await;
    assert!(format!("{clients:?}").matches("id=").count() == 1, "{clients:?}");
    assert_eq!(store.renew(&[crate::support::renewal(&ours, fence)]).await, [leasehold::store::Renewed::Renewed]);

    // A manager with many locks on its only connection does not lose it either.
    let manager = LockManager::connect(&counted.url()).await.expect("up");
    plant(&server, "leasehold:lock:long again").await;
    let made = counted.connections_made();
    for i in 0..3 {
        let refused = manager.lock("long again").no_wait().await.expect_err("held by another client");
        assert!(refused.to_string().contains("more than 65536 bytes"), "{refused}");
        let other = timeout(Duration::from_secs(10), manager.lock(format!("other-{i}"))).await.expect("in time");
        drop(other.expect("free"));
    }
    assert_eq!(counted.connections_made(), made, "the connection stays");
    report(
        "S27",
        format!("values of {LONG_VALUE} bytes: no connection lost, {} MB more memory at most", grew / 1_000_000),
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s27_a_long_value_at_a_bindings_key_is_refused_and_costs_no_connection() {
    let server = RedisServer::start().await;
    let store = RedisStore::connect(&server.url(), KeySpace::default(), Default::default()).await.expect("up");
    let ours = claim("ours");
    let fence = takes(&store, &ours).await.fence;
    let connection = subscribed(&server).await;
    assert_eq!(connection.len(), 1);
    for (key, kind) in
        [("lh1:bind:leasehold:long", BindingKind::Bindings), ("lh1:once:leasehold:long", BindingKind::Results)]
    {
        plant(&server, key).await;
        every_verb_refuses(&store, kind).await;
        assert_eq!(server.command(&["STRLEN", key]).await, Value::Int(LONG_VALUE.cast_signed()), "left alone");
    }
    assert_eq!(store.renew(&[crate::support::renewal(&ours, fence)]).await, [leasehold::store::Renewed::Renewed]);
    assert_eq!(subscribed(&server).await, connection, "all of it on the connection that was there first");

    let manager = LockManager::connect(&server.url()).await.expect("up");
    let held = manager.lock("held").await.expect("free");
    let connections = subscribed(&server).await;
    let bindings = manager.bindings::<u32>();
    for i in 0..3 {
        refused_for_its_type(bindings.try_create("long", &1, Duration::from_secs(30)).await.map(drop));
        let work = async |_: &Guard| -> Result<u32, String> { Ok(1) };
        refused_for_its_type(manager.once("long").run(work).await.map(drop));
        drop(manager.lock(format!("other-{i}")).no_wait().await.expect("free"));
    }
    assert!(held.release().await.expect("answered"));
    assert_eq!(subscribed(&server).await, connections, "the connections stay");
    report("S27", format!("bindings of {LONG_VALUE} bytes: refused by every verb, no connection lost"));
}

/// Uses a binding named `long` in every way.
async fn every_verb_refuses(store: &RedisStore, kind: BindingKind) {
    let name = |text: &str| LockName::new(text).expect("a name");
    let (id, run) = (BindingId { kind, id: name("long") }, ClaimId::random());
    let keep = Retention::new(Duration::from_secs(30)).expect("allowed");
    let new = |slot| NewBinding { id: id.clone(), claim: run.clone(), keep, slot, value: b"1".to_vec() };
    let change = Change { value: b"2".to_vec(), keep: None, give_slot_back: false };
    let step = |over| Step { id: id.clone(), claim: run.clone(), fence: 1, over, keep, value: b"{}\n".to_vec() };
    refused("create", store.create(&new(None)).await);
    refused("create with a slot", store.create(&new(Some(NodeSlot { node: name("node"), of: 2 }))).await);
    refused("read", store.read(&id).await);
    refused("change", store.change(&id, &Expected::Any, &change).await);
    refused("remove", store.remove(&id, &run).await);
    refused("begin", store.advance(&step(false)).await);
    refused("finish", store.advance(&step(true)).await);
    refused("withdraw", store.withdraw(&id, &run).await);
}

fn refused<T: std::fmt::Debug>(verb: &str, answer: Result<T, StoreError>) {
    let error = answer.expect_err(verb);
    assert_eq!(error.kind(), StoreErrorKind::WrongType, "{verb}: {error}");
    assert!(error.to_string().contains("more than 1049600 bytes"), "{verb}: {error}");
}

fn refused_for_its_type(answer: Result<(), Error>) {
    match answer.expect_err("not ours") {
        Error::Store { source, .. } => assert_eq!(source.kind(), StoreErrorKind::WrongType, "{source}"),
        other => panic!("{other}"),
    }
}

/// Any client that may publish can publish megabytes to an inbox.
#[tokio::test]
async fn s27_a_long_message_to_an_inbox_costs_no_connection() {
    let server = RedisServer::start().await;
    let store = RedisStore::connect(&server.url(), KeySpace::default(), Default::default()).await.expect("up");
    let connection = subscribed(&server).await;
    let Value::Array(inboxes) = server.command(&["PUBSUB", "SHARDCHANNELS"]).await else { panic!("a list") };
    let [Value::BulkString(inbox)] = &inboxes[..] else { panic!("{inboxes:?}") };
    let message = "x".repeat(5_000_000);
    for i in 0..3 {
        let inbox = std::str::from_utf8(inbox).expect("text");
        assert_eq!(server.command(&["SPUBLISH", inbox, &message]).await, Value::Int(1), "it is delivered");
        takes(&store, &claim(&format!("free-{i}"))).await;
    }
    assert_eq!(subscribed(&server).await, connection, "the connection stays");
}
