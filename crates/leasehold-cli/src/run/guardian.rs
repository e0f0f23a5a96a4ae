//! The process that starts CMD and ends it, and does nothing else: no store, no output, nothing that can block.
//!
//! It leads a process group of its own, and from CMD's start on a session, so that neither Ctrl-Z nor a `kill -9` of the
//! job's group reaches it. When the keeper dies, or sends nothing until the lease is nearly over, the guardian ends
//! everything that CMD started.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::time::Duration;

use leasehold::__private::Alarm;
use leasehold::lease::Moment;
use nix::sys::signal::Signal;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Pid, getppid, kill_process};

use super::channel::{Channel, Received};
use super::command::Start;
use super::guardian_messages::{KillSchedule, Order, Report};
use super::starter::Starter;
use super::tree::{self, Reaped};
use super::{GUARDIAN, detach_stdio, system_error};
use crate::exit::{Exit, Failure};
use crate::signals::{BlockedSignals, SignalReader, is_stop, is_termination};

/// The interval between two rounds of killing.
const KILL_INTERVAL: Duration = Duration::from_millis(5);
/// A keeper that does not acknowledge within this time that everything is dead was stopped. Its lease is over: it is
/// killed, so that the run ends.
const ACKNOWLEDGE_TIMEOUT: Duration = Duration::from_secs(1);

/// Waits for the order to start, and guards CMD until its end.
pub(super) fn run() -> Result<Exit, Failure> {
    let _ = rustix::thread::set_name(c"lh-guardian");
    let keeper = getppid();
    let channel = Channel::from_stdin().map_err(|_| misused())?;
    tree::become_subreaper();
    // All of this is done while the keeper takes the lock. The keeper only sees that this process ended; the reason is
    // reported here.
    let blocked_here =
        BlockedSignals::child_exit().and_then(|children| Ok(children.union(BlockedSignals::forwarded()?)));
    let blocked_here = blocked_here.map_err(|e| system_error("block signals", &e))?;
    let signals = SignalReader::forwarded().map_err(|e| system_error("wait for signals", &e))?;
    let child_exits = SignalReader::child_exit().map_err(|e| system_error("wait for a child", &e))?;
    let alarm = Alarm::new().map_err(|e| system_error("set an alarm", &e))?;
    let starter = Starter::spawn().map_err(|e| system_error("start", &e))?;
    // The keeper that gets no lock ends without an order.
    let Received::Message(order, fds) = channel.wait() else { return Ok(Exit::Done) };
    let Order::Start { schedule, group, blocked, words, fds: layout, env } = order else { return Err(misused()) };
    let fds = layout.assign(fds).ok_or_else(misused)?;
    let lifeline = fds.lifeline.as_ref().and_then(|fd| fd.try_clone().ok());
    let all: Vec<OsString> = std::env::args_os().skip(1).collect();
    let words = all.len().checked_sub(words).map(|at| all[at..].to_vec()).ok_or_else(misused)?;
    let blocked = BlockedSignals::from_bits(blocked).union(blocked_here);
    let mut guardian = Guardian {
        channel,
        keeper,
        child_exits,
        signals,
        alarm,
        starter: Some(starter),
        command: None,
        schedule,
        phase: Phase::Guarding,
        stops: 0,
        stopped: false,
        continue_requested: false,
        _lifeline: lifeline,
    };
    guardian.run(Start { words, env, group, blocked, fds });
    Ok(Exit::Done)
}

fn misused() -> Failure {
    Failure::new(Exit::Usage, format!("{GUARDIAN} is started by `leasehold run` only"))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The lease is valid.
    Guarding,
    /// Everything was sent SIGTERM.
    Terminating,
    /// Everything is being killed.
    Killing,
    /// CMD ended by itself. What it left running lives on once the keeper has acknowledged that. If the keeper was killed
    /// along with CMD, everything is killed.
    Ended,
}

struct Guardian {
    channel: Channel,
    /// The keeper, until it is dead.
    keeper: Option<Pid>,
    child_exits: SignalReader,
    /// Signals to the guardian itself.
    signals: SignalReader,
    alarm: Alarm,
    /// The thread that starts CMD, until CMD is started.
    starter: Option<Starter>,
    command: Option<Pid>,
    /// When to act without another order; `None` with `--on-lost warn`.
    schedule: Option<KillSchedule>,
    phase: Phase,
    /// The front was continued, so CMD is to be continued unless it has stopped again.
    continue_requested: bool,
    /// How often CMD has stopped.
    stops: u32,
    /// CMD was stopped and not continued, as far as the kernel has reported. Its state may have changed: if it has stopped
    /// again a moment ago, a SIGCONT meant for an older stop would undo the new one unseen.
    stopped: bool,
    /// The lease counts as a living process's while this is open.
    _lifeline: Option<OwnedFd>,
}

