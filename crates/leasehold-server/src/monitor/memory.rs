//! What the leader remembers between passes. It remembers only holders with something to report.

use std::collections::HashMap;
use std::time::Duration;

use leasehold::LockName;
use leasehold::config::Cleanup;
use leasehold::inspect::{Holder, HolderId};

use super::judge::{Past, TimeoutLevel};
use crate::alerts::{Alert, Condition};

/// The most holders that are remembered. Further holders are judged without a past.
const MAX_HOLDERS: usize = 10_000;
/// The most conditions that are reported, the worst first.
const MAX_CONDITIONS: usize = 1_000;

#[derive(Debug, Default)]
pub(super) struct Memory {
    holders: HashMap<LockName, HolderRecord>,
}

/// What is remembered of one holder.
#[derive(Debug)]
pub(super) struct HolderRecord {
    pub(super) id: HolderId,
    pub(super) past: Past,
    /// The conditions found in the last pass.
    pub(super) conditions: Vec<Condition>,
    /// The level at which the holder was last asked to finish.
    pub(super) asked: Option<TimeoutLevel>,
    pub(super) attempts: EvictionAttempts,
    /// The last pass that saw the holder.
    pub(super) pass: u64,
}

/// The failed evictions of one holder.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct EvictionAttempts {
    failed: u32,
    retry_at_ms: u64,
}

impl EvictionAttempts {
    /// Whether an attempt, first or repeated, is due.
    pub(super) fn may_retry(self, now_ms: u64, cleanup: &Cleanup) -> bool {
        self.failed == 0 || (!self.exhausted(cleanup) && now_ms >= self.retry_at_ms)
    }

    pub(super) fn record_failure(&mut self, now_ms: u64, cleanup: &Cleanup) {
        self.failed = self.failed.saturating_add(1);
        self.retry_at_ms = now_ms.saturating_add(u64::try_from(cleanup.retry_delay.as_millis()).unwrap_or(u64::MAX));
    }

    /// Whether all attempts have failed.
    pub(super) fn exhausted(self, cleanup: &Cleanup) -> bool {
        self.failed > cleanup.max_retry
    }
}

impl HolderRecord {
    fn new(holder: &Holder, now_ms: u64) -> Self {
        Self::recalled(holder.id, Past::new(holder, now_ms))
    }

    fn recalled(id: HolderId, past: Past) -> Self {
        Self { id, past, conditions: Vec::new(), asked: None, attempts: EvictionAttempts::default(), pass: 0 }
    }
}

impl Memory {
    /// Takes the record of a holder and updates it with this observation. The caller puts it back if it matters later.
    pub(super) fn take(&mut self, name: &LockName, holder: &Holder, now_ms: u64) -> HolderRecord {
        match self.holders.remove(name).filter(|record| record.id == holder.id) {
            Some(mut record) => {
                record.past.seen_again(holder, now_ms);
                record
            }
            None => HolderRecord::new(holder, now_ms),
        }
    }

    /// Restores what another server knew of the holders it reported. Otherwise their alerts would resolve until this
    /// server had observed them for as long.
    pub(super) fn recall(&mut self, alerts: &[Alert], now_ms: u64) {
        for alert in alerts {
            let name = alert.name.as_ref().and_then(|name| LockName::new(name.as_str()).ok());
            let id = alert.holder_id.as_deref().and_then(|id| HolderId::parse(id).ok());
            let (Some(name), Some(id)) = (name, id) else { continue };
            let elapsed = Duration::try_from_secs_f64(alert.value.unwrap_or(0.0)).unwrap_or_default();
            let since_ms = alert.last_ms.saturating_sub(u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX));
            let (held_since_ms, gone_since_ms) = match &*alert.kind {
                "dead_holder" => (None, Some(since_ms)),
                kind if kind.starts_with("lock_over_") => (Some(since_ms), None),
                _ => (None, None),
            };
            let before = self.holders.remove(&name).filter(|record| record.id == id);
            let (held_before, gone_before) = before.map(|record| record.past.began()).unzip();
            let held_since_ms = held_since_ms.into_iter().chain(held_before).min().unwrap_or(alert.since_ms);
            let past = Past::recalled(held_since_ms, gone_since_ms.or(gone_before.flatten()), now_ms);
            self.put(name, HolderRecord::recalled(id, past));
        }
    }

    pub(super) fn put(&mut self, name: LockName, record: HolderRecord) {
        if self.holders.len() < MAX_HOLDERS {
            self.holders.insert(name, record);
        }
    }

    pub(super) fn forget(&mut self, name: &LockName) {
        self.holders.remove(name);
    }

    /// Returns the locks that a pass has not seen.
    pub(super) fn not_seen_in(&self, pass: u64) -> Vec<LockName> {
        self.holders.iter().filter(|(_, record)| record.pass != pass).map(|(name, _)| name.clone()).collect()
    }

    /// Returns all current conditions.
    pub(super) fn conditions(&self) -> Vec<Condition> {
        let mut all: Vec<Condition> = self.holders.values().flat_map(|record| &record.conditions).cloned().collect();
        if all.len() > MAX_CONDITIONS {
            tracing::warn!(
                found = all.len(),
                reported = MAX_CONDITIONS,
                "too many conditions: only the worst are reported"
            );
            all.sort_by(|a, b| (b.level, &a.name, a.kind).cmp(&(a.level, &b.name, b.kind)));
            all.truncate(MAX_CONDITIONS);
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
        let mut attempts = EvictionAttempts::default();
        assert!(attempts.may_retry(0, &cleanup));
        attempts.record_failure(1_000, &cleanup);
        assert!(!attempts.may_retry(60_999, &cleanup) && attempts.may_retry(61_000, &cleanup), "a minute later");
        attempts.record_failure(61_000, &cleanup);
        assert!(attempts.may_retry(121_000, &cleanup) && !attempts.exhausted(&cleanup), "and again");
        attempts.record_failure(121_000, &cleanup);
        assert!(!attempts.may_retry(u64::MAX, &cleanup) && attempts.exhausted(&cleanup), "two retries were all");
    }
}
