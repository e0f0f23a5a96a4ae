//! The process that the user started: the shell waits for it, people signal it, and the terminal stops it.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use rustix::event::{PollFd, PollFlags, poll};

use super::channel::{Channel, Received};
use super::front_messages::{ToFront, ToKeeper};
use super::tree::{self, Reaped};
use super::{KEEPER, detach_stdio, system_error};
use crate::cli::{self, JobCli, JobCommand, RunArgs};
use crate::exit::{Exit, Failure};
use crate::output;
use crate::signals::{BlockedSignals, ReceivedSignal, SignalReader, apply_default_action};

/// The interval between two rounds of killing.
const KILL_INTERVAL: Duration = Duration::from_millis(1);

/// Starts the keeper, forwards signals to it, and ends as it says. The keeper alone parses the command line.
pub(super) fn run() -> Result<Exit, Failure> {
    output::write_in_background();
    tree::become_subreaper();
    // Before the keeper exists: no signal is lost, and the keeper starts with them blocked, too.
    let blocked = BlockedSignals::forwarded().map_err(|e| system_error("block signals", &e))?;
    let signals = SignalReader::forwarded().map_err(|e| system_error("receive signals", &e))?;
    let (mut keeper, channel) = start_keeper(blocked)?;
    detach_stdio();
    // Kept open, never read: see `ToFront::Lifeline`.
    let mut _lifeline: Vec<OwnedFd> = Vec::new();
    let mut received = HashSet::new();
    loop {
        let mut sources = [PollFd::new(&signals, PollFlags::IN), PollFd::new(&channel, PollFlags::IN)];
        if poll(&mut sources, None).is_err() {
            continue;
        }
        forward(&signals, &channel, &mut received);
        match channel.poll() {
            Received::Nothing => {}
            Received::Message(ToFront::Lifeline, fds) => _lifeline = fds,
            Received::Message(ToFront::Stop(signal), _) => {
                apply_default_action(signal);
                // The SIGCONT may have been sent to this process alone.
                channel.send(&ToKeeper::Signal(ReceivedSignal::continued()), &[]);
            }
            Received::Message(ToFront::Done { code, by }, _) => {
                // A signal that ended CMD was sent to this process before that.
                forward(&signals, &channel, &mut received);
                if let Some(signal) = by.filter(|signal| received.contains(signal)) {
                    apply_default_action(signal);
                }
                return Ok(Exit::Code(code));
            }
            Received::Closed => return keeper_ended(&mut keeper),
        }
    }
}

/// Forwards every pending signal to the keeper, and adds it to `received`.
fn forward(signals: &SignalReader, channel: &Channel, received: &mut HashSet<Signal>) {
    while let Some(next) = signals.next() {
        received.insert(next.signal);
        // The keeper learns of a SIGCONT when this process was stopped and runs again. One that is read here can only be
        // an old one, and would undo the next stop.
        if next.signal != Signal::SIGCONT {
            channel.send(&ToKeeper::Signal(next), &[]);
        }
    }
}

fn start_keeper(blocked: BlockedSignals) -> Result<(Child, Channel), Failure> {
    let (channel, keepers_end) = Channel::pair().map_err(|e| system_error("open a socket", &e))?;
    // This path leads to the program that is running, also when its file was replaced meanwhile.
    let started = Command::new("/proc/self/exe")
        .arg0(KEEPER)
        .args(std::env::args_os().skip(1))
        .stdin(Stdio::from(keepers_end))
        .spawn();
    let keeper = started.map_err(|e| system_error("start a second process", &e))?;
    let start = ToKeeper::Start { front: std::process::id(), blocked: blocked.bits() };
    channel.send(&start, &[rustix::stdio::stdin()]);
    Ok((keeper, channel))
}

/// The keeper ended without a message: it was killed, or it has reported what is wrong with the command line.
fn keeper_ended(keeper: &mut Child) -> Result<Exit, Failure> {
    /// The exit code of a Rust program that panicked.
    const PANICKED: u8 = 101;
    let code = keeper.wait().ok().and_then(|status| status.code()).and_then(|code| u8::try_from(code).ok());
    match code {
        Some(code) if code != PANICKED => Ok(Exit::Code(code)),
        _ => Err(keeper_died()),
    }
}

/// Kills everything below this process: the lease is no longer renewed, so CMD must be dead before the lock can pass on.
fn keeper_died() -> Failure {
    let name = match cli::parse() {
        Ok(Some(JobCli { command: JobCommand::Run(args), .. })) => args.wanted(),
        Ok(Some(JobCli { command: JobCommand::Once(args), .. })) => RunArgs::from(args).wanted(),
        _ => String::from("the lock"),
    };
    let failure =
        Failure::new(Exit::Lost, format!("the keeper of the lease on {name} was killed, and so was what it ran"));
    loop {
        let not_permitted = tree::signal_all(rustix::process::Signal::KILL);
        loop {
            match tree::reap() {
                Reaped::Child(..) => {}
                Reaped::Nothing if not_permitted.is_empty() => break,
                Reaped::Nothing => {
                    let pids: Vec<String> = not_permitted.iter().map(|pid| pid.as_raw_nonzero().to_string()).collect();
                    return failure.detail(format!("not permitted to kill: {}", pids.join(" ")));
                }
                Reaped::NoChildren => return failure,
            }
        }
        std::thread::sleep(KILL_INTERVAL);
    }
}
