//! Accepting connections, and what one connection may cost.

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

use crate::seats::{Full, Seat, Seats, Working};
use crate::throttle::Throttle;
use crate::tls::Tls;
use crate::watched::Watched;

/// What the system keeps at most of an answer that its client does not read.
const SEND_BUFFER: usize = 128 * 1024;
/// How long a client may take to say what it wants, and an idle connection is kept.
const HEAD_WITHIN: Duration = Duration::from_secs(15);
/// The longest head of a request: a name of 512 bytes, percent-encoded, fits ten times.
const HEAD_BYTES: usize = 16 * 1024;
/// What nobody wants of a request's body is read up to here, and for so long.
const UNREAD_BYTES: usize = 64 * 1024 * 1024;
const UNREAD_WITHIN: Duration = Duration::from_secs(5);
/// How long a connection may take to come to its end when the server stops.
const END_WITHIN: Duration = Duration::from_secs(10);
/// When no connection can be accepted (no file descriptor left), the pause before the next try.
const PAUSE: Duration = Duration::from_millis(50);
/// When the server stops, a connection that has no request, or whose client neither sends nor reads, is closed after this
/// time instead.
const IDLE_END_WITHIN: Duration = Duration::from_secs(2);
/// When all connections have just come, the pause before one of them is closed.
const SHORTLY: Duration = Duration::from_millis(5);
/// The most pauses for one new connection: a little longer than the time that idle connections are left.
const PAUSES_MAX: u32 = 30;

