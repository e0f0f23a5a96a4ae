//! The keeper ends the run: it has CMD and everything that CMD started terminated, and releases the lease.
//!
//! The guardian kills. If it was killed or stopped itself, the keeper kills.

use std::time::Duration;

use leasehold::lease::Moment;

use super::guardian_messages::{Order, Report};
use super::keeper::{Keeper, until};
use super::lease::Lease;
use super::tree::{self, Reaped};
use crate::exit::{Exit, Failure};
use crate::output;

/// The interval between two rounds of killing.
const KILL_INTERVAL: Duration = Duration::from_millis(5);
/// A guardian that does not report the deaths within this time was stopped, or waits for a process that cannot die yet.
const KILL_REPORT_TIMEOUT: Duration = Duration::from_millis(500);

impl Keeper {
    /// Has everything terminated, and killed before the lost lease ends.
    pub(super) async fn terminate_tree(&mut self, guard: &Lease, why: &str) {
        let (now, valid_until) = (Moment::now(), guard.valid_until());
        let schedule = self.deadlines.lost(now, valid_until);
        self.guardian.send(&Order::Terminate(schedule), &[]);
        output::failure(&Failure::new(Exit::Lost, why).detail("the command and all it started are being ended"));
        self.wait_for_tree_exit(self.deadlines.overdue_at(now, schedule.kill_at), valid_until).await;
    }

    /// Has everything killed at once, and waits until it is dead.
    pub(super) async fn kill_tree(&mut self, lease_ends_at: Moment) {
        self.guardian.send(&Order::Kill, &[]);
        self.wait_for_tree_exit(Moment::now() + KILL_REPORT_TIMEOUT, lease_ends_at).await;
    }

    /// Waits for the guardian's report until `report_by`, and then kills without the guardian.
    async fn wait_for_tree_exit(&mut self, report_by: Moment, lease_ends_at: Moment) {
        loop {
            tokio::select! {
                biased;
                report = self.guardian.next() => match report {
                    Some(Report::Dead { not_permitted }) => {
                        self.guardian.send(&Order::Acknowledge, &[]);
                        return report_not_permitted(&not_permitted);
                    }
                    Some(Report::NotStarted(_) | Report::TooLate) | None => break,
                    // CMD may have ended by itself before; what it started is terminated all the same.
                    Some(Report::Started { .. } | Report::Stopped | Report::Continued | Report::Ended(_)) => {}
                },
                () = until(report_by) => break,
            }
        }
        self.kill_tree_below(lease_ends_at).await;
    }

    /// Kills everything below this process, including the guardian, and waits until it is dead.
    pub(super) async fn kill_tree_below(&mut self, lease_ends_at: Moment) {
        loop {
            let not_permitted = tree::signal_all(rustix::process::Signal::KILL);
            loop {
                match tree::reap() {
                    Reaped::Child(..) => {}
                    Reaped::Nothing => break,
                    Reaped::NoChildren => return,
                }
            }
            if Moment::now() >= lease_ends_at && !not_permitted.is_empty() {
                let pids: Vec<i32> = not_permitted.iter().map(|pid| pid.as_raw_nonzero().get()).collect();
                return report_not_permitted(&pids);
            }
            tokio::select! {
                _ = self.child_exits.recv() => {}
                () = tokio::time::sleep(KILL_INTERVAL) => {}
            }
        }
    }

    /// Reports that the guardian has ended CMD without an order.
    pub(super) fn report_killed(&self, why: &str, not_permitted: &[i32]) {
        output::failure(&Failure::new(Exit::Lost, why).detail("the command and all it started were ended"));
        report_not_permitted(not_permitted);
    }

    /// Releases the lock. Returns `false` if it was lost before that.
    pub(super) async fn release(&self, guard: Lease) -> bool {
        let (name, valid_until) = (guard.name().clone(), guard.valid_until());
        let lost = guard.loss();
        match guard.release().await {
            Ok(true) => true,
            Ok(false) => {
                if !self.warned {
                    let why = lost.map_or_else(|| "it was taken away".to_owned(), |why| why.to_string());
                    output::failure(&Failure::new(Exit::Lost, format!("the lease on {name} was lost: {why}")));
                }
                false
            }
            Err(error) => {
                let left = Moment::now().until(valid_until);
                let text = format!("{error:#}; {name} is free in {} at the latest", crate::duration::shown(left));
                output::failure(&Failure::new(Exit::Unreachable, text));
                // The shutdown tries other means of release; a lease that is over needs none.
                if let Some(locks) = &self.locks {
                    let _ = tokio::time::timeout(left, locks.shutdown()).await;
                }
                true
            }
        }
    }

    /// Releases a lost lease. A revoked lock passes on at once then, and not when its lease ends; if the lease is gone,
    /// there is nothing to release.
    pub(super) async fn release_lost(&self, guard: Lease) {
        let left = Moment::now().until(guard.valid_until());
        let _ = tokio::time::timeout(left, guard.release()).await;
    }
}

fn report_not_permitted(pids: &[i32]) {
    if !pids.is_empty() {
        let pids: Vec<String> = pids.iter().map(ToString::to_string).collect();
        output::message(&format!("leasehold: not permitted to kill, and still running: {}", pids.join(" ")));
    }
}
