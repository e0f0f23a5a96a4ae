//! The checkers of histories.

use std::collections::HashMap;
use std::time::Duration;

use super::{Event, EventKind, History};

/// A period in which a task relied on a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The process.
    pub pid: u32,
    /// The task within it.
    pub task: u64,
    /// When it requested the lock, if that was recorded.
    pub asked_ns: Option<u64>,
    /// When it was granted.
    pub granted_ns: u64,
    /// The first of: release called, loss notified, end of validity. For a holder that was killed before, it is the end of
    /// validity; without one, the hold has no end.
    pub until_ns: u64,
    /// The fence of the grant.
    pub fence: Option<u64>,
}

/// Two holders of one lock at the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// The lock.
    pub name: String,
    /// The holder.
    pub first: Hold,
    /// The holder that got the lock too early.
    pub second: Hold,
    /// How long both held it.
    pub both_ns: u64,
}

/// A grant whose fence is not higher than all earlier fences.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FenceInversion {
    /// The lock.
    pub name: String,
    /// The grant with the highest fence so far.
    pub before: Hold,
    /// The later grant.
    pub after: Hold,
}

/// A grant to a request that was later than one that was still waiting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FifoInversion {
    /// The lock.
    pub name: String,
    /// The request that was served too early.
    pub overtaker: Hold,
    /// The oldest of the requests that were served later.
    pub overtaken: Hold,
    /// How much earlier the overtaken request was.
    pub by_ns: u64,
}

impl History {
    /// K1: returns every grant that was given while another hold was valid.
    pub fn overlaps(&self) -> Vec<Overlap> {
        let mut found = Vec::new();
        for (name, holds) in self.holds() {
            let mut longest: Option<Hold> = None;
            // A guard that was returned expired was never used.
            for hold in holds.into_iter().filter(|hold| hold.until_ns > hold.granted_ns) {
                if let Some(first) = &longest
                    && first.until_ns > hold.granted_ns
                {
                    found.push(Overlap {
                        name: name.to_string(),
                        first: first.clone(),
                        second: hold.clone(),
                        both_ns: first.until_ns.min(hold.until_ns) - hold.granted_ns,
                    });
                }
                if longest.as_ref().is_none_or(|longest| longest.until_ns < hold.until_ns) {
                    longest = Some(hold);
                }
            }
        }
        found
    }

    /// K3: returns every grant whose fence is not higher than all earlier fences. Grants without a fence are ignored.
    pub fn fence_inversions(&self) -> Vec<FenceInversion> {
        let mut found = Vec::new();
        for (name, holds) in self.holds() {
            let mut highest: Option<Hold> = None;
            for hold in holds.into_iter().filter(|hold| hold.fence.is_some()) {
                match &highest {
                    Some(before) if before.fence >= hold.fence => {
                        found.push(FenceInversion { name: name.to_string(), before: before.clone(), after: hold });
                    }
                    _ => highest = Some(hold),
                }
            }
        }
        found
    }

    /// Returns every grant to a request that was more than `tolerance` later than a request that was granted after it.
    /// Requests that ended without a grant are ignored.
    pub fn fifo_inversions(&self, tolerance: Duration) -> Vec<FifoInversion> {
        let tolerance_ns = nanos(tolerance);
        let mut found = Vec::new();
        for (name, holds) in self.holds() {
            let mut longest_waiting: Option<(u64, Hold)> = None;
            // From the last grant backwards, so that the requests seen so far were served later.
            for hold in holds.into_iter().rev() {
                let Some(asked_ns) = hold.asked_ns else {
                    continue;
                };
                match &longest_waiting {
                    Some((earlier_ns, overtaken)) if earlier_ns + tolerance_ns < asked_ns => {
                        found.push(FifoInversion {
                            name: name.to_string(),
                            overtaker: hold,
                            overtaken: overtaken.clone(),
                            by_ns: asked_ns - earlier_ns,
                        });
                    }
                    Some((earlier_ns, _)) if *earlier_ns <= asked_ns => {}
                    _ => longest_waiting = Some((asked_ns, hold)),
                }
            }
        }
        found.reverse();
        found
    }

    /// K4: returns by how much the slowest request or release exceeded `deadline`; zero if none did. Calls that did not end are
    /// in [`History::unanswered`].
    pub fn latest_overrun(&self, deadline: Duration) -> Duration {
        let (answered, _) = self.calls();
        let slowest_ns = answered.into_iter().max().unwrap_or(0);
        Duration::from_nanos(slowest_ns).saturating_sub(deadline)
    }

