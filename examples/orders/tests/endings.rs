//! However a handler ends, its lock is free within a tenth of a second and its body has stopped.

mod support;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use leasehold::http::{LockLayer, answer_held_with};
use leasehold::inspect::EvictMode;
use leasehold::{Error, LockManager, lock};
use leasehold_testkit::http::receive;
use leasehold_testkit::{Arena, Kind, on_every_store};
use support::{free_at_once, send, serve};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// A limit that is reached only if a test fails.
const LONG: Duration = Duration::from_secs(20);

on_every_store!(a_client_that_disconnects, a_panic, an_early_question_mark, a_lost_lease);

/// Permits are added when a body begins and when it ends, in any way.
#[derive(Clone)]
struct Stage {
    locks: LockManager,
    begun: Arc<Semaphore>,
    ended: Arc<Semaphore>,
}

struct Inside(Arc<Semaphore>);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.add_permits(1);
    }
}

impl Stage {
    fn enter(&self) -> Inside {
        self.begun.add_permits(1);
        Inside(self.ended.clone())
    }
}

/// Waits for one permit.
async fn happened(what: &Semaphore, name: &str) {
    timeout(LONG, what.acquire()).await.unwrap_or_else(|_| panic!("never {name}")).expect("open").forget();
}

#[derive(Debug)]
enum Failed {
    Lock(Error),
    Teapot,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Lock(error)
    }
}

impl IntoResponse for Failed {
    fn into_response(self) -> Response {
        match self {
            Self::Lock(error) => error.into_response(),
            Self::Teapot => StatusCode::IM_A_TEAPOT.into_response(),
        }
    }
}

/// A lease of a minute without renewal, so only a release frees the lock in time.
#[lock(key = "job:{way}", locks = stage.locks, ttl_ms = 60_000)]
async fn work(State(stage): State<Stage>, Path(way): Path<String>) -> Result<&'static str, Failed> {
    let _inside = stage.enter();
    match way.as_str() {
        "panic" => panic!("as asked"),
        "question" => Err(Failed::Teapot)?,
        _ => {}
    }
    std::future::pending().await
}

/// A handler under a layer.
async fn layered(State(stage): State<Stage>, Path(_way): Path<String>) -> &'static str {
    let _inside = stage.enter();
    std::future::pending().await
}

/// Returns the stage, the address of the service, and another manager of the locks.
async fn stage(arena: &Arena) -> (Stage, std::net::SocketAddr, LockManager) {
    let locks = arena.manager().await;
    let stage = Stage { locks: locks.clone(), begun: Arc::new(Semaphore::new(0)), ended: Arc::new(Semaphore::new(0)) };
    let layer = LockLayer::new(locks, "job:{way}").expect("a key").ttl(Duration::from_secs(60));
    let layered = Router::new().route("/layered/{way}", post(layered)).layer(layer);
    let routes = Router::new().route("/work/{way}", post(work)).merge(layered).with_state(stage.clone());
    (stage, serve(routes).await, arena.manager().await)
}

async fn a_client_that_disconnects(arena: Arena) {
    let (stage, address, other) = stage(&arena).await;
    for path in ["work", "layered"] {
        let client = send(address, &format!("POST /{path}/gone"), "").await;
        happened(&stage.begun, "begun").await;
        drop(client);
        happened(&stage.ended, "ended: the body went on without its client").await;
        free_at_once(&other, "job:gone", path).await;
    }
}

async fn a_panic(arena: Arena) {
    let (stage, address, other) = stage(&arena).await;
    let client = send(address, "POST /work/panic", "").await;
    assert!(receive(client).await.is_none(), "the connection ends");
    happened(&stage.ended, "ended").await;
    free_at_once(&other, "job:panic", "a panic").await;
}

async fn an_early_question_mark(arena: Arena) {
    let (stage, address, other) = stage(&arena).await;
    let answer = receive(send(address, "POST /work/question", "").await).await.expect("an answer");
    assert_eq!(answer.status, 418, "the body's own error");
    happened(&stage.ended, "ended").await;
    free_at_once(&other, "job:question", "a question mark").await;
}

