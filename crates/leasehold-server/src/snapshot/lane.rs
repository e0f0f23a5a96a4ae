//! The tenures and waits of one lock.

use std::collections::VecDeque;

use leasehold::inspect::LockView;

use super::record::{Count, End, ObservedLock, ScannedLock, Tenure, Wait};

/// The most tenures and waits of one lock: a lock that changes hands all the time must not displace the others.
pub(super) const MAX_PER_LANE: usize = 200;
/// How far apart the times of one change may be, because events and scans use different clocks.
const CLOCK_TOLERANCE_MS: u64 = 1_500;

/// The history of one lock.
#[derive(Debug, Default)]
pub(super) struct Lane {
    pub(super) tenures: VecDeque<Tenure>,
    pub(super) waits: VecDeque<Wait>,
    pub(super) lock: Option<ObservedLock>,
    pub(super) lock_changed: u64,
}

impl Lane {
    pub(super) fn open(&self) -> Option<&Tenure> {
        self.tenures.back().filter(|tenure| tenure.ended_ms.is_none())
    }

    pub(super) fn begin(&mut self, tenure: Tenure) -> usize {
        self.tenures.push_back(tenure);
        self.tenures.len() - 1
    }

    /// Ends the open tenure, whose end no event has reported yet.
    pub(super) fn close(
        &mut self,
        at_ms: u64,
        version: u64,
        unreported: &mut Vec<(String, String, u64)>,
        counts: &mut Vec<Count>,
    ) {
        let Some(tenure) = self.tenures.back_mut().filter(|tenure| tenure.ended_ms.is_none()) else { return };
        let ran_out = tenure.details.disconnected || tenure.details.lease_ends_ms.is_some_and(|ends| ends <= at_ms);
        let end = match (tenure.details.revoked, ran_out) {
            (true, _) => End::Revoked,
            (false, true) => End::Expired,
            (false, false) => End::Released,
        };
        if end.is_bad() {
            tenure.count_bad_end(counts);
        }
        tenure.end = Some(end);
        tenure.ended_ms = Some(at_ms.max(tenure.since_ms));
        tenure.details.changed = version;
        unreported.push((tenure.name.clone(), tenure.holder_id.clone(), at_ms));
    }

    pub(super) fn apply_scan(
        &mut self,
        at_ms: u64,
        version: u64,
        found: Option<ScannedLock>,
        unreported: &mut Vec<(String, String, u64)>,
        counts: &mut Vec<Count>,
    ) {
        let Some(ScannedLock { mut lock, with_queue }) = found else {
            self.close(at_ms, version, unreported, counts);
            self.end_all_waits(at_ms, version);
            if self.lock.take().is_some() {
                self.lock_changed = version;
            }
            return;
        };
        if with_queue {
            self.apply_queue(&lock, at_ms, version);
        } else if let Some(before) = &self.lock {
            lock.waiters.clone_from(&before.lock.waiters);
        }
        if lock.held {
            let index = self.apply_holder(&lock, at_ms, version, unreported, counts);
            self.link_hand_off(index, version, counts);
            self.trim_overlaps(version);
        } else {
            self.close(at_ms, version, unreported, counts);
        }
        self.drop_oldest();
        let now = Some(ObservedLock { lock, at_ms }).filter(|seen| seen.lock.held || !seen.lock.waiters.is_empty());
        let same = match (&self.lock, &now) {
            (Some(before), Some(now)) => before.looks_like(now),
            (before, now) => before.is_none() && now.is_none(),
        };
        if !same {
            self.lock_changed = version;
            self.lock = now;
        }
    }

