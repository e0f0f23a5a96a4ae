//! The start of the guardian, the first thing the keeper does: the guardian loads while the keeper takes the lock.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread::{self, JoinHandle};

use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind};

use super::channel::Channel;
use super::{GUARDIAN, system_error};
use crate::exit::Failure;

/// What the keeper sets up before it parses the command line.
pub(super) struct Launch {
    pub(super) runtime: Runtime,
    /// The channel to the guardian; orders wait in it until the guardian reads them.
    pub(super) guardian: Channel,
    pub(super) starting: Starting,
    /// Notifies that a child of the keeper ended.
    pub(super) child_exits: Signal,
}

impl Launch {
    /// Begins to start the guardian, on a thread: a thread that starts a program is suspended until the kernel has loaded it.
    pub(super) fn begin() -> Result<Self, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| system_error("start", &e))?;
        // First: if SIGCHLD was ignored, the guardian would inherit that, and it could not wait for CMD.
        let child_exits = {
            let _inside = runtime.enter();
            tokio::signal::unix::signal(SignalKind::child()).map_err(|e| system_error("wait for a child", &e))?
        };
        let (guardian, guardians_end) = Channel::pair().map_err(|e| system_error("open a socket", &e))?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0(GUARDIAN).args(std::env::args_os().skip(1)).stdin(Stdio::from(guardians_end));
        // In a group of its own, which no shell or terminal signals.
        command.process_group(0);
        let starting = thread::Builder::new().spawn(move || command.spawn().map(drop));
        let starting = Starting(starting.map_err(|e| system_error("start", &e))?);
        Ok(Self { runtime, guardian, starting, child_exits })
    }
}

/// The thread that starts the guardian.
pub(super) struct Starting(JoinHandle<io::Result<()>>);

impl Starting {
    /// Waits until the guardian is started.
    pub(super) fn wait(self) -> Result<(), Failure> {
        let started = self.0.join().unwrap_or_else(|_| Err(io::Error::other("the thread ended")));
        started.map_err(|e| system_error("start a third process", &e))
    }
}