async fn a_lost_lease(arena: Arena) {
    let (stage, address, other) = stage(&arena).await;
    for path in ["work", "layered"] {
        let client = send(address, &format!("POST /{path}/lost"), "").await;
        happened(&stage.begun, "begun").await;
        let holder = other.holder("job:lost").await.expect("answered").expect("held");
        other.evict("job:lost", holder.id, EvictMode::Revoke, "test").await.expect("answered");
        happened(&stage.ended, "ended: the body went on without its lease").await;
        free_at_once(&other, "job:lost", path).await;
        let answer = timeout(LONG, receive(client)).await.expect("in time").expect("an answer");
        assert_eq!((answer.status, answer.json()["code"].as_str()), (503, Some("lease_lost")), "{answer:?}");
        assert!(answer.head.contains("content-type: application/json"), "{answer:?}");
    }
}

#[tokio::test]
async fn an_unreachable_store_is_503_without_details() {
    let arena = Arena::new(Kind::Redis).await;
    let mut options = arena.options();
    (options.request_timeout, options.outage_timeout) = (Duration::from_millis(300), Duration::from_millis(300));
    let locks = arena.manager_with(options).await;
    let layer = LockLayer::new(locks, "job").expect("a key");
    let address = serve(Router::new().route("/", get(async || "inside")).layer(layer)).await;
    assert_eq!(support::ask(address, "GET /").await.status, 200);
    arena.server().kill9();
    let answer = support::ask(address, "GET /").await;
    assert_eq!((answer.status, answer.json()["code"].as_str()), (503, Some("store_unreachable")), "{answer:?}");
    for secret in ["127.0.0.1", &arena.server().port().to_string(), "redis", "leasehold:lock"] {
        assert!(!answer.body.contains(secret), "{secret}: {answer:?}");
    }
}

#[tokio::test]
async fn a_layer_needs_its_header_and_its_parameter() {
    let locks = LockManager::connect("memory:").await.expect("memory");
    let layer = |key: &str| LockLayer::new(locks.clone(), key).expect("a key");
    let held = locks.lock("tenant:acme").await.expect("free");
    let routes = Router::new()
        .route("/header", get(async || "inside").layer(layer("tenant:{header:x-tenant}")))
        .route("/wrong/{id}", get(async || "inside").layer(layer("order:{order_id}")));
    let address = serve(routes).await;
    let with = |headers: &'static str| async move {
        receive(send(address, "GET /header", headers).await).await.expect("an answer")
    };
    let missing = with("").await;
    assert_eq!((missing.status, missing.json()["code"].as_str()), (400, Some("missing_header")), "{missing:?}");
    assert_eq!(with("X-Tenant: acme\r\n").await.status, 409);
    assert_eq!(with("X-Tenant: other\r\n").await.status, 200);
    let wrong = support::ask(address, "GET /wrong/1").await;
    assert_eq!((wrong.status, wrong.json()["code"].as_str()), (500, Some("internal")), "{wrong:?}");
    drop(held);
    for bad in ["", "{", "{query:x}"] {
        assert!(LockLayer::new(locks.clone(), bad).is_err(), "{bad}");
    }
    // A response had 409, so the status of this process is fixed.
    assert!(answer_held_with(StatusCode::LOCKED).is_err());
    assert!(answer_held_with(StatusCode::CONFLICT).is_ok());
    assert!(answer_held_with(StatusCode::OK).is_err());
}

/// Values that contain the separator do not share a lock with others.
#[tokio::test]
async fn names_of_several_values_do_not_collide() {
    let locks = LockManager::connect("memory:").await.expect("memory");
    let layer = LockLayer::new(locks.clone(), "cart:{header:x-tenant}:{cart}").expect("a key");
    let inside = {
        let locks = locks.clone();
        async move || locks.list("", None, 10).await.expect("answered").locks[0].0.to_string()
    };
    let address = serve(Router::new().route("/{cart}", get(inside).layer(layer))).await;
    let name = async |tenant: &str, cart: &str| {
        let sent = send(address, &format!("GET /{cart}"), &format!("X-Tenant: {tenant}\r\n")).await;
        receive(sent).await.expect("an answer").body
    };
    assert_eq!(name("acme", "7").await, "cart:acme:7", "ordinary values are as they were");
    assert_ne!(name("a:b", "c").await, name("a", "b:c").await);
}
