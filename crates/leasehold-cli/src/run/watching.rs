//! The keeper while CMD runs: renewals and signals go to the guardian, its reports to the front.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use leasehold::lease::Moment;
use nix::sys::signal::Signal;
use rustix::process::{Pid, getpgid, getpgrp};
use tokio::io::unix::AsyncFd;

use super::group::{Group, To};
use super::keeper::{Keeper, lost_text, ttl, until};
use super::lease::Lease;
use super::link::ToFront;
use super::orders::{Order, Report, Times};
use crate::cli::OnLost;
use crate::exit::{Exit, Failure};
use crate::say;
use crate::signals::{Came, Inbox, ends};

/// A program that has not started this long after a signal hangs, and the signal ends the run.
const STARTS_WITHIN: Duration = Duration::from_secs(1);

/// Why watching came to an end.
pub(super) enum Watched {
    /// CMD ended.
    Ended(ExitStatus),
    /// CMD could not be started.
    NotStarted(io::Error),
    /// The lease was lost, or nearly over, before CMD was started.
    TooLate,
    /// The lease is lost, and CMD is to be ended.
    Lost(String),
    /// The guardian has ended CMD, because it did not hear from us in time.
    Dead {
        not_permitted: Vec<i32>,
    },
    FrontDied,
    GuardianDied,
    /// A signal came while CMD was being started and hung.
    Cancelled(Signal),
}

/// What is known of CMD and of the signals it should have.
#[derive(Default)]
struct Watch {
    group: Group,
    /// CMD, and when it was started.
    command: Option<(Pid, Moment)>,
    /// Signals that wait for CMD's start.
    waiting: Vec<(Came, To)>,
    /// When a start that still hangs is given up, and the signal that wanted it.
    give_up_start: Option<(Moment, Signal)>,
    /// How often CMD has stopped, as far as the guardian has reported.
    stops: u32,
    /// How long the guardian believes the lease to be good.
    told_until: Option<Moment>,
}

