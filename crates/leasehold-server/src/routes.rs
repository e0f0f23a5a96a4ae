//! Every route, once: what is served is what the OpenAPI document says.

use std::sync::Arc;

use axum::http::{StatusCode, Uri};
use axum::{Extension, Router, middleware};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::answer::Problem;
use crate::{
    App, alerts, alive, audit, document, doors, events, evict, gpus, health, journal, locks, metrics, monitor, page,
    picture, taking, tasks,
};

#[derive(OpenApi)]
#[openapi(info(
    title = "leasehold",
    description = "Who holds which lock, taking locks from any language, and taking them away."
))]
struct Described;

/// All routes behind all doors.
pub(crate) fn routes(app: App) -> Router {
    let (routes, described) = OpenApiRouter::with_openapi(Described::openapi())
        .routes(routes!(locks::list))
        .routes(routes!(locks::show))
        .routes(routes!(taking::acquire))
        .routes(routes!(taking::renew))
        .routes(routes!(taking::release))
        .routes(routes!(evict::evict))
        .routes(routes!(tasks::list))
        .routes(routes!(tasks::show))
        .routes(routes!(tasks::release))
        .routes(routes!(health::gpu))
        .routes(routes!(gpus::list))
        .routes(routes!(alerts::list))
        .routes(routes!(journal::list))
        .routes(routes!(journal::settle))
        .routes(routes!(audit::list))
        .routes(routes!(monitor::show))
        .routes(routes!(picture::overview))
        .routes(routes!(picture::timeline))
        .routes(routes!(picture::live))
        .routes(routes!(events::stream))
        .routes(routes!(metrics::metrics))
        .routes(routes!(document::openapi))
        .routes(routes!(document::docs))
        .routes(routes!(page::index))
        .routes(routes!(page::asset))
        .routes(routes!(alive::healthz))
        .routes(routes!(alive::readyz))
        .split_for_parts();
    routes
        .layer(Extension(Arc::new(document::Document::new(&described))))
        .fallback(nowhere)
        .method_not_allowed_fallback(not_so)
        .layer(middleware::from_fn_with_state(app.clone(), doors::guard))
        .with_state(app)
}

async fn nowhere(uri: Uri) -> Problem {
    let text = match uri.path().strip_prefix("/api/v1/locks/") {
        Some(rest) if rest.contains('/') => "there is no such route; write `/` in the name of a lock as `%2F`",
        _ => "there is no such route; /openapi.json lists them all",
    };
    Problem::new(StatusCode::NOT_FOUND, "no_such_route", text)
}

async fn not_so() -> Problem {
    let text = "this route does not know that method; /openapi.json lists them all";
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", text)
}
