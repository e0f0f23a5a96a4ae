//! Errors as answers: a stable code for programs, a sentence for people. Causes, which name hosts and
//! keys, go to the log.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use leasehold::{Error, Holder, Invalid, LockName, LossReason, StoreErrorKind};
use serde::Serialize;

/// When to try again after "somebody else holds it" or "no answer": soon.
const SOON: Duration = Duration::from_secs(1);

/// An answer that is no success.
#[derive(Debug, Clone)]
pub(crate) struct Problem {
    status: StatusCode,
    said: Box<Said>,
}

/// What it says.
#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
#[schema(as = Problem)]
pub(crate) struct Said {
    /// Stable, for programs.
    #[schema(value_type = String, example = "held")]
    code: &'static str,
    /// What happened and what to do next, for people.
    message: String,
    /// The lock.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// Who holds it.
    #[serde(skip_serializing_if = "Option::is_none")]
    owner: Option<String>,
    /// The same, for an eviction.
    #[serde(skip_serializing_if = "Option::is_none")]
    holder_id: Option<String>,
    /// When it makes sense to try again; also as the header `Retry-After`, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_ms: Option<u64>,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        let said = Said { code, message, name: None, owner: None, holder_id: None, retry_after_ms: None };
        Self { status, said: Box::new(said) }
    }

    /// The request cannot be understood or is out of bounds.
    pub(crate) fn bad_request(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, message)
    }

    /// What cannot be written down is not done.
    pub(crate) fn not_audited() -> Self {
        let text = "the audit cannot be written, so nothing was done; see the server's log";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "not_audited", text)
    }

    /// About a lock.
    pub(crate) fn about(mut self, name: &LockName) -> Self {
        self.said.name = Some(name.to_string());
        self
    }

    /// And about who holds it.
    pub(crate) fn held_by(mut self, holder: &Holder) -> Self {
        self.said.owner = Some(holder.owner.to_string());
        self.said.holder_id = Some(holder.id.to_string());
        self
    }

    pub(crate) fn retry_after(mut self, after: Duration) -> Self {
        self.said.retry_after_ms = Some(u64::try_from(after.as_millis()).unwrap_or(u64::MAX).max(1));
        self
    }
}

impl From<Invalid> for Problem {
    fn from(invalid: Invalid) -> Self {
        let code = match invalid {
            Invalid::Name { .. } => "invalid_name",
            Invalid::Ttl { .. } => "invalid_ttl",
            Invalid::Owner { .. } => "invalid_owner",
            Invalid::Id { .. } => "invalid_id",
            _ => "invalid",
        };
        Self::bad_request(code, invalid.to_string())
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        let name = error.name().cloned();
        let problem = match &error {
            Error::NotAcquired { name, holder, .. } => held(name, holder.as_deref()),
            Error::Lost { name, why: LossReason::Revoked } => {
                let text = format!("{name} was taken away from this token: stop, and release it");
                Self::new(StatusCode::CONFLICT, "revoked", text)
            }
            Error::Lost { name, .. } => {
                let text = format!("{name} is not, or no longer, held by this token; nothing was touched");
                Self::new(StatusCode::CONFLICT, "not_owner", text)
            }
            Error::Store { source, .. } if source.kind() == StoreErrorKind::Refused => {
                Self::bad_request("refused", source.to_string())
            }
            Error::Store { .. } | Error::Connect { .. } => {
                tracing::error!(%error, "the store did not answer");
                let text = "the store did not answer; whether anything was done is not known. Try again later";
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "store_unreachable", text).retry_after(SOON)
            }
            Error::ShutDown { .. } => shutting_down(),
            Error::Invalid(invalid) => invalid.clone().into(),
            _ => {
                tracing::error!(%error, "not expected here");
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "an error of the server; see its log")
            }
        };
        match name {
            Some(name) => problem.about(&name),
            None => problem,
        }
    }
}

/// This server ends; another one may answer.
pub(crate) fn shutting_down() -> Problem {
    let text = "this server is shutting down; try another one, or again later";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", text).retry_after(SOON)
}

fn held(name: &LockName, holder: Option<&Holder>) -> Problem {
    let conflict = |text| Problem::new(StatusCode::CONFLICT, "held", text);
    let Some(holder) = holder else {
        return conflict(format!("{name} is held by somebody else; try again")).retry_after(SOON);
    };
    let who = if holder.foreign { "another kind of client: " } else { "" };
    let left = holder.ttl_left.map_or_else(String::new, |left| format!(", for at most {left:.1?} unless renewed"));
    let after = holder.ttl_left.unwrap_or(SOON).min(SOON);
    conflict(format!("{name} is held by {who}{}{left}", holder.owner)).held_by(holder).retry_after(after)
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = self.status;
        // Whole seconds, rounded up: 0 would mean a busy loop.
        let after = self.said.retry_after_ms.map(|ms| HeaderValue::from(ms.div_ceil(1000)));
        let mut response = (status, Json(*self.said)).into_response();
        if let Some(after) = after {
            response.headers_mut().insert(header::RETRY_AFTER, after);
        }
        response
    }
}
