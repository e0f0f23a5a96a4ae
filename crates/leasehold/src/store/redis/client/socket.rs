//! The byte stream of a connection: a TCP socket, plain or with TLS.

use std::io;
#[cfg(feature = "tls")]
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
#[cfg(feature = "tls")]
use std::sync::{Arc, Mutex, PoisonError};
#[cfg(feature = "tls")]
use std::task::Waker;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};
#[cfg(feature = "tls")]
use tokio::io::AsyncWrite;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::{TcpStream, tcp};
#[cfg(feature = "tls")]
use tokio_rustls::client::TlsStream;

use super::address::Address;
use crate::store::{StoreError, StoreErrorKind};

/// The TLS stream on the TCP socket. Reads and writes share its state.
#[cfg(feature = "tls")]
type Encrypted = Arc<Mutex<TlsStream<TcpStream>>>;

/// The end of the stream that the I/O task reads from and writes to.
pub(super) enum SocketStream {
    /// The TCP socket.
    Plain(tcp::OwnedReadHalf),
    /// The TLS stream.
    #[cfg(feature = "tls")]
    Encrypted(Encrypted),
}

/// The end of the stream that every task may use.
pub(super) enum SocketWriter {
    /// The TCP socket.
    Plain(tcp::OwnedWriteHalf),
    /// The TLS stream, and its TCP socket, which is shut down without the lock.
    #[cfg(feature = "tls")]
    Encrypted(Encrypted, OwnedFd),
}

/// Returns both ends of a stream to the server. For an address with TLS, runs the TLS handshake and verifies the server
/// first.
#[cfg_attr(not(feature = "tls"), expect(clippy::unused_async, reason = "there is nothing to wait for"))]
pub(super) async fn split(
    stream: TcpStream,
    address: &Address,
    limit: Duration,
) -> Result<(SocketStream, SocketWriter), StoreError> {
    #[cfg(feature = "tls")]
    if let Some(trust) = &address.tls {
        let socket = stream.as_fd().try_clone_to_owned().map_err(|error| unreachable(&error))?;
        let stream = super::tls::encrypt(stream, &address.host, trust, limit).await?;
        let stream = Arc::new(Mutex::new(stream));
        return Ok((SocketStream::Encrypted(stream.clone()), SocketWriter::Encrypted(stream, socket)));
    }
    // Without the feature, `Address::parse` accepts no address with TLS.
    let _ = (address, limit);
    let (reader, writer) = stream.into_split();
    Ok((SocketStream::Plain(reader), SocketWriter::Plain(writer)))
}

impl SocketStream {
    /// Reads some bytes into `room`; none when the server has closed the stream.
    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>, room: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, room),
            #[cfg(feature = "tls")]
            Self::Encrypted(stream) => match ready!(Pin::new(&mut *lock(stream)).poll_read(cx, room)) {
                // A server that ends without the closing message of TLS. Whether a reply was cut short does not matter:
                // an incomplete reply is never delivered.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Poll::Ready(Ok(())),
                result => Poll::Ready(result),
            },
        }
    }

    /// Writes some of `bytes` and returns how many.
    pub(super) fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self {
            Self::Plain(half) => loop {
                let socket: &TcpStream = half.as_ref();
                ready!(socket.poll_write_ready(cx))?;
                match socket.try_write(bytes) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    result => return Poll::Ready(result),
                }
            },
            #[cfg(feature = "tls")]
            Self::Encrypted(stream) => Pin::new(&mut *lock(stream)).poll_write(cx, bytes),
        }
    }

    /// Writes the bytes that TLS has encrypted and not sent yet.
    #[cfg_attr(not(feature = "tls"), expect(unused_variables, reason = "there is nothing to wait for"))]
    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(_) => Poll::Ready(Ok(())),
            #[cfg(feature = "tls")]
            Self::Encrypted(stream) => Pin::new(&mut *lock(stream)).poll_flush(cx),
        }
    }
}

impl SocketWriter {
    /// Writes some of `bytes` if that is possible without waiting, and returns how many. With TLS, the I/O task may have
    /// to [flush](SocketStream::poll_flush) them.
    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.try_write(bytes),
            #[cfg(feature = "tls")]
            Self::Encrypted(stream, _) => {
                // The I/O task reads or writes at this moment: it can write these bytes, too.
                let Ok(mut stream) = stream.try_lock() else { return Err(io::ErrorKind::WouldBlock.into()) };
                let wakes_nothing = &mut Context::from_waker(Waker::noop());
                match Pin::new(&mut *stream).poll_write(wakes_nothing, bytes) {
                    Poll::Ready(Ok(written)) => Ok(written),
                    Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
                    Poll::Ready(Err(error)) => {
                        // Some of the bytes may be encrypted already, so they must not be written again.
                        self.shut_down();
                        Err(error)
                    }
                }
            }
        }
    }

    pub(super) fn is_plain(&self) -> bool {
        matches!(self, Self::Plain(_))
    }

    /// Whether the I/O task has to flush the stream.
    pub(super) fn needs_flush(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            #[cfg(feature = "tls")]
            Self::Encrypted(stream, _) => stream.try_lock().map_or(true, |stream| stream.get_ref().1.wants_write()),
        }
    }

    /// Shuts both directions down. An error means that the peer has closed the stream already.
    pub(super) fn shut_down(&self) {
        let _ = match self {
            Self::Plain(stream) => shutdown(stream.as_ref(), Shutdown::Both),
            #[cfg(feature = "tls")]
            Self::Encrypted(_, socket) => shutdown(socket, Shutdown::Both),
        };
    }
}

/// The text of an I/O error comes from the operating system and contains no secret.
pub(super) fn unreachable(error: &io::Error) -> StoreError {
    StoreError::new(StoreErrorKind::Unreachable, error.to_string())
}

#[cfg(feature = "tls")]
fn lock(stream: &Encrypted) -> std::sync::MutexGuard<'_, TlsStream<TcpStream>> {
    stream.lock().unwrap_or_else(PoisonError::into_inner)
}
