//! The header `Idempotency-Key`: a repeated request gets the stored response and is not carried out again.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use tower_layer::Layer;
use tower_service::Service;
use tracing::Instrument;

use super::answer::{MISCONFIGURED, RETRY_AFTER, answer};
use super::caller::CallerHash;
use super::stored::{self, Collected};
use crate::engine::Core;
use crate::error::Error;
use crate::lease::Terms;
use crate::lease::terms::setters;
use crate::manager::LockManager;
use crate::once::{Once, Running, Started};
use crate::scope::{Entered, OnLoss};
use crate::store::VALUE_BYTES_MAX;

const KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// Marks a response that was stored before.
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// The longest key.
const KEY_BYTES_MAX: usize = 255;
/// Space for the headers of a response in its record.
const HEAD_BYTES_MAX: usize = 64 * 1024;
/// Calls the handler once per `Idempotency-Key`: the first request is handled, and a repeated
/// request gets the stored response, with `Idempotency-Replayed: true`.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use axum::{Router, routing::post};
/// use leasehold::http::IdempotencyLayer;
/// use leasehold::LockManager;
///
/// let locks = LockManager::connect("memory:").await?;
/// let once = IdempotencyLayer::new(locks).per_header("x-tenant").keep(Duration::from_secs(86_400));
/// let app: Router = Router::new().route("/transfers", post(async || "moved")).layer(once);
/// # drop(app); Ok(()) }
/// ```
///
/// | situation | response |
/// |---|---|
/// | the request was answered before | the stored response, `Idempotency-Replayed: true` |
/// | the first request is still running | 409 `in_flight` with `Retry-After`, at once or after [`wait_up_to`](Self::wait_up_to) |
/// | the key was used for another method, path, query or body | 422 `other_payload` |
/// | the key is empty, longer than 255 bytes or not plain text, or the header is repeated | 400 `invalid_key` |
/// | the key is missing and [required](Self::required) | 400 `missing_header` |
/// | the header that identifies the caller is missing | 400 `missing_header` |
/// | the scope's function returns no caller | 400 `unknown_caller` |
/// | the body is larger than [`body_limit`](Self::body_limit) | 413 `body_too_large` |
/// | the request was answered before, with more than [`response_limit`](Self::response_limit) | 409 `response_not_stored` |
/// | the store did not answer | 503 `store_unreachable`; the handler was not called |
///
/// - Requests without a key, and `GET`, `HEAD`, `OPTIONS` and `TRACE` requests, are passed on unchanged.
/// - Responses with a status of 5xx are not stored: the request counts as not carried out, and the same key can be tried
///   again. All other responses are stored, also 4xx, but without `Set-Cookie`: a session belongs to one client.
/// - A repeated request does not wait for the first one unless [`wait_up_to`](Self::wait_up_to) is set. After a crash the
///   key is blocked for the [`ttl`](Self::ttl).
/// - The handler runs to its end if its client disconnects: the next request with the key gets the result. It is cancelled
///   only when its lease is lost; the response is 503 `lease_lost`.
/// - A [scope](IdempotencyScope) is required, so that two callers can use the same key.
#[derive(Clone)]
pub struct IdempotencyLayer {
    locks: LockManager,
    scope: CallerScope,
    keep: Duration,
    terms: Terms,
    required: bool,
    body_limit: usize,
    response_limit: usize,
}

/// An [`IdempotencyLayer`] without a scope. It cannot be used as a layer before one of its methods is called:
///
/// ```compile_fail
/// # use leasehold::http::IdempotencyLayer;
/// # use leasehold::LockManager;
/// # fn layer(locks: LockManager, app: axum::Router) -> axum::Router {
/// app.layer(IdempotencyLayer::new(locks)) // the scope is missing
/// # }
/// ```
///
/// The names of locks and records have a hash of the caller (HMAC-SHA-256, with a random key that the first instance creates
/// in the store), so lists and logs do not show it.
///
/// **Never scope by a value that rotates**, such as a bearer token: a client that renews its token between two attempts
/// counts as another caller, and its payment is made twice. Use a stable value, such as an account or tenant.
#[must_use = "call `per`, `per_header` or `shared` to get a layer"]
pub struct IdempotencyScope {
    locks: LockManager,
}

