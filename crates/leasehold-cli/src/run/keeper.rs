//! The process that holds the lease: it takes it, has CMD started, renews, and gives it back.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use leasehold::lease::{Moment, Ttl};
use leasehold::once::ResultSlot;
use leasehold::{LockManager, LossReason, Owner};
use nix::sys::signal::Signal;
use rustix::process::{Pid, getpgrp, getppid, kill_process};
use tokio::io::unix::AsyncFd;

use super::command;
use super::deadline::Deadlines;
use super::launch::Launch;
use super::lease::Lease;
use super::link::{Ear, Link, Read, ToFront, ToKeeper};
use super::orders::{Fds, Order};
use super::tee::Tee;
use super::tree;
use super::watching::Watched;
use super::{KEEPER, let_go_of_stdio, refused, result};
use crate::cli::RunArgs;
use crate::exit::{Exit, Failure};
use crate::say;
use crate::signals::{Blocked, Inbox};
use crate::store::Choice;

/// How the run ended, for the front.
pub(super) struct End {
    pub(super) code: u8,
    /// The signal the front is to end by if it got it, too, so that a shell sees it.
    pub(super) by: Option<Signal>,
}

impl From<Exit> for End {
    fn from(exit: Exit) -> Self {
        Self { code: exit.code(), by: None }
    }
}

/// What the front sends with its first message.
struct Front {
    pid: u32,
    blocked: Blocked,
    /// CMD's stdin.
    stdin: OwnedFd,
}

/// The failure of a keeper that no front started.
pub(super) fn misused() -> Failure {
    Failure::new(Exit::Usage, format!("{KEEPER} is started by `leasehold run` and by nobody else"))
}

/// Runs the command under the lock, and tells the front how that ended.
pub(super) fn run(args: RunArgs, json: bool, store: &Choice, launch: Launch) -> Result<Exit, Failure> {
    let _ = rustix::thread::set_name(c"lh-keeper");
    say::in_background();
    tree::adopt_orphans();
    let link = Link::from_stdin().map_err(|_| misused())?;
    let Read::Message(ToKeeper::Start { front, blocked }, mut fds) = link.wait() else { return Err(misused()) };
    let stdin = fds.pop().ok_or_else(misused)?;
    let front = Front { pid: front, blocked: Blocked::from_bits(blocked), stdin };
    let told = keep(args, json, store, &link, front, launch);
    Ok(told.unwrap_or_else(|failure| {
        say::failure(&failure);
        say::flush();
        link.send(&ToFront::Done { code: failure.exit.code(), by: None }, &[]);
        failure.exit
    }))
}

/// A failure here is one before there was anything to keep.
fn keep(args: RunArgs, json: bool, store: &Choice, link: &Link, front: Front, launch: Launch) -> Result<Exit, Failure> {
    let Launch { runtime, guardian, children } = launch;
    runtime.block_on(async {
        let mut keeper = Keeper::new(args, json, link, &front, (&guardian, children))?;
        let end = keeper.run(store, front.stdin).await.unwrap_or_else(|failure| {
            say::failure(&failure);
            failure.exit.into()
        });
        // The lock is free again, or nothing more can be done about it: now there is time for a message.
        say::flush();
        keeper.tell(&ToFront::Done { code: end.code, by: end.by });
        keeper.wake_front();
        // The front is gone from here on, and nobody waits for the rest.
        if let Some(locks) = &keeper.locks {
            locks.shutdown().await;
        }
        Ok(Exit::Code(end.code))
    })
}

pub(super) struct Keeper {
    pub(super) args: RunArgs,
    pub(super) json: bool,
    pub(super) link: Ear,
    pub(super) guardian: Ear,
    pub(super) children: tokio::signal::unix::Signal,
    front: Option<Pid>,
    blocked: Blocked,
    pub(super) owner: Owner,
    pub(super) deadlines: Deadlines,
    pub(super) locks: Option<LockManager>,
    /// How often the front was told to stop and has not gone on since.
    pub(super) stops: u32,
    /// The lease is lost, and CMD goes on as asked.
    pub(super) warned: bool,
}

