//! One connection, shared by all tasks of a process.
//!
//! Whoever asks puts its request at the end of one buffer and waits in one line: the server answers in
//! order. A single task, the carrier, writes the buffer in as few writes as it can, reads replies and
//! pushes in the order the server sent them, and keeps one alarm for the oldest unanswered request. Whoever
//! asks alone writes its request itself.
//!
//! After the first thing that goes wrong (an error, a late answer, an unreadable byte) the connection is of
//! no more use: every request on it ends with an error, and it never answers again.

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
use tokio::time::{Instant, Sleep, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::RedisOptions;
use super::address::Address;
use super::resp::{self, Cmd, LongText, Pipeline, Read, Value};
use super::socket::{self, Reader, Writer};
use crate::clock::Moment;
use crate::store::{StoreError, StoreErrorKind};

/// Read at once. A burst of replies to a few hundred tasks fits.
const READ_BYTES: usize = 64 * 1024;
/// So much is written at once even while others are about to ask: larger pieces leave the server idle until
/// they are whole, smaller ones cost a call each.
const CHUNK: usize = 1_500;
/// A peer that vanished without a word is noticed within these even when nothing is asked.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
const KEEPALIVE_EVERY: Duration = Duration::from_secs(2);
const KEEPALIVE_TRIES: u32 = 3;

/// Who listens to what nobody asked for. Called by the carrier, in the order of the stream: do nothing
/// slow here.
pub(super) trait Hear: Send + Sync + 'static {
    /// The reply to a request that was sent at this moment has been read.
    fn answered(&self, asked_at: Moment);

    /// A push. `Err` ends the connection.
    fn push(&self, push: &[Value]) -> Result<(), StoreError>;
}

/// A connection. Dropping it ends it.
pub(super) struct Wire {
    shared: Arc<Shared>,
}

struct Shared {
    writer: Writer,
    line: Mutex<Line>,
    is_broken: AtomicBool,
    broken: CancellationToken,
}

/// What is on its way.
#[derive(Default)]
struct Line {
    /// Not taken by the carrier yet.
    out: Vec<u8>,
    /// The carrier has not written all that it took.
    writing: bool,
    /// Slots in the order of their requests.
    asked: VecDeque<usize>,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Wakes the carrier; `None` while it is awake already.
    carrier: Option<Waker>,
    /// Requests that were answered together last: so many tasks are about to ask at once.
    crowd: usize,
    /// The carrier will look whether the oldest answer is late.
    alarm_set: bool,
    ended: Option<StoreError>,
}

/// One request.
struct Slot {
    asked_at: Moment,
    /// How many replies it still gets.
    missing: usize,
    /// Answered by this push instead of a reply.
    by_push: Option<Box<Confirmation>>,
    /// Whether one of its replies came from a replica.
    read_only: bool,
    replies: Replies,
    failed: Option<StoreError>,
    waker: Option<Waker>,
    /// Nobody waits for the replies any more.
    deserted: bool,
}

/// The push that answers a subscribe or unsubscribe: its kind, and its channel.
struct Confirmation {
    kind: &'static str,
    channel: Vec<u8>,
}

enum Replies {
    One(Option<Value>),
    Many(Vec<Value>),
}

/// A request that was sent. Dropped, its replies are read and thrown away.
#[must_use = "a request is answered to whoever awaits it"]
pub(super) struct Asked<'a> {
    shared: &'a Shared,
    slot: Option<usize>,
    pub(super) asked_at: Moment,
}

