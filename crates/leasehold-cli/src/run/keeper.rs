//! The process that holds the lease: it takes it, starts CMD, watches both, and gives it back.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use leasehold::clock::Moment;
use leasehold::{LockManager, LossReason, Owner, ResultSlot, Ttl};
use nix::sys::signal::Signal;
use rustix::process::{Pid, WaitStatus, getppid, kill_process};
use tokio::signal::unix::SignalKind;

use super::command::{self, Start};
use super::deadline::Deadlines;
use super::lease::Lease;
use super::link::{Ear, Link, Read, ToFront, ToKeeper};
use super::tee::Tee;
use super::tree::{self, Reaped};
use super::{KEEPER, let_go_of_stdio, refused, result};
use crate::cli::{OnLost, RunArgs};
use crate::exit::{Exit, Failure};
use crate::say;
use crate::signals::{Blocked, Came, Caught, stops};
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

/// Runs the command under the lock, and tells the front how that ended.
pub(super) fn run(args: RunArgs, json: bool, store: &Choice) -> Result<Exit, Failure> {
    let _ = rustix::thread::set_name(c"lh-keeper");
    tree::adopt_orphans();
    let misused = || Failure::new(Exit::Usage, format!("{KEEPER} is started by `leasehold run` and by nobody else"));
    let link = Link::from_stdin().map_err(|_| misused())?;
    let Read::Message(ToKeeper::Start { front, blocked }, Some(stdin)) = link.wait() else { return Err(misused()) };
    let told = keep(args, json, store, &link, front, Blocked::from_bits(blocked), stdin);
    Ok(told.unwrap_or_else(|failure| {
        say::failure(&failure);
        link.send(&ToFront::Done { code: failure.exit.code(), by: None }, None);
        failure.exit
    }))
}

