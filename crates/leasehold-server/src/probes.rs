//! Liveness and readiness probes. They need no key, so they say only `up` or `down`.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;

use crate::App;

/// The lock that is inspected to see whether the store answers. It need not exist.
const PROBE: &str = "leasehold-ready";

/// The result of a probe.
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

/// Whether the server and its store answer
#[utoipa::path(get, path = "/readyz", tag = "server", security(()),
    responses((status = 200, body = Up), (status = 503, body = Up)))]
pub(crate) async fn readyz(State(app): State<App>) -> (StatusCode, Json<Up>) {
    match app.locks.is_locked(PROBE).await {
        Ok(_) => (StatusCode::OK, UP),
        Err(error) => {
            tracing::warn!(error = %format_args!("{error:#}"), "not ready: the store does not answer");
            (StatusCode::SERVICE_UNAVAILABLE, DOWN)
        }
    }
}
