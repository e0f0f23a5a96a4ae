//! Who held what and who waited, over the last hour: put together from what the fleet tells and from looking.
//! No clock and no I/O.
//!
//! Neither source is enough by itself. Events say how a tenure ended, but not who waits, come a little late, and
//! some are missed; a look says who holds and who waits now, but not what was in between.

use std::collections::HashMap;

use leasehold::{EventKind, LockEvent};

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
            tenure.ended_ms = Some(tenure.ended_ms.map_or(event.at_ms, |ended| ended.min(event.at_ms)).max(tenure.since_ms));
        }
        lane.link(index, version, &mut self.counted);
        lane.bound();
    }

    /// All locks that are held were looked at. `events_missed`: nothing follows from what was not told.
    pub(crate) fn looked(&mut self, at_ms: u64, found: Vec<Found>, events_missed: bool) {
        self.version += 1;
        let version = self.version;
        let mut held: HashMap<String, Found> = found.into_iter().map(|found| (found.lock.name.clone(), found)).collect();
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