impl Wire {
    /// Connects; nothing is said yet.
    pub(super) async fn open(
        address: &Address,
        options: &RedisOptions,
        ear: Arc<dyn Hear>,
    ) -> Result<Self, StoreError> {
        let connecting = TcpStream::connect((address.host.as_str(), address.port));
        let stream = match timeout(options.connect_timeout, connecting).await {
            Ok(connected) => connected.and_then(|stream| prepare(&stream, options).map(|()| stream)),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "no connection in time")),
        };
        let stream = stream.map_err(|error| unreachable(&error))?;
        let (reader, writer) = socket::over(stream, address, options.connect_timeout).await?;
        let shared = Arc::new(Shared {
            writer,
            line: Mutex::default(),
            is_broken: AtomicBool::new(false),
            broken: CancellationToken::new(),
        });
        // Also when the runtime goes down under the task: nobody waits for a carrier that is gone.
        let ends = EndsWith(shared.clone());
        tokio::spawn(carry(ends, reader, ear, options.response_timeout));
        Ok(Self { shared })
    }

    /// Sends one command.
    pub(super) fn ask(&self, cmd: &Cmd) -> Asked<'_> {
        self.send(1, None, |out| cmd.write_to(out))
    }

    /// Sends several commands in one write.
    pub(super) fn ask_all(&self, pipe: &Pipeline) -> Asked<'_> {
        self.send(pipe.len(), None, |out| pipe.write_to(out))
    }

    /// Sends a command that is answered by a push of this kind about this channel, as (un)subscribing is. Where
    /// the push never comes, as behind a proxy that swallows it, the next reply settles it: the answer is nothing.
    pub(super) fn ask_push(&self, cmd: &Cmd, kind: &'static str, channel: &str) -> Asked<'_> {
        let confirmation = Confirmation { kind, channel: channel.into() };
        self.send(1, Some(Box::new(confirmation)), |out| cmd.write_to(out))
    }

    /// Not to be used any more.
    pub(super) fn break_off(&self) {
        self.shared.end(StoreErrorKind::Unreachable.into());
    }

    pub(super) fn is_broken(&self) -> bool {
        self.shared.is_broken.load(Ordering::Acquire)
    }

    /// Waits until it broke.
    pub(super) async fn broken(&self) {
        self.shared.broken.cancelled().await;
    }

    fn send(&self, replies: usize, by_push: Option<Box<Confirmation>>, write: impl FnOnce(&mut Vec<u8>)) -> Asked<'_> {
        // Before the request leaves: what the server counts from its arrival ends later than what we count.
        let asked_at = Moment::now();
        let shared = &*self.shared;
        let mut line = shared.line();
        let slot = line.put(Slot::new(asked_at, replies, by_push));
        if line.ended.is_some() {
            let ended = line.ended.clone();
            line.slots[slot].failed = ended;
            return Asked { shared, slot: Some(slot), asked_at };
        }
        if replies == 0 {
            return Asked { shared, slot: Some(slot), asked_at };
        }
        let alone = line.crowd <= 1 && line.asked.is_empty();
        line.asked.push_back(slot);
        write(&mut line.out);
        // Nobody else's request is about to come, or enough have: waiting for the carrier would only cost
        // time. What cannot be written now it writes, and errors it meets again.
        if (alone || line.out.len() >= CHUNK)
            && !line.writing
            && let Ok(written) = shared.writer.try_write(&line.out)
        {
            if written == line.out.len() {
                line.out.clear();
            } else {
                line.out.drain(..written);
            }
        }
        let carrier = if line.out.is_empty() && line.alarm_set { None } else { line.carrier.take() };
        drop(line);
        if let Some(carrier) = carrier {
            carrier.wake();
        }
        Asked { shared, slot: Some(slot), asked_at }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.shared.end(StoreErrorKind::Closed.into());
    }
}

impl Asked<'_> {
    /// Waits for the reply to one command.
    pub(super) async fn reply(self) -> Result<Value, StoreError> {
        match self.replies().await? {
            Replies::One(Some(value)) => Ok(value),
            _ => Err(StoreErrorKind::Other.into()),
        }
    }

    /// Waits for the replies to several commands.
    pub(super) async fn all(self) -> Result<Vec<Value>, StoreError> {
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
        let mut line = self.shared.line();
        let slot = &mut line.slots[at];
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
        line.free.push(at);
        drop(line);
        self.slot = None;
        Poll::Ready(answer)
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        let Some(at) = self.slot else { return };
        let mut line = self.shared.line();
        let slot = &mut line.slots[at];
        if slot.missing == 0 || slot.failed.is_some() {
            line.free.push(at);
        } else {
            slot.deserted = true;
            slot.waker = None;
        }
    }
}

