//! Judges one holder: which conditions to report and which action to take. No clock, no I/O: every case is a unit test.

use std::time::Duration;

use leasehold::LockName;
use leasehold::config::{GpuLockMonitor, LockNames};
use leasehold::inspect::{EvictMode, Holder};

use crate::alerts::{Condition, Level};

/// The lock that elects the server that monitors.
pub(crate) const ELECTION: &str = "leasehold-monitor";
/// A longer lease is probably a mistake.
const STALE_LEASE: Duration = Duration::from_secs(7_200);
/// The prefix of task locks. Foreign clients hold task locks too; their other keys are not judged.
const TASK_PREFIX: &str = "task_lock:";

/// The thresholds of the monitor and what it may do.
#[derive(Debug, Clone)]
pub(crate) struct Rules {
    pub(crate) warning: Duration,
    pub(crate) soft: Duration,
    pub(crate) hard: Duration,
    /// The expected heartbeat interval.
    pub(crate) heartbeat: Duration,
    /// A holder without a heartbeat for this long counts as dead.
    pub(crate) silence: Duration,
    /// Whether the monitor evicts at all.
    pub(crate) auto_recovery: bool,
    /// Whether living holders are evicted too, at the hard level.
    pub(crate) evict_living: bool,
    /// The locks that the levels apply to and that may be evicted.
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

/// What earlier passes observed of a holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Past {
    /// When the holder was first seen; the age of a foreign holder counts from here.
    first_seen_ms: u64,
    /// When the lease was last seen to be extended, or first seen, for leases that do not record their renewals.
    moved_ms: u64,
    /// The expiry of the lease when last seen; `None` if it never expires.
    ends_ms: Option<u64>,
    /// Since when the holder's process has been unreachable.
    gone_since_ms: Option<u64>,
}

/// Two readings of the same expiry differ by less than this.
const EXPIRY_TOLERANCE_MS: u64 = 1_000;

impl Past {
    /// The past of a holder that is seen for the first time.
    pub(crate) fn new(holder: &Holder, now_ms: u64) -> Self {
        Self {
            first_seen_ms: now_ms,
            moved_ms: now_ms,
            ends_ms: ends_ms(holder, now_ms),
            gone_since_ms: (holder.connected == Some(false)).then_some(now_ms),
        }
    }

    /// The past of a holder as another server observed it.
    pub(crate) fn recalled(first_seen_ms: u64, gone_since_ms: Option<u64>, now_ms: u64) -> Self {
        Self { first_seen_ms, moved_ms: now_ms, ends_ms: None, gone_since_ms }
    }

    /// Returns when the holder was first seen, and since when its process has been unreachable.
    pub(crate) fn began(&self) -> (u64, Option<u64>) {
        (self.first_seen_ms, self.gone_since_ms)
    }

    /// Updates the past with another observation of the same holder.
    pub(crate) fn seen_again(&mut self, holder: &Holder, now_ms: u64) {
        let ends_ms = ends_ms(holder, now_ms);
        let prolonged = match (self.ends_ms, ends_ms) {
            (Some(before), Some(now)) => now > before + EXPIRY_TOLERANCE_MS,
            // A client that sets an expiry again is at work.
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

/// The verdict on a holder.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Verdict {
    /// The conditions to report.
    pub(crate) conditions: Vec<Condition>,
    /// The action to take.
    pub(crate) action: Option<Action>,
    /// Whether the past of this holder matters in the next pass.
    pub(crate) remember: bool,
}

/// An action on a holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Asks the holder to finish: at the soft level, and again at the hard level.
    Ask {
        at: TimeoutLevel,
        why: String,
    },
    Evict {
        mode: EvictMode,
        why: String,
    },
}

/// The timeout level that a holder has reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum TimeoutLevel {
    Warning,
    Soft,
    Hard,
}

/// Judges one holder by one observation and its past.
pub(crate) fn judge(name: &LockName, holder: &Holder, past: &Past, now_ms: u64, rules: &Rules) -> Verdict {
    let observed = Observation::new(holder, past, now_ms);
    let watched = rules.names.contains(name) && name.as_str() != ELECTION;
    let dead = observed.is_dead(rules);
    let reached = if watched { rules.level_of(observed.held) } else { None };

    let mut conditions = Vec::new();
    let mut add = |kind, level, value: Duration, what: String| {
        let message = format!("{name}: {what}");
        conditions.push(Condition::new(kind, level, message).held(name, holder).value(value.as_secs_f64()));
    };
    for (over, kind, level) in [
        (TimeoutLevel::Warning, "lock_over_warning", Level::Warning),
        (TimeoutLevel::Soft, "lock_over_soft", Level::Warning),
        (TimeoutLevel::Hard, "lock_over_hard", Level::Critical),
    ] {
        if reached.is_some_and(|reached| reached >= over) {
            let held = shown(observed.held);
            let alive = if dead { "without a heartbeat" } else { "and alive" };
            add(kind, level, observed.held, format!("held by {} for {held} {alive}", holder.owner));
        }
    }
    if let Some(text) = observed.cannot_be_reached(rules) {
        add("dead_holder", Level::Warning, observed.silent, format!("the process of {} {text}", holder.owner));
    } else if watched && dead && !holder.foreign {
        let text = format!("no heartbeat from {} for {}", holder.owner, shown(observed.silent));
        add("dead_holder", Level::Warning, observed.silent, text);
    }
    if !holder.foreign || watched || name.as_str().starts_with(TASK_PREFIX) {
        let lease = holder.ttl.into_iter().chain(holder.ttl_left).max();
        match lease {
            Some(lease) if lease > STALE_LEASE => {
                add("stale_lock", Level::Warning, lease, format!("a lease of {} by {}", shown(lease), holder.owner));
            }
            // If one of our leases lost its expiry, the next renewal restores it.
            _ if holder.ttl_left.is_none() && (holder.foreign || dead) => {
                add(
                    "stale_lock",
                    Level::Warning,
                    observed.held,
                    format!("held by {}, and never expires", holder.owner),
                );
            }
            _ => {}
        }
    }
    let action = if watched { decide(holder, &observed, dead, reached, rules) } else { None };
    let remember = !conditions.is_empty() || observed.gone_for.is_some() || (watched && holder.foreign);
    Verdict { conditions, action, remember }
}

