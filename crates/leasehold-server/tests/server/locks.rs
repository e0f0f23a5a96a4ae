//! Inspecting locks over HTTP, on every store.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::support::{Place, encoded};
use leasehold_server::{ServeError, Server, Settings};
use leasehold_testkit::http::{receive, send};
use serde_json::{Value, json};

const TTL: Duration = Duration::from_secs(60);

/// Removes the fields that change between two reads.
fn still(mut view: Value) -> Value {
    let fields = view.as_object_mut().expect("an object");
    for moving in ["held_ms", "ttl_left_ms", "last_seen_ms"] {
        assert!(fields.remove(moving).is_some(), "{moving} is missing");
    }
    for waiter in fields["waiters"].as_array_mut().expect("a list") {
        waiter.as_object_mut().expect("an object").remove("waiting_ms");
    }
    view
}

#[tokio::test(flavor = "multi_thread")]
async fn the_api_shows_a_lock_like_the_library() {
    for place in Place::each().await {
        let guard = place.locks.lock("order:42").owner("checkout").ttl(TTL).await.expect("free");
        let waiting = tokio::spawn(place.locks.lock("order:42").owner("next").ttl(TTL).into_future());
        while place.locks.info("order:42").await.expect("answered").waiters.is_empty() {
            tokio::task::yield_now().await;
        }
        let seen =
            still(serde_json::to_value(place.locks.info("order:42").await.expect("answered").view()).expect("JSON"));
        assert_eq!(still(place.get("/api/v1/locks/order:42").await.ok()), seen, "{}", place.kind);
        assert_eq!(seen["holder_id"], guard.holder_id().to_string());
        assert_eq!(seen["waiters"][0]["owner"].as_str().map(|owner| owner.starts_with("next@")), Some(true));

        let list = place.get("/api/v1/locks?prefix=order").await.ok();
        assert_eq!(still(list["locks"][0].clone()), seen, "{}", place.kind);
        assert_eq!((list["locks"].as_array().map(Vec::len), &list["next_cursor"]), (Some(1), &Value::Null));
        assert_eq!(place.get("/api/v1/locks?prefix=nobody").await.ok()["locks"], json!([]));

        let free = place.get("/api/v1/locks/nobody").await.ok();
        assert_eq!((&free["held"], &free["owner"]), (&json!(false), &Value::Null));
        drop(guard);
        drop(waiting.await.expect("no panic").expect("granted"));
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_may_have_any_character() {
    let names =
        ["a/b/c", "ünï 日本", "100%", "%2F", "a?b#c&d=e", "a+b", "...", "<script>alert(1)</script>", "\\\"'", "{x}"];
    for place in Place::each().await {
        for name in names {
            let guard = place.locks.lock(name).ttl(TTL).await.expect("free");
            let seen = place.get(&format!("/api/v1/locks/{}", encoded(name))).await.ok();
            assert_eq!((&seen["name"], &seen["held"]), (&json!(name), &json!(true)), "{}", place.kind);
            let list = place.get(&format!("/api/v1/locks?prefix={}", encoded(name))).await.ok();
            assert_eq!(list["locks"][0]["name"], json!(name), "{}", place.kind);
            guard.release().await.expect("answered");
        }
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn paging_returns_every_lock() {
    for place in Place::each().await {
        let mut guards = Vec::new();
        for n in 0..60 {
            guards.push(place.locks.lock(format!("page:{n}")).ttl(TTL).await.expect("free"));
        }
        let other = place.locks.lock("other").ttl(TTL).await.expect("free");
        let (mut seen, mut pages, mut cursor) = (BTreeSet::new(), 0, String::new());
        loop {
            let page = place.get(&format!("/api/v1/locks?prefix=page:&limit=10{cursor}")).await.ok();
            let locks = page["locks"].as_array().expect("a list");
            assert!(locks.len() <= 30, "{}: {} of 10", place.kind, locks.len());
            seen.extend(locks.iter().map(|lock| lock["name"].as_str().expect("a name").to_owned()));
            pages += 1;
            match page["next_cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={}", encoded(next)),
                None => break,
            }
        }
        assert_eq!(seen, (0..60).map(|n| format!("page:{n}")).collect(), "{}", place.kind);
        assert!(pages > 2, "{}: {pages}", place.kind);
        drop((guards, other));
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_requests_get_a_specific_error() {
    let place = Place::redis().await;
    let long = format!("/api/v1/locks/{}", "x".repeat(513));
    let table = [
        ("GET", "/nowhere", 404, "no_such_route"),
        ("GET", "/api/v1/locks/a/b", 404, "no_such_route"),
        ("POST", "/api/v1/locks", 405, "method_not_allowed"),
        ("DELETE", "/api/v1/locks/a", 405, "method_not_allowed"),
        ("GET", "/api/v1/locks?limit=0", 400, "invalid_limit"),
        ("GET", "/api/v1/locks?limit=1001", 400, "invalid_limit"),
        ("GET", "/api/v1/locks?limit=ten", 400, "invalid_query"),
        ("GET", "/api/v1/locks?prefx=a", 400, "invalid_query"),
        ("GET", "/api/v1/locks?cursor=nonsense", 400, "invalid_cursor"),
        ("GET", "/api/v1/locks?prefix=%00", 400, "invalid_name"),
        ("GET", "/api/v1/locks/%0A", 400, "invalid_name"),
        ("GET", "/api/v1/locks/%FF", 400, "invalid_name"),
        ("GET", &long, 400, "invalid_name"),
    ];
    for (method, path, status, code) in table {
        let answer = place.ask(method, path, "", "").await;
        assert_eq!(answer.code(), (status, code.to_owned()), "{method} {path}: {answer:?}");
        assert!(answer.json()["message"].as_str().is_some_and(|text| text.len() > 10), "{answer:?}");
        assert!(answer.head.contains("\r\ncontent-type: application/json"), "{answer:?}");
    }
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_host_names_are_rejected_and_every_response_has_security_headers() {
    let mut settings = Settings::default();
    settings.hosts = vec!["locks.example".into()];
    let place = Place::memory_with(settings).await;
    for (headers, status) in [
        ("Host: evil.example\r\n", 421),
        ("Host: localhost.evil.example:80\r\n", 421),
        ("", 421),
        ("Host: localhost\r\n", 200),
        ("Host: locks.example\r\n", 200),
    ] {
        for path in ["/api/v1/locks", "/healthz"] {
            let answer = receive(send(place.at, &format!("GET {path}"), headers, "").await).await.expect("an answer");
            assert_eq!(answer.status, status, "{headers:?} {path}: {answer:?}");
            for header in ["content-security-policy: default-src 'none'", "x-content-type-options: nosniff", "no-store"]
            {
                assert!(answer.head.contains(header), "{header} is missing: {answer:?}");
            }
        }
    }
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_outage_is_reported_and_ends() {
    let place = Place::redis().await;
    let redis = place.redis.as_ref().expect("a server");
    assert_eq!(place.get("/readyz").await.ok(), json!({ "status": "up" }));
    redis.kill9();
    let down = place.get("/readyz").await;
    assert_eq!((down.status, down.json()), (503, json!({ "status": "down" })), "nothing but up or down");
    assert_eq!(place.get("/healthz").await.ok(), json!({ "status": "up" }));
    for path in ["/api/v1/locks", "/api/v1/locks/a"] {
        let answer = place.get(path).await;
        assert_eq!(answer.code(), (503, "store_unreachable".to_owned()));
        assert!(answer.head.contains("\r\nretry-after: 1"), "{answer:?}");
        assert!(!answer.body.contains("127.0.0.1"), "hosts belong into the log: {answer:?}");
    }
    redis.restart().await;
    while place.get("/readyz").await.status != 200 {
        tokio::task::yield_now().await;
    }
    assert_eq!(place.get("/api/v1/locks").await.ok()["locks"], json!([]));
    place.end().await;
}

#[tokio::test]
async fn a_public_address_without_keys_is_rejected() {
    let locks = leasehold::LockManager::connect("memory:").await.expect("memory");
    let listener = tokio::net::TcpListener::bind("0.0.0.0:0").await.expect("a port");
    let ended = Server::new(locks, Settings::default()).run(listener, std::future::pending()).await;
    assert!(matches!(ended, Err(ServeError::NeedsKeys { .. })), "{ended:?}");
}
