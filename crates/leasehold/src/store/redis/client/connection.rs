//! One connection, shared by all tasks of a process.
//!
//! A task appends its request to one buffer; the server replies in order. One I/O task writes the buffer in as few
//! writes as it can, reads replies and pushes in the order the server sent them, and keeps one timer for the oldest
//! unanswered request. A task that is alone writes its request itself.
//!
//! The first failure (an I/O error, a late reply, an unreadable byte) closes the connection: every request on it fails,
//! and it never delivers another reply.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::ReadBuf;
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::super::options::RedisOptions;
use super::address::Address;
use super::resp::{self, Cmd, OversizedText, Pipeline, Read, Value};
use super::socket::{self, SocketStream, SocketWriter, unreachable};
use crate::clock::Moment;
use crate::store::{StoreError, StoreErrorKind};

/// Size of the read buffer. A burst of replies to a few hundred tasks fits.
const READ_BYTES: usize = 64 * 1024;
/// Bytes in the buffer that are written at once, even while more requests are about to come. A larger piece leaves the
/// server idle until it is complete; a smaller one costs a system call each.
const WRITE_AT: usize = 1_500;
/// TCP keepalive, which detects a peer that vanished while no request is in flight.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(2);
const KEEPALIVE_TRIES: u32 = 3;

/// Receives pushes. The I/O task calls it in stream order, so it must not block.
pub(crate) trait PushHandler: Send + Sync + 'static {
    /// Records that the reply to a request sent at `asked_at` has been read.
    fn answered(&self, asked_at: Moment);

    /// Handles a push. `Err` closes the connection.
    fn push(&self, push: &[Value]) -> Result<(), StoreError>;

    /// Called before the reply that follows a push, and after everything that was read. The connection can be used.
    fn delivered(&self) {}
}

/// A connection to the server. Dropping it closes it.
pub(crate) struct Connection {
    shared: Arc<ConnectionInner>,
}

struct ConnectionInner {
    writer: SocketWriter,
    in_flight: Mutex<InFlight>,
    is_broken: AtomicBool,
    broken: CancellationToken,
}

/// Requests that are not written or not answered yet.
#[derive(Default)]
struct InFlight {
    /// Bytes that the I/O task has not taken yet.
    out: Vec<u8>,
    /// Whether the I/O task still writes bytes that it took.
    writing: bool,
    /// Indices into `slots`, in the order of the requests.
    order: VecDeque<usize>,
    slots: Vec<RequestSlot>,
    free: Vec<usize>,
    /// Wakes the I/O task; `None` while it is awake already.
    io_waker: Option<Waker>,
    /// How many tasks the last replies woke: that many may send a request at once.
    last_woken: usize,
    /// Whether the timer for the oldest unanswered request is set.
    timer_set: bool,
    closed_with: Option<StoreError>,
}

/// One request and the replies to it so far.
struct RequestSlot {
    asked_at: Moment,
    /// Replies that are still to come.
    missing: usize,
    /// The push that answers this request instead of a reply.
    confirmed_by: Option<Box<Confirmation>>,
    /// Whether one of the replies came from a replica.
    read_only: bool,
    replies: Replies,
    failed: Option<StoreError>,
    waker: Option<Waker>,
    /// Whether the future that waits for the replies was dropped.
    abandoned: bool,
}

/// The push that confirms a subscribe or unsubscribe, by kind and channel.
struct Confirmation {
    kind: &'static str,
    channel: Vec<u8>,
}

enum Replies {
    One(Option<Value>),
    Many(Vec<Value>),
}

/// A request that was sent. If it is dropped, its replies are read and discarded.
#[must_use = "a reply is delivered only when it is awaited"]
pub(crate) struct PendingReply<'a> {
    shared: &'a ConnectionInner,
    slot: Option<usize>,
    pub(crate) asked_at: Moment,
}

