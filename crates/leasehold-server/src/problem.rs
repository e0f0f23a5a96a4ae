//! Error responses: a stable code for programs and a sentence for people. Causes, which may name hosts and keys, go to
//! the log only.

use std::time::Duration;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use leasehold::inspect::Holder;
use leasehold::lease::Invalid;
use leasehold::store::StoreErrorKind;
use leasehold::{Error, LockName, LossReason};
use serde::Serialize;

/// The retry interval suggested when a lock is held or the store does not answer.
const RETRY_SOON: Duration = Duration::from_secs(1);

/// An error response.
#[derive(Debug, Clone)]
pub(crate) struct Problem {
    status: StatusCode,
    body: Box<ProblemBody>,
}

/// The JSON body of an error response.
#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
#[schema(as = Problem)]
pub(crate) struct ProblemBody {
    /// A stable code, for programs.
    #[schema(value_type = String, example = "held")]
    code: &'static str,
    /// What happened and what to do next, for people.
    message: String,
    /// The name of the lock.
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// The holder of the lock, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    owner: Option<String>,
    /// The id of the holder, as `evict` expects it.
    #[serde(skip_serializing_if = "Option::is_none")]
    holder_id: Option<String>,
    /// When a retry makes sense, in milliseconds; also sent as the header `Retry-After`, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_ms: Option<u64>,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        let body = ProblemBody { code, message, name: None, owner: None, holder_id: None, retry_after_ms: None };
        Self { status, body: Box::new(body) }
    }

    /// The request is malformed or out of bounds.
    pub(crate) fn bad_request(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, code, message)
    }

    /// The audit line could not be written, so the change was not made.
    pub(crate) fn not_audited() -> Self {
        let text = "the audit cannot be written, so nothing was changed; see the server's log";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "not_audited", text)
    }

    /// Adds the lock.
    pub(crate) fn about(mut self, name: &LockName) -> Self {
        self.body.name = Some(name.to_string());
        self
    }

    /// Adds the holder of the lock.
    pub(crate) fn held_by(mut self, holder: &Holder) -> Self {
        self.body.owner = Some(holder.owner.to_string());
        self.body.holder_id = Some(holder.id.to_string());
        self
    }

    pub(crate) fn retry_after(mut self, after: Duration) -> Self {
        self.body.retry_after_ms = Some(u64::try_from(after.as_millis()).unwrap_or(u64::MAX).max(1));
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
                let text = format!("this token does not hold {name} (any more); nothing was changed");
                Self::new(StatusCode::CONFLICT, "not_owner", text)
            }
            Error::Store { source, .. } if source.kind() == StoreErrorKind::Refused => {
                Self::bad_request("refused", source.to_string())
            }
            Error::Store { .. } | Error::Connect { .. } => {
                tracing::error!(error = %format_args!("{error:#}"), "the store did not answer");
                let text = "the store did not answer, so the outcome is unknown; try again later";
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "store_unreachable", text).retry_after(RETRY_SOON)
            }
            Error::ShutDown { .. } => shutting_down(),
            Error::Invalid(invalid) => invalid.clone().into(),
            _ => {
                tracing::error!(error = %format_args!("{error:#}"), "unexpected error");
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "an error of the server; see its log")
            }
        };
        match name {
            Some(name) => problem.about(&name),
            None => problem,
        }
    }
}

/// This server is shutting down; another server may answer.
pub(crate) fn shutting_down() -> Problem {
    let text = "this server is shutting down; try another one, or again later";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", text).retry_after(RETRY_SOON)
}

fn held(name: &LockName, holder: Option<&Holder>) -> Problem {
    let conflict = |text| Problem::new(StatusCode::CONFLICT, "held", text);
    let Some(holder) = holder else {
        return conflict(format!("{name} is held by another holder; try again")).retry_after(RETRY_SOON);
    };
    let who = if holder.foreign { "another kind of client: " } else { "" };
    let left = holder.ttl_left.map_or_else(String::new, |left| format!(", for at most {left:.1?} unless renewed"));
    let after = holder.ttl_left.unwrap_or(RETRY_SOON).min(RETRY_SOON);
    conflict(format!("{name} is held by {who}{}{left}", holder.owner)).held_by(holder).retry_after(after)
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = self.status;
        // Whole seconds, rounded up: 0 would tell the client to retry in a busy loop.
        let after = self.body.retry_after_ms.map(|ms| HeaderValue::from(ms.div_ceil(1000)));
        let mut response = (status, Json(*self.body)).into_response();
        if let Some(after) = after {
            response.headers_mut().insert(header::RETRY_AFTER, after);
        }
        response
    }
}
