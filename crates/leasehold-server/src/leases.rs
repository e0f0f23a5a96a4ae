//! The lock service for any language: acquire, renew and release.
//!
//! A lease acquired here is not tied to a process. It ends with its TTL, and only its token can renew or release it.

use std::pin::pin;
use std::time::Duration;

use axum::Extension;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use leasehold::inspect::{AcquiredView, LockView, ReleasedView};
use leasehold::lease::{Token, Ttl};
use leasehold::{Error, Fence, LockName, LossReason, Owner};
use serde::Deserialize;

use crate::App;
use crate::caller::Caller;
use crate::extract::{JsonBody, NameParam};
use crate::problem::{Problem, ProblemBody, shutting_down};

/// The longest wait of one request. A client that wants to wait longer sends another request.
const MAX_WAIT: Duration = Duration::from_secs(600);
/// The allowed length of a request id. Requests with the same id are one request, so an id must be neither guessable
/// nor likely to collide. A UUID has 36 characters.
const REQUEST_ID_CHARS: std::ops::RangeInclusive<usize> = 16..=128;
/// The owner of a lease when neither the request nor the key names one.
const DEFAULT_OWNER: &str = "api";

/// A request to acquire a lock.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Acquire {
    /// How long the lease lasts without renewal: 50 to 86,400,000; 30,000 by default.
    #[schema(example = 30_000, minimum = 50, maximum = 86_400_000)]
    ttl_ms: Option<u64>,
    /// How long to wait for the lock, at most 600,000; 0, the default, does not wait.
    #[schema(maximum = 600_000)]
    wait_ms: Option<u64>,
    /// The name to show as the holder.
    #[schema(min_length = 1, max_length = 256)]
    owner: Option<String>,
    /// An idempotency key: sending the same id again returns the same lease instead of a conflict. 16 to 128 of
    /// `A-Z a-z 0-9 . _ : -`, fresh for each acquisition, such as a random UUID.
    #[schema(pattern = "^[A-Za-z0-9._:-]{16,128}$", example = "3f0c1e6a-8a52-4d5c-9d0e-2b7a51f3c9aa")]
    request_id: Option<String>,
}

/// A request to renew a lease.
#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Renew {
    /// The token that `acquire` returned.
    #[schema(pattern = "^[A-Za-z0-9_-]{32}$")]
    token: String,
    /// How long the lease lasts from now; never shortens it. Defaults to the TTL it was acquired with.
    #[schema(minimum = 50, maximum = 86_400_000)]
    ttl_ms: Option<u64>,
}

/// A request to release a lock.
#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Release {
    /// The token that `acquire` returned.
    #[schema(pattern = "^[A-Za-z0-9_-]{32}$")]
    token: String,
}

/// Acquire a lock
///
/// The response contains the token, which alone can renew and release the lease. A waiting request queues with all
/// other waiters of the lock and is served in order.
#[utoipa::path(post, path = "/api/v1/locks/{name}/acquire", tag = "leases", request_body = Acquire,
    params(("name" = String, Path, description = "the lock; percent-encoded, `/` as `%2F`")),
    responses((status = 200, body = AcquiredView), (status = 400, body = ProblemBody),
        (status = 409, description = "`held` by another holder, or `revoked`: this request's own lease was revoked", body = ProblemBody)))]
