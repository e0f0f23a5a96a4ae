//! Who may come in: what is checked before any route, and what every answer carries.

use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::answer::Problem;
use crate::connection::Peer;
use crate::{App, Settings};

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

/// Around every route, also around those that do not exist.
pub(crate) async fn guard(State(app): State<App>, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let method = request.method().clone();
    let peer = request.extensions().get::<Peer>().map(|peer| peer.0);
    // Neither path nor query: names belong to their owners, and a query may carry a key.
    let route = request.extensions().get::<MatchedPath>().cloned();
    let mut response = match admit(&app, &request) {
        Ok(()) => next.run(request).await,
        Err(problem) => problem.into_response(),
    };
    for (name, value) in HEADERS {
        // A page that needs more says so itself.
        response.headers_mut().entry(name).or_insert(HeaderValue::from_static(value));
    }
    let route = route.as_ref().map_or("nowhere", MatchedPath::as_str);
    tracing::debug!(?peer, %method, route, status = response.status().as_u16(), took = ?began.elapsed(), "answered");
    response
}

fn admit(app: &App, request: &Request) -> Result<(), Problem> {
    if !is_addressed_to_us(request, &app.settings) {
        let text = "this server is not known by that name; say --allow-host NAME when you start it";
        return Err(Problem::new(StatusCode::MISDIRECTED_REQUEST, "foreign_host", text));
    }
    Ok(())
}

/// A browser that was led here by somebody else's name says that name. A plain address cannot be
/// anybody else's.
fn is_addressed_to_us(request: &Request, settings: &Settings) -> bool {
    let Some(host) = host(request.headers()) else { return false };
    let host = host.to_ascii_lowercase();
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    plain.parse::<std::net::IpAddr>().is_ok()
        || host == "localhost"
        || settings.hosts.iter().any(|known| known.eq_ignore_ascii_case(&host))
}

/// The host of the one Host header, without its port.
fn host(headers: &HeaderMap) -> Option<&str> {
    let mut all = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (all.next(), all.next()) else { return None };
    let host = host.to_str().ok()?;
    match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => Some(name),
        _ => Some(host),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addressed(hosts: &[&str]) -> bool {
        let mut request = Request::new(axum::body::Body::empty());
        for host in hosts {
            request.headers_mut().append(header::HOST, HeaderValue::from_str(host).expect("a header"));
        }
        is_addressed_to_us(&request, &Settings { hosts: vec!["locks.example".into()] })
    }

    #[test]
    fn only_our_own_names_are_answered() {
        for ours in ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:8847", "[::1]:8847", "[::1]", "10.1.2.3"] {
            assert!(addressed(&[ours]), "{ours}");
        }
        assert!(addressed(&["locks.example:8847"]));
        for foreign in
            ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "", ":80", "locks.example.evil"]
        {
            assert!(!addressed(&[foreign]), "{foreign}");
        }
        assert!(!addressed(&[]), "no name at all");
        assert!(!addressed(&["localhost", "evil.example"]), "two names");
    }
}