impl Connection {
    /// Connects. No command is sent yet.
    pub(crate) async fn open(
        address: &Address,
        options: &RedisOptions,
        handler: Arc<dyn PushHandler>,
    ) -> Result<Self, StoreError> {
        let connecting = TcpStream::connect((address.host.as_str(), address.port));
        let stream = match timeout(options.connect_timeout, connecting).await {
            Ok(connected) => connected.and_then(|stream| configure(&stream, options).map(|()| stream)),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "no connection in time")),
        };
        let stream = stream.map_err(|error| unreachable(&error))?;
        let (stream, writer) = socket::split(stream, address, options.connect_timeout).await?;
        let shared = Arc::new(ConnectionInner {
            writer,
            in_flight: Mutex::default(),
            is_broken: AtomicBool::new(false),
            broken: CancellationToken::new(),
        });
        // Closes the connection also when the runtime drops the task: no request waits for an I/O task that is gone.
        let inner = CloseOnDrop(shared.clone());
        tokio::spawn(run_io(inner, stream, handler, options.response_timeout));
        Ok(Self { shared })
    }

    /// Sends one command.
    pub(crate) fn send(&self, cmd: &Cmd) -> PendingReply<'_> {
        self.enqueue(1, None, |out| cmd.write_to(out))
    }

    /// Sends several commands in one write.
    pub(crate) fn send_all(&self, pipe: &Pipeline) -> PendingReply<'_> {
        self.enqueue(pipe.len(), None, |out| pipe.write_to(out))
    }

    /// Sends a subscribe or unsubscribe, which a push of this kind for this channel answers. If a proxy swallows that
    /// push, the next reply completes the request with [`Value::Nil`].
    pub(crate) fn send_subscription(&self, cmd: &Cmd, kind: &'static str, channel: &str) -> PendingReply<'_> {
        let confirmation = Confirmation { kind, channel: channel.into() };
        self.enqueue(1, Some(Box::new(confirmation)), |out| cmd.write_to(out))
    }

    /// Closes the connection; unanswered requests fail.
    pub(crate) fn abort(&self) {
        self.shared.close(StoreErrorKind::Unreachable.into());
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.shared.is_broken.load(Ordering::Acquire)
    }

    /// Waits until the connection is closed.
    pub(crate) async fn broken(&self) {
        self.shared.broken.cancelled().await;
    }

    fn enqueue(
        &self,
        replies: usize,
        confirmed_by: Option<Box<Confirmation>>,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> PendingReply<'_> {
        // Taken before the request leaves: a lease that the server counts from the arrival ends later than ours.
        let asked_at = Moment::now();
        let shared = &*self.shared;
        let mut in_flight = shared.in_flight();
        let slot = in_flight.put(RequestSlot::new(asked_at, replies, confirmed_by));
        if in_flight.closed_with.is_some() {
            let error = in_flight.closed_with.clone();
            in_flight.slots[slot].failed = error;
            return PendingReply { shared, slot: Some(slot), asked_at };
        }
        if replies == 0 {
            return PendingReply { shared, slot: Some(slot), asked_at };
        }
        let alone = in_flight.last_woken <= 1 && in_flight.order.is_empty();
        in_flight.order.push_back(slot);
        write(&mut in_flight.out);
        // No other request is about to come, or the buffer is large enough: waiting for the I/O task would only add
        // latency. The I/O task writes what cannot be written now, and it meets the same errors. With TLS it writes the
        // pieces of a batch: here, they would be encrypted under the lock that all other tasks wait for.
        if (alone || (in_flight.out.len() >= WRITE_AT && shared.writer.is_plain()))
            && !in_flight.writing
            && let Ok(written) = shared.writer.try_write(&in_flight.out)
        {
            if written == in_flight.out.len() {
                in_flight.out.clear();
            } else {
                in_flight.out.drain(..written);
            }
        }
        let is_done = in_flight.out.is_empty() && in_flight.timer_set && !shared.writer.needs_flush();
        let io_waker = if is_done { None } else { in_flight.io_waker.take() };
        drop(in_flight);
        if let Some(io_waker) = io_waker {
            io_waker.wake();
        }
        PendingReply { shared, slot: Some(slot), asked_at }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.shared.close(StoreErrorKind::Closed.into());
    }
}

impl PendingReply<'_> {
    /// Waits for the reply to one command.
    pub(crate) async fn reply(self) -> Result<Value, StoreError> {
        match self.replies().await? {
            Replies::One(Some(value)) => Ok(value),
            _ => Err(StoreErrorKind::Other.into()),
        }
    }

    /// Waits for the replies to several commands.
    pub(crate) async fn all(self) -> Result<Vec<Value>, StoreError> {
        match self.replies().await? {
            Replies::One(value) => Ok(value.into_iter().collect()),
            Replies::Many(values) => Ok(values),
        }
    }

    async fn replies(mut self) -> Result<Replies, StoreError> {
        std::future::poll_fn(|cx| self.poll_replies(cx)).await
    }

    fn poll_replies(&mut self, cx: &mut Context<'_>) -> Poll<Result<Replies, StoreError>> {
        let at = self.slot.expect("polled until it is answered");
        let mut in_flight = self.shared.in_flight();
        let slot = &mut in_flight.slots[at];
        let answer = match slot.failed.take() {
            Some(error) => Err(error),
            None if slot.missing == 0 => Ok(std::mem::replace(&mut slot.replies, Replies::One(None))),
            None => {
                if slot.waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
                    slot.waker = Some(cx.waker().clone());
                }
                return Poll::Pending;
            }
        };
        in_flight.free.push(at);
        drop(in_flight);
        self.slot = None;
        Poll::Ready(answer)
    }
}

