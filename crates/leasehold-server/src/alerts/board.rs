//! Which alerts fire, since when, and which have resolved. No clock, no I/O: time is given.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::condition::{Condition, Level, Source};

/// Alerts that fire at once. Beyond it something is wrong with everything, and one more says nothing.
const MOST_FIRING: usize = 5_000;
/// Resolved alerts that are shown on, and for how long.
const KEPT: usize = 500;
const KEPT_FOR_MS: u64 = 6 * 60 * 60 * 1_000;
/// What happened once, and not again for so long, is over.
pub(super) const QUIET_MS: u64 = 15 * 60 * 1_000;

/// Something a person should know of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub(crate) struct Alert {
    /// Names it. An alert of the same type, lock and holder that fires anew has another id.
    #[schema(example = "5e0f12ab90c4-1794868712347")]
    pub(crate) id: String,
    /// What it is about: `lock_over_hard`, `store_down`, …
    #[serde(rename = "type")]
    #[schema(value_type = String, example = "lock_over_hard")]
    pub(crate) kind: Cow<'static, str>,
    /// How bad it is.
    pub(crate) level: Level,
    /// What is the matter, for people.
    pub(crate) message: String,
    /// The figure behind it: seconds, a rate, a count.
    pub(crate) value: Option<f64>,
    /// The lock, if it is about one.
    pub(crate) name: Option<String>,
    /// Who holds it.
    pub(crate) owner: Option<String>,
    /// The same, as it is named elsewhere.
    pub(crate) holder_id: Option<String>,
    /// Since when.
    pub(crate) since_ms: u64,
    /// When it was last seen to hold, or happened last.
    pub(crate) last_ms: u64,
    /// How often it happened.
    pub(crate) count: u64,
    /// When it was over; `null` while it fires.
    pub(crate) resolved_ms: Option<u64>,
}

impl Level {
    /// The word for it, as in JSON.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Warning => "warning",
            Self::Critical => "critical",
        }
    }
}

/// Whether an alert begins or is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum State {
    /// It fires.
    Firing,
    /// It is over.
    Resolved,
}

/// What people are told.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Notice {
    /// Sets it apart from the other events of the stream.
    kind: &'static str,
    pub(crate) state: State,
    #[serde(flatten)]
    pub(crate) alert: Alert,
    /// Only this server knows of it.
    #[serde(skip)]
    pub(crate) is_local: bool,
}

impl Notice {
    pub(crate) fn new(state: State, alert: &Alert) -> Self {
        Self { kind: "alert", state, alert: alert.clone(), is_local: false }
    }

    fn of(self, source: Option<Source>) -> Self {
        Self { is_local: !is_shared(source), ..self }
    }
}

/// Type, lock and holder.
type Key = (Cow<'static, str>, Option<String>, Option<String>);

#[derive(Debug)]
struct Firing {
    alert: Alert,
    /// Who says when it is over; `None`: silence does.
    source: Option<Source>,
    /// Whether those who are to be told were.
    told: bool,
}

/// An alert that fires, as servers of one store leave it to each other.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Left {
    #[serde(flatten)]
    pub(super) alert: Alert,
    /// As on the board.
    pub(super) source: Option<Source>,
}

/// All alerts.
#[derive(Debug, Default)]
pub(crate) struct Board {
    firing: BTreeMap<Key, Firing>,
    resolved: VecDeque<Alert>,
    full: bool,
}

impl Board {
    /// Everything that one source finds to hold at this moment. What it named before and names no longer is over.
    pub(super) fn holding(&mut self, source: Source, conditions: Vec<Condition>, now_ms: u64) -> Vec<Notice> {
        let mut notices = Vec::new();
        let mut named = BTreeSet::new();
        for condition in conditions {
            let key = key(&condition);
            // Twice in one report is once.
            if named.insert(key.clone()) {
                notices.extend(self.fire(key, condition, Some(source), now_ms));
            }
        }
        let over = |(key, firing): (&Key, &Firing)| {
            (firing.source == Some(source) && !named.contains(key)).then(|| key.clone())
        };
        let over: Vec<Key> = self.firing.iter().filter_map(over).collect();
        notices.extend(over.into_iter().filter_map(|key| self.resolve(&key, now_ms)));
        notices
    }

    /// Something that happened once. It is over when it has not happened again for a while.
    pub(super) fn happened(&mut self, condition: Condition, now_ms: u64) -> Option<Notice> {
        self.fire(key(&condition), condition, None, now_ms)
    }

