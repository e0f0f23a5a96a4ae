//! The list of all routes. The OpenAPI document is made from it, so it describes exactly what is served.

use std::sync::Arc;

use axum::http::{StatusCode, Uri};
use axum::{Extension, Router, middleware};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::problem::Problem;
use crate::{
    App, alerts, audit, auth, events, evict, gpus, health, journal, leases, locks, metrics, monitor, openapi, page,
    probes, snapshot, tasks,
};

#[derive(OpenApi)]
#[openapi(info(
    title = "leasehold",
    description = "Inspect locks, acquire them from any language, and evict their holders."
))]
struct ApiInfo;

/// Builds the router: all routes behind the authentication layer.
pub(crate) fn routes(app: App) -> Router {
    let (routes, api) = OpenApiRouter::with_openapi(ApiInfo::openapi())
        .routes(routes!(locks::list))
        .routes(routes!(locks::show))
        .routes(routes!(leases::acquire))
        .routes(routes!(leases::renew))
        .routes(routes!(leases::release))
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
        .routes(routes!(snapshot::overview))
        .routes(routes!(snapshot::timeline))
        .routes(routes!(snapshot::live))
        .routes(routes!(events::stream))
        .routes(routes!(metrics::metrics))
        .routes(routes!(openapi::openapi))
        .routes(routes!(openapi::docs))
        .routes(routes!(page::index))
        .routes(routes!(page::asset))
        .routes(routes!(probes::healthz))
        .routes(routes!(probes::readyz))
        .split_for_parts();
    routes
        .layer(Extension(Arc::new(openapi::ApiDocument::new(&api))))
        .fallback(no_such_route)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn_with_state(app.clone(), auth::layer))
        .with_state(app)
}

async fn no_such_route(uri: Uri) -> Problem {
    let text = match uri.path().strip_prefix("/api/v1/locks/") {
        Some(rest) if rest.contains('/') => "there is no such route; write `/` in the name of a lock as `%2F`",
        _ => "there is no such route; /openapi.json lists them all",
    };
    Problem::new(StatusCode::NOT_FOUND, "no_such_route", text)
}

async fn method_not_allowed() -> Problem {
    let text = "this route does not support that method; /openapi.json lists them all";
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", text)
}
