//! What is to be thought of one holder, and what is to be done about it. No clock, no I/O: every case is a unit
//! test.

use std::time::Duration;

use leasehold::config::{GpuLockMonitor, LockNames};
use leasehold::{EvictMode, Holder, LockName};

use super::ELECTION;
use crate::alerts::{Condition, Level};

/// A lease longer than this is more likely forgotten than needed.
const STALE: Duration = Duration::from_secs(7_200);
/// Another kind of client holds task locks, too; whatever else it keeps in the store is its own business.
const TASKS: &str = "task_lock:";

/// When somebody is told, and what may be done.
#[derive(Debug, Clone)]
pub(crate) struct Rules {
    pub(crate) warning: Duration,
    pub(crate) soft: Duration,
    pub(crate) hard: Duration,
    /// A sign of life is expected this often.
    pub(crate) heartbeat: Duration,
    /// Without one for so long, a holder counts as dead.
    pub(crate) silence: Duration,
    /// Whether locks are taken away at all.
    pub(crate) auto_recovery: bool,
    /// Also from the living, when they are over the hard level.
    pub(crate) evict_living: bool,
    /// The locks that the levels are for, and that may be taken away.
    pub(crate) names: LockNames,
}

impl From<&GpuLockMonitor> for Rules {
    fn from(section: &GpuLockMonitor) -> Self {
        let levels = &section.timeout_levels;
        Self {
            warning: levels.warning,
            soft: levels.soft_timeout,
            hard: levels.hard_timeout,
            heartbeat: section.heartbeat.interval,
            silence: section.heartbeat.timeout.duration(),
            auto_recovery: section.auto_recovery,
            evict_living: section.evict_living,
            names: section.names.clone(),
        }
    }
}

/// What no single look can tell of a holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Past {
    /// When it was first seen: what is known of a foreign holder's age.
    first_seen_ms: u64,
    /// When its lease was last seen to be prolonged, or it was first seen: for a lease that does not say so itself.
    moved_ms: u64,
    /// When its lease was to end by the last look; `None`: never.
    ends_ms: Option<u64>,
    /// Since when its process cannot be reached.
    gone_since_ms: Option<u64>,
}

/// Two looks at the same end of a lease differ by less than this.
const SAME_END_MS: u64 = 1_000;

impl Past {
    /// Of a holder that is seen for the first time.
    pub(crate) fn new(holder: &Holder, now_ms: u64) -> Self {
        Self {
            first_seen_ms: now_ms,
            moved_ms: now_ms,
            ends_ms: ends_ms(holder, now_ms),
            gone_since_ms: (holder.connected == Some(false)).then_some(now_ms),
        }
    }

    /// Of a holder that another server has seen: since when it is held, and since when its process is gone.
    pub(crate) fn recalled(first_seen_ms: u64, gone_since_ms: Option<u64>, now_ms: u64) -> Self {
        Self { first_seen_ms, moved_ms: now_ms, ends_ms: None, gone_since_ms }
    }

    /// When it was first seen, and since when its process is gone.
    pub(crate) fn began(&self) -> (u64, Option<u64>) {
        (self.first_seen_ms, self.gone_since_ms)
    }

    /// The same holder, seen again.
    pub(crate) fn seen_again(&mut self, holder: &Holder, now_ms: u64) {
        let ends_ms = ends_ms(holder, now_ms);
        let prolonged = match (self.ends_ms, ends_ms) {
            (Some(before), Some(now)) => now > before + SAME_END_MS,
            // Whoever gives a key an end again is at work.
            (before, now) => before != now,
        };
        if prolonged {
            self.moved_ms = now_ms;
        }
        self.ends_ms = ends_ms;
        self.gone_since_ms = match holder.connected {
            Some(false) => self.gone_since_ms.or(Some(now_ms)),
            _ => None,
        };
    }
}

fn ends_ms(holder: &Holder, now_ms: u64) -> Option<u64> {
    Some(now_ms.saturating_add(u64::try_from(holder.ttl_left?.as_millis()).unwrap_or(u64::MAX)))
}

/// What is thought of a holder.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Verdict {
    /// What somebody should know.
    pub(crate) conditions: Vec<Condition>,
    /// What is to be done.
    pub(crate) action: Option<Action>,
    /// Whether its past matters at the next look.
    pub(crate) remember: bool,
}

/// What is to be done to a holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// It is asked to come to an end: at the soft level, and again at the hard one.
    Ask {
        at: Reached,
        why: String,
    },
    Evict {
        mode: EvictMode,
        why: String,
    },
}

/// How far over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Reached {
    Warning,
    Soft,
    Hard,
}

