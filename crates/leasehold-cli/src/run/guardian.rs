//! The process that starts CMD and ends it, and does nothing else: no store, no output, nothing that can block.
//!
//! It leads a process group of its own, and from CMD's start on a session, so that neither Ctrl-Z nor a `kill -9` of the
//! job's group reaches it. When the keeper dies, or says nothing until the lease is nearly over, it ends everything CMD started.

use std::ffi::OsString;
use std::io::{self, PipeReader};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use leasehold::__private::Alarm;
use leasehold::lease::Moment;
use nix::sys::signal::Signal;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Pid, getppid, kill_process};

use super::command::{self, Start};
use super::link::{Link, Read};
use super::orders::{Order, Report, Times};
use super::tree::{self, Reaped};
use super::{GUARDIAN, let_go_of_stdio, refused};
use crate::exit::{Exit, Failure};
use crate::signals::{Blocked, Inbox, ends, stops};

/// What has to be killed is looked for again this often.
const AGAIN: Duration = Duration::from_millis(5);
/// A keeper that does not answer the report of its command's death for this long was stopped. Its lease is over: it is
/// killed, so that the run ends.
const KEEPER_ANSWERS_WITHIN: Duration = Duration::from_secs(1);

/// Waits for the order to start, and guards the command until its end.
pub(super) fn run() -> Result<Exit, Failure> {
    let _ = rustix::thread::set_name(c"lh-guardian");
    let misused = || Failure::new(Exit::Usage, format!("{GUARDIAN} is started by `leasehold run` and by nobody else"));
    let keeper = getppid();
    let link = Link::from_stdin().map_err(|_| misused())?;
    tree::adopt_orphans();
    // All of this is done while the keeper takes the lock. The keeper reads that this process ended; why it could not
    // begin is said here.
    let blocked_here = Blocked::children().and_then(|children| Ok(children.and(Blocked::now()?)));
    let blocked_here = blocked_here.map_err(|e| refused("block signals", &e))?;
    let signals = Inbox::open().map_err(|e| refused("wait for signals", &e))?;
    let children = Inbox::of_children().map_err(|e| refused("wait for a child", &e))?;
    let alarm = Alarm::new().map_err(|e| refused("set an alarm", &e))?;
    let (starter, starting) = Starting::prepare().map_err(|e| refused("start", &e))?;
    // Without a lock there is no command, and the keeper is gone before it says a word.
    let Read::Message(order, fds) = link.wait() else { return Ok(Exit::Done) };
    let Order::Start { times, group, blocked, words, fds: announced, env } = order else { return Err(misused()) };
    let fds = announced.sort(fds).ok_or_else(misused)?;
    let lifeline = fds.lifeline.as_ref().and_then(|fd| fd.try_clone().ok());
    let all: Vec<OsString> = std::env::args_os().skip(1).collect();
    let words = all.len().checked_sub(words).map(|at| all[at..].to_vec()).ok_or_else(misused)?;
    let mut guardian = Guardian {
        link,
        keeper,
        children,
        signals,
        alarm,
        starting: Some(starting),
        command: None,
        times,
        phase: Phase::Guarding,
        stops: 0,
        stopped: false,
        going_on: false,
        _lifeline: lifeline,
    };
    // This process, or the keeper, may have been stopped on the way. What came in meanwhile counts first.
    if guardian.take_orders() || !guardian.may_start() {
        guardian.tell(&Report::TooLate);
        return Ok(Exit::Done);
    }
    let blocked = Blocked::from_bits(blocked).and(blocked_here);
    let _ = starter.send(Start { words, env, group, blocked, fds });
    guardian.guard();
    Ok(Exit::Done)
}

/// CMD on its way, on a thread of its own: a program on a file system that hangs must not keep us from killing it.
struct Starting {
    outcome: Receiver<(io::Result<Pid>, Moment)>,
    /// At its end when there is an outcome.
    done: PipeReader,
}

impl Starting {
    /// Starts the thread. It waits for what to start.
    fn prepare() -> io::Result<(Sender<Start>, Self)> {
        let (done, ends_with_the_thread) = io::pipe()?;
        let (starter, wanted) = channel::<Start>();
        let (tell, outcome) = channel();
        std::thread::Builder::new().spawn(move || {
            let Ok(start) = wanted.recv() else { return };
            let started = command::start(&start);
            let _ = tell.send((started, Moment::now()));
            drop(ends_with_the_thread);
            leave_session(start.group);
        })?;
        Ok((starter, Self { outcome, done }))
    }
}

