//! Faults for particular commands.

use std::time::Duration;

use tokio::sync::watch;

use super::Command;

/// A handle to a fault, which counts how often it has happened.
#[derive(Clone, Debug)]
pub struct Rule {
    hits: watch::Sender<usize>,
    removed: watch::Sender<bool>,
}

impl Rule {
    /// Returns how often the fault has happened: a reply was dropped or held, a command was held, both sides were reset.
    pub fn hits(&self) -> usize {
        *self.hits.borrow()
    }

    /// Waits until the fault has happened `hits` times.
    pub async fn wait_for_hits(&self, hits: usize) {
        // Fails only without a sender, and `self` has one.
        let _ = self.hits.subscribe().wait_for(|so_far| *so_far >= hits).await;
    }

    /// Removes the rule for later commands. A command in flight keeps its fault.
    pub fn remove(&self) {
        self.removed.send_replace(true);
    }

    /// Waits until the rule is removed.
    pub(super) async fn removed(&self) {
        // Fails only without a sender, and `self` has one.
        let _ = self.removed.subscribe().wait_for(|removed| *removed).await;
    }

    pub(super) fn count_hit(&self) {
        self.hits.send_modify(|hits| *hits += 1);
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    SwallowReply,
    HoldCommand(Duration),
    HoldReply(Duration),
    CutAfter,
    CutBefore,
    HoldBack,
}

/// The proxy's side of a rule.
pub(super) struct ActiveRule {
    matches: Box<dyn Fn(&Command) -> bool + Send + Sync>,
    fault: Fault,
    times_left: usize,
    rule: Rule,
}

impl ActiveRule {
    pub(super) fn new(
        matches: impl Fn(&Command) -> bool + Send + Sync + 'static,
        fault: Fault,
        times: usize,
    ) -> (Self, Rule) {
        let rule = Rule { hits: watch::Sender::new(0), removed: watch::Sender::new(false) };
        (Self { matches: Box::new(matches), fault, times_left: times, rule: rule.clone() }, rule)
    }

    pub(super) fn is_live(&self) -> bool {
        self.times_left > 0 && !*self.rule.removed.borrow()
    }

    /// Applies the rule to a command, if it matches.
    pub(super) fn take(&mut self, command: &Command) -> Option<(Fault, Rule)> {
        if !(self.matches)(command) {
            return None;
        }
        self.times_left -= 1;
        Some((self.fault, self.rule.clone()))
    }
}