impl Guardian {
    /// Has CMD started unless the lease is nearly over, and guards it until its end.
    fn run(&mut self, start: Start) {
        // This process, or the keeper, may have been stopped since the order was sent. Later orders count first.
        if self.take_orders() || !self.may_start() {
            self.send(&Report::TooLate);
            return;
        }
        if let Some(starter) = &self.starter {
            starter.start(start);
        }
        loop {
            self.take_signals();
            if self.take_orders() || self.take_start_result() || self.reap_children() || self.act_on_schedule() {
                return;
            }
            self.sleep();
        }
    }

    /// Returns whether the lease is valid for long enough to start CMD.
    fn may_start(&self) -> bool {
        self.phase == Phase::Guarding && self.schedule.is_none_or(|schedule| Moment::now() < schedule.terminate_at)
    }

    /// Sleeps until something happens.
    fn sleep(&self) {
        let mut sources = Vec::with_capacity(4);
        sources.push(PollFd::new(&self.child_exits, PollFlags::IN));
        sources.push(PollFd::new(&self.alarm, PollFlags::IN));
        // The channel to a dead keeper stays readable for ever.
        if self.keeper.is_some() {
            sources.push(PollFd::new(&self.channel, PollFlags::IN));
        }
        sources.push(match &self.starter {
            Some(starter) => PollFd::new(starter, PollFlags::IN),
            None => PollFd::new(&self.signals, PollFlags::IN),
        });
        let _ = poll(&mut sources, None);
        self.child_exits.drain();
    }

    /// Carries out the keeper's orders. Returns whether the keeper has acknowledged the end of CMD.
    fn take_orders(&mut self) -> bool {
        while self.keeper.is_some() {
            match self.channel.poll() {
                Received::Nothing => return false,
                Received::Message(Order::Acknowledge, _) => return true,
                Received::Message(order, _) => self.obey(&order),
                // The keeper was killed, so the lease is no longer renewed.
                Received::Closed => {
                    self.keeper = None;
                    self.phase = Phase::Killing;
                }
            }
        }
        false
    }

    fn obey(&mut self, order: &Order) {
        match order {
            Order::Lease(schedule) => self.schedule = Some(*schedule),
            Order::Terminate(schedule) => {
                self.schedule = Some(*schedule);
                self.terminate();
            }
            Order::Kill => self.phase = Phase::Killing,
            Order::Signal(signal) => self.forward(*signal),
            // The keeper may have sent this before it knew of the latest stop, which then stays.
            Order::Continue(stops) => self.continue_requested = *stops == self.stops,
            Order::Start { .. } | Order::Acknowledge => {}
        }
    }

    /// Forwards signals to this process. No signal to the job's group arrives here, so each process of the run was sent
    /// one (`pkill -f`, `start-stop-daemon --exec`). To the keeper that looks like a signal to the group, which CMD would
    /// have received.
    fn take_signals(&self) {
        // They stay pending until CMD is started.
        if self.starter.is_some() {
            return;
        }
        while let Some(received) = self.signals.next() {
            if is_termination(received.signal) {
                self.forward(received.signal);
            }
        }
    }

    /// Sends CMD a signal, unless it is stopped and the signal would stop it again as soon as it is continued.
    fn forward(&self, signal: Signal) {
        if let Some(pid) = self.command
            && !(is_stop(signal) && tree::is_stopped(pid))
            && let Some(signal) = rustix::process::Signal::from_named_raw(signal as i32)
        {
            let _ = kill_process(pid, signal);
        }
    }