/// Moves this process from a group of its own to a session of its own.
///
/// As CMD's parent in another group of the same session it would keep CMD's group from being orphaned. Where nothing
/// else does, as in a cron job, that group would become orphaned when CMD ends, and the kernel would send SIGHUP to all
/// of it if any member were stopped. CMD has to join its group first, which it can only do within the session.
fn leave_session(group: i32) {
    // The leader of a group cannot leave its session. If either call fails, only the rule above is lost.
    let _ = rustix::process::setpgid(None, Pid::from_raw(group)).and_then(|()| rustix::process::setsid());
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The lease is good.
    Guarding,
    /// Everything was asked to end.
    Asked,
    /// Everything is being killed.
    Killing,
    /// CMD ended by itself. What it left running lives on once the keeper knows; a keeper that was killed along with
    /// CMD never does, and then it is killed.
    Ended,
}

struct Guardian {
    link: Link,
    keeper: Option<Pid>,
    children: Inbox,
    /// What is sent to this process itself.
    signals: Inbox,
    alarm: Alarm,
    starting: Option<Starting>,
    command: Option<Pid>,
    /// When to act without another word; none with `--on-lost warn`.
    times: Option<Times>,
    phase: Phase,
    /// The front was continued: a command that has not stopped anew goes on, too.
    going_on: bool,
    /// How often CMD has stopped.
    stops: u32,
    /// CMD stopped, and has not gone on since, as far as the kernel has reported. Its state now may be another: it can
    /// have stopped anew a moment ago, and a SIGCONT meant for an older stop would undo that one unseen.
    stopped: bool,
    /// While it is open the lease counts as a living process's.
    _lifeline: Option<OwnedFd>,
}

impl Guardian {
    /// Whether the lease is still good enough to begin with.
    fn may_start(&self) -> bool {
        self.phase == Phase::Guarding && self.times.is_none_or(|times| Moment::now() < times.ask_at)
    }

    fn guard(mut self) {
        loop {
            self.take_signals();
            if self.take_orders() || self.look_at_start() || self.look_after_children() || self.act_in_time() {
                return;
            }
            self.sleep();
        }
    }

    /// Until something happens.
    fn sleep(&self) {
        let mut ends = Vec::with_capacity(4);
        ends.push(PollFd::new(&self.children, PollFlags::IN));
        ends.push(PollFd::new(&self.alarm, PollFlags::IN));
        if !self.link_gone() {
            ends.push(PollFd::new(&self.link, PollFlags::IN));
        }
        ends.push(match &self.starting {
            Some(starting) => PollFd::new(&starting.done, PollFlags::IN),
            None => PollFd::new(&self.signals, PollFlags::IN),
        });
        let _ = poll(&mut ends, None);
        self.children.drain();
    }

    /// The keeper is dead: its end of the link is readable for ever.
    fn link_gone(&self) -> bool {
        self.keeper.is_none()
    }

    /// Whether the keeper knows that CMD ended.
    fn take_orders(&mut self) -> bool {
        while !self.link_gone() {
            match self.link.poll() {
                Read::Nothing => return false,
                Read::Message(Order::Bye, _) => return true,
                Read::Message(order, _) => self.obey(&order),
                // Killed: nobody renews any more.
                Read::Gone => {
                    self.keeper = None;
                    self.phase = Phase::Killing;
                }
            }
        }
        false
    }

    fn obey(&mut self, order: &Order) {
        match order {
            Order::Lease(times) => self.times = Some(*times),
            Order::End(times) => {
                self.times = Some(*times);
                self.ask();
            }
            Order::Kill => self.phase = Phase::Killing,
            Order::Signal(signal) => self.pass_on(*signal),
            // A stop that the keeper did not know of when it sent this stays.
            Order::Continue(stops) => self.going_on = *stops == self.stops,
            Order::Start { .. } | Order::Bye => {}
        }
    }

    /// Passes on what was sent to this process. No signal to the job's group comes here, so it was sent to each process of
    /// the run by itself (`pkill -f`, `start-stop-daemon --exec`). To the keeper that looks like a signal to the group,
    /// which CMD would have received.
    fn take_signals(&self) {
        // They stay pending until CMD is there.
        if self.starting.is_some() {
            return;
        }
        while let Some(came) = self.signals.next() {
            if ends(came.signal) {
                self.pass_on(came.signal);
            }
        }
    }

    /// What is stopped already cannot be stopped: the signal would stop it when it goes on.
    fn pass_on(&self, signal: Signal) {
        if let Some(pid) = self.command
            && !(stops(signal) && tree::is_stopped(pid))
            && let Some(signal) = rustix::process::Signal::from_named_raw(signal as i32)
        {
            let _ = kill_process(pid, signal);
        }
    }

