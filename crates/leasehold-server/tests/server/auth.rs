//! Authentication: which key allows what, and what no response reveals.

use std::time::{Duration, Instant};

use crate::support::Place;
use leasehold_server::{KeyFile, Role, Settings};
use leasehold_testkit::http::{receive, send};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

struct Keyed {
    place: Place,
    viewer: String,
    operator: String,
    operator_id: String,
    /// Another operator's key.
    other: String,
    file: KeyFile,
    dir: tempfile::TempDir,
}

impl Keyed {
    async fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let file = KeyFile::new(dir.path().join("keys.json"));
        let (_, viewer) = file.create("dashboard", Role::Viewer).expect("made");
        let (entry, operator) = file.create("ops", Role::Operator).expect("made");
        let (_, other) = file.create("others", Role::Operator).expect("made");
        let mut settings = Settings::default();
        settings.keys = Some(file.clone());
        settings.audit = Some(dir.path().join("audit.jsonl"));
        Self { place: Place::memory_with(settings).await, viewer, operator, operator_id: entry.id, other, file, dir }
    }

    async fn ask(&self, method: &str, path: &str, headers: &str) -> (u16, String) {
        let body = if method == "POST" { "{}" } else { "" };
        let headers = format!("Content-Type: application/json\r\n{headers}");
        let answer = self.place.ask(method, path, &headers, body).await;
        let code =
            serde_json::from_str::<Value>(&answer.body).ok().and_then(|said| Some(said["code"].as_str()?.to_owned()));
        (answer.status, code.unwrap_or_default())
    }

    fn audit(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.dir.path().join("audit.jsonl")).expect("written");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }
}