    /// Reports the result of the start. Returns whether the start failed and there is nothing to guard.
    fn take_start_result(&mut self) -> bool {
        let Some((started, at)) = self.starter.as_ref().and_then(Starter::result) else { return false };
        self.starter = None;
        // The standard streams are CMD's alone from here on.
        detach_stdio();
        if let Ok(null) = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            let _ = rustix::stdio::dup2_stderr(&null);
        }
        match started {
            Ok(pid) => {
                self.command = Some(pid);
                self.send(&Report::Started { pid, at });
                false
            }
            Err(error) => {
                self.send(&Report::NotStarted(error.raw_os_error().unwrap_or(0)));
                true
            }
        }
    }

    /// Reaps children and reports what happened to CMD. Returns whether everything that was to be killed is dead.
    fn reap_children(&mut self) -> bool {
        // The thread that starts CMD reaps a child that could not execute it.
        if self.starter.is_some() {
            return false;
        }
        loop {
            match self.reap() {
                Change::None => {
                    if std::mem::take(&mut self.continue_requested)
                        && self.stopped
                        && let Some(pid) = self.command
                    {
                        let _ = kill_process(pid, rustix::process::Signal::CONT);
                    }
                    return false;
                }
                // The request to continue was meant for an earlier stop.
                Change::Stopped => {
                    self.stops += 1;
                    self.stopped = true;
                    self.continue_requested = false;
                }
                Change::Continued => self.stopped = false,
                Change::Ended(status) if self.phase == Phase::Guarding => {
                    self.send(&Report::Ended(status));
                    self.command = None;
                    self.phase = Phase::Ended;
                }
                Change::Ended(_) => self.command = None,
                Change::AllDead if self.phase == Phase::Ended => return false,
                Change::AllDead => {
                    self.report_dead(&[]);
                    return true;
                }
            }
        }
    }

    /// Returns the next change of CMD, and reaps other children on the way.
    fn reap(&self) -> Change {
        loop {
            match tree::reap() {
                Reaped::Nothing => return Change::None,
                Reaped::NoChildren => return Change::AllDead,
                Reaped::Child(pid, status) if Some(pid) == self.command => {
                    if status.stopped() {
                        self.send(&Report::Stopped);
                        return Change::Stopped;
                    }
                    if status.continued() {
                        self.send(&Report::Continued);
                        return Change::Continued;
                    }
                    return Change::Ended(status.as_raw());
                }
                Reaped::Child(..) => {}
            }
        }
    }

    /// Terminates and kills when it is time, and sets the alarm for the next step. Returns whether nothing more can be
    /// done.
    fn act_on_schedule(&mut self) -> bool {
        let now = Moment::now();
        if let Some(schedule) = self.schedule {
            if self.phase == Phase::Guarding && now >= schedule.terminate_at {
                self.terminate();
            }
            if self.phase == Phase::Terminating && now >= schedule.kill_at {
                self.phase = Phase::Killing;
            }
        }
        let mut next = match self.phase {
            Phase::Guarding => self.schedule.map(|schedule| schedule.terminate_at),
            Phase::Terminating => self.schedule.map(|schedule| schedule.kill_at),
            Phase::Killing | Phase::Ended => None,
        };
        if self.phase == Phase::Killing {
            let not_permitted = tree::signal_all(rustix::process::Signal::KILL);
            if !not_permitted.is_empty() && self.schedule.is_none_or(|schedule| now >= schedule.lease_ends_at) {
                self.report_dead(&not_permitted);
                return true;
            }
            next = Some(now + KILL_INTERVAL);
        }
        self.alarm.set(next);
        false
    }

    fn terminate(&mut self) {
        if matches!(self.phase, Phase::Guarding | Phase::Ended) {
            self.phase = Phase::Terminating;
            tree::signal_all(rustix::process::Signal::TERM);
            // A stopped process handles SIGTERM only when it is continued.
            tree::signal_all(rustix::process::Signal::CONT);
        }
    }

    /// Reports that CMD and everything it started is dead, and waits for the keeper's acknowledgement.
    fn report_dead(&self, not_permitted: &[Pid]) {
        let not_permitted = not_permitted.iter().map(|pid| pid.as_raw_nonzero().get()).collect();
        self.send(&Report::Dead { not_permitted });
        let deadline = Moment::now() + ACKNOWLEDGE_TIMEOUT;
        while let Some(keeper) = self.keeper {
            let left = Moment::now().until(deadline);
            if left.is_zero() {
                if getppid() == Some(keeper) {
                    let _ = kill_process(keeper, rustix::process::Signal::KILL);
                }
                return;
            }
            let timeout = Timespec::try_from(left).ok();
            let _ = poll(&mut [PollFd::new(&self.channel, PollFlags::IN)], timeout.as_ref());
            match self.channel.poll() {
                Received::Message(Order::Acknowledge, _) | Received::Closed => return,
                Received::Message(..) | Received::Nothing => {}
            }
        }
    }

    fn send(&self, report: &Report) {
        self.channel.send(report, &[]);
    }
}

/// What happened to CMD since the last look.
enum Change {
    None,
    Stopped,
    Continued,
    /// CMD ended with this wait status.
    Ended(i32),
    /// No child is left.
    AllDead,
}
