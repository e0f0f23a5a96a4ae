//! The process that holds the lease: it takes it, starts CMD, watches both, and gives it back.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use leasehold::clock::Moment;
use leasehold::{Done, LockManager, LossReason, Owner, ResultSlot, Started, Ttl};
use nix::sys::signal::Signal;
use rustix::process::{Pid, WaitStatus, getppid, kill_process};
use tokio::signal::unix::SignalKind;

use super::command::{self, Start};
use super::deadline::Deadlines;
use super::lease::Lease;
use super::link::{Ear, Link, Read, ToFront, ToKeeper};
use super::signals::{Blocked, Came, Caught, ends, stops};
use super::tee::Tee;
use super::tree::{self, Reaped};
use super::{KEEPER, held, let_go_of_stdio, refused, result, waiting};
use crate::cli::{OnLost, RunArgs};
use crate::exit::{Exit, Failure};
use crate::say;
use crate::store::Choice;

/// A child that has to be killed is looked for again this often.
const AGAIN: Duration = Duration::from_millis(5);

/// How the run ended, for the front.
struct End {
    code: u8,
    /// The signal the front is to end by if it got it, too, so that a shell sees it.
    by: Option<Signal>,
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

struct Keeper {
    args: RunArgs,
    json: bool,
    link: Ear,
    children: tokio::signal::unix::Signal,
    front: Option<Pid>,
    blocked: Blocked,
    owner: Owner,
    deadlines: Deadlines,
    locks: Option<LockManager>,
    /// How often the front was told to stop and has not gone on since.
    stops: u32,
    /// The lease is lost, and CMD goes on as asked.
    warned: bool,
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

    /// The lock, confirmed; or how the run ends without it.
    async fn acquire(&mut self, store: &Choice) -> Result<Result<(Lease, Option<ResultSlot>), End>, Failure> {
        let asked = Self::ask(&self.args, &self.owner, store, &self.link, &mut self.locks, &self.deadlines);
        let cancelled = Self::cancelled(&self.link, &mut self.stops);
        let outcome = tokio::select! {
            biased;
            cancelled = cancelled => Err(cancelled),
            outcome = asked => Ok(outcome),
        };
        let (guard, slot) = match outcome {
            Err(by) => {
                let code = by.map_or(128 + 9, |signal| 128 + number(signal));
                // What was asked for is given back before we are gone.
                if let Some(locks) = self.locks.take() {
                    locks.shutdown().await;
                }
                return Ok(Err(End { code, by }));
            }
            Ok(Err(error)) => return Err(self.not_acquired(error).await),
            Ok(Ok(Got::Done(done))) => return self.replay(done).await.map(Err),
            Ok(Ok(Got::Lock(guard, slot))) => (guard, slot),
        };
        // Stopped while waiting: the job goes on when the shell says so.
        while self.stops > 0 {
            match self.link.hear().await {
                Some(came) if came.signal == Signal::SIGCONT => self.stops = self.stops.saturating_sub(1),
                Some(came) if ends(came.signal) => {
                    self.release(guard).await;
                    return Ok(Err(End { code: 128 + number(came.signal), by: Some(came.signal) }));
                }
                Some(_) => {}
                None => {
                    self.release(guard).await;
                    return Ok(Err(Exit::Code(128 + 9).into()));
                }
            }
        }
        Ok(Ok((guard, slot)))
    }

    /// Another one ran it: its output is ours, and its exit code.
    async fn replay(&mut self, done: Done) -> Result<End, Failure> {
        let (told, written) = tokio::sync::oneshot::channel();
        // On a thread of its own: whoever reads slowly must not keep us from being interrupted.
        std::thread::spawn(move || told.send(result::replay(&done)));
        let cancelled = Self::cancelled(&self.link, &mut self.stops);
        tokio::select! {
            written = written => {
                let ended = || Failure::new(Exit::Output, "the stored output could not be written");
                written.map_err(|_| ended())?.map(|code| Exit::Code(code).into())
            }
            by = cancelled => {
                let code = by.map_or(128 + 9, |signal| 128 + number(signal));
                Ok(End { code, by })
            }
        }
    }

