//! The byte stream of a connection: a TCP socket, or a socket pair to the task that runs TLS.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};
use tokio::io::{AsyncRead, ReadBuf};
#[cfg(feature = "tls")]
use tokio::net::unix;
use tokio::net::{TcpStream, tcp};

use super::address::Address;
use crate::store::StoreError;

/// The half that replies are read from.
pub(super) enum SocketReader {
    /// The TCP socket.
    Plain(tcp::OwnedReadHalf),
    /// The socket pair to the TLS task.
    #[cfg(feature = "tls")]
    Encrypted(unix::OwnedReadHalf),
}

/// The half that requests are written to.
pub(super) enum SocketWriter {
    /// The TCP socket.
    Plain(tcp::OwnedWriteHalf),
    /// The socket pair to the TLS task.
    #[cfg(feature = "tls")]
    Encrypted(unix::OwnedWriteHalf),
}

/// Splits a stream to the server. For an address with TLS, runs the TLS handshake and verifies the server first.
#[cfg_attr(not(feature = "tls"), expect(clippy::unused_async, reason = "there is nothing to wait for"))]
pub(super) async fn split(
    stream: TcpStream,
    address: &Address,
    limit: Duration,
) -> Result<(SocketReader, SocketWriter), StoreError> {
    #[cfg(feature = "tls")]
    if let Some(trust) = &address.tls {
        let stream = super::tls::encrypt(stream, &address.host, trust, limit).await?;
        let (reader, writer) = stream.into_split();
        return Ok((SocketReader::Encrypted(reader), SocketWriter::Encrypted(writer)));
    }
    // Without the feature, `Address::parse` accepts no address with TLS.
    let _ = (address, limit);
    let (reader, writer) = stream.into_split();
    Ok((SocketReader::Plain(reader), SocketWriter::Plain(writer)))
}

impl SocketReader {
    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>, room: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, room),
            #[cfg(feature = "tls")]
            Self::Encrypted(stream) => Pin::new(stream).poll_read(cx, room),
        }
    }
}

impl SocketWriter {
    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(stream) => stream.try_write(bytes),
            #[cfg(feature = "tls")]
            Self::Encrypted(stream) => stream.try_write(bytes),
        }
    }

    pub(super) fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(stream) => stream.as_ref().poll_write_ready(cx),
            #[cfg(feature = "tls")]
            Self::Encrypted(stream) => stream.as_ref().poll_write_ready(cx),
        }
    }

    /// Shuts both directions down. An error means that the peer has closed the stream already.
    pub(super) fn shut_down(&self) {
        let _ = match self {
            Self::Plain(stream) => shutdown(stream.as_ref(), Shutdown::Both),
            #[cfg(feature = "tls")]
            Self::Encrypted(stream) => shutdown(stream.as_ref(), Shutdown::Both),
        };
    }
}