impl Drop for PendingReply<'_> {
    fn drop(&mut self) {
        let Some(at) = self.slot else { return };
        let mut in_flight = self.shared.in_flight();
        let slot = &mut in_flight.slots[at];
        if slot.missing == 0 || slot.failed.is_some() {
            in_flight.free.push(at);
        } else {
            slot.abandoned = true;
            slot.waker = None;
        }
    }
}

impl ConnectionInner {
    fn in_flight(&self) -> MutexGuard<'_, InFlight> {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers replies and pushes in stream order. A reply completes after the pushes before it have been received:
    /// otherwise a waiter could take such a push for newer than the reply.
    fn deliver(&self, values: Vec<Value>, handler: &dyn PushHandler, woken: &mut Vec<Waker>) -> Result<(), StoreError> {
        let mut values = values.into_iter().peekable();
        while values.peek().is_some() {
            let mut in_flight = self.in_flight();
            let mut pushed = false;
            let mut handled = Ok(());
            while handled.is_ok()
                && let Some(value) = values.next_if(|value| !pushed || matches!(value, Value::Push(_)))
            {
                handled = match value {
                    Value::Push(push) => {
                        pushed = true;
                        in_flight.push(push, handler, woken)
                    }
                    value => in_flight.reply(value, handler, woken),
                };
            }
            in_flight.last_woken = woken.len();
            drop(in_flight);
            handler.delivered();
            handled?;
        }
        Ok(())
    }

    /// Closes the connection and fails every request on it with `error`. Later calls change nothing.
    fn close(&self, error: StoreError) {
        let mut woken = Vec::new();
        {
            let mut in_flight = self.in_flight();
            if in_flight.closed_with.is_some() {
                return;
            }
            self.is_broken.store(true, Ordering::Release);
            while let Some(at) = in_flight.order.pop_front() {
                let slot = &mut in_flight.slots[at];
                if slot.abandoned {
                    in_flight.free.push(at);
                    continue;
                }
                slot.failed = Some(error.clone());
                woken.extend(slot.waker.take());
            }
            in_flight.closed_with = Some(error);
            woken.extend(in_flight.io_waker.take());
        }
        woken.into_iter().for_each(Waker::wake);
        self.broken.cancel();
        // The server must stop counting us as a subscriber.
        self.writer.shut_down();
    }
}

impl InFlight {
    fn put(&mut self, slot: RequestSlot) -> usize {
        if let Some(at) = self.free.pop() {
            self.slots[at] = slot;
            return at;
        }
        self.slots.push(slot);
        self.slots.len() - 1
    }

    /// Delivers a reply to the oldest request.
    fn reply(&mut self, value: Value, handler: &dyn PushHandler, woken: &mut Vec<Waker>) -> Result<(), StoreError> {
        let &first = self.order.front().ok_or_else(unsolicited_reply)?;
        // The confirming push was swallowed on its way. An error reply belongs to the subscription itself.
        if self.slots[first].confirmed_by.is_some() && !matches!(value, Value::Error(_)) {
            self.complete(Value::Nil, handler, woken)?;
            return self.reply(value, handler, woken);
        }
        self.complete(value, handler, woken)
    }

    fn push(&mut self, push: Vec<Value>, handler: &dyn PushHandler, woken: &mut Vec<Waker>) -> Result<(), StoreError> {
        let expected = self.order.front().and_then(|&at| self.slots[at].confirmed_by.as_deref());
        if let (Some(expected), [Value::Bulk(kind), Value::Bulk(channel), ..]) = (expected, &push[..])
            && kind == expected.kind.as_bytes()
            && *channel == expected.channel
        {
            return self.complete(Value::Push(push), handler, woken);
        }
        handler.push(&push)
    }