impl Shared {
    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the connection, and every request on it with this error. The first error stands.
    fn end(&self, error: StoreError) {
        let mut woken = Vec::new();
        {
            let mut line = self.line();
            if line.ended.is_some() {
                return;
            }
            self.is_broken.store(true, Ordering::Release);
            while let Some(at) = line.asked.pop_front() {
                let slot = &mut line.slots[at];
                if slot.deserted {
                    line.free.push(at);
                    continue;
                }
                slot.failed = Some(error.clone());
                woken.extend(slot.waker.take());
            }
            line.ended = Some(error);
            woken.extend(line.carrier.take());
        }
        woken.into_iter().for_each(Waker::wake);
        self.broken.cancel();
        // The server must not take us for somebody who listens.
        self.writer.shut_down();
    }
}

impl Line {
    fn put(&mut self, slot: Slot) -> usize {
        if let Some(at) = self.free.pop() {
            self.slots[at] = slot;
            return at;
        }
        self.slots.push(slot);
        self.slots.len() - 1
    }

    /// A reply to the oldest request.
    fn reply(&mut self, value: Value, ear: &dyn Hear, woken: &mut Vec<Waker>) -> Result<(), StoreError> {
        let &first = self.asked.front().ok_or_else(unasked)?;
        // The push that should have come first was swallowed on its way; an error is its own.
        if self.slots[first].by_push.is_some() && !matches!(value, Value::Error(_)) {
            self.settle(Value::Nil, ear, woken)?;
            return self.reply(value, ear, woken);
        }
        self.settle(value, ear, woken)
    }

    fn push(&mut self, push: Vec<Value>, ear: &dyn Hear, woken: &mut Vec<Waker>) -> Result<(), StoreError> {
        let expected = self.asked.front().and_then(|&at| self.slots[at].by_push.as_deref());
        if let (Some(expected), [Value::Bulk(kind), Value::Bulk(channel), ..]) = (expected, &push[..])
            && kind == expected.kind.as_bytes()
            && *channel == expected.channel
        {
            return self.settle(Value::Push(push), ear, woken);
        }
        ear.push(&push)
    }

    /// Gives the oldest request a reply. `Err` ends the connection: the server is a replica, and the request has all
    /// its replies.
    fn settle(&mut self, value: Value, ear: &dyn Hear, woken: &mut Vec<Waker>) -> Result<(), StoreError> {
        let Some(&at) = self.asked.front() else { return Ok(()) };
        let slot = &mut self.slots[at];
        slot.missing -= 1;
        slot.read_only |= matches!(&value, Value::Error(error) if error.is_from_replica());
        if !slot.deserted {
            match &mut slot.replies {
                Replies::One(reply) => *reply = Some(value),
                Replies::Many(replies) => replies.push(value),
            }
        }
        if slot.missing > 0 {
            return Ok(());
        }
        ear.answered(slot.asked_at);
        woken.extend(slot.waker.take());
        let read_only = slot.read_only;
        if slot.deserted {
            self.free.push(at);
        }
        self.asked.pop_front();
        if read_only { Err(demoted()) } else { Ok(()) }
    }
}

impl Slot {
    fn new(asked_at: Moment, replies: usize, by_push: Option<Box<Confirmation>>) -> Self {
        let room = if replies == 1 { Replies::One(None) } else { Replies::Many(Vec::with_capacity(replies)) };
        Self {
            asked_at,
            missing: replies,
            by_push,
            read_only: false,
            replies: room,
            failed: None,
            waker: None,
            deserted: false,
        }
    }
}

/// The task that reads and writes.
struct Carrier {
    shared: Arc<Shared>,
    reader: Reader,
    ear: Arc<dyn Hear>,
    answer_within: Duration,
    alarm: Pin<Box<Sleep>>,
    /// Taken from the line, and how much of it is written.
    out: Vec<u8>,
    written: usize,
    /// Nothing can be written any more; what the server said before is still to be read.
    write_error: Option<StoreError>,
    /// Let others add to the buffer before it is written.
    let_others: bool,
    /// Read, and how much of it is used up.
    input: Vec<u8>,
    filled: usize,
    /// How many of the next bytes are dropped unread.
    dropping: usize,
}

async fn carry(ends: EndsWith, reader: Reader, ear: Arc<dyn Hear>, answer_within: Duration) {
    let mut carrier = Carrier {
        shared: ends.0.clone(),
        reader,
        ear,
        answer_within,
        alarm: Box::pin(sleep(answer_within)),
        out: Vec::new(),
        written: 0,
        write_error: None,
        let_others: true,
        input: vec![0; READ_BYTES],
        filled: 0,
        dropping: 0,
    };
    let error = std::future::poll_fn(|cx| carrier.poll(cx)).await;
    ends.0.end(error);
}

