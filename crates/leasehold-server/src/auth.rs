//! Authentication and authorization: the checks before every route and the security headers of every response.
//!
//! The order matters: the `Host` header, the origin of the page that sent the request, the API key, and the role of the
//! key. An unlisted route is treated like every other: reading needs a key, and changing something needs an operator's.

use std::time::{Duration, Instant};

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::caller::Caller;
use crate::keys::Role;
use crate::log_throttle::LogThrottle;
use crate::peer::Peer;
use crate::problem::Problem;
use crate::{App, Settings, page};

/// Security headers: a response must not be framed, sniffed, cached, or revealed as a referrer.
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

static WRONG_KEYS: LogThrottle = LogThrottle::new();

/// The middleware around every route, and around unknown routes too.
pub(crate) async fn layer(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let began = Instant::now();
    let method = request.method().clone();
    let peer = request.extensions().get::<Peer>().copied();
    // Log neither path nor query: lock names are private, and a query may carry a key.
    let route = request.extensions().get::<MatchedPath>().cloned();
    let _in_flight = InFlight::begin(&app);
    let (mut response, who) = match authorize(&app, &mut request, peer) {
        Ok(caller) => {
            let who = caller.key.as_ref().map(|key| key.id.clone());
            request.extensions_mut().insert(caller);
            (next.run(request).await, who)
        }
        Err(problem) => (problem.into_response(), None),
    };
    for (name, value) in HEADERS {
        // A route that needs a weaker policy sets the header itself.
        response.headers_mut().entry(name).or_insert(HeaderValue::from_static(value));
    }
    let (status, peer) = (response.status(), peer.map(|peer| peer.0));
    if status == StatusCode::UNAUTHORIZED {
        let scheme = HeaderValue::from_static("Bearer realm=\"leasehold\"");
        response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
    }
    let route = route.as_ref().map_or("nowhere", MatchedPath::as_str);
    app.metrics.record_response(route, &method, status, began.elapsed());
    tracing::debug!(?peer, who, %method, route, status = status.as_u16(), took = ?began.elapsed(), "answered");
    response
}

/// Counts a request until it is answered or its client disconnects.
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

fn authorize(app: &App, request: &mut Request, peer: Option<Peer>) -> Result<Caller, Problem> {
    let presented = take_key(request);
    if !has_allowed_host(request.headers(), &app.settings) {
        let text = "this server does not accept that host name; start it with --allow-host NAME";
        return Err(Problem::new(StatusCode::MISDIRECTED_REQUEST, "foreign_host", text));
    }
    if is_write(request.method()) && is_cross_site(request.headers()) {
        let text = "cross-site requests cannot change anything";
        return Err(Problem::new(StatusCode::FORBIDDEN, "cross_site", text));
    }
    let Some(required) = required_role(request.method(), request.uri().path()) else { return Ok(Caller::anonymous()) };
    let Some(keys) = &app.keys else { return Ok(Caller::anonymous()) };
    let Some(caller) = presented.as_deref().and_then(|presented| keys.caller(presented)) else {
        return Err(reject(app, peer, presented.is_some()));
    };
    if caller.role < required {
        let text = "a viewer key cannot change anything; use an operator key";
        return Err(Problem::new(StatusCode::FORBIDDEN, "needs_operator", text));
    }
    Ok(caller)
}

/// Returns the role that a route requires; `None` means that no key is required. The probes say only up or down, and
/// the dashboard contains no data and asks for the key itself.
fn required_role(method: &Method, path: &str) -> Option<Role> {
    match path {
        "/healthz" | "/readyz" => None,
        "/" if !is_write(method) => None,
        _ if path.starts_with(page::ASSETS_PATH) && !is_write(method) => None,
        _ if is_write(method) => Some(Role::Operator),
        _ => Some(Role::Viewer),
    }
}

