//! Starting CMD.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{CString, OsStr, OsString};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use leasehold::gpu;
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawnp};
use nix::sys::signal::{SigSet, Signal};
use rustix::io::Errno;
use rustix::process::Pid;

use super::guardian_messages::StartFds;
use super::lease::Lease;
use crate::exit::{Exit, Failure};
use crate::signals::BlockedSignals;

/// The parameters of the start of CMD.
pub(super) struct Start {
    pub(super) words: Vec<OsString>,
    pub(super) env: Vec<(String, String)>,
    /// The process group that CMD joins: the job's.
    pub(super) group: i32,
    /// Signals that are blocked in this process and must not be blocked in CMD.
    pub(super) blocked: BlockedSignals,
    /// CMD's stdin, its stdout and stderr if they are not those of this process, and the lifeline. CMD inherits the
    /// lifeline, so that the lease counts as a living process's while CMD lives.
    pub(super) fds: StartFds,
}

/// Returns the variables that are added to CMD's environment.
pub(super) fn env(lease: &Lease) -> Vec<(String, String)> {
    let mut env = vec![("LEASEHOLD_NAME".into(), lease.names()), ("LEASEHOLD_FENCE".into(), lease.fences())];
    if !lease.devices().is_empty() {
        env.push((gpu::VISIBLE.into(), gpu::visible(lease.devices())));
        env.push((gpu::ORDER.0.into(), gpu::ORDER.1.into()));
    }
    env
}

/// Starts CMD.
pub(super) fn start(start: &Start) -> io::Result<Pid> {
    let Some((program, arguments)) = start.words.split_first() else { return Err(ErrorKind::InvalidInput.into()) };
    let outcome = spawn(start, program, arguments);
    if outcome.as_ref().is_err_and(|e| e.raw_os_error() == Some(Errno::NOEXEC.raw_os_error()))
        && let Some(script) = find(program)
    {
        // A script without `#!` is run by the shell, by long custom.
        let arguments: Vec<OsString> = [script.into()].into_iter().chain(arguments.iter().cloned()).collect();
        return spawn(start, OsStr::new("/bin/sh"), &arguments);
    }
    outcome
}

/// Returns the failure of a start, with the codes of env(1): 127 if there is no such program, else 126.
pub(super) fn not_started(program: &OsStr, error: &io::Error) -> Failure {
    let program = program.to_string_lossy();
    match error.kind() {
        ErrorKind::NotFound => Failure::new(Exit::NotFound, format!("{program}: no such program")),
        _ => Failure::new(Exit::CannotStart, format!("{program} cannot be started: {error}")),
    }
}

/// Spawns like `std::process::Command`, except that the signals stay blocked in this process, which one of them would end.
fn spawn(start: &Start, program: &OsStr, arguments: &[OsString]) -> io::Result<Pid> {
    let mut attributes = PosixSpawnAttr::init()?;
    let flags = PosixSpawnFlags::POSIX_SPAWN_SETPGROUP
        | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK
        | PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF;
    attributes.set_flags(flags)?;
    attributes.set_pgroup(nix::unistd::Pid::from_raw(start.group))?;
    attributes.set_sigmask(&start.blocked.unblocked_mask()?)?;
    // Every Rust program ignores SIGPIPE.
    attributes.set_sigdefault(&SigSet::from(Signal::SIGPIPE))?;

    let mut actions = PosixSpawnFileActions::init()?;
    let mut copies: Vec<OwnedFd> = Vec::with_capacity(3);
    let output = start.fds.output.as_ref().map(|(stdout, stderr)| [(stdout, 1), (stderr, 2)]);
    for (from, to) in [(&start.fds.stdin, 0)].into_iter().chain(output.into_iter().flatten()) {
        // A copy above 2, so that none of the standard descriptors is overwritten before it is used.
        let from = from.try_clone()?;
        actions.add_dup2(from.as_raw_fd(), to)?;
        copies.push(from);
    }
    // A copy without CLOEXEC, which CMD inherits. This process starts nothing else meanwhile.
    let _inherited = start.fds.lifeline.as_ref().map(rustix::io::dup).transpose()?;

    let mut env: BTreeMap<OsString, OsString> = env::vars_os().collect();
    env.extend(start.env.iter().map(|(name, value)| (name.into(), value.into())));
    let env: Vec<CString> =
        env.iter().map(|(name, value)| concat(&[name, OsStr::new("="), value])).collect::<Result<_, _>>()?;
    let words = [program].into_iter().chain(arguments.iter().map(OsString::as_os_str));
    let words: Vec<CString> = words.map(|word| concat(&[word])).collect::<Result<_, _>>()?;
    let pid = posix_spawnp(&words[0], &actions, &attributes, &words, &env)?;
    Pid::from_raw(pid.as_raw()).ok_or_else(|| ErrorKind::InvalidData.into())
}

fn concat(parts: &[&OsStr]) -> io::Result<CString> {
    let bytes: Vec<u8> = parts.iter().flat_map(|part| part.as_bytes()).copied().collect();
    Ok(CString::new(bytes)?)
}

/// Searches PATH for a program that execve(2) has found and refused.
fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_encoded_bytes().contains(&b'/') {
        return Some(program.into());
    }
    env::split_paths(&env::var_os("PATH")?).map(|dir| dir.join(program)).find(|file| file.is_file())
}