    /// Time has passed.
    pub(super) fn tick(&mut self, now_ms: u64) -> Vec<Notice> {
        let quiet =
            |firing: &Firing| firing.source.is_none() && now_ms.saturating_sub(firing.alert.last_ms) >= QUIET_MS;
        let over: Vec<Key> = self.firing.iter().filter(|(_, f)| quiet(f)).map(|(key, _)| key.clone()).collect();
        let notices = over.into_iter().filter_map(|key| self.resolve(&key, now_ms)).collect();
        let old = |alert: &Alert| now_ms.saturating_sub(alert.resolved_ms.unwrap_or(now_ms)) > KEPT_FOR_MS;
        while self.resolved.back().is_some_and(old) {
            self.resolved.pop_back();
        }
        notices
    }

    /// Everybody who is to be told has been told of everything that `whose` says is theirs to be told of.
    pub(super) fn told(&mut self, whose: impl Fn(Option<Source>) -> bool) {
        for firing in self.firing.values_mut().filter(|firing| whose(firing.source)) {
            firing.told = true;
        }
    }

    /// What all servers of a store share, for the next one that leads: the worst and newest first.
    pub(super) fn left(&self) -> Vec<Left> {
        let shared = self.firing.values().filter(|firing| is_shared(firing.source));
        let mut left: Vec<Left> =
            shared.map(|firing| Left { alert: firing.alert.clone(), source: firing.source }).collect();
        left.sort_by(|a, b| worst_and_newest(&a.alert, &b.alert));
        left
    }

    /// Takes over what another server told: the same alerts, under the same ids. What it says nothing of stays, and is
    /// returned if nobody was told of it.
    pub(super) fn take_over(&mut self, left: Vec<Left>) -> (Vec<Notice>, Vec<Alert>) {
        let begun = self.put_up(left);
        let untold = self.firing.values().filter(|firing| is_shared(firing.source) && !firing.told);
        let untold = untold.map(|firing| firing.alert.clone()).collect();
        (begun, untold)
    }

    /// Shows what the server that leads told: it alone says what is over. What happened once stays until it has
    /// been quiet: the one that leads may have died before it heard of it.
    pub(super) fn mirror(&mut self, left: Vec<Left>, now_ms: u64) -> Vec<Notice> {
        let named: BTreeSet<Key> = left.iter().map(|left| left.alert.key()).collect();
        let mut notices = self.put_up(left);
        let over = |(key, firing): (&Key, &Firing)| {
            (firing.source.is_some() && is_shared(firing.source) && !named.contains(key)).then(|| key.clone())
        };
        let over: Vec<Key> = self.firing.iter().filter_map(over).collect();
        notices.extend(over.into_iter().filter_map(|key| self.resolve(&key, now_ms)));
        notices
    }

    /// What begins to fire here by that, or got worse.
    fn put_up(&mut self, left: Vec<Left>) -> Vec<Notice> {
        let mut begun = Vec::new();
        for Left { alert, source } in left {
            let before = self.firing.get(&alert.key()).map(|firing| firing.alert.level);
            if before.is_none_or(|before| alert.level > before) {
                begun.push(Notice::new(State::Firing, &alert));
            }
            self.firing.insert(alert.key(), Firing { alert, source, told: true });
        }
        begun
    }

    /// Those that fire, the worst and newest first.
    pub(super) fn firing(&self) -> Vec<Alert> {
        let mut firing: Vec<Alert> = self.firing.values().map(|firing| firing.alert.clone()).collect();
        firing.sort_by(worst_and_newest);
        firing
    }

    /// Those of one source that fire.
    pub(super) fn of(&self, source: Source) -> Vec<Alert> {
        self.firing.values().filter(|firing| firing.source == Some(source)).map(|firing| firing.alert.clone()).collect()
    }

    /// Those that have resolved, newest first.
    pub(super) fn resolved(&self) -> impl Iterator<Item = &Alert> {
        self.resolved.iter()
    }

    /// How many fire at a level.
    pub(super) fn count(&self, level: Level) -> usize {
        self.firing.values().filter(|firing| firing.alert.level == level).count()
    }

