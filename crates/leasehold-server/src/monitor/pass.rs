//! One pass over every lock, and between two passes a slow search for those that nobody enters in the index.

use std::time::Duration;

use futures_util::future::try_join_all;
use leasehold::config::Cleanup;
use leasehold::{Cursor, Error, Holder, LockName};
use tokio::time::{Instant, sleep_until};

use super::act::{End, act};
use super::judge::{Action, Rules, judge};
use super::memory::{Memory, Remembered};
use crate::alerts::{Level, Source};
use crate::{App, wall_ms};

/// Locks asked for at once: an answer of the store stays small, and nobody else waits for long.
const PAGE: usize = 500;
/// Locks looked at one by one at the same time.
const AT_ONCE: usize = 64;
/// The search for foreign locks rests so many times as long as it worked: at most a twentieth of the time is work.
const REST: u32 = 19;
const SHORTEST_REST: Duration = Duration::from_millis(1);

/// The leader at work.
pub(super) struct Watch {
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
    /// Foreign locks found since it began anew.
    foreign: usize,
    /// How many it found the last time.
    foreign_before: usize,
}

/// What a pass saw.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seen {
    pub(super) locks: usize,
    pub(super) foreign: usize,
}

impl Watch {
    pub(super) fn new(app: App) -> Self {
        let section = &app.settings.monitor;
        let (rules, cleanup) = (Rules::from(section), section.cleanup.clone());
        let mut memory = Memory::default();
        memory.recall(&app.alerts.of(Source::Monitor), wall_ms());
        Self { app, rules, cleanup, memory, pass: 0, search: Search::default() }
    }

    /// Looks at every lock once: all that the index has, and whatever else is remembered.
    pub(super) async fn pass(&mut self) -> Result<Seen, Error> {
        self.pass += 1;
        let mut seen = Seen::default();
        let mut after = None;
        loop {
            let page = self.app.locks.long_held_page(after, PAGE).await?;
            for (name, holder) in page.locks {
                seen.locks += 1;
                seen.foreign += usize::from(holder.foreign);
                self.consider(name, holder).await;
            }
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        for names in self.memory.not_seen_by(self.pass).chunks(AT_ONCE) {
            let holders = try_join_all(names.iter().map(|name| self.app.locks.holder(name))).await?;
            for (name, holder) in names.iter().zip(holders) {
                match holder {
                    Some(holder) => self.consider(name.clone(), holder).await,
                    None => self.memory.forget(name),
                }
            }
        }
        let foreign = seen.foreign.max(self.search.foreign_before);
        self.app.alerts.holding(Source::Monitor, self.memory.conditions());
        Ok(Seen { locks: seen.locks - seen.foreign + foreign, foreign })
    }

    /// Searches the whole store once, slowly, as far as it comes until then.
    pub(super) async fn search_until(&mut self, end: Instant) {
        loop {
            let began = Instant::now();
            if began >= end {
                return;
            }
            match self.app.locks.list("", self.search.after.take(), PAGE).await {
                Ok(page) => {
                    for (name, holder) in page.locks {
                        self.search.foreign += usize::from(holder.foreign);
                        self.consider(name, holder).await;
                    }
                    self.search.after = page.next;
                }
                // It begins anew: what a cursor was worth is not known any more.
                Err(error) => tracing::debug!(%error, "the search for foreign locks was interrupted"),
            }
            if self.search.after.is_none() {
                self.search.foreign_before = std::mem::take(&mut self.search.foreign);
                return sleep_until(end).await;
            }
            let rest = began.elapsed().saturating_mul(REST).max(SHORTEST_REST);
            sleep_until(end.min(Instant::now() + rest)).await;
        }
    }

    /// Judges one holder, and does what is right.
    async fn consider(&mut self, name: LockName, holder: Holder) {
        let now_ms = wall_ms();
        let mut known = self.memory.take(&name, &holder, now_ms);
        let verdict = judge(&name, &holder, &known.past, now_ms, &self.rules);
        known.conditions = verdict.conditions;
        known.pass = self.pass;
        if let Some(action) = verdict.action
            && !self.carry_out(&name, &holder, action, &mut known, now_ms).await
        {
            return;
        }
        if known.tries.given_up(&self.cleanup) {
            for condition in &mut known.conditions {
                condition.level = Level::Critical;
                condition.message += "; taking it away failed, and is not tried again";
            }
        }
        if verdict.remember {
            self.memory.put(name, known);
        }
    }

    /// `false`: there is nothing left to remember of this holder.
    async fn carry_out(
        &self,
        name: &LockName,
        holder: &Holder,
        action: Action,
        known: &mut Remembered,
        now_ms: u64,
    ) -> bool {
        let asks = match action {
            Action::Ask { at, .. } if known.asked >= Some(at) => return true,
            Action::Ask { at, .. } => Some(at),
            Action::Evict { .. } => None,
        };
        if !known.tries.may_begin(now_ms, &self.cleanup) {
            return true;
        }
        match act(&self.app, name, holder, action, now_ms).await {
            End::Over => return false,
            End::Told => {
                known.tries = Default::default();
                known.asked = asks.or(known.asked);
            }
            End::Failed => {
                known.tries.failed(now_ms, &self.cleanup);
                if known.tries.given_up(&self.cleanup) {
                    tracing::error!(%name, holder = %holder.id, "given up: it stays as it is until somebody acts");
                }
            }
        }
        true
    }
}