pub(crate) async fn acquire(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    NameParam(name): NameParam,
    JsonBody(body): JsonBody<Acquire>,
) -> Result<Json<AcquiredView>, Problem> {
    let ttl = parse_ttl(body.ttl_ms)?.unwrap_or_default();
    let wait = Duration::from_millis(body.wait_ms.unwrap_or(0));
    if wait > MAX_WAIT {
        let text = format!("wait_ms is {}; it must be at most {}", wait.as_millis(), MAX_WAIT.as_millis());
        return Err(Problem::bad_request("invalid_wait", text));
    }
    let owner = Owner::elsewhere(
        body.owner.as_deref().or(caller.key.as_ref().map(|key| key.name.as_str())).unwrap_or(DEFAULT_OWNER),
    )?;
    let token = body.request_id.as_deref().map(|id| idempotency_token(&caller, &name, id)).transpose()?;
    let request = || app.locks.lock(&name).ttl(ttl.duration()).owned_by(owner.clone());
    let timed_request = || if wait.is_zero() { request().no_wait() } else { request().wait_up_to(wait) };
    let acquiring = async {
        match &token {
            // A repeated request finds its own lease, so nothing needs to be undone when a response is lost.
            Some(token) => {
                let mut granted = app.waiting_requests.register(token.holder_id());
                let mut acquiring = pin!(timed_request().under_token(token));
                loop {
                    tokio::select! {
                        biased;
                        lease = &mut acquiring => return lease,
                        // A repetition of this request was granted the lease, so this one has it too.
                        () = granted.notified() => if let Ok(lease) = request().no_wait().under_token(token).await {
                            return Ok(lease);
                        },
                    }
                }
            }
            // Without a request id the request cannot be repeated: a client that disconnects must not keep the lock.
            None => {
                let guard = timed_request().await?;
                if !wait.is_zero() {
                    // The server may not have noticed yet that a waiting client disconnected. A timer fires only after
                    // the sockets have been polled; if the client is gone, that drops this call and its guard.
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                guard.detach().await
            }
        }
    };
    let lease = tokio::select! {
        lease = acquiring => lease?,
        () = app.stopping.cancelled() => return Err(shutting_down().about(&name)),
    };
    match app.locks.info(&name).await {
        Ok(info) => {
            let mut lock = info.view();
            lock.fence = lease.try_fence().map(Fence::get);
            Ok(Json(AcquiredView::new(lock, lease.token())))
        }
        Err(error) => {
            if token.is_none() {
                // No client will ever receive the token.
                let _ = lease.release().await;
            }
            Err(error.into())
        }
    }
}

/// Renew a lease acquired with `acquire`
#[utoipa::path(post, path = "/api/v1/locks/{name}/renew", tag = "leases", request_body = Renew,
    params(("name" = String, Path, description = "the lock; percent-encoded, `/` as `%2F`")),
    responses((status = 200, body = LockView), (status = 400, body = ProblemBody),
        (status = 409, description = "`not_owner`: this token does not hold the lock (any more); `revoked`: stop, and release it", body = ProblemBody)))]
pub(crate) async fn renew(
    State(app): State<App>,
    NameParam(name): NameParam,
    JsonBody(body): JsonBody<Renew>,
) -> Result<Json<LockView>, Problem> {
    let token = Token::parse(&body.token)?;
    let ttl = parse_ttl(body.ttl_ms)?;
    app.locks.lease(&name, &token)?.renew(ttl).await?;
    Ok(Json(app.locks.info(&name).await?.view()))
}

/// Release a lock acquired with `acquire`
#[utoipa::path(post, path = "/api/v1/locks/{name}/release", tag = "leases", request_body = Release,
    params(("name" = String, Path, description = "the lock; percent-encoded, `/` as `%2F`")),
    responses((status = 200, body = ReleasedView), (status = 400, body = ProblemBody),
        (status = 409, description = "`not_owner`: this token does not hold the lock (any more); nothing was changed", body = ProblemBody)))]
pub(crate) async fn release(
    State(app): State<App>,
    NameParam(name): NameParam,
    JsonBody(body): JsonBody<Release>,
) -> Result<Json<ReleasedView>, Problem> {
    let token = Token::parse(&body.token)?;
    if !app.locks.lease(&name, &token)?.release().await? {
        return Err(Error::Lost { name, why: LossReason::Gone }.into());
    }
    Ok(Json(ReleasedView { name: name.to_string(), released: true }))
}

fn parse_ttl(ttl_ms: Option<u64>) -> Result<Option<Ttl>, Problem> {
    Ok(ttl_ms.map(|ms| Ttl::new(Duration::from_millis(ms))).transpose()?)
}

/// Derives the token of a request with an id. Every server derives the same token without storing anything. If keys are
/// required, the id alone is not enough to derive it.
fn idempotency_token(caller: &Caller, name: &LockName, request_id: &str) -> Result<Token, Problem> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._:-".contains(&b);
    if !REQUEST_ID_CHARS.contains(&request_id.len()) || !request_id.bytes().all(allowed) {
        let text = "request_id must be 16 to 128 of A-Z a-z 0-9 . _ : - and fresh for each lock, such as a random UUID";
        return Err(Problem::new(StatusCode::BAD_REQUEST, "invalid_request_id", text));
    }
    let bytes = caller.derive(&[request_id, name.as_str()]);
    let text = URL_SAFE_NO_PAD.encode(&bytes[..Token::LEN / 4 * 3]);
    Ok(Token::parse(&text)?)
}
