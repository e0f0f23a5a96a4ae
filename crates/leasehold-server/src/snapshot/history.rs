//! The holders and waiters of the last hour, combined from events and scans. No clock and no I/O.
//!
//! Neither source is enough by itself. Events say how a tenure ended but not who waits, arrive a little late, and may
//! be missed. A scan says who holds and who waits now, but not what happened in between.

use std::collections::HashMap;

use leasehold::LockName;
use leasehold::events::{EventKind, LockEvent};

use super::lane::Lane;
use super::record::{Count, End, ObservedLock, ScannedLock, Tenure, Wait};

/// How long tenures and waits are kept.
pub(crate) const KEPT_MS: u64 = 3_600_000;
/// The most locks that are tracked.
const MAX_LANES: usize = 20_000;
/// The most tenures and waits of all locks together.
const MAX_RECORDS: usize = 40_000;
/// How long after its end a tenure may still get its event.
const EVENT_DELAY_MS: u64 = 4_000;
/// The end of every lease that lasted at least this long is published, unless its holder died.
const ALWAYS_REPORTED_MS: u64 = 1_500;

/// The changes since a version.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) locks: Vec<ObservedLock>,
    pub(crate) gone: Vec<String>,
    pub(crate) tenures: Vec<Tenure>,
    pub(crate) waits: Vec<Wait>,
}

/// The tenures and waits of the last hour.
#[derive(Debug, Default)]
pub(crate) struct History {
    lanes: HashMap<String, Lane>,
    /// Incremented with every change.
    version: u64,
    /// Tenures that ended without an event: name, holder id, and when that was noticed.
    unreported: Vec<(String, String, u64)>,
    counts: Vec<Count>,
}

impl History {
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// The locks that are held or have waiters, as last scanned.
    pub(crate) fn locks(&self) -> impl Iterator<Item = &ObservedLock> {
        self.lanes.values().filter_map(|lane| lane.lock.as_ref())
    }

    pub(crate) fn lock(&self, name: &str) -> Option<&ObservedLock> {
        self.lanes.get(name)?.lock.as_ref()
    }

    /// Takes the hand-offs and bad ends since the last call.
    pub(crate) fn take_counts(&mut self) -> Vec<Count> {
        std::mem::take(&mut self.counts)
    }

    /// Returns the changes since `version`; version 0 returns everything.
    pub(crate) fn since(&self, version: u64) -> Changes {
        let mut changes = Changes::default();
        for (name, lane) in &self.lanes {
            if lane.lock_changed > version {
                match &lane.lock {
                    Some(seen) => changes.locks.push(seen.clone()),
                    None if version > 0 => changes.gone.push(name.clone()),
                    None => {}
                }
            }
            changes.tenures.extend(lane.tenures.iter().filter(|t| t.details.changed > version).cloned());
            changes.waits.extend(lane.waits.iter().filter(|w| w.changed > version).cloned());
        }
        changes
    }

    /// Returns the tenures and waits that lasted beyond `since_ms`.
    pub(crate) fn after(&self, since_ms: u64) -> (Vec<Tenure>, Vec<Wait>) {
        let reaches = |ended: Option<u64>| ended.is_none_or(|ended| ended >= since_ms);
        let tenures = self.lanes.values().flat_map(|lane| &lane.tenures).filter(|t| reaches(t.ended_ms));
        let waits = self.lanes.values().flat_map(|lane| &lane.waits).filter(|w| reaches(w.ended_ms));
        (tenures.cloned().collect(), waits.cloned().collect())
    }

    /// Records an event.
    pub(crate) fn record_event(&mut self, event: &LockEvent) {
        if !self.lanes.contains_key(&event.name) && self.lanes.len() >= MAX_LANES {
            return;
        }
        self.version += 1;
        let version = self.version;
        let lane = self.lanes.entry(event.name.clone()).or_default();
        let known = lane.tenures.iter().rposition(|tenure| tenure.holder_id == event.holder_id);
        if known.is_none() && event.kind == EventKind::Granted {
            // The event is late: the lock has another holder by now.
            if lane.open().is_some_and(|tenure| tenure.since_ms >= event.at_ms) {
                return;
            }
            lane.close(event.at_ms, version, &mut self.unreported, &mut self.counts);
        }
        let index = known.unwrap_or_else(|| lane.begin(Tenure::from_event(event)));
        let tenure = &mut lane.tenures[index];
        tenure.details.changed = version;
        let end = match event.kind {
            EventKind::Granted => None,
            EventKind::Revoked => {
                tenure.details.revoked = true;
                tenure.count_bad_end(&mut self.counts);
                // The event of the holder's stop arrived before the event of the revocation.
                tenure.end = tenure.end.map(|_| End::Revoked);
                None
            }
            _ if tenure.details.revoked && event.kind != EventKind::Forced => Some(End::Revoked),
            EventKind::Released => Some(End::Released),
            EventKind::Lost => Some(End::Lost),
            EventKind::Forced => Some(End::Forced),
            _ => None,
        };
        if let Some(end) = end {
            // A loss is followed by a release. The first event says how the tenure ended.
            if !tenure.details.end_reported || end == End::Forced {
                if end.is_bad() || event.reason == "emergency" {
                    tenure.count_bad_end(&mut self.counts);
                }
                tenure.end = Some(end);
            }
            tenure.details.end_reported = true;
            // After a loss another holder may take the lock, so the later release does not extend the tenure.
            tenure.ended_ms =
                Some(tenure.ended_ms.map_or(event.at_ms, |ended| ended.min(event.at_ms)).max(tenure.since_ms));
        }
        lane.link_hand_off(index, version, &mut self.counts);
        lane.trim_overlaps(version);
        lane.drop_oldest();
    }

