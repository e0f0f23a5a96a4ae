//! Starting CMD.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use leasehold::gpu;
use rustix::io::Errno;
use rustix::process::Pid;

use super::lease::Lease;
use crate::exit::{Exit, Failure};
use crate::signals::Blocked;

/// What CMD starts with.
pub(super) struct Start<'a> {
    pub(super) words: &'a [OsString],
    pub(super) lease: &'a Lease,
    pub(super) stdin: OwnedFd,
    /// Its stdout and stderr, where they are not ours.
    pub(super) output: Option<(OwnedFd, OwnedFd)>,
    /// Inherited, so that the lease counts as a living process's while CMD lives.
    pub(super) lifeline: Option<OwnedFd>,
    pub(super) blocked: Blocked,
}

/// Starts it, as env(1) would: 127 when there is no such program, 126 when it cannot be started.
pub(super) fn start(start: &Start<'_>) -> Result<Pid, Failure> {
    let (program, arguments) = start.words.split_first().expect("the command line has a command");
    let mut outcome = spawn(start, program, arguments);
    if outcome.as_ref().is_err_and(|e| e.raw_os_error() == Some(Errno::NOEXEC.raw_os_error()))
        && let Some(script) = find(program)
    {
        // A script without `#!`: the shell's, by long custom.
        let arguments: Vec<OsString> = [script.into()].into_iter().chain(arguments.iter().cloned()).collect();
        outcome = spawn(start, OsStr::new("/bin/sh"), &arguments);
    }
    outcome.map_err(|error| {
        let program = program.to_string_lossy();
        match error.kind() {
            ErrorKind::NotFound => Failure::new(Exit::NotFound, format!("{program}: no such program")),
            _ => Failure::new(Exit::CannotStart, format!("{program} cannot be started: {error}")),
        }
    })
}

fn spawn(start: &Start<'_>, program: &OsStr, arguments: &[OsString]) -> io::Result<Pid> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::from(start.stdin.try_clone()?));
    if let Some((stdout, stderr)) = &start.output {
        command.stdout(Stdio::from(stdout.try_clone()?)).stderr(Stdio::from(stderr.try_clone()?));
    }
    command.env("LEASEHOLD_NAME", start.lease.names()).env("LEASEHOLD_FENCE", start.lease.fences());
    if !start.lease.devices().is_empty() {
        command.env(gpu::VISIBLE, gpu::visible(start.lease.devices())).env(gpu::ORDER.0, gpu::ORDER.1);
    }
    // A copy that is not closed when CMD starts; nothing else is started meanwhile.
    let _inherited = start.lifeline.as_ref().map(rustix::io::dup).transpose()?;
    start.blocked.lifted(|| command.spawn()).map(|child| Pid::from_child(&child))
}

/// Where a program is that was found, and could not be started as it is.
fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_encoded_bytes().contains(&b'/') {
        return Some(program.into());
    }
    env::split_paths(&env::var_os("PATH")?).map(|dir| dir.join(program)).find(|file| file.is_file())
}
