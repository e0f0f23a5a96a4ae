//! The header `Idempotency-Key` over real HTTP.

mod support;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{get, post};
use futures_util::future::join_all;
use leasehold::LockManager;
use leasehold::http::IdempotencyLayer;
use leasehold_testkit::http::{Answer, receive};
use leasehold_testkit::{Arena, Kind, on_every_store, report};
use support::{ask, replayed, send, serve};
use tokio::sync::Semaphore;

on_every_store!(
    a_request_that_is_sent_again_is_answered_again,
    while_it_runs_other_requests_fail_or_wait,
    another_payload_is_refused,
    a_server_error_is_not_stored_and_a_refusal_is,
    a_client_that_disconnects_does_not_undo_it,
    s28_a_key_belongs_to_its_caller_and_a_session_to_its_connection,
    a_caller_that_is_not_known_is_refused,
    sizes_have_limits,
    keys_that_make_no_sense_are_refused,
);

/// The behaviour of the handler, and the number of its calls.
#[derive(Clone)]
struct Till {
    called: Arc<AtomicUsize>,
    /// A handler takes one permit before it responds.
    may_answer: Arc<Semaphore>,
}

impl Till {
    fn new() -> Self {
        Self { called: Arc::default(), may_answer: Arc::new(Semaphore::new(1_000)) }
    }

    fn called(&self) -> usize {
        self.called.load(Ordering::SeqCst)
    }

    async fn serve(&self, layer: IdempotencyLayer) -> SocketAddr {
        let pay = {
            let till = self.clone();
            async move |body: String| {
                assert!(leasehold::current_fence().is_some(), "it runs under its lock");
                let number = till.called.fetch_add(1, Ordering::SeqCst) + 1;
                till.may_answer.acquire().await.expect("open").forget();
                let mut headers = HeaderMap::new();
                headers.insert("x-number", number.into());
                headers.insert("set-cookie", format!("session={number}").parse().expect("a value"));
                match body.as_str() {
                    "crash" => (StatusCode::BAD_GATEWAY, headers, "the bank is away".to_owned()),
                    "poor" => (StatusCode::PAYMENT_REQUIRED, headers, "no money".to_owned()),
                    "large" => (StatusCode::OK, headers, "x".repeat(2_000)),
                    _ => (StatusCode::CREATED, headers, format!("{number}: {body} paid")),
                }
            }
        };
        let free = {
            let till = self.clone();
            async move || till.called.fetch_add(1, Ordering::SeqCst).to_string()
        };
        serve(
            Router::new()
                .route("/pay", post(pay.clone()))
                .route("/pay-more", post(pay))
                .route("/look", get(free))
                .layer(layer),
        )
        .await
    }
}

async fn pay(to: SocketAddr, key: &str, body: &str) -> Answer {
    ask(to, "POST /pay", &format!("Idempotency-Key: {key}\r\n"), body).await
}

async fn layer(arena: &Arena) -> IdempotencyLayer {
    IdempotencyLayer::new(arena.manager().await).shared()
}

async fn a_request_that_is_sent_again_is_answered_again(arena: Arena) {
    let till = Till::new();
    let instances = [till.serve(layer(&arena).await).await, till.serve(layer(&arena).await).await];
    let first = pay(instances[0], "k1", "9 EUR").await;
    assert_eq!((first.status, first.body.as_str(), replayed(&first)), (201, "1: 9 EUR paid", false));
    for at in instances {
        let again = pay(at, "k1", "9 EUR").await;
        assert_eq!((again.status, again.body.as_str(), replayed(&again)), (201, "1: 9 EUR paid", true));
        assert!(again.head.contains("x-number: 1") && again.head.contains("content-length: 13"), "{again:?}");
    }
    assert_eq!(till.called(), 1);
    // Another key is another request; reading needs no key.
    assert_eq!(pay(instances[0], "k2", "9 EUR").await.body, "2: 9 EUR paid");
    for _ in 0..2 {
        assert_eq!(ask(instances[0], "GET /look", "Idempotency-Key: k1\r\n", "").await.status, 200);
    }
    assert_eq!(till.called(), 4);
}