    /// Applies a full scan. With `events_missed`, a missing event proves nothing.
    pub(crate) fn apply_scan(&mut self, at_ms: u64, found: Vec<ScannedLock>, events_missed: bool) {
        self.version += 1;
        let version = self.version;
        let mut held = by_name(found);
        for (name, lane) in &mut self.lanes {
            lane.apply_scan(at_ms, version, held.remove(name), &mut self.unreported, &mut self.counts);
        }
        let room = MAX_LANES.saturating_sub(self.lanes.len());
        for (name, found) in held.into_iter().take(room) {
            let lane = self.lanes.entry(name).or_default();
            lane.apply_scan(at_ms, version, Some(found), &mut self.unreported, &mut self.counts);
        }
        self.expire_unreported(at_ms, events_missed);
        self.forget(at_ms.saturating_sub(KEPT_MS));
        self.drop_oldest();
    }

    /// Applies a scan of these locks only.
    pub(crate) fn apply_partial_scan(&mut self, at_ms: u64, names: &[LockName], found: Vec<ScannedLock>) {
        self.version += 1;
        let mut held = by_name(found);
        for name in names {
            // Every event creates a lane, unless there are too many.
            let Some(lane) = self.lanes.get_mut(name.as_str()) else { continue };
            lane.apply_scan(at_ms, self.version, held.remove(name.as_str()), &mut self.unreported, &mut self.counts);
        }
    }

    /// Marks tenures without an event as expired: a living holder would have published its end.
    fn expire_unreported(&mut self, at_ms: u64, events_missed: bool) {
        let due: Vec<_> =
            self.unreported.extract_if(.., |(_, _, noticed)| *noticed + EVENT_DELAY_MS <= at_ms).collect();
        for (name, holder_id, _) in due {
            let Some(lane) = self.lanes.get_mut(&name) else { continue };
            let Some(tenure) = lane.tenures.iter_mut().rfind(|tenure| tenure.holder_id == holder_id) else { continue };
            let lasted = tenure.ended_ms.unwrap_or(at_ms).saturating_sub(tenure.since_ms);
            let unheard = !tenure.details.end_reported && tenure.end == Some(End::Released);
            if unheard && lasted >= ALWAYS_REPORTED_MS && !events_missed {
                tenure.end = Some(End::Expired);
                tenure.details.changed = self.version;
                tenure.count_bad_end(&mut self.counts);
            }
        }
    }

    fn forget(&mut self, before_ms: u64) {
        self.lanes.retain(|_, lane| {
            lane.tenures.retain(|tenure| tenure.ended_ms.is_none_or(|ended| ended >= before_ms));
            lane.waits.retain(|wait| wait.ended_ms.is_none_or(|ended| ended >= before_ms));
            lane.lock.is_some() || !lane.tenures.is_empty() || !lane.waits.is_empty()
        });
    }

    /// Drops the oldest fifth if there are too many records.
    fn drop_oldest(&mut self) {
        let all: usize = self.lanes.values().map(|lane| lane.tenures.len() + lane.waits.len()).sum();
        if all <= MAX_RECORDS {
            return;
        }
        let mut ended: Vec<u64> = Vec::with_capacity(all);
        for lane in self.lanes.values() {
            ended.extend(lane.tenures.iter().filter_map(|tenure| tenure.ended_ms));
            ended.extend(lane.waits.iter().filter_map(|wait| wait.ended_ms));
        }
        let superfluous = all - MAX_RECORDS / 5 * 4;
        if ended.is_empty() {
            return;
        }
        let nth = superfluous.min(ended.len() - 1);
        let (_, cut, _) = ended.select_nth_unstable(nth);
        let cut = *cut + 1;
        self.forget(cut);
    }
}

