//! The header `Idempotency-Key`: a request that is sent again is answered again, and not carried out again.

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

use super::answer::answer;
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
/// Says that an answer was given before.
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// The longest key.
const KEY_BYTES_MAX: usize = 255;
/// What a record has besides a response.
const HEAD_BYTES_MAX: usize = 64 * 1024;
/// When to ask again while the first request is under way.
const SOON: Duration = Duration::from_secs(1);

/// Answers requests with an `Idempotency-Key` once: the handler is called for the first, and a request that is
/// sent again gets the stored response, with `Idempotency-Replayed: true`.
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
/// | what happened | answer |
/// |---|---|
/// | the same request was answered before | its response, `Idempotency-Replayed: true` |
/// | it is under way | 409 `in_flight` with `Retry-After`, at once or after [`wait_up_to`](Self::wait_up_to) |
/// | the key was used for another method, path, query or body | 422 `other_payload` |
/// | the key is empty, longer than 255 bytes or not plain text, or there are two | 400 `invalid_key` |
/// | no key, and one is [required](Self::required) | 400 `missing_header` |
/// | a key, but not the header that tells callers apart | 400 `missing_header` |
/// | a key, but the scope's function does not know the caller | 400 `unknown_caller` |
/// | the body is larger than [`body_limit`](Self::body_limit) | 413 `body_too_large` |
/// | it was answered, with more than [`response_limit`](Self::response_limit) | 409 `response_not_stored` |
/// | the store did not answer | 503 `store_unreachable`; the handler was not called |
///
/// - Requests without a key, and `GET`, `HEAD`, `OPTIONS` and `TRACE`, pass untouched.
/// - A response with a status of 5xx is not stored: the request was not carried out, and the same key may be
///   tried again. Everything else is stored, refusals (4xx) as well, but without `Set-Cookie`: a session
///   belongs to the connection that opened it.
/// - A request that meets the same one under way does not wait unless [`wait_up_to`](Self::wait_up_to) says so. The
///   [`ttl`](Self::ttl) is how long a key is blocked by an instance that crashed.
/// - The handler runs to its end when its client goes away: the next request with the key gets what came of
///   it. It is cancelled only when its lease is lost, and answered with 503 `lease_lost`.
/// - A [scope](IdempotencyScope) is required: the same key from two callers must not meet.
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

/// An [`IdempotencyLayer`] that does not know yet whose keys are whose. It is no layer before one of these is
/// called:
///
/// ```compile_fail
/// # use leasehold::http::IdempotencyLayer;
/// # use leasehold::LockManager;
/// # fn layer(locks: LockManager, app: axum::Router) -> axum::Router {
/// app.layer(IdempotencyLayer::new(locks)) // whose keys?
/// # }
/// ```
///
/// A caller is hashed into the names of locks and records (HMAC-SHA-256, with a random key that the first
/// instance creates in the store), so lists and logs do not show it.
///
/// **Never scope by a value that rotates**, such as a bearer token: a client that renews its token between two
/// tries is another caller then, and its payment is made twice. Use what stays the same, an account or tenant.
#[must_use = "it is a layer once its scope is known: `per`, `per_header` or `shared`"]
pub struct IdempotencyScope {
    locks: LockManager,
}

impl IdempotencyScope {
    /// Tells callers apart by what a function makes of a request, such as the account that authentication has
    /// put into its extensions. `None` or an empty text: the caller is unknown, and a request with a key is refused.
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

    /// Tells callers apart by a header that a proxy or the authentication in front has verified, such as
    /// `x-tenant`: a caller that can choose its value can choose whose responses it gets. Not `authorization`, where
    /// that is a token that rotates. A request with a key and without the header is refused.
    ///
    /// # Panics
    /// When this cannot be the name of a header: lower case, plain text.
    pub fn per_header(self, header: &'static str) -> IdempotencyLayer {
        self.with(CallerScope::Header(HeaderName::from_static(header), CallerHash::new()))
    }

    /// All callers share one set of keys: for a service with one client, or clients that trust each other. A
    /// caller that uses a key of another one gets its response.
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

/// Says who calls; `None` when that is not known.
type Caller = dyn Fn(&Parts) -> Option<String> + Send + Sync;

/// How callers are told apart.
#[derive(Clone)]
enum CallerScope {
    Shared,
    Header(HeaderName, CallerHash),
    Function(Arc<Caller>, CallerHash),
}

impl CallerScope {
    /// What stands for the caller in a name, or the answer to a caller that is not known.
    async fn caller(&self, parts: &Parts, core: &Core) -> Result<String, Box<Response>> {
        let (caller, hash) = match self {
            Self::Shared => return Ok(String::new()),
            Self::Header(header, hash) => {
                let values: Vec<&[u8]> = parts.headers.get_all(header).iter().map(HeaderValue::as_bytes).collect();
                let caller = values.join(&b'\n');
                if caller.is_empty() {
                    let text = format!("with an idempotency key, the header `{header}` must say who calls");
                    return Err(answer(StatusCode::BAD_REQUEST, "missing_header", &text, None, None).into());
                }
                (caller, hash)
            }
            Self::Function(function, hash) => {
                let Some(caller) = function(parts).filter(|caller| !caller.is_empty()) else {
                    let text = "an idempotency key belongs to its caller, and who calls is not known";
                    return Err(answer(StatusCode::BAD_REQUEST, "unknown_caller", text, None, None).into());
                };
                (caller.into_bytes(), hash)
            }
        };
        hash.of(core, &caller).await.map_err(|error| error.into_response().into())
    }
}

impl IdempotencyLayer {
    /// Responses in the store of this manager, kept for 24 h. The scope comes next.
    #[expect(clippy::new_ret_no_self, reason = "without a scope it is no layer yet")]
    pub fn new(locks: LockManager) -> IdempotencyScope {
        IdempotencyScope { locks }
    }

