//! The sockets between the processes of a run: short messages, some with descriptors.
//!
//! The end of a socket is news as well: each side learns at once that the other one died. Sending never blocks: a
//! process that was stopped reads nothing, and the others must not wait for it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::sys::signal::Signal;
use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use tokio::io::Interest;
use tokio::net::UnixDatagram;

use crate::signals::Came;

/// What the front tells the keeper.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ToKeeper {
    /// First of all: the front's process id and the signals it blocked. With it comes the command's stdin.
    Start { front: u32, blocked: u64 },
    /// Somebody sent the front a signal.
    Signal(Came),
}

/// What the keeper tells the front.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ToFront {
    /// With a descriptor to keep open: the lease counts as a living process's until it is closed.
    Lifeline,
    /// Stop by this signal: the command is stopped, or was to be, and the shell waits for that.
    Stop(Signal),
    /// All is done; end with this code, or by this signal if it was sent to the front as well.
    Done { code: u8, by: Option<Signal> },
}

/// Descriptors that one message carries.
const FDS_MAX: usize = 4;

/// One end.
pub(super) struct Link(OwnedFd);

/// What was read.
pub(super) enum Read<M> {
    Message(M, Vec<OwnedFd>),
    /// Nothing there at the moment.
    Nothing,
    /// The other side is gone.
    Gone,
}

/// A message as it travels.
pub(super) trait Message: Sized {
    /// The longest message.
    const BYTES_MAX: usize;
    fn write(&self) -> Vec<u8>;
    fn read(bytes: &[u8]) -> Option<Self>;
}

impl Link {
    /// Two ends; the second one is for the process to be started.
    pub(super) fn pair() -> Result<(Self, OwnedFd), Errno> {
        let (ours, other) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self(ours), other))
    }

    /// The end that this process was started with as its stdin.
    pub(super) fn from_stdin() -> io::Result<Self> {
        io::stdin().as_fd().try_clone_to_owned().map(Self)
    }

    /// Sends a message with at most four descriptors. It is lost when the other side is gone, or was stopped and has
    /// left hundreds of messages unread.
    pub(super) fn send<M: Message>(&self, message: &M, with: &[BorrowedFd<'_>]) {
        let bytes = message.write();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS_MAX))];
        let mut extra = SendAncillaryBuffer::new(&mut space);
        if !with.is_empty() {
            extra.push(SendAncillaryMessage::ScmRights(with));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        while let Err(Errno::INTR) = sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut extra, flags) {}
    }

    /// Reads a message, waiting for one.
    pub(super) fn wait<M: Message>(&self) -> Read<M> {
        self.receive(RecvFlags::empty())
    }

    /// Reads a message if there is one.
    pub(super) fn poll<M: Message>(&self) -> Read<M> {
        self.receive(RecvFlags::DONTWAIT)
    }

    fn receive<M: Message>(&self, flags: RecvFlags) -> Read<M> {
        let mut bytes = vec![0; M::BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS_MAX))];
        let mut extra = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let into = &mut [IoSliceMut::new(&mut bytes)];
            match recvmsg(&self.0, into, &mut extra, flags | RecvFlags::CMSG_CLOEXEC) {
                // The other side closed before it had read all we sent. That is told once, ahead of what it sent.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                Err(Errno::AGAIN) => return Read::Nothing,
                Err(_) => return Read::Gone,
                Ok(received) => break received.bytes,
            }
        };
        let mut fds = Vec::new();
        for message in extra.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        // No message of ours is empty or unknown: nothing means the end.
        M::read(&bytes[..received]).map_or(Read::Gone, |message| Read::Message(message, fds))
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// An end inside the keeper's runtime.
pub(super) struct Ear {
    link: Link,
    /// A second descriptor of the same socket: knows when there is something to read.
    ready: UnixDatagram,
}

impl Ear {
    pub(super) fn new(link: &Link) -> io::Result<Self> {
        let ready = std::os::unix::net::UnixDatagram::from(link.0.try_clone()?);
        ready.set_nonblocking(true)?;
        Ok(Self { ready: UnixDatagram::from_std(ready)?, link: Link(link.0.try_clone()?) })
    }

    /// Sends a message, see [`Link::send`].
    pub(super) fn send<M: Message>(&self, message: &M, with: &[BorrowedFd<'_>]) {
        self.link.send(message, with);
    }

    /// The next message; `None` when the other side is gone.
    ///
    /// Cancel safe: what is not returned was not read.
    pub(super) async fn next<M: Message>(&self) -> Option<M> {
        loop {
            self.ready.readable().await.ok()?;
            let read = self.ready.try_io(Interest::READABLE, || match self.link.poll() {
                Read::Nothing => Err(io::ErrorKind::WouldBlock.into()),
                read => Ok(read),
            });
            match read {
                Ok(Read::Message(message, _)) => return Some(message),
                Ok(Read::Gone) => return None,
                Ok(Read::Nothing) | Err(_) => {}
            }
        }
    }

    /// The next signal that was sent to the front; `None` when the front was killed.
    ///
    /// Cancel safe.
    pub(super) async fn hear(&self) -> Option<Came> {
        loop {
            if let ToKeeper::Signal(came) = self.next().await? {
                return Some(came);
            }
        }
    }
}

impl Message for ToKeeper {
    const BYTES_MAX: usize = 16;

