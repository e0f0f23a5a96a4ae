//! The process that was started: what the shell waits for, people signal and the terminal stops.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use rustix::event::{PollFd, PollFlags, poll};

use super::link::{Link, Read, ToFront, ToKeeper};
use super::tree::{self, Reaped};
use super::{KEEPER, let_go_of_stdio, refused};
use crate::cli::{self, JobCli, JobCommand, RunArgs};
use crate::exit::{Exit, Failure};
use crate::say;
use crate::signals::{Blocked, Came, Inbox, suffer};

/// Between two rounds of killing.
const AGAIN: Duration = Duration::from_millis(1);

/// Starts the keeper, passes signals on, and ends as it says. Reading the command line is the keeper's business.
pub(super) fn run() -> Result<Exit, Failure> {
    say::in_background();
    tree::adopt_orphans();
    // Before the keeper is there, so that none is lost and it starts with them blocked, too.
    let blocked = Blocked::now().map_err(|e| refused("block signals", &e))?;
    let signals = Inbox::open().map_err(|e| refused("receive signals", &e))?;
    let (mut keeper, link) = start_keeper(blocked)?;
    let_go_of_stdio();
    // Held, not read: see `ToFront::Lifeline`.
    let mut _lifeline: Vec<OwnedFd> = Vec::new();
    let mut got = HashSet::new();
    loop {
        let mut ends = [PollFd::new(&signals, PollFlags::IN), PollFd::new(&link, PollFlags::IN)];
        if poll(&mut ends, None).is_err() {
            continue;
        }
        pass_on(&signals, &link, &mut got);
        match link.poll() {
            Read::Nothing => {}
            Read::Message(ToFront::Lifeline, fds) => _lifeline = fds,
            Read::Message(ToFront::Stop(signal), _) => {
                suffer(signal);
                // Whoever made us go on may have meant us alone.
                link.send(&ToKeeper::Signal(Came::continued()), &[]);
            }
            Read::Message(ToFront::Done { code, by }, _) => {
                // Whatever ended the command was sent to us before.
                pass_on(&signals, &link, &mut got);
                if let Some(signal) = by.filter(|signal| got.contains(signal)) {
                    suffer(signal);
                }
                return Ok(Exit::Code(code));
            }
            Read::Gone => return keeper_ended(&mut keeper),
        }
    }
}

/// Tells the keeper of every signal that has come in, and keeps them in mind.
fn pass_on(signals: &Inbox, link: &Link, got: &mut HashSet<Signal>) {
    while let Some(came) = signals.next() {
        got.insert(came.signal);
        // Going on is told after a stop: here it could only be an old one, and undo the next stop.
        if came.signal != Signal::SIGCONT {
            link.send(&ToKeeper::Signal(came), &[]);
        }
    }
}

fn start_keeper(blocked: Blocked) -> Result<(Child, Link), Failure> {
    let (link, keepers_end) = Link::pair().map_err(|e| refused("open a socket", &e))?;
    // By this name it is this very program, also when its file was replaced meanwhile.
    let started = Command::new("/proc/self/exe")
        .arg0(KEEPER)
        .args(std::env::args_os().skip(1))
        .stdin(Stdio::from(keepers_end))
        .spawn();
    let keeper = started.map_err(|e| refused("start a second process", &e))?;
    let start = ToKeeper::Start { front: std::process::id(), blocked: blocked.bits() };
    link.send(&start, &[std::io::stdin().as_fd()]);
    Ok((keeper, link))
}

/// The keeper is gone without a word to us: it was killed, or it had no use for the command line and has said so.
fn keeper_ended(keeper: &mut Child) -> Result<Exit, Failure> {
    /// What Rust ends with after a panic.
    const PANICKED: u8 = 101;
    let code = keeper.wait().ok().and_then(|status| status.code()).and_then(|code| u8::try_from(code).ok());
    match code {
        Some(code) if code != PANICKED => Ok(Exit::Code(code)),
        _ => Err(keeper_died()),
    }
}

/// Nobody renews any more: the command must be gone before the lock can be somebody else's.
fn keeper_died() -> Failure {
    let name = match cli::parse() {
        Ok(Some(JobCli { command: JobCommand::Run(args), .. })) => args.wanted(),
        Ok(Some(JobCli { command: JobCommand::Once(args), .. })) => RunArgs::from(args).wanted(),
        _ => String::from("the lock"),
    };
    loop {
        let refused = tree::signal_all(rustix::process::Signal::KILL);
        loop {
            match tree::reap() {
                Reaped::Child(..) => {}
                Reaped::Nothing if refused.is_empty() => break,
                Reaped::Nothing => {
                    let pids: Vec<String> = refused.iter().map(|pid| pid.as_raw_nonzero().to_string()).collect();
                    let text = format!("the keeper of the lease on {name} was killed, and so was what it ran");
                    return Failure::new(Exit::Lost, text).detail(format!("not permitted to kill: {}", pids.join(" ")));
                }
                Reaped::Nobody => {
                    let text = format!("the keeper of the lease on {name} was killed, and so was what it ran");
                    return Failure::new(Exit::Lost, text);
                }
            }
        }
        std::thread::sleep(AGAIN);
    }
}