    /// Adds a reply to the oldest request. `Err` closes the connection: the server is a replica, and the request has
    /// all its replies.
    fn complete(&mut self, value: Value, handler: &dyn PushHandler, woken: &mut Vec<Waker>) -> Result<(), StoreError> {
        let Some(&at) = self.order.front() else { return Ok(()) };
        let slot = &mut self.slots[at];
        slot.missing -= 1;
        slot.read_only |= matches!(&value, Value::Error(error) if error.is_from_replica());
        if !slot.abandoned {
            match &mut slot.replies {
                Replies::One(reply) => *reply = Some(value),
                Replies::Many(replies) => replies.push(value),
            }
        }
        if slot.missing > 0 {
            return Ok(());
        }
        handler.answered(slot.asked_at);
        woken.extend(slot.waker.take());
        let read_only = slot.read_only;
        if slot.abandoned {
            self.free.push(at);
        }
        self.order.pop_front();
        if read_only { Err(became_replica()) } else { Ok(()) }
    }
}

impl RequestSlot {
    fn new(asked_at: Moment, replies: usize, confirmed_by: Option<Box<Confirmation>>) -> Self {
        let room = if replies == 1 { Replies::One(None) } else { Replies::Many(Vec::with_capacity(replies)) };
        Self {
            asked_at,
            missing: replies,
            confirmed_by,
            read_only: false,
            replies: room,
            failed: None,
            waker: None,
            abandoned: false,
        }
    }
}

/// The task that reads from and writes to the socket.
struct IoTask {
    shared: Arc<ConnectionInner>,
    stream: SocketStream,
    handler: Arc<dyn PushHandler>,
    response_timeout: Duration,
    timer: Pin<Box<Sleep>>,
    /// Bytes taken from the shared buffer, and how many of them are written.
    out: Vec<u8>,
    written: usize,
    /// The first write error. What the server sent before it is still read.
    write_error: Option<StoreError>,
    /// Whether to yield once before writing, so that other tasks can add requests.
    yield_first: bool,
    /// The read buffer, and how many bytes of it are filled.
    input: Vec<u8>,
    filled: usize,
    /// How many of the next bytes are dropped unparsed.
    skip: usize,
}

async fn run_io(inner: CloseOnDrop, stream: SocketStream, handler: Arc<dyn PushHandler>, response_timeout: Duration) {
    let mut task = IoTask {
        shared: inner.0.clone(),
        stream,
        handler,
        response_timeout,
        timer: Box::pin(sleep(response_timeout)),
        out: Vec::new(),
        written: 0,
        write_error: None,
        yield_first: true,
        input: vec![0; READ_BYTES],
        filled: 0,
        skip: 0,
    };
    let error = std::future::poll_fn(|cx| task.poll(cx)).await;
    inner.0.close(error);
}

struct CloseOnDrop(Arc<ConnectionInner>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close(StoreErrorKind::Unreachable.into());
    }
}

