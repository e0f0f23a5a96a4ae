//! The signals that `run` forwards, and how they are blocked and read.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use nix::errno::Errno;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use tokio::sync::oneshot;

/// The signals that `run` forwards to CMD: all that are sent to a job on purpose. Not in the list are signals that cannot be
/// caught, signals that report a fault of the receiving program, and SIGCHLD and SIGPIPE, which concern one process.
const FORWARDED: [Signal; 13] = [
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

/// The `si_code` of signals that a terminal sends, always to the whole foreground process group.
const SI_KERNEL: i32 = 0x80;

/// A signal that this process received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReceivedSignal {
    pub(crate) signal: Signal,
    /// `si_code`, which says how the signal was sent.
    pub(crate) code: i32,
    /// `si_pid`, the sending process; 0 for the kernel.
    pub(crate) sender: u32,
}

impl ReceivedSignal {
    /// Returns whether a terminal sent the signal.
    pub(crate) fn sent_by_terminal(&self) -> bool {
        self.code == SI_KERNEL
    }

    /// Returns the SIGCONT that the front reports after it was continued.
    pub(crate) fn continued() -> Self {
        Self { signal: Signal::SIGCONT, code: 0, sender: 0 }
    }
}

/// The signals that this process itself has blocked, and that CMD must not inherit as blocked.
#[derive(Clone, Copy)]
pub(crate) struct BlockedSignals(SigSet);

impl BlockedSignals {
    /// Blocks the signals that are forwarded. Child processes inherit the mask.
    pub(crate) fn forwarded() -> Result<Self, Errno> {
        Self::block(&FORWARDED)
    }

    /// Blocks SIGCHLD, for [`SignalReader::child_exit`].
    pub(crate) fn child_exit() -> Result<Self, Errno> {
        Self::block(&[Signal::SIGCHLD])
    }

    /// Returns the signals of both sets.
    pub(crate) fn union(self, other: Self) -> Self {
        Self(self.0.iter().chain(other.0.iter()).collect())
    }

    fn block(signals: &[Signal]) -> Result<Self, Errno> {
        let before = set(signals.iter().copied()).thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        Ok(Self(set(signals.iter().copied().filter(|signal| !before.contains(*signal)))))
    }

    /// Encodes the set, one bit per signal number.
    pub(crate) fn bits(self) -> u64 {
        FORWARDED.into_iter().filter(|signal| self.0.contains(*signal)).map(|signal| 1 << (signal as u32)).sum()
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(set(FORWARDED.into_iter().filter(|signal| bits & 1 << (*signal as u32) != 0)))
    }

    /// Returns the signal mask of this thread without the blocked signals.
    pub(crate) fn unblocked_mask(self) -> Result<SigSet, Errno> {
        let mut mask = SigSet::thread_get_mask()?;
        self.0.iter().for_each(|signal| mask.remove(signal));
        Ok(mask)
    }
}

/// Reads blocked signals.
pub(crate) struct SignalReader(SignalFd);

impl SignalReader {
    /// Reads the signals that are forwarded.
    pub(crate) fn forwarded() -> Result<Self, Errno> {
        SignalFd::with_flags(&set(FORWARDED), SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).map(Self)
    }

    /// Reads SIGCHLD, which has to be blocked.
    pub(crate) fn child_exit() -> Result<Self, Errno> {
        SignalFd::with_flags(&set([Signal::SIGCHLD]), SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).map(Self)
    }

    /// Discards all pending signals.
    pub(crate) fn drain(&self) {
        while let Ok(Some(_)) = self.0.read_signal() {}
    }

    /// Returns the next pending signal that is not ignored.
    pub(crate) fn next(&self) -> Option<ReceivedSignal> {
        while let Ok(Some(info)) = self.0.read_signal() {
            if let Ok(signal) = Signal::try_from(info.ssi_signo.cast_signed())
                && !is_ignored(signal)
            {
                return Some(ReceivedSignal { signal, code: info.ssi_code, sender: info.ssi_pid });
            }
        }
        None
    }
}

impl AsRawFd for SignalReader {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl AsFd for SignalReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Returns a channel that receives the first termination signal. The caller cleans up and then ends by that signal; a
/// second signal ends the process at once. Must be called before any other thread exists.
pub(crate) fn first_termination_signal() -> io::Result<oneshot::Receiver<Signal>> {
    let all = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];
    let awaited = set(all.into_iter().filter(|signal| !is_ignored(*signal)));
    awaited.thread_block()?;
    let (send_first, first) = oneshot::channel();
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        if let Ok(signal) = awaited.wait() {
            let _ = send_first.send(signal);
        }
        let _ = awaited.thread_unblock();
        loop {
            std::thread::park();
        }
    })?;
    Ok(first)
}

/// Applies a signal's default action to this process: stops or ends it.
pub(crate) fn apply_default_action(signal: Signal) {
    let _ = raise(signal);
    if signal != Signal::SIGSTOP {
        let only = set([signal]);
        let _ = only.thread_unblock();
        let _ = only.thread_block();
    }
}

/// Returns whether a signal stops a process by default.
pub(crate) fn is_stop(signal: Signal) -> bool {
    matches!(signal, Signal::SIGTSTP | Signal::SIGTTIN | Signal::SIGTTOU | Signal::SIGSTOP)
}

/// Returns whether a forwarded signal ends a process by default.
pub(crate) fn is_termination(signal: Signal) -> bool {
    !is_stop(signal) && !matches!(signal, Signal::SIGCONT | Signal::SIGWINCH)
}

/// Returns whether a signal was ignored when this process started (`nohup`). CMD inherits that. A blocked signal still
/// arrives here.
fn is_ignored(signal: Signal) -> bool {
    ignored_mask() & mask_bit(signal) != 0
}

fn ignored_mask() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0)
}

/// Returns a signal's bit in the masks of `/proc/self/status`.
fn mask_bit(signal: Signal) -> u64 {
    1 << (signal as u32 - 1)
}

fn set(signals: impl IntoIterator<Item = Signal>) -> SigSet {
    signals.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocked_signals_survive_the_message() {
        let some = BlockedSignals(set([Signal::SIGHUP, Signal::SIGCONT, Signal::SIGPWR]));
        let read = BlockedSignals::from_bits(some.bits());
        for signal in FORWARDED {
            assert_eq!(read.0.contains(signal), some.0.contains(signal), "{signal}");
        }
    }

    #[test]
    fn each_signal_stops_or_terminates_or_does_nothing() {
        let harmless = FORWARDED.into_iter().filter(|s| !is_stop(*s) && !is_termination(*s));
        assert_eq!(harmless.collect::<Vec<_>>(), [Signal::SIGWINCH, Signal::SIGCONT]);
        assert!(!FORWARDED.into_iter().any(|s| is_stop(s) && is_termination(s)));
    }
}
