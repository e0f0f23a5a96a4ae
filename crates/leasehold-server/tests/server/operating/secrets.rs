//! No secret appears in a log at its most verbose, an error, a debug text or a metric.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::LockManager;
use leasehold_server::{KeyFile, Role};
use leasehold_testkit::RedisServer;
use serde_json::json;
use tracing_subscriber::fmt::MakeWriter;

use super::alert;
use super::settings;
use crate::support::{Place, quiet};

/// Everything that this process logs, in any test.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_canary_is_seen_anywhere() {
    let log = Log::default();
    let lines =
        tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_writer(log.clone()).with_ansi(false);
    lines.try_init().expect("the only one who listens");

    let redis = RedisServer::start().await;
    redis.command(&["CONFIG", "SET", "requirepass", "password-canary"]).await;
    let url = format!("redis://:password-canary@127.0.0.1:{}", redis.port());
    let dir = tempfile::tempdir().expect("a directory");
    let keys = KeyFile::new(dir.path().join("keys.json"));
    let (_, key) = keys.create("ops", Role::Operator).expect("made");
    // Nothing listens there: every attempt fails and is logged.
    let closed = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound");
    let yaml = |target: &str| {
        format!(
            "alerts:\n  webhook:\n    url: {target}/path-canary?key=query-canary\n    secret: secret-canary-0123456789\n    retries: 1\n    allow_private: {}\n",
            target.contains(&closed.to_string())
        )
    };
    let mut said = String::new();
    for target in [format!("http://{closed}"), "http://127.0.0.1:1".to_owned(), "https://localhost:1".to_owned()] {
        let mut settings = settings(&yaml(&target));
        settings.keys = Some(keys.clone());
        said += &format!("{settings:?}");
        let mut options = quiet();
        options.journal = Some(super::webhook::journal(&tempfile::tempdir_in(dir.path()).expect("a directory").keep()));
        let ours = LockManager::connect_with(&url, quiet()).await.expect("a store");
        let theirs = LockManager::connect_with(&url, options).await.expect("a store");
        let mut place = Place::over("redis", ours, theirs, settings).await;
        place.headers = format!("Authorization: Bearer {key}\r\n");
        let taken = place.post("/api/v1/locks/a/acquire", &json!({ "ttl_ms": 60_000 })).await.ok();
        let token = taken["token"].as_str().expect("a token").to_owned();
        alert(&place, "something to tell", |a| a["type"] == "journal_not_empty").await;
        let failed = |text: &str| !text.contains("alert_notifications_total{sink=\"webhook\",outcome=\"failed\"} 0\n");
        while !failed(&place.get("/metrics").await.body) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let routes = [
            "metrics",
            "openapi.json",
            "api/v1/alerts",
            "api/v1/journal",
            "api/v1/audit",
            "api/v1/gpus",
            "api/v1/locks",
        ];
        for route in routes {
            said += &place.get(&format!("/{route}?api_key={key}")).await.body;
        }
        said += &place.get(&format!("/api/v1/locks?api_key={key}x&prefx=1")).await.body;
        place.post("/api/v1/locks/a/release", &json!({ "token": token })).await.ok();
        place.end().await;
        let logged = String::from_utf8_lossy(&log.0.lock().expect("no panic")).into_owned();
        assert!(!said.contains(&token) && !logged.contains(&token), "the token of a lease");
    }
    // A store that refuses: its error is logged, its password is not.
    let wrong = LockManager::connect_with(&url.replace("password-canary", "wrong-canary"), quiet()).await;
    said += &format!("{wrong:?}", wrong = wrong.map(|_| ()).expect_err("another password"));

    let logged = String::from_utf8_lossy(&log.0.lock().expect("no panic")).into_owned();
    assert!(logged.contains("an alert was not delivered") && logged.contains("answered"), "the log says much");
    println!("{} bytes of log, {} of answers: no canary", logged.len(), said.len());
    for canary in ["-canary", key.as_str()] {
        for (what, text) in [("the log", &logged), ("an answer or a debug text", &said)] {
            let found = text.lines().find(|line| line.contains(canary));
            assert_eq!(found, None, "{canary} in {what}");
        }
    }
}
