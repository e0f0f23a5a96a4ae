//! The process that holds the lease: it takes the lease, has CMD started, renews, and releases.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use leasehold::lease::{Moment, Ttl};
use leasehold::{LockManager, LossReason, Owner};
use nix::sys::signal::Signal;
use rustix::process::{Pid, getpgrp, getppid, kill_process};
use tokio::io::unix::AsyncFd;

use super::channel::{AsyncChannel, Channel, Received, signal_number};
use super::command;
use super::deadlines::Deadlines;
use super::front_messages::{ToFront, ToKeeper};
use super::guardian_messages::{FdLayout, Order};
use super::launch::{Launch, Starting};
use super::lease::Lease;
use super::supervise::Outcome;
use super::tree;
use super::{KEEPER, detach_stdio, once, system_error};
use crate::cli::RunArgs;
use crate::exit::{Exit, Failure};
use crate::output;
use crate::signals::{BlockedSignals, SignalReader};
use crate::store::Choice;

/// How the front is to end.
pub(super) struct RunExit {
    pub(super) code: u8,
    /// The signal that the front ends by if it received it, too, so that a shell sees it.
    pub(super) by: Option<Signal>,
}

impl From<Exit> for RunExit {
    fn from(exit: Exit) -> Self {
        Self { code: exit.code(), by: None }
    }
}

/// The contents of the front's first message.
struct Front {
    pid: u32,
    blocked: BlockedSignals,
    /// CMD's stdin.
    stdin: OwnedFd,
}

/// The failure of a keeper that was not started by a front.
pub(super) fn misused() -> Failure {
    Failure::new(Exit::Usage, format!("{KEEPER} is started by `leasehold run` only"))
}

/// Runs CMD under the lock, and sends the front the result.
pub(super) fn run(args: RunArgs, json: bool, store: &Choice, launch: Launch) -> Result<Exit, Failure> {
    let _ = rustix::thread::set_name(c"lh-keeper");
    output::write_in_background();
    tree::become_subreaper();
    let channel = Channel::from_stdin().map_err(|_| misused())?;
    let Received::Message(ToKeeper::Start { front, blocked }, mut fds) = channel.wait() else { return Err(misused()) };
    let stdin = fds.pop().ok_or_else(misused)?;
    let front = Front { pid: front, blocked: BlockedSignals::from_bits(blocked), stdin };
    let ended = keep(args, json, store, &channel, front, launch);
    Ok(ended.unwrap_or_else(|failure| {
        output::failure(&failure);
        output::flush();
        channel.send(&ToFront::Done { code: failure.exit.code(), by: None }, &[]);
        failure.exit
    }))
}

/// Runs CMD under the lock. Fails only before a lock was asked for.
fn keep(
    args: RunArgs,
    json: bool,
    store: &Choice,
    channel: &Channel,
    front: Front,
    launch: Launch,
) -> Result<Exit, Failure> {
    let Launch { runtime, guardian, starting, child_exits } = launch;
    runtime.block_on(async {
        let mut keeper = Keeper::new(args, json, channel, &front, (&guardian, child_exits))?;
        let ended = keeper.run(store, front.stdin, starting).await.unwrap_or_else(|failure| {
            output::failure(&failure);
            failure.exit.into()
        });
        // The lock is released, or nothing more can be done about it: messages may take their time now.
        output::flush();
        keeper.send_front(&ToFront::Done { code: ended.code, by: ended.by });
        keeper.continue_front();
        // The front ends now, and no process waits for the rest.
        if let Some(locks) = &keeper.locks {
            locks.shutdown().await;
        }
        Ok(Exit::Code(ended.code))
    })
}

pub(super) struct Keeper {
    pub(super) args: RunArgs,
    pub(super) json: bool,
    /// The channel to the front.
    pub(super) channel: AsyncChannel,
    pub(super) guardian: AsyncChannel,
    pub(super) child_exits: tokio::signal::unix::Signal,
    front: Option<Pid>,
    blocked: BlockedSignals,
    pub(super) owner: Owner,
    pub(super) deadlines: Deadlines,
    pub(super) locks: Option<LockManager>,
    /// How often the front was told to stop and was not continued.
    pub(super) stops: u32,
    /// The lease is lost and that was reported; CMD goes on (`--on-lost warn`).
    pub(super) warned: bool,
}

