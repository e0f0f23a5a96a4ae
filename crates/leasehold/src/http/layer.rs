//! A lock around a route.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::extract::{FromRequestParts, RawPathParams, Request};
use axum::http::request::Parts;
use axum::http::{HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use tower_layer::Layer;
use tower_service::Service;

use super::answer::{MISCONFIGURED, answer};
use crate::facts::Invalid;
use crate::lease::Terms;
use crate::lease::terms::setters;
use crate::manager::LockManager;
use crate::request::LockRequest;
use crate::scope::{Entered, Entry, OnLoss};

/// Runs a route under a lock that is named by path parameters (`{order_id}`) and headers (`{header:x-tenant}`). If the lock is
/// held, the handler is not called and the response is 409.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use axum::{Router, routing::put};
/// use leasehold::http::LockLayer;
/// use leasehold::LockManager;
///
/// let locks = LockManager::connect("memory:").await?;
/// let one_at_a_time = LockLayer::new(locks, "cart:{header:x-tenant}:{cart_id}")?.wait_up_to(Duration::from_secs(2));
/// let app: Router = Router::new().route("/carts/{cart_id}", put(async || "saved")).layer(one_at_a_time);
/// # drop(app); Ok(()) }
/// ```
///
/// Several variable parts must be separated by text. A `%`, or the first character of a separator, inside a value is
/// escaped (`%25`, `%3A`), so that `a:b` and `c` never make the same name as `a` and `b:c`. Other values appear in the name
/// unchanged.
///
/// The defaults are those of `#[lock]`: a lease of 10 s that is not renewed, and no waiting. The lock is held until the
/// handler has returned its response; a body that is streamed afterwards is not covered. A lost lease cancels the handler,
/// and so does a client that disconnects.
#[derive(Clone)]
pub struct LockLayer {
    locks: LockManager,
    key: Arc<[Piece]>,
    terms: Terms,
}

#[derive(Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Path(String),
    Header(HeaderName),
}

impl LockLayer {
    /// Creates a layer for locks of this manager, with a key such as `order:{order_id}` or `tenant:{header:x-tenant}`.
    ///
    /// # Errors
    /// [`Invalid::Setting`] when the key is invalid. A path parameter that the route does not have is found only when the route
    /// is called: the response is 500, and the log gives the reason.
    pub fn new(locks: LockManager, key: &str) -> Result<Self, Invalid> {
        let key = parse(key).map_err(|problem| Invalid::Setting {
            setting: "key of a lock layer",
            given: key.chars().take(64).collect(),
            problem,
        })?;
        let terms = Terms::new().ttl(Duration::from_secs(10)).no_wait().renew(false);
        Ok(Self { locks, key: key.into(), terms: terms.retry_every(Duration::from_millis(50)) })
    }

    setters!(ttl, wait_up_to, no_wait, owner, renew, max_hold, retry_every, on_unavailable, terms);

    fn terms_mut(&mut self) -> &mut Terms {
        &mut self.terms
    }

    fn request(&self, name: String) -> LockRequest {
        self.locks.lock(name).terms(&self.terms)
    }

    /// Returns the name of the lock of a request, or the response to a request without one.
    async fn name(&self, parts: &mut Parts) -> Result<String, Response> {
        let wants_path = self.key.iter().any(|piece| matches!(piece, Piece::Path(_)));
        let params = if wants_path {
            match RawPathParams::from_request_parts(parts, &()).await {
                Ok(params) => Some(params),
                // Not UTF-8, or a route without any parameter.
                Err(rejection) => return Err(rejection.into_response()),
            }
        } else {
            None
        };
        let mut name = Name::new(&self.key);
        for piece in &*self.key {
            match piece {
                Piece::Text(text) => name.text.push_str(text),
                Piece::Path(wanted) => {
                    let mut found = params.iter().flat_map(RawPathParams::iter);
                    match found.find(|(param, _)| param == wanted) {
                        Some((_, value)) => name.push_value(value),
                        None => {
                            tracing::error!(
                                param = wanted,
                                "the key of a lock layer has a path parameter that its route does not have"
                            );
                            return Err(answer(
                                StatusCode::INTERNAL_SERVER_ERROR,
                                "internal",
                                MISCONFIGURED,
                                None,
                                None,
                            ));
                        }
                    }
                }
                Piece::Header(wanted) => match parts.headers.get(wanted).map(|value| value.to_str()) {
                    Some(Ok(value)) if !value.is_empty() => name.push_value(value),
                    _ => {
                        let text = format!("the header `{wanted}` is missing, empty or not plain text");
                        return Err(answer(StatusCode::BAD_REQUEST, "missing_header", &text, None, None));
                    }
                },
            }
        }
        Ok(name.text)
    }
}

/// Builds a name so that no other values make the same name.
struct Name {
    text: String,
    /// The characters that are escaped in values.
    escaped: String,
}

impl Name {
    fn new(key: &[Piece]) -> Self {
        let mut escaped: String = separators(key).filter_map(|text| text.chars().next()).collect();
        if !escaped.is_empty() {
            escaped.push('%');
        }
        Self { text: String::new(), escaped }
    }

    fn push_value(&mut self, value: &str) {
        for c in value.chars() {
            if self.escaped.contains(c) {
                self.text.push_str(&format!("%{:02X}", u32::from(c)));
            } else {
                self.text.push(c);
            }
        }
    }
}

