//! Which signals are passed on, and keeping them off this process meanwhile.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nix::errno::Errno;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use tokio::signal::unix::SignalKind;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
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
    /// The terminal sent it, and so the command has it already.
    pub(crate) by_terminal: bool,
}

/// Signals that are blocked here and were not before: the command must start without that.
#[derive(Clone, Copy)]
pub(crate) struct Blocked(SigSet);

impl Blocked {
    /// Blocks what is passed on. Children start with it blocked.
    pub(crate) fn now() -> Result<Self, Errno> {
        let passed = set(PASSED);
        let before = passed.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        Ok(Self(set(PASSED.into_iter().filter(|signal| !before.contains(*signal)))))
    }

    /// As bits, by signal number: what a parent tells its child.
    pub(crate) fn bits(self) -> u64 {
        PASSED.into_iter().filter(|signal| self.0.contains(*signal)).map(|signal| 1 << (signal as u32)).sum()
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(set(PASSED.into_iter().filter(|signal| bits & 1 << (*signal as u32) != 0)))
    }

    /// Runs something as if nothing had been blocked. A signal that is waiting acts at once, see [`Caught`].
    pub(crate) fn lifted<R>(self, run: impl FnOnce() -> R) -> R {
        let _ = self.0.thread_unblock();
        let result = run();
        let _ = self.0.thread_block();
        result
    }
}

/// Where blocked signals come in.
pub(crate) struct Inbox(SignalFd);

impl Inbox {
    pub(crate) fn open() -> Result<Self, Errno> {
        SignalFd::with_flags(&set(PASSED), SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).map(Self)
    }

    /// The next one, if there is one.
    pub(crate) fn next(&self) -> Option<Came> {
        while let Ok(Some(info)) = self.0.read_signal() {
            if let Ok(signal) = Signal::try_from(info.ssi_signo.cast_signed())
                && !is_ignored(signal)
            {
                return Some(Came { signal, by_terminal: info.ssi_code == SI_KERNEL });
            }
        }
        None
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Signals that were waiting for the keeper when it lifted the block for its command's start. The terminal
/// sends to the whole group: they are the command's, which was not there yet, and must not end the keeper.
pub(crate) struct Caught(UnboundedReceiver<Signal>);

impl Caught {
    /// Catches from now on, but leaves alone what is to be ignored: that is inherited.
    pub(crate) fn install() -> io::Result<Self> {
        let (tell, caught) = unbounded_channel();
        let ignored = ignored();
        for signal in PASSED.into_iter().filter(|signal| ignored & bit(*signal) == 0) {
            let mut stream = tokio::signal::unix::signal(SignalKind::from_raw(signal as i32))?;
            let tell = tell.clone();
            tokio::spawn(async move { while stream.recv().await.is_some() && tell.send(signal).is_ok() {} });
        }
        Ok(Self(caught))
    }

    /// Cancel safe.
    pub(crate) async fn next(&mut self) -> Signal {
        match self.0.recv().await {
            Some(signal) => signal,
            None => std::future::pending().await,
        }
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
