//! Errors as HTTP responses.

use std::sync::OnceLock;
use std::time::Duration;

use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value};

use crate::error::Error;
use crate::facts::{Invalid, LockName};

static HELD_STATUS: OnceLock<StatusCode> = OnceLock::new();

/// The longest `Retry-After`. A holder usually releases long before its lease ends.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Sets the status of responses for a held lock, for the whole process: 409 (Conflict) by default, for example 423 (Locked).
/// Call it once, at the start of the program.
///
/// # Errors
/// [`Invalid::Setting`] when it is not the status of an error (400 to 599), or another status was set before.
pub fn answer_held_with(status: StatusCode) -> Result<(), Invalid> {
    let invalid = |problem: &str| Invalid::Setting {
        setting: "status of a held lock",
        given: status.as_str().to_owned(),
        problem: problem.to_owned(),
    };
    if !status.is_client_error() && !status.is_server_error() {
        return Err(invalid("is not the status of an error: use one from 400 to 599, such as 409 or 423"));
    }
    if *HELD_STATUS.get_or_init(|| status) == status {
        return Ok(());
    }
    Err(invalid("cannot replace the one that is in use: set it once, at the start of the program"))
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let name = self.name().cloned();
        let name = name.as_ref();
        match &self {
            Self::NotAcquired { holder, .. } => {
                let left = holder.as_ref().and_then(|holder| holder.ttl_left).unwrap_or(RETRY_AFTER);
                let status = *HELD_STATUS.get_or_init(|| StatusCode::CONFLICT);
                answer(
                    status,
                    "held",
                    "another request is working on this; try again soon",
                    name,
                    Some(left.min(RETRY_AFTER)),
                )
            }
            Self::PoolBusy { .. } => {
                let status = *HELD_STATUS.get_or_init(|| StatusCode::CONFLICT);
                answer(status, "held", "all of these are in use; try again soon", name, Some(RETRY_AFTER))
            }
            Self::Lost { .. } => {
                tracing::warn!(error = %format_args!("{self:#}"), "answered with lease_lost");
                let text = "the lock was lost during the work; check what was done before you try again";
                answer(StatusCode::SERVICE_UNAVAILABLE, "lease_lost", text, name, Some(RETRY_AFTER))
            }
            Self::Store { .. } | Self::Connect { .. } => {
                tracing::error!(error = %format_args!("{self:#}"), "answered with store_unreachable");
                let text = "the lock store did not answer; try again later";
                answer(StatusCode::SERVICE_UNAVAILABLE, "store_unreachable", text, name, Some(RETRY_AFTER))
            }
            Self::ShutDown { .. } => {
                let text = "this instance is shutting down; try another instance";
                answer(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", text, name, Some(RETRY_AFTER))
            }
            Self::OtherPayload { .. } => {
                let text = "this id was used before with another payload; use a new id for a new request";
                answer(StatusCode::UNPROCESSABLE_ENTITY, "other_payload", text, name, None)
            }
            Self::ResultNotStored { .. } => {
                tracing::error!(error = %format_args!("{self:#}"), "answered with result_not_stored");
                let text = "this was already carried out, but its result could not be stored";
                answer(StatusCode::CONFLICT, "result_not_stored", text, name, None)
            }
            // Names are built from what callers send, so this is their error.
            Self::Invalid(Invalid::Name { .. }) => {
                tracing::debug!(error = %format_args!("{self:#}"), "answered with invalid_name");
                let text = "not a valid lock name: it is empty, too long or has control characters";
                answer(StatusCode::BAD_REQUEST, "invalid_name", text, None, None)
            }
            Self::Unreadable { .. }
            | Self::Invalid(_)
            | Self::AlreadyInstalled
            | Self::NotInstalled { .. }
            | Self::InsideRuntime => {
                tracing::error!(error = %format_args!("{self:#}"), "answered with internal");
                answer(StatusCode::INTERNAL_SERVER_ERROR, "internal", MISCONFIGURED, None, None)
            }
        }
    }
}

/// The text for errors that only the service's developers can solve; the cause is in the log.
pub(super) const MISCONFIGURED: &str = "the service is misconfigured";

pub(super) fn answer(
    status: StatusCode,
    code: &str,
    message: &str,
    name: Option<&LockName>,
    retry_after: Option<Duration>,
) -> Response {
    let mut body = Map::new();
    body.insert("code".into(), code.into());
    body.insert("message".into(), message.into());
    if let Some(name) = name {
        body.insert("name".into(), name.as_str().into());
    }
    let mut response = Response::builder().status(status).header(header::CONTENT_TYPE, "application/json");
    if let Some(after) = retry_after {
        let ms = u64::try_from(after.as_millis()).unwrap_or(u64::MAX).max(1);
        body.insert("retry_after_ms".into(), ms.into());
        // Whole seconds, rounded up: 0 would make clients retry without a pause.
        response = response.header(header::RETRY_AFTER, ms.div_ceil(1000));
    }
    let body = Body::from(Value::Object(body).to_string());
    response.body(body).expect("a status, two headers and a body")
}