    /// Updates the tenure of the current holder and returns its index.
    fn apply_holder(
        &mut self,
        lock: &LockView,
        at_ms: u64,
        version: u64,
        unreported: &mut Vec<(String, String, u64)>,
        counts: &mut Vec<Count>,
    ) -> usize {
        let holder_id = lock.holder_id.as_deref().unwrap_or_default();
        let known = self.tenures.iter().rposition(|tenure| tenure.holder_id == holder_id);
        let index = known.unwrap_or_else(|| {
            self.close(lock.since_ms.unwrap_or(at_ms), version, unreported, counts);
            self.begin(Tenure::from_scan(lock, at_ms))
        });
        let tenure = &mut self.tenures[index];
        let before = tenure.clone();
        if !tenure.details.start_is_exact
            && let Some(since) = lock.since_ms
        {
            tenure.since_ms = since;
            tenure.details.start_is_exact = true;
        }
        tenure.fence = tenure.fence.or(lock.fence);
        // The event of an end may arrive before a scan that still saw the lock as held. An end that was only inferred
        // is taken back.
        if tenure.ended_ms.is_some() && !tenure.details.end_reported {
            (tenure.ended_ms, tenure.end) = (None, None);
            unreported.retain(|(name, id, _)| (name, id) != (&tenure.name, &tenure.holder_id));
        }
        if let Some(owner) = &lock.owner {
            tenure.owner.clone_from(owner);
        }
        if lock.revoked {
            tenure.details.revoked = true;
            tenure.count_bad_end(counts);
        }
        tenure.details.disconnected = lock.connected == Some(false);
        tenure.details.lease_ends_ms = lock.ttl_left_ms.map(|left| at_ms.saturating_add(left));
        if before.visible_fields() != tenure.visible_fields() || known.is_none() {
            tenure.details.changed = version;
        }
        index
    }

    /// Updates the waits. A waiter that is no longer queued has acquired the lock or given up.
    fn apply_queue(&mut self, lock: &LockView, at_ms: u64, version: u64) {
        for wait in self.waits.iter_mut().filter(|wait| wait.ended_ms.is_none()) {
            if !lock.waiters.iter().any(|waiter| waiter.ticket == wait.ticket) {
                wait.ended_ms = Some(at_ms);
                wait.changed = version;
            }
        }
        for waiter in lock.waiters.iter().take(MAX_PER_LANE) {
            let open = |wait: &&mut Wait| wait.ticket == waiter.ticket && wait.ended_ms.is_none();
            if let Some(wait) = self.waits.iter_mut().rfind(open) {
                if wait.owner != waiter.owner {
                    wait.owner.clone_from(&waiter.owner);
                    wait.changed = version;
                }
                continue;
            }
            self.waits.push_back(Wait {
                name: lock.name.clone(),
                owner: waiter.owner.clone(),
                ticket: waiter.ticket,
                since_ms: at_ms.saturating_sub(waiter.waiting_ms),
                ended_ms: None,
                changed: version,
            });
        }
    }

    fn end_all_waits(&mut self, at_ms: u64, version: u64) {
        for wait in self.waits.iter_mut().filter(|wait| wait.ended_ms.is_none()) {
            wait.ended_ms = Some(at_ms);
            wait.changed = version;
        }
    }

    /// Cuts tenures that overlap. A lock has one holder at a time, but an end may be reported late or by another clock
    /// than the store's.
    pub(super) fn trim_overlaps(&mut self, version: u64) {
        for index in 1..self.tenures.len() {
            let next = self.tenures[index].since_ms;
            let before = &mut self.tenures[index - 1];
            if before.since_ms <= next && before.ended_ms.is_some_and(|ended| ended > next) {
                before.ended_ms = Some(next);
                before.details.changed = version;
            }
        }
    }

    /// Links a tenure to the wait it began with and to the holder before it.
    pub(super) fn link_hand_off(&mut self, index: usize, version: u64, counts: &mut Vec<Count>) {
        let Some(tenure) = self.tenures.get(index).filter(|tenure| tenure.waited_ms.is_none()) else { return };
        let (owner, since_ms) = (&tenure.owner, tenure.since_ms);
        let entered = |wait: &&mut Wait| {
            let ended_near = wait.ended_ms.is_some_and(|ended| ended + CLOCK_TOLERANCE_MS >= since_ms);
            wait.owner == *owner && wait.since_ms <= since_ms && ended_near
        };
        let Some(wait) = self.waits.iter_mut().rfind(entered) else { return };
        wait.ended_ms = Some(since_ms);
        wait.changed = version;
        let waited_ms = since_ms - wait.since_ms;
        let before = index.checked_sub(1).and_then(|before| self.tenures.get(before));
        let before =
            before.filter(|before| before.ended_ms.is_some_and(|ended| ended.abs_diff(since_ms) <= CLOCK_TOLERANCE_MS));
        let after = before.map(|before| before.holder_id.clone());
        if after.is_some() {
            counts.push(Count::HandOff);
        }
        let tenure = &mut self.tenures[index];
        tenure.waited_ms = Some(waited_ms);
        tenure.after = after;
        tenure.details.changed = version;
    }

    pub(super) fn drop_oldest(&mut self) {
        while self.tenures.len() > MAX_PER_LANE {
            self.tenures.pop_front();
        }
        while self.waits.len() > MAX_PER_LANE {
            self.waits.pop_front();
        }
    }
}
