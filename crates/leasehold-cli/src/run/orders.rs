//! What keeper and guardian tell each other.

use std::os::fd::OwnedFd;
use std::time::Duration;

use leasehold::lease::Moment;
use nix::sys::signal::Signal;
use rustix::process::Pid;

use super::link::{Message, number, signal};

/// Processes that a report names: one that leaves some out still says that there are any.
const NAMED_MAX: usize = 16;

/// When a command whose lease is not renewed is asked to end and killed, and when the lease is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Times {
    pub(super) ask_at: Moment,
    pub(super) kill_at: Moment,
    pub(super) over_at: Moment,
}

/// What the keeper tells the guardian.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Start the command, the last `words` of the guardian's own arguments, in this process group and with these
    /// signals unblocked. With it come the command's stdin, its stdout and stderr where they are not ours, and the
    /// lifeline if there is one: [`Fds`] says which. The times are those of [`Order::Lease`], `None` with
    /// `--on-lost warn`; after `ask_at` nothing is started.
    Start { times: Option<Times>, group: i32, blocked: u64, words: usize, fds: Fds, env: Vec<(String, String)> },
    /// The lease was proven anew. Without another word the command ends at these times.
    Lease(Times),
    /// Pass a signal on to the command.
    Signal(Signal),
    /// Continue the command, if it has stopped as often as this and not once more: an order may cross a report.
    Continue(u32),
    /// The lease is lost: ask everything to end, and kill it at `kill_at`.
    End(Times),
    /// Kill everything now.
    Kill,
    /// The report that CMD ended, or that everything is dead, has arrived.
    Bye,
}

/// The descriptors that come with [`Order::Start`], in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fds {
    pub(super) output: bool,
    pub(super) lifeline: bool,
}

/// What the guardian tells the keeper.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Report {
    /// The command runs since `at`.
    Started { pid: Pid, at: Moment },
    /// The system refused to start the command: the error's number, 0 where there is none.
    NotStarted(i32),
    /// The lease was over, or nearly, before the command could be started. Nothing was started.
    TooLate,
    /// The command was stopped.
    Stopped,
    /// The command continues.
    Continued,
    /// The command ended by itself, with this wait status.
    Ended(i32),
    /// The lease was lost: the command and all it started are dead, apart from processes that may not be killed.
    Dead { not_permitted: Vec<i32> },
}

/// The descriptors of a start, told apart.
pub(super) struct Taken {
    pub(super) stdin: OwnedFd,
    pub(super) output: Option<(OwnedFd, OwnedFd)>,
    pub(super) lifeline: Option<OwnedFd>,
}

impl Fds {
    /// `None`: not what was announced.
    pub(super) fn sort(self, fds: Vec<OwnedFd>) -> Option<Taken> {
        let mut fds = fds.into_iter();
        let stdin = fds.next()?;
        let output = if self.output { Some((fds.next()?, fds.next()?)) } else { None };
        let lifeline = if self.lifeline { Some(fds.next()?) } else { None };
        Some(Taken { stdin, output, lifeline })
    }
}

impl Message for Order {
    /// Names and fences of many GPUs.
    const BYTES_MAX: usize = 64 * 1024;

    fn write(&self) -> Vec<u8> {
        match self {
            Self::Start { times, group, blocked, words, fds, env } => {
                let mut bytes = vec![b'0', fds.output.into(), fds.lifeline.into()];
                bytes.extend(times.map_or([0; 24], |times| write_times(&times)));
                bytes.extend(group.to_le_bytes());
                bytes.extend(blocked.to_le_bytes());
                bytes.extend((*words as u64).to_le_bytes());
                for (name, value) in env {
                    bytes.extend([name.as_bytes(), b"\0", value.as_bytes(), b"\0"].concat());
                }
                bytes
            }
            Self::Lease(times) => [&b"1"[..], &write_times(times)].concat(),
            Self::Signal(signal) => vec![b'2', number(*signal)],
            Self::Continue(stops) => [&b"3"[..], &stops.to_le_bytes()].concat(),
            Self::End(times) => [&b"4"[..], &write_times(times)].concat(),
            Self::Kill => vec![b'5'],
            Self::Bye => vec![b'6'],
        }
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [b'0', output, lifeline, rest @ ..] => {
                let (times, rest) = rest.split_at_checked(24)?;
                let (group, rest) = rest.split_at_checked(4)?;
                let (blocked, rest) = rest.split_at_checked(8)?;
                let (words, env) = rest.split_at_checked(8)?;
                let mut texts = std::str::from_utf8(env).ok()?.split_terminator('\0').map(str::to_owned);
                let mut env = Vec::new();
                while let Some(name) = texts.next() {
                    env.push((name, texts.next()?));
                }
                Some(Self::Start {
                    // No lease ends with the boot.
                    times: if times == [0; 24] { None } else { Some(read_times(times)?) },
                    group: i32::from_le_bytes(group.try_into().ok()?),
                    blocked: u64::from_le_bytes(blocked.try_into().ok()?),
                    words: usize::try_from(u64::from_le_bytes(words.try_into().ok()?)).ok()?,
                    fds: Fds { output: *output != 0, lifeline: *lifeline != 0 },
                    env,
                })
            }
            [b'1', times @ ..] => read_times(times).map(Self::Lease),
            [b'2', number] => signal(*number).map(Self::Signal),
            [b'3', stops @ ..] => stops.try_into().ok().map(u32::from_le_bytes).map(Self::Continue),
            [b'4', times @ ..] => read_times(times).map(Self::End),
            [b'5'] => Some(Self::Kill),
            [b'6'] => Some(Self::Bye),
            _ => None,
        }
    }
}

