//! A server in the test, and a client that sends one request.

#![allow(dead_code, reason = "each test file uses its part")]

use std::net::SocketAddr;

use axum::Router;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Serves until the test ends.
pub(crate) async fn serve(routes: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move { axum::serve(listener, routes).await });
    address
}

/// Sends a request and leaves the connection open. `headers` end with a line break each.
pub(crate) async fn send(to: SocketAddr, request: &str, headers: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(to).await.expect("listening");
    let length = body.len();
    let text = format!(
        "{request} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
    );
    stream.write_all(text.as_bytes()).await.expect("sent");
    stream
}

/// An answer, taken apart.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn replayed(&self) -> bool {
        self.head.contains("\r\nidempotency-replayed: true")
    }

    /// The status and the code of a refusal.
    pub(crate) fn refusal(&self) -> (u16, String) {
        (self.status, self.json()["code"].as_str().unwrap_or_default().to_owned())
    }
}

pub(crate) async fn receive(mut stream: TcpStream) -> Answer {
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("an answer");
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    Answer { status, head: head.to_lowercase(), body: body.to_owned() }
}

pub(crate) async fn ask(to: SocketAddr, request: &str, headers: &str, body: &str) -> Answer {
    receive(send(to, request, headers, body).await).await
}