    /// Returns the calls that did not end: the process was killed, or they hang.
    pub fn unanswered(&self) -> Vec<Event> {
        self.calls().1
    }

    /// Returns the holds per name, in the order of the grants.
    pub fn holds(&self) -> Vec<(&str, Vec<Hold>)> {
        self.by_name().into_iter().map(|(name, events)| (name, holds_in(&events))).collect()
    }

    /// Returns the durations of the calls that ended, and the starts of those that did not.
    fn calls(&self) -> (Vec<u64>, Vec<Event>) {
        let mut open: HashMap<(u32, u64, &str), &Event> = HashMap::new();
        let (mut answered, mut unanswered) = (Vec::new(), Vec::new());
        for event in &self.events {
            let who = (event.pid, event.task, event.name.as_str());
            match event.kind {
                EventKind::Asked | EventKind::ReleaseCalled => {
                    unanswered.extend(open.insert(who, event).cloned());
                }
                EventKind::Granted | EventKind::GaveUp | EventKind::Released | EventKind::Lost => {
                    answered.extend(open.remove(&who).map(|call| event.at_ns - call.at_ns));
                }
                EventKind::Renewed => {}
            }
        }
        unanswered.extend(open.into_values().cloned());
        unanswered.sort_by_key(|event| event.at_ns);
        (answered, unanswered)
    }
}