impl Message for Report {
    const BYTES_MAX: usize = 1 + NAMED_MAX * 4;

    fn write(&self) -> Vec<u8> {
        match self {
            Self::Started { pid, at } => {
                [&b"0"[..], &pid.as_raw_nonzero().get().to_le_bytes(), &write_moment(*at)].concat()
            }
            Self::NotStarted(errno) => [&b"1"[..], &errno.to_le_bytes()].concat(),
            Self::Stopped => vec![b'2'],
            Self::Continued => vec![b'3'],
            Self::Ended(status) => [&b"4"[..], &status.to_le_bytes()].concat(),
            Self::Dead { not_permitted } => {
                let pids = not_permitted.iter().take(NAMED_MAX).flat_map(|pid| pid.to_le_bytes());
                std::iter::once(b'5').chain(pids).collect()
            }
            Self::TooLate => vec![b'6'],
        }
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let int = |bytes: &[u8]| bytes.try_into().ok().map(i32::from_le_bytes);
        match bytes {
            [b'0', rest @ ..] => {
                let (pid, at) = rest.split_at_checked(4)?;
                Some(Self::Started { pid: Pid::from_raw(int(pid)?)?, at: read_moment(at)? })
            }
            [b'1', errno @ ..] => int(errno).map(Self::NotStarted),
            [b'2'] => Some(Self::Stopped),
            [b'3'] => Some(Self::Continued),
            [b'4', status @ ..] => int(status).map(Self::Ended),
            [b'5', pids @ ..] => {
                let not_permitted = pids.chunks(4).map(int).collect::<Option<_>>()?;
                Some(Self::Dead { not_permitted })
            }
            [b'6'] => Some(Self::TooLate),
            _ => None,
        }
    }
}

fn write_times(times: &Times) -> [u8; 24] {
    let mut bytes = [0; 24];
    for (to, moment) in bytes.chunks_exact_mut(8).zip([times.ask_at, times.kill_at, times.over_at]) {
        to.copy_from_slice(&write_moment(moment));
    }
    bytes
}

fn read_times(bytes: &[u8]) -> Option<Times> {
    let (ask, rest) = bytes.split_at_checked(8)?;
    let (kill, over) = rest.split_at_checked(8)?;
    Some(Times { ask_at: read_moment(ask)?, kill_at: read_moment(kill)?, over_at: read_moment(over)? })
}

/// Nanoseconds since boot: both ends read the same clock.
fn write_moment(moment: Moment) -> [u8; 8] {
    u64::try_from(moment.since_boot().as_nanos()).unwrap_or(u64::MAX).to_le_bytes()
}

fn read_moment(bytes: &[u8]) -> Option<Moment> {
    Some(Moment::from_boot(Duration::from_nanos(u64::from_le_bytes(bytes.try_into().ok()?))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn travels<M: Message + PartialEq + std::fmt::Debug>(message: &M) {
        let bytes = message.write();
        assert!(bytes.len() <= M::BYTES_MAX);
        assert_eq!(M::read(&bytes).as_ref(), Some(message));
    }

    #[test]
    fn every_message_arrives_as_it_was_sent() {
        let at = |ms| Moment::from_boot(Duration::from_millis(ms));
        let times = Times { ask_at: at(1), kill_at: at(2), over_at: at(3) };
        let env = vec![("LEASEHOLD_NAME".to_owned(), "a,ü".to_owned()), ("EMPTY".to_owned(), String::new())];
        let fds = Fds { output: true, lifeline: false };
        travels(&Order::Start { times: Some(times), group: 4_711, blocked: u64::MAX, words: 70_000, fds, env });
        let fds = Fds { output: false, lifeline: true };
        travels(&Order::Start { times: None, group: 1, blocked: 0, words: 1, fds, env: Vec::new() });
        for order in [Order::Lease(times), Order::End(times), Order::Signal(Signal::SIGUSR2)] {
            travels(&order);
        }
        for order in [Order::Continue(70_000), Order::Kill, Order::Bye] {
            travels(&order);
        }
        let pid = Pid::from_raw(77).expect("a pid");
        let dead = Report::Dead { not_permitted: vec![1, 70_000] };
        for report in [Report::Started { pid, at: at(9) }, Report::NotStarted(2), Report::Ended(256), dead] {
            travels(&report);
        }
        for report in [Report::Stopped, Report::Continued, Report::TooLate, Report::Dead { not_permitted: Vec::new() }]
        {
            travels(&report);
        }
        assert_eq!(Order::read(b""), None);
        assert_eq!(Report::read(b"0"), None);
    }
}
