//! What those who look report: a condition that holds now. When it begins and ends, and who is told of it, is not
//! theirs to decide.

use leasehold::{Holder, LockName};
use serde::{Deserialize, Serialize};

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Level {
    /// Somebody should look at it when there is time.
    Warning,
    /// Somebody should look at it now.
    Critical,
}

/// Who looks, and says when what it found is over.
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
    /// What one server finds and no other can: whether the store answers it, and what is on its machine. Each server
    /// tells that itself; everything else is the same for all servers of a store, and told by one of them.
    pub(crate) fn is_local(self) -> bool {
        matches!(self, Self::Store | Self::Journal)
    }
}

/// Something that holds at this moment. The same `kind`, lock and holder are the same condition.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Condition {
    /// The type of the alert: `lock_over_hard`, `dead_holder`, …
    pub(crate) kind: &'static str,
    pub(crate) level: Level,
    /// The lock it is about, if it is about one.
    pub(crate) name: Option<LockName>,
    /// Who holds it, for people.
    pub(crate) owner: Option<String>,
    /// The same, for an eviction.
    pub(crate) holder_id: Option<String>,
    /// What is the matter, in a sentence; it may change while the condition holds.
    pub(crate) message: String,
    /// The figure behind it: seconds, a rate, a count.
    pub(crate) value: Option<f64>,
}

impl Condition {
    /// About nothing in particular.
    pub(crate) fn new(kind: &'static str, level: Level, message: impl Into<String>) -> Self {
        Self { kind, level, name: None, owner: None, holder_id: None, message: message.into(), value: None }
    }

    /// About a lock and who holds it.
    pub(crate) fn held(self, name: &LockName, holder: &Holder) -> Self {
        Self {
            name: Some(name.clone()),
            owner: Some(holder.owner.to_string()),
            holder_id: Some(holder.id.to_string()),
            ..self
        }
    }

    /// With the figure behind it.
    pub(crate) fn value(self, value: f64) -> Self {
        Self { value: Some(value), ..self }
    }
}
