//! One lock's tenures and waits.

use std::collections::VecDeque;

use leasehold::LockView;

use super::record::{Count, End, Found, Seen, Tenure, Wait};

/// Tenures and waits of one lock: one that changes hands all the time must not push out the others.
pub(super) const PER_LANE: usize = 200;
/// So far apart may be what belongs together, because the two sources have different clocks.
const NEAR_MS: u64 = 1_500;

/// What is known of one lock.
#[derive(Debug, Default)]
pub(super) struct Lane {
    pub(super) tenures: VecDeque<Tenure>,
    pub(super) waits: VecDeque<Wait>,
    pub(super) lock: Option<Seen>,
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

    /// Whoever held it does so no more, and has not told of it yet.
    pub(super) fn close(
        &mut self,
        at_ms: u64,
        version: u64,
        untold: &mut Vec<(String, String, u64)>,
        counted: &mut Vec<Count>,
    ) {
        let Some(tenure) = self.tenures.back_mut().filter(|tenure| tenure.ended_ms.is_none()) else { return };
        let ran_out = tenure.known.gone || tenure.known.lease_ends_ms.is_some_and(|ends| ends <= at_ms);
        let end = match (tenure.known.revoked, ran_out) {
            (true, _) => End::Revoked,
            (false, true) => End::Expired,
            (false, false) => End::Released,
        };
        if end.is_bad() {
            tenure.ends_badly(counted);
        }
        tenure.end = Some(end);
        tenure.ended_ms = Some(at_ms.max(tenure.since_ms));
        tenure.known.changed = version;
        untold.push((tenure.name.clone(), tenure.holder_id.clone(), at_ms));
    }

    pub(super) fn looked(
        &mut self,
        at_ms: u64,
        version: u64,
        found: Option<Found>,
        untold: &mut Vec<(String, String, u64)>,
        counted: &mut Vec<Count>,
    ) {
        let Some(Found { mut lock, with_queue }) = found else {
            self.close(at_ms, version, untold, counted);
            self.nobody_waits(at_ms, version);
            if self.lock.take().is_some() {
                self.lock_changed = version;
            }
            return;
        };
        if with_queue {
            self.queue(&lock, at_ms, version);
        } else if let Some(before) = &self.lock {
            lock.waiters.clone_from(&before.lock.waiters);
        }
        if lock.held {
            let index = self.holder(&lock, at_ms, version, untold, counted);
            self.link(index, version, counted);
            self.one_at_a_time(version);
        } else {
            self.close(at_ms, version, untold, counted);
        }
        self.bound();
        let now = Some(Seen { lock, at_ms }).filter(|seen| seen.lock.held || !seen.lock.waiters.is_empty());
        let same = match (&self.lock, &now) {
            (Some(before), Some(now)) => before.is_like(now),
            (before, now) => before.is_none() && now.is_none(),
        };
        if !same {
            self.lock_changed = version;
            self.lock = now;
        }
    }

    /// The tenure of whoever holds it.
    fn holder(
        &mut self,
        lock: &LockView,
        at_ms: u64,
        version: u64,
        untold: &mut Vec<(String, String, u64)>,
        counted: &mut Vec<Count>,
    ) -> usize {
        let holder_id = lock.holder_id.as_deref().unwrap_or_default();
        let known = self.tenures.iter().rposition(|tenure| tenure.holder_id == holder_id);
        let index = known.unwrap_or_else(|| {
            self.close(lock.since_ms.unwrap_or(at_ms), version, untold, counted);
            self.begin(Tenure::seen(lock, at_ms))
        });
        let tenure = &mut self.tenures[index];
        let before = tenure.clone();
        if !tenure.known.exactly
            && let Some(since) = lock.since_ms
        {
            tenure.since_ms = since;
            tenure.known.exactly = true;
        }
        tenure.fence = tenure.fence.or(lock.fence);
        // The event of an end can come before the look that still saw it held; a guess is taken back.
        if tenure.ended_ms.is_some() && !tenure.known.told {
            (tenure.ended_ms, tenure.end) = (None, None);
            untold.retain(|(name, id, _)| (name, id) != (&tenure.name, &tenure.holder_id));
        }
        if let Some(owner) = &lock.owner {
            tenure.owner.clone_from(owner);
        }
        if lock.revoked {
            tenure.known.revoked = true;
            tenure.ends_badly(counted);
        }
        tenure.known.gone = lock.connected == Some(false);
        tenure.known.lease_ends_ms = lock.ttl_left_ms.map(|left| at_ms.saturating_add(left));
        if before.shown() != tenure.shown() || known.is_none() {
            tenure.known.changed = version;
        }
        index
    }

    /// Who waits now; whoever is not there any more has entered or given up.
    fn queue(&mut self, lock: &LockView, at_ms: u64, version: u64) {
        for wait in self.waits.iter_mut().filter(|wait| wait.ended_ms.is_none()) {
            if !lock.waiters.iter().any(|waiter| waiter.ticket == wait.ticket) {
                wait.ended_ms = Some(at_ms);
                wait.changed = version;
            }
        }
        for waiter in lock.waiters.iter().take(PER_LANE) {
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

    fn nobody_waits(&mut self, at_ms: u64, version: u64) {
        for wait in self.waits.iter_mut().filter(|wait| wait.ended_ms.is_none()) {
            wait.ended_ms = Some(at_ms);
            wait.changed = version;
        }
    }

    /// A lock has one holder at a time: an end that was told by another clock than the store's, or a moment late, does
    /// not reach into the time of whoever came after.
    pub(super) fn one_at_a_time(&mut self, version: u64) {
        for index in 1..self.tenures.len() {
            let next = self.tenures[index].since_ms;
            let before = &mut self.tenures[index - 1];
            if before.since_ms <= next && before.ended_ms.is_some_and(|ended| ended > next) {
                before.ended_ms = Some(next);
                before.known.changed = version;
            }
        }
    }

    /// Finds the wait that a tenure began with, and the holder before it.
    pub(super) fn link(&mut self, index: usize, version: u64, counted: &mut Vec<Count>) {
        let Some(tenure) = self.tenures.get(index).filter(|tenure| tenure.waited_ms.is_none()) else { return };
        let (owner, since_ms) = (&tenure.owner, tenure.since_ms);
        let entered = |wait: &&mut Wait| {
            let ended_near = wait.ended_ms.is_some_and(|ended| ended + NEAR_MS >= since_ms);
            wait.owner == *owner && wait.since_ms <= since_ms && ended_near
        };
        let Some(wait) = self.waits.iter_mut().rfind(entered) else { return };
        wait.ended_ms = Some(since_ms);
        wait.changed = version;
        let waited_ms = since_ms - wait.since_ms;
        let before = index.checked_sub(1).and_then(|before| self.tenures.get(before));
        let before = before.filter(|before| before.ended_ms.is_some_and(|ended| ended.abs_diff(since_ms) <= NEAR_MS));
        let after = before.map(|before| before.holder_id.clone());
        if after.is_some() {
            counted.push(Count::HandOff);
        }
        let tenure = &mut self.tenures[index];
        tenure.waited_ms = Some(waited_ms);
        tenure.after = after;
        tenure.known.changed = version;
    }

    pub(super) fn bound(&mut self) {
        while self.tenures.len() > PER_LANE {
            self.tenures.pop_front();
        }
        while self.waits.len() > PER_LANE {
            self.waits.pop_front();
        }
    }
}