impl Keeper {
    fn new(
        args: RunArgs,
        json: bool,
        link: &Link,
        front: &Front,
        (guardian, children): (&Link, tokio::signal::unix::Signal),
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
        let listen = |link| Ear::new(link).map_err(|e| refused("listen", &e));
        Ok(Self {
            link: listen(link)?,
            guardian: listen(guardian)?,
            children,
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

    async fn run(&mut self, store: &Choice, stdin: OwnedFd) -> Result<End, Failure> {
        let (guard, slot) = match self.acquire(store).await {
            Ok(Ok(got)) => got,
            Ok(Err(end)) => return Ok(end),
            Err(failure) => return Err(failure),
        };
        let mut streams = None;
        let mut output = None;
        if slot.is_some() {
            match Self::tap() {
                Ok((tees, ends)) => (streams, output) = (Some(tees), Some(ends)),
                Err(error) => {
                    self.release(guard).await;
                    return Err(refused("read the command's output", &error));
                }
            }
        }
        // What was drawn for a person who waited is wiped away before CMD writes.
        say::flushed().await;
        let signals = match own_signals() {
            Ok(signals) => signals,
            Err(error) => {
                self.release(guard).await;
                return Err(refused("receive signals", &error));
            }
        };
        // They came before CMD: the front has told of them, or does so now.
        signals.get_ref().drain();
        let started_at = Moment::now();
        // It may have been lost since it was granted: while the job was stopped, or this process.
        let valid_until = guard.valid_until();
        let watched = if guard.loss().is_some() || started_at >= self.deadlines.give_up_at(valid_until) {
            Watched::TooLate
        } else {
            self.order_start(&guard, valid_until, stdin, output);
            let_go_of_stdio();
            self.watch(&guard, &signals).await
        };
        match watched {
            Watched::Ended(status) => {
                let end = Self::end_of(status);
                if let Some(hold) = self.args.hold_at_least {
                    self.hold(&guard, started_at + hold).await;
                }
                if let (Some(slot), Some(streams)) = (slot, streams)
                    && let Err(exit) = self.store(&guard, &slot, streams, &end, status).await
                {
                    self.release(guard).await;
                    return Ok(exit.into());
                }
                let kept = self.release(guard).await;
                Ok(if kept || self.warned { end } else { Exit::Lost.into() })
            }
            Watched::NotStarted(error) => {
                Self::forget(slot.as_ref()).await;
                self.release(guard).await;
                Err(command::not_started(self.args.command[0].as_os_str(), &error))
            }
            Watched::TooLate => {
                Self::forget(slot.as_ref()).await;
                let failure = Failure::new(Exit::Lost, lost_text(&guard, guard.loss()));
                self.release_lost(guard).await;
                Err(failure.detail("the command was not started"))
            }
            Watched::Lost(why) => {
                self.end_tree(&guard, &why).await;
                self.release_lost(guard).await;
                Ok(Exit::Lost.into())
            }
            Watched::Dead { not_permitted } => {
                self.say_dead(&lost_text(&guard, guard.loss()), &not_permitted);
                self.release_lost(guard).await;
                Ok(Exit::Lost.into())
            }
            Watched::FrontDied => {
                self.kill_tree(guard.valid_until()).await;
                self.release(guard).await;
                Ok(Exit::Code(128 + 9).into())
            }
            Watched::GuardianDied => {
                self.kill_tree_below(guard.valid_until()).await;
                let text = format!("the guardian of the lease on {} was killed, and so was what it ran", guard.name());
                say::failure(&Failure::new(Exit::Lost, text));
                self.release(guard).await;
                Ok(Exit::Lost.into())
            }
            Watched::Cancelled(signal) => {
                self.kill_tree(guard.valid_until()).await;
                Self::forget(slot.as_ref()).await;
                self.release(guard).await;
                Ok(End { code: 128 + number(signal), by: Some(signal) })
            }
        }
    }

    /// Has the guardian start CMD.
    fn order_start(&self, guard: &Lease, valid_until: Moment, stdin: OwnedFd, output: Option<(OwnedFd, OwnedFd)>) {
        let lifeline = self.locks.as_ref().and_then(LockManager::lifeline);
        let order = Order::Start {
            times: self.times_without_word(valid_until),
            group: getpgrp().as_raw_nonzero().get(),
            blocked: self.blocked.bits(),
            words: self.args.command.len(),
            fds: Fds { output: output.is_some(), lifeline: lifeline.is_some() },
            env: command::env(guard),
        };
        let (stdout, stderr) = output.map_or((None, None), |(stdout, stderr)| (Some(stdout), Some(stderr)));
        let fds = [Some(stdin), stdout, stderr, lifeline];
        let fds: Vec<BorrowedFd<'_>> = fds.iter().flatten().map(AsFd::as_fd).collect();
        self.guardian.send(&order, &fds);
    }

    /// Puts a pipe between the command and our own stdout and stderr.
    fn tap() -> io::Result<((Tee, Tee), (OwnedFd, OwnedFd))> {
        let (out, commands_out) = Tee::start(io::stdout().as_fd().try_clone_to_owned()?)?;
        let (err, commands_err) = Tee::start(io::stderr().as_fd().try_clone_to_owned()?)?;
        Ok(((out, err), (commands_out, commands_err)))
    }

    /// Stores what the command wrote and how it ended, while the lock is still ours.
    async fn store(
        &mut self,
        guard: &Lease,
        slot: &ResultSlot,
        (mut out, mut err): (Tee, Tee),
        end: &End,
        status: ExitStatus,
    ) -> Result<(), Exit> {
        let until_ok = self.args.once.as_ref().is_some_and(|once| once.until_ok);
        let mut interrupted = false;
        loop {
            let written = async {
                out.finish().await;
                err.finish().await;
            };
            tokio::select! {
                () = written => break,
                // Nobody reads our output, and somebody wants an end: the rest is kept and not passed on.
                _ = Self::cancelled(&self.link, &mut self.stops), if !interrupted => interrupted = true,
                why = guard.lost() => {
                    say::failure(&Failure::new(Exit::Lost, lost_text(guard, Some(why))));
                    return Err(Exit::Lost);
                }
            }
            out.stop_passing_on();
            err.stop_passing_on();
        }
        if status.signal().is_some() || (until_ok && end.code != 0) {
            Self::forget(Some(slot)).await;
            return Ok(());
        }
        let id = &guard.name();
        match slot.store(guard.guard(), &result::written(end.code, &out.kept(), &err.kept())).await {
            Ok(true) => Ok(()),
            Ok(false) => {
                let text = format!("{id} is done, but its result could not be stored: the next one runs it again");
                say::failure(&Failure::new(Exit::Unreachable, text));
                Ok(())
            }
            Err(error) => {
                let failure = Failure::from(error);
                say::failure(&failure);
                Err(failure.exit)
            }
        }
    }

    /// Nothing came of it: the next one begins as if nobody had been here.
    async fn forget(slot: Option<&ResultSlot>) {
        if let Some(slot) = slot {
            // What is left would be found to be a dead one's.
            let _ = slot.forget().await;
        }
    }

    /// CMD has ended, and the lock is kept for a while; a signal ends that.
    async fn hold(&mut self, guard: &Lease, until_then: Moment) {
        let cancelled = Self::cancelled(&self.link, &mut self.stops);
        tokio::select! {
            () = until(until_then) => {}
            _ = cancelled => {}
            _ = guard.lost() => {}
        }
    }

    fn end_of(status: ExitStatus) -> End {
        match status.signal() {
            Some(signal) => End {
                code: u8::try_from(128 + signal).unwrap_or(u8::MAX),
                // A shell goes on with its script unless it sees that this ended the job.
                by: (signal == Signal::SIGINT as i32).then_some(Signal::SIGINT),
            },
            None => Exit::Code(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)).into(),
        }
    }

    pub(super) fn tell(&self, message: &ToFront) {
        self.link.send(message, &[]);
    }

    /// The front stands still: there is nothing any more to stand still for.
    pub(super) fn wake_front(&self) {
        if self.stops > 0
            && let Some(front) = self.front
            && getppid() == Some(front)
        {
            let _ = kill_process(front, rustix::process::Signal::CONT);
        }
    }
}

/// The keeper's own signals, which tell it what was sent to the whole group.
#[expect(deprecated, reason = "its successor is `unsafe`; an inbox owns its descriptor, so this is sound")]
fn own_signals() -> io::Result<AsyncFd<Inbox>> {
    AsyncFd::new(Inbox::open()?)
}

/// Sleeps until then. The runtime's timer stops while the machine sleeps; a lease does not.
pub(super) async fn until(moment: Moment) {
    loop {
        let left = Moment::now().until(moment);
        if left.is_zero() {
            return;
        }
        tokio::time::sleep(left.min(Duration::from_secs(1))).await;
    }
}

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

pub(super) fn number(signal: Signal) -> u8 {
    u8::try_from(signal as i32).unwrap_or(0)
}

/// A program's name as an owner.
fn printable(name: &str) -> String {
    let kept: String = name.chars().filter(|c| !c.is_control()).take(64).collect();
    if kept.is_empty() { "unnamed".into() } else { kept }
}
