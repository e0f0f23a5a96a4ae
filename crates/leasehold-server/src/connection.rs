//! The accept loop and the limits of one connection.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use http_body_util::{BodyExt, Limited};
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use hyper::header::EXPECT;
use hyper::server::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_send_buffer_size;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower_service::Service;

use crate::connection_limits::{ActiveRequest, ConnectionLimits, Full, Slot};
use crate::log_throttle::LogThrottle;
use crate::peer::Peer;
use crate::timed_stream::TimedStream;
use crate::tls::Tls;

/// The send buffer of a connection: the most the kernel keeps of a response that the client does not read.
const SEND_BUFFER: usize = 128 * 1024;
/// How long a client may take to send the head of a request. Idle connections are kept for the same time.
const HEAD_TIMEOUT: Duration = Duration::from_secs(15);
/// The largest head of a request. A percent-encoded name of 512 bytes fits ten times.
const MAX_HEAD_BYTES: usize = 16 * 1024;
/// How much of an unread request body is read and discarded, and for how long.
const MAX_DISCARDED_BYTES: usize = 64 * 1024 * 1024;
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);
/// How long connections may take to finish when the server shuts down.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause after a failed `accept`, for example when no file descriptor is left.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// How long idle connections may take to finish when the server shuts down.
const IDLE_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause between two attempts to get a slot while all connections are new.
const SLOT_RETRY_INTERVAL: Duration = Duration::from_millis(5);
/// The most attempts to get a slot. Together they last a little longer than a new connection is protected.
const MAX_SLOT_RETRIES: u32 = 30;

/// The first byte of every TLS connection: the type of a handshake record.
const TLS_RECORD: u8 = 0x16;
/// The reply to a TLS client on a plain HTTP server: the fatal alert `protocol_version`.
const TLS_ALERT: [u8; 7] = [0x15, 3, 1, 0, 2, 2, 70];
/// The reply to a plain HTTP client on a TLS server.
const NEEDS_TLS: &str = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: 88\r\n\r\n\
    {\"code\":\"needs_tls\",\"message\":\"this server speaks HTTPS here: write https:// before it\"}";

/// The response to a client that is refused because too many connections are open.
const TOO_MANY_CONNECTIONS: &str = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 92\r\n\r\n\
    {\"code\":\"too_many_connections\",\"message\":\"too many connections are open; try again shortly\"}";

// Any client can cause these log lines.
static ACCEPT_ERRORS: LogThrottle = LogThrottle::new();
static REFUSALS: LogThrottle = LogThrottle::new();
static UNEXPECTED_TLS: LogThrottle = LogThrottle::new();

/// Accepts connections until `stopping` is cancelled, then waits for those that are open.
pub(crate) async fn serve(
    listener: &TcpListener,
    routes: Router,
    tls: Option<Arc<Tls>>,
    limits: Arc<ConnectionLimits>,
    stopping: CancellationToken,
) {
    let connections = TaskTracker::new();
    loop {
        let (stream, peer) = tokio::select! {
            biased;
            () = stopping.cancelled() => break,
            accepted = accept(listener, &limits) => accepted,
        };
        let slot = match take_slot(&limits, peer).await {
            Ok(slot) => Arc::new(slot),
            Err(full) => {
                refuse(&stream, peer, full, tls.is_some());
                continue;
            }
        };
        let (routes, tls, stopping) = (routes.clone(), tls.clone(), stopping.clone());
        connections.spawn(async move {
            let closing = slot.close_token();
            // Closing the slot drops this future and with it the connection.
            closing.run_until_cancelled(negotiate(stream, peer, routes, tls, slot, stopping)).await
        });
    }
    connections.close();
    // Connections that take longer are cut off when the runtime ends.
    if tokio::time::timeout(SHUTDOWN_TIMEOUT, connections.wait()).await.is_err() {
        tracing::warn!(connections = connections.len(), "connections did not finish in time and were cut off");
    }
}

/// Takes a slot, and waits for one while all idle connections are new. The wait is bounded: connections that are idle
/// only between two requests must not keep the server from accepting or from shutting down.
async fn take_slot(limits: &Arc<ConnectionLimits>, peer: SocketAddr) -> Result<Slot, Full> {
    for _ in 0..MAX_SLOT_RETRIES {
        match limits.take(peer) {
            // Meanwhile the next connection waits in the listener's backlog.
            Err(Full::Temporarily) => tokio::time::sleep(SLOT_RETRY_INTERVAL).await,
            taken => return taken,
        }
    }
    limits.count_server_full();
    Err(Full::Temporarily)
}

/// Refuses a connection, with a response if it can be sent without waiting.
fn refuse(stream: &TcpStream, peer: SocketAddr, full: Full, tls: bool) {
    if let Some(suppressed) = REFUSALS.pass() {
        let why = match full {
            Full::Address => {
                "its address has reached the connection limit; behind a proxy, raise server.connections_per_address"
            }
            Full::Server | Full::Temporarily => "all connections are in use",
        };
        tracing::warn!(%peer, suppressed, "a connection was refused: {why}");
    }
    if !tls {
        let _ = stream.try_write(TOO_MANY_CONNECTIONS.as_bytes());
    }
}

async fn accept(listener: &TcpListener, limits: &ConnectionLimits) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) => {
                if let Some(suppressed) = ACCEPT_ERRORS.pass() {
                    tracing::warn!(%error, suppressed, "a connection could not be accepted");
                }
                if [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error).map(Some).contains(&error.raw_os_error()) {
                    limits.free_descriptors();
                }
                tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
            }
        }
    }
}