    /// How long a response is kept, 1 s to 400 days.
    pub fn keep(mut self, keep: Duration) -> Self {
        self.keep = keep;
        self
    }

    setters!(ttl, wait_up_to, no_wait, owner, retry_every, terms);

    fn terms_mut(&mut self) -> &mut Terms {
        &mut self.terms
    }

    /// Whether a request without a key is refused.
    pub fn required(mut self, required: bool) -> Self {
        self.required = required;
        self
    }

    /// The largest body of a request with a key, 256 KiB unless said: it is read whole, to be told from others.
    pub fn body_limit(mut self, bytes: usize) -> Self {
        self.body_limit = bytes;
        self
    }

    /// The largest body of a response that is stored, 256 KiB unless said, 960 KiB at most. A larger one is
    /// passed on, and cannot be had again.
    pub fn response_limit(mut self, bytes: usize) -> Self {
        self.response_limit = bytes.min(VALUE_BYTES_MAX - HEAD_BYTES_MAX);
        self
    }

    /// The name of a request's work, if it has a key; or the answer to a request whose key makes no sense.
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
            return Err(invalid("the header `idempotency-key` must be there once, as 1 to 255 plain characters").into());
        }
        // A hash has a fixed length, so no caller and key read like another caller's.
        let caller = self.scope.caller(parts, self.locks.core()).await?;
        Ok(Some(format!("http:{caller}:{key}")))
    }

    fn once(&self, name: &str, asked: &[u8]) -> Once {
        self.locks.once(name).keep(self.keep).terms(&self.terms).payload_bytes(asked)
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
        // The one that said it was ready is the one that is called.
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
                let text = format!("with an idempotency key, a body may have {} bytes", layer.body_limit);
                return Ok(answer(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", &text, None, None));
            };
            let asked = [parts.method.as_str().as_bytes(), parts.uri.to_string().as_bytes(), &body].join(&b'\n');
            match layer.once(&name, &asked).start().await {
                Ok(Started::Done(done)) => Ok(replay(done.bytes())),
                Ok(Started::Run(running)) => {
                    let request = Request::from_parts(parts, Body::from(body));
                    // On a task of its own: a client that goes away does not undo what was begun for it.
                    // What it logs belongs to the request all the same.
                    let work = carry_out(running, inner, request, layer.response_limit).in_current_span();
                    let work = tokio::spawn(work);
                    work.await.unwrap_or_else(|failed| match failed.try_into_panic() {
                        Ok(panic) => std::panic::resume_unwind(panic),
                        Err(_) => Ok(internal("the runtime is going down")),
                    })
                }
                Err(Error::NotAcquired { .. }) => {
                    let text = "the same request is under way; ask again for its answer";
                    Ok(answer(StatusCode::CONFLICT, "in_flight", text, None, Some(SOON)))
                }
                Err(Error::ResultNotStored { .. }) => Ok(not_stored()),
                Err(error) => Ok(error.into_response()),
            }
        })
    }
}

/// Calls the handler under its lock, and stores what it answers.
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
            tracing::error!(%error, "the body of a response broke off");
            (Ok(internal("the answer could not be made")), None)
        }
        Ok(Err(error)) => (Err(error), None),
        Err(lost) => (Ok(lost.into_response()), None),
    };
    let carried_out = response.as_ref().is_ok_and(|response: &Response| !response.status().is_server_error());
    let stored = match result.filter(|_| carried_out) {
        Some(result) => slot.store(entered.guard(), &result).await,
        // Not carried out: the key is as good as new.
        None => slot.forget().await,
    };
    entered.leave().await;
    match stored {
        // Somebody else has begun it anew: what this one did is not the answer.
        Err(error @ Error::Lost { .. }) if carried_out => Ok(error.into_response()),
        Err(error) => {
            tracing::warn!(error = %format_args!("{error:#}"), "the answer was not stored");
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
            tracing::error!(problem, "what is stored for an idempotency key is no response");
            internal("the service is set up wrongly")
        }
    }
}

fn not_stored() -> Response {
    let text = "this was carried out before; its answer was too large to be stored";
    answer(StatusCode::CONFLICT, "response_not_stored", text, None, None)
}

fn internal(text: &str) -> Response {
    answer(StatusCode::INTERNAL_SERVER_ERROR, "internal", text, None, None)
}
