//! A pass over every lock, and between passes a slow search for locks that are not in the index.

use std::time::Duration;

use futures_util::future::try_join_all;
use leasehold::config::Cleanup;
use leasehold::inspect::{Cursor, Holder};
use leasehold::{Error, LockName};
use tokio::time::{Instant, sleep_until};

use super::act::{Effect, act};
use super::judge::{Action, Rules, judge};
use super::memory::{HolderRecord, Memory};
use crate::App;
use crate::alerts::{Level, Source};
use crate::clock::unix_ms;

/// How many locks are read at a time, so that each reply stays small and other clients need not wait long.
const PAGE_LEN: usize = 500;
/// How many locks are inspected at the same time.
const CONCURRENCY: usize = 64;
/// The search for foreign locks rests this many times as long as it works: it uses at most a twentieth of the time.
const REST_FACTOR: u32 = 19;
const MIN_REST: Duration = Duration::from_millis(1);

/// The work of the leader.
pub(super) struct Leader {
    app: App,
    rules: Rules,
    cleanup: Cleanup,
    memory: Memory,
    pass: u64,
    search: Search,
}

/// The search for locks that are not in the index.
#[derive(Default)]
struct Search {
    after: Option<Cursor>,
    /// Foreign locks found since the search last started.
    foreign: usize,
    /// Foreign locks found by the previous search.
    foreign_before: usize,
}

/// The locks seen by a pass.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PassCounts {
    pub(super) locks: usize,
    pub(super) foreign: usize,
}

impl Leader {
    pub(super) fn new(app: App) -> Self {
        let section = &app.settings.monitor;
        let (rules, cleanup) = (Rules::from(section), section.cleanup.clone());
        let mut memory = Memory::default();
        memory.recall(&app.alerts.firing_from(Source::Monitor), unix_ms());
        Self { app, rules, cleanup, memory, pass: 0, search: Search::default() }
    }

    /// Inspects every lock once: all locks in the index, and the other remembered ones.
    pub(super) async fn pass(&mut self) -> Result<PassCounts, Error> {
        self.pass += 1;
        let mut counts = PassCounts::default();
        let mut after = None;
        loop {
            let page = self.app.locks.long_held_page(after, PAGE_LEN).await?;
            for (name, holder) in page.locks {
                counts.locks += 1;
                counts.foreign += usize::from(holder.foreign);
                self.consider(name, holder).await;
            }
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        for names in self.memory.not_seen_in(self.pass).chunks(CONCURRENCY) {
            let holders = try_join_all(names.iter().map(|name| self.app.locks.holder(name))).await?;
            for (name, holder) in names.iter().zip(holders) {
                match holder {
                    Some(holder) => self.consider(name.clone(), holder).await,
                    None => self.memory.forget(name),
                }
            }
        }
        let foreign = counts.foreign.max(self.search.foreign_before);
        self.app.alerts.report(Source::Monitor, self.memory.conditions());
        Ok(PassCounts { locks: counts.locks - counts.foreign + foreign, foreign })
    }

    /// Searches the whole store once, slowly, until `end` at the latest.
    pub(super) async fn search_until(&mut self, end: Instant) {
        loop {
            let began = Instant::now();
            if began >= end {
                return;
            }
            match self.app.locks.list("", self.search.after.take(), PAGE_LEN).await {
                Ok(page) => {
                    for (name, holder) in page.locks {
                        self.search.foreign += usize::from(holder.foreign);
                        self.consider(name, holder).await;
                    }
                    self.search.after = page.next;
                }
                // Start again: the cursor may no longer be valid.
                Err(error) => {
                    tracing::debug!(error = %format_args!("{error:#}"), "the search for foreign locks was interrupted");
                }
            }
            if self.search.after.is_none() {
                self.search.foreign_before = std::mem::take(&mut self.search.foreign);
                return sleep_until(end).await;
            }
            let rest = began.elapsed().saturating_mul(REST_FACTOR).max(MIN_REST);
            sleep_until(end.min(Instant::now() + rest)).await;
        }
    }

    /// Judges one holder and carries out the verdict.
    async fn consider(&mut self, name: LockName, holder: Holder) {
        let now_ms = unix_ms();
        let mut record = self.memory.take(&name, &holder, now_ms);
        let verdict = judge(&name, &holder, &record.past, now_ms, &self.rules);
        record.conditions = verdict.conditions;
        record.pass = self.pass;
        if let Some(action) = verdict.action
            && !self.carry_out(&name, &holder, action, &mut record, now_ms).await
        {
            return;
        }
        if record.attempts.exhausted(&self.cleanup) {
            for condition in &mut record.conditions {
                condition.level = Level::Critical;
                condition.message += "; the eviction failed and is not retried";
            }
        }
        if verdict.remember {
            self.memory.put(name, record);
        }
    }

    /// Carries out an action. Returns `false` if there is nothing left to remember of this holder.
    async fn carry_out(
        &self,
        name: &LockName,
        holder: &Holder,
        action: Action,
        record: &mut HolderRecord,
        now_ms: u64,
    ) -> bool {
        let asks = match action {
            Action::Ask { at, .. } if record.asked >= Some(at) => return true,
            Action::Ask { at, .. } => Some(at),
            Action::Evict { .. } => None,
        };
        if !record.attempts.may_retry(now_ms, &self.cleanup) {
            return true;
        }
        match act(&self.app, name, holder, action, now_ms).await {
            Effect::NoLongerHeld => return false,
            Effect::StillHeld => {
                record.attempts = Default::default();
                record.asked = asks.or(record.asked);
            }
            Effect::Failed => {
                record.attempts.record_failure(now_ms, &self.cleanup);
                if record.attempts.exhausted(&self.cleanup) {
                    tracing::error!(%name, holder = %holder.id, "all attempts to evict the holder failed: an operator must act");
                }
            }
        }
        true
    }
}
