//! The sockets between the processes of a run: short messages, some with descriptors.
//!
//! A closed socket is information as well: each side notices at once that the other one died. Sending never blocks: a
//! process that was stopped reads nothing, and the others must not wait for it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::sys::signal::Signal;
use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recv, recvmsg, sendmsg, socketpair,
};
use tokio::io::Interest;
use tokio::net::UnixDatagram;

use super::front_messages::ToKeeper;
use crate::signals::ReceivedSignal;

/// The most descriptors that one message carries.
const FDS_MAX: usize = 4;

/// One end of a socket pair.
pub(super) struct Channel(OwnedFd);

/// The result of a read.
pub(super) enum Received<M> {
    Message(M, Vec<OwnedFd>),
    /// There is no message at the moment.
    Nothing,
    /// The other side closed the socket, or its process died.
    Closed,
}

/// A message and its bytes on the socket.
pub(super) trait Message: Sized {
    fn write(&self) -> Vec<u8>;
    fn read(bytes: &[u8]) -> Option<Self>;
}

impl Channel {
    /// Opens a pair of sockets; the second end is for a process that is about to be started.
    pub(super) fn pair() -> Result<(Self, OwnedFd), Errno> {
        let (ours, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self(ours), other))
    }

    /// Takes the end that this process was started with as its stdin.
    pub(super) fn from_stdin() -> io::Result<Self> {
        rustix::stdio::stdin().try_clone_to_owned().map(Self)
    }

    /// Sends a message with at most [`FDS_MAX`] descriptors. The message is lost when the other side is closed, or was
    /// stopped and has left hundreds of messages unread.
    pub(super) fn send<M: Message>(&self, message: &M, with: &[BorrowedFd<'_>]) {
        let bytes = message.write();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !with.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(with));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        while let Err(Errno::INTR) = sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut control, flags) {}
    }

    /// Waits for a message and reads it.
    pub(super) fn wait<M: Message>(&self) -> Received<M> {
        self.receive(RecvFlags::empty())
    }

    /// Reads a message if there is one.
    pub(super) fn poll<M: Message>(&self) -> Received<M> {
        self.receive(RecvFlags::DONTWAIT)
    }

    fn receive<M: Message>(&self, flags: RecvFlags) -> Received<M> {
        // A buffer for the longest message possible would be cleared, page by page, for each short one.
        let length = retry(|| recv(&self.0, &mut [0; 0], flags | RecvFlags::PEEK | RecvFlags::TRUNC));
        let mut bytes = match length {
            Err(Errno::AGAIN) => return Received::Nothing,
            Err(_) => return Received::Closed,
            Ok((_, length)) => vec![0; length],
        };
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut bytes)];
        let received = match retry(|| recvmsg(&self.0, into, &mut control, flags | RecvFlags::CMSG_CLOEXEC)) {
            Err(Errno::AGAIN) => return Received::Nothing,
            Err(_) => return Received::Closed,
            Ok(received) => received.bytes,
        };
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        // No message is empty or unknown, so an empty one is the end of the socket.
        M::read(&bytes[..received]).map_or(Received::Closed, |message| Received::Message(message, fds))
    }
}

