//! Conditions: what checks and the monitor report as true now. The board decides when an alert begins and ends, and who
//! is notified.

use leasehold::LockName;
use leasehold::inspect::Holder;
use serde::{Deserialize, Serialize};

/// The severity of an alert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Level {
    /// Look at it when there is time.
    Warning,
    /// Look at it now.
    Critical,
}

impl Level {
    /// The name of the level in JSON.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Warning => "warning",
            Self::Critical => "critical",
        }
    }
}

/// The source of a condition. It decides when its alerts resolve.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Source {
    Monitor,
    Fleet,
    Checkup,
    Store,
    Journal,
}

impl Source {
    /// Whether only this server can observe the source: whether the store answers it, and what is on its machine. Each
    /// server reports such conditions itself; the leader reports all others, which are the same for every server.
    pub(crate) fn is_local(self) -> bool {
        matches!(self, Self::Store | Self::Journal)
    }
}

/// Something that is true now. Conditions with the same `kind`, lock and holder are the same condition.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Condition {
    /// The type of the alert: `lock_over_hard`, `dead_holder`, …
    pub(crate) kind: &'static str,
    pub(crate) level: Level,
    /// The name of the lock, if the condition is about one.
    pub(crate) name: Option<LockName>,
    /// The holder of the lock, for people.
    pub(crate) owner: Option<String>,
    /// The id of the holder.
    pub(crate) holder_id: Option<String>,
    /// A sentence about the problem. It may change while the condition lasts.
    pub(crate) message: String,
    /// The number behind the condition: seconds, a rate, a count.
    pub(crate) value: Option<f64>,
}

impl Condition {
    /// A condition that is not about a lock.
    pub(crate) fn new(kind: &'static str, level: Level, message: impl Into<String>) -> Self {
        Self { kind, level, name: None, owner: None, holder_id: None, message: message.into(), value: None }
    }

    /// Adds a lock and its holder.
    pub(crate) fn held(self, name: &LockName, holder: &Holder) -> Self {
        Self {
            name: Some(name.clone()),
            owner: Some(holder.owner.to_string()),
            holder_id: Some(holder.id.to_string()),
            ..self
        }
    }

    /// Adds the number behind the condition.
    pub(crate) fn value(self, value: f64) -> Self {
        Self { value: Some(value), ..self }
    }
}
