//! The page: what it is made of is in the program, built from `dashboard/` and open to everybody. It holds no data;
//! what it shows it asks for, with the key of whoever looks at it.

use std::sync::LazyLock;

use axum::extract::{Path, Query};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::answer::Problem;

/// Where the parts of the page are.
pub(crate) const ASSETS: &str = "/assets/";

/// Its own scripts and styles and nothing from elsewhere; no text ever becomes markup or a script.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";
/// What is asked for by its hash never changes.
const FOR_EVER: &str = "public, max-age=31536000, immutable";
/// Anything else is asked for again, and answered with 304 when it is the same.
const ASK_AGAIN: &str = "no-cache";

const INDEX: &str = include_str!("../page/index.html");

struct Asset {
    name: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
    hash: String,
}

static PARTS: LazyLock<[Asset; 3]> = LazyLock::new(|| {
    let asset = |name, kind, bytes: &'static [u8]| Asset { name, kind, bytes, hash: hash(bytes) };
    [
        asset("page.js", "text/javascript; charset=utf-8", include_bytes!("../page/assets/page.js")),
        asset("page.css", "text/css; charset=utf-8", include_bytes!("../page/assets/page.css")),
        asset("icon.svg", "image/svg+xml", include_bytes!("../page/assets/icon.svg")),
    ]
});

/// The page, which asks for its parts by their hashes.
static PAGE: LazyLock<(String, String)> = LazyLock::new(|| {
    let with_hashes = PARTS.iter().fold(INDEX.to_owned(), |html, part| {
        html.replace(&format!("{ASSETS}{}", part.name), &format!("{ASSETS}{}?v={}", part.name, part.hash))
    });
    let hash = hash(with_hashes.as_bytes());
    (with_hashes, hash)
});

/// Which version of a part.
#[derive(Debug, Deserialize)]
pub(crate) struct Version {
    v: Option<String>,
}

/// The page for people
#[utoipa::path(get, path = "/", tag = "server", security(()),
    responses((status = 200, description = "the page", content_type = "text/html", body = String)))]
pub(crate) async fn index(headers: HeaderMap) -> Response {
    let (html, hash) = &*PAGE;
    answer(&headers, "text/html; charset=utf-8", html.as_bytes(), hash, ASK_AGAIN)
}

/// A part of the page
#[utoipa::path(get, path = "/assets/{file}", tag = "server", security(()),
    params(("file" = String, Path, description = "its name")),
    responses((status = 200, description = "the part", content_type = "text/javascript", body = String),
        (status = 404, description = "`no_such_route`", body = crate::answer::Said)))]
pub(crate) async fn asset(
    headers: HeaderMap,
    Path(file): Path<String>,
    Query(Version { v }): Query<Version>,
) -> Result<Response, Problem> {
    let Some(part) = PARTS.iter().find(|part| part.name == file) else {
        return Err(Problem::new(StatusCode::NOT_FOUND, "no_such_route", "the page has no such part"));
    };
    let caching = if v.as_deref() == Some(part.hash.as_str()) { FOR_EVER } else { ASK_AGAIN };
    Ok(answer(&headers, part.kind, part.bytes, &part.hash, caching))
}

fn answer(asked: &HeaderMap, kind: &'static str, bytes: &'static [u8], hash: &str, caching: &'static str) -> Response {
    let tag = format!("\"{hash}\"");
    let known = asked.get(header::IF_NONE_MATCH).and_then(|tags| tags.to_str().ok());
    let same = known.is_some_and(|known| known.split(',').any(|known| known.trim().trim_start_matches("W/") == tag));
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(caching));
    headers.insert(header::ETAG, HeaderValue::from_str(&tag).expect("hexadecimal digits"));
    if same {
        return (StatusCode::NOT_MODIFIED, headers).into_response();
    }
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    (headers, bytes).into_response()
}

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}
