//! The keeper while CMD runs: it sends renewals and signals to the guardian, and the guardian's reports to the front.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use leasehold::lease::Moment;
use nix::sys::signal::Signal;
use rustix::process::{Pid, getpgid, getpgrp};
use tokio::io::unix::AsyncFd;

use super::front_messages::ToFront;
use super::guardian_messages::{KillSchedule, Order, Report};
use super::keeper::{Keeper, lost_text, ttl, until};
use super::lease::Lease;
use super::signal_target::{SentTo, SignalMatcher};
use crate::cli::OnLost;
use crate::exit::{Exit, Failure};
use crate::output;
use crate::signals::{ReceivedSignal, SignalReader, is_termination};

/// If CMD is not started within this time after a signal that ends it, its start hangs, and the signal ends the run.
const START_TIMEOUT: Duration = Duration::from_secs(1);

/// Why the supervision ended.
pub(super) enum Outcome {
    /// CMD ended.
    Ended(ExitStatus),
    /// CMD could not be started.
    NotStarted(io::Error),
    /// The lease was lost, or nearly over, before CMD was started.
    TooLate,
    /// The lease is lost for this reason, and CMD is to be terminated.
    Lost(String),
    /// The guardian has ended CMD, because no renewal reached it in time.
    Dead { not_permitted: Vec<i32> },
    /// The front was killed.
    FrontDied,
    /// The guardian was killed.
    GuardianDied,
    /// This signal arrived, and the start of CMD hangs.
    Cancelled(Signal),
}

/// The state of CMD, and the signals that it is to receive.
#[derive(Default)]
struct Supervision {
    matcher: SignalMatcher,
    /// CMD's process id, and when it was started.
    command: Option<(Pid, Moment)>,
    /// Signals that are not forwarded yet, because CMD is not started.
    pending: Vec<(ReceivedSignal, SentTo)>,
    /// When a start that hangs is given up, and the signal that asks for it.
    give_up_start: Option<(Moment, Signal)>,
    /// How often CMD has stopped, as far as the guardian has reported.
    stops: u32,
    /// The end of the lease that was last sent to the guardian.
    sent_valid_until: Option<Moment>,
}

impl Keeper {
    /// Runs until CMD ends, the lease is lost, or one of the other processes is killed.
    pub(super) async fn supervise(&mut self, guard: &Lease, signals: &AsyncFd<SignalReader>) -> Outcome {
        let mut watch = Supervision::default();
        loop {
            let valid_until = guard.valid_until();
            self.send_lease(&mut watch, valid_until);
            let give_up_at = self.deadlines.give_up_at(valid_until);
            // Each renewal is sent well before the guardian would act.
            let send_at = Moment::now() + ttl(&self.args).duration() / 8;
            let give_up_at = (!self.warned).then_some(give_up_at);
            let wake_at = watch.due_at().into_iter().chain(give_up_at).fold(send_at, Moment::min);
            let lost = tokio::select! {
                biased;
                report = self.guardian.next() => match self.handle_report(&mut watch, report) {
                    Some(outcome) => return outcome,
                    None => continue,
                },
                () = read_own_signals(signals, &mut watch.matcher, &mut watch.pending) => {
                    self.forward(&mut watch);
                    continue;
                }
                signal = self.channel.next_signal() => {
                    let Some(received) = signal else { return Outcome::FrontDied };
                    self.handle_signal(&mut watch, received);
                    continue;
                }
                why = guard.lost(), if !self.warned => lost_text(guard, Some(why)),
                () = until(wake_at) => {
                    let now = Moment::now();
                    if let Some(signal) = watch.overdue_start(now) {
                        return Outcome::Cancelled(signal);
                    }
                    while let Some(settled) = watch.matcher.settled(now) {
                        watch.pending.push(settled);
                    }
                    self.forward(&mut watch);
                    // The lease may have been renewed meanwhile.
                    if self.warned || now < self.deadlines.give_up_at(guard.valid_until()) {
                        continue;
                    }
                    lost_text(guard, None)
                }
            };
            if self.args.on_lost == OnLost::Kill {
                return Outcome::Lost(lost);
            }
            self.warned = true;
            output::failure(
                &Failure::new(Exit::Lost, lost).detail("the command goes on without the lock (--on-lost warn)"),
            );
        }
    }

