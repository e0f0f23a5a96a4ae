//! What was asked, read from a request, or what is wrong with it.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use leasehold::LockName;
use serde::de::{DeserializeOwned, IgnoredAny};

use crate::answer::Problem;

/// The longest body, and how long a client may take to send it.
const BODY_BYTES: usize = 64 * 1024;
const BODY_WITHIN: Duration = Duration::from_secs(15);

/// The `{name}` of a route: percent-encoded, so that a name may have any character.
pub(crate) struct Name(pub(crate) LockName);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        Ok(Self(LockName::new(segment(parts, state).await?)?))
    }
}

/// The one variable part of a path, decoded.
pub(crate) async fn segment<S: Send + Sync>(parts: &mut Parts, state: &S) -> Result<String, Problem> {
    let refused = |_: PathRejection| Problem::bad_request("invalid_name", "the name in the path is not UTF-8");
    let Path(text) = Path::<String>::from_request_parts(parts, state).await.map_err(refused)?;
    Ok(text)
}

/// The longest reason, in bytes.
const REASON_BYTES: usize = 500;

/// Why somebody changes something, in words that can stand in a log.
pub(crate) fn reason(given: &str) -> Result<&str, Problem> {
    let reason = given.trim();
    if reason.is_empty() || reason.len() > REASON_BYTES || reason.chars().any(char::is_control) {
        let text = format!("reason must say why: 1 to {REASON_BYTES} bytes without control characters");
        return Err(Problem::bad_request("invalid_reason", text));
    }
    Ok(reason)
}

/// The query of a request. What is not known is refused: a misspelt `prefx` would answer something else.
pub(crate) struct Asked<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Asked<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        match Query::try_from_uri(&parts.uri) {
            Ok(Query(asked)) => Ok(Self(asked)),
            Err(refused) => Err(Problem::bad_request("invalid_query", refused.body_text())),
        }
    }
}

/// The body of a request: JSON.
pub(crate) struct Sent<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Sent<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        // Asked for, so that no form of a web page can send it.
        if !is_json(request.headers()) {
            let text = "send JSON, and say so: Content-Type: application/json";
            return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json", text));
        }
        let bytes = read(request.into_body()).await?;
        Ok(Self(parse(&bytes).map_err(|text| Problem::bad_request("invalid_body", text))?))
    }
}

/// An object, or what is wrong with which of its fields.
fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    // A list of values would do for a struct, but fields have no order here.
    if !bytes.trim_ascii_start().starts_with(b"{") {
        return Err("the body must be a JSON object, such as {}".into());
    }
    if let Err(error) = serde_json::from_slice::<IgnoredAny>(bytes) {
        return Err(format!("the body is not JSON: {error}"));
    }
    let sent = serde_path_to_error::deserialize(&mut serde_json::Deserializer::from_slice(bytes));
    sent.map_err(|error| {
        let (field, wrong) = (error.path().to_string(), in_plain_words(error.inner()));
        // Those that are missing, unknown or given twice are named already.
        let named = field == "." || wrong.contains(&format!("`{field}`"));
        let what = if named { "the body" } else { field.as_str() };
        format!("{what} is not what is asked for: {wrong}")
    })
}

/// Callers need not know how our numbers are called.
fn in_plain_words(error: &serde_json::Error) -> String {
    error.to_string().replace("expected u64 at", "expected a whole number at")
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("");
    kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

async fn read(body: Body) -> Result<axum::body::Bytes, Problem> {
    let too_large = || {
        let text = format!("the body is longer than {BODY_BYTES} bytes");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", text)
    };
    // Told before it is sent, where the client asks first.
    if body.size_hint().lower() > BODY_BYTES as u64 {
        return Err(too_large());
    }
    let whole = tokio::time::timeout(BODY_WITHIN, Limited::new(body, BODY_BYTES).collect());
    match whole.await {
        Ok(Ok(whole)) => Ok(whole.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(_)) => Err(Problem::bad_request("invalid_body", "the body broke off")),
        Err(_) => {
            let text = format!("the body did not come within {BODY_WITHIN:?}");
            Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "too_slow", text))
        }
    }
}
