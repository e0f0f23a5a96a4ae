//! Which signals are passed on, and keeping them off this process meanwhile.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use nix::errno::Errno;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use tokio::sync::oneshot;

/// Whatever somebody may send to a job on purpose. Not among them: those that cannot be caught, those
/// that say that this very program is broken, and SIGCHLD and SIGPIPE, which are each process's own.
const PASSED: [Signal; 13] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGALRM,
    Signal::SIGPWR,
    Signal::SIGWINCH,
    Signal::SIGTSTP,
    Signal::SIGTTIN,
    Signal::SIGTTOU,
    Signal::SIGCONT,
];

/// What the kernel writes as the sender of what a terminal sends: to the whole foreground group.
const SI_KERNEL: i32 = 0x80;

/// A signal that came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Came {
    pub(crate) signal: Signal,
    /// `si_code`: how it was sent.
    pub(crate) code: i32,
    /// `si_pid`: which process sent it; 0 for the kernel.
    pub(crate) sender: u32,
}

impl Came {
    /// Whether a terminal sent it, always to a whole process group.
    pub(crate) fn by_terminal(&self) -> bool {
        self.code == SI_KERNEL
    }

    /// SIGCONT, as told by a front that has been continued.
    pub(crate) fn continued() -> Self {
        Self { signal: Signal::SIGCONT, code: 0, sender: 0 }
    }
}

/// Signals that are blocked here and were not before: the command must start without that.
#[derive(Clone, Copy)]
pub(crate) struct Blocked(SigSet);

impl Blocked {
    /// Blocks what is passed on. Children start with it blocked.
    pub(crate) fn now() -> Result<Self, Errno> {
        Self::block(&PASSED)
    }

    /// Blocks SIGCHLD, for [`Inbox::of_children`].
    pub(crate) fn children() -> Result<Self, Errno> {
        Self::block(&[Signal::SIGCHLD])
    }

    /// The signals of both sets.
    pub(crate) fn and(self, other: Self) -> Self {
        Self(self.0.iter().chain(other.0.iter()).collect())
    }

    fn block(signals: &[Signal]) -> Result<Self, Errno> {
        let before = set(signals.iter().copied()).thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        Ok(Self(set(signals.iter().copied().filter(|signal| !before.contains(*signal)))))
    }

    /// As bits, by signal number: what a parent tells its child.
    pub(crate) fn bits(self) -> u64 {
        PASSED.into_iter().filter(|signal| self.0.contains(*signal)).map(|signal| 1 << (signal as u32)).sum()
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(set(PASSED.into_iter().filter(|signal| bits & 1 << (*signal as u32) != 0)))
    }

    /// The mask of this thread as if nothing had been blocked.
    pub(crate) fn lifted(self) -> Result<SigSet, Errno> {
        let mut mask = SigSet::thread_get_mask()?;
        self.0.iter().for_each(|signal| mask.remove(signal));
        Ok(mask)
    }
}

/// Where blocked signals come in.
pub(crate) struct Inbox(SignalFd);

impl Inbox {
    pub(crate) fn open() -> Result<Self, Errno> {
        SignalFd::with_flags(&set(PASSED), SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).map(Self)
    }

    /// Where SIGCHLD comes in, once it is blocked.
    pub(crate) fn of_children() -> Result<Self, Errno> {
        SignalFd::with_flags(&set([Signal::SIGCHLD]), SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).map(Self)
    }

    /// Takes everything out unread.
    pub(crate) fn drain(&self) {
        while let Ok(Some(_)) = self.0.read_signal() {}
    }

    /// The next one, if there is one.
    pub(crate) fn next(&self) -> Option<Came> {
        while let Ok(Some(info)) = self.0.read_signal() {
            if let Ok(signal) = Signal::try_from(info.ssi_signo.cast_signed())
                && !is_ignored(signal)
            {
                return Some(Came { signal, code: info.ssi_code, sender: info.ssi_pid });
            }
        }
        None
    }
}

impl AsRawFd for Inbox {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Tells of the first signal that ends this process, which is then to be suffered; a second one does not wait for that.
/// To be called before there is any other thread.
pub(crate) fn first_to_end() -> io::Result<oneshot::Receiver<Signal>> {
    let all = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];
    let awaited = set(all.into_iter().filter(|signal| !is_ignored(*signal)));
    awaited.thread_block()?;
    let (tell, told) = oneshot::channel();
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        if let Ok(signal) = awaited.wait() {
            let _ = tell.send(signal);
        }
        let _ = awaited.thread_unblock();
        loop {
            std::thread::park();
        }
    })?;
    Ok(told)
}

/// Does to this process what the signal does by default: stops it, or ends it.
pub(crate) fn suffer(signal: Signal) {
    let _ = raise(signal);
    if signal != Signal::SIGSTOP {
        let only = set([signal]);
        let _ = only.thread_unblock();
        let _ = only.thread_block();
    }
}

/// Whether a signal stops a process that does not care for it.
pub(crate) fn stops(signal: Signal) -> bool {
    matches!(signal, Signal::SIGTSTP | Signal::SIGTTIN | Signal::SIGTTOU | Signal::SIGSTOP)
}

/// Whether a signal ends a process that does not care for it.
pub(crate) fn ends(signal: Signal) -> bool {
    !stops(signal) && !matches!(signal, Signal::SIGCONT | Signal::SIGWINCH)
}

/// A blocked signal comes in even where whoever started us wants it ignored (`nohup`). The command
/// ignores it as well then.
fn is_ignored(signal: Signal) -> bool {
    ignored() & bit(signal) != 0
}

fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0)
}

/// A signal in a mask as /proc shows it.
fn bit(signal: Signal) -> u64 {
    1 << (signal as u32 - 1)
}

fn set(signals: impl IntoIterator<Item = Signal>) -> SigSet {
    signals.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_blocked_survives_being_told() {
        let some = Blocked(set([Signal::SIGHUP, Signal::SIGCONT, Signal::SIGPWR]));
        let told = Blocked::from_bits(some.bits());
        for signal in PASSED {
            assert_eq!(told.0.contains(signal), some.0.contains(signal), "{signal}");
        }
    }

    #[test]
    fn each_signal_stops_or_ends_or_does_nothing() {
        let harmless = PASSED.into_iter().filter(|s| !stops(*s) && !ends(*s));
        assert_eq!(harmless.collect::<Vec<_>>(), [Signal::SIGWINCH, Signal::SIGCONT]);
        assert!(!PASSED.into_iter().any(|s| stops(s) && ends(s)));
    }
}
