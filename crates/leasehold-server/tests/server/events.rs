//! The event stream: events are published, and a client can resume.

use std::time::Duration;

use crate::support::Place;
use leasehold_testkit::http::send;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

/// A subscriber of the stream.
struct Reader {
    stream: TcpStream,
    text: String,
    read: usize,
}

#[derive(Debug, Clone, PartialEq)]
struct Event {
    id: String,
    kind: String,
    data: Value,
}

impl Reader {
    async fn open(place: &Place, last_id: Option<&str>) -> Self {
        let last = last_id.map_or_else(String::new, |id| format!("Last-Event-ID: {id}\r\n"));
        let stream = send(place.at, "GET /api/v1/events", &format!("Host: {}\r\n{last}", place.at), "").await;
        let mut reader = Self { stream, text: String::new(), read: 0 };
        while !reader.text.contains("\r\n\r\n") {
            assert!(reader.more().await, "{}", reader.text);
        }
        assert!(reader.text.contains("200 OK") && reader.text.contains("text/event-stream"), "{}", reader.text);
        reader
    }

    async fn more(&mut self) -> bool {
        let mut bytes = [0; 4_096];
        let n = self.stream.read(&mut bytes).await.unwrap_or(0);
        self.text += &String::from_utf8_lossy(&bytes[..n]);
        n > 0
    }

    /// The next event; the stream's own framing is skipped.
    async fn next(&mut self) -> Event {
        let next = tokio::time::timeout(Duration::from_secs(20), self.find_next()).await;
        next.unwrap_or_else(|_| panic!("no more events after {} of them", self.read))
    }

    async fn find_next(&mut self) -> Event {
        loop {
            let mut events = Vec::new();
            let (mut id, mut kind) = (String::new(), String::new());
            for line in self.text.lines() {
                if let Some(value) = line.strip_prefix("id: ") {
                    id = value.to_owned();
                } else if let Some(value) = line.strip_prefix("event: ") {
                    kind = value.to_owned();
                } else if let Some(Ok(data)) = line.strip_prefix("data: ").map(serde_json::from_str) {
                    events.push(Event { id: id.clone(), kind: kind.clone(), data });
                }
            }
            if let Some(event) = events.get(self.read) {
                self.read += 1;
                return event.clone();
            }
            assert!(self.more().await, "it ended: {}", self.text);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_streamed_and_a_client_can_resume() {
    for place in Place::each().await {
        let mut reader = Reader::open(&place, None).await;
        let taken =
            place.post("/api/v1/locks/deploy/acquire", &json!({ "ttl_ms": 60_000, "owner": "ruby" })).await.ok();
        place.post("/api/v1/locks/deploy/release", &json!({ "token": taken["token"] })).await.ok();
        let guard = place.locks.lock("gpu_lock:0").owner("tts").await.expect("free");
        let evict = json!({ "holder_id": guard.holder_id().to_string(), "mode": "force", "reason": "stuck" });
        place.post("/api/v1/locks/gpu_lock:0/evict", &evict).await.ok();

        let (granted, released, forced) = (reader.next().await, reader.next().await, reader.next().await);
        let kinds = [&granted, &released, &forced].map(|event| event.kind.as_str());
        assert_eq!(kinds, ["granted", "released", "forced"], "{}", place.kind);
        assert_eq!((&granted.data["name"], &granted.data["owner"]), (&json!("deploy"), &json!("ruby")));
        assert_eq!(
            (&released.data["owner"], &released.data["fence"]),
            (&json!("ruby"), &taken["fence"]),
            "{}",
            place.kind
        );
        assert_eq!((&forced.data["kind"], &forced.data["reason"]), (&json!("forced"), &json!("stuck")));

        let mut again = Reader::open(&place, Some(&granted.id)).await;
        assert_eq!([again.next().await, again.next().await], [released, forced.clone()], "the same, with their ids");
        let mut lost = Reader::open(&place, Some("000000000000-1")).await;
        let (gap, first) = (lost.next().await, lost.next().await);
        assert_eq!((gap.kind.as_str(), first), ("gap", granted), "of another server");
        let mut up_to_date = Reader::open(&place, Some(&forced.id)).await;
        place.post("/api/v1/locks/next/acquire", &json!({ "ttl_ms": 60_000 })).await.ok();
        let event = up_to_date.next().await;
        assert_eq!((event.kind.as_str(), &event.data["name"]), ("granted", &json!("next")), "{}", place.kind);
        drop(guard);
        place.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_end_with_the_server() {
    let mut place = Place::memory().await;
    let mut readers = Vec::new();
    for _ in 0..50 {
        readers.push(Reader::open(&place, None).await);
    }
    place.stop();
    tokio::time::timeout(Duration::from_secs(8), place.ended()).await.expect("no stream holds it open");
    for mut reader in readers {
        while reader.more().await {}
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_outage_sends_a_gap() {
    let place = Place::redis().await;
    let mut reader = Reader::open(&place, None).await;
    let redis = place.redis.as_ref().expect("a server");
    redis.restart().await;
    assert_eq!(reader.next().await.kind, "gap");
    place.post("/api/v1/locks/deploy/acquire", &json!({ "ttl_ms": 60_000 })).await.ok();
    assert_eq!(reader.next().await.kind, "granted", "and it goes on");
    place.end().await;
}
