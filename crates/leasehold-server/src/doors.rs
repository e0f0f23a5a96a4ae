//! Who may come in: what is checked before any route, and what every answer carries.
//!
//! The order matters: whose name the request was sent to, whether a foreign page sent it, whose key it
//! carries, and what that key allows. A route that nobody thought of needs a key like every other, and an
//! operator's to change something.

use std::time::{Duration, Instant};

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::answer::Problem;
use crate::connection::Peer;
use crate::keys::{Caller, Role};
use crate::throttle::Throttle;
use crate::{App, Settings, page};

/// Nothing of an answer may be framed, guessed at, kept or told to others.
const HEADERS: [(HeaderName, &str); 5] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
];

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

static WRONG_KEYS: Throttle = Throttle::new();

/// Around every route, also around those that do not exist.
pub(crate) async fn guard(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let began = Instant::now();
    let method = request.method().clone();
    let peer = request.extensions().get::<Peer>().copied();
    // Neither path nor query: names belong to their owners, and a query may carry a key.
    let route = request.extensions().get::<MatchedPath>().cloned();
    let _in_flight = InFlight::begin(&app);
    let (mut response, who) = match admit(&app, &mut request, peer) {
        Ok(caller) => {
            let who = caller.key.as_ref().map(|key| key.id.clone());
            request.extensions_mut().insert(caller);
            (next.run(request).await, who)
        }
        Err(problem) => (problem.into_response(), None),
    };
    for (name, value) in HEADERS {
        // A page that needs more says so itself.
        response.headers_mut().entry(name).or_insert(HeaderValue::from_static(value));
    }
    let (status, peer) = (response.status(), peer.map(|peer| peer.0));
    if status == StatusCode::UNAUTHORIZED {
        let scheme = HeaderValue::from_static("Bearer realm=\"leasehold\"");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
    }
    let route = route.as_ref().map_or("nowhere", MatchedPath::as_str);
    app.metrics.answered(route, &method, status, began.elapsed());
    tracing::debug!(?peer, who, %method, route, status = status.as_u16(), took = ?began.elapsed(), "answered");
    response
}

/// Counts a request until it is answered, or its client is gone.
struct InFlight(App);

