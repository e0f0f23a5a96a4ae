//! The board of alerts: which fire, since when, and which have resolved. No clock, no I/O: the caller passes the time.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use sha2::{Digest, Sha256};

use super::alert::{Alert, AlertKey, AlertState, Notice, SharedAlert};
use super::condition::{Condition, Level, Source};

/// The most firing alerts. Beyond this many, one more adds nothing.
const MAX_FIRING: usize = 5_000;
/// The most resolved alerts that are kept, and for how long.
const MAX_RESOLVED: usize = 500;
const RESOLVED_KEPT_MS: u64 = 6 * 60 * 60 * 1_000;
/// A one-time occurrence resolves when it has not recurred for this long.
pub(super) const QUIET_MS: u64 = 15 * 60 * 1_000;

#[derive(Debug)]
struct FiringAlert {
    alert: Alert,
    /// The source that decides when the alert resolves; `None` if it resolves after a quiet period.
    source: Option<Source>,
    /// Whether the sinks have been notified.
    notified: bool,
}

/// All alerts, firing and resolved.
#[derive(Debug, Default)]
pub(crate) struct Board {
    firing: BTreeMap<AlertKey, FiringAlert>,
    resolved: VecDeque<Alert>,
    full: bool,
}

impl Board {
    /// Takes the current conditions of one source. Alerts of this source that are not among them resolve.
    pub(super) fn report(&mut self, source: Source, conditions: Vec<Condition>, now_ms: u64) -> Vec<Notice> {
        let mut notices = Vec::new();
        let mut named = BTreeSet::new();
        for condition in conditions {
            let key = condition_key(&condition);
            // A condition that is reported twice counts once.
            if named.insert(key.clone()) {
                notices.extend(self.fire(key, condition, Some(source), now_ms));
            }
        }
        let over = |(key, firing): (&AlertKey, &FiringAlert)| {
            (firing.source == Some(source) && !named.contains(key)).then(|| key.clone())
        };
        let over: Vec<AlertKey> = self.firing.iter().filter_map(over).collect();
        notices.extend(over.into_iter().filter_map(|key| self.resolve(&key, now_ms)));
        notices
    }

    /// Records a one-time occurrence. Its alert resolves when it has not recurred for [`QUIET_MS`].
    pub(super) fn record_occurrence(&mut self, condition: Condition, now_ms: u64) -> Option<Notice> {
        self.fire(condition_key(&condition), condition, None, now_ms)
    }

    /// Resolves quiet alerts and forgets old ones.
    pub(super) fn tick(&mut self, now_ms: u64) -> Vec<Notice> {
        let quiet =
            |firing: &FiringAlert| firing.source.is_none() && now_ms.saturating_sub(firing.alert.last_ms) >= QUIET_MS;
        let over: Vec<AlertKey> = self.firing.iter().filter(|(_, f)| quiet(f)).map(|(key, _)| key.clone()).collect();
        let notices = over.into_iter().filter_map(|key| self.resolve(&key, now_ms)).collect();
        let old = |alert: &Alert| now_ms.saturating_sub(alert.resolved_ms.unwrap_or(now_ms)) > RESOLVED_KEPT_MS;
        while self.resolved.back().is_some_and(old) {
            self.resolved.pop_back();
        }
        notices
    }

    /// Marks the alerts of the selected sources as sent to the sinks.
    pub(super) fn mark_notified(&mut self, whose: impl Fn(Option<Source>) -> bool) {
        for firing in self.firing.values_mut().filter(|firing| whose(firing.source)) {
            firing.notified = true;
        }
    }

    /// Returns the alerts that all servers of a store share, the worst and newest first.
    pub(super) fn shared_alerts(&self) -> Vec<SharedAlert> {
        let shared = self.firing.values().filter(|firing| is_shared(firing.source));
        let mut left: Vec<SharedAlert> =
            shared.map(|firing| SharedAlert { alert: firing.alert.clone(), source: firing.source }).collect();
        left.sort_by(|a, b| worst_and_newest(&a.alert, &b.alert));
        left
    }

    /// Takes over the alerts of another server under the same ids. Returns those that begin to fire here, and those of
    /// this board that no sink has been notified of.
    pub(super) fn take_over(&mut self, left: Vec<SharedAlert>) -> (Vec<Notice>, Vec<Alert>) {
        let started = self.adopt(left);
        let unsent = self.firing.values().filter(|firing| is_shared(firing.source) && !firing.notified);
        let unsent = unsent.map(|firing| firing.alert.clone()).collect();
        (started, unsent)
    }

