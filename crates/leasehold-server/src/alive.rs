//! Whether the server lives, and whether it can do its work: up or down, nothing more, because anybody
//! may ask.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;

use crate::App;

/// Looked at to see whether the store answers. Nobody needs to hold it.
const PROBE: &str = "leasehold-ready";

/// Up or down.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Up {
    /// `up` or `down`.
    #[schema(value_type = String, example = "up")]
    status: &'static str,
}

const UP: Json<Up> = Json(Up { status: "up" });
const DOWN: Json<Up> = Json(Up { status: "down" });

/// Whether the server answers
#[utoipa::path(get, path = "/healthz", tag = "server", security(()), responses((status = 200, body = Up)))]
pub(crate) async fn healthz() -> Json<Up> {
    UP
}

/// Whether the store answers too
#[utoipa::path(get, path = "/readyz", tag = "server", security(()),
    responses((status = 200, body = Up), (status = 503, body = Up)))]
pub(crate) async fn readyz(State(app): State<App>) -> (StatusCode, Json<Up>) {
    match app.locks.is_locked(PROBE).await {
        Ok(_) => (StatusCode::OK, UP),
        Err(error) => {
            tracing::warn!(%error, "not ready");
            (StatusCode::SERVICE_UNAVAILABLE, DOWN)
        }
    }
}