/// Returns the text between each two variable parts; empty where there is none.
fn separators(key: &[Piece]) -> impl Iterator<Item = &str> {
    let is_value = |piece: &Piece| !matches!(piece, Piece::Text(_));
    let first = key.iter().position(is_value).unwrap_or(key.len());
    let values = key[first..].iter().enumerate().filter(move |(_, piece)| is_value(piece)).skip(1);
    values.map(move |(at, _)| match &key[first + at - 1] {
        Piece::Text(text) => text.as_str(),
        Piece::Path(_) | Piece::Header(_) => "",
    })
}

impl<S> Layer<S> for LockLayer {
    type Service = LockService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        LockService { layer: self.clone(), inner }
    }
}

/// A service under the lock of a [`LockLayer`].
#[derive(Clone)]
pub struct LockService<S> {
    layer: LockLayer,
    inner: S,
}

impl<S> Service<Request> for LockService<S>
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
            let (mut parts, body) = request.into_parts();
            let name = match layer.name(&mut parts).await {
                Ok(name) => name,
                Err(response) => return Ok(response),
            };
            let entered = match Entered::by(layer.request(name), Entry::Once).await {
                Ok(entered) => entered,
                Err(error) => return Ok(error.into_response()),
            };
            let done = entered.work(OnLoss::Cancel, inner.call(Request::from_parts(parts, body))).await;
            entered.leave().await;
            done.unwrap_or_else(|lost| Ok(lost.into_response()))
        })
    }
}

fn parse(key: &str) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    let mut rest = key;
    while let Some((text, after)) = rest.split_once('{') {
        let (inside, after) = after.split_once('}').ok_or("has a `{` without its `}`")?;
        if !text.is_empty() {
            pieces.push(Piece::Text(text.to_owned()));
        }
        pieces.push(match inside.split_once(':') {
            Some(("header", name)) => {
                let name = name.parse().map_err(|_| format!("names the header `{name}`, which cannot be one"))?;
                Piece::Header(name)
            }
            Some(_) | None if inside.is_empty() || inside.contains(|c: char| !c.is_alphanumeric() && c != '_') => {
                return Err(format!("has `{{{inside}}}`, where `{{param}}` or `{{header:name}}` is expected"));
            }
            _ => Piece::Path(inside.to_owned()),
        });
        rest = after;
    }
    if rest.contains('}') || pieces.iter().any(|piece| matches!(piece, Piece::Text(text) if text.contains('}'))) {
        return Err("has a `}` without its `{`".into());
    }
    if !rest.is_empty() {
        pieces.push(Piece::Text(rest.to_owned()));
    }
    // An escaped character is `%` and two hex digits, so a separator must not begin with one of these.
    let separates = |text: &str| text.chars().next().is_some_and(|c| c.is_ascii_punctuation() && c != '%');
    if let Some(text) = separators(&pieces).find(|text| !separates(text)) {
        let problem = "between two values: use text that begins with punctuation such as `:` or `/`";
        return Err(if text.is_empty() { format!("has nothing {problem}") } else { format!("has `{text}` {problem}") });
    }
    if pieces.is_empty() { Err("is empty".into()) } else { Ok(pieces) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_text_parameters_and_headers() {
        let header = |name: &'static str| Piece::Header(HeaderName::from_static(name));
        let (text, path) = (|text: &str| Piece::Text(text.into()), |name: &str| Piece::Path(name.into()));
        assert_eq!(parse("order:{order_id}").expect("valid"), [text("order:"), path("order_id")]);
        assert_eq!(
            parse("{header:X-Tenant}:{a}!").expect("valid"),
            [header("x-tenant"), text(":"), path("a"), text("!")]
        );
        assert_eq!(parse("fixed").expect("valid"), [text("fixed")]);
        for bad in ["", "{", "a}", "{}", "{a b}", "{header:}", "{header:a b}", "{query:a}", "a}{b}", "{a.b}"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        for ambiguous in ["{a}{b}", "{a}%{b}", "{a}x{b}", "{a} {b}", "{a}3A{b}", "{a}:{b}{header:c}"] {
            assert!(parse(ambiguous).is_err(), "{ambiguous}");
        }
    }

    fn name(key: &str, values: &[&str]) -> String {
        let key = parse(key).expect("valid");
        let (mut name, mut values) = (Name::new(&key), values.iter());
        for piece in &key {
            match piece {
                Piece::Text(text) => name.text.push_str(text),
                Piece::Path(_) | Piece::Header(_) => name.push_value(values.next().expect("one for each")),
            }
        }
        name.text
    }

    #[test]
    fn different_values_never_make_the_same_name() {
        for (key, one, other) in [
            ("{a}/{b}", ["a/b", "c"], ["a", "b/c"]),
            ("cart:{a}:{b}", ["x:y", "z"], ["x", "y:z"]),
            ("{a}:{b}", ["x%3Ay", "z"], ["x:y", "z"]),
            ("{a}::{b}", ["x:", "z"], ["x", ":z"]),
        ] {
            assert_ne!(name(key, &one), name(key, &other), "{key}");
        }
        assert_eq!(name("cart:{a}:{b}", &["eu/7", "42"]), "cart:eu/7:42");
        assert_eq!(name("cart:{a}:{b}", &["x:y", "100%"]), "cart:x%3Ay:100%25");
        assert_eq!(name("order:{a}", &["x:y%"]), "order:x:y%", "one value needs no escapes");
    }
}