impl Keeper {
    fn new(
        args: RunArgs,
        json: bool,
        channel: &Channel,
        front: &Front,
        (guardian, child_exits): (&Channel, tokio::signal::unix::Signal),
    ) -> Result<Self, Failure> {
        let program = args.command.first().map(Path::new).and_then(Path::file_name).unwrap_or_default();
        let owner = match &args.owner {
            Some(owner) => Owner::named(owner),
            None => Owner::named(printable(&program.to_string_lossy())),
        };
        let ttl = ttl(&args).duration();
        let too_long = || {
            let (grace, ttl) = (args.grace.unwrap_or_default(), crate::duration::shown(ttl));
            let text = format!("--grace {grace:?} is too long for a lease of {ttl}: at most half of it");
            Failure::new(Exit::Usage, text)
        };
        let deadlines = Deadlines::new(ttl, args.grace).ok_or_else(too_long)?;
        let owner = owner.map_err(|e| Failure::new(Exit::Usage, e.to_string()))?.with_pid(front.pid);
        let register = |channel| AsyncChannel::new(channel).map_err(|e| system_error("listen", &e));
        Ok(Self {
            channel: register(channel)?,
            guardian: register(guardian)?,
            child_exits,
            deadlines,
            owner,
            args,
            json,
            front: i32::try_from(front.pid).ok().and_then(Pid::from_raw),
            blocked: front.blocked,
            locks: None,
            stops: 0,
            warned: false,
        })
    }

    async fn run(&mut self, store: &Choice, stdin: OwnedFd, starting: Starting) -> Result<RunExit, Failure> {
        let (guard, slot) = match self.acquire(store, starting).await {
            Ok(Ok(acquired)) => acquired,
            Ok(Err(ended)) => return Ok(ended),
            Err(failure) => return Err(failure),
        };
        let mut streams = None;
        let mut output = None;
        if slot.is_some() {
            match once::capture_output() {
                Ok((captures, ends)) => (streams, output) = (Some(captures), Some(ends)),
                Err(error) => {
                    self.release(guard).await;
                    return Err(system_error("read the command's output", &error));
                }
            }
        }
        // The status line is cleared before CMD writes.
        output::status_cleared().await;
        let signals = match own_signals() {
            Ok(signals) => signals,
            Err(error) => {
                self.release(guard).await;
                return Err(system_error("receive signals", &error));
            }
        };
        // These arrived before CMD started. The front forwards each of them as well.
        signals.get_ref().drain();
        let started_at = Moment::now();
        // The lease may have been lost since it was granted, while the job or this process was stopped.
        let valid_until = guard.valid_until();
        let outcome = if guard.loss().is_some() || started_at >= self.deadlines.give_up_at(valid_until) {
            Outcome::TooLate
        } else {
            self.order_start(&guard, valid_until, stdin, output);
            detach_stdio();
            self.supervise(&guard, &signals).await
        };
        match outcome {
            Outcome::Ended(status) => {
                let ended = Self::exit_of(status);
                if let Some(hold) = self.args.hold_at_least {
                    self.hold(&guard, started_at + hold).await;
                }
                if let (Some(slot), Some(streams)) = (slot, streams)
                    && let Err(exit) = self.store_result(&guard, &slot, streams, ended.code, status).await
                {
                    self.release(guard).await;
                    return Ok(exit.into());
                }
                let held_until_now = self.release(guard).await;
                Ok(if held_until_now || self.warned { ended } else { Exit::Lost.into() })
            }
            Outcome::NotStarted(error) => {
                once::forget(slot.as_ref()).await;
                self.release(guard).await;
                Err(command::not_started(self.args.command[0].as_os_str(), &error))
            }
            Outcome::TooLate => {
                once::forget(slot.as_ref()).await;
                let failure = Failure::new(Exit::Lost, lost_text(&guard, guard.loss()));
                self.release_lost(guard).await;
                Err(failure.detail("the command was not started"))
            }
            Outcome::Lost(why) => {
                self.terminate_tree(&guard, &why).await;
                self.release_lost(guard).await;
                Ok(Exit::Lost.into())
            }
            Outcome::Dead { not_permitted } => {
                self.report_killed(&lost_text(&guard, guard.loss()), &not_permitted);
                self.release_lost(guard).await;
                Ok(Exit::Lost.into())
            }
            Outcome::FrontDied => {
                self.kill_tree(guard.valid_until()).await;
                self.release(guard).await;
                Ok(Exit::Code(128 + 9).into())
            }
            Outcome::GuardianDied => {
                self.kill_tree_below(guard.valid_until()).await;
                let text = format!("the guardian of the lease on {} was killed, and so was what it ran", guard.name());
                output::failure(&Failure::new(Exit::Lost, text));
                self.release(guard).await;
                Ok(Exit::Lost.into())
            }
            Outcome::Cancelled(signal) => {
                self.kill_tree(guard.valid_until()).await;
                once::forget(slot.as_ref()).await;
                self.release(guard).await;
                Ok(RunExit { code: 128 + signal_number(signal), by: Some(signal) })
            }
        }
    }