struct EndsWith(Arc<Shared>);

impl Drop for EndsWith {
    fn drop(&mut self) {
        self.0.end(StoreErrorKind::Unreachable.into());
    }
}

impl Carrier {
    /// Does what can be done now. Ready with what ended the connection.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<StoreError> {
        if let Some(ended) = &self.shared.line().ended {
            return Poll::Ready(ended.clone());
        }
        if self.write_error.is_none() {
            // A server that shows us out says why: that is read before the connection is given up.
            self.write_error = self.write(cx).err();
        }
        match self.read(cx).and_then(|()| self.watch(cx)) {
            Ok(()) => Poll::Pending,
            Err(error) => Poll::Ready(error),
        }
    }

    fn write(&mut self, cx: &mut Context<'_>) -> Result<(), StoreError> {
        loop {
            if self.out.is_empty() {
                let mut line = self.shared.line();
                if line.carrier.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
                    line.carrier = Some(cx.waker().clone());
                }
                line.writing = false;
                if line.out.is_empty() {
                    return Ok(());
                }
                if std::mem::replace(&mut self.let_others, false) {
                    // Whoever else was woken by the last replies is about to ask: behind them in the
                    // runtime's line, one write carries all of it.
                    drop(line);
                    cx.waker().wake_by_ref();
                    return Ok(());
                }
                self.let_others = true;
                std::mem::swap(&mut self.out, &mut line.out);
                line.writing = true;
            }
            let writer = &self.shared.writer;
            match writer.poll_write_ready(cx) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Err(error)) => return Err(unreachable(&error)),
                Poll::Ready(Ok(())) => {}
            }
            match writer.try_write(&self.out[self.written..]) {
                Ok(bytes) => self.written += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(unreachable(&error)),
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
            match self.reader.poll_read(cx, &mut room) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Err(error)) => return Err(unreachable(&error)),
                Poll::Ready(Ok(())) => {}
            }
            let bytes = room.filled().len();
            if bytes == 0 {
                return Err(StoreError::new(StoreErrorKind::Unreachable, "the server closed the connection"));
            }
            let dropped = bytes.min(self.dropping);
            self.dropping -= dropped;
            self.input.copy_within(self.filled + dropped..self.filled + bytes, self.filled);
            self.filled += bytes - dropped;
            if bytes > dropped {
                self.deliver()?;
            }
        }
    }

    /// Takes every whole value that was read to whom it is for, in the order of the stream.
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
                Ok(Read::TooLong(text)) => self.replace(used, &text),
                Err(error) => {
                    unreadable = Err(error);
                    break;
                }
            }
        }
        self.input.copy_within(used..self.filled, 0);
        self.filled -= used;
        let mut woken = Vec::new();
        let mut line = self.shared.line();
        let ear = &*self.ear;
        let delivered = values.into_iter().try_for_each(|value| match value {
            Value::Push(push) => line.push(push, ear, &mut woken),
            value => line.reply(value, ear, &mut woken),
        });
        line.crowd = woken.len();
        drop(line);
        woken.into_iter().for_each(Waker::wake);
        delivered.and(unreadable)
    }

    /// Puts a short text in the place of one that is too long to be kept. `used`: where the value begins.
    fn replace(&mut self, used: usize, text: &LongText) {
        let content = used + text.header.end;
        let here = text.drops().min(self.filled - content);
        self.dropping = text.drops() - here;
        let kept = self.input[content + here..self.filled].to_vec();
        self.input.truncate(used + text.header.start);
        self.input.extend_from_slice(&resp::replacement());
        self.input.extend_from_slice(&kept);
        self.filled = self.input.len();
        self.input.resize(self.filled.max(READ_BYTES), 0);
    }

    /// Ends the connection when the oldest request has waited too long.
    fn watch(&mut self, cx: &mut Context<'_>) -> Result<(), StoreError> {
        loop {
            let mut line = self.shared.line();
            let oldest = line.asked.front().map(|&at| line.slots[at].asked_at);
            if !line.alarm_set {
                let Some(asked_at) = oldest else { return Ok(()) };
                line.alarm_set = true;
                let left = Moment::now().until(asked_at + self.answer_within);
                self.alarm.as_mut().reset(far(left));
            }
            if self.alarm.as_mut().poll(cx).is_pending() {
                return Ok(());
            }
            // It rang for a request that may have been answered since.
            line.alarm_set = false;
            if oldest.is_some_and(|asked_at| Moment::now() >= asked_at + self.answer_within) {
                return Err(StoreErrorKind::NoAnswer.into());
            }
        }
    }
}