/// Every operation of the served OpenAPI document as a client would send it: method, path, and whether it
/// requires a key. So new routes are tested, too.
async fn operations(keyed: &Keyed) -> Vec<(String, String, bool)> {
    let document = keyed.place.get(&format!("/openapi.json?api_key={}", keyed.viewer)).await.ok();
    let mut found = Vec::new();
    for (path, methods) in document["paths"].as_object().expect("paths") {
        let asked = path.replace("{name}", "a").replace("{id}", "6").replace("{file}", "page.js");
        assert!(!asked.contains('{'), "this test does not know how to fill in {path}");
        for (method, operation) in methods.as_object().expect("methods") {
            let open =
                operation["security"].as_array().is_some_and(|wanted| wanted.iter().any(|one| one == &json!({})));
            found.push((method.to_uppercase(), asked.clone(), !open));
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_needs_a_key_and_changing_ones_an_operators() {
    let keyed = Keyed::start().await;
    let (revoked_entry, revoked) = keyed.file.create("former", Role::Operator).expect("made");
    keyed.file.revoke(&revoked_entry.id).expect("revoked");
    // The server may have read the file in between.
    let began = Instant::now();
    while keyed.ask("GET", "/api/v1/locks", &format!("X-API-Key: {revoked}\r\n")).await.0 != 401 {
        assert!(began.elapsed() < Duration::from_secs(5));
    }
    let mut routes = operations(&keyed).await;
    let open: Vec<&str> = routes.iter().filter(|(.., keyed)| !keyed).map(|(_, path, _)| path.as_str()).collect();
    assert_eq!(open, ["/", "/assets/page.js", "/healthz", "/readyz"], "the only routes without a key");
    let (described, methods) = (routes.len(), ["GET", "POST", "PUT", "DELETE", "PATCH"]);
    // Undescribed requests need a key as well: other methods of each path, and unknown paths.
    let paths: std::collections::BTreeSet<String> =
        routes.iter().map(|(_, path, _)| path.clone()).chain(["/nowhere".into(), "/api/v1".into()]).collect();
    for (path, method) in paths.iter().flat_map(|path| methods.map(|method| (path, method))) {
        let is_open = ["/healthz", "/readyz"].contains(&path.as_str());
        if !is_open && (method != "GET" || ["/nowhere", "/api/v1"].contains(&path.as_str())) {
            let described = routes.iter().any(|(known, at, _)| known == method && at == path);
            routes.extend((!described).then(|| (method.to_owned(), path.clone(), true)));
        }
    }

    let places = |key: &str| {
        [
            (format!("Authorization: Bearer {key}\r\n"), String::new()),
            (format!("X-API-Key: {key}\r\n"), String::new()),
            (String::new(), format!("?api_key={key}")),
        ]
    };
    let op = &keyed.operator;
    let mut bad: Vec<(String, String)> =
        [&op.replace("lhk_", "lhk_0"), &format!("{op}x"), &op[1..].to_owned(), &revoked]
            .into_iter()
            .flat_map(|wrong| places(wrong))
            .collect();
    bad.extend(
        [
            String::new(),
            "Authorization:\r\n".into(),
            "Authorization: Bearer\r\n".into(),
            "Authorization: Bearer \r\n".into(),
            format!("Authorization: {op}\r\n"),
            format!("Authorization: Basic {op}\r\n"),
            format!("Authorization: Bearer{op}\r\n"),
            format!("Authorization: Bearer \"{op}\"\r\n"),
            format!("Authorization: Bearer {op},{op}\r\n"),
            "X-API-Key:\r\n".into(),
            format!("X-API-Key: Bearer {op}\r\n"),
            format!("Api-Key: {op}\r\n"),
            format!("Cookie: api_key={op}\r\n"),
            // The first presented key counts, not the one that matches.
            format!("Authorization: Bearer no\r\nX-API-Key: {op}\r\n"),
        ]
        .map(|headers| (headers, String::new())),
    );
    bad.extend(["?api_key=", "?api_key", "?api_key=%00", "?API_KEY=x"].map(|query| (String::new(), query.to_owned())));
    bad.push((String::new(), format!("?api_key=no&api_key={op}")));
    let mut refused = 0;
    for (method, path, _) in routes.iter().filter(|(.., needs)| *needs) {
        for (headers, query) in &bad {
            let (status, code) = keyed.ask(method, &format!("{path}{query}"), headers).await;
            // After the thirtieth wrong key from one address.
            let rejected =
                matches!((status, code.as_str()), (401, "no_key" | "wrong_key") | (429, "too_many_failures"));
            assert!(rejected, "{method} {path}{query} {headers:?}: {status} {code}");
            refused += 1;
        }
    }

    let mut let_in = 0;
    for (method, path, _) in routes.iter().filter(|(_, path, _)| path != "/api/v1/events") {
        for (key, operator) in [(&keyed.viewer, false), (op, true)] {
            for (headers, query) in places(key) {
                let (status, code) = keyed.ask(method, &format!("{path}{query}"), &headers).await;
                let allowed = operator || method == "GET";
                assert_eq!(status != 403, allowed, "{method} {path}{query} {headers:?}: {status} {code}");
                assert!(allowed || code == "needs_operator", "{code}");
                assert!(![401, 429].contains(&status), "a valid key is always accepted: {method} {path}: {status}");
                let_in += 1;
            }
        }
    }
    for path in ["/healthz", "/readyz"] {
        let answer = keyed.place.get(path).await;
        assert_eq!((answer.status, answer.json()), (200, json!({ "status": "up" })), "and nothing more");
    }
    println!(
        "{described} operations in the document, {} with those that are not: {} ways of not having a right key, {refused} requests \
         refused; 2 roles in 3 places, {let_in} requests judged by their role",
        routes.len(),
        bad.len(),
    );
    keyed.place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_key_is_rejected_within_a_second() {
    let keyed = Keyed::start().await;
    let header = format!("X-API-Key: {}\r\n", keyed.operator);
    assert_eq!(keyed.ask("GET", "/api/v1/locks", &header).await.0, 200);
    let at = keyed.place.at;
    let mut reads = send(at, "GET /api/v1/events", &format!("Host: {at}\r\n{header}"), "").await;
    let others = format!("Host: {at}\r\nX-API-Key: {}\r\n", keyed.other);
    let mut reads_on = send(at, "GET /api/v1/events", &others, "").await;
    keyed.file.revoke(&keyed.operator_id).expect("revoked");
    let began = Instant::now();
    while keyed.ask("GET", "/api/v1/locks", &header).await.0 == 200 {
        assert!(began.elapsed() < Duration::from_secs(5));
    }
    let mut text = String::new();
    let ended = tokio::time::timeout(Duration::from_secs(20), reads.read_to_string(&mut text)).await;
    assert!(ended.is_ok() && text.contains("200 OK"), "a stream that was open ends as well: {text}");
    // A subscriber with another key receives later events.
    keyed.place.locks.lock("gpu_lock:0").await.expect("free").release().await.expect("ours");
    let mut text = String::new();
    while !text.contains("event: released") {
        let mut bytes = [0; 4_096];
        let n = reads_on.read(&mut bytes).await.expect("read");
        assert!(n > 0, "it ended: {text}");
        text += &String::from_utf8_lossy(&bytes[..n]);
    }
    keyed.place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cross_site_requests_are_rejected() {
    let keyed = Keyed::start().await;
    let place = &keyed.place;
    let own = place.at;
    let form = "Content-Type: application/x-www-form-urlencoded\r\n";
    let plain = "Content-Type: text/plain\r\n";
    let json_type = "Content-Type: application/json\r\n";
    let forged = [
        format!("{json_type}Origin: http://evil.example\r\n"),
        format!("{json_type}Origin: https://evil.example\r\nSec-Fetch-Site: cross-site\r\n"),
        format!("{json_type}Origin: null\r\n"),
        format!("{json_type}Origin: http://localhost:1\r\n"),
        format!("{json_type}Origin: http://{own}.evil.example\r\n"),
        format!("{json_type}Origin: http://evil.example/{own}\r\n"),
        format!("{json_type}Origin: http://evil.example@{own}.evil.example\r\n"),
        format!("{json_type}Origin: {own}\r\n"),
        format!("{json_type}Sec-Fetch-Site: cross-site\r\n"),
        format!("{json_type}Sec-Fetch-Site: same-site\r\n"),
        format!("{json_type}Origin: http://{own}\r\nSec-Fetch-Site: cross-site\r\n"),
        format!("{json_type}Referer: http://evil.example/http://{own}/\r\n"),
        format!("{form}Origin: http://evil.example\r\nSec-Fetch-Mode: navigate\r\n"),
        format!("{plain}Origin: null\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\n"),
        "Content-Type: multipart/form-data; boundary=x\r\nOrigin: http://evil.example\r\n".to_owned(),
        format!("{json_type}Origin: http://{own}\r\nOrigin: http://evil.example\r\n"),
    ];
    // From old browsers, which send no such headers: no form can send a request of this type.
    let typed =
        [form, plain, "Content-Type: multipart/form-data; boundary=x\r\n", "", "Content-Type: application/jsonx\r\n"];
    // Through a foreign host name.
    let rebound = ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:80", ""];
    let key = format!("X-API-Key: {}\r\n", keyed.operator);
    let guard = place.locks.lock("a").await.expect("free");
    let task = place.locks.lock("task_lock:6").await.expect("free");
    let mut refused = 0;
    let changing: Vec<_> = operations(&keyed).await.into_iter().filter(|(method, ..)| method != "GET").collect();
    assert!(changing.len() >= 6, "{changing:?}");
    for (method, path, _) in &changing {
        // A valid body for each of them.
        let holder = guard.holder_id().to_string();
        let body = match path.rsplit('/').next() {
            Some("acquire") => json!({ "ttl_ms": 60_000 }),
            Some("evict") => json!({ "holder_id": holder, "mode": "force", "reason": "forged" }),
            Some("settle") => json!({ "reason": "forged" }),
            _ => json!({ "token": "x".repeat(32) }),
        }
        .to_string();
        for headers in &forged {
            let answer = place.ask(method, path, &format!("{headers}{key}"), &body).await;
            assert_eq!(answer.code(), (403, "cross_site".into()), "{method} {path} {headers}");
            refused += 1;
        }
        for headers in typed.iter().filter(|_| !path.ends_with("release-lock")) {
            let answer = place.ask(method, path, &format!("{headers}{key}"), &body).await;
            assert_eq!(answer.code(), (415, "not_json".into()), "{method} {path} {headers}");
            refused += 1;
        }
        for host in rebound {
            let headers = format!("Host: {host}\r\n{json_type}{key}");
            let answer =
                receive(send(own, &format!("{method} {path}"), &headers, &body).await).await.expect("answered");
            assert_eq!(answer.code(), (421, "foreign_host".into()), "{method} {path} {host}");
            refused += 1;
        }
        // The preflight request of a browser. No response allows a page of another site anything.
        let preflight = "Origin: http://evil.example\r\nAccess-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: content-type\r\n";
        let answer = place.ask("OPTIONS", path, &format!("{preflight}{key}"), "").await;
        assert!(answer.status >= 400 && !answer.head.contains("access-control-"), "{path}: {answer:?}");
        refused += 1;
    }
    assert!(guard.is_valid() && place.locks.is_locked("a").await.expect("answered"));
    assert!(task.is_valid() && place.locks.is_locked("task_lock:6").await.expect("answered"));
    assert!(!std::fs::exists(keyed.dir.path().join("audit.jsonl")).expect("asked") || keyed.audit().is_empty());
    println!(
        "{refused} forged requests on {} changing routes refused, {} of them cross-site variants",
        changing.len(),
        forged.len() * changing.len()
    );

    let body = json!({ "holder_id": guard.holder_id().to_string(), "mode": "force", "reason": "ours" }).to_string();
    let headers = format!("{json_type}{key}Origin: http://{own}\r\nSec-Fetch-Site: same-origin\r\n");
    place.ask("POST", "/api/v1/locks/a/evict", &headers, &body).await.ok();
    drop((guard, task));
    keyed.place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn evictions_are_audited_first() {
    let keyed = Keyed::start().await;
    let guard = keyed.place.locks.lock("gpu_lock:0").owner("tts").await.expect("free");
    let evict = async |holder: &str| {
        let body = json!({ "holder_id": holder, "mode": "force", "reason": "stuck" }).to_string();
        let headers = format!("Content-Type: application/json\r\nX-API-Key: {}\r\n", keyed.operator);
        keyed.place.ask("POST", "/api/v1/locks/gpu_lock:0/evict", &headers, &body).await.status
    };
    let holder = guard.holder_id().to_string();
    assert_eq!(evict("000000000000").await, 409);
    assert_eq!(evict(&holder).await, 200);
    assert_eq!(evict(&holder).await, 200);
    let lines = keyed.audit();
    let outcomes: Vec<&str> = lines.iter().map(|line| line["outcome"].as_str().expect("one")).collect();
    assert_eq!(outcomes, ["asked", "changed_hands", "asked", "forced", "asked", "free"]);
    let done = &lines[3];
    assert_eq!((&done["who"], &done["key_id"]), (&json!("ops"), &json!(keyed.operator_id)));
    assert_eq!(
        (&done["name"], &done["holder_id"], &done["reason"]),
        (&json!("gpu_lock:0"), &json!(holder), &json!("stuck"))
    );
    assert_eq!(done["fence"], json!(guard.fence().get()));
    assert!(done["owner"].as_str().is_some_and(|owner| owner.starts_with("tts@")) && done["at_ms"].is_u64());
    drop(guard);
    keyed.place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_request_id_of_another_key_is_another_request() {
    let keyed = Keyed::start().await;
    let body = json!({ "ttl_ms": 60_000, "request_id": "request-of-the-test-0001" }).to_string();
    let acquire = async |key: &str| {
        let headers = format!("Content-Type: application/json\r\nX-API-Key: {key}\r\n");
        keyed.place.ask("POST", "/api/v1/locks/a/acquire", &headers, &body).await
    };
    let first = acquire(&keyed.operator).await.ok();
    assert_eq!(acquire(&keyed.operator).await.ok()["token"], first["token"]);
    let stranger = acquire(&keyed.other).await;
    assert_eq!(stranger.code(), (409, "held".into()));
    keyed.place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_clients_do_not_delay_others() {
    let place = Place::memory().await;
    let mut slow = Vec::new();
    for n in 0..500 {
        let mut stream = TcpStream::connect(place.at).await.expect("accepted");
        let head =
            if n % 2 == 0 { "GET /api/v1/locks HT" } else { "POST /api/v1/locks/a/acquire HTTP/1.1\r\nContent-Le" };
        stream.write_all(head.as_bytes()).await.expect("sent");
        slow.push(stream);
    }
    let mut took: Vec<Duration> = Vec::new();
    for _ in 0..200 {
        let began = Instant::now();
        place.get("/api/v1/locks").await.ok();
        took.push(began.elapsed());
    }
    took.sort();
    println!("500 slow connections: p50 {:?}, p99 {:?}", took[100], took[197]);
    drop(slow);
    let head = format!("Host: {}\r\nX-Long: {}\r\n", place.at, "x".repeat(20_000));
    let answer = receive(send(place.at, "GET /api/v1/locks", &head, "").await).await.expect("an answer");
    assert_eq!(answer.status, 431, "{answer:?}");
    place.end().await;
}