/// A failure here is one before there was anything to keep.
fn keep(
    args: RunArgs,
    json: bool,
    store: &Choice,
    link: &Link,
    front: u32,
    blocked: Blocked,
    stdin: OwnedFd,
) -> Result<Exit, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| refused("start", &e))?;
    runtime.block_on(async {
        let ear = Ear::new(link).map_err(|e| refused("listen", &e))?;
        let mut keeper = Keeper::new(args, json, ear, front, blocked)?;
        let end = keeper.run(store, stdin).await.unwrap_or_else(|failure| {
            say::failure(&failure);
            failure.exit.into()
        });
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

/// Why watching came to an end.
enum Watched {
    Ended(WaitStatus),
    Lost(String),
    FrontDied,
}

impl Keeper {
    fn new(args: RunArgs, json: bool, link: Ear, front: u32, blocked: Blocked) -> Result<Self, Failure> {
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
        Ok(Self {
            deadlines: Deadlines::new(ttl, args.grace).ok_or_else(too_long)?,
            owner: owner.map_err(|e| Failure::new(Exit::Usage, e.to_string()))?.with_pid(front),
            args,
            json,
            link,
            children: tokio::signal::unix::signal(SignalKind::child()).map_err(|e| refused("wait for a child", &e))?,
            front: i32::try_from(front).ok().and_then(Pid::from_raw),
            blocked,
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
        let start = Start {
            words: &self.args.command,
            lease: &guard,
            stdin,
            output,
            lifeline: self.locks.as_ref().and_then(LockManager::lifeline),
            blocked: self.blocked,
        };
        let mut caught = Caught::install().map_err(|e| refused("catch signals", &e))?;
        let started_at = Moment::now();
        let started = command::start(&start);
        drop(start);
        let pid = match started {
            Ok(pid) => pid,
            Err(failure) => {
                Self::forget(slot.as_ref()).await;
                self.release(guard).await;
                return Err(failure);
            }
        };
        let_go_of_stdio();
        match self.watch(&guard, pid, &mut caught).await {
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
            Watched::Lost(why) => {
                self.end_tree(&guard, &why).await;
                self.release_lost(guard).await;
                Ok(Exit::Lost.into())
            }
            Watched::FrontDied => {
                self.kill_tree(guard.valid_until()).await;
                self.release(guard).await;
                Ok(Exit::Code(128 + 9).into())
            }
        }
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
        (out, err): (Tee, Tee),
        end: &End,
        status: WaitStatus,
    ) -> Result<(), Exit> {
        let until_ok = self.args.once.as_ref().is_some_and(|once| once.until_ok);
        let written = async { (out.finish().await, err.finish().await) };
        let (out, err) = tokio::select! {
            written = written => written,
            // Whoever reads our output does not keep up with it.
            why = guard.lost() => {
                say::failure(&Failure::new(Exit::Lost, lost_text(guard, Some(why))));
                return Err(Exit::Lost);
            }
        };
        if status.terminating_signal().is_some() || (until_ok && end.code != 0) {
            Self::forget(Some(slot)).await;
            return Ok(());
        }
        let id = &guard.name();
        match slot.store(guard.guard(), &result::written(end.code, &out, &err)).await {
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

    /// Until CMD ends, the lease is lost, or the front is killed.
    async fn watch(&mut self, guard: &Lease, pid: Pid, caught: &mut Caught) -> Watched {
        loop {
            let give_up_at = self.deadlines.give_up_at(guard.valid_until());
            let lost = tokio::select! {
                biased;
                _ = self.children.recv() => {
                    if let Some(status) = self.look_after(pid) {
                        return Watched::Ended(status);
                    }
                    continue;
                }
                heard = self.link.hear() => match heard {
                    None => return Watched::FrontDied,
                    Some(came) => {
                        if let Some(status) = self.pass_on(came, pid) {
                            return Watched::Ended(status);
                        }
                        continue;
                    }
                },
                signal = caught.next() => {
                    if let Some(status) = self.pass_on(Came { signal, by_terminal: false }, pid) {
                        return Watched::Ended(status);
                    }
                    continue;
                }
                why = guard.lost(), if !self.warned => lost_text(guard, Some(why)),
                () = until(give_up_at), if !self.warned => {
                    // Renewed meanwhile: another day.
                    if Moment::now() < self.deadlines.give_up_at(guard.valid_until()) {
                        continue;
                    }
                    lost_text(guard, None)
                }
            };
            if self.args.on_lost == OnLost::Kill {
                return Watched::Lost(lost);
            }
            self.warned = true;
            say::failure(
                &Failure::new(Exit::Lost, lost).detail("the command goes on without the lock (--on-lost warn)"),
            );
        }
    }

    /// Takes note of everything that happened to children. CMD's end, if it was among it.
    fn look_after(&mut self, pid: Pid) -> Option<WaitStatus> {
        while let Reaped::Child(child, status) = tree::reap() {
            if child != pid {
                continue;
            }
            if status.stopped() {
                self.stops += 1;
                // Not by the signal that stopped CMD: that one may reach the front from the terminal as
                // well, while it goes on, and it would stop twice.
                self.tell(&ToFront::Stop(Signal::SIGSTOP));
            } else if status.continued() {
                self.wake_front();
            } else {
                return Some(status);
            }
        }
        None
    }

    /// A signal that somebody sent to the front is meant for CMD. CMD's end, should it show on the way.
    fn pass_on(&mut self, came: Came, pid: Pid) -> Option<WaitStatus> {
        // Shells and editors stop and continue the whole group, and CMD is part of it.
        if came.signal == Signal::SIGCONT {
            self.stops = self.stops.saturating_sub(1);
            if self.stops > 0 || !tree::is_stopped(pid) {
                return None;
            }
            // Stopped still, or once more? A stop that is news is told to the front, and stays.
            if let Some(status) = self.look_after(pid) {
                return Some(status);
            }
            if self.stops > 0 {
                return None;
            }
        } else if came.by_terminal || (stops(came.signal) && tree::is_stopped(pid)) {
            return None;
        }
        if let Some(signal) = rustix::process::Signal::from_named_raw(came.signal as i32) {
            let _ = kill_process(pid, signal);
        }
        None
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

    fn end_of(status: WaitStatus) -> End {
        match status.terminating_signal() {
            Some(signal) => End {
                code: u8::try_from(128 + signal).unwrap_or(u8::MAX),
                // A shell goes on with its script unless it sees that this ended the job.
                by: (signal == Signal::SIGINT as i32).then_some(Signal::SIGINT),
            },
            None => Exit::Code(status.exit_status().and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX)).into(),
        }
    }

    fn tell(&self, message: &ToFront) {
        self.link.send(message, None);
    }

    /// The front stands still: there is nothing any more to stand still for.
    fn wake_front(&self) {
        if self.stops > 0
            && let Some(front) = self.front
            && getppid() == Some(front)
        {
            let _ = kill_process(front, rustix::process::Signal::CONT);
        }
    }
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

fn lost_text(guard: &Lease, why: Option<LossReason>) -> String {
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
