//! What a connection writes to and reads from: the server itself, or a task that encrypts.

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

/// Where replies come from.
pub(super) enum Reader {
    /// The server.
    Plain(tcp::OwnedReadHalf),
    /// The task that decrypts.
    #[cfg(feature = "tls")]
    Encrypted(unix::OwnedReadHalf),
}

/// Where requests go.
pub(super) enum Writer {
    /// To the server.
    Plain(tcp::OwnedWriteHalf),
    /// To the task that encrypts.
    #[cfg(feature = "tls")]
    Encrypted(unix::OwnedWriteHalf),
}

/// Both ends of a stream to the server; where the address asks for that, it has made sure of the server.
#[cfg_attr(not(feature = "tls"), expect(clippy::unused_async, reason = "there is nothing to wait for"))]
pub(super) async fn over(
    stream: TcpStream,
    address: &Address,
    within: Duration,
) -> Result<(Reader, Writer), StoreError> {
    #[cfg(feature = "tls")]
    if let Some(trust) = &address.tls {
        let stream = super::tls::encrypt(stream, &address.host, trust, within).await?;
        let (reader, writer) = stream.into_split();
        return Ok((Reader::Encrypted(reader), Writer::Encrypted(writer)));
    }
    // Without the feature no such address was accepted.
    let _ = (address, within);
    let (reader, writer) = stream.into_split();
    Ok((Reader::Plain(reader), Writer::Plain(writer)))
}

impl Reader {
    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>, room: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, room),
            #[cfg(feature = "tls")]
            Self::Encrypted(stream) => Pin::new(stream).poll_read(cx, room),
        }
    }
}

impl Writer {
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

    /// Nothing comes or goes any more. Should that fail, the other side knows already.
    pub(super) fn shut_down(&self) {
        let _ = match self {
            Self::Plain(stream) => shutdown(stream.as_ref(), Shutdown::Both),
            #[cfg(feature = "tls")]
            Self::Encrypted(stream) => shutdown(stream.as_ref(), Shutdown::Both),
        };
    }
}