async fn while_it_runs_other_requests_fail_or_wait(arena: Arena) {
    let till = Till { may_answer: Arc::new(Semaphore::new(0)), ..Till::new() };
    let impatient = till.serve(layer(&arena).await).await;
    let waits = till.serve(layer(&arena).await.wait_up_to(Duration::from_secs(30))).await;
    let first = send(impatient, "POST /pay", "Idempotency-Key: k\r\n", "9 EUR").await;
    while till.called() == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let busy = pay(impatient, "k", "9 EUR").await;
    assert_eq!(busy.code(), (409, "in_flight".into()));
    assert!(busy.head.contains("retry-after: 1"), "{busy:?}");
    let waiting: Vec<_> = join_all((0..5).map(|_| send(waits, "POST /pay", "Idempotency-Key: k\r\n", "9 EUR"))).await;
    till.may_answer.add_permits(1);
    assert_eq!(receive(first).await.expect("an answer").status, 201);
    for answer in join_all(waiting.into_iter().map(receive)).await {
        let answer = answer.expect("an answer");
        assert!(replayed(&answer) && answer.body == "1: 9 EUR paid", "{answer:?}");
    }
    assert_eq!(till.called(), 1);
}

async fn another_payload_is_refused(arena: Arena) {
    let till = Till::new();
    let at = till.serve(layer(&arena).await).await;
    pay(at, "k", "9 EUR").await;
    assert_eq!(pay(at, "k", "10 EUR").await.code(), (422, "other_payload".into()));
    let elsewhere = ask(at, "POST /pay-more", "Idempotency-Key: k\r\n", "9 EUR").await;
    assert_eq!(elsewhere.code().0, 422);
    assert_eq!(ask(at, "POST /pay?twice=1", "Idempotency-Key: k\r\n", "9 EUR").await.status, 422);
    assert_eq!(till.called(), 1);
}

async fn a_server_error_is_not_stored_and_a_refusal_is(arena: Arena) {
    let till = Till::new();
    let at = till.serve(layer(&arena).await).await;
    for n in 1..=2 {
        let failed = pay(at, "k", "crash").await;
        assert_eq!((failed.status, replayed(&failed), till.called()), (502, false, n), "it is tried again");
    }
    // Nothing was carried out, so the key can be used again.
    assert_eq!(pay(at, "k", "9 EUR").await.status, 201);
    for stored in [false, true] {
        let declined = pay(at, "p", "poor").await;
        assert_eq!((declined.status, replayed(&declined)), (402, stored));
    }
    assert_eq!(till.called(), 4);
}

async fn a_client_that_disconnects_does_not_undo_it(arena: Arena) {
    let till = Till { may_answer: Arc::new(Semaphore::new(0)), ..Till::new() };
    let at = till.serve(layer(&arena).await.wait_up_to(Duration::from_secs(30))).await;
    let gone = send(at, "POST /pay", "Idempotency-Key: k\r\n", "9 EUR").await;
    while till.called() == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    drop(gone);
    // Long enough for the server to notice.
    tokio::time::sleep(Duration::from_millis(100)).await;
    till.may_answer.add_permits(1);
    let again = pay(at, "k", "9 EUR").await;
    assert_eq!((again.status, replayed(&again), till.called()), (201, true, 1));
}

