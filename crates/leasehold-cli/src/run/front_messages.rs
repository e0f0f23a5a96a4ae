//! The messages between the front and the keeper.

use nix::sys::signal::Signal;

use super::channel::{Message, signal, signal_number};
use crate::signals::ReceivedSignal;

/// A message from the front to the keeper.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ToKeeper {
    /// The first message: the front's process id and the signals it blocked. CMD's stdin comes with it.
    Start { front: u32, blocked: u64 },
    /// The front received a signal.
    Signal(ReceivedSignal),
}

/// A message from the keeper to the front.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ToFront {
    /// Carries the lifeline, a descriptor to keep open: the lease counts as a living process's until it is closed.
    Lifeline,
    /// Stop by this signal: CMD has stopped, or the keeper was told to stop while it waits for the lock.
    Stop(Signal),
    /// The run is over. The front ends with `code`, or by the signal `by` if it received that signal, too.
    Done { code: u8, by: Option<Signal> },
}

impl Message for ToKeeper {
    fn write(&self) -> Vec<u8> {
        match self {
            Self::Start { front, blocked } => [&b"0"[..], &front.to_le_bytes(), &blocked.to_le_bytes()].concat(),
            Self::Signal(ReceivedSignal { signal, code, sender }) => {
                [&[b'1', signal_number(*signal)][..], &code.to_le_bytes(), &sender.to_le_bytes()].concat()
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
                Some(Self::Signal(ReceivedSignal {
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
    fn write(&self) -> Vec<u8> {
        match self {
            Self::Lifeline => vec![b'0'],
            Self::Stop(signal) => vec![b'1', signal_number(*signal)],
            Self::Done { code, by } => vec![b'2', *code, by.map_or(0, signal_number)],
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

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip<M: Message + PartialEq + std::fmt::Debug>(message: &M) {
        assert_eq!(M::read(&message.write()).as_ref(), Some(message));
    }

    #[test]
    fn every_message_arrives_as_it_was_sent() {
        round_trip(&ToKeeper::Start { front: 4_711, blocked: u64::MAX });
        round_trip(&ToKeeper::Signal(ReceivedSignal { signal: Signal::SIGUSR2, code: -6, sender: 70_000 }));
        round_trip(&ToFront::Lifeline);
        round_trip(&ToFront::Stop(Signal::SIGTSTP));
        round_trip(&ToFront::Done { code: 255, by: None });
        round_trip(&ToFront::Done { code: 130, by: Some(Signal::SIGINT) });
        assert_eq!(ToKeeper::read(b""), None);
        assert_eq!(ToFront::read(b"2"), None);
    }
}