    /// Sends the guardian the end of the lease if it has changed. The guardian acts by it if no other order follows.
    fn send_lease(&self, watch: &mut Supervision, valid_until: Moment) {
        if let Some(schedule) = self.unattended_schedule(valid_until)
            && watch.sent_valid_until != Some(valid_until)
        {
            self.guardian.send(&Order::Lease(schedule), &[]);
            watch.sent_valid_until = Some(valid_until);
        }
    }

    /// Returns when the guardian acts if it receives no other order; `None` with `--on-lost warn`.
    pub(super) fn unattended_schedule(&self, valid_until: Moment) -> Option<KillSchedule> {
        (self.args.on_lost == OnLost::Kill).then(|| self.deadlines.unattended(valid_until))
    }

    /// Handles a report of the guardian. Returns the outcome if the report ends the supervision.
    fn handle_report(&mut self, watch: &mut Supervision, report: Option<Report>) -> Option<Outcome> {
        match report {
            None => return Some(Outcome::GuardianDied),
            Some(Report::Started { pid, at }) => {
                watch.command = Some((pid, at));
                watch.give_up_start = None;
                self.forward(watch);
            }
            Some(Report::NotStarted(errno)) => {
                return Some(Outcome::NotStarted(io::Error::from_raw_os_error(errno)));
            }
            Some(Report::TooLate) => return Some(Outcome::TooLate),
            Some(Report::Stopped) => {
                self.stops += 1;
                watch.stops += 1;
                // Not by the signal that stopped CMD: the terminal may send that one to the front as well, just after the
                // front was continued, and the front would stop twice.
                self.send_front(&ToFront::Stop(Signal::SIGSTOP));
            }
            Some(Report::Continued) => self.continue_front(),
            Some(Report::Ended(status)) => {
                self.guardian.send(&Order::Acknowledge, &[]);
                return Some(Outcome::Ended(ExitStatus::from_raw(status)));
            }
            Some(Report::Dead { not_permitted }) => {
                self.guardian.send(&Order::Acknowledge, &[]);
                return Some(Outcome::Dead { not_permitted });
            }
        }
        None
    }

    /// Handles a signal that the front received.
    fn handle_signal(&mut self, watch: &mut Supervision, received: ReceivedSignal) {
        // Shells and editors stop and continue the whole group, and CMD is part of it.
        if received.signal == Signal::SIGCONT {
            self.stops = self.stops.saturating_sub(1);
            if self.stops == 0 {
                self.guardian.send(&Order::Continue(watch.stops), &[]);
            }
            return;
        }
        watch.pending.extend(watch.matcher.front_received(received, Moment::now(), self.stops > 0));
        self.forward(watch);
    }

    /// Forwards the signals that CMD has not received itself.
    fn forward(&self, watch: &mut Supervision) {
        let Some((pid, started_at)) = watch.command else {
            if let Some((received, _)) = watch.pending.iter().find(|(received, _)| is_termination(received.signal)) {
                watch.give_up_start.get_or_insert((Moment::now() + START_TIMEOUT, received.signal));
            }
            return;
        };
        for (received, to) in watch.pending.drain(..) {
            let has_received = match to {
                SentTo::Front => false,
                // A signal from the terminal does not reach a command that has left the group, as without `leasehold`.
                SentTo::Group(at) => {
                    at >= started_at && (received.sent_by_terminal() || getpgid(Some(pid)) == Ok(getpgrp()))
                }
            };
            if !has_received {
                self.guardian.send(&Order::Signal(received.signal), &[]);
            }
        }
    }
}

impl Supervision {
    /// Returns when something is due.
    fn due_at(&self) -> Option<Moment> {
        self.matcher.settles_at().into_iter().chain(self.give_up_start.map(|(at, _)| at)).min()
    }

    /// Returns the signal that ends the run, if the start of CMD hangs.
    fn overdue_start(&self, now: Moment) -> Option<Signal> {
        self.give_up_start.filter(|(at, _)| now >= *at).map(|(_, signal)| signal)
    }
}

/// Reads the signals that the keeper itself received.
///
/// Cancel safe: it awaits only before it reads.
async fn read_own_signals(
    signals: &AsyncFd<SignalReader>,
    matcher: &mut SignalMatcher,
    pending: &mut Vec<(ReceivedSignal, SentTo)>,
) {
    let Ok(mut ready) = signals.readable().await else { return std::future::pending().await };
    let now = Moment::now();
    while let Some(received) = signals.get_ref().next() {
        if received.signal != Signal::SIGCONT {
            pending.extend(matcher.keeper_received(received, now));
        }
    }
    ready.clear_ready();
}