    /// Shows the alerts of the leader, which alone decides what resolves. One-time occurrences stay until they are
    /// quiet: the leader may have died before it received them.
    pub(super) fn mirror(&mut self, left: Vec<SharedAlert>, now_ms: u64) -> Vec<Notice> {
        let named: BTreeSet<AlertKey> = left.iter().map(|left| left.alert.key()).collect();
        let mut notices = self.adopt(left);
        let over = |(key, firing): (&AlertKey, &FiringAlert)| {
            (firing.source.is_some() && is_shared(firing.source) && !named.contains(key)).then(|| key.clone())
        };
        let over: Vec<AlertKey> = self.firing.iter().filter_map(over).collect();
        notices.extend(over.into_iter().filter_map(|key| self.resolve(&key, now_ms)));
        notices
    }

    /// Adds shared alerts, and returns notices for those that begin to fire here or got worse.
    fn adopt(&mut self, left: Vec<SharedAlert>) -> Vec<Notice> {
        let mut started = Vec::new();
        for SharedAlert { alert, source } in left {
            let before = self.firing.get(&alert.key()).map(|firing| firing.alert.level);
            if before.is_none_or(|before| alert.level > before) {
                started.push(Notice::new(AlertState::Firing, &alert));
            }
            self.firing.insert(alert.key(), FiringAlert { alert, source, notified: true });
        }
        started
    }

    /// Returns the firing alerts, the worst and newest first.
    pub(super) fn firing(&self) -> Vec<Alert> {
        let mut firing: Vec<Alert> = self.firing.values().map(|firing| firing.alert.clone()).collect();
        firing.sort_by(worst_and_newest);
        firing
    }

    /// Returns the firing alerts of one source.
    pub(super) fn firing_from(&self, source: Source) -> Vec<Alert> {
        self.firing.values().filter(|firing| firing.source == Some(source)).map(|firing| firing.alert.clone()).collect()
    }

    /// Iterates over the resolved alerts, newest first.
    pub(super) fn resolved(&self) -> impl Iterator<Item = &Alert> {
        self.resolved.iter()
    }

    /// Counts the firing alerts of a level.
    pub(super) fn count(&self, level: Level) -> usize {
        self.firing.values().filter(|firing| firing.alert.level == level).count()
    }

    fn fire(&mut self, key: AlertKey, condition: Condition, source: Option<Source>, now_ms: u64) -> Option<Notice> {
        if let Some(firing) = self.firing.get_mut(&key) {
            let worse = condition.level > firing.alert.level;
            let alert = &mut firing.alert;
            (alert.level, alert.message, alert.value) = (condition.level, condition.message, condition.value);
            alert.owner = condition.owner.or(alert.owner.take());
            alert.last_ms = now_ms;
            alert.count += u64::from(source.is_none());
            firing.source = source;
            firing.notified &= !worse;
            return worse.then(|| Notice::new(AlertState::Firing, &firing.alert).with_source(source));
        }
        if self.firing.len() >= MAX_FIRING {
            if !std::mem::replace(&mut self.full, true) {
                tracing::error!(firing = MAX_FIRING, "too many alerts fire: some are not shown");
            }
            return None;
        }
        self.full = false;
        let alert = Alert {
            id: id(&key, now_ms),
            kind: Cow::Borrowed(condition.kind),
            level: condition.level,
            message: condition.message,
            value: condition.value,
            name: condition.name.map(|name| name.to_string()),
            owner: condition.owner,
            holder_id: condition.holder_id,
            since_ms: now_ms,
            last_ms: now_ms,
            count: 1,
            resolved_ms: None,
        };
        let notice = Notice::new(AlertState::Firing, &alert).with_source(source);
        self.firing.insert(key, FiringAlert { alert, source, notified: false });
        Some(notice)
    }

    fn resolve(&mut self, key: &AlertKey, now_ms: u64) -> Option<Notice> {
        let FiringAlert { mut alert, source, .. } = self.firing.remove(key)?;
        alert.resolved_ms = Some(now_ms);
        let notice = Notice::new(AlertState::Resolved, &alert).with_source(source);
        self.resolved.push_front(alert);
        self.resolved.truncate(MAX_RESOLVED);
        Some(notice)
    }
}

