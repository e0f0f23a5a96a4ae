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
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower_service::Service;

use crate::tls::Tls;

/// Connections at once. Beyond it a new one waits in the listener's backlog.
const CONNECTIONS: usize = 4_096;
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

/// What every TLS connection begins with: the type of a handshake record.
const TLS_RECORD: u8 = 0x16;
/// To somebody who speaks TLS where none is spoken: a fatal alert, `protocol_version`.
const NO_TLS_HERE: [u8; 7] = [0x15, 3, 1, 0, 2, 2, 70];
/// To somebody who speaks plain HTTP where TLS is spoken.
const TLS_HERE: &str = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: 88\r\n\r\n\
    {\"code\":\"needs_tls\",\"message\":\"this server speaks HTTPS here: write https:// before it\"}";

/// Who is at the other end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// Accepts until it is stopped, then waits for what is under way.
pub(crate) async fn serve(listener: &TcpListener, routes: Router, tls: Option<Arc<Tls>>, stopping: CancellationToken) {
    let connections = TaskTracker::new();
    let seats = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let accepted = async {
            let seat = seats.clone().acquire_owned().await.expect("never closed");
            (seat, accept(listener).await)
        };
        let (seat, (stream, peer)) = tokio::select! {
            biased;
            () = stopping.cancelled() => break,
            accepted = accepted => accepted,
        };
        let (routes, tls, stopping) = (routes.clone(), tls.clone(), stopping.clone());
        connections.spawn(async move {
            begin(stream, peer, routes, tls, stopping).await;
            drop(seat);
        });
    }
    connections.close();
    // Whoever is later than this is cut off when the runtime ends.
    if tokio::time::timeout(END_WITHIN, connections.wait()).await.is_err() {
        tracing::warn!(connections = connections.len(), "cut off: they did not come to an end");
    }
}

async fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    loop {
        match listener.accept().await {
            Ok(accepted) => return accepted,
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
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
    stopping: CancellationToken,
) {
    // Answers are small and wanted at once.
    let _ = stream.set_nodelay(true);
    let mut first = [0];
    let peeked = tokio::time::timeout(HEAD_WITHIN, stream.peek(&mut first));
    let Some(Ok(Ok(1..))) = stopping.run_until_cancelled(peeked).await else { return };
    match (tls, first[0] == TLS_RECORD) {
        (None, false) => converse(stream, peer, routes, stopping).await,
        (Some(tls), true) => match tokio::time::timeout(HEAD_WITHIN, tls.acceptor().accept(stream)).await {
            Ok(Ok(stream)) => converse(stream, peer, routes, stopping).await,
            Ok(Err(error)) => tracing::debug!(%peer, %error, "no TLS connection came about"),
            Err(_) => tracing::debug!(%peer, "no TLS connection came about in time"),
        },
        (None, true) => {
            tracing::warn!(%peer, "a client speaks TLS to this server, which has no certificate: use http://, or --tls-cert and --tls-key");
            let _ = stream.write_all(&NO_TLS_HERE).await;
        }
        (Some(_), false) => {
            tracing::debug!(%peer, "a client does not speak TLS");
            let _ = stream.write_all(TLS_HERE.as_bytes()).await;
        }
    }
}

async fn converse<S>(stream: S, peer: SocketAddr, routes: Router, stopping: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = hyper::service::service_fn(move |request| answer(request, peer, routes.clone()));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN).max_buf_size(HEAD_BYTES);
    let mut connection = pin!(http.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = stopping.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
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
) -> Result<Response<Body>, Infallible> {
    // Whoever asks whether to send its body sends none when it is refused.
    let unasked = !request.headers().contains_key(EXPECT);
    let mut request = request.map(|body| Body::new(Sent { body: Some(body), comes: unasked }));
    request.extensions_mut().insert(Peer(peer));
    routes.call(request).await
}

/// The body of a request. What is left of it when it is answered is read and thrown away: a connection that is closed
/// before is reset, and a client that reads only after it has written everything would not see its answer.
struct Sent {
    body: Option<Incoming>,
    /// Whether the client sends it, as far as is known.
    comes: bool,
}

impl hyper::body::Body for Sent {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        self.comes = true;
        let body = self.body.as_mut().expect("taken when dropped");
        Pin::new(body).poll_frame(cx)
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