    fn write(&self) -> Vec<u8> {
        match self {
            Self::Start { front, blocked } => [&b"0"[..], &front.to_le_bytes(), &blocked.to_le_bytes()].concat(),
            Self::Signal(Came { signal, code, sender }) => {
                [&[b'1', number(*signal)][..], &code.to_le_bytes(), &sender.to_le_bytes()].concat()
            }
        }
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [b'0', rest @ ..] => {
                let (front, blocked) = rest.split_at_checked(4)?;
                Some(Self::Start {
                    front: u32::from_le_bytes(front.try_into().ok()?),
                    blocked: u64::from_le_bytes(blocked.try_into().ok()?),
                })
            }
            [b'1', number, rest @ ..] => {
                let (code, sender) = rest.split_at_checked(4)?;
                Some(Self::Signal(Came {
                    signal: signal(*number)?,
                    code: i32::from_le_bytes(code.try_into().ok()?),
                    sender: u32::from_le_bytes(sender.try_into().ok()?),
                }))
            }
            _ => None,
        }
    }
}

impl Message for ToFront {
    const BYTES_MAX: usize = 16;

    fn write(&self) -> Vec<u8> {
        match self {
            Self::Lifeline => vec![b'0'],
            Self::Stop(signal) => vec![b'1', number(*signal)],
            Self::Done { code, by } => vec![b'2', *code, by.map_or(0, number)],
        }
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [b'0'] => Some(Self::Lifeline),
            [b'1', number] => Some(Self::Stop(signal(*number)?)),
            [b'2', code, 0] => Some(Self::Done { code: *code, by: None }),
            [b'2', code, number] => Some(Self::Done { code: *code, by: Some(signal(*number)?) }),
            _ => None,
        }
    }
}

pub(super) fn number(signal: Signal) -> u8 {
    u8::try_from(signal as i32).unwrap_or(0)
}

pub(super) fn signal(number: u8) -> Option<Signal> {
    Signal::try_from(i32::from(number)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn travels<M: Message + PartialEq + std::fmt::Debug>(message: &M) {
        assert_eq!(M::read(&message.write()).as_ref(), Some(message));
    }

    #[test]
    fn every_message_arrives_as_it_was_sent() {
        travels(&ToKeeper::Start { front: 4_711, blocked: u64::MAX });
        travels(&ToKeeper::Signal(Came { signal: Signal::SIGUSR2, code: -6, sender: 70_000 }));
        travels(&ToFront::Lifeline);
        travels(&ToFront::Stop(Signal::SIGTSTP));
        travels(&ToFront::Done { code: 255, by: None });
        travels(&ToFront::Done { code: 130, by: Some(Signal::SIGINT) });
        assert_eq!(ToKeeper::read(b""), None);
        assert_eq!(ToFront::read(b"2"), None);
    }

    #[test]
    fn a_descriptor_travels_along_and_the_end_is_noticed() {
        let (front, keeper) = Link::pair().expect("a socket pair");
        let keeper = Link(keeper);
        assert!(matches!(keeper.poll::<ToKeeper>(), Read::Nothing));
        let (reader, writer) = io::pipe().expect("a pipe");
        front.send(&ToKeeper::Start { front: 1, blocked: 2 }, &[writer.as_fd()]);
        drop(writer);
        let Read::Message(ToKeeper::Start { front: 1, blocked: 2 }, fds) = keeper.wait() else {
            panic!("not what was sent");
        };
        assert_eq!(fds.len(), 1);
        drop(fds);
        assert_eq!(io::read_to_string(reader).expect("the pipe's end"), "");
        drop(front);
        assert!(matches!(keeper.wait::<ToKeeper>(), Read::Gone));
    }

    #[test]
    fn a_reader_that_was_stopped_does_not_block_the_sender() {
        let (front, keeper) = Link::pair().expect("a socket pair");
        for _ in 0..10_000 {
            front.send(&ToKeeper::Start { front: 1, blocked: 2 }, &[]);
        }
        assert!(matches!(Link(keeper).poll::<ToKeeper>(), Read::Message(..)));
    }

    #[test]
    fn the_last_word_arrives_although_something_was_left_unread() {
        let (front, keeper) = Link::pair().expect("a socket pair");
        let keeper = Link(keeper);
        front.send(&ToKeeper::Start { front: 1, blocked: 2 }, &[]);
        keeper.send(&ToFront::Done { code: 7, by: None }, &[]);
        drop(keeper);
        assert!(matches!(front.wait(), Read::Message(ToFront::Done { code: 7, by: None }, _)));
        assert!(matches!(front.wait::<ToFront>(), Read::Gone));
    }
}
