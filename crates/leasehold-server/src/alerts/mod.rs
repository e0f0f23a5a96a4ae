//! Alerts: conditions that hold, from when until when, and who is told.

mod condition;

pub(crate) use condition::{Condition, Level};

/// What is the matter now.
#[derive(Debug, Default)]
pub(crate) struct Alerts {}

impl Alerts {
    /// Everything that one source finds to hold at this moment: what it named before and names no longer is over.
    pub(crate) fn holding(&self, source: &'static str, conditions: Vec<Condition>) {
        tracing::debug!(source, count = conditions.len(), "conditions");
    }

    /// Something that happened once, and does not last.
    #[expect(dead_code, reason = "nothing of the kind is reported yet")]
    pub(crate) fn happened(&self, condition: Condition) {
        tracing::warn!(kind = condition.kind, level = ?condition.level, "{}", condition.message);
    }
}
