//! Extractors: the path, query and body of a request, or a description of what is wrong with them.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use leasehold::LockName;
use serde::de::{DeserializeOwned, IgnoredAny};

use crate::problem::Problem;

/// The largest accepted body.
const MAX_BODY_BYTES: usize = 64 * 1024;
/// How long a client may take to send a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(15);

/// The `{name}` of a route, percent-decoded, so that a lock name may contain any character.
pub(crate) struct NameParam(pub(crate) LockName);

impl<S: Send + Sync> FromRequestParts<S> for NameParam {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        Ok(Self(LockName::new(path_param(parts, state).await?)?))
    }
}

/// Extracts and decodes the only parameter of a path.
pub(crate) async fn path_param<S: Send + Sync>(parts: &mut Parts, state: &S) -> Result<String, Problem> {
    let rejection = |_: PathRejection| Problem::bad_request("invalid_name", "the name in the path is not UTF-8");
    let Path(text) = Path::<String>::from_request_parts(parts, state).await.map_err(rejection)?;
    Ok(text)
}

/// The longest accepted reason, in bytes.
const MAX_REASON_BYTES: usize = 500;

/// Checks that a reason is short and safe to log, and trims it.
pub(crate) fn validate_reason(given: &str) -> Result<&str, Problem> {
    let reason = given.trim();
    if reason.is_empty() || reason.len() > MAX_REASON_BYTES || reason.chars().any(char::is_control) {
        let text = format!("reason must say why: 1 to {MAX_REASON_BYTES} bytes without control characters");
        return Err(Problem::bad_request("invalid_reason", text));
    }
    Ok(reason)
}

/// The query of a request. Unknown parameters are rejected: a misspelt `prefx` would return the wrong locks.
pub(crate) struct QueryParams<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for QueryParams<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        match Query::try_from_uri(&parts.uri) {
            Ok(Query(params)) => Ok(Self(params)),
            Err(rejection) => Err(Problem::bad_request("invalid_query", rejection.body_text())),
        }
    }
}

/// The JSON body of a request.
pub(crate) struct JsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        // Requiring this type keeps HTML forms from sending a body.
        if !is_json(request.headers()) {
            let text = "send JSON, and say so: Content-Type: application/json";
            return Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json", text));
        }
        let bytes = read_body(request.into_body()).await?;
        Ok(Self(parse_object(&bytes).map_err(|text| Problem::bad_request("invalid_body", text))?))
    }
}

/// Parses a JSON object, or says which field is wrong.
fn parse_object<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    // serde would accept an array for a struct, but the fields have no order here.
    if !bytes.trim_ascii_start().starts_with(b"{") {
        return Err("the body must be a JSON object, such as {}".into());
    }
    if let Err(error) = serde_json::from_slice::<IgnoredAny>(bytes) {
        return Err(format!("the body is not JSON: {error}"));
    }
    let sent = serde_path_to_error::deserialize(&mut serde_json::Deserializer::from_slice(bytes));
    sent.map_err(|error| {
        let (field, wrong) = (error.path().to_string(), without_rust_types(error.inner()));
        // serde already names fields that are missing, unknown or repeated.
        let named = field == "." || wrong.contains(&format!("`{field}`"));
        let what = if named { "the body" } else { field.as_str() };
        format!("{what} is not what this route expects: {wrong}")
    })
}

/// Replaces Rust type names in an error with words that callers know.
fn without_rust_types(error: &serde_json::Error) -> String {
    error.to_string().replace("expected u64 at", "expected a whole number at")
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("");
    kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

async fn read_body(body: Body) -> Result<axum::body::Bytes, Problem> {
    let too_large = || {
        let text = format!("the body is longer than {MAX_BODY_BYTES} bytes");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", text)
    };
    // Rejected before the client sends it, if the client sent `Expect: 100-continue`.
    if body.size_hint().lower() > MAX_BODY_BYTES as u64 {
        return Err(too_large());
    }
    let whole = tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, MAX_BODY_BYTES).collect());
    match whole.await {
        Ok(Ok(whole)) => Ok(whole.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(_)) => Err(Problem::bad_request("invalid_body", "the connection broke while the body was read")),
        Err(_) => {
            let text = format!("the body did not arrive within {BODY_TIMEOUT:?}");
            Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "too_slow", text))
        }
    }
}
