//! A TCP stream with a timeout for clients that stop reading.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustix::net::{SendFlags, send};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Duration, Sleep, sleep};

use crate::connection_limits::{READ_TIMEOUT, Slot};

/// A TCP stream whose writes fail when the client reads nothing for [`READ_TIMEOUT`].
///
/// The kernel reports a socket as writable only when a third of its send buffer is free. A slow client may need longer
/// than the timeout for that, so the stream tries the write once more before it fails.
pub(crate) struct TimedStream {
    stream: TcpStream,
    slot: Arc<Slot>,
    read_timeout: Duration,
    /// Whether the last extra attempt found room in the send buffer although the socket was not reported as writable.
    has_room: bool,
    /// Set while a write waits for the client.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl TimedStream {
    pub(crate) fn new(stream: TcpStream, slot: Arc<Slot>) -> Self {
        Self { stream, slot, read_timeout: READ_TIMEOUT, has_room: false, deadline: None }
    }

    fn try_send(&self, next: &[u8]) -> rustix::io::Result<usize> {
        send(&self.stream, next, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
    }

    /// Applies the timeout to the result of a write. `next` is the data that was to be written.
    fn check_timeout(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
        next: &[u8],
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            if self.deadline.take().is_some() {
                self.slot.mark_unblocked();
            }
            return written;
        }
        if self.has_room {
            if let Ok(taken) = self.try_send(next) {
                return Poll::Ready(Ok(taken));
            }
            self.has_room = false;
        }
        let deadline = self.deadline.get_or_insert_with(|| {
            self.slot.mark_blocked();
            Box::pin(sleep(self.read_timeout))
        });
        ready!(deadline.as_mut().poll(cx));
        if let Ok(taken) = self.try_send(next) {
            (self.deadline, self.has_room) = (None, true);
            self.slot.mark_unblocked();
            return Poll::Ready(Ok(taken));
        }
        self.slot.count_not_reading();
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("the client read nothing for {:?}", self.read_timeout),
        )))
    }
}

impl AsyncRead for TimedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for TimedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.check_timeout(cx, written, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        let next = bufs.iter().find(|buf| !buf.is_empty());
        self.check_timeout(cx, written, next.map_or(&[], |buf| &**buf))
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
    use crate::connection_limits::{ConnectionLimits, ConnectionMetrics};

    /// Within each timeout the client reads too little for its socket to be reported as writable; then it stops
    /// reading.
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
        let slot = Arc::new(ConnectionLimits::new(None, ConnectionMetrics::default()).take(peer).expect("free"));
        let mut stream = TimedStream { read_timeout: limit, ..TimedStream::new(stream, slot) };
        let writing = tokio::spawn(async move {
            loop {
                if let Err(error) = stream.write_all(&[7; 1_024]).await {
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
