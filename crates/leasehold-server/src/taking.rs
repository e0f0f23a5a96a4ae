//! Taking, keeping and giving back locks: a lock service for any language.
//!
//! Such a lease belongs to no process: only its ttl counts, and its token is all that can renew or
//! release it.

use std::pin::pin;
use std::time::Duration;

use axum::Extension;
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use leasehold::{AcquiredView, Error, Fence, LockName, LockView, LossReason, Owner, ReleasedView, Token, Ttl};
use serde::Deserialize;

use crate::App;
use crate::answer::{Problem, Said, shutting_down};
use crate::asked::{Name, Sent};
use crate::keys::Caller;

/// The longest wait of one request. A client that wants to wait longer asks again.
const LONGEST_WAIT: Duration = Duration::from_secs(600);
/// Characters of a request id. Two requests with one id are one request, so it must not be guessed or
/// met by chance: a UUID has 36.
const REQUEST_ID_CHARS: std::ops::RangeInclusive<usize> = 16..=128;
/// Who asked, where the request does not say.
const NOBODY: &str = "api";

/// Asks for a lock.
#[derive(Debug, Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Acquire {
    /// How long the lease lasts when nobody renews it: 50 to 86,400,000; by default 30,000.
    #[schema(example = 30_000, minimum = 50, maximum = 86_400_000)]
    ttl_ms: Option<u64>,
    /// How long to wait for it; 0, the default: not at all. At most 600,000.
    #[schema(maximum = 600_000)]
    wait_ms: Option<u64>,
    /// What people read who ask for the holder.
    #[schema(min_length = 1, max_length = 256)]
    owner: Option<String>,
    /// Makes the request repeatable: whoever sends the same id again gets the same lease, not a refusal. 16 to
    /// 128 of `A-Z a-z 0-9 . _ : -`, fresh for each lock that is wanted, such as a random UUID.
    #[schema(pattern = "^[A-Za-z0-9._:-]{16,128}$", example = "3f0c1e6a-8a52-4d5c-9d0e-2b7a51f3c9aa")]
    request_id: Option<String>,
}

/// Prolongs a lease.
#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Renew {
    /// From the answer to `acquire`.
    #[schema(pattern = "^[A-Za-z0-9_-]{32}$")]
    token: String,
    /// How long it lasts from now; never shortens. By default what it was taken with.
    #[schema(minimum = 50, maximum = 86_400_000)]
    ttl_ms: Option<u64>,
}

/// Gives a lock back.
#[derive(Deserialize, utoipa::ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Release {
    /// From the answer to `acquire`.
    #[schema(pattern = "^[A-Za-z0-9_-]{32}$")]
    token: String,
}

/// Take a lock
///
/// The answer carries the token that alone can renew and release it. A request that waits stands in line with
/// everybody else who wants the lock, and is served in its turn.
#[utoipa::path(post, path = "/api/v1/locks/{name}/acquire", tag = "leases", request_body = Acquire,
    params(("name" = String, Path, description = "the lock; percent-encoded, `/` as `%2F`")),
    responses((status = 200, body = AcquiredView), (status = 400, body = Said),
        (status = 409, description = "`held` by somebody else, or `revoked`: this request's own lease was taken away", body = Said)))]
