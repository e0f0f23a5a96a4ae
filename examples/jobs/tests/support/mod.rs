//! A server in the test, and the `Host` of the client.

#![allow(dead_code, reason = "each test file uses its part")]

use std::net::SocketAddr;

use axum::Router;
use leasehold_testkit::http::{self, Answer};
use tokio::net::{TcpListener, TcpStream};

/// Serves until the test ends.
pub(crate) async fn serve(routes: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move { axum::serve(listener, routes).await });
    address
}

pub(crate) async fn send(to: SocketAddr, request: &str, headers: &str, body: &str) -> TcpStream {
    http::send(to, request, &format!("Host: test\r\n{headers}"), body).await
}

pub(crate) async fn ask(to: SocketAddr, request: &str, headers: &str, body: &str) -> Answer {
    http::ask(to, request, &format!("Host: test\r\n{headers}"), body).await
}

/// Returns whether the response was replayed.
pub(crate) fn replayed(answer: &Answer) -> bool {
    answer.head.contains("\r\nidempotency-replayed: true")
}
