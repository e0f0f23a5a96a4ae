//! The socket between the two processes of a run: short messages, some with a descriptor.
//!
//! Its end is news as well: each side learns at once that the other one died.

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

/// One end.
pub(super) struct Link(OwnedFd);

/// What was read.
pub(super) enum Read<M> {
    Message(M, Option<OwnedFd>),
    /// Nothing there at the moment.
    Nothing,
    /// The other side is gone.
    Gone,
}

/// A message as it travels.
pub(super) trait Message: Sized {
    fn write(&self) -> Vec<u8>;
    fn read(bytes: &[u8]) -> Option<Self>;
}

impl Link {
    /// Two ends; the second one is for the keeper.
    pub(super) fn pair() -> Result<(Self, OwnedFd), Errno> {
        let (ours, keepers) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self(ours), keepers))
    }

    /// The keeper's end, which it was started with as its stdin.
    pub(super) fn from_stdin() -> io::Result<Self> {
        io::stdin().as_fd().try_clone_to_owned().map(Self)
    }

    /// Sends a message. When the other side is gone there is nobody to tell.
    pub(super) fn send<M: Message>(&self, message: &M, with: Option<BorrowedFd<'_>>) {
        let bytes = message.write();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut extra = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<BorrowedFd<'_>> = with.into_iter().collect();
        if !fds.is_empty() {
            extra.push(SendAncillaryMessage::ScmRights(&fds));
        }
        // Neither side ever leaves so much unread that this would block for long.
        while let Err(Errno::INTR) = sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut extra, SendFlags::NOSIGNAL) {}
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
        let mut bytes = [0; 32];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
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
        let fd = extra.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        // No message of ours is empty or unknown: nothing means the end.
        M::read(&bytes[..received]).map_or(Read::Gone, |message| Read::Message(message, fd))
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The keeper's end inside its runtime.
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

    /// Sends a message.
    pub(super) fn send(&self, message: &ToFront, with: Option<BorrowedFd<'_>>) {
        self.link.send(message, with);
    }

    /// The next signal that somebody sent to the front; `None` when the front was killed.
    ///
    /// Cancel safe: what is not returned was not read.
    pub(super) async fn hear(&self) -> Option<Came> {
        loop {
            self.ready.readable().await.ok()?;
            let read = self.ready.try_io(Interest::READABLE, || match self.link.poll() {
                Read::Nothing => Err(io::ErrorKind::WouldBlock.into()),
                read => Ok(read),
            });
            match read {
                Ok(Read::Message(ToKeeper::Signal(came), _)) => return Some(came),
                Ok(Read::Gone) => return None,
                Ok(Read::Message(ToKeeper::Start { .. }, _) | Read::Nothing) | Err(_) => {}
            }
        }
    }
}

impl Message for ToKeeper {
    fn write(&self) -> Vec<u8> {
        match self {
            Self::Start { front, blocked } => [&b"0"[..], &front.to_le_bytes(), &blocked.to_le_bytes()].concat(),
            Self::Signal(came) => vec![b'1', number(came.signal), came.by_terminal.into()],
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
            [b'1', number, by_terminal] => {
                Some(Self::Signal(Came { signal: signal(*number)?, by_terminal: *by_terminal != 0 }))
            }
            _ => None,
        }
    }
}

impl Message for ToFront {
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

fn number(signal: Signal) -> u8 {
    u8::try_from(signal as i32).unwrap_or(0)
}

fn signal(number: u8) -> Option<Signal> {
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
        travels(&ToKeeper::Signal(Came { signal: Signal::SIGUSR2, by_terminal: true }));
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
        front.send(&ToKeeper::Start { front: 1, blocked: 2 }, Some(writer.as_fd()));
        drop(writer);
        let Read::Message(ToKeeper::Start { front: 1, blocked: 2 }, Some(fd)) = keeper.wait() else {
            panic!("not what was sent");
        };
        drop(fd);
        assert_eq!(io::read_to_string(reader).expect("the pipe's end"), "");
        drop(front);
        assert!(matches!(keeper.wait::<ToKeeper>(), Read::Gone));
    }

    #[test]
    fn the_last_word_arrives_although_something_was_left_unread() {
        let (front, keeper) = Link::pair().expect("a socket pair");
        let keeper = Link(keeper);
        front.send(&ToKeeper::Start { front: 1, blocked: 2 }, None);
        keeper.send(&ToFront::Done { code: 7, by: None }, None);
        drop(keeper);
        assert!(matches!(front.wait(), Read::Message(ToFront::Done { code: 7, by: None }, None)));
        assert!(matches!(front.wait::<ToFront>(), Read::Gone));
    }
}