    /// Opens the store and waits for the lock.
    async fn ask(
        args: &RunArgs,
        owner: &Owner,
        store: &Choice,
        link: &Ear,
        locks: &mut Option<LockManager>,
        deadlines: &Deadlines,
    ) -> Result<Got, NotGot> {
        let mut options = store.options().map_err(NotGot::Failed)?;
        options.owner = owner.clone();
        options.ttl = ttl(args);
        let locks = locks.insert(store.connect_with(options).await.map_err(NotGot::Failed)?);
        if let Some(lifeline) = locks.lifeline() {
            // Before there is anything to lose: it holds even while it is on its way.
            link.send(&ToFront::Lifeline, Some(lifeline.as_fd()));
        }
        let asked = Self::wait_for(args, locks);
        let got = if args.no_wait {
            asked.await
        } else {
            tokio::select! {
                biased;
                got = asked => got,
                () = waiting::show(locks, args, owner) => unreachable!("it never ends"),
            }
        };
        let (guard, slot) = match got? {
            Got::Lock(guard, slot) => (guard, slot),
            done @ Got::Done(_) => return Ok(done),
        };
        // A lease that was handed over is short until it is confirmed: too short to begin with.
        if Moment::now() >= deadlines.give_up_at(guard.valid_until()) {
            guard.extend(ttl(args).duration()).await.map_err(NotGot::Error)?;
        }
        Ok(Got::Lock(guard, slot))
    }

    /// The lock, GPUs, or a result, as the command line says.
    async fn wait_for(args: &RunArgs, locks: &LockManager) -> Result<Got, NotGot> {
        let wait = if args.no_wait { Some(Duration::ZERO) } else { args.wait };
        if let Some(gpu) = &args.gpu {
            let request = gpu.request(locks, args.gpus).map_err(NotGot::Failed)?.lock_timeout(ttl(args));
            let gpus = request.wait_up_to(wait.unwrap_or(Duration::MAX)).await;
            return gpus.map(|gpus| Got::Lock(gpus.into(), None)).map_err(NotGot::Error);
        }
        let Some(wish) = &args.once else {
            let name = args.name.as_ref().expect("the command line has a name, or GPUs");
            let request = locks.lock(name);
            let request = if let Some(wait) = wait { request.wait_up_to(wait) } else { request };
            return request.await.map(|guard| Got::Lock(guard.into(), None)).map_err(NotGot::Error);
        };
        let once = locks.once(wish.id.as_str()).keep(wish.keep.duration());
        let once = if let Some(wait) = wait { once.wait_up_to(wait) } else { once };
        Ok(match once.start().await.map_err(NotGot::Error)? {
            Started::Done(done) => Got::Done(done),
            Started::Run(running) => {
                let (guard, slot) = running.split();
                Got::Lock(guard.into(), Some(slot))
            }
        })
    }

    /// Waits until the front wants no lock any more: the signal that ends it, or none when it was killed.
    async fn cancelled(link: &Ear, stops_told: &mut u32) -> Option<Signal> {
        loop {
            match link.hear().await {
                None => return None,
                Some(came) if stops(came.signal) => {
                    *stops_told += 1;
                    link.send(&ToFront::Stop(came.signal), None);
                }
                Some(came) if came.signal == Signal::SIGCONT => *stops_told = stops_told.saturating_sub(1),
                Some(came) if ends(came.signal) => return Some(came.signal),
                Some(_) => {}
            }
        }
    }

