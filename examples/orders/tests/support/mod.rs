//! A server in the test, and a client that sends one request.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use leasehold::LockManager;
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

/// Sends a request without a body and leaves the connection open.
pub(crate) async fn send(to: SocketAddr, request: &str, headers: &str) -> TcpStream {
    let mut stream = TcpStream::connect(to).await.expect("listening");
    let text = format!("{request} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: 0\r\n{headers}\r\n");
    stream.write_all(text.as_bytes()).await.expect("sent");
    stream
}

/// An answer, taken apart.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// The answer, or `None` when the connection ended without one.
pub(crate) async fn receive(mut stream: TcpStream) -> Option<Answer> {
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text).await;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, head: head.to_lowercase(), body: body.to_owned() })
}

pub(crate) async fn ask(to: SocketAddr, request: &str) -> Answer {
    receive(send(to, request, "").await).await.unwrap_or_else(|| panic!("no answer to {request}"))
}

/// The lock is free now, or within a tenth of a second.
pub(crate) async fn free_at_once(locks: &LockManager, name: &str, after: &str) {
    let free = locks.lock(name).wait_up_to(Duration::from_millis(100)).await;
    let guard = free.unwrap_or_else(|error| panic!("after {after}: {error}"));
    guard.release().await.expect("answered");
}
