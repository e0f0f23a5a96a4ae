//! Who held what and who waited, over the last hour: put together from what the fleet tells and from looking.
//! No clock and no I/O.
//!
//! Neither source is enough by itself. Events say how a tenure ended, but not who waits, come a little late, and
//! some are missed; a look says who holds and who waits now, but not what was in between.

use std::collections::HashMap;

use leasehold::{EventKind, LockEvent, LockName};

use super::lane::Lane;
use super::record::{Count, End, Found, Seen, Tenure, Wait};

/// How far back it goes.
pub(crate) const KEPT_MS: u64 = 3_600_000;
/// Names that are known at once.
const LANES: usize = 20_000;
/// Tenures and waits in all.
const IN_ALL: usize = 40_000;
/// A tenure that ended unheard of gets its event within this.
const TOLD_WITHIN_MS: u64 = 4_000;
/// The end of every lease that lasted this long is told, if anybody is left to tell it.
const ALWAYS_TOLD_MS: u64 = 1_500;

/// What has changed since a version.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    pub(crate) locks: Vec<Seen>,
    pub(crate) gone: Vec<String>,
    pub(crate) tenures: Vec<Tenure>,
    pub(crate) waits: Vec<Wait>,
}

/// The last hour.
#[derive(Debug, Default)]
pub(crate) struct History {
    lanes: HashMap<String, Lane>,
    /// Grows with every change.
    version: u64,
    /// Tenures that ended unheard of, and when that was noticed.
    untold: Vec<(String, String, u64)>,
    counted: Vec<Count>,
}

impl History {
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Locks that are held and those who wait, as they were last looked at.
    pub(crate) fn locks(&self) -> impl Iterator<Item = &Seen> {
        self.lanes.values().filter_map(|lane| lane.lock.as_ref())
    }

    pub(crate) fn lock(&self, name: &str) -> Option<&Seen> {
        self.lanes.get(name)?.lock.as_ref()
    }

    /// What was to be counted since this was last asked.
    pub(crate) fn counted(&mut self) -> Vec<Count> {
        std::mem::take(&mut self.counted)
    }