    fn fire(&mut self, key: Key, condition: Condition, source: Option<Source>, now_ms: u64) -> Option<Notice> {
        if let Some(firing) = self.firing.get_mut(&key) {
            let worse = condition.level > firing.alert.level;
            let alert = &mut firing.alert;
            (alert.level, alert.message, alert.value) = (condition.level, condition.message, condition.value);
            alert.owner = condition.owner.or(alert.owner.take());
            alert.last_ms = now_ms;
            alert.count += u64::from(source.is_none());
            firing.source = source;
            firing.told &= !worse;
            return worse.then(|| Notice::new(State::Firing, &firing.alert).of(source));
        }
        if self.firing.len() >= MOST_FIRING {
            if !std::mem::replace(&mut self.full, true) {
                tracing::error!(firing = MOST_FIRING, "more alerts than are kept: some are not shown");
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
        let notice = Notice::new(State::Firing, &alert).of(source);
        self.firing.insert(key, Firing { alert, source, told: false });
        Some(notice)
    }

    fn resolve(&mut self, key: &Key, now_ms: u64) -> Option<Notice> {
        let Firing { mut alert, source, .. } = self.firing.remove(key)?;
        alert.resolved_ms = Some(now_ms);
        let notice = Notice::new(State::Resolved, &alert).of(source);
        self.resolved.push_front(alert);
        self.resolved.truncate(KEPT);
        Some(notice)
    }
}

impl Alert {
    fn key(&self) -> Key {
        (self.kind.clone(), self.name.clone(), self.holder_id.clone())
    }
}

fn is_shared(source: Option<Source>) -> bool {
    source.is_none_or(|source| !source.is_local())
}

fn worst_and_newest(a: &Alert, b: &Alert) -> std::cmp::Ordering {
    (b.level, b.since_ms, &a.id).cmp(&(a.level, a.since_ms, &b.id))
}

fn key(condition: &Condition) -> Key {
    (Cow::Borrowed(condition.kind), condition.name.as_ref().map(ToString::to_string), condition.holder_id.clone())
}

fn id((kind, name, holder): &Key, since_ms: u64) -> String {
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
            ..Condition::new(kind, level, "it is so")
        }
    }

    fn states(notices: &[Notice]) -> Vec<(State, &str)> {
        notices.iter().map(|notice| (notice.state, &*notice.alert.kind)).collect()
    }

    #[test]
    fn what_holds_is_told_once_and_resolved_when_it_is_no_longer_named() {
        let mut board = Board::default();
        let over = || condition("lock_over_soft", Level::Warning, "a", "h1");
        assert_eq!(
            states(&board.holding(Source::Monitor, vec![over(), over()], 1_000)),
            [(State::Firing, "lock_over_soft")]
        );
        assert!(board.holding(Source::Monitor, vec![over()], 2_000).is_empty(), "told before");
        assert!(board.holding(Source::Journal, vec![], 2_500).is_empty(), "another source's business");
        let firing = board.firing();
        assert_eq!((firing.len(), firing[0].since_ms, firing[0].last_ms, firing[0].count), (1, 1_000, 2_000, 1));
        // The lock changed hands: another holder is another alert.
        let next = condition("lock_over_soft", Level::Warning, "a", "h2");
        let told = board.holding(Source::Monitor, vec![next], 3_000);
        assert_eq!(states(&told), [(State::Firing, "lock_over_soft"), (State::Resolved, "lock_over_soft")]);
        assert_eq!((told[1].alert.since_ms, told[1].alert.resolved_ms), (1_000, Some(3_000)));
        assert_eq!(told[1].alert.id, firing[0].id);
        assert_eq!(states(&board.holding(Source::Monitor, vec![], 4_000)), [(State::Resolved, "lock_over_soft")]);
        let resolved: Vec<_> = board.resolved().map(|alert| alert.resolved_ms).collect();
        assert_eq!(resolved, [Some(4_000), Some(3_000)], "newest first");
        let again = board.holding(Source::Monitor, vec![over()], 5_000);
        assert_ne!(again[0].alert.id, firing[0].id, "fired anew");
    }

    #[test]
    fn what_gets_worse_is_told_again() {
        let mut board = Board::default();
        let at = |level| vec![condition("risky_store_settings", level, "x", "")];
        assert_eq!(board.holding(Source::Checkup, at(Level::Warning), 1).len(), 1);
        assert_eq!(board.holding(Source::Checkup, at(Level::Critical), 2).len(), 1);
        assert!(board.holding(Source::Checkup, at(Level::Warning), 3).is_empty(), "better is not worth a message");
        assert_eq!((board.count(Level::Warning), board.count(Level::Critical)), (1, 0));
    }

    #[test]
    fn what_happened_is_over_after_a_quiet_while() {
        let mut board = Board::default();
        let happened = || condition("lua_script_error", Level::Critical, "gpu_lock:0", "h");
        assert!(board.happened(happened(), 0).is_some());
        assert!(board.happened(happened(), QUIET_MS - 1).is_none(), "the same again");
        assert_eq!(board.firing()[0].count, 2);
        assert!(board.tick(QUIET_MS).is_empty());
        assert!(board.holding(Source::Monitor, vec![], QUIET_MS).is_empty(), "no source ends it");
        assert_eq!(states(&board.tick(2 * QUIET_MS)), [(State::Resolved, "lua_script_error")]);
    }