fn is_shared(source: Option<Source>) -> bool {
    source.is_none_or(|source| !source.is_local())
}

fn worst_and_newest(a: &Alert, b: &Alert) -> std::cmp::Ordering {
    (b.level, b.since_ms, &a.id).cmp(&(a.level, a.since_ms, &b.id))
}

fn condition_key(condition: &Condition) -> AlertKey {
    (Cow::Borrowed(condition.kind), condition.name.as_ref().map(ToString::to_string), condition.holder_id.clone())
}

fn id((kind, name, holder): &AlertKey, since_ms: u64) -> String {
    let mut hash = Sha256::new();
    for part in [Some(&**kind), name.as_deref(), holder.as_deref()] {
        hash.update(part.unwrap_or(""));
        hash.update([0]);
    }
    let hash: String = hash.finalize().iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    format!("{hash}-{since_ms}")
}

#[cfg(test)]
mod tests {
    use leasehold::LockName;

    use super::*;

    fn condition(kind: &'static str, level: Level, name: &str, holder: &str) -> Condition {
        Condition {
            name: Some(LockName::new(name).expect("a name")),
            holder_id: Some(holder.to_owned()),
            ..Condition::new(kind, level, "a message")
        }
    }

    fn states(notices: &[Notice]) -> Vec<(AlertState, &str)> {
        notices.iter().map(|notice| (notice.state, &*notice.alert.kind)).collect()
    }

    #[test]
    fn a_condition_fires_once_and_resolves_when_it_is_no_longer_reported() {
        let mut board = Board::default();
        let over = || condition("lock_over_soft", Level::Warning, "a", "h1");
        assert_eq!(
            states(&board.report(Source::Monitor, vec![over(), over()], 1_000)),
            [(AlertState::Firing, "lock_over_soft")]
        );
        assert!(board.report(Source::Monitor, vec![over()], 2_000).is_empty(), "notified before");
        assert!(board.report(Source::Journal, vec![], 2_500).is_empty(), "another source resolves nothing");
        let firing = board.firing();
        assert_eq!((firing.len(), firing[0].since_ms, firing[0].last_ms, firing[0].count), (1, 1_000, 2_000, 1));
        // The lock changed hands: another holder is another alert.
        let next = condition("lock_over_soft", Level::Warning, "a", "h2");
        let notices = board.report(Source::Monitor, vec![next], 3_000);
        assert_eq!(
            states(&notices),
            [(AlertState::Firing, "lock_over_soft"), (AlertState::Resolved, "lock_over_soft")]
        );
        assert_eq!((notices[1].alert.since_ms, notices[1].alert.resolved_ms), (1_000, Some(3_000)));
        assert_eq!(notices[1].alert.id, firing[0].id);
        assert_eq!(states(&board.report(Source::Monitor, vec![], 4_000)), [(AlertState::Resolved, "lock_over_soft")]);
        let resolved: Vec<_> = board.resolved().map(|alert| alert.resolved_ms).collect();
        assert_eq!(resolved, [Some(4_000), Some(3_000)], "newest first");
        let again = board.report(Source::Monitor, vec![over()], 5_000);
        assert_ne!(again[0].alert.id, firing[0].id, "fired anew");
    }

    #[test]
    fn an_alert_that_gets_worse_is_sent_again() {
        let mut board = Board::default();
        let at = |level| vec![condition("risky_store_settings", level, "x", "")];
        assert_eq!(board.report(Source::Checkup, at(Level::Warning), 1).len(), 1);
        assert_eq!(board.report(Source::Checkup, at(Level::Critical), 2).len(), 1);
        assert!(board.report(Source::Checkup, at(Level::Warning), 3).is_empty(), "an improvement is not sent");
        assert_eq!((board.count(Level::Warning), board.count(Level::Critical)), (1, 0));
    }

    #[test]
    fn an_occurrence_resolves_after_a_quiet_period() {
        let mut board = Board::default();
        let happened = || condition("lua_script_error", Level::Critical, "gpu_lock:0", "h");
        assert!(board.record_occurrence(happened(), 0).is_some());
        assert!(board.record_occurrence(happened(), QUIET_MS - 1).is_none(), "the same again");
        assert_eq!(board.firing()[0].count, 2);
        assert!(board.tick(QUIET_MS).is_empty());
        assert!(board.report(Source::Monitor, vec![], QUIET_MS).is_empty(), "no source ends it");
        assert_eq!(states(&board.tick(2 * QUIET_MS)), [(AlertState::Resolved, "lua_script_error")]);
    }

