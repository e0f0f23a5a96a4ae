//! The OpenAPI document, its page, and the metrics.

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
async fn the_openapi_document_matches_the_routes() {
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
    // Every reference resolves.
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
async fn the_api_reference_is_html_without_scripts() {
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
async fn metrics_are_bounded_and_contain_no_lock_names() {
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
            // As Prometheus asks for it.
            let accept =
                "Accept: application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5,*/*;q=0.2\r\n";
            let metrics = place.ask("GET", "/metrics", accept, "").await;
            assert!(metrics.head.contains("application/openmetrics-text; version=1.0.0"), "{}", metrics.head);
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
        // As other clients ask: every series is described under its own name.
        let plain = place.get("/metrics").await;
        assert!(plain.head.contains("content-type: text/plain; version=0.0.4"), "{}", plain.head);
        let names =
            |what: &str| plain.body.lines().filter_map(|line| line.strip_prefix(what)?.split(' ').next()).collect();
        let (helped, typed): (BTreeSet<&str>, BTreeSet<&str>) = (names("# HELP "), names("# TYPE "));
        assert!(helped == typed && !plain.body.contains("# EOF") && !plain.body.contains("# UNIT"), "{}", plain.body);
        for line in plain.body.lines().filter(|line| !line.starts_with('#')) {
            let name = line.split(['{', ' ']).next().expect("a name");
            let of_histogram = ["_bucket", "_count", "_sum"].iter().find_map(|end| name.strip_suffix(end));
            assert!(typed.contains(name) || of_histogram.is_some_and(|name| typed.contains(name)), "{line}");
        }
        place.end().await;
    }
}
