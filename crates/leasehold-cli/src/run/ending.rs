//! The keeper ends what it kept: the command and all it started, and the lease.
//!
//! The guardian does the killing; where it was killed or stopped itself, the keeper does.

use std::time::Duration;

use leasehold::lease::Moment;

use super::keeper::{Keeper, until};
use super::lease::Lease;
use super::orders::{Order, Report};
use super::tree::{self, Reaped};
use crate::exit::{Exit, Failure};
use crate::say;

/// A child that has to be killed is looked for again this often.
const AGAIN: Duration = Duration::from_millis(5);
/// A guardian that does not report what it was to kill at once was stopped, or kills what cannot die yet.
const KILLS_WITHIN: Duration = Duration::from_millis(500);

impl Keeper {
    /// The lease is lost: has everything asked to end, and killed in time.
    pub(super) async fn end_tree(&mut self, guard: &Lease, why: &str) {
        let (now, valid_until) = (Moment::now(), guard.valid_until());
        let times = self.deadlines.lost(now, valid_until);
        self.guardian.send(&Order::End(times), &[]);
        say::failure(&Failure::new(Exit::Lost, why).detail("the command and all it started are being ended"));
        self.await_death(self.deadlines.overdue_at(now, times.kill_at), valid_until).await;
    }

    /// Has everything killed at once, and waits until it is dead.
    pub(super) async fn kill_tree(&mut self, at_most_until: Moment) {
        self.guardian.send(&Order::Kill, &[]);
        self.await_death(Moment::now() + KILLS_WITHIN, at_most_until).await;
    }

    /// Waits for the guardian's report. One that is overdue makes the killing ours.
    async fn await_death(&mut self, report_by: Moment, at_most_until: Moment) {
        loop {
            tokio::select! {
                biased;
                report = self.guardian.next() => match report {
                    Some(Report::Dead { not_permitted }) => {
                        self.guardian.send(&Order::Bye, &[]);
                        return say_not_permitted(&not_permitted);
                    }
                    Some(Report::NotStarted(_) | Report::TooLate) | None => break,
                    // CMD's own end may have come first; what it has started is ended all the same.
                    Some(Report::Started { .. } | Report::Stopped | Report::Continued | Report::Ended(_)) => {}
                },
                () = until(report_by) => break,
            }
        }
        self.kill_tree_below(at_most_until).await;
    }

    /// Kills everything below us, a guardian among it, and waits until it is dead.
    pub(super) async fn kill_tree_below(&mut self, at_most_until: Moment) {
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
                let pids: Vec<i32> = refused.iter().map(|pid| pid.as_raw_nonzero().get()).collect();
                return say_not_permitted(&pids);
            }
            tokio::select! {
                _ = self.children.recv() => {}
                () = tokio::time::sleep(AGAIN) => {}
            }
        }
    }

    /// The guardian has ended CMD without us.
    pub(super) fn say_dead(&self, why: &str, not_permitted: &[i32]) {
        say::failure(&Failure::new(Exit::Lost, why).detail("the command and all it started were ended"));
        say_not_permitted(not_permitted);
    }

    /// Gives the lock back. `false`: it was lost before that.
    pub(super) async fn release(&self, guard: Lease) -> bool {
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
                let text = format!("{error:#}; {name} is free in {} at the latest", crate::duration::shown(left));
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
    pub(super) async fn release_lost(&self, guard: Lease) {
        let left = Moment::now().until(guard.valid_until());
        let _ = tokio::time::timeout(left, guard.release()).await;
    }
}

fn say_not_permitted(pids: &[i32]) {
    if !pids.is_empty() {
        let pids: Vec<String> = pids.iter().map(ToString::to_string).collect();
        say::talk(&format!("leasehold: not permitted to kill, and still running: {}", pids.join(" ")));
    }
}