/// Decides the action on the holder of a monitored lock. Nobody is evicted below the hard level. Our own leases are
/// revoked and never forced: the holder may be alive, cut off from the store, and rely on its lease until the TTL ends.
fn decide(
    holder: &Holder,
    observed: &Observation<'_>,
    dead: bool,
    reached: Option<TimeoutLevel>,
    rules: &Rules,
) -> Option<Action> {
    let over_hard = reached == Some(TimeoutLevel::Hard);
    let held = shown(observed.held);
    if over_hard && rules.auto_recovery && (dead || rules.evict_living) {
        let mode = if holder.foreign || observed.has_outlived_its_ttl() { EvictMode::Force } else { EvictMode::Revoke };
        let why = if dead {
            format!("no heartbeat for {}, and held for {held}: over the hard level", shown(observed.silent))
        } else {
            format!("held for {held}, over the hard level, and living holders are evicted too")
        };
        return (mode == EvictMode::Force || !holder.revoked).then_some(Action::Evict { mode, why });
    }
    let at = reached.filter(|reached| *reached >= TimeoutLevel::Soft && !dead)?;
    let why = format!("held for {held}: please finish");
    (observed.can_be_asked() && !holder.revoked).then_some(Action::Ask { at, why })
}

/// One observation of a holder, combined with its past.
struct Observation<'a> {
    holder: &'a Holder,
    held: Duration,
    /// The time since the last heartbeat.
    silent: Duration,
    gone_for: Option<Duration>,
}

impl<'a> Observation<'a> {
    fn new(holder: &'a Holder, past: &Past, now_ms: u64) -> Self {
        let since = |then_ms: u64| Duration::from_millis(now_ms.saturating_sub(then_ms));
        let held = since(if holder.since_ms > 0 { holder.since_ms } else { past.first_seen_ms });
        let silent = match (holder.ttl, holder.ttl_left) {
            // A renewal restores the full TTL, so the elapsed part is the time since the last renewal.
            (Some(ttl), Some(left)) => ttl.saturating_sub(left).min(held),
            _ => since(past.moved_ms),
        };
        Self { holder, held, silent, gone_for: past.gone_since_ms.map(since) }
    }

    /// Whether the holder counts as dead. A connected process is alive even if it does not renew its lease, and it
    /// still counts as connected while it reconnects.
    fn is_dead(&self, rules: &Rules) -> bool {
        let there = match self.holder.connected {
            Some(true) => true,
            Some(false) => self.gone_for.is_none_or(|gone| gone < rules.heartbeat),
            None => false,
        };
        self.silent >= rules.silence && !there
    }

    /// Whether a revoked lease lost its expiry (`PERSIST`) and was not renewed for its whole TTL. Its holder can no
    /// longer rely on it, and it would never expire.
    fn has_outlived_its_ttl(&self) -> bool {
        let endless = self.holder.revoked && self.holder.ttl_left.is_none();
        endless && self.holder.ttl.is_some_and(|ttl| self.silent > ttl)
    }

    fn can_be_asked(&self) -> bool {
        !self.holder.foreign && self.holder.listens && self.holder.connected != Some(false)
    }

    /// Describes a process that has been unreachable for longer than a heartbeat, not just during a reconnect or
    /// restart.
    fn cannot_be_reached(&self, rules: &Rules) -> Option<String> {
        let gone_for = self.gone_for.filter(|gone| *gone >= rules.heartbeat && self.silent >= rules.heartbeat)?;
        let ends = self.holder.ttl_left.map_or_else(String::new, |left| format!("; its lease ends in {}", shown(left)));
        Some(format!("has been unreachable for {}{ends}", shown(gone_for)))
    }
}

impl Rules {
    fn level_of(&self, held: Duration) -> Option<TimeoutLevel> {
        [(self.hard, TimeoutLevel::Hard), (self.soft, TimeoutLevel::Soft), (self.warning, TimeoutLevel::Warning)]
            .into_iter()
            .find_map(|(level, reached)| (held >= level).then_some(reached))
    }
}

/// Formats a duration for people, with its two largest units.
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
