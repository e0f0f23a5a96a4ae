//! The lock service over HTTP, on every store.

use std::time::{Duration, Instant};

use crate::support::{Place, quiet};
use futures_util::future::join_all;
use leasehold::LockManager;
use leasehold_server::Settings;
use leasehold_testkit::http::{Answer, receive};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

const A: &str = "/api/v1/locks/deploy";

fn id(n: usize) -> String {
    format!("request-of-the-test-{n:04}")
}

async fn acquire(place: &Place, body: Value) -> Answer {
    place.post(&format!("{A}/acquire"), &body).await
}

async fn release(place: &Place, token: &Value) -> Answer {
    place.post(&format!("{A}/release"), &json!({ "token": token })).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_acquired_renewed_and_released_over_http() {
    for place in Place::each().await {
        let taken = acquire(&place, json!({ "ttl_ms": 60_000, "owner": "ruby worker" })).await.ok();
        assert_eq!(
            (&taken["name"], &taken["held"], &taken["owner"]),
            (&json!("deploy"), &json!(true), &json!("ruby worker"))
        );
        assert_eq!((&taken["connected"], &taken["ttl_ms"]), (&Value::Null, &json!(60_000)), "it belongs to no process");
        let (token, fence) = (taken["token"].clone(), taken["fence"].as_u64().expect("a fence"));

        let seen = place.get(A).await.ok();
        assert_eq!((&seen["holder_id"], &seen["fence"]), (&taken["holder_id"], &json!(fence)), "{}", place.kind);
        assert!(!seen.to_string().contains(token.as_str().expect("a token")), "only the one who asked knows it");

        let second = acquire(&place, json!({ "ttl_ms": 1_000 })).await;
        assert_eq!(second.code(), (409, "held".into()));
        assert_eq!(second.json()["owner"], "ruby worker");
        assert!(place.locks.lock("deploy").no_wait().optional().await.expect("answered").is_none(), "nor the library");

        let body = json!({ "token": token, "ttl_ms": 120_000 });
        let kept = place.post(&format!("{A}/renew"), &body).await.ok();
        assert!(kept["ttl_left_ms"].as_u64().is_some_and(|left| left > 100_000), "{kept}");

        let stranger = json!(leasehold::lease::Token::random().reveal());
        for verb in ["renew", "release"] {
            let answer = place.post(&format!("{A}/{verb}"), &json!({ "token": stranger })).await;
            assert_eq!(answer.code(), (409, "not_owner".into()), "{verb} on {}", place.kind);
        }
        assert_eq!(release(&place, &token).await.ok(), json!({ "name": "deploy", "released": true }));
        assert_eq!(release(&place, &token).await.code(), (409, "not_owner".into()), "{}", place.kind);
        assert_eq!(place.get(A).await.ok()["held"], false);

        let again = acquire(&place, json!({ "ttl_ms": 1_000 })).await.ok();
        assert!(again["fence"].as_u64().expect("a fence") > fence, "{}", place.kind);
        release(&place, &again["token"]).await.ok();
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquire_without_a_body_uses_the_defaults() {
    let place = Place::memory().await;
    let nothing = json!({ "ttl_ms": null, "wait_ms": null, "owner": null, "request_id": null });
    for body in [json!({}), nothing] {
        let taken = acquire(&place, body).await.ok();
        assert_eq!((&taken["ttl_ms"], &taken["owner"]), (&json!(30_000), &json!("api")));
        assert_eq!(acquire(&place, json!({})).await.code(), (409, "held".into()), "it does not wait");
        release(&place, &taken["token"]).await.ok();
    }
    let required = |name: &str| {
        let document = place.get("/openapi.json");
        let path = format!("/components/schemas/{name}/required");
        async move { document.await.ok().pointer(&path).cloned() }
    };
    assert_eq!(required("Acquire").await, None);
    assert_eq!(required("Renew").await, Some(json!(["token"])));
    place.end().await;
}

/// Sends the same request through two servers before the first is answered.
#[tokio::test(flavor = "multi_thread")]
async fn concurrent_requests_with_one_id_are_answered_at_once() {
    let place = Place::redis().await;
    let url = place.redis.as_ref().expect("a server").url();
    let open = || async { LockManager::connect_with(&url, quiet()).await.expect("a store") };
    let second = Place::over("redis", open().await, open().await, Settings::default()).await;
    let mut late = Vec::new();
    for round in 0..5 {
        let guard = place.locks.lock("deploy").await.expect("free");
        let before = tries(&place).await;
        let body = json!({ "wait_ms": 20_000, "request_id": id(round) });
        let path = format!("{A}/acquire");
        let waiting = join_all([&place, &place, &second].map(|server| server.begin(&path, &body))).await;
        while tries(&place).await < before + 3 {
            tokio::task::yield_now().await;
        }
        guard.release().await.expect("answered");
        let answered = join_all(waiting.into_iter().map(async |stream| {
            let answer = receive(stream).await.expect("an answer").ok();
            (Instant::now(), answer)
        }));
        let answered = answered.await;
        let (first, taken) = answered.iter().min_by_key(|(at, _)| *at).expect("three");
        for (_, answer) in &answered {
            assert_eq!((&answer["token"], &answer["fence"]), (&taken["token"], &taken["fence"]));
        }
        late.push(answered.iter().map(|(at, _)| *at - *first).max().expect("three"));
        release(&place, &taken["token"]).await.ok();
    }
    // A waiter that misses the notification polls after at least three quarters of a second; a busy machine may delay
    // some.
    late.sort();
    println!("the last of three is answered after the first: {late:?}");
    assert!(late[2] < Duration::from_millis(400), "{late:?}");
    second.end().await;
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_ends_with_the_lock_or_at_its_limit() {
    for place in Place::each().await {
        let guard = place.locks.lock("deploy").await.expect("free");
        for request_id in [Value::Null, json!(id(1))] {
            let began = Instant::now();
            let late = acquire(&place, json!({ "ttl_ms": 1_000, "wait_ms": 300, "request_id": request_id })).await;
            assert_eq!(late.code(), (409, "held".into()), "{}", place.kind);
            assert!(began.elapsed() >= Duration::from_millis(300), "{:?}", began.elapsed());
        }
        let waiting = join_all([Value::Null, json!(id(2))].map(async |request_id| {
            let body = json!({ "ttl_ms": 200, "wait_ms": 20_000, "request_id": request_id });
            place.begin("/api/v1/locks/deploy/acquire", &body).await
        }));
        let waiting = waiting.await;
        guard.release().await.expect("answered");
        for stream in waiting {
            receive(stream).await.expect("an answer").ok();
        }
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_request_gets_the_same_lease() {
    for place in Place::each().await {
        let body = json!({ "ttl_ms": 60_000, "request_id": id(1) });
        let first = acquire(&place, body.clone()).await.ok();
        let again = acquire(&place, body.clone()).await.ok();
        for same in ["token", "fence", "holder_id", "since_ms"] {
            assert_eq!(first[same], again[same], "{same} on {}", place.kind);
        }
        assert_eq!(acquire(&place, json!({ "ttl_ms": 1_000, "request_id": id(2) })).await.code(), (409, "held".into()));
        let other = place.post("/api/v1/locks/other/acquire", &body).await.ok();
        assert_ne!(other["token"], first["token"], "a token opens one lock");
        release(&place, &first["token"]).await.ok();

        // Concurrently, on a free lock: all get the same lease, with the same fence.
        for round in 0..20 {
            let body = json!({ "ttl_ms": 60_000, "request_id": id(2) });
            let path = format!("/api/v1/locks/free-{round}/acquire");
            let many = join_all((0..4).map(|_| place.begin(&path, &body))).await;
            let many: Vec<Value> =
                join_all(many.into_iter().map(receive)).await.into_iter().map(|a| a.expect("one").ok()).collect();
            for one in &many {
                assert_eq!((&one["token"], &one["fence"]), (&many[0]["token"], &many[0]["fence"]), "{}", place.kind);
            }
        }

        // The same while another holder has the lock.
        let guard = place.locks.lock("deploy").await.expect("free");
        let body = json!({ "ttl_ms": 60_000, "wait_ms": 20_000, "request_id": id(3) });
        let many = join_all((0..8).map(|_| place.begin("/api/v1/locks/deploy/acquire", &body))).await;
        guard.release().await.expect("answered");
        let many: Vec<Value> =
            join_all(many.into_iter().map(receive)).await.into_iter().map(|a| a.expect("one").ok()).collect();
        for one in &many {
            assert_eq!((&one["token"], &one["fence"]), (&many[0]["token"], &many[0]["fence"]), "{}", place.kind);
        }
        let seen = place.get(A).await.ok();
        assert_eq!((&seen["holder_id"], &seen["fence"]), (&many[0]["holder_id"], &many[0]["fence"]), "{}", place.kind);
        release(&place, &many[0]["token"]).await.ok();
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disconnected_client_keeps_no_lock() {
    for place in Place::each().await {
        let guard = place.locks.lock("deploy").await.expect("free");
        let body = json!({ "ttl_ms": 86_400_000, "wait_ms": 60_000 });
        let gone = place.begin("/api/v1/locks/deploy/acquire", &body).await;
        place.get(A).await.ok();
        drop(gone);
        guard.release().await.expect("answered");
        let next = place.locks.lock("deploy").wait_up_to(Duration::from_secs(10)).await;
        next.unwrap_or_else(|error| panic!("{}: {error}", place.kind)).release().await.expect("answered");
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_outlives_the_server_and_ends_with_its_ttl() {
    for mut place in [Place::sqlite().await, Place::redis().await] {
        acquire(&place, json!({ "ttl_ms": 2_000 })).await.ok();
        place.stop();
        place.ended().await;
        assert!(place.locks.is_locked("deploy").await.expect("answered"), "{}: it outlives the server", place.kind);
        let guard = place.locks.lock("deploy").wait_up_to(Duration::from_secs(10)).await.expect("its ttl is over");
        guard.release().await.expect("answered");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_requests_are_answered_when_the_server_stops() {
    let mut place = Place::redis().await;
    let guard = place.locks.lock("deploy").await.expect("free");
    let before = tries(&place).await;
    let body = json!({ "ttl_ms": 1_000, "wait_ms": 600_000 });
    let waiting = place.begin("/api/v1/locks/deploy/acquire", &body).await;
    while tries(&place).await < before + 2 {
        tokio::task::yield_now().await;
    }
    place.stop();
    // Before the server gives up on late clients.
    let response = tokio::time::timeout(Duration::from_secs(8), receive(waiting)).await.expect("at once");
    assert_eq!(response.expect("an answer").code(), (503, "shutting_down".into()));
    place.ended().await;
    guard.release().await.expect("answered");
}

/// How often clients have tried to acquire a lock.
async fn tries(place: &Place) -> u64 {
    let stats = place.redis.as_ref().expect("a server").commandstats().await;
    stats.get("set").copied().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn renewing_a_revoked_lease_reports_the_revocation() {
    for place in Place::each().await {
        let body = json!({ "ttl_ms": 60_000, "request_id": id(1) });
        let taken = acquire(&place, body.clone()).await.ok();
        let evict = json!({ "holder_id": taken["holder_id"], "reason": "make room" });
        place.post(&format!("{A}/evict"), &evict).await.ok();
        let renewed = place.post(&format!("{A}/renew"), &json!({ "token": taken["token"] })).await;
        assert_eq!(renewed.code(), (409, "revoked".into()), "{}", place.kind);
        assert_eq!(acquire(&place, body).await.code(), (409, "revoked".into()), "{}", place.kind);
        release(&place, &taken["token"]).await.ok();
        assert_eq!(place.get(A).await.ok()["held"], false);
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_invalid_field_is_named() {
    let place = Place::memory().await;
    let wrong = [json!(true), json!(-1), json!(1.5), json!({}), json!([1]), json!("x")];
    let bodies = [
        ("locks/deploy/acquire", json!({}), vec!["ttl_ms", "wait_ms", "owner", "request_id"]),
        ("locks/deploy/renew", json!({ "token": "t" }), vec!["token", "ttl_ms"]),
        ("locks/deploy/release", json!({ "token": "t" }), vec!["token"]),
        ("locks/deploy/evict", json!({ "holder_id": "h", "reason": "r" }), vec!["holder_id", "mode", "reason"]),
        ("journal/e/settle", json!({ "reason": "r" }), vec!["reason"]),
    ];
    for (route, whole, fields) in bodies {
        let refused = async |body: &Value, field: &str| {
            let answer = place.post(&format!("/api/v1/{route}"), body).await;
            assert_eq!(answer.code(), (400, "invalid_body".into()), "{route} {body}");
            let text = answer.json()["message"].as_str().expect("a text").to_owned();
            assert!(text.contains(field) && !text.contains("u64"), "{route} {body}: {text}");
        };
        for field in fields {
            let text = !field.ends_with("_ms");
            for value in wrong.iter().filter(|value| !value.is_string() || !text || field == "mode") {
                let mut body = whole.clone();
                body[field] = value.clone();
                refused(&body, field).await;
            }
            if !whole[field].is_null() {
                let mut body = whole.clone();
                body.as_object_mut().expect("an object").remove(field);
                refused(&body, field).await;
            }
        }
        let mut unknown = whole.clone();
        unknown["wait"] = json!(5);
        refused(&unknown, "wait").await;
    }
    assert_eq!(place.get(A).await.ok()["held"], false, "nothing was done");
    place.end().await;
}

/// A client that writes everything before it reads anything.
#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_too_large_is_answered_and_not_cut_off() {
    let place = Place::memory().await;
    let long = "x".repeat(16 * 1024 * 1024);
    let chunked = "Transfer-Encoding: chunked\r\n";
    for (length, wanted) in [
        (format!("Content-Length: {}\r\nContent-Type: application/json\r\n", long.len()), (413, "too_large")),
        (format!("Content-Length: {}\r\n", long.len()), (415, "not_json")),
        (format!("{chunked}Content-Type: application/json\r\n"), (413, "too_large")),
    ] {
        let mut stream = TcpStream::connect(place.at).await.expect("listening");
        let head = format!("POST {A}/acquire HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n{length}\r\n", place.at);
        let body =
            if length.contains("chunked") { format!("{:x}\r\n{long}\r\n0\r\n\r\n", long.len()) } else { long.clone() };
        stream.write_all((head + &body).as_bytes()).await.expect("taken to the end");
        let answer = receive(stream).await.expect("an answer");
        assert_eq!(answer.code(), (wanted.0, wanted.1.to_owned()), "{length}");
    }
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_bodies_get_a_specific_error() {
    let place = Place::memory().await;
    let token = leasehold::lease::Token::random().reveal().to_owned();
    let long = "x".repeat(70_000);
    let acquire = [
        (json!({ "ttl_ms": 0 }), "invalid_ttl"),
        (json!({ "ttl_ms": 86_400_001 }), "invalid_ttl"),
        (json!({ "ttl_ms": u64::MAX }), "invalid_ttl"),
        (json!({ "ttl_ms": 1_000, "wait_ms": 600_001 }), "invalid_wait"),
        (json!({ "ttl_ms": 1_000, "owner": "" }), "invalid_owner"),
        (json!({ "ttl_ms": 1_000, "owner": "a\u{1b}[2J" }), "invalid_owner"),
        (json!({ "ttl_ms": 1_000, "request_id": "1" }), "invalid_request_id"),
        (json!({ "ttl_ms": 1_000, "request_id": "with a space in the middle" }), "invalid_request_id"),
    ];
    let others = [
        ("renew", json!({ "token": "short" }), "invalid_id"),
        ("renew", json!({ "token": token, "ttl_ms": 1 }), "invalid_ttl"),
        ("release", json!({ "token": " ".repeat(32) }), "invalid_id"),
        ("evict", json!({ "holder_id": "XYZ", "reason": "why" }), "invalid_id"),
        ("evict", json!({ "holder_id": "7f3a91c2b04d", "reason": " " }), "invalid_reason"),
        ("evict", json!({ "holder_id": "7f3a91c2b04d", "reason": "a\nb" }), "invalid_reason"),
        ("evict", json!({ "holder_id": "7f3a91c2b04d", "reason": "x".repeat(501) }), "invalid_reason"),
    ];
    let acquire = acquire.into_iter().map(|(body, code)| ("acquire", body, code));
    for (verb, body, code) in acquire.chain(others) {
        let answer = place.post(&format!("{A}/{verb}"), &body).await;
        assert_eq!(answer.code(), (400, code.to_owned()), "{verb} {body}: {answer:?}");
    }
    let json_type = "Content-Type: application/json\r\n";
    for (headers, body, status, code) in [
        (json_type, "{", 400, "invalid_body"),
        (json_type, "", 400, "invalid_body"),
        (json_type, "[]", 400, "invalid_body"),
        (json_type, "{} {}", 400, "invalid_body"),
        (json_type, long.as_str(), 413, "too_large"),
        ("", "{\"ttl_ms\":1000}", 415, "not_json"),
        ("Content-Type: text/plain\r\n", "{\"ttl_ms\":1000}", 415, "not_json"),
    ] {
        let answer = place.ask("POST", &format!("{A}/acquire"), headers, body).await;
        assert_eq!(answer.code(), (status, code.to_owned()), "{answer:?}");
    }
    assert_eq!(place.get(A).await.ok()["held"], false, "nothing was done");
    place.end().await;
}
