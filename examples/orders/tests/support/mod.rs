//! A server in the test, and requests without a body.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use leasehold::LockManager;
use leasehold_testkit::http::{self, Answer};
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
    http::send(to, request, &format!("Host: test\r\n{headers}"), "").await
}

pub(crate) async fn ask(to: SocketAddr, request: &str) -> Answer {
    http::ask(to, request, "Host: test\r\n", "").await
}

/// Checks that the lock is free within a tenth of a second.
pub(crate) async fn free_at_once(locks: &LockManager, name: &str, after: &str) {
    let free = locks.lock(name).wait_up_to(Duration::from_millis(100)).await;
    let guard = free.unwrap_or_else(|error| panic!("after {after}: {error}"));
    guard.release().await.expect("answered");
}