fn is_write(method: &Method) -> bool {
    !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

fn reject(app: &App, peer: Option<Peer>, presented: bool) -> Problem {
    if !presented {
        let text = "send a key: Authorization: Bearer KEY, or X-API-Key; create one with `leasehold keys create`";
        return Problem::new(StatusCode::UNAUTHORIZED, "no_key", text);
    }
    // Only wrong keys count as failures; a missing key is not a guess.
    let wait = peer.and_then(|peer| {
        if let Some(suppressed) = WRONG_KEYS.pass() {
            tracing::warn!(peer = %peer.0, suppressed, "a client sent an unknown key");
        }
        app.failed_logins.count(peer.0, Instant::now())
    });
    match wait {
        None => Problem::new(StatusCode::UNAUTHORIZED, "wrong_key", "this key is unknown or was revoked"),
        Some(wait) => {
            let text = "too many wrong keys from this address; retry later";
            let wait = wait.max(Duration::from_secs(1));
            Problem::new(StatusCode::TOO_MANY_REQUESTS, "too_many_failures", text).retry_after(wait)
        }
    }
}

/// Takes the key out of a request. It is removed from the query, so that no later code can reveal it.
fn take_key(request: &mut Request) -> Option<String> {
    let in_query = take_key_from_query(request.uri_mut());
    let headers = request.headers();
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let bearer = text(header::AUTHORIZATION).map(|value| match value.split_once(' ') {
        Some((scheme, key)) if scheme.eq_ignore_ascii_case("bearer") => key.trim(),
        // A key was presented, but not in a form we accept.
        _ => "",
    });
    bearer.or(text(API_KEY)).map(str::to_owned).or(in_query)
}

fn take_key_from_query(uri: &mut Uri) -> Option<String> {
    let query = uri.query().filter(|query| query.contains("api_key"))?;
    let (keys, others): (Vec<&str>, Vec<&str>) =
        query.split('&').partition(|pair| *pair == "api_key" || pair.starts_with("api_key="));
    let key = keys.first()?.strip_prefix("api_key=").unwrap_or("").to_owned();
    let others = others.join("&");
    let path = uri.path();
    let rest = if others.is_empty() { path.to_owned() } else { format!("{path}?{others}") };
    // The rest of a valid URI is valid. If it were not, dropping the query is safer than revealing the key.
    *uri = rest.parse().unwrap_or_else(|_| Uri::from_static("/"));
    Some(key)
}

/// Whether the `Host` header names this server. During DNS rebinding the browser sends the attacker's host name; a
/// plain IP address cannot belong to an attacker.
fn has_allowed_host(headers: &HeaderMap, settings: &Settings) -> bool {
    let Some(host) = host_and_port(headers).map(without_port) else { return false };
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    plain.parse::<std::net::IpAddr>().is_ok()
        || host.eq_ignore_ascii_case("localhost")
        || settings.hosts.iter().any(|known| known.eq_ignore_ascii_case(host))
}

/// Whether a page of another site sent the request. Browsers say so in headers; other programs send none of them.
fn is_cross_site(headers: &HeaderMap) -> bool {
    let foreign_site = headers.get_all(FETCH_SITE).iter().any(|site| site != "same-origin" && site != "none");
    let ours = host_and_port(headers);
    let same = |from: &HeaderValue| {
        let from = from.to_str().ok().and_then(|from| from.split_once("://")).map(|(_, rest)| rest);
        let from = from.map(|rest| rest.split('/').next().unwrap_or(rest));
        from.is_some() && from.map(str::to_ascii_lowercase) == ours.map(str::to_ascii_lowercase)
    };
    let same_origin = [header::ORIGIN, header::REFERER].map(|name| headers.get_all(name).iter().all(same));
    foreign_site || same_origin.contains(&false)
}

/// Returns the value of the `Host` header if there is exactly one.
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
    fn only_allowed_hosts_are_answered() {
        let settings = Settings { hosts: vec!["locks.example".into()], ..Settings::default() };
        let addressed = |host: &str| has_allowed_host(&headers(&[("host", host)]), &settings);
        for ours in ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8847", "[::1]:8847", "[::1]", "10.1.2.3"] {
            assert!(addressed(ours), "{ours}");
        }
        assert!(addressed("locks.example:8847"));
        let evil =
            ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "", ":80", "locks.example.evil"];
        for foreign in evil {
            assert!(!addressed(foreign), "{foreign}");
        }
        assert!(!has_allowed_host(&headers(&[]), &settings), "no name at all");
        assert!(!has_allowed_host(&headers(&[("host", "localhost"), ("host", "evil.example")]), &settings), "two");
    }

    #[test]
    fn cross_site_writes_are_detected() {
        let sent =
            |more: &[(&'static str, &str)]| is_cross_site(&headers(&[&[("host", "127.0.0.1:8847")], more].concat()));
        assert!(!sent(&[]), "programs send none of the headers");
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
    fn a_key_is_found_and_removed_from_the_query() {
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
