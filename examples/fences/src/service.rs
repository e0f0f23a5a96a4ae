//! The accounts over HTTP. A write has its fence in a header.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::{self, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use serde_json::json;

use crate::Accounts;

/// The header with the fence.
const FENCE: &str = "lock-fence";
/// The highest possible fence.
const HIGHEST: u64 = 1 << 52;

type Shared = Arc<Mutex<Accounts>>;

/// Serves `GET` and `PUT /accounts/{id}` for the accounts of a database.
pub fn routes(path: &Path) -> rusqlite::Result<Router> {
    let accounts = Arc::new(Mutex::new(Accounts::open(path)?));
    Ok(Router::new().route("/accounts/{id}", get(read).put(write)).with_state(accounts))
}

async fn read(State(accounts): State<Shared>, extract::Path(id): extract::Path<i64>) -> Response {
    let found = accounts.lock().unwrap_or_else(PoisonError::into_inner).read(id);
    match found {
        Ok((balance, fence)) => Json(json!({ "balance": balance, "fence": fence })).into_response(),
        Err(rusqlite::Error::QueryReturnedNoRows) => StatusCode::NOT_FOUND.into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn write(
    State(accounts): State<Shared>,
    extract::Path(id): extract::Path<i64>,
    headers: HeaderMap,
    body: String,
) -> Response {
    // A write without a fence would defeat the protection.
    let Some(fence) = headers.get(FENCE) else { return problem(StatusCode::PRECONDITION_REQUIRED, "fence_missing") };
    // A fence that no store can grant would block all later writes.
    let fence = fence.to_str().ok().and_then(|text| text.parse().ok()).filter(|fence| *fence <= HIGHEST);
    let Some(fence) = fence else { return problem(StatusCode::BAD_REQUEST, "bad_fence") };
    let Ok(balance) = body.trim().parse() else { return problem(StatusCode::BAD_REQUEST, "bad_balance") };
    let written = accounts.lock().unwrap_or_else(PoisonError::into_inner).write(fence, id, balance);
    match written {
        Ok(true) => StatusCode::NO_CONTENT.into_response(),
        Ok(false) => problem(StatusCode::PRECONDITION_FAILED, "stale_fence"),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

fn problem(status: StatusCode, code: &str) -> Response {
    (status, Json(json!({ "code": code }))).into_response()
}