/// Detects TLS or plain HTTP and serves the connection.
async fn negotiate(
    mut stream: TcpStream,
    peer: SocketAddr,
    routes: Router,
    tls: Option<Arc<Tls>>,
    slot: Arc<Slot>,
    stopping: CancellationToken,
) {
    // Responses are small and must not wait for more data.
    let _ = stream.set_nodelay(true);
    let _ = set_socket_send_buffer_size(&stream, SEND_BUFFER);
    let mut first = [0];
    let peeked = tokio::time::timeout(HEAD_TIMEOUT, stream.peek(&mut first));
    let Some(Ok(Ok(1..))) = stopping.run_until_cancelled(peeked).await else { return };
    match (tls, first[0] == TLS_RECORD) {
        (None, false) => serve_http(TimedStream::new(stream, slot.clone()), peer, routes, slot, stopping).await,
        (Some(tls), true) => {
            let stream = TimedStream::new(stream, slot.clone());
            let accepted = tokio::time::timeout(HEAD_TIMEOUT, tls.acceptor().accept(stream));
            let Some(accepted) = stopping.run_until_cancelled(accepted).await else { return };
            match accepted {
                Ok(Ok(stream)) => serve_http(stream, peer, routes, slot, stopping).await,
                Ok(Err(error)) => tracing::debug!(%peer, %error, "the TLS handshake failed"),
                Err(_) => tracing::debug!(%peer, "the TLS handshake timed out"),
            }
        }
        (None, true) => {
            let Some(suppressed) = UNEXPECTED_TLS.pass() else { return };
            tracing::warn!(%peer, suppressed, "a client speaks TLS to this server, which has no certificate: use http://, or --tls-cert and --tls-key");
            let _ = stream.write_all(&TLS_ALERT).await;
        }
        (Some(_), false) => {
            tracing::debug!(%peer, "a client sent plain HTTP to this TLS server");
            let _ = stream.write_all(NEEDS_TLS.as_bytes()).await;
        }
    }
}

async fn serve_http<S>(stream: S, peer: SocketAddr, routes: Router, slot: Arc<Slot>, stopping: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let request_slot = slot.clone();
    let service =
        hyper::service::service_fn(move |request| handle(request, peer, routes.clone(), request_slot.clone()));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(MAX_HEAD_BYTES);
    let mut connection = pin!(http.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = stopping.cancelled() => {
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                ended = connection => ended,
                () = slot.idle_for(IDLE_SHUTDOWN_TIMEOUT) => return,
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%peer, %error, "a connection broke");
    }
}

async fn handle(
    request: Request<Incoming>,
    peer: SocketAddr,
    mut routes: Router,
    slot: Arc<Slot>,
) -> Result<Response<ResponseBody>, Infallible> {
    // `None`: the connection is being closed, which drops this future.
    let Some(active) = slot.start_request() else { return std::future::pending().await };
    // A client that sent `Expect: 100-continue` sends no body when the request is rejected.
    let sends_body = !request.headers().contains_key(EXPECT);
    let mut request = request.map(|body| Body::new(RequestBody { body: Some(body), expected: sends_body, slot }));
    request.extensions_mut().insert(Peer(peer));
    let Ok(response) = routes.call(request).await;
    Ok(response.map(|body| ResponseBody { body, _active: active }))
}

/// The body of a response. Its connection is active until the body has been handed over completely.
struct ResponseBody {
    body: Body,
    _active: ActiveRequest,
}

impl hyper::body::Body for ResponseBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of a request. Whatever is unread when the request is answered is read and discarded: closing the connection
/// earlier would reset it, and a client that reads only after it has written everything would not see the response.
struct RequestBody {
    body: Option<Incoming>,
    /// Whether the client sends the body, as far as is known.
    expected: bool,
    /// Marked as idle while the handler waits for the body.
    slot: Arc<Slot>,
}

impl hyper::body::Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        self.expected = true;
        let body = self.body.as_mut().expect("taken when dropped");
        let polled = Pin::new(body).poll_frame(cx);
        if polled.is_pending() {
            self.slot.mark_blocked();
        } else {
            self.slot.mark_unblocked();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(Incoming::size_hint).unwrap_or_default()
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        let left = self.body.take().filter(|body| self.expected && !body.is_end_stream());
        if let (Some(left), Ok(runtime)) = (left, Handle::try_current()) {
            let mut left = Limited::new(left, MAX_DISCARDED_BYTES);
            let discard = async move { while let Some(Ok(_)) = left.frame().await {} };
            runtime.spawn(async move { tokio::time::timeout(DISCARD_TIMEOUT, discard).await });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection_limits::ConnectionMetrics;

    /// The only other connection is never idle for long enough.
    #[tokio::test]
    async fn the_wait_for_a_slot_is_bounded() {
        let limits = ConnectionLimits::with(1, 1, Duration::from_secs(3_600), ConnectionMetrics::default());
        let peer = |host| SocketAddr::from(([192, 0, 2, host], 1));
        let taken = limits.take(peer(1)).expect("free");
        let refused = tokio::time::timeout(SHUTDOWN_TIMEOUT, take_slot(&limits, peer(2))).await.expect("bounded");
        assert_eq!(refused.expect_err("no slot"), Full::Temporarily);
        drop(taken);
        assert!(take_slot(&limits, peer(2)).await.is_ok());
    }
}