/// What every TLS connection begins with: the type of a handshake record.
const TLS_RECORD: u8 = 0x16;
/// To somebody who speaks TLS where none is spoken: a fatal alert, `protocol_version`.
const NO_TLS_HERE: [u8; 7] = [0x15, 3, 1, 0, 2, 2, 70];
/// To somebody who speaks plain HTTP where TLS is spoken.
const TLS_HERE: &str = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: 88\r\n\r\n\
    {\"code\":\"needs_tls\",\"message\":\"this server speaks HTTPS here: write https:// before it\"}";

/// The whole response to a client that is turned away because too many connections are open.
const FULL: &str = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 92\r\n\r\n\
    {\"code\":\"too_many_connections\",\"message\":\"too many connections are open; try again shortly\"}";

/// Log lines that anybody who can connect can cause.
static NOT_ACCEPTED: Throttle = Throttle::new();
static NO_PLACE: Throttle = Throttle::new();
static SPEAKS_TLS: Throttle = Throttle::new();

/// Who is at the other end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// Accepts until it is stopped, then waits for what is under way.
pub(crate) async fn serve(
    listener: &TcpListener,
    routes: Router,
    tls: Option<Arc<Tls>>,
    seats: Arc<Seats>,
    stopping: CancellationToken,
) {
    let connections = TaskTracker::new();
    loop {
        let (stream, peer) = tokio::select! {
            biased;
            () = stopping.cancelled() => break,
            accepted = accept(listener, &seats) => accepted,
        };
        let seat = match take(&seats, peer).await {
            Ok(seat) => Arc::new(seat),
            Err(full) => {
                refuse(&stream, peer, full, tls.is_some());
                continue;
            }
        };
        let (routes, tls, stopping) = (routes.clone(), tls.clone(), stopping.clone());
        connections.spawn(async move {
            let closing = seat.closing();
            // Dropped, and so closed, when its place is needed.
            closing.run_until_cancelled(begin(stream, peer, routes, tls, seat, stopping)).await
        });
    }
    connections.close();
    // Whoever is later than this is cut off when the runtime ends.
    if tokio::time::timeout(END_WITHIN, connections.wait()).await.is_err() {
        tracing::warn!(connections = connections.len(), "cut off: they did not come to an end");
    }
}

/// Takes a seat, and waits for one while all idle connections are new. The wait is bounded: connections that become idle
/// only between two requests must not stop the server from accepting, or from ending.
async fn take(seats: &Arc<Seats>, peer: SocketAddr) -> Result<Seat, Full> {
    for _ in 0..PAUSES_MAX {
        match seats.take(peer) {
            // The next connection waits in the listener's backlog meanwhile.
            Err(Full::ForNow) => tokio::time::sleep(SHORTLY).await,
            taken => return taken,
        }
    }
    seats.count_full();
    Err(Full::ForNow)
}

/// Says that there is no place, where that can be said without waiting.
fn refuse(stream: &TcpStream, peer: SocketAddr, full: Full, tls: bool) {
    if let Some(suppressed) = NO_PLACE.pass() {
        let why = match full {
            Full::Address => {
                "this address has as many connections as it may; behind a proxy, raise server.connections_per_address"
            }
            Full::Server | Full::ForNow => "all connections are at work",
        };
        tracing::warn!(%peer, suppressed, "a connection was refused: {why}");
    }
    if !tls {
        let _ = stream.try_write(FULL.as_bytes());
    }
}

async fn accept(listener: &TcpListener, seats: &Seats) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) => {
                if let Some(suppressed) = NOT_ACCEPTED.pass() {
                    tracing::warn!(%error, suppressed, "a connection could not be accepted");
                }
                if [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error).map(Some).contains(&error.raw_os_error()) {
                    seats.make_room_anywhere();
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Finds out what is spoken, and speaks it.
async fn begin(
    mut stream: TcpStream,
    peer: SocketAddr,
    routes: Router,
    tls: Option<Arc<Tls>>,
    seat: Arc<Seat>,
    stopping: CancellationToken,
) {
    // Answers are small and wanted at once.
    let _ = stream.set_nodelay(true);
    let _ = set_socket_send_buffer_size(&stream, SEND_BUFFER);
    let mut first = [0];
    let peeked = tokio::time::timeout(HEAD_WITHIN, stream.peek(&mut first));
    let Some(Ok(Ok(1..))) = stopping.run_until_cancelled(peeked).await else { return };
    match (tls, first[0] == TLS_RECORD) {
        (None, false) => converse(Watched::new(stream, seat.clone()), peer, routes, seat, stopping).await,
        (Some(tls), true) => {
            let stream = Watched::new(stream, seat.clone());
            let accepted = tokio::time::timeout(HEAD_WITHIN, tls.acceptor().accept(stream));
            let Some(accepted) = stopping.run_until_cancelled(accepted).await else { return };
            match accepted {
                Ok(Ok(stream)) => converse(stream, peer, routes, seat, stopping).await,
                Ok(Err(error)) => tracing::debug!(%peer, %error, "no TLS connection came about"),
                Err(_) => tracing::debug!(%peer, "no TLS connection came about in time"),
            }
        }
        (None, true) => {
            let Some(suppressed) = SPEAKS_TLS.pass() else { return };
            tracing::warn!(%peer, suppressed, "a client speaks TLS to this server, which has no certificate: use http://, or --tls-cert and --tls-key");
            let _ = stream.write_all(&NO_TLS_HERE).await;
        }
        (Some(_), false) => {
            tracing::debug!(%peer, "a client does not speak TLS");
            let _ = stream.write_all(TLS_HERE.as_bytes()).await;
        }
    }
}

async fn converse<S>(stream: S, peer: SocketAddr, routes: Router, seat: Arc<Seat>, stopping: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let answering = seat.clone();
    let service = hyper::service::service_fn(move |request| answer(request, peer, routes.clone(), answering.clone()));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN).max_buf_size(HEAD_BYTES);
    let mut connection = pin!(http.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = stopping.cancelled() => {
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                ended = connection => ended,
                () = seat.idle_for(IDLE_END_WITHIN) => return,
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%peer, %error, "a connection broke");
    }
}

async fn answer(
    request: Request<Incoming>,
    peer: SocketAddr,
    mut routes: Router,
    seat: Arc<Seat>,
) -> Result<Response<Answered>, Infallible> {
    // `None`: the connection is being closed, and with it this.
    let Some(working) = seat.work() else { return std::future::pending().await };
    // Whoever asks whether to send its body sends none when it is refused.
    let unasked = !request.headers().contains_key(EXPECT);
    let mut request = request.map(|body| Body::new(Sent { body: Some(body), comes: unasked, seat }));
    request.extensions_mut().insert(Peer(peer));
    let Ok(response) = routes.call(request).await;
    Ok(response.map(|body| Answered { body, _working: working }))
}

/// The body of an answer: its connection is at work until the last of it is handed over.
struct Answered {
    body: Body,
    _working: Working,
}

impl hyper::body::Body for Answered {
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

/// The body of a request. What is left of it when it is answered is read and thrown away: a connection that is closed
/// before is reset, and a client that reads only after it has written everything would not see its answer.
struct Sent {
    body: Option<Incoming>,
    /// Whether the client sends it, as far as is known.
    comes: bool,
    /// Idle while the body is wanted and does not come.
    seat: Arc<Seat>,
}

impl hyper::body::Body for Sent {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        self.comes = true;
        let body = self.body.as_mut().expect("taken when dropped");
        let polled = Pin::new(body).poll_frame(cx);
        if polled.is_pending() {
            self.seat.is_blocked();
        } else {
            self.seat.is_unblocked();
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

impl Drop for Sent {
    fn drop(&mut self) {
        let left = self.body.take().filter(|body| self.comes && !body.is_end_stream());
        if let (Some(left), Ok(runtime)) = (left, Handle::try_current()) {
            let mut left = Limited::new(left, UNREAD_BYTES);
            let throw_away = async move { while let Some(Ok(_)) = left.frame().await {} };
            runtime.spawn(async move { tokio::time::timeout(UNREAD_WITHIN, throw_away).await });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seats::Figures;

    /// The only other connection never becomes idle for long enough.
    #[tokio::test]
    async fn accepting_does_not_wait_without_bound_for_a_seat() {
        let seats = Seats::with(1, 1, Duration::from_secs(3_600), Figures::default());
        let peer = |host| SocketAddr::from(([192, 0, 2, host], 1));
        let taken = seats.take(peer(1)).expect("free");
        let refused = tokio::time::timeout(END_WITHIN, take(&seats, peer(2))).await.expect("bounded");
        assert_eq!(refused.expect_err("no seat"), Full::ForNow);
        drop(taken);
        assert!(take(&seats, peer(2)).await.is_ok());
    }
}