impl IdempotencyScope {
    /// Identifies callers with a function of the request, for example by the account that authentication stored in its
    /// extensions. If it returns `None` or an empty text, a request with a key is rejected.
    ///
    /// ```
    /// # use leasehold::http::IdempotencyLayer;
    /// # use leasehold::LockManager;
    /// #[derive(Clone)]
    /// struct Account(u64);
    ///
    /// # fn layer(locks: LockManager) -> IdempotencyLayer {
    /// IdempotencyLayer::new(locks).per(|parts| parts.extensions.get::<Account>().map(|account| account.0.to_string()))
    /// # }
    /// ```
    pub fn per(self, caller: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> IdempotencyLayer {
        self.with(CallerScope::Function(Arc::new(caller), CallerHash::new()))
    }

    /// Identifies callers by a header such as `x-tenant`. A proxy or the authentication must have verified it: a client that can
    /// choose the value can read the responses of others. Do not use `authorization` if its token rotates. A request with a key
    /// and without the header is rejected.
    ///
    /// # Panics
    /// When `header` is not a valid header name in lower case.
    pub fn per_header(self, header: &'static str) -> IdempotencyLayer {
        self.with(CallerScope::Header(HeaderName::from_static(header), CallerHash::new()))
    }

    /// Uses one set of keys for all callers: for a service with one client, or with clients that trust each other. A client that
    /// repeats the key of another one gets its response.
    pub fn shared(self) -> IdempotencyLayer {
        self.with(CallerScope::Shared)
    }

    fn with(self, scope: CallerScope) -> IdempotencyLayer {
        IdempotencyLayer {
            locks: self.locks,
            scope,
            keep: Duration::from_secs(24 * 60 * 60),
            terms: Terms::new().no_wait(),
            required: false,
            body_limit: 256 * 1024,
            response_limit: 256 * 1024,
        }
    }
}

/// Returns the caller of a request; `None` when it is unknown.
type CallerFunction = dyn Fn(&Parts) -> Option<String> + Send + Sync;

/// How callers are identified.
#[derive(Clone)]
enum CallerScope {
    Shared,
    Header(HeaderName, CallerHash),
    Function(Arc<CallerFunction>, CallerHash),
}

impl CallerScope {
    /// Returns the caller's part of a name, or the response to an unknown caller.
    async fn caller(&self, parts: &Parts, core: &Core) -> Result<String, Box<Response>> {
        let (caller, hash) = match self {
            Self::Shared => return Ok(String::new()),
            Self::Header(header, hash) => {
                let values: Vec<&[u8]> = parts.headers.get_all(header).iter().map(HeaderValue::as_bytes).collect();
                let caller = values.join(&b'\n');
                if caller.is_empty() {
                    let text = format!("with an idempotency key, the header `{header}` is required");
                    return Err(answer(StatusCode::BAD_REQUEST, "missing_header", &text, None, None).into());
                }
                (caller, hash)
            }
            Self::Function(function, hash) => {
                let Some(caller) = function(parts).filter(|caller| !caller.is_empty()) else {
                    let text = "the caller of this idempotency key is unknown";
                    return Err(answer(StatusCode::BAD_REQUEST, "unknown_caller", text, None, None).into());
                };
                (caller.into_bytes(), hash)
            }
        };
        hash.of(core, &caller).await.map_err(|error| error.into_response().into())
    }
}

impl IdempotencyLayer {
    /// Creates a layer that stores responses in the store of this manager, by default for 24 h. Set the scope next.
    #[expect(clippy::new_ret_no_self, reason = "the scope is still missing")]
    pub fn new(locks: LockManager) -> IdempotencyScope {
        IdempotencyScope { locks }
    }

    /// Sets how long a response is kept: 1 s to 400 days.
    pub fn keep(mut self, keep: Duration) -> Self {
        self.keep = keep;
        self
    }

    setters!(ttl, wait_up_to, no_wait, owner, retry_every, terms);

    fn terms_mut(&mut self) -> &mut Terms {
        &mut self.terms
    }

    /// Sets whether a request without a key is rejected.
    pub fn required(mut self, required: bool) -> Self {
        self.required = required;
        self
    }

    /// Sets the largest body of a request with a key, by default 256 KiB. The body is read whole, because it is compared with
    /// that of the first request.
    pub fn body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    /// Sets the largest body of a response that is stored, by default 256 KiB, at most 960 KiB. A larger response is passed on
    /// but cannot be replayed.
    pub fn response_limit(mut self, bytes: usize) -> Self {
        self.response_limit = bytes.min(VALUE_BYTES_MAX - HEAD_BYTES_MAX);
        self
    }

    /// Returns the id of a request's work if the request has a key, or the response to an invalid key.
    async fn name(&self, parts: &Parts) -> Result<Option<String>, Box<Response>> {
        let invalid = |text: &str| answer(StatusCode::BAD_REQUEST, "invalid_key", text, None, None);
        let mut keys = parts.headers.get_all(KEY).iter();
        let (key, more) = (keys.next(), keys.next());
        let Some(key) = key else {
            let text = "the header `idempotency-key` is missing";
            let missing = || answer(StatusCode::BAD_REQUEST, "missing_header", text, None, None);
            return if self.required { Err(missing().into()) } else { Ok(None) };
        };
        let key = key.to_str().unwrap_or_default();
        if more.is_some() || key.is_empty() || key.len() > KEY_BYTES_MAX || key.chars().any(char::is_control) {
            return Err(invalid("the header `idempotency-key` must occur once, with 1 to 255 plain characters").into());
        }
        // A hash has a fixed length, so no two pairs of caller and key make the same name.
        let caller = self.scope.caller(parts, self.locks.core()).await?;
        Ok(Some(format!("http:{caller}:{key}")))
    }