impl IoTask {
    /// Makes progress. Ready with the error that closes the connection.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<StoreError> {
        if let Some(error) = &self.shared.in_flight().closed_with {
            return Poll::Ready(error.clone());
        }
        if self.write_error.is_none() {
            // A server that rejects a client sends the reason first: read it before closing.
            self.write_error = self.write(cx).err();
        }
        match self.read(cx).and_then(|()| self.check_timeout(cx)) {
            Ok(()) => Poll::Pending,
            Err(error) => Poll::Ready(error),
        }
    }

    fn write(&mut self, cx: &mut Context<'_>) -> Result<(), StoreError> {
        loop {
            if self.out.is_empty() {
                let mut in_flight = self.shared.in_flight();
                if in_flight.io_waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
                    in_flight.io_waker = Some(cx.waker().clone());
                }
                in_flight.writing = false;
                if in_flight.out.is_empty() {
                    drop(in_flight);
                    return match self.stream.poll_flush(cx) {
                        Poll::Ready(Err(error)) => Err(unreachable(&error)),
                        _ => Ok(()),
                    };
                }
                if std::mem::replace(&mut self.yield_first, false) {
                    // Tasks that the last replies woke are about to send requests. Run after them, so that one write
                    // carries all of it.
                    drop(in_flight);
                    cx.waker().wake_by_ref();
                    return Ok(());
                }
                self.yield_first = true;
                std::mem::swap(&mut self.out, &mut in_flight.out);
                in_flight.writing = true;
            }
            match self.stream.poll_write(cx, &self.out[self.written..]) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Err(error)) => return Err(unreachable(&error)),
                Poll::Ready(Ok(bytes)) => self.written += bytes,
            }
            if self.written == self.out.len() {
                self.out.clear();
                self.written = 0;
            }
        }
    }

    fn read(&mut self, cx: &mut Context<'_>) -> Result<(), StoreError> {
        loop {
            if self.filled == self.input.len() {
                self.input.resize(self.input.len() * 2, 0);
            }
            let mut room = ReadBuf::new(&mut self.input[self.filled..]);
            match self.stream.poll_read(cx, &mut room) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Err(error)) => return Err(unreachable(&error)),
                Poll::Ready(Ok(())) => {}
            }
            let bytes = room.filled().len();
            if bytes == 0 {
                return Err(StoreError::new(StoreErrorKind::Unreachable, "the server closed the connection"));
            }
            let dropped = bytes.min(self.skip);
            self.skip -= dropped;
            self.input.copy_within(self.filled + dropped..self.filled + bytes, self.filled);
            self.filled += bytes - dropped;
            if bytes > dropped {
                self.deliver()?;
            }
        }
    }

    /// Delivers every complete value in the read buffer, in stream order.
    fn deliver(&mut self) -> Result<(), StoreError> {
        let mut values = Vec::new();
        let mut used = 0;
        let mut unreadable = Ok(());
        loop {
            match resp::read(&self.input[used..self.filled]) {
                Ok(Read::Value(value, bytes)) => {
                    used += bytes;
                    values.push(value);
                }
                Ok(Read::More) => break,
                Ok(Read::Oversized(text)) => self.replace(used, &text),
                Err(error) => {
                    unreadable = Err(error);
                    break;
                }
            }
        }
        self.input.copy_within(used..self.filled, 0);
        self.filled -= used;
        let mut woken = Vec::new();
        let delivered = self.shared.deliver(values, &*self.handler, &mut woken);
        woken.into_iter().for_each(Waker::wake);
        delivered.and(unreadable)
    }

    /// Replaces an oversized string with a short text. The value that contains it begins at `used`.
    fn replace(&mut self, used: usize, text: &OversizedText) {
        let content = used + text.header.end;
        let here = text.drops().min(self.filled - content);
        self.skip = text.drops() - here;
        let kept = self.input[content + here..self.filled].to_vec();
        self.input.truncate(used + text.header.start);
        self.input.extend_from_slice(&resp::replacement());
        self.input.extend_from_slice(&kept);
        self.filled = self.input.len();
        self.input.resize(self.filled.max(READ_BYTES), 0);
    }

    /// Fails when the oldest request has waited for longer than the response timeout.
    fn check_timeout(&mut self, cx: &mut Context<'_>) -> Result<(), StoreError> {
        loop {
            let mut in_flight = self.shared.in_flight();
            let oldest = in_flight.order.front().map(|&at| in_flight.slots[at].asked_at);
            if !in_flight.timer_set {
                let Some(asked_at) = oldest else { return Ok(()) };
                in_flight.timer_set = true;
                let left = Moment::now().until(asked_at + self.response_timeout);
                self.timer.set(sleep(left));
            }
            if self.timer.as_mut().poll(cx).is_pending() {
                return Ok(());
            }
            // The request that the timer was set for may have been answered since.
            in_flight.timer_set = false;
            if oldest.is_some_and(|asked_at| Moment::now() >= asked_at + self.response_timeout) {
                return Err(StoreErrorKind::NoAnswer.into());
            }
        }
    }
}

fn configure(stream: &TcpStream, options: &RedisOptions) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_TRIES)?;
    let unacknowledged = options.response_timeout.max(Duration::from_secs(1)).saturating_mul(2);
    sockopt::set_tcp_user_timeout(stream, u32::try_from(unacknowledged.as_millis()).unwrap_or(u32::MAX))?;
    // Requests are batched before they are written, so Nagle's algorithm would only add latency.
    stream.set_nodelay(true)
}

/// `Unreachable`, because unanswered requests may have been carried out before the demotion.
fn became_replica() -> StoreError {
    StoreError::new(StoreErrorKind::Unreachable, "the server became a read-only replica")
}

