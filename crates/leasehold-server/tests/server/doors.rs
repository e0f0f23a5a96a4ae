//! The doors: who is let in, to what, and what nobody is told.

use std::time::{Duration, Instant};

use crate::support::Place;
use leasehold_server::{KeyFile, Role, Settings};
use leasehold_testkit::http::{receive, send};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

struct Keyed {
    place: Place,
    viewer: String,
    operator: String,
    operator_id: String,
    /// Another operator's.
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

#[tokio::test(flavor = "multi_thread")]
async fn every_route_needs_a_key_and_changing_ones_an_operators() {
    let keyed = Keyed::start().await;
    let document = keyed.place.get(&format!("/openapi.json?api_key={}", keyed.viewer)).await.ok();
    let mut routes: Vec<(String, String)> = Vec::new();
    for (path, methods) in document["paths"].as_object().expect("paths") {
        let path = path.replace("{name}", "a").replace("{id}", "6");
        // Those two and the page want no key, and one does not end.
        if !["/healthz", "/readyz", "/", "/assets/{file}", "/api/v1/events"].contains(&path.as_str()) {
            routes.extend(methods.as_object().expect("methods").keys().map(|m| (m.to_uppercase(), path.clone())));
        }
    }
    let routes: Vec<(&str, &str)> = routes.iter().map(|(method, path)| (method.as_str(), path.as_str())).collect();
    assert!(routes.len() >= 13, "{routes:?}");
    assert_eq!(keyed.ask("GET", "/api/v1/events", "").await, (401, "no_key".into()));
    let unknown = [("GET", "/nowhere"), ("POST", "/nowhere"), ("DELETE", "/api/v1/locks/a"), ("PUT", "/")];
    let wrong = keyed.operator.replace("lhk_", "lhk_0");
    let bad = [
        (String::new(), "no_key"),
        ("Authorization: Bearer\r\n".into(), "wrong_key"),
        (format!("Authorization: Basic {}\r\n", keyed.operator), "wrong_key"),
        (format!("Authorization: Bearer {wrong}\r\n"), "wrong_key"),
        (format!("X-API-Key: {}x\r\n", keyed.operator), "wrong_key"),
    ];
    let mut refused = 0;
    for (method, path) in routes.iter().chain(&unknown) {
        for (headers, code) in &bad {
            let answer = keyed.ask(method, path, headers).await;
            // Behind the thirtieth wrong key from one address.
            let told = answer == (401, (*code).to_owned()) || answer == (429, "too_many_failures".to_owned());
            assert!(told, "{method} {path} {headers:?}: {answer:?}");
            refused += 1;
        }
    }
    let ways = |key: &str| [format!("Authorization: Bearer {key}\r\n"), format!("X-API-Key: {key}\r\n")];
    for (method, path) in &routes {
        for (key, allowed) in [(&keyed.viewer, *method == "GET"), (&keyed.operator, true)] {
            for headers in ways(key) {
                let (status, code) = keyed.ask(method, path, &headers).await;
                let (status_in_query, _) = keyed.ask(method, &format!("{path}?api_key={key}"), "").await;
                assert_eq!(status, status_in_query, "{method} {path}");
                assert_eq!(status != 403, allowed, "{method} {path}: {status} {code}");
                assert!(allowed || code == "needs_operator", "{code}");
                assert!(![401, 429].contains(&status), "a right key is let in at any time: {method} {path}: {status}");
            }
        }
    }
    for path in ["/healthz", "/readyz"] {
        let answer = keyed.place.get(path).await;
        assert_eq!((answer.status, answer.json()), (200, json!({ "status": "up" })), "and nothing more");
    }
    println!("{refused} requests without a right key refused on {} routes", routes.len() + unknown.len());
    keyed.place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_key_is_out_within_moments() {
    let keyed = Keyed::start().await;
    let header = format!("X-API-Key: {}\r\n", keyed.operator);
    assert_eq!(keyed.ask("GET", "/api/v1/locks", &header).await.0, 200);
    keyed.file.revoke(&keyed.operator_id).expect("revoked");
    let began = Instant::now();
    while keyed.ask("GET", "/api/v1/locks", &header).await.0 == 200 {
        assert!(began.elapsed() < Duration::from_secs(5));
    }
    keyed.place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_requests_of_foreign_pages_are_refused() {
    let place = Place::memory().await;
    let own = place.at;
    let guard = place.locks.lock("a").await.expect("free");
    let body = json!({ "holder_id": guard.holder_id().to_string(), "mode": "force", "reason": "forged" }).to_string();
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
        format!("{json_type}Sec-Fetch-Site: cross-site\r\n"),
        format!("{json_type}Sec-Fetch-Site: same-site\r\n"),
        format!("{json_type}Referer: http://evil.example/http://{own}/\r\n"),
        format!("{form}Origin: http://evil.example\r\nSec-Fetch-Mode: navigate\r\n"),
        format!("{plain}Origin: null\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\n"),
        format!("{json_type}Origin: http://{own}\r\nOrigin: http://evil.example\r\n"),
    ];
    for headers in &forged {
        let answer = place.ask("POST", "/api/v1/locks/a/evict", headers, &body).await;
        assert_eq!(answer.code(), (403, "cross_site".into()), "{headers}");
    }
    assert!(guard.is_valid() && place.locks.is_locked("a").await.expect("answered"));
    println!("{}/12 forged requests refused", forged.len());
    let headers = format!("{json_type}Origin: http://{own}\r\nSec-Fetch-Site: same-origin\r\n");
    place.ask("POST", "/api/v1/locks/a/evict", &headers, &body).await.ok();
    drop(guard);
    place.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_taken_away_is_written_down_first() {
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
    assert_eq!(done["fence"], json!(guard.fence().expect("fenced").get()));
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
async fn slow_clients_keep_nobody_waiting() {
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