fn by_name(found: Vec<ScannedLock>) -> HashMap<String, ScannedLock> {
    found.into_iter().map(|found| (found.lock.name.clone(), found)).collect()
}

#[cfg(test)]
mod tests {
    use leasehold::inspect::{LockView, WaiterView};

    use super::*;

    fn lock(holder: Option<(&str, u64)>, at_ms: u64, waiters: &[(&str, u64, u64)]) -> ScannedLock {
        let waiter = |(owner, ticket, since): &(&str, u64, u64)| WaiterView {
            owner: (*owner).to_owned(),
            ticket: *ticket,
            waiting_ms: at_ms - since,
        };
        let lock = LockView {
            name: "a".into(),
            held: holder.is_some(),
            owner: holder.map(|(owner, _)| owner.to_owned()),
            holder_id: holder.map(|(owner, since)| format!("{owner}-{since}")),
            fence: holder.map(|(_, since)| since),
            since_ms: holder.map(|(_, since)| since),
            held_ms: holder.map(|(_, since)| at_ms - since),
            ttl_ms: Some(30_000),
            ttl_left_ms: Some(30_000),
            last_seen_ms: Some(at_ms),
            connected: Some(true),
            revoked: false,
            foreign: false,
            waiters: waiters.iter().map(waiter).collect(),
        };
        ScannedLock { lock, with_queue: true }
    }

    fn event(kind: EventKind, holder_id: &str, at_ms: u64, reason: &str) -> LockEvent {
        let owner = holder_id.split('-').next().expect("a part").to_owned();
        let (name, holder_id, reason) = ("a".to_owned(), holder_id.to_owned(), reason.to_owned());
        LockEvent { kind, name, owner, holder_id, fence: None, at_ms, reason }
    }

    fn tenures(history: &History) -> Vec<(String, u64, Option<u64>, Option<End>)> {
        let mut all = history.after(0).0;
        all.sort_by_key(|tenure| tenure.since_ms);
        all.into_iter().map(|tenure| (tenure.holder_id, tenure.since_ms, tenure.ended_ms, tenure.end)).collect()
    }

    #[test]
    fn two_scans_show_a_hand_off() {
        let mut history = History::default();
        history.apply_scan(10_000, vec![lock(Some(("alice", 9_000)), 10_000, &[("bob", 7, 9_500)])], false);
        history.apply_scan(11_000, vec![lock(Some(("bob", 10_400)), 11_000, &[])], false);
        history.record_event(&event(EventKind::Released, "alice-9000", 10_399, "normal"));
        let (all, waits) = history.after(0);
        let bob = all.iter().find(|tenure| tenure.owner == "bob").expect("there");
        assert_eq!((bob.waited_ms, bob.after.as_deref()), (Some(900), Some("alice-9000")));
        assert_eq!((waits.len(), waits[0].since_ms, waits[0].ended_ms), (1, 9_500, Some(10_400)));
        let alice = ("alice-9000".to_owned(), 9_000, Some(10_399), Some(End::Released));
        assert_eq!(tenures(&history)[0], alice, "the event knows better when it ended");
        assert_eq!(history.take_counts(), [Count::HandOff]);
        // A waiter that gave up is not a hand-off.
        history.apply_scan(12_000, vec![lock(Some(("bob", 10_400)), 12_000, &[("carol", 9, 11_500)])], false);
        history.apply_scan(13_000, vec![lock(Some(("bob", 10_400)), 13_000, &[])], false);
        assert_eq!(history.take_counts(), []);
        assert!(history.after(0).1.iter().all(|wait| wait.ended_ms.is_some()));
    }

    #[test]
    fn a_late_end_does_not_overlap_the_next_tenure() {
        for event_first in [true, false] {
            let mut history = History::default();
            history.apply_scan(10_000, vec![lock(Some(("alice", 9_000)), 10_000, &[("bob", 7, 9_500)])], false);
            // From a clock ahead of the store's, or from a busy machine.
            let released = event(EventKind::Released, "alice-9000", 10_700, "normal");
            if event_first {
                history.record_event(&released);
            }
            history.apply_scan(11_000, vec![lock(Some(("bob", 10_400)), 11_000, &[])], false);
            if !event_first {
                history.record_event(&released);
            }
            let alice = ("alice-9000".to_owned(), 9_000, Some(10_400), Some(End::Released));
            assert_eq!(tenures(&history)[0], alice, "event first: {event_first}");
            assert_eq!(history.take_counts(), [Count::HandOff]);
        }
    }