/// Repeats a read that a signal interrupted, or that reported the reset of the connection.
///
/// A reset means that the other side closed before it had read everything. The kernel reports it once, before the
/// messages that the other side sent.
fn retry<T>(mut read: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match read() {
            Err(Errno::INTR | Errno::CONNRESET) => {}
            result => return result,
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// One end of a socket pair inside the keeper's runtime.
pub(super) struct AsyncChannel {
    channel: Channel,
    /// A second descriptor of the same socket, which the runtime polls for readability.
    readiness: UnixDatagram,
}

impl AsyncChannel {
    pub(super) fn new(channel: &Channel) -> io::Result<Self> {
        let readiness = std::os::unix::net::UnixDatagram::from(channel.0.try_clone()?);
        readiness.set_nonblocking(true)?;
        Ok(Self { readiness: UnixDatagram::from_std(readiness)?, channel: Channel(channel.0.try_clone()?) })
    }

    /// Sends a message, see [`Channel::send`].
    pub(super) fn send<M: Message>(&self, message: &M, with: &[BorrowedFd<'_>]) {
        self.channel.send(message, with);
    }

    /// Returns the next message, or `None` when the other side is closed.
    ///
    /// Cancel safe: a message is read only when it is returned.
    pub(super) async fn next<M: Message>(&self) -> Option<M> {
        loop {
            self.readiness.readable().await.ok()?;
            let read = self.readiness.try_io(Interest::READABLE, || match self.channel.poll() {
                Received::Nothing => Err(io::ErrorKind::WouldBlock.into()),
                read => Ok(read),
            });
            match read {
                Ok(Received::Message(message, _)) => return Some(message),
                Ok(Received::Closed) => return None,
                Ok(Received::Nothing) | Err(_) => {}
            }
        }
    }

    /// Returns the next signal that the front received, or `None` when the front was killed.
    ///
    /// Cancel safe.
    pub(super) async fn next_signal(&self) -> Option<ReceivedSignal> {
        loop {
            if let ToKeeper::Signal(received) = self.next().await? {
                return Some(received);
            }
        }
    }
}

/// Returns a signal's number as one byte of a message.
pub(super) fn signal_number(signal: Signal) -> u8 {
    u8::try_from(signal as i32).unwrap_or(0)
}

/// Returns the signal with a number that came in a message.
pub(super) fn signal(number: u8) -> Option<Signal> {
    Signal::try_from(i32::from(number)).ok()
}

#[cfg(test)]
mod tests {
    use super::super::front_messages::{ToFront, ToKeeper};
    use super::*;

    #[test]
    fn descriptors_are_passed_and_a_closed_peer_is_noticed() {
        let (front, keeper) = Channel::pair().expect("a socket pair");
        let keeper = Channel(keeper);
        assert!(matches!(keeper.poll::<ToKeeper>(), Received::Nothing));
        let (reader, writer) = io::pipe().expect("a pipe");
        front.send(&ToKeeper::Start { front: 1, blocked: 2 }, &[writer.as_fd()]);
        drop(writer);
        let Received::Message(ToKeeper::Start { front: 1, blocked: 2 }, fds) = keeper.wait() else {
            panic!("not what was sent");
        };
        assert_eq!(fds.len(), 1);
        drop(fds);
        assert_eq!(io::read_to_string(reader).expect("the pipe's end"), "");
        drop(front);
        assert!(matches!(keeper.wait::<ToKeeper>(), Received::Closed));
    }

    #[test]
    fn messages_of_any_length_arrive_complete() {
        use super::super::guardian_messages::{FdLayout, Order};
        let (keeper, guardian) = Channel::pair().expect("a socket pair");
        let guardian = Channel(guardian);
        let fds = FdLayout { output: false, lifeline: false };
        for length in [0, 1_000, 60_000] {
            let env = vec![("LEASEHOLD_NAME".to_owned(), "x".repeat(length))];
            let order = Order::Start { schedule: None, group: 1, blocked: 0, words: 1, fds, env };
            keeper.send(&order, &[]);
            let Received::Message(received, _) = guardian.poll::<Order>() else { panic!("{length} bytes got lost") };
            assert_eq!(received, order);
        }
    }

    #[test]
    fn a_reader_that_was_stopped_does_not_block_the_sender() {
        let (front, keeper) = Channel::pair().expect("a socket pair");
        for _ in 0..10_000 {
            front.send(&ToKeeper::Start { front: 1, blocked: 2 }, &[]);
        }
        assert!(matches!(Channel(keeper).poll::<ToKeeper>(), Received::Message(..)));
    }

    #[test]
    fn the_last_message_arrives_although_the_sender_left_one_unread() {
        let (front, keeper) = Channel::pair().expect("a socket pair");
        let keeper = Channel(keeper);
        front.send(&ToKeeper::Start { front: 1, blocked: 2 }, &[]);
        keeper.send(&ToFront::Done { code: 7, by: None }, &[]);
        drop(keeper);
        assert!(matches!(front.wait(), Received::Message(ToFront::Done { code: 7, by: None }, _)));
        assert!(matches!(front.wait::<ToFront>(), Received::Closed));
    }
}
