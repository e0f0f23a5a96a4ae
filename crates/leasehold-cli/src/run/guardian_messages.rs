//! The messages between the keeper and the guardian.

use std::os::fd::OwnedFd;
use std::time::Duration;

use leasehold::lease::Moment;
use nix::sys::signal::Signal;
use rustix::process::Pid;

use super::channel::{Message, signal, signal_number};

/// The most processes that a report names; a report that leaves some out is still not empty.
const NAMED_MAX: usize = 16;

/// When CMD is terminated and killed if its lease is not renewed, and when that lease ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KillSchedule {
    pub(super) terminate_at: Moment,
    pub(super) kill_at: Moment,
    pub(super) lease_ends_at: Moment,
}

/// A message from the keeper to the guardian.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Start CMD, the last `words` of the guardian's own arguments, in this process group and with these signals
    /// unblocked. The descriptors that [`FdLayout`] lists come with it. The schedule is that of [`Order::Lease`], and
    /// `None` with `--on-lost warn`; after `terminate_at` nothing is started.
    Start {
        schedule: Option<KillSchedule>,
        group: i32,
        blocked: u64,
        words: usize,
        fds: FdLayout,
        env: Vec<(String, String)>,
    },
    /// The lease was renewed. Without another order CMD ends by this schedule.
    Lease(KillSchedule),
    /// Send CMD a signal.
    Signal(Signal),
    /// Continue CMD if it has stopped exactly this many times: the order may cross a report of another stop.
    Continue(u32),
    /// The lease is lost: terminate everything now, and kill it at `kill_at`.
    Terminate(KillSchedule),
    /// Kill everything now.
    Kill,
    /// The keeper has read that CMD ended, or that everything is dead.
    Acknowledge,
}

/// Which descriptors come with [`Order::Start`]: CMD's stdin, then its stdout and stderr if they are not the guardian's
/// own, then the lifeline if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FdLayout {
    pub(super) output: bool,
    pub(super) lifeline: bool,
}

/// A message from the guardian to the keeper.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Report {
    /// CMD was started at `at`.
    Started { pid: Pid, at: Moment },
    /// The system refused to start CMD: the error's number, or 0 if it has none.
    NotStarted(i32),
    /// Nothing was started, because the lease was over, or nearly over.
    TooLate,
    /// CMD was stopped.
    Stopped,
    /// CMD was continued.
    Continued,
    /// CMD ended by itself, with this wait status.
    Ended(i32),
    /// The lease was lost: CMD and everything it started is dead, except for processes that the guardian may not kill.
    Dead { not_permitted: Vec<i32> },
}

/// The descriptors of [`Order::Start`].
pub(super) struct StartFds {
    pub(super) stdin: OwnedFd,
    pub(super) output: Option<(OwnedFd, OwnedFd)>,
    pub(super) lifeline: Option<OwnedFd>,
}

impl FdLayout {
    /// Assigns the received descriptors, or returns `None` if one is missing.
    pub(super) fn assign(self, fds: Vec<OwnedFd>) -> Option<StartFds> {
        let mut fds = fds.into_iter();
        let stdin = fds.next()?;
        let output = if self.output { Some((fds.next()?, fds.next()?)) } else { None };
        let lifeline = if self.lifeline { Some(fds.next()?) } else { None };
        Some(StartFds { stdin, output, lifeline })
    }
}

