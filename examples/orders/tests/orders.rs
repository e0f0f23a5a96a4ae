//! The service with many concurrent requests, and as two processes.

mod support;

use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use leasehold::LockManager;
use leasehold_testkit::http::receive;
use leasehold_testkit::{Arena, on_every_store};
use orders::{Bank, Shop};
use support::{ask, free_at_once, send, serve};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

/// The number of concurrent requests.
const MANY: usize = 64;

on_every_store!(one_of_many_pays_and_the_others_are_held, one_after_the_other_all_pay, a_layer_takes_the_lock);

/// Two instances of the service on one store.
async fn instances(arena: &Arena, bank: &Bank) -> [SocketAddr; 2] {
    let mut addresses = Vec::new();
    for _ in 0..2 {
        let shop = Shop::new(arena.manager().await, bank.clone());
        addresses.push(serve(shop.routes().expect("a key")).await);
    }
    addresses.try_into().expect("two")
}

async fn one_of_many_pays_and_the_others_are_held(arena: Arena) {
    // The test decides when the bank is done; until then the first payment runs.
    let open = Arc::new(Semaphore::new(0));
    let bank: Bank = {
        let open = open.clone();
        Arc::new(move |_| {
            let open = open.clone();
            Box::pin(async move { open.acquire().await.expect("open").forget() })
        })
    };
    let instances = instances(&arena, &bank).await;
    let mut requests = JoinSet::new();
    for n in 0..MANY {
        requests.spawn(async move { ask(instances[n % 2], "POST /orders/7/pay").await });
    }
    for n in 1..MANY {
        let held = requests.join_next().await.expect("63 more").expect("no panic");
        assert_eq!(held.status, 409, "{n}: {held:?}");
        let body = held.json();
        assert_eq!((body["code"].as_str(), body["name"].as_str()), (Some("held"), Some("order:7")), "{held:?}");
        assert!((1..=1000).contains(&body["retry_after_ms"].as_u64().expect("a number")), "{held:?}");
        assert!(held.head.contains("retry-after: 1"), "{held:?}");
        // The owner and the host are not in the response.
        assert!(!held.body.contains("pid") && !held.body.contains("redis:"), "{held:?}");
    }
    open.add_permits(1);
    let paid = requests.join_next().await.expect("the first").expect("no panic");
    assert_eq!((paid.status, paid.json()["payments"].as_u64()), (200, Some(1)), "{paid:?}");
    // The next one at once.
    open.add_permits(1);
    let next = ask(instances[1], "POST /orders/7/pay").await;
    assert_eq!(next.status, 200, "{next:?}");
    assert!(next.json()["fence"].as_u64() > paid.json()["fence"].as_u64(), "a later fence");
    let locks = arena.manager().await;
    free_at_once(&locks, "order:7", "two payments").await;
}

async fn one_after_the_other_all_pay(arena: Arena) {
    let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let bank: Bank = {
        let (inside, most) = (inside.clone(), most.clone());
        Arc::new(move |_| {
            let (inside, most) = (inside.clone(), most.clone());
            Box::pin(async move {
                most.fetch_max(inside.fetch_add(1, SeqCst) + 1, SeqCst);
                tokio::time::sleep(Duration::from_millis(2)).await;
                inside.fetch_sub(1, SeqCst);
            })
        })
    };
    let instances = instances(&arena, &bank).await;
    let mut requests = JoinSet::new();
    for n in 0..MANY {
        requests.spawn(async move { ask(instances[n % 2], "POST /orders/8/pay-in-turn").await });
    }
    let answers = requests.join_all().await;
    assert!(
        answers.iter().all(|answer| answer.status == 200),
        "{:?}",
        answers.iter().find(|answer| answer.status != 200)
    );
    assert_eq!(most.load(SeqCst), 1, "two payments at once");
    let mut fences: Vec<u64> = answers.iter().filter_map(|answer| answer.json()["fence"].as_u64()).collect();
    fences.sort_unstable();
    fences.dedup();
    assert_eq!(fences.len(), MANY, "each under a grant of its own");
}

async fn a_layer_takes_the_lock(arena: Arena) {
    let bank: Bank = Arc::new(|_| Box::pin(async {}));
    let [address, _] = instances(&arena, &bank).await;
    let locks = arena.manager().await;
    let saved = ask(address, "PUT /carts/blue").await;
    assert_eq!((saved.status, saved.body.as_str()), (200, "cart blue saved\n"), "{saved:?}");
    let guard = locks.lock("cart:blue").await.expect("free");
    assert_eq!(ask(address, "PUT /carts/red").await.status, 200, "another cart");
    // It waits for its turn.
    let waiting = send(address, "PUT /carts/blue", "").await;
    while locks.info("cart:blue").await.expect("answered").waiters.is_empty() {
        tokio::task::yield_now().await;
    }
    guard.release().await.expect("answered");
    assert_eq!(receive(waiting).await.expect("answered").status, 200);
    // Held for longer than the wait limit.
    let guard = locks.lock("cart:blue").await.expect("free");
    let held = ask(address, "PUT /carts/blue").await;
    assert_eq!((held.status, held.json()["code"].as_str()), (409, Some("held")), "{held:?}");
    drop(guard);
    let bad = ask(address, "PUT /carts/%0a").await;
    assert_eq!((bad.status, bad.json()["code"].as_str()), (400, Some("invalid_name")), "{bad:?}");
}

/// A process of the service, and its address.
async fn process(store: &str, bank_ms: u32) -> (Child, SocketAddr) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_orders"))
        .env("LEASEHOLD_STORE", store)
        .env("ORDERS_LISTEN", "127.0.0.1:0")
        .env("ORDERS_BANK_MS", bank_ms.to_string())
        .env_remove("LEASEHOLD_CONFIG")
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("started");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let line = lines.next_line().await.expect("readable").expect("it says where it listens");
    let address = line.split_once("http://").and_then(|(_, rest)| rest.split_once(',')).expect("an address").0;
    (child, address.parse().unwrap_or_else(|error| panic!("{error}: {line}")))
}

#[tokio::test]
async fn two_processes_pay_one_order_once_at_a_time() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = format!("sqlite:{}", dir.path().join("locks.db").display());
    let (mut slow, first) = process(&store, 60_000).await;
    let (_quick, second) = process(&store, 1).await;
    let paying = send(first, "POST /orders/9/pay", "").await;
    let locks = LockManager::connect(&store).await.expect("open");
    while !locks.is_locked("order:9").await.expect("answered") {
        tokio::task::yield_now().await;
    }
    assert_eq!(ask(second, "POST /orders/9/pay").await.status, 409);
    // The instance that pays is killed: its lock is free at once.
    slow.kill().await.expect("killed");
    assert!(receive(paying).await.is_none());
    let paid = ask(second, "POST /orders/9/pay-in-turn").await;
    assert_eq!((paid.status, paid.json()["payments"].as_u64()), (200, Some(1)), "{paid:?}");
}