    #[test]
    fn events_decide_the_end_in_any_order() {
        use EventKind::{Forced, Lost, Released, Revoked};
        let cases: [(&[EventKind], End, usize); 9] = [
            (&[Released], End::Released, 0),
            (&[Lost], End::Lost, 1),
            (&[Lost, Released], End::Lost, 1),
            (&[Revoked, Released], End::Revoked, 1),
            (&[Revoked, Lost, Released], End::Revoked, 1),
            (&[Lost, Revoked, Released], End::Revoked, 1),
            (&[Released, Revoked], End::Revoked, 1),
            (&[Forced, Lost], End::Forced, 1),
            (&[Lost, Forced], End::Forced, 1),
        ];
        for (kinds, end, bad) in cases {
            for seen_gone in 0..=kinds.len() {
                let mut history = History::default();
                history.apply_scan(10_000, vec![lock(Some(("alice", 9_000)), 10_000, &[])], false);
                for (n, kind) in kinds.iter().enumerate() {
                    if n == seen_gone {
                        history.apply_scan(12_000, Vec::new(), false);
                    }
                    history.record_event(&event(*kind, "alice-9000", 11_000, "normal"));
                }
                history.apply_scan(60_000, Vec::new(), false);
                let expected = ("alice-9000".to_owned(), 9_000, Some(11_000), Some(end));
                assert_eq!(tenures(&history), [expected], "{kinds:?}, seen gone after {seen_gone}");
                assert_eq!(history.take_counts().len(), bad, "{kinds:?}, seen gone after {seen_gone}");
            }
        }
    }

    #[test]
    fn an_end_without_an_event_is_an_expiry() {
        let ended = |at_ms: u64, missed: bool, gone: bool| {
            let mut history = History::default();
            let mut found = lock(Some(("alice", 9_000)), 10_000, &[]);
            found.lock.connected = Some(!gone);
            history.apply_scan(10_000, vec![found], false);
            history.apply_scan(at_ms, Vec::new(), false);
            history.apply_scan(at_ms + 5_000, Vec::new(), missed);
            (tenures(&history)[0].3.expect("ended"), history.take_counts().len())
        };
        assert_eq!(ended(12_000, false, false), (End::Expired, 1), "a living holder would have published its end");
        assert_eq!(ended(12_000, true, false), (End::Released, 0), "its event may have been missed");
        assert_eq!(ended(12_000, true, true), (End::Expired, 1), "its connection was gone");
        assert_eq!(ended(10_300, false, false), (End::Released, 0), "too short to be published");
        assert_eq!(ended(41_000, true, false), (End::Expired, 1), "its lease had run out");
    }

    #[test]
    fn only_changes_are_returned_again() {
        let mut history = History::default();
        history.apply_scan(10_000, vec![lock(Some(("alice", 9_000)), 10_000, &[])], false);
        let first = history.version();
        let count =
            |changes: &Changes| (changes.locks.len(), changes.gone.len(), changes.tenures.len(), changes.waits.len());
        assert_eq!(count(&history.since(0)), (1, 0, 1, 0));
        let mut same = lock(Some(("alice", 9_000)), 12_000, &[]);
        same.lock.last_seen_ms = Some(10_001);
        same.lock.ttl_left_ms = Some(28_000);
        history.apply_scan(12_000, vec![same], false);
        assert_eq!(count(&history.since(first)), (0, 0, 0, 0), "time has passed, nothing else");
        history.apply_scan(13_000, vec![lock(Some(("alice", 9_000)), 13_000, &[("bob", 7, 12_500)])], false);
        assert_eq!(count(&history.since(first)), (1, 0, 0, 1), "renewed, and waited for");
        let second = history.version();
        history.apply_scan(14_000, Vec::new(), false);
        assert_eq!(count(&history.since(second)), (0, 1, 1, 1), "free");
        assert_eq!(count(&history.since(0)).1, 0, "a complete answer lists no removals");
        history.apply_scan(14_000 + KEPT_MS + 1, Vec::new(), false);
        assert_eq!((history.lanes.len(), count(&history.since(0))), (0, (0, 0, 0, 0)), "an hour later");
    }

    #[test]
    fn the_history_is_bounded() {
        let mut history = History::default();
        for n in 0..2_000 {
            history.record_event(&event(EventKind::Released, &format!("worker-{n}"), 10_000 + n, "normal"));
        }
        assert_eq!(history.after(0).0.len(), super::super::lane::MAX_PER_LANE, "of one lock");
        for n in 0..60_000_u64 {
            let mut event = event(EventKind::Released, &format!("worker-{n}"), 20_000 + n, "normal");
            event.name = format!("lock {}", n % 30_000);
            history.record_event(&event);
        }
        assert_eq!(history.lanes.len(), MAX_LANES);
        history.apply_scan(90_000, Vec::new(), false);
        let (all, _) = history.after(0);
        assert!(all.len() <= MAX_RECORDS && all.len() > MAX_RECORDS / 2, "{}", all.len());
    }
}