    /// What has changed since `version`; everything since 0.
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
            changes.tenures.extend(lane.tenures.iter().filter(|t| t.known.changed > version).cloned());
            changes.waits.extend(lane.waits.iter().filter(|w| w.changed > version).cloned());
        }
        changes
    }

    /// The tenures and waits that lasted beyond a moment.
    pub(crate) fn after(&self, since_ms: u64) -> (Vec<Tenure>, Vec<Wait>) {
        let reaches = |ended: Option<u64>| ended.is_none_or(|ended| ended >= since_ms);
        let tenures = self.lanes.values().flat_map(|lane| &lane.tenures).filter(|t| reaches(t.ended_ms));
        let waits = self.lanes.values().flat_map(|lane| &lane.waits).filter(|w| reaches(w.ended_ms));
        (tenures.cloned().collect(), waits.cloned().collect())
    }

    /// Something was told.
    pub(crate) fn happened(&mut self, event: &LockEvent) {
        if !self.lanes.contains_key(&event.name) && self.lanes.len() >= LANES {
            return;
        }
        self.version += 1;
        let version = self.version;
        let lane = self.lanes.entry(event.name.clone()).or_default();
        let known = lane.tenures.iter().rposition(|tenure| tenure.holder_id == event.holder_id);
        if known.is_none() && event.kind == EventKind::Granted {
            // Told late: somebody else holds it by now.
            if lane.open().is_some_and(|tenure| tenure.since_ms >= event.at_ms) {
                return;
            }
            lane.close(event.at_ms, version, &mut self.untold, &mut self.counted);
        }
        let index = known.unwrap_or_else(|| lane.begin(Tenure::told(event)));
        let tenure = &mut lane.tenures[index];
        tenure.known.changed = version;
        let end = match event.kind {
            EventKind::Granted => None,
            EventKind::Revoked => {
                tenure.known.revoked = true;
                tenure.ends_badly(&mut self.counted);
                // Its holder was quicker to say that it has stopped than whoever told it to.
                tenure.end = tenure.end.map(|_| End::Revoked);
                None
            }
            _ if tenure.known.revoked && event.kind != EventKind::Forced => Some(End::Revoked),
            EventKind::Released => Some(End::Released),
            EventKind::Lost => Some(End::Lost),
            EventKind::Forced => Some(End::Forced),
            _ => None,
        };
        if let Some(end) = end {
            // A loss is followed by its release: the first says how it ended.
            if !tenure.known.told || end == End::Forced {
                if end.is_bad() || event.reason == "emergency" {
                    tenure.ends_badly(&mut self.counted);
                }
                tenure.end = Some(end);
            }
            tenure.known.told = true;
            // A lost lease is somebody else's to take: the release that follows is nobody's.
            tenure.ended_ms =
                Some(tenure.ended_ms.map_or(event.at_ms, |ended| ended.min(event.at_ms)).max(tenure.since_ms));
        }
        lane.link(index, version, &mut self.counted);
        lane.one_at_a_time(version);
        lane.bound();
    }

    /// All locks that are held were looked at. `events_missed`: nothing follows from what was not told.
    pub(crate) fn looked(&mut self, at_ms: u64, found: Vec<Found>, events_missed: bool) {
        self.version += 1;
        let version = self.version;
        let mut held = by_name(found);
        for (name, lane) in &mut self.lanes {
            lane.looked(at_ms, version, held.remove(name), &mut self.untold, &mut self.counted);
        }
        let room = LANES.saturating_sub(self.lanes.len());
        for (name, found) in held.into_iter().take(room) {
            let lane = self.lanes.entry(name).or_default();
            lane.looked(at_ms, version, Some(found), &mut self.untold, &mut self.counted);
        }
        self.settle_untold(at_ms, events_missed);
        self.forget(at_ms.saturating_sub(KEPT_MS));
        self.bound();
    }

    /// These locks were looked at, and no others.
    pub(crate) fn glanced(&mut self, at_ms: u64, names: &[LockName], found: Vec<Found>) {
        self.version += 1;
        let mut held = by_name(found);
        for name in names {
            // Whatever happens makes a lane, unless there are too many.
            let Some(lane) = self.lanes.get_mut(name.as_str()) else { continue };
            lane.looked(at_ms, self.version, held.remove(name.as_str()), &mut self.untold, &mut self.counted);
        }
    }

    /// A holder that lived would have told of its end.
    fn settle_untold(&mut self, at_ms: u64, events_missed: bool) {
        let due: Vec<_> = self.untold.extract_if(.., |(_, _, noticed)| *noticed + TOLD_WITHIN_MS <= at_ms).collect();
        for (name, holder_id, _) in due {
            let Some(lane) = self.lanes.get_mut(&name) else { continue };
            let Some(tenure) = lane.tenures.iter_mut().rfind(|tenure| tenure.holder_id == holder_id) else { continue };
            let lasted = tenure.ended_ms.unwrap_or(at_ms).saturating_sub(tenure.since_ms);
            let unheard = !tenure.known.told && tenure.end == Some(End::Released);
            if unheard && lasted >= ALWAYS_TOLD_MS && !events_missed {
                tenure.end = Some(End::Expired);
                tenure.known.changed = self.version;
                tenure.ends_badly(&mut self.counted);
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

    /// When there is too much, the oldest fifth goes.
    fn bound(&mut self) {
        let all: usize = self.lanes.values().map(|lane| lane.tenures.len() + lane.waits.len()).sum();
        if all <= IN_ALL {
            return;
        }
        let mut ended: Vec<u64> = Vec::with_capacity(all);
        for lane in self.lanes.values() {
            ended.extend(lane.tenures.iter().filter_map(|tenure| tenure.ended_ms));
            ended.extend(lane.waits.iter().filter_map(|wait| wait.ended_ms));
        }
        let superfluous = all - IN_ALL / 5 * 4;
        if ended.is_empty() {
            return;
        }
        let nth = superfluous.min(ended.len() - 1);
        let (_, cut, _) = ended.select_nth_unstable(nth);
        let cut = *cut + 1;
        self.forget(cut);
    }
}

fn by_name(found: Vec<Found>) -> HashMap<String, Found> {
    found.into_iter().map(|found| (found.lock.name.clone(), found)).collect()
}

#[cfg(test)]
mod tests {
    use leasehold::{LockView, WaiterView};

    use super::*;

    fn lock(holder: Option<(&str, u64)>, at_ms: u64, waiters: &[(&str, u64, u64)]) -> Found {
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
        Found { lock, with_queue: true }
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
    fn a_hand_off_is_told_by_two_looks() {
        let mut history = History::default();
        history.looked(10_000, vec![lock(Some(("alice", 9_000)), 10_000, &[("bob", 7, 9_500)])], false);
        history.looked(11_000, vec![lock(Some(("bob", 10_400)), 11_000, &[])], false);
        history.happened(&event(EventKind::Released, "alice-9000", 10_399, "normal"));
        let (all, waits) = history.after(0);
        let bob = all.iter().find(|tenure| tenure.owner == "bob").expect("there");
        assert_eq!((bob.waited_ms, bob.after.as_deref()), (Some(900), Some("alice-9000")));
        assert_eq!((waits.len(), waits[0].since_ms, waits[0].ended_ms), (1, 9_500, Some(10_400)));
        let alice = ("alice-9000".to_owned(), 9_000, Some(10_399), Some(End::Released));
        assert_eq!(tenures(&history)[0], alice, "the event knows better when it ended");
        assert_eq!(history.counted(), [Count::HandOff]);
        // Whoever gave up was handed nothing.
        history.looked(12_000, vec![lock(Some(("bob", 10_400)), 12_000, &[("carol", 9, 11_500)])], false);
        history.looked(13_000, vec![lock(Some(("bob", 10_400)), 13_000, &[])], false);
        assert_eq!(history.counted(), []);
        assert!(history.after(0).1.iter().all(|wait| wait.ended_ms.is_some()));
    }

    #[test]
    fn an_end_that_is_told_late_reaches_into_nobody_elses_time() {
        for told_first in [true, false] {
            let mut history = History::default();
            history.looked(10_000, vec![lock(Some(("alice", 9_000)), 10_000, &[("bob", 7, 9_500)])], false);
            // By a clock that is ahead of the store's, or by a machine that was busy.
            let told = event(EventKind::Released, "alice-9000", 10_700, "normal");
            if told_first {
                history.happened(&told);
            }
            history.looked(11_000, vec![lock(Some(("bob", 10_400)), 11_000, &[])], false);
            if !told_first {
                history.happened(&told);
            }
            let alice = ("alice-9000".to_owned(), 9_000, Some(10_400), Some(End::Released));
            assert_eq!(tenures(&history)[0], alice, "told first: {told_first}");
            assert_eq!(history.counted(), [Count::HandOff]);
        }
    }

    #[test]
    fn an_end_is_what_was_told_of_it_in_any_order() {
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
                history.looked(10_000, vec![lock(Some(("alice", 9_000)), 10_000, &[])], false);
                for (n, kind) in kinds.iter().enumerate() {
                    if n == seen_gone {
                        history.looked(12_000, Vec::new(), false);
                    }
                    history.happened(&event(*kind, "alice-9000", 11_000, "normal"));
                }
                history.looked(60_000, Vec::new(), false);
                let told = ("alice-9000".to_owned(), 9_000, Some(11_000), Some(end));
                assert_eq!(tenures(&history), [told], "{kinds:?}, seen gone after {seen_gone}");
                assert_eq!(history.counted().len(), bad, "{kinds:?}, seen gone after {seen_gone}");
            }
        }
    }

    #[test]
    fn whoever_dies_tells_nobody() {
        let ended = |at_ms: u64, missed: bool, gone: bool| {
            let mut history = History::default();
            let mut found = lock(Some(("alice", 9_000)), 10_000, &[]);
            found.lock.connected = Some(!gone);
            history.looked(10_000, vec![found], false);
            history.looked(at_ms, Vec::new(), false);
            history.looked(at_ms + 5_000, Vec::new(), missed);
            (tenures(&history)[0].3.expect("ended"), history.counted().len())
        };
        assert_eq!(ended(12_000, false, false), (End::Expired, 1), "it would have told");
        assert_eq!(ended(12_000, true, false), (End::Released, 0), "it may have told");
        assert_eq!(ended(12_000, true, true), (End::Expired, 1), "its connection was gone");
        assert_eq!(ended(10_300, false, false), (End::Released, 0), "too short to be told of");
        assert_eq!(ended(41_000, true, false), (End::Expired, 1), "its lease had run out");
    }

    #[test]
    fn only_what_has_changed_is_answered_again() {
        let mut history = History::default();
        history.looked(10_000, vec![lock(Some(("alice", 9_000)), 10_000, &[])], false);
        let first = history.version();
        let count =
            |changes: &Changes| (changes.locks.len(), changes.gone.len(), changes.tenures.len(), changes.waits.len());
        assert_eq!(count(&history.since(0)), (1, 0, 1, 0));
        let mut same = lock(Some(("alice", 9_000)), 12_000, &[]);
        same.lock.last_seen_ms = Some(10_001);
        same.lock.ttl_left_ms = Some(28_000);
        history.looked(12_000, vec![same], false);
        assert_eq!(count(&history.since(first)), (0, 0, 0, 0), "time has passed, nothing else");
        history.looked(13_000, vec![lock(Some(("alice", 9_000)), 13_000, &[("bob", 7, 12_500)])], false);
        assert_eq!(count(&history.since(first)), (1, 0, 0, 1), "renewed, and waited for");
        let second = history.version();
        history.looked(14_000, Vec::new(), false);
        assert_eq!(count(&history.since(second)), (0, 1, 1, 1), "free");
        assert_eq!(count(&history.since(0)).1, 0, "nobody who knows nothing need forget it");
        history.looked(14_000 + KEPT_MS + 1, Vec::new(), false);
        assert_eq!((history.lanes.len(), count(&history.since(0))), (0, (0, 0, 0, 0)), "an hour later");
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut history = History::default();
        for n in 0..2_000 {
            history.happened(&event(EventKind::Released, &format!("worker-{n}"), 10_000 + n, "normal"));
        }
        assert_eq!(history.after(0).0.len(), super::super::lane::PER_LANE, "of one lock");
        for n in 0..60_000_u64 {
            let mut event = event(EventKind::Released, &format!("worker-{n}"), 20_000 + n, "normal");
            event.name = format!("lock {}", n % 30_000);
            history.happened(&event);
        }
        assert_eq!(history.lanes.len(), LANES);
        history.looked(90_000, Vec::new(), false);
        let (all, _) = history.after(0);
        assert!(all.len() <= IN_ALL && all.len() > IN_ALL / 2, "{}", all.len());
    }
}