fn unsolicited_reply() -> StoreError {
    StoreError::new(StoreErrorKind::Unreachable, "the server sent a reply without a request")
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use super::*;

    /// Records the pushes that confirmed no request.
    #[derive(Default)]
    struct Recorder(Mutex<Vec<Vec<Value>>>);

    impl PushHandler for Recorder {
        fn answered(&self, _: Moment) {}

        fn push(&self, push: &[Value]) -> Result<(), StoreError> {
            self.0.lock().expect("no panic meanwhile").push(push.to_vec());
            Ok(())
        }
    }

    fn push(kind: &str, channel: &str) -> Vec<Value> {
        vec![Value::Bulk(kind.into()), Value::Bulk(channel.into()), Value::Int(0)]
    }

    fn asked(in_flight: &mut InFlight, confirmed_by: Option<(&'static str, &str)>) -> usize {
        let confirmed_by = confirmed_by.map(|(kind, channel)| Box::new(Confirmation { kind, channel: channel.into() }));
        let at = in_flight.put(RequestSlot::new(Moment::now(), 1, confirmed_by));
        in_flight.order.push_back(at);
        at
    }

    /// Records how many requests were unanswered each time the pushes were received.
    #[derive(Default)]
    struct Unanswered {
        connection: OnceLock<Arc<ConnectionInner>>,
        pushed: AtomicBool,
        seen: Mutex<Vec<usize>>,
    }

    impl PushHandler for Unanswered {
        fn answered(&self, _: Moment) {}

        fn push(&self, _: &[Value]) -> Result<(), StoreError> {
            self.pushed.store(true, Ordering::Release);
            Ok(())
        }

        fn delivered(&self) {
            if self.pushed.swap(false, Ordering::AcqRel) {
                let unanswered = self.connection.get().expect("connected").in_flight().order.len();
                self.seen.lock().expect("no panic meanwhile").push(unanswered);
            }
        }
    }

    #[tokio::test]
    async fn a_push_is_received_before_the_reply_that_follows_it_completes() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = format!("redis://{}", listener.local_addr().expect("a port"));
        let address = Address::parse(&address).expect("an address");
        let handler = Arc::new(Unanswered::default());
        let options = RedisOptions::default();
        let connection = Connection::open(&address, &options, handler.clone()).await.expect("connected");
        assert!(handler.connection.set(connection.shared.clone()).is_ok());
        let (server, _) = listener.accept().await.expect("a client");
        let mut ping = resp::cmd("PING");
        ping.arg("x");
        let requests = [connection.send(&ping), connection.send(&ping), connection.send(&ping)];
        let push = ">3\r\n$8\r\nsmessage\r\n$1\r\ni\r\n$1\r\nm\r\n";
        let stream = format!(":1\r\n{push}{push}:2\r\n{push}:3\r\n");
        server.writable().await.expect("a client");
        assert_eq!(server.try_write(stream.as_bytes()).expect("written"), stream.len());
        for request in requests {
            request.reply().await.expect("answered");
        }
        assert_eq!(*handler.seen.lock().expect("no panic meanwhile"), [2, 1]);
    }

    #[test]
    fn a_push_about_another_channel_answers_nothing() {
        let (mut in_flight, handler, mut woken) = (InFlight::default(), Recorder::default(), Vec::new());
        let leaving = asked(&mut in_flight, Some(("sunsubscribe", "ours")));
        let next = asked(&mut in_flight, None);
        in_flight.push(push("sunsubscribe", "another"), &handler, &mut woken).expect("heard");
        assert_eq!((in_flight.slots[leaving].missing, handler.0.lock().expect("kept").len()), (1, 1));
        in_flight.push(push("sunsubscribe", "ours"), &handler, &mut woken).expect("heard");
        in_flight.reply(Value::Int(7), &handler, &mut woken).expect("asked for");
        assert_eq!(in_flight.slots[leaving].missing, 0);
        assert!(matches!(in_flight.slots[next].replies, Replies::One(Some(Value::Int(7)))), "replies are not swapped");
    }

    #[test]
    fn a_replica_ends_the_connection_once_its_request_has_all_replies() {
        let (mut in_flight, handler, mut woken) = (InFlight::default(), Recorder::default(), Vec::new());
        let at = in_flight.put(RequestSlot::new(Moment::now(), 2, None));
        in_flight.order.push_back(at);
        let Ok(Read::Value(refusal, _)) = resp::read(b"-READONLY You can't write\r\n") else { panic!("an error") };
        in_flight.reply(refusal, &handler, &mut woken).expect("the second reply is still to come");
        let error = in_flight.reply(Value::Int(0), &handler, &mut woken).expect_err("a replica");
        assert_eq!((error.kind(), in_flight.slots[at].missing), (StoreErrorKind::Unreachable, 0));
    }
}
