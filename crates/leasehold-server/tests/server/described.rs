//! The OpenAPI document, its page, and the figures.

use std::collections::BTreeSet;

use crate::support::Place;
use serde_json::{Value, json};

fn operations(document: &Value) -> Vec<(String, String)> {
    let paths = document["paths"].as_object().expect("paths");
    let of = |(path, methods): (&String, &Value)| {
        let methods = methods.as_object().expect("methods").keys();
        methods.map(|method| (method.to_uppercase(), path.clone())).collect::<Vec<_>>()
    };
    paths.iter().flat_map(of).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_document_says_what_is_served() {
    let place = Place::memory().await;
    let document = place.get("/openapi.json").await.ok();
    assert_eq!(document["openapi"], "3.1.0");
    let operations = operations(&document);
    let paths: BTreeSet<&str> = operations.iter().map(|(_, path)| path.as_str()).collect();
    let expected = [
        "/",
        "/api/v1/alerts",
        "/api/v1/audit",
        "/api/v1/events",
        "/api/v1/gpus",
        "/api/v1/journal",
        "/api/v1/journal/{id}/settle",
        "/api/v1/live",
        "/api/v1/locks",
        "/api/v1/locks/{name}",
        "/api/v1/locks/{name}/acquire",
        "/api/v1/locks/{name}/evict",
        "/api/v1/locks/{name}/release",
        "/api/v1/locks/{name}/renew",
        "/api/v1/monitor",
        "/api/v1/monitoring/gpu-lock/health",
        "/api/v1/overview",
        "/api/v1/tasks/locks",
        "/api/v1/tasks/{id}/lock",
        "/api/v1/tasks/{id}/release-lock",
        "/api/v1/timeline",
        "/assets/{file}",
        "/docs",
        "/healthz",
        "/metrics",
        "/openapi.json",
        "/readyz",
    ];
    assert_eq!(paths, expected.into_iter().collect());
    for (method, path) in &operations {
        if path == "/api/v1/events" {
            continue; // it does not end
        }
        let path = path.replace("{name}", "a").replace("{id}", "6").replace("{file}", "page.js");
        let answer = place.ask(method, &path, "Content-Type: application/json\r\n", "{}").await;
        let described = &document["paths"][path.replace("/a", "/{name}").as_str()];
        assert!(![404, 405].contains(&answer.status) && answer.status < 500, "{method} {path}: {answer:?} {described}");
    }
    // What is referred to is there.
    let text = document.to_string();
    for reference in text.split("#/components/schemas/").skip(1) {
        let name = reference.split('"').next().expect("a name");
        assert!(document["components"]["schemas"][name].is_object(), "{name}");
    }
    let fields = &document["components"]["schemas"]["LockView"]["properties"];
    let shown = place.get("/api/v1/locks/a").await.ok();
    let shown: BTreeSet<&String> = shown.as_object().expect("an object").keys().collect();
    assert_eq!(fields.as_object().expect("fields").keys().collect::<BTreeSet<_>>(), shown);
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_is_for_people_and_runs_nothing() {
    let place = Place::memory().await;
    let document = place.get("/openapi.json").await.ok();
    let page = place.get("/docs").await;
    assert_eq!(page.status, 200);
    assert!(page.head.contains("content-type: text/html"), "{}", page.head);
    assert!(page.head.contains("default-src 'none'; style-src 'sha256-"), "{}", page.head);
    for (method, path) in operations(&document) {
        assert!(page.body.contains(&format!("<b>{method}</b> <code>{path}</code>")), "{method} {path}");
    }
    for never in ["<script", "http://", "https://", "onclick", "style="] {
        assert!(!page.body.contains(never), "{never}");
    }
    assert!(page.body.contains("ttl_left_ms") && page.body.contains("request_id"), "fields are there");
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn figures_are_bounded_and_name_no_lock() {
    for place in Place::each().await {
        for n in 0..300 {
            let path = format!("/api/v1/locks/canary-{n}");
            place.get(&path).await.ok();
            place.ask(&format!("METHOD{n}"), &path, "", "").await;
            place.get(&format!("/nowhere/{n}")).await;
        }
        let taken = place.post("/api/v1/locks/canary/acquire", &json!({ "ttl_ms": 60_000 })).await.ok();
        place.post("/api/v1/locks/canary/release", &json!({ "token": taken["token"] })).await.ok();
        let text = loop {
            let metrics = place.get("/metrics").await;
            assert!(metrics.head.contains("application/openmetrics-text"), "{}", metrics.head);
            // Counters reach the store with the next pass.
            if metrics.body.contains("leasehold_fleet_total_locks_total 1\n") {
                break metrics.body;
            }
        };
        let series = text.lines().filter(|line| !line.starts_with('#')).count();
        println!("{}: {series} series", place.kind);
        assert!(series <= 1_000, "{series}");
        assert!(!text.contains("canary") && !text.contains("METHOD"), "{text}");
        assert!(text.contains("leasehold_store_up 1\n") && text.ends_with("# EOF\n"), "{text}");
        assert!(text.contains("route=\"/api/v1/locks/{name}\",method=\"GET\",status=\"2xx\"} 300\n"), "{text}");
        place.end().await;
    }
}