/// Returns the holds of one name.
fn holds_in(events: &[&Event]) -> Vec<Hold> {
    let mut asked: HashMap<(u32, u64), u64> = HashMap::new();
    let mut current: HashMap<(u32, u64), usize> = HashMap::new();
    let mut holds: Vec<Hold> = Vec::new();
    for event in events {
        let who = (event.pid, event.task);
        match event.kind {
            EventKind::Asked => {
                asked.insert(who, event.at_ns);
                current.remove(&who);
            }
            EventKind::GaveUp => {
                asked.remove(&who);
            }
            EventKind::Granted => {
                current.insert(who, holds.len());
                holds.push(Hold {
                    pid: event.pid,
                    task: event.task,
                    asked_ns: asked.remove(&who),
                    granted_ns: event.at_ns,
                    until_ns: event.valid_until_ns.unwrap_or(u64::MAX),
                    fence: event.fence,
                });
            }
            EventKind::Renewed => {
                if let (Some(&hold), Some(valid_until_ns)) = (current.get(&who), event.valid_until_ns) {
                    holds[hold].until_ns = valid_until_ns;
                }
            }
            EventKind::ReleaseCalled | EventKind::Lost | EventKind::Released => {
                if let Some(hold) = current.remove(&who) {
                    let valid_until_ns = event.valid_until_ns.unwrap_or(holds[hold].until_ns);
                    holds[hold].until_ns = valid_until_ns.min(event.at_ns);
                }
            }
        }
    }
    holds
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates an event of the lock `a`.
    fn at(at_ns: u64, pid: u32, kind: EventKind) -> Event {
        Event { at_ns, pid, task: 0, name: "a".into(), kind, fence: None, valid_until_ns: None }
    }

    fn granted(at_ns: u64, pid: u32, fence: u64, valid_until_ns: u64) -> Event {
        at(at_ns, pid, EventKind::Granted).fence(fence).valid_until_ns(valid_until_ns)
    }

    fn overlaps(events: &[Event]) -> Vec<(u32, u32, u64)> {
        let found = History::from_events(events.to_vec()).overlaps();
        found.into_iter().map(|overlap| (overlap.first.pid, overlap.second.pid, overlap.both_ns)).collect()
    }

    #[test]
    fn an_overlap_is_found_however_the_first_hold_ends() {
        let (first, second) = (granted(10, 1, 1, 100), granted(50, 2, 2, 200));
        assert_eq!(overlaps(&[first.clone(), second.clone()]), [(1, 2, 50)], "killed, still valid");
        for end in [EventKind::ReleaseCalled, EventKind::Lost, EventKind::Released] {
            assert_eq!(overlaps(&[first.clone(), second.clone(), at(60, 1, end)]), [(1, 2, 10)], "{end:?} too late");
            assert_eq!(overlaps(&[first.clone(), second.clone(), at(50, 1, end)]), [], "{end:?} in time");
        }
    }

    #[test]
    fn the_end_of_validity_ends_a_hold_and_a_renewal_extends_it() {
        let events = [granted(10, 1, 1, 40), granted(50, 2, 2, 200), at(60, 1, EventKind::Lost)];
        assert_eq!(overlaps(&events), [], "expired before it was notified");
        let renewed = at(30, 1, EventKind::Renewed).valid_until_ns(70);
        assert_eq!(overlaps(&[&events[..], &[renewed]].concat()), [(1, 2, 10)]);
    }

    #[test]
    fn a_long_hold_overlaps_every_grant_within_it() {
        let events = [
            at(10, 1, EventKind::Granted),
            granted(20, 2, 2, 30),
            granted(40, 3, 3, 50),
            at(60, 1, EventKind::ReleaseCalled),
            granted(70, 4, 4, 80),
        ];
        assert_eq!(overlaps(&events), [(1, 2, 10), (1, 3, 10)]);
    }

    #[test]
    fn other_names_and_expired_guards_do_not_overlap() {
        let mut other = granted(50, 2, 2, 200);
        other.name = "b".into();
        assert_eq!(overlaps(&[granted(10, 1, 1, 100), other]), []);
        assert_eq!(overlaps(&[granted(10, 1, 1, 100), granted(50, 2, 2, 50)]), []);
    }

    #[test]
    fn tasks_of_one_process_are_different_holders() {
        let mut second = granted(50, 1, 2, 200);
        second.task = 1;
        assert_eq!(overlaps(&[granted(10, 1, 1, 100), second]), [(1, 1, 50)]);
    }

    #[test]
    fn fences_that_repeat_or_fall_are_found() {
        let fences = |numbers: &[u64]| {
            let events = (1..).zip(numbers).map(|(time, &fence)| granted(time * 10, 1, fence, time * 10 + 5));
            let found = History::from_events(events.collect()).fence_inversions();
            found.into_iter().map(|one| (one.before.fence, one.after.fence)).collect::<Vec<_>>()
        };
        assert_eq!(fences(&[1, 2, 5, 6]), []);
        assert_eq!(fences(&[1, 2, 2]), [(Some(2), Some(2))]);
        assert_eq!(fences(&[1, 9, 2, 3]), [(Some(9), Some(2)), (Some(9), Some(3))], "below the highest");
    }

    #[test]
    fn overtaking_is_found_beyond_the_tolerance() {
        let events = vec![
            at(10, 1, EventKind::Asked),
            at(20, 2, EventKind::Asked),
            at(30, 3, EventKind::Asked),
            granted(40, 3, 1, 45),
            granted(50, 1, 2, 55),
            granted(60, 2, 3, 65),
        ];
        let history = History::from_events(events);
        let found = history.fifo_inversions(Duration::ZERO);
        let pairs: Vec<_> = found.iter().map(|one| (one.overtaker.pid, one.overtaken.pid, one.by_ns)).collect();
        assert_eq!(pairs, [(3, 1, 20)]);
        assert_eq!(history.fifo_inversions(Duration::from_nanos(19)).len(), 1);
        assert_eq!(history.fifo_inversions(Duration::from_nanos(20)), []);
    }

    #[test]
    fn requests_without_a_grant_are_not_overtaken() {
        let events = vec![
            at(10, 1, EventKind::Asked),
            at(11, 2, EventKind::Asked),
            at(20, 3, EventKind::Asked),
            at(25, 1, EventKind::GaveUp),
            granted(30, 3, 1, 35),
            at(40, 1, EventKind::Asked),
            granted(50, 1, 2, 55),
        ];
        assert_eq!(History::from_events(events).fifo_inversions(Duration::ZERO), []);
    }

    #[test]
    fn the_overrun_is_that_of_the_slowest_call() {
        let events = vec![
            at(10, 1, EventKind::Asked),
            at(110, 1, EventKind::Granted),
            at(120, 1, EventKind::ReleaseCalled),
            at(270, 1, EventKind::Released),
            at(300, 2, EventKind::Asked),
            at(310, 2, EventKind::GaveUp),
            at(400, 3, EventKind::Asked),
        ];
        let history = History::from_events(events);
        assert_eq!(history.latest_overrun(Duration::from_nanos(100)), Duration::from_nanos(50));
        assert_eq!(history.latest_overrun(Duration::from_nanos(150)), Duration::ZERO);
        assert_eq!(history.unanswered(), [at(400, 3, EventKind::Asked)]);
    }
}
