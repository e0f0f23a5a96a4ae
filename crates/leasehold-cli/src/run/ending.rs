//! The keeper ends what it kept: the command and all it started, and the lease.

use std::time::Duration;

use leasehold::clock::Moment;

use super::keeper::{Keeper, until};
use super::lease::Lease;
use super::tree::{self, Reaped};
use crate::exit::{Exit, Failure};
use crate::say;

/// A child that has to be killed is looked for again this often.
const AGAIN: Duration = Duration::from_millis(5);

impl Keeper {
    /// The lease is lost: asks everything below us to end, and kills it in time.
    pub(super) async fn end_tree(&mut self, guard: &Lease, why: &str) {
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
    pub(super) async fn kill_tree(&mut self, at_most_until: Moment) {
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
    pub(super) async fn release_lost(&self, guard: Lease) {
        let left = Moment::now().until(guard.valid_until());
        let _ = tokio::time::timeout(left, guard.release()).await;
    }
}