impl Message for Order {
    fn write(&self) -> Vec<u8> {
        match self {
            Self::Start { schedule, group, blocked, words, fds, env } => {
                let mut bytes = vec![b'0', fds.output.into(), fds.lifeline.into()];
                bytes.extend(schedule.as_ref().map_or([0; 24], write_schedule));
                bytes.extend(group.to_le_bytes());
                bytes.extend(blocked.to_le_bytes());
                bytes.extend((*words as u64).to_le_bytes());
                for (name, value) in env {
                    bytes.extend([name.as_bytes(), b"\0", value.as_bytes(), b"\0"].concat());
                }
                bytes
            }
            Self::Lease(schedule) => [&b"1"[..], &write_schedule(schedule)].concat(),
            Self::Signal(signal) => vec![b'2', signal_number(*signal)],
            Self::Continue(stops) => [&b"3"[..], &stops.to_le_bytes()].concat(),
            Self::Terminate(schedule) => [&b"4"[..], &write_schedule(schedule)].concat(),
            Self::Kill => vec![b'5'],
            Self::Acknowledge => vec![b'6'],
        }
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        match bytes {
            [b'0', output, lifeline, rest @ ..] => {
                let (schedule, rest) = rest.split_at_checked(24)?;
                let (group, rest) = rest.split_at_checked(4)?;
                let (blocked, rest) = rest.split_at_checked(8)?;
                let (words, env) = rest.split_at_checked(8)?;
                let mut texts = std::str::from_utf8(env).ok()?.split_terminator('\0').map(str::to_owned);
                let mut env = Vec::new();
                while let Some(name) = texts.next() {
                    env.push((name, texts.next()?));
                }
                Some(Self::Start {
                    // Zero stands for no schedule: no lease ends at the moment of the boot.
                    schedule: if schedule == [0; 24] { None } else { Some(read_schedule(schedule)?) },
                    group: i32::from_le_bytes(group.try_into().ok()?),
                    blocked: u64::from_le_bytes(blocked.try_into().ok()?),
                    words: usize::try_from(u64::from_le_bytes(words.try_into().ok()?)).ok()?,
                    fds: FdLayout { output: *output != 0, lifeline: *lifeline != 0 },
                    env,
                })
            }
            [b'1', schedule @ ..] => read_schedule(schedule).map(Self::Lease),
            [b'2', number] => signal(*number).map(Self::Signal),
            [b'3', stops @ ..] => stops.try_into().ok().map(u32::from_le_bytes).map(Self::Continue),
            [b'4', schedule @ ..] => read_schedule(schedule).map(Self::Terminate),
            [b'5'] => Some(Self::Kill),
            [b'6'] => Some(Self::Acknowledge),
            _ => None,
        }
    }
}

impl Message for Report {
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

fn write_schedule(schedule: &KillSchedule) -> [u8; 24] {
    let mut bytes = [0; 24];
    for (to, moment) in bytes.chunks_exact_mut(8).zip([schedule.terminate_at, schedule.kill_at, schedule.lease_ends_at])
    {
        to.copy_from_slice(&write_moment(moment));
    }
    bytes
}

fn read_schedule(bytes: &[u8]) -> Option<KillSchedule> {
    let (ask, rest) = bytes.split_at_checked(8)?;
    let (kill, over) = rest.split_at_checked(8)?;
    Some(KillSchedule {
        terminate_at: read_moment(ask)?,
        kill_at: read_moment(kill)?,
        lease_ends_at: read_moment(over)?,
    })
}

/// Writes a moment as nanoseconds since boot: both ends read the same clock.
fn write_moment(moment: Moment) -> [u8; 8] {
    u64::try_from(moment.since_boot().as_nanos()).unwrap_or(u64::MAX).to_le_bytes()
}

fn read_moment(bytes: &[u8]) -> Option<Moment> {
    Some(Moment::from_boot(Duration::from_nanos(u64::from_le_bytes(bytes.try_into().ok()?))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip<M: Message + PartialEq + std::fmt::Debug>(message: &M) {
        let bytes = message.write();
        assert_eq!(M::read(&bytes).as_ref(), Some(message));
    }

    #[test]
    fn every_message_arrives_as_it_was_sent() {
        let at = |ms| Moment::from_boot(Duration::from_millis(ms));
        let schedule = KillSchedule { terminate_at: at(1), kill_at: at(2), lease_ends_at: at(3) };
        let env = vec![("LEASEHOLD_NAME".to_owned(), "a,ü".to_owned()), ("EMPTY".to_owned(), String::new())];
        let fds = FdLayout { output: true, lifeline: false };
        round_trip(&Order::Start {
            schedule: Some(schedule),
            group: 4_711,
            blocked: u64::MAX,
            words: 70_000,
            fds,
            env,
        });
        let fds = FdLayout { output: false, lifeline: true };
        round_trip(&Order::Start { schedule: None, group: 1, blocked: 0, words: 1, fds, env: Vec::new() });
        for order in [Order::Lease(schedule), Order::Terminate(schedule), Order::Signal(Signal::SIGUSR2)] {
            round_trip(&order);
        }
        for order in [Order::Continue(70_000), Order::Kill, Order::Acknowledge] {
            round_trip(&order);
        }
        let pid = Pid::from_raw(77).expect("a pid");
        let dead = Report::Dead { not_permitted: vec![1, 70_000] };
        for report in [Report::Started { pid, at: at(9) }, Report::NotStarted(2), Report::Ended(256), dead] {
            round_trip(&report);
        }
        for report in [Report::Stopped, Report::Continued, Report::TooLate, Report::Dead { not_permitted: Vec::new() }]
        {
            round_trip(&report);
        }
        assert_eq!(Order::read(b""), None);
        assert_eq!(Report::read(b"0"), None);
    }
}