    fn once(&self, name: &str, payload: &[u8]) -> Once {
        self.locks.once(name).keep(self.keep).terms(&self.terms).payload_bytes(payload)
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = IdempotencyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        IdempotencyService { layer: self.clone(), inner }
    }
}

/// A service behind an [`IdempotencyLayer`].
#[derive(Clone)]
pub struct IdempotencyService<S> {
    layer: IdempotencyLayer,
    inner: S,
}

impl<S> Service<Request> for IdempotencyService<S>
where
    S: Service<Request, Response = Response> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
{
    type Response = Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let layer = self.layer.clone();
        // The service that was polled ready must be the one that is called.
        let next = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, next);
        Box::pin(async move {
            if [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE].contains(request.method()) {
                return inner.call(request).await;
            }
            let (parts, body) = request.into_parts();
            let name = match layer.name(&parts).await {
                Ok(Some(name)) => name,
                Ok(None) => return inner.call(Request::from_parts(parts, body)).await,
                Err(response) => return Ok(*response),
            };
            let Ok(body) = to_bytes(body, layer.body_limit).await else {
                let text = format!("with an idempotency key, a body may have at most {} bytes", layer.body_limit);
                return Ok(answer(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", &text, None, None));
            };
            let payload = [parts.method.as_str().as_bytes(), parts.uri.to_string().as_bytes(), &body].join(&b'\n');
            match layer.once(&name, &payload).start().await {
                Ok(Started::Done(done)) => Ok(replay(done.bytes())),
                Ok(Started::Run(running)) => {
                    let request = Request::from_parts(parts, Body::from(body));
                    // It runs in a task of its own, so that a client that disconnects does not cancel it. Its log lines belong
                    // to the span of the request.
                    let work = carry_out(running, inner, request, layer.response_limit).in_current_span();
                    let work = tokio::spawn(work);
                    work.await.unwrap_or_else(|failed| match failed.try_into_panic() {
                        Ok(panic) => std::panic::resume_unwind(panic),
                        Err(_) => Ok(internal("the service is shutting down")),
                    })
                }
                Err(Error::NotAcquired { .. }) => {
                    let text = "the same request is being processed; try again soon for its response";
                    Ok(answer(StatusCode::CONFLICT, "in_flight", text, None, Some(RETRY_AFTER)))
                }
                Err(Error::ResultNotStored { .. }) => Ok(not_stored()),
                Err(error) => Ok(error.into_response()),
            }
        })
    }
}

/// Calls the handler under its lock and stores its response.
async fn carry_out<S>(running: Running, mut inner: S, request: Request, limit: usize) -> Result<Response, S::Error>
where
    S: Service<Request, Response = Response>,
{
    let (guard, slot) = running.split();
    let entered = Entered::with(slot.core().clone(), guard);
    let work = async {
        match inner.call(request).await {
            Ok(response) => Ok(stored::collect(response, limit).await),
            Err(error) => Err(error),
        }
    };
    let done = entered.work(OnLoss::Cancel, work).await;
    let (response, result) = match done {
        Ok(Ok(Collected::Whole(response, result) | Collected::Large(response, result))) => (Ok(response), Some(result)),
        Ok(Ok(Collected::Broken(error))) => {
            tracing::error!(%error, "the body of a response ended with an error");
            (Ok(internal("the response could not be completed")), None)
        }
        Ok(Err(error)) => (Err(error), None),
        Err(lost) => (Ok(lost.into_response()), None),
    };
    let carried_out = response.as_ref().is_ok_and(|response: &Response| !response.status().is_server_error());
    let stored = match result.filter(|_| carried_out) {
        Some(result) => slot.store(entered.guard(), &result).await,
        // Not carried out: the key can be used again.
        None => slot.forget().await,
    };
    entered.leave().await;
    match stored {
        // Another instance has begun the work again, so this response does not count.
        Err(error @ Error::Lost { .. }) if carried_out => Ok(error.into_response()),
        Err(error) => {
            tracing::warn!(error = %format_args!("{error:#}"), "the response was not stored");
            response
        }
        Ok(_) => response,
    }
}

fn replay(stored: &[u8]) -> Response {
    match stored::read(stored) {
        Ok(Some(mut response)) => {
            response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
            response
        }
        Ok(None) => not_stored(),
        Err(problem) => {
            tracing::error!(problem, "the value stored for an idempotency key is not a response");
            internal(MISCONFIGURED)
        }
    }
}

fn not_stored() -> Response {
    let text = "this was already carried out, but its response was too large to be stored";
    answer(StatusCode::CONFLICT, "response_not_stored", text, None, None)
}

fn internal(text: &str) -> Response {
    answer(StatusCode::INTERNAL_SERVER_ERROR, "internal", text, None, None)
}