pub(crate) async fn acquire(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Name(name): Name,
    Sent(asked): Sent<Acquire>,
) -> Result<Json<AcquiredView>, Problem> {
    let ttl = lasting(asked.ttl_ms)?.unwrap_or_default();
    let wait = Duration::from_millis(asked.wait_ms.unwrap_or(0));
    if wait > LONGEST_WAIT {
        let text = format!("wait_ms is {}; it must be at most {}", wait.as_millis(), LONGEST_WAIT.as_millis());
        return Err(Problem::bad_request("invalid_wait", text));
    }
    let owner = Owner::elsewhere(
        asked.owner.as_deref().or(caller.key.as_ref().map(|key| key.name.as_str())).unwrap_or(NOBODY),
    )?;
    let token = asked.request_id.as_deref().map(|id| token_of(&caller, &name, id)).transpose()?;
    let request = || app.locks.lock(&name).ttl(ttl.duration()).owned_by(owner.clone());
    let in_time = || if wait.is_zero() { request().no_wait() } else { request().wait_up_to(wait) };
    let taking = async {
        match &token {
            // Asked again after an answer was lost, it finds its own lease. So nothing is undone here.
            Some(token) => {
                let mut granted = app.repeated.watch(token.holder_id());
                let mut taking = pin!(in_time().under_token(token));
                loop {
                    tokio::select! {
                        biased;
                        fence = &mut taking => return Ok((fence?, token.clone())),
                        // To the same request, sent twice: this one has it too.
                        () = granted.told() => if let Ok(fence) = request().no_wait().under_token(token).await {
                            return Ok((fence, token.clone()));
                        },
                    }
                }
            }
            // Nobody could ask for it again: a client that is gone keeps no lock.
            None => {
                let guard = in_time().await?;
                if !wait.is_zero() {
                    // A client that hung up while it waited may not have been noticed yet. A timer ends no sooner
                    // than the sockets have been looked at, and then this call is dropped, with its guard.
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                Ok::<_, Error>((guard.fence(), guard.into_token().await?))
            }
        }
    };
    let (fence, taken) = tokio::select! {
        taken = taking => taken?,
        () = app.stopping.cancelled() => return Err(shutting_down().about(&name)),
    };
    match app.locks.info(&name).await {
        Ok(info) => {
            let mut lock = info.view();
            lock.fence = fence.map(Fence::get);
            Ok(Json(AcquiredView::new(lock, &taken)))
        }
        Err(error) => {
            if token.is_none() {
                // Nobody will ever know the token.
                let _ = app.locks.release_token_and_tell(&name, &taken).await;
            }
            Err(error.into())
        }
    }
}

/// Keep a lock that was taken with `acquire`
#[utoipa::path(post, path = "/api/v1/locks/{name}/renew", tag = "leases", request_body = Renew,
    params(("name" = String, Path, description = "the lock; percent-encoded, `/` as `%2F`")),
    responses((status = 200, body = LockView), (status = 400, body = Said),
        (status = 409, description = "`not_owner`: it is not, or no longer, this token's; `revoked`: stop, and release it", body = Said)))]
pub(crate) async fn renew(
    State(app): State<App>,
    Name(name): Name,
    Sent(asked): Sent<Renew>,
) -> Result<Json<LockView>, Problem> {
    let token = Token::parse(&asked.token)?;
    let ttl = lasting(asked.ttl_ms)?;
    app.locks.renew_token(&name, &token, ttl).await?;
    Ok(Json(app.locks.info(&name).await?.view()))
}

/// Give a lock back that was taken with `acquire`
#[utoipa::path(post, path = "/api/v1/locks/{name}/release", tag = "leases", request_body = Release,
    params(("name" = String, Path, description = "the lock; percent-encoded, `/` as `%2F`")),
    responses((status = 200, body = ReleasedView), (status = 400, body = Said),
        (status = 409, description = "`not_owner`: it is not, or no longer, this token's; nothing was touched", body = Said)))]
pub(crate) async fn release(
    State(app): State<App>,
    Name(name): Name,
    Sent(asked): Sent<Release>,
) -> Result<Json<ReleasedView>, Problem> {
    let token = Token::parse(&asked.token)?;
    if !app.locks.release_token_and_tell(&name, &token).await? {
        return Err(Error::Lost { name, why: LossReason::Gone }.into());
    }
    Ok(Json(ReleasedView { name: name.to_string(), released: true }))
}

fn lasting(ttl_ms: Option<u64>) -> Result<Option<Ttl>, Problem> {
    Ok(ttl_ms.map(|ms| Ttl::new(Duration::from_millis(ms))).transpose()?)
}

/// The token of a repeatable request: the same on every server, without anything kept. Where keys are needed,
/// nobody who only knows the id can make it.
fn token_of(caller: &Caller, name: &LockName, request_id: &str) -> Result<Token, Problem> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._:-".contains(&b);
    if !REQUEST_ID_CHARS.contains(&request_id.len()) || !request_id.bytes().all(allowed) {
        let text = "request_id must be 16 to 128 of A-Z a-z 0-9 . _ : - and fresh for each lock, such as a random UUID";
        return Err(Problem::new(StatusCode::BAD_REQUEST, "invalid_request_id", text));
    }
    let bytes = caller.derive(&[request_id, name.as_str()]);
    let text = URL_SAFE_NO_PAD.encode(&bytes[..Token::LEN / 4 * 3]);
    Ok(Token::parse(&text)?)
}