impl InFlight {
    fn begin(app: &App) -> Self {
        app.metrics.in_flight.inc();
        Self(app.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.metrics.in_flight.dec();
    }
}

fn admit(app: &App, request: &mut Request, peer: Option<Peer>) -> Result<Caller, Problem> {
    let presented = take_key(request);
    if !is_addressed_to_us(request.headers(), &app.settings) {
        let text = "this server is not known by that name; say --allow-host NAME when you start it";
        return Err(Problem::new(StatusCode::MISDIRECTED_REQUEST, "foreign_host", text));
    }
    if changes(request.method()) && is_sent_by_a_foreign_page(request.headers()) {
        let text = "a page of another site may not change anything here";
        return Err(Problem::new(StatusCode::FORBIDDEN, "cross_site", text));
    }
    let Some(needed) = needed(request.method(), request.uri().path()) else { return Ok(Caller::anybody()) };
    let Some(keys) = &app.keys else { return Ok(Caller::anybody()) };
    let Some(caller) = presented.as_deref().and_then(|presented| keys.caller(presented)) else {
        return Err(refuse(app, peer, presented.is_some()));
    };
    if caller.role < needed {
        let text = "this key may look, and change nothing; use an operator's";
        return Err(Problem::new(StatusCode::FORBIDDEN, "needs_operator", text));
    }
    Ok(caller)
}

/// Who may ask: `None` is everybody. Those two say up or down, and nothing else; the page holds no data, and asks
/// for the key itself.
fn needed(method: &Method, path: &str) -> Option<Role> {
    match path {
        "/healthz" | "/readyz" => None,
        "/" if !changes(method) => None,
        _ if path.starts_with(page::ASSETS) && !changes(method) => None,
        _ if changes(method) => Some(Role::Operator),
        _ => Some(Role::Viewer),
    }
}

fn changes(method: &Method) -> bool {
    !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

fn refuse(app: &App, peer: Option<Peer>, presented: bool) -> Problem {
    if !presented {
        let text = "send a key: Authorization: Bearer KEY, or X-API-Key; leasehold keys create makes one";
        return Problem::new(StatusCode::UNAUTHORIZED, "no_key", text);
    }
    // Only wrong keys are counted: they are what somebody who guesses sends.
    let wait = peer.and_then(|peer| {
        if let Some(suppressed) = WRONG_KEYS.pass() {
            tracing::warn!(peer = %peer.0, suppressed, "a key that is not known");
        }
        app.failures.count(peer.0, Instant::now())
    });
    match wait {
        None => Problem::new(StatusCode::UNAUTHORIZED, "wrong_key", "this key is not known, or was revoked"),
        Some(wait) => {
            let text = "too many wrong keys from this address; wait";
            let wait = wait.max(Duration::from_secs(1));
            Problem::new(StatusCode::TOO_MANY_REQUESTS, "too_many_failures", text).retry_after(wait)
        }
    }
}

/// The key a request carries. It is taken out of the query, so that nothing behind this door can show it.
fn take_key(request: &mut Request) -> Option<String> {
    let in_query = take_from_query(request.uri_mut());
    let headers = request.headers();
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text(header::AUTHORIZATION).map(|value| match value.split_once(' ') {
        Some((scheme, key)) if scheme.eq_ignore_ascii_case("bearer") => key.trim(),
        // Something was presented, and it is no key.
        _ => "",
    });
    bearer.or(text(API_KEY)).map(str::to_owned).or(in_query)
}

fn take_from_query(uri: &mut Uri) -> Option<String> {
    let query = uri.query().filter(|query| query.contains("api_key"))?;
    let (keys, others): (Vec<&str>, Vec<&str>) =
        query.split('&').partition(|pair| *pair == "api_key" || pair.starts_with("api_key="));
    let key = keys.first()?.strip_prefix("api_key=").unwrap_or("").to_owned();
    let others = others.join("&");
    let path = uri.path();
    let rest = if others.is_empty() { path.to_owned() } else { format!("{path}?{others}") };
    // A part of what was a URI is one; should it not be, it loses its query rather than show the key.
    *uri = rest.parse().unwrap_or_else(|_| Uri::from_static("/"));
    Some(key)
}

/// A browser that was led here by somebody else's name says that name. A plain address cannot be
/// anybody else's.
fn is_addressed_to_us(headers: &HeaderMap, settings: &Settings) -> bool {
    let Some(host) = host_and_port(headers).map(without_port) else { return false };
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    plain.parse::<std::net::IpAddr>().is_ok()
        || host.eq_ignore_ascii_case("localhost")
        || settings.hosts.iter().any(|known| known.eq_ignore_ascii_case(host))
}

/// Browsers say whose page sends a request that changes something; programs say nothing.
fn is_sent_by_a_foreign_page(headers: &HeaderMap) -> bool {
    let foreign_site = headers.get_all(FETCH_SITE).iter().any(|site| site != "same-origin" && site != "none");
    let ours = host_and_port(headers);
    let same = |from: &HeaderValue| {
        let from = from.to_str().ok().and_then(|from| from.split_once("://")).map(|(_, rest)| rest);
        let from = from.map(|rest| rest.split('/').next().unwrap_or(rest));
        from.is_some() && from.map(str::to_ascii_lowercase) == ours.map(str::to_ascii_lowercase)
    };
    let said = [header::ORIGIN, header::REFERER].map(|name| headers.get_all(name).iter().all(same));
    foreign_site || said.contains(&false)
}

/// What the one Host header says.
fn host_and_port(headers: &HeaderMap) -> Option<&str> {
    let mut all = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (all.next(), all.next()) else { return None };
    host.to_str().ok()
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_str(value).expect("a header"));
        }
        headers
    }

    #[test]
    fn only_our_own_names_are_answered() {
        let settings = Settings { hosts: vec!["locks.example".into()], ..Settings::default() };
        let addressed = |host: &str| is_addressed_to_us(&headers(&[("host", host)]), &settings);
        for ours in ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8847", "[::1]:8847", "[::1]", "10.1.2.3"] {
            assert!(addressed(ours), "{ours}");
        }
        assert!(addressed("locks.example:8847"));
        let evil =
            ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "", ":80", "locks.example.evil"];
        for foreign in evil {
            assert!(!addressed(foreign), "{foreign}");
        }
        assert!(!is_addressed_to_us(&headers(&[]), &settings), "no name at all");
        assert!(!is_addressed_to_us(&headers(&[("host", "localhost"), ("host", "evil.example")]), &settings), "two");
    }

    #[test]
    fn only_our_own_pages_change_something() {
        let sent = |more: &[(&'static str, &str)]| {
            is_sent_by_a_foreign_page(&headers(&[&[("host", "127.0.0.1:8847")], more].concat()))
        };
        assert!(!sent(&[]), "programs say nothing");
        assert!(!sent(&[("origin", "http://127.0.0.1:8847")]));
        assert!(!sent(&[("sec-fetch-site", "same-origin"), ("referer", "http://127.0.0.1:8847/docs?x=y")]));
        for (name, value) in [
            ("origin", "http://evil.example"),
            ("origin", "null"),
            ("origin", "http://127.0.0.1:9999"),
            ("origin", "http://127.0.0.1:8847.evil.example"),
            ("origin", ""),
            ("referer", "http://evil.example/127.0.0.1:8847"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
        ] {
            assert!(sent(&[(name, value)]), "{name}: {value}");
        }
        assert!(sent(&[("origin", "http://127.0.0.1:8847"), ("origin", "http://evil.example")]), "two origins");
    }

    #[test]
    fn a_key_is_found_and_taken_out_of_the_query() {
        let key = |uri: &str, more: &[(&'static str, &str)]| {
            let mut request = Request::new(axum::body::Body::empty());
            *request.uri_mut() = uri.parse().expect("a URI");
            *request.headers_mut() = headers(more);
            (take_key(&mut request), request.uri().to_string())
        };
        assert_eq!(key("/a?prefix=x", &[]), (None, "/a?prefix=x".into()));
        assert_eq!(key("/a?api_key=K&prefix=x", &[]), (Some("K".into()), "/a?prefix=x".into()));
        assert_eq!(key("/a?prefix=x&api_key=K&api_key=L", &[]), (Some("K".into()), "/a?prefix=x".into()));
        assert_eq!(key("/a?api_key=K", &[("x-api-key", "H")]), (Some("H".into()), "/a".into()));
        assert_eq!(key("/a", &[("authorization", "bearer B"), ("x-api-key", "H")]).0, Some("B".into()));
        assert_eq!(key("/a", &[("authorization", "Basic B")]).0, Some(String::new()), "presented, and no key");
    }
}