    /// Orders the guardian to start CMD.
    fn order_start(&self, guard: &Lease, valid_until: Moment, stdin: OwnedFd, output: Option<(OwnedFd, OwnedFd)>) {
        let lifeline = self.locks.as_ref().and_then(LockManager::lifeline);
        let order = Order::Start {
            schedule: self.unattended_schedule(valid_until),
            group: getpgrp().as_raw_nonzero().get(),
            blocked: self.blocked.bits(),
            words: self.args.command.len(),
            fds: FdLayout { output: output.is_some(), lifeline: lifeline.is_some() },
            env: command::env(guard),
        };
        let (stdout, stderr) = output.map_or((None, None), |(stdout, stderr)| (Some(stdout), Some(stderr)));
        let fds = [Some(stdin), stdout, stderr, lifeline];
        let fds: Vec<BorrowedFd<'_>> = fds.iter().flatten().map(AsFd::as_fd).collect();
        self.guardian.send(&order, &fds);
    }

    /// Keeps the lock until `end` after CMD has ended (`--hold-at-least`), or until a signal.
    async fn hold(&mut self, guard: &Lease, end: Moment) {
        let cancelled = Self::cancelled(&self.channel, &mut self.stops);
        tokio::select! {
            () = until(end) => {}
            _ = cancelled => {}
            _ = guard.lost() => {}
        }
    }

    fn exit_of(status: ExitStatus) -> RunExit {
        match status.signal() {
            Some(signal) => RunExit {
                code: u8::try_from(128 + signal).unwrap_or(u8::MAX),
                // A shell goes on with its script unless it sees that this signal ended the job.
                by: (signal == Signal::SIGINT as i32).then_some(Signal::SIGINT),
            },
            None => Exit::Code(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)).into(),
        }
    }

    pub(super) fn send_front(&self, message: &ToFront) {
        self.channel.send(message, &[]);
    }

    /// Continues a front that is stopped.
    pub(super) fn continue_front(&self) {
        if self.stops > 0
            && let Some(front) = self.front
            && getppid() == Some(front)
        {
            let _ = kill_process(front, rustix::process::Signal::CONT);
        }
    }
}

/// Opens the keeper's own signals, which show what was sent to the whole group.
#[expect(deprecated, reason = "its successor is `unsafe`; the reader owns its descriptor, so this is sound")]
fn own_signals() -> io::Result<AsyncFd<SignalReader>> {
    AsyncFd::new(SignalReader::forwarded()?)
}

/// Sleeps until `moment`. The runtime's timer stands still in suspend and a lease does not, so it looks once a second.
pub(super) async fn until(moment: Moment) {
    loop {
        let left = Moment::now().until(moment);
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(Duration::from_secs(1))).await;
    }
}

/// Returns the message about a lease that is lost or, without a reason, is about to be.
pub(super) fn lost_text(guard: &Lease, why: Option<LossReason>) -> String {
    match why {
        Some(why) => format!("the lease on {} was lost: {why}", guard.name()),
        None => {
            let left = crate::duration::shown(guard.remaining());
            format!("the lease on {} cannot be renewed and ends in {left}", guard.name())
        }
    }
}

pub(super) fn ttl(args: &RunArgs) -> Ttl {
    args.ttl.unwrap_or_default()
}

/// Turns a program's name into an owner.
fn printable(name: &str) -> String {
    let printable: String = name.chars().filter(|c| !c.is_control()).take(64).collect();
    if printable.is_empty() { "unnamed".into() } else { printable }
}