/// Judges one holder by one look at it.
pub(crate) fn judge(name: &LockName, holder: &Holder, past: &Past, now_ms: u64, rules: &Rules) -> Verdict {
    let look = Look::new(holder, past, now_ms);
    let watched = rules.names.contains(name) && name.as_str() != ELECTION;
    let dead = look.is_dead(rules);
    let reached = if watched { rules.reached(look.held) } else { None };

    let mut conditions = Vec::new();
    let mut tell = |kind, level, value: Duration, what: String| {
        let message = format!("{name}: {what}");
        conditions.push(Condition::new(kind, level, message).held(name, holder).value(value.as_secs_f64()));
    };
    for (over, kind, level) in [
        (Reached::Warning, "lock_over_warning", Level::Warning),
        (Reached::Soft, "lock_over_soft", Level::Warning),
        (Reached::Hard, "lock_over_hard", Level::Critical),
    ] {
        if reached.is_some_and(|reached| reached >= over) {
            let held = shown(look.held);
            let alive = if dead { "without a sign of life" } else { "and alive" };
            tell(kind, level, look.held, format!("held by {} for {held} {alive}", holder.owner));
        }
    }
    if let Some(text) = look.cannot_be_reached(rules) {
        tell("dead_holder", Level::Warning, look.silent, format!("the process of {} {text}", holder.owner));
    } else if watched && dead && !holder.foreign {
        let text = format!("no sign of life of {} for {}", holder.owner, shown(look.silent));
        tell("dead_holder", Level::Warning, look.silent, text);
    }
    if !holder.foreign || watched || name.as_str().starts_with(TASKS) {
        let lease = holder.ttl.into_iter().chain(holder.ttl_left).max();
        match lease {
            Some(lease) if lease > STALE => {
                tell("stale_lock", Level::Warning, lease, format!("a lease of {} by {}", shown(lease), holder.owner));
            }
            // Of ours, somebody took the end away; the next renewal puts it back.
            _ if holder.ttl_left.is_none() && (holder.foreign || dead) => {
                tell("stale_lock", Level::Warning, look.held, format!("held by {}, and never ends", holder.owner));
            }
            _ => {}
        }
    }
    let action = if watched { decide(holder, &look, dead, reached, rules) } else { None };
    let remember = !conditions.is_empty() || look.gone_for.is_some() || (watched && holder.foreign);
    Verdict { conditions, action, remember }
}

/// Decides what is done to a holder of a watched lock. Nothing is taken away below the hard level, and a lease of ours
/// is revoked, never forced: its holder may be alive, cut off from the store, and believe in it until its ttl ends.
fn decide(holder: &Holder, look: &Look<'_>, dead: bool, reached: Option<Reached>, rules: &Rules) -> Option<Action> {
    let over_hard = reached == Some(Reached::Hard);
    let held = shown(look.held);
    if over_hard && rules.auto_recovery && (dead || rules.evict_living) {
        let mode = if holder.foreign || look.has_outlived_its_ttl() { EvictMode::Force } else { EvictMode::Revoke };
        let why = if dead {
            format!("no sign of life for {}, and held for {held}: over the hard level", shown(look.silent))
        } else {
            format!("held for {held}, over the hard level, and the living are evicted too")
        };
        return (mode == EvictMode::Force || !holder.revoked).then_some(Action::Evict { mode, why });
    }
    let at = reached.filter(|reached| *reached >= Reached::Soft && !dead)?;
    let why = format!("held for {held}: please come to an end");
    (look.can_be_asked() && !holder.revoked).then_some(Action::Ask { at, why })
}

/// One look, with what the past adds to it.
struct Look<'a> {
    holder: &'a Holder,
    held: Duration,
    /// Since the last sign of life.
    silent: Duration,
    gone_for: Option<Duration>,
}

impl<'a> Look<'a> {
    fn new(holder: &'a Holder, past: &Past, now_ms: u64) -> Self {
        let since = |then_ms: u64| Duration::from_millis(now_ms.saturating_sub(then_ms));
        let held = since(if holder.since_ms > 0 { holder.since_ms } else { past.first_seen_ms });
        let silent = match (holder.ttl, holder.ttl_left) {
            // A renewal restores the recorded ttl: what is missing of it is the time since the last one.
            (Some(ttl), Some(left)) => ttl.saturating_sub(left).min(held),
            _ => since(past.moved_ms),
        };
        Self { holder, held, silent, gone_for: past.gone_since_ms.map(since) }
    }

    /// A process that is there is a sign of life, also of a lease that is not renewed by design; and it is there
    /// while it reconnects.
    fn is_dead(&self, rules: &Rules) -> bool {
        let there = match self.holder.connected {
            Some(true) => true,
            Some(false) => self.gone_for.is_none_or(|gone| gone < rules.heartbeat),
            None => false,
        };
        self.silent >= rules.silence && !there
    }

    /// A revoked lease whose end somebody removed (`PERSIST`), and that has shown no renewal for its whole ttl: its
    /// holder cannot believe in it any more, and it would stay for ever.
    fn has_outlived_its_ttl(&self) -> bool {
        let endless = self.holder.revoked && self.holder.ttl_left.is_none();
        endless && self.holder.ttl.is_some_and(|ttl| self.silent > ttl)
    }

    fn can_be_asked(&self) -> bool {
        !self.holder.foreign && self.holder.listens && self.holder.connected != Some(false)
    }

    /// Not for a moment (a client reconnects, a server restarts) but for longer than a heartbeat.
    fn cannot_be_reached(&self, rules: &Rules) -> Option<String> {
        let gone_for = self.gone_for.filter(|gone| *gone >= rules.heartbeat && self.silent >= rules.heartbeat)?;
        let ends = self.holder.ttl_left.map_or_else(String::new, |left| format!("; its lease ends in {}", shown(left)));
        Some(format!("cannot be reached for {}{ends}", shown(gone_for)))
    }
}

impl Rules {
    fn reached(&self, held: Duration) -> Option<Reached> {
        [(self.hard, Reached::Hard), (self.soft, Reached::Soft), (self.warning, Reached::Warning)]
            .into_iter()
            .find_map(|(level, reached)| (held >= level).then_some(reached))
    }
}

/// A duration for people: the two largest units.
fn shown(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) if seconds < 10 => format!("{:.1}s", duration.as_secs_f64()),
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {}s", seconds % 60),
        (0, ..) => format!("{hours}h {minutes}m"),
        _ => format!("{days}d {hours}h"),
    }
}

#[cfg(test)]
#[path = "judge_tests.rs"]
mod tests;