    #[test]
    fn the_board_is_bounded() {
        let mut board = Board::default();
        let all: Vec<_> =
            (0..MAX_FIRING + 10).map(|n| condition("dead_holder", Level::Warning, &format!("l{n}"), "h")).collect();
        assert_eq!(board.report(Source::Monitor, all, 1).len(), MAX_FIRING);
        assert_eq!(board.report(Source::Monitor, vec![], 2).len(), MAX_FIRING);
        assert_eq!(board.resolved().count(), MAX_RESOLVED);
        board.tick(3 + RESOLVED_KEPT_MS);
        assert_eq!(board.resolved().count(), 0);
    }

    #[test]
    fn a_notice_is_flat() {
        let mut board = Board::default();
        let notices =
            board.report(Source::Monitor, vec![condition("dead_holder", Level::Critical, "a", "h").value(3.5)], 7);
        let json = serde_json::to_value(&notices[0]).expect("JSON");
        assert_eq!(
            (&json["kind"], &json["state"], &json["type"], &json["level"], &json["value"], &json["name"]),
            (&"alert".into(), &"firing".into(), &"dead_holder".into(), &"critical".into(), &3.5.into(), &"a".into())
        );
        assert!(json["resolved_ms"].is_null() && json["owner"].is_null());
    }

    #[test]
    fn the_next_leader_continues_where_the_last_one_stopped() {
        let (mut leader, mut other) = (Board::default(), Board::default());
        let over = || condition("lock_over_hard", Level::Critical, "a", "h");
        let dead = || condition("dead_holder", Level::Warning, "b", "h");
        let script = || condition("lua_script_error", Level::Critical, "c", "h");
        leader.report(Source::Monitor, vec![over(), dead()], 1_000);
        leader.report(Source::Journal, vec![Condition::new("journal_not_empty", Level::Warning, "its own")], 1_000);
        let left = leader.shared_alerts();
        assert_eq!(left.iter().map(|left| &*left.alert.kind).collect::<Vec<_>>(), ["lock_over_hard", "dead_holder"]);
        let read: Vec<SharedAlert> =
            serde_json::from_str(&serde_json::to_string(&left).expect("JSON")).expect("read as it was written");
        assert_eq!(read, left);

        // A follower shows the alerts of the leader and its own journal.
        other.report(Source::Journal, vec![Condition::new("journal_not_empty", Level::Warning, "its own")], 1_100);
        assert_eq!(other.mirror(left.clone(), 1_200).len(), 2, "they begin to be shown");
        assert!(other.mirror(left.clone(), 1_300).is_empty(), "once");
        assert_eq!(other.firing().len(), 3);
        leader.report(Source::Monitor, vec![over()], 2_000);
        assert_eq!(states(&other.mirror(leader.shared_alerts(), 2_100)), [(AlertState::Resolved, "dead_holder")]);

        // The leader dies. Alerts that it did not send are sent now; those it sent are sent neither again nor as
        // resolved.
        assert!(other.record_occurrence(script(), 2_200).is_some());
        let (started, unsent) = other.take_over(leader.shared_alerts());
        assert!(started.is_empty(), "shown already");
        assert_eq!(unsent.iter().map(|alert| &*alert.kind).collect::<Vec<_>>(), ["lua_script_error"]);
        other.mark_notified(|_| true);
        assert_eq!(other.take_over(leader.shared_alerts()), (vec![], vec![]), "sent once");
        assert!(other.report(Source::Monitor, vec![over()], 3_000).is_empty());
        let over = other.report(Source::Monitor, vec![], 4_000);
        assert_eq!(states(&over), [(AlertState::Resolved, "lock_over_hard")]);
        assert_eq!((&over[0].alert.id, over[0].alert.since_ms), (&left[0].alert.id, 1_000), "the same alert");
    }

    #[test]
    fn local_conditions_are_marked_as_local() {
        let mut board = Board::default();
        let down = || vec![Condition::new("store_down", Level::Critical, "it does not answer")];
        assert!(board.report(Source::Store, down(), 1)[0].is_local);
        assert!(board.report(Source::Store, vec![], 2)[0].is_local, "its end as well");
        let over = vec![condition("lock_over_hard", Level::Critical, "a", "h")];
        assert!(!board.report(Source::Monitor, over, 3)[0].is_local);
    }
}