/// The same key from two callers, on two instances, with a response that opens a session.
async fn s28_a_key_belongs_to_its_caller_and_a_session_to_its_connection(arena: Arena) {
    let by = async |at: SocketAddr, who: &str| {
        ask(at, "POST /pay", &format!("X-Tenant: {who}\r\nIdempotency-Key: 1\r\n"), "9 EUR").await
    };
    let mut results = 0;
    for function in [false, true] {
        let till = Till::new();
        let mut instances = Vec::new();
        for _ in 0..2 {
            let layer = IdempotencyLayer::new(arena.manager().await);
            let layer = match function {
                false => layer.per_header("x-tenant"),
                true => layer.per(|parts| Some(format!("{:?}", parts.headers.get("x-tenant")?))),
            };
            instances.push(till.serve(layer).await);
        }
        for (at, who) in [(instances[0], "alice"), (instances[1], "bob")] {
            let first = by(at, who).await;
            assert!(!replayed(&first) && first.head.contains("set-cookie: session="), "{first:?}");
        }
        for (at, who, body) in [(instances[1], "alice", "1: 9 EUR paid"), (instances[0], "bob", "2: 9 EUR paid")] {
            let again = by(at, who).await;
            assert!(replayed(&again) && again.body == body, "{again:?}");
            assert!(!again.head.contains("set-cookie"), "a session belongs to one client: {again:?}");
        }
        assert_eq!(till.called(), 2);
        results += 2;
    }
    report("S28", format!("{:?}: {results} results for two callers of one key, 0 sessions replayed", arena.kind()));
}

async fn a_caller_that_is_not_known_is_refused(arena: Arena) {
    let till = Till::new();
    let locks = arena.manager().await;
    let header = till.serve(IdempotencyLayer::new(locks.clone()).per_header("x-tenant")).await;
    assert_eq!(pay(header, "k", "9 EUR").await.code(), (400, "missing_header".into()));
    let empty = till.serve(IdempotencyLayer::new(locks.clone()).per(|_| Some(String::new()))).await;
    assert_eq!(pay(empty, "k", "9 EUR").await.code(), (400, "unknown_caller".into()));
    let anonymous = till.serve(IdempotencyLayer::new(locks).per(|_| None)).await;
    assert_eq!(pay(anonymous, "k", "9 EUR").await.code(), (400, "unknown_caller".into()));
    assert_eq!(till.called(), 0);
    // Reading needs no caller.
    assert_eq!(ask(anonymous, "GET /look", "Idempotency-Key: k\r\n", "").await.status, 200);
}

async fn sizes_have_limits(arena: Arena) {
    let till = Till::new();
    let at = till.serve(layer(&arena).await.body_limit(100).response_limit(1_000)).await;
    assert_eq!(pay(at, "k", &"x".repeat(101)).await.code(), (413, "body_too_large".into()));
    assert_eq!(pay(at, "k", &"x".repeat(100)).await.status, 201);
    // The whole response was sent once. The request is not carried out again.
    let large = pay(at, "l", "large").await;
    assert_eq!((large.status, large.body.matches('x').count()), (200, 2_000));
    assert_eq!(pay(at, "l", "large").await.code(), (409, "response_not_stored".into()));
    assert_eq!(till.called(), 2);
}

async fn keys_that_make_no_sense_are_refused(arena: Arena) {
    let till = Till::new();
    let at = till.serve(layer(&arena).await.required(true)).await;
    assert_eq!(ask(at, "POST /pay", "", "9 EUR").await.code(), (400, "missing_header".into()));
    let two = ask(at, "POST /pay", "Idempotency-Key: a\r\nIdempotency-Key: b\r\n", "9 EUR").await;
    assert_eq!(two.code(), (400, "invalid_key".into()));
    for key in ["", "ünï", &"x".repeat(256)] {
        assert_eq!(pay(at, key, "9 EUR").await.code(), (400, "invalid_key".into()), "{key}");
    }
    assert_eq!(pay(at, &"x".repeat(255), "9 EUR").await.status, 201);
    assert_eq!(till.called(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_store_is_503_and_no_work_starts() {
    let arena = Arena::new(Kind::Redis).await;
    let mut options = arena.options();
    options.request_timeout = Duration::from_millis(300);
    let locks: LockManager = arena.manager_with(options).await;
    let till = Till::new();
    let at = till.serve(IdempotencyLayer::new(locks).per_header("x-tenant")).await;
    arena.server().kill9();
    let unknown = ask(at, "POST /pay", "X-Tenant: a\r\nIdempotency-Key: k\r\n", "9 EUR").await;
    assert_eq!(unknown.code(), (503, "store_unreachable".into()));
    assert!(!unknown.body.contains("redis") && till.called() == 0, "{unknown:?}");
}
