//! The byte stream of a connection: a TCP socket, plain or with TLS.

use std::io;
#[cfg(feature = "tls")]
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
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
use crate::store::StoreError;

/// The end of the stream that the I/O task reads from and writes to.
pub(super) enum SocketStream {
    /// The TCP socket.
    Plain(tcp::OwnedReadHalf),
    /// The TLS stream on the TCP socket.
    #[cfg(feature = "tls")]
    Encrypted(Box<TlsStream<TcpStream>>),
}

/// The end of the stream that every task may use.
pub(super) enum SocketWriter {
    /// The TCP socket.
    Plain(tcp::OwnedWriteHalf),
    /// The TCP socket under the TLS stream. Bytes go through the I/O task, because reads and writes share the state of
    /// TLS.
    #[cfg(feature = "tls")]
    Encrypted(OwnedFd),
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
        let socket = stream.as_fd().try_clone_to_owned().map_err(|error| super::connection::unreachable(&error))?;
        let stream = super::tls::encrypt(stream, &address.host, trust, limit).await?;
        return Ok((SocketStream::Encrypted(Box::new(stream)), SocketWriter::Encrypted(socket)));
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
            Self::Encrypted(stream) => match ready!(Pin::new(stream).poll_read(cx, room)) {
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
            Self::Encrypted(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    /// Writes the bytes that TLS has encrypted and not sent yet.
    #[cfg_attr(not(feature = "tls"), expect(unused_variables, reason = "there is nothing to wait for"))]
    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(_) => Poll::Ready(Ok(())),
            #[cfg(feature = "tls")]
            Self::Encrypted(stream) => Pin::new(stream).poll_flush(cx),
        }
    }
}

impl SocketWriter {
    /// Writes some of `bytes` if that is possible without waiting, and returns how many.
    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.try_write(bytes),
            #[cfg(feature = "tls")]
            Self::Encrypted(_) => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Shuts both directions down. An error means that the peer has closed the stream already.
    pub(super) fn shut_down(&self) {
        let _ = match self {
            Self::Plain(stream) => shutdown(stream.as_ref(), Shutdown::Both),
            #[cfg(feature = "tls")]
            Self::Encrypted(socket) => shutdown(socket, Shutdown::Both),
        };
    }
}