    #[test]
    fn neither_the_firing_nor_the_resolved_grow_without_end() {
        let mut board = Board::default();
        let all: Vec<_> =
            (0..MOST_FIRING + 10).map(|n| condition("dead_holder", Level::Warning, &format!("l{n}"), "h")).collect();
        assert_eq!(board.holding(Source::Monitor, all, 1).len(), MOST_FIRING);
        assert_eq!(board.holding(Source::Monitor, vec![], 2).len(), MOST_FIRING);
        assert_eq!(board.resolved().count(), KEPT);
        board.tick(3 + KEPT_FOR_MS);
        assert_eq!(board.resolved().count(), 0);
    }

    #[test]
    fn a_notice_is_flat() {
        let mut board = Board::default();
        let told =
            board.holding(Source::Monitor, vec![condition("dead_holder", Level::Critical, "a", "h").value(3.5)], 7);
        let json = serde_json::to_value(&told[0]).expect("JSON");
        assert_eq!(
            (&json["kind"], &json["state"], &json["type"], &json["level"], &json["value"], &json["name"]),
            (&"alert".into(), &"firing".into(), &"dead_holder".into(), &"critical".into(), &3.5.into(), &"a".into())
        );
        assert!(json["resolved_ms"].is_null() && json["owner"].is_null());
    }

    #[test]
    fn whoever_leads_next_goes_on_where_the_last_one_stopped() {
        let (mut leader, mut other) = (Board::default(), Board::default());
        let over = || condition("lock_over_hard", Level::Critical, "a", "h");
        let dead = || condition("dead_holder", Level::Warning, "b", "h");
        let script = || condition("lua_script_error", Level::Critical, "c", "h");
        leader.holding(Source::Monitor, vec![over(), dead()], 1_000);
        leader.holding(Source::Journal, vec![Condition::new("journal_not_empty", Level::Warning, "its own")], 1_000);
        let left = leader.left();
        assert_eq!(left.iter().map(|left| &*left.alert.kind).collect::<Vec<_>>(), ["lock_over_hard", "dead_holder"]);
        let read: Vec<Left> =
            serde_json::from_str(&serde_json::to_string(&left).expect("JSON")).expect("read as it was written");
        assert_eq!(read, left);

        // While it does not lead it shows what the leader tells, and its own journal.
        other.holding(Source::Journal, vec![Condition::new("journal_not_empty", Level::Warning, "its own")], 1_100);
        assert_eq!(other.mirror(left.clone(), 1_200).len(), 2, "they begin to be shown");
        assert!(other.mirror(left.clone(), 1_300).is_empty(), "once");
        assert_eq!(other.firing().len(), 3);
        leader.holding(Source::Monitor, vec![over()], 2_000);
        assert_eq!(states(&other.mirror(leader.left(), 2_100)), [(State::Resolved, "dead_holder")]);

        // The leader dies. What it did not come to tell is told; what it told is not told again, also not as over.
        assert!(other.happened(script(), 2_200).is_some());
        let (begun, untold) = other.take_over(leader.left());
        assert!(begun.is_empty(), "shown already");
        assert_eq!(untold.iter().map(|alert| &*alert.kind).collect::<Vec<_>>(), ["lua_script_error"]);
        other.told(|_| true);
        assert_eq!(other.take_over(leader.left()), (vec![], vec![]), "and that once");
        assert!(other.holding(Source::Monitor, vec![over()], 3_000).is_empty());
        let over = other.holding(Source::Monitor, vec![], 4_000);
        assert_eq!(states(&over), [(State::Resolved, "lock_over_hard")]);
        assert_eq!((&over[0].alert.id, over[0].alert.since_ms), (&left[0].alert.id, 1_000), "the same alert");
    }

    #[test]
    fn what_only_one_server_knows_is_told_by_it() {
        let mut board = Board::default();
        let down = || vec![Condition::new("store_down", Level::Critical, "it does not answer")];
        assert!(board.holding(Source::Store, down(), 1)[0].is_local);
        assert!(board.holding(Source::Store, vec![], 2)[0].is_local, "its end as well");
        let over = vec![condition("lock_over_hard", Level::Critical, "a", "h")];
        assert!(!board.holding(Source::Monitor, over, 3)[0].is_local);
    }
}