    async fn not_acquired(&self, why: NotGot) -> Failure {
        match why {
            NotGot::Failed(failure) => failure,
            NotGot::Error(error) => {
                held::failure(error, self.locks.as_ref(), self.json, self.args.conflict_exit_code).await
            }
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

    /// The lease is lost: asks everything below us to end, and kills it in time.
    async fn end_tree(&mut self, guard: &Lease, why: &str) {
        let kill_at = self.deadlines.kill_at(Moment::now(), guard.valid_until());
        tree::signal_all(rustix::process::Signal::TERM);
        // What is stopped cannot end.
        tree::signal_all(rustix::process::Signal::CONT);
        say::failure(&Failure::new(Exit::Lost, why).detail("the command and all it started are being ended"));
        loop {
            let left = loop {
                match tree::reap() {
                    Reaped::Child(..) => {}
                    Reaped::Nothing => break true,
                    Reaped::Nobody => break false,
                }
            };
            if !left || Moment::now() >= kill_at {
                break;
            }
            tokio::select! {
                _ = self.children.recv() => {}
                () = until(kill_at) => {}
            }
        }
        self.kill_tree(guard.valid_until()).await;
    }

    /// Kills everything below us and waits until it is dead.
    async fn kill_tree(&mut self, at_most_until: Moment) {
        loop {
            let refused = tree::signal_all(rustix::process::Signal::KILL);
            loop {
                match tree::reap() {
                    Reaped::Child(..) => {}
                    Reaped::Nothing => break,
                    Reaped::Nobody => return,
                }
            }
            if Moment::now() >= at_most_until && !refused.is_empty() {
                let pids: Vec<String> = refused.iter().map(|pid| pid.as_raw_nonzero().to_string()).collect();
                say::talk(&format!("leasehold: not permitted to kill, and still running: {}", pids.join(" ")));
                return;
            }
            tokio::select! {
                _ = self.children.recv() => {}
                () = tokio::time::sleep(AGAIN) => {}
            }
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

    /// Gives the lock back. `false`: it was lost before that.
    async fn release(&self, guard: Lease) -> bool {
        let (name, valid_until) = (guard.name().clone(), guard.valid_until());
        let lost = guard.loss();
        match guard.release().await {
            Ok(true) => true,
            Ok(false) => {
                if !self.warned {
                    let why = lost.map_or_else(|| "somebody took it away".to_owned(), |why| why.to_string());
                    say::failure(&Failure::new(Exit::Lost, format!("the lease on {name} was lost: {why}")));
                }
                false
            }
            Err(error) => {
                let left = Moment::now().until(valid_until);
                let text = format!("{error}; {name} is free in {} at the latest", crate::duration::shown(left));
                say::failure(&Failure::new(Exit::Unreachable, text));
                // It is tried again by other means; a lease that is over needs no release.
                if let Some(locks) = &self.locks {
                    let _ = tokio::time::timeout(left, locks.shutdown()).await;
                }
                true
            }
        }
    }

    /// What was taken away from us is given back, so that the next one need not wait for its end; what is
    /// gone cannot be.
    async fn release_lost(&self, guard: Lease) {
        let left = Moment::now().until(guard.valid_until());
        let _ = tokio::time::timeout(left, guard.release()).await;
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

/// What was asked for.
enum Got {
    /// The lock; of `once`, with the place for the result.
    Lock(Lease, Option<ResultSlot>),
    /// Somebody has done it.
    Done(Done),
}

/// Why there is neither.
enum NotGot {
    Error(leasehold::Error),
    Failed(Failure),
}

/// Sleeps until then. The runtime's timer stops while the machine sleeps; a lease does not.
async fn until(moment: Moment) {
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

fn ttl(args: &RunArgs) -> Ttl {
    args.ttl.unwrap_or_default()
}

fn number(signal: Signal) -> u8 {
    u8::try_from(signal as i32).unwrap_or(0)
}

/// A program's name as an owner.
fn printable(name: &str) -> String {
    let kept: String = name.chars().filter(|c| !c.is_control()).take(64).collect();
    if kept.is_empty() { "unnamed".into() } else { kept }
}
