//! The guardian's start, the first thing the keeper does: it loads while the keeper takes the lock.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind};

use super::link::Link;
use super::{GUARDIAN, refused};
use crate::exit::Failure;

/// What the keeper has before it knows what is wanted.
pub(super) struct Launch {
    pub(super) runtime: Runtime,
    /// Orders sent before the guardian runs wait for it here.
    pub(super) guardian: Link,
    /// Reports that a child of the keeper ended.
    pub(super) children: Signal,
}

impl Launch {
    /// Starts the guardian.
    pub(super) fn begin() -> Result<Self, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| refused("start", &e))?;
        // First: a SIGCHLD that is ignored would be so in the guardian, too, and it could not wait for CMD.
        let children = {
            let _inside = runtime.enter();
            tokio::signal::unix::signal(SignalKind::child()).map_err(|e| refused("wait for a child", &e))?
        };
        let (guardian, guardians_end) = Link::pair().map_err(|e| refused("open a socket", &e))?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0(GUARDIAN).args(std::env::args_os().skip(1)).stdin(Stdio::from(guardians_end));
        // In no group that people signal.
        command.process_group(0).spawn().map_err(|e| refused("start a third process", &e))?;
        Ok(Self { runtime, guardian, children })
    }
}