/// So long from now; a time beyond all clocks is a year.
fn far(left: Duration) -> Instant {
    Instant::now() + left.min(Duration::from_secs(365 * 24 * 3_600))
}

fn prepare(stream: &TcpStream, options: &RedisOptions) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_TRIES)?;
    let unacknowledged = options.response_timeout.max(Duration::from_secs(1)).saturating_mul(2);
    sockopt::set_tcp_user_timeout(stream, u32::try_from(unacknowledged.as_millis()).unwrap_or(u32::MAX))?;
    // What is written is written whole, so there is nothing to collect.
    stream.set_nodelay(true)
}

/// The texts of I/O errors are the operating system's; they name no secret.
fn unreachable(error: &io::Error) -> StoreError {
    StoreError::new(StoreErrorKind::Unreachable, error.to_string())
}

/// Requests that were sent and not answered may have been carried out before the demotion.
fn demoted() -> StoreError {
    StoreError::new(StoreErrorKind::Unreachable, "the server became a read-only replica")
}

fn unasked() -> StoreError {
    StoreError::new(StoreErrorKind::Unreachable, "the server answered what nobody asked")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keeps the pushes that answered nothing.
    #[derive(Default)]
    struct Kept(Mutex<Vec<Vec<Value>>>);

    impl Hear for Kept {
        fn answered(&self, _: Moment) {}

        fn push(&self, push: &[Value]) -> Result<(), StoreError> {
            self.0.lock().expect("no panic meanwhile").push(push.to_vec());
            Ok(())
        }
    }

    fn push(kind: &str, channel: &str) -> Vec<Value> {
        vec![Value::Bulk(kind.into()), Value::Bulk(channel.into()), Value::Int(0)]
    }

    fn asked(line: &mut Line, by_push: Option<(&'static str, &str)>) -> usize {
        let by_push = by_push.map(|(kind, channel)| Box::new(Confirmation { kind, channel: channel.into() }));
        let at = line.put(Slot::new(Moment::now(), 1, by_push));
        line.asked.push_back(at);
        at
    }

    #[test]
    fn a_push_about_another_channel_answers_nothing() {
        let (mut line, ear, mut woken) = (Line::default(), Kept::default(), Vec::new());
        let leaving = asked(&mut line, Some(("sunsubscribe", "ours")));
        let next = asked(&mut line, None);
        line.push(push("sunsubscribe", "another"), &ear, &mut woken).expect("heard");
        assert_eq!((line.slots[leaving].missing, ear.0.lock().expect("kept").len()), (1, 1));
        line.push(push("sunsubscribe", "ours"), &ear, &mut woken).expect("heard");
        line.reply(Value::Int(7), &ear, &mut woken).expect("asked for");
        assert_eq!(line.slots[leaving].missing, 0);
        assert!(matches!(line.slots[next].replies, Replies::One(Some(Value::Int(7)))), "replies are not swapped");
    }

    #[test]
    fn a_replica_ends_the_connection_once_its_request_has_all_replies() {
        let (mut line, ear, mut woken) = (Line::default(), Kept::default(), Vec::new());
        let at = line.put(Slot::new(Moment::now(), 2, None));
        line.asked.push_back(at);
        let Ok(Read::Value(refusal, _)) = resp::read(b"-READONLY You can't write\r\n") else { panic!("an error") };
        line.reply(refusal, &ear, &mut woken).expect("the second reply is still to come");
        let ended = line.reply(Value::Int(0), &ear, &mut woken).expect_err("a replica");
        assert_eq!((ended.kind(), line.slots[at].missing), (StoreErrorKind::Unreachable, 0));
    }
}
