//! Starting CMD.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use leasehold::gpu;
use rustix::io::Errno;
use rustix::process::Pid;

use super::lease::Lease;
use super::orders::Taken;
use crate::exit::{Exit, Failure};

/// What CMD starts with.
pub(super) struct Start {
    pub(super) words: Vec<OsString>,
    pub(super) env: Vec<(String, String)>,
    /// The process group it joins: the job's.
    pub(super) group: i32,
    /// Its stdin, its stdout and stderr where they are not ours, and the lifeline. The last is inherited, so that the
    /// lease counts as a living process's while CMD lives.
    pub(super) fds: Taken,
}

/// What CMD finds in its environment.
pub(super) fn env(lease: &Lease) -> Vec<(String, String)> {
    let mut env = vec![("LEASEHOLD_NAME".into(), lease.names()), ("LEASEHOLD_FENCE".into(), lease.fences())];
    if !lease.devices().is_empty() {
        env.push((gpu::VISIBLE.into(), gpu::visible(lease.devices())));
        env.push((gpu::ORDER.0.into(), gpu::ORDER.1.into()));
    }
    env
}

/// Starts it, with the signals of this thread.
pub(super) fn start(start: &Start) -> io::Result<Pid> {
    let Some((program, arguments)) = start.words.split_first() else { return Err(ErrorKind::InvalidInput.into()) };
    let outcome = spawn(start, program, arguments);
    if outcome.as_ref().is_err_and(|e| e.raw_os_error() == Some(Errno::NOEXEC.raw_os_error()))
        && let Some(script) = find(program)
    {
        // A script without `#!`: the shell's, by long custom.
        let arguments: Vec<OsString> = [script.into()].into_iter().chain(arguments.iter().cloned()).collect();
        return spawn(start, OsStr::new("/bin/sh"), &arguments);
    }
    outcome
}

/// Says that it could not be started, as env(1) would: 127 when there is no such program, else 126.
pub(super) fn not_started(program: &OsStr, error: &io::Error) -> Failure {
    let program = program.to_string_lossy();
    match error.kind() {
        ErrorKind::NotFound => Failure::new(Exit::NotFound, format!("{program}: no such program")),
        _ => Failure::new(Exit::CannotStart, format!("{program} cannot be started: {error}")),
    }
}

fn spawn(start: &Start, program: &OsStr, arguments: &[OsString]) -> io::Result<Pid> {
    let mut command = Command::new(program);
    command.args(arguments).process_group(start.group).stdin(Stdio::from(start.fds.stdin.try_clone()?));
    if let Some((stdout, stderr)) = &start.fds.output {
        command.stdout(Stdio::from(stdout.try_clone()?)).stderr(Stdio::from(stderr.try_clone()?));
    }
    command.envs(start.env.iter().map(|(name, value)| (name, value)));
    // A copy that is not closed when CMD starts; nothing else is started meanwhile.
    let _inherited = start.fds.lifeline.as_ref().map(rustix::io::dup).transpose()?;
    command.spawn().map(|child| Pid::from_child(&child))
}

/// Where a program is that was found, and could not be started as it is.
fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_encoded_bytes().contains(&b'/') {
        return Some(program.into());
    }
    env::split_paths(&env::var_os("PATH")?).map(|dir| dir.join(program)).find(|file| file.is_file())
}
