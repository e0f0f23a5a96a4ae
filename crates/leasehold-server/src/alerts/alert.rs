//! Alerts, and the notices of their beginning and end.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::condition::{Level, Source};

/// A problem that a person should know of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
pub(crate) struct Alert {
    /// The id of the alert. An alert of the same type, lock and holder that fires again gets a new id.
    #[schema(example = "5e0f12ab90c4-1794868712347")]
    pub(crate) id: String,
    /// The type of the alert: `lock_over_hard`, `store_down`, …
    #[serde(rename = "type")]
    #[schema(value_type = String, example = "lock_over_hard")]
    pub(crate) kind: Cow<'static, str>,
    /// The severity.
    pub(crate) level: Level,
    /// A description of the problem, for people.
    pub(crate) message: String,
    /// The number behind the alert: seconds, a rate, a count.
    pub(crate) value: Option<f64>,
    /// The name of the lock, if the alert is about one.
    pub(crate) name: Option<String>,
    /// The holder of the lock, for people.
    pub(crate) owner: Option<String>,
    /// The id of the holder.
    pub(crate) holder_id: Option<String>,
    /// When the alert began to fire, in wall-clock milliseconds.
    pub(crate) since_ms: u64,
    /// When the condition was last observed or last occurred.
    pub(crate) last_ms: u64,
    /// How often it occurred.
    pub(crate) count: u64,
    /// When the alert resolved; `null` while it fires.
    pub(crate) resolved_ms: Option<u64>,
}

/// Whether an alert fires or has resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum AlertState {
    /// The alert fires.
    Firing,
    /// The alert has resolved.
    Resolved,
}

impl AlertState {
    /// The name of the state in JSON.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Firing => "firing",
            Self::Resolved => "resolved",
        }
    }
}

/// A notification that an alert fires or has resolved.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Notice {
    /// Distinguishes alerts from the other events of the stream.
    kind: &'static str,
    pub(crate) state: AlertState,
    #[serde(flatten)]
    pub(crate) alert: Alert,
    /// Whether only this server knows of the alert.
    #[serde(skip)]
    pub(crate) is_local: bool,
}

impl Notice {
    pub(crate) fn new(state: AlertState, alert: &Alert) -> Self {
        Self { kind: "alert", state, alert: alert.clone(), is_local: false }
    }

    pub(super) fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a notice is JSON")
    }

    pub(super) fn with_source(self, source: Option<Source>) -> Self {
        Self { is_local: source.is_some_and(Source::is_local), ..self }
    }
}

/// Type, lock and holder: the identity of a firing alert.
pub(super) type AlertKey = (Cow<'static, str>, Option<String>, Option<String>);

/// A firing alert as stored for the other servers of the same store.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct SharedAlert {
    #[serde(flatten)]
    pub(super) alert: Alert,
    /// The source of the alert, as on the board.
    pub(super) source: Option<Source>,
}

impl Alert {
    pub(super) fn key(&self) -> AlertKey {
        (self.kind.clone(), self.name.clone(), self.holder_id.clone())
    }
}
