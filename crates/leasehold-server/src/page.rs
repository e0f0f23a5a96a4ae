//! The dashboard, built from `dashboard/` and embedded in the program. It needs no key because it contains no data: it
//! requests its data with the key of its user.

use std::sync::LazyLock;

use axum::extract::{Path, Query};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::problem::Problem;

/// The path of the assets.
pub(crate) const ASSETS_PATH: &str = "/assets/";

/// The content security policy: only our own scripts and styles, and no text becomes markup or script.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";
/// Caching of an asset that is requested by its hash, and so never changes.
const IMMUTABLE: &str = "public, max-age=31536000, immutable";
/// Caching of everything else: the browser revalidates, and gets 304 if nothing changed.
const REVALIDATE: &str = "no-cache";

const INDEX: &str = include_str!("../page/index.html");

struct Asset {
    name: &'static str,
    kind: &'static str,
    bytes: &'static [u8],
    hash: String,
}

static ASSETS: LazyLock<[Asset; 3]> = LazyLock::new(|| {
    let asset = |name, kind, bytes: &'static [u8]| Asset { name, kind, bytes, hash: hash(bytes) };
    [
        asset("page.js", "text/javascript; charset=utf-8", include_bytes!("../page/assets/page.js")),
        asset("page.css", "text/css; charset=utf-8", include_bytes!("../page/assets/page.css")),
        asset("icon.svg", "image/svg+xml", include_bytes!("../page/assets/icon.svg")),
    ]
});

/// The page, which refers to its assets by their hashes, and its own hash.
static PAGE: LazyLock<(String, String)> = LazyLock::new(|| {
    let with_hashes = ASSETS.iter().fold(INDEX.to_owned(), |html, asset| {
        html.replace(&format!("{ASSETS_PATH}{}", asset.name), &format!("{ASSETS_PATH}{}?v={}", asset.name, asset.hash))
    });
    let hash = hash(with_hashes.as_bytes());
    (with_hashes, hash)
});

/// The query of an asset.
#[derive(Debug, Deserialize)]
pub(crate) struct Version {
    v: Option<String>,
}

/// The dashboard
#[utoipa::path(get, path = "/", tag = "server", security(()),
    responses((status = 200, description = "the page", content_type = "text/html", body = String)))]
pub(crate) async fn index(headers: HeaderMap) -> Response {
    let (html, hash) = &*PAGE;
    respond(&headers, "text/html; charset=utf-8", html.as_bytes(), hash, REVALIDATE)
}

/// An asset of the dashboard
#[utoipa::path(get, path = "/assets/{file}", tag = "server", security(()),
    params(("file" = String, Path, description = "the file name")),
    responses((status = 200, description = "the asset", content_type = "text/javascript", body = String),
        (status = 404, description = "`no_such_route`", body = crate::problem::ProblemBody)))]
pub(crate) async fn asset(
    headers: HeaderMap,
    Path(file): Path<String>,
    Query(Version { v }): Query<Version>,
) -> Result<Response, Problem> {
    let Some(asset) = ASSETS.iter().find(|asset| asset.name == file) else {
        return Err(Problem::new(StatusCode::NOT_FOUND, "no_such_route", "the dashboard has no such asset"));
    };
    let caching = if v.as_deref() == Some(asset.hash.as_str()) { IMMUTABLE } else { REVALIDATE };
    Ok(respond(&headers, asset.kind, asset.bytes, &asset.hash, caching))
}

fn respond(
    request_headers: &HeaderMap,
    kind: &'static str,
    bytes: &'static [u8],
    hash: &str,
    caching: &'static str,
) -> Response {
    let tag = format!("\"{hash}\"");
    let known = request_headers.get(header::IF_NONE_MATCH).and_then(|tags| tags.to_str().ok());
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
