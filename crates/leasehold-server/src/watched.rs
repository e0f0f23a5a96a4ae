//! A connection that notices whether its client reads.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustix::net::{SendFlags, send};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Duration, Sleep, sleep};

use crate::seats::{READ_WITHIN, Seat};

/// A stream whose writes fail when the client takes nothing for [`READ_WITHIN`].
///
/// The system reports a socket as writable only when a third of its send buffer is free. A slow client takes longer than
/// that, so before a write fails it is tried once more, whatever was reported.
pub(crate) struct Watched {
    stream: TcpStream,
    seat: Arc<Seat>,
    read_within: Duration,
    /// Whether the send buffer had room when it was last tried, though the socket was not reported as writable.
    has_room: bool,
    /// Set while a write waits for the client.
    late: Option<Pin<Box<Sleep>>>,
}

impl Watched {
    pub(crate) fn new(stream: TcpStream, seat: Arc<Seat>) -> Self {
        Self { stream, seat, read_within: READ_WITHIN, has_room: false, late: None }
    }

    fn try_send(&self, next: &[u8]) -> rustix::io::Result<usize> {
        send(&self.stream, next, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
    }

    /// `next` is what was to be written.
    fn watch(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
        next: &[u8],
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            if self.late.take().is_some() {
                self.seat.is_unblocked();
            }
            return written;
        }
        if self.has_room {
            if let Ok(taken) = self.try_send(next) {
                return Poll::Ready(Ok(taken));
            }
            self.has_room = false;
        }
        let late = self.late.get_or_insert_with(|| {
            self.seat.is_blocked();
            Box::pin(sleep(self.read_within))
        });
        ready!(late.as_mut().poll(cx));
        if let Ok(taken) = self.try_send(next) {
            (self.late, self.has_room) = (None, true);
            self.seat.is_unblocked();
            return Poll::Ready(Ok(taken));
        }
        self.seat.gave_up();
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("the client read nothing for {:?}", self.read_within),
        )))
    }
}

impl AsyncRead for Watched {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.watch(cx, written, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        let next = bufs.iter().find(|buf| !buf.is_empty());
        self.watch(cx, written, next.map_or(&[], |buf| &**buf))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use rustix::net::sockopt::set_socket_send_buffer_size;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpSocket};
    use tokio::time::{Instant, timeout};

    use super::*;
    use crate::seats::{Figures, Seats};

    /// The client reads less within each limit than makes its socket writable, and then nothing.
    #[tokio::test]
    async fn a_client_that_reads_slowly_is_kept_and_one_that_stops_is_not() {
        let limit = Duration::from_secs(1);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("bound");
        let client = TcpSocket::new_v4().expect("made");
        client.set_recv_buffer_size(4_096).expect("set");
        let connecting = client.connect(listener.local_addr().expect("bound"));
        let (client, accepted) = tokio::join!(connecting, listener.accept());
        let (mut client, (stream, peer)) = (client.expect("connected"), accepted.expect("accepted"));
        set_socket_send_buffer_size(&stream, 512 * 1_024).expect("set");
        let seat = Arc::new(Seats::new(None, Figures::default()).take(peer).expect("free"));
        let mut watched = Watched { read_within: limit, ..Watched::new(stream, seat) };
        let writing = tokio::spawn(async move {
            loop {
                if let Err(error) = watched.write_all(&[7; 1_024]).await {
                    return error.kind();
                }
            }
        });
        let began = Instant::now();
        let mut bytes = [0; 512];
        while began.elapsed() < 3 * limit {
            client.read_exact(&mut bytes).await.expect("it is kept");
            sleep(Duration::from_millis(10)).await;
        }
        assert!(!writing.is_finished(), "cut off while it reads");
        let ended = timeout(10 * limit, writing).await.expect("it is cut off").expect("no panic");
        assert_eq!(ended, io::ErrorKind::TimedOut);
    }
}