    /// Whether the start failed, and there is nothing to guard.
    fn look_at_start(&mut self) -> bool {
        let Some(starting) = &self.starting else { return false };
        let Ok((started, at)) = starting.outcome.try_recv() else { return false };
        self.starting = None;
        // They are CMD's from here on, and stderr, too.
        let_go_of_stdio();
        if let Ok(nothing) = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            let _ = rustix::stdio::dup2_stderr(&nothing);
        }
        match started {
            Ok(pid) => {
                self.command = Some(pid);
                self.tell(&Report::Started { pid, at });
                false
            }
            Err(error) => {
                self.tell(&Report::NotStarted(error.raw_os_error().unwrap_or(0)));
                true
            }
        }
    }

    /// Whether all that was to be killed is dead.
    fn look_after_children(&mut self) -> bool {
        // What is being started is waited for where it is started.
        if self.starting.is_some() {
            return false;
        }
        loop {
            match self.reap() {
                News::Nothing => {
                    if std::mem::take(&mut self.going_on)
                        && self.stopped
                        && let Some(pid) = self.command
                    {
                        let _ = kill_process(pid, rustix::process::Signal::CONT);
                    }
                    return false;
                }
                // A stop that is news stays.
                News::Stopped => {
                    self.stops += 1;
                    self.stopped = true;
                    self.going_on = false;
                }
                News::Continued => self.stopped = false,
                News::Ended(status) if self.phase == Phase::Guarding => {
                    self.tell(&Report::Ended(status));
                    self.command = None;
                    self.phase = Phase::Ended;
                }
                News::Ended(_) => self.command = None,
                News::AllDead if self.phase == Phase::Ended => return false,
                News::AllDead => {
                    self.say_dead(&[]);
                    return true;
                }
            }
        }
    }

    /// What happened to CMD; others are buried on the way.
    fn reap(&self) -> News {
        loop {
            match tree::reap() {
                Reaped::Nothing => return News::Nothing,
                Reaped::Nobody => return News::AllDead,
                Reaped::Child(pid, status) if Some(pid) == self.command => {
                    if status.stopped() {
                        self.tell(&Report::Stopped);
                        return News::Stopped;
                    }
                    if status.continued() {
                        self.tell(&Report::Continued);
                        return News::Continued;
                    }
                    return News::Ended(status.as_raw());
                }
                Reaped::Child(..) => {}
            }
        }
    }

    /// Does what is due. Whether nothing more can be done.
    fn act_in_time(&mut self) -> bool {
        let now = Moment::now();
        if let Some(times) = self.times {
            if self.phase == Phase::Guarding && now >= times.ask_at {
                self.ask();
            }
            if self.phase == Phase::Asked && now >= times.kill_at {
                self.phase = Phase::Killing;
            }
        }
        let mut next = match self.phase {
            Phase::Guarding => self.times.map(|times| times.ask_at),
            Phase::Asked => self.times.map(|times| times.kill_at),
            Phase::Killing | Phase::Ended => None,
        };
        if self.phase == Phase::Killing {
            let refused = tree::signal_all(rustix::process::Signal::KILL);
            if !refused.is_empty() && self.times.is_none_or(|times| now >= times.over_at) {
                self.say_dead(&refused);
                return true;
            }
            next = Some(now + AGAIN);
        }
        self.alarm.set(next);
        false
    }

    fn ask(&mut self) {
        if matches!(self.phase, Phase::Guarding | Phase::Ended) {
            self.phase = Phase::Asked;
            tree::signal_all(rustix::process::Signal::TERM);
            // What is stopped cannot end.
            tree::signal_all(rustix::process::Signal::CONT);
        }
    }

    /// Reports that CMD and all it started is dead, and waits for the keeper to know.
    fn say_dead(&self, refused: &[Pid]) {
        let not_permitted = refused.iter().map(|pid| pid.as_raw_nonzero().get()).collect();
        self.tell(&Report::Dead { not_permitted });
        let by = Moment::now() + KEEPER_ANSWERS_WITHIN;
        while let Some(keeper) = self.keeper {
            let left = Moment::now().until(by);
            if left.is_zero() {
                if getppid() == Some(keeper) {
                    let _ = kill_process(keeper, rustix::process::Signal::KILL);
                }
                return;
            }
            let timeout = Timespec::try_from(left).ok();
            let _ = poll(&mut [PollFd::new(&self.link, PollFlags::IN)], timeout.as_ref());
            match self.link.poll() {
                Read::Message(Order::Bye, _) | Read::Gone => return,
                Read::Message(..) | Read::Nothing => {}
            }
        }
    }

    fn tell(&self, report: &Report) {
        self.link.send(report, &[]);
    }
}

/// What happened to CMD.
enum News {
    Nothing,
    Stopped,
    Continued,
    /// With this wait status.
    Ended(i32),
    /// No child is left.
    AllDead,
}