impl Keeper {
    /// Until CMD ends, the lease is lost, or one of the other processes is killed.
    pub(super) async fn watch(&mut self, guard: &Lease, signals: &AsyncFd<Inbox>) -> Watched {
        let mut watch = Watch::default();
        loop {
            let valid_until = guard.valid_until();
            self.tell_lease(&mut watch, valid_until);
            let give_up_at = self.deadlines.give_up_at(valid_until);
            // A renewal is told well before the guardian would act.
            let tell_at = Moment::now() + ttl(&self.args).duration() / 8;
            let give_up_at = (!self.warned).then_some(give_up_at);
            let look_at = watch.due_at().into_iter().chain(give_up_at).fold(tell_at, Moment::min);
            let lost = tokio::select! {
                biased;
                report = self.guardian.next() => match self.take_report(&mut watch, report) {
                    Some(watched) => return watched,
                    None => continue,
                },
                () = own_signals(signals, &mut watch.group, &mut watch.waiting) => {
                    self.pass_on(&mut watch);
                    continue;
                }
                heard = self.link.hear() => {
                    let Some(came) = heard else { return Watched::FrontDied };
                    self.hear(&mut watch, came);
                    continue;
                }
                why = guard.lost(), if !self.warned => lost_text(guard, Some(why)),
                () = until(look_at) => {
                    let now = Moment::now();
                    if let Some(signal) = watch.overdue_start(now) {
                        return Watched::Cancelled(signal);
                    }
                    while let Some(settled) = watch.group.settled(now) {
                        watch.waiting.push(settled);
                    }
                    self.pass_on(&mut watch);
                    // Renewed meanwhile: another day.
                    if self.warned || now < self.deadlines.give_up_at(guard.valid_until()) {
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

    /// Tells the guardian how long the lease is proven, if that is news. It acts by that when we say nothing more.
    fn tell_lease(&self, watch: &mut Watch, valid_until: Moment) {
        if let Some(times) = self.times_without_word(valid_until)
            && watch.told_until != Some(valid_until)
        {
            self.guardian.send(&Order::Lease(times), &[]);
            watch.told_until = Some(valid_until);
        }
    }

    /// When the guardian acts if we say nothing more; never with `--on-lost warn`.
    pub(super) fn times_without_word(&self, valid_until: Moment) -> Option<Times> {
        (self.args.on_lost == OnLost::Kill).then(|| self.deadlines.without_word(valid_until))
    }

    /// What the guardian says; the end of watching if that is one.
    fn take_report(&mut self, watch: &mut Watch, report: Option<Report>) -> Option<Watched> {
        match report {
            None => return Some(Watched::GuardianDied),
            Some(Report::Started { pid, at }) => {
                watch.command = Some((pid, at));
                watch.give_up_start = None;
                self.pass_on(watch);
            }
            Some(Report::NotStarted(errno)) => {
                return Some(Watched::NotStarted(io::Error::from_raw_os_error(errno)));
            }
            Some(Report::TooLate) => return Some(Watched::TooLate),
            Some(Report::Stopped) => {
                self.stops += 1;
                watch.stops += 1;
                // Not by the signal that stopped CMD: that one may reach the front from the terminal as
                // well, while it goes on, and it would stop twice.
                self.tell(&ToFront::Stop(Signal::SIGSTOP));
            }
            Some(Report::Continued) => self.wake_front(),
            Some(Report::Ended(status)) => {
                self.guardian.send(&Order::Bye, &[]);
                return Some(Watched::Ended(ExitStatus::from_raw(status)));
            }
            Some(Report::Dead { not_permitted }) => {
                self.guardian.send(&Order::Bye, &[]);
                return Some(Watched::Dead { not_permitted });
            }
        }
        None
    }

    /// The front received a signal.
    fn hear(&mut self, watch: &mut Watch, came: Came) {
        // Shells and editors stop and continue the whole group, and CMD is part of it.
        if came.signal == Signal::SIGCONT {
            self.stops = self.stops.saturating_sub(1);
            if self.stops == 0 {
                self.guardian.send(&Order::Continue(watch.stops), &[]);
            }
            return;
        }
        watch.waiting.extend(watch.group.fronts(came, Moment::now(), self.stops > 0));
        self.pass_on(watch);
    }

    /// Passes on what CMD does not have yet.
    fn pass_on(&self, watch: &mut Watch) {
        let Some((pid, started_at)) = watch.command else {
            if let Some((came, _)) = watch.waiting.iter().find(|(came, _)| ends(came.signal)) {
                watch.give_up_start.get_or_insert((Moment::now() + STARTS_WITHIN, came.signal));
            }
            return;
        };
        for (came, to) in watch.waiting.drain(..) {
            let has_it = match to {
                To::Front => false,
                // A command that has left the group is spared what a terminal sends, as without us.
                To::Group(at) => at >= started_at && (came.by_terminal() || getpgid(Some(pid)) == Ok(getpgrp())),
            };
            if !has_it {
                self.guardian.send(&Order::Signal(came.signal), &[]);
            }
        }
    }
}

impl Watch {
    /// When something has to be looked at.
    fn due_at(&self) -> Option<Moment> {
        self.group.settles_at().into_iter().chain(self.give_up_start.map(|(at, _)| at)).min()
    }

    fn overdue_start(&self, now: Moment) -> Option<Signal> {
        self.give_up_start.filter(|(at, _)| now >= *at).map(|(_, signal)| signal)
    }
}

/// Takes in the signals that the keeper itself received.
///
/// Cancel safe: it awaits only before it has taken any.
async fn own_signals(signals: &AsyncFd<Inbox>, group: &mut Group, waiting: &mut Vec<(Came, To)>) {
    let Ok(mut ready) = signals.readable().await else { return std::future::pending().await };
    let now = Moment::now();
    while let Some(came) = signals.get_ref().next() {
        if came.signal != Signal::SIGCONT {
            waiting.extend(group.own(came, now));
        }
    }
    ready.clear_ready();
}
