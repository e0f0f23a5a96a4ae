//! What the leader remembers from one look to the next: only of holders that there is something to say of.

use std::collections::HashMap;
use std::time::Duration;

use leasehold::config::Cleanup;
use leasehold::{Holder, HolderId, LockName};

use super::judge::{Past, Reached};
use crate::alerts::{Alert, Condition};

/// Holders remembered. Beyond that a new one is judged by each look alone, until others are gone.
const MOST: usize = 10_000;
/// Conditions told at once; the worst come first.
const MOST_CONDITIONS: usize = 1_000;

#[derive(Debug, Default)]
pub(super) struct Memory {
    holders: HashMap<LockName, Remembered>,
}

/// One holder.
#[derive(Debug)]
pub(super) struct Remembered {
    pub(super) id: HolderId,
    pub(super) past: Past,
    /// What was found at the last look.
    pub(super) conditions: Vec<Condition>,
    /// How far over it was when it was asked to finish.
    pub(super) asked: Option<Reached>,
    pub(super) tries: Tries,
    /// The pass that saw it last.
    pub(super) pass: u64,
}

/// The evictions of one holder that failed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tries {
    failed: u32,
    again_ms: u64,
}

impl Tries {
    /// Whether it is time to try, again or for the first time.
    pub(super) fn may_begin(self, now_ms: u64, cleanup: &Cleanup) -> bool {
        self.failed == 0 || (!self.given_up(cleanup) && now_ms >= self.again_ms)
    }

    pub(super) fn failed(&mut self, now_ms: u64, cleanup: &Cleanup) {
        self.failed = self.failed.saturating_add(1);
        self.again_ms = now_ms.saturating_add(u64::try_from(cleanup.retry_delay.as_millis()).unwrap_or(u64::MAX));
    }

    /// Whether it failed as often as it may.
    pub(super) fn given_up(self, cleanup: &Cleanup) -> bool {
        self.failed > cleanup.max_retry
    }
}

impl Remembered {
    fn new(holder: &Holder, now_ms: u64) -> Self {
        Self::recalled(holder.id, Past::new(holder, now_ms))
    }

    fn recalled(id: HolderId, past: Past) -> Self {
        Self { id, past, conditions: Vec::new(), asked: None, tries: Tries::default(), pass: 0 }
    }
}

impl Memory {
    /// What is known of a holder, with this look; taken out, to be put back if there is something to remember.
    pub(super) fn take(&mut self, name: &LockName, holder: &Holder, now_ms: u64) -> Remembered {
        match self.holders.remove(name).filter(|known| known.id == holder.id) {
            Some(mut known) => {
                known.past.seen_again(holder, now_ms);
                known
            }
            None => Remembered::new(holder, now_ms),
        }
    }

    /// What another server knew of the holders that it told of: else what they are told of would seem to be over until
    /// this one has watched them for as long.
    pub(super) fn recall(&mut self, alerts: &[Alert], now_ms: u64) {
        for alert in alerts {
            let name = alert.name.as_ref().and_then(|name| LockName::new(name.as_str()).ok());
            let id = alert.holder_id.as_deref().and_then(|id| HolderId::parse(id).ok());
            let (Some(name), Some(id)) = (name, id) else { continue };
            let figure = Duration::try_from_secs_f64(alert.value.unwrap_or(0.0)).unwrap_or_default();
            let since_ms = alert.last_ms.saturating_sub(u64::try_from(figure.as_millis()).unwrap_or(u64::MAX));
            let (held_since_ms, gone_since_ms) = match &*alert.kind {
                "dead_holder" => (None, Some(since_ms)),
                kind if kind.starts_with("lock_over_") => (Some(since_ms), None),
                _ => (None, None),
            };
            let before = self.holders.remove(&name).filter(|known| known.id == id);
            let (held_before, gone_before) = before.map(|known| known.past.began()).unzip();
            let held_since_ms = held_since_ms.into_iter().chain(held_before).min().unwrap_or(alert.since_ms);
            let past = Past::recalled(held_since_ms, gone_since_ms.or(gone_before.flatten()), now_ms);
            self.put(name, Remembered::recalled(id, past));
        }
    }

    pub(super) fn put(&mut self, name: LockName, remembered: Remembered) {
        if self.holders.len() < MOST {
            self.holders.insert(name, remembered);
        }
    }

    pub(super) fn forget(&mut self, name: &LockName) {
        self.holders.remove(name);
    }

    /// Those that a pass has not seen.
    pub(super) fn not_seen_by(&self, pass: u64) -> Vec<LockName> {
        self.holders.iter().filter(|(_, known)| known.pass != pass).map(|(name, _)| name.clone()).collect()
    }

    /// Everything that holds now.
    pub(super) fn conditions(&self) -> Vec<Condition> {
        let mut all: Vec<Condition> = self.holders.values().flat_map(|known| &known.conditions).cloned().collect();
        if all.len() > MOST_CONDITIONS {
            tracing::warn!(found = all.len(), told = MOST_CONDITIONS, "more is wrong than is told");
            all.sort_by(|a, b| (b.level, &a.name, a.kind).cmp(&(a.level, &b.name, b.kind)));
            all.truncate(MOST_CONDITIONS);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use leasehold::config::GpuLockMonitor;

    use super::*;

    #[test]
    fn a_failed_eviction_is_tried_again_as_often_as_configured() {
        let mut cleanup = GpuLockMonitor::default().cleanup;
        cleanup.max_retry = 2;
        let mut tries = Tries::default();
        assert!(tries.may_begin(0, &cleanup));
        tries.failed(1_000, &cleanup);
        assert!(!tries.may_begin(60_999, &cleanup) && tries.may_begin(61_000, &cleanup), "a minute later");
        tries.failed(61_000, &cleanup);
        assert!(tries.may_begin(121_000, &cleanup) && !tries.given_up(&cleanup), "and again");
        tries.failed(121_000, &cleanup);
        assert!(!tries.may_begin(u64::MAX, &cleanup) && tries.given_up(&cleanup), "two retries were all");
    }
}
