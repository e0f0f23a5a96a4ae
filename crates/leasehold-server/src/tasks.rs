//! Task locks by the id of their task: the locks `task_lock:{id}`.

use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use axum::{Extension, Json};
use leasehold::{EvictMode, EvictedView, LockName, LockView};

use crate::App;
use crate::answer::{Problem, Said};
use crate::asked::{Asked, segment};
use crate::evict::take_away;
use crate::keys::Caller;
use crate::locks::{self, LocksPage, Page};

/// What the names of task locks begin with.
const TASK: &str = "task_lock:";

/// The lock of the `{id}` of a route.
pub(crate) struct Task(LockName);

impl<S: Send + Sync> FromRequestParts<S> for Task {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        Ok(Self(LockName::new(format!("{TASK}{}", segment(parts, state).await?))?))
    }
}

/// The task locks that are held, page by page
#[utoipa::path(get, path = "/api/v1/tasks/locks", params(Page), tag = "tasks",
    responses((status = 200, body = LocksPage), (status = 400, body = Said)))]
pub(crate) async fn list(State(app): State<App>, Asked(page): Asked<Page>) -> Result<Json<LocksPage>, Problem> {
    Ok(Json(locks::page(&app, TASK, page).await?))
}

/// Who holds the lock of a task
#[utoipa::path(get, path = "/api/v1/tasks/{id}/lock", tag = "tasks",
    params(("id" = String, Path, description = "the task; percent-encoded")),
    responses((status = 200, body = LockView), (status = 400, body = Said)))]
pub(crate) async fn show(State(app): State<App>, Task(name): Task) -> Result<Json<LockView>, Problem> {
    Ok(Json(app.locks.info(&name).await?.view()))
}

/// Free the lock of a task by force
///
/// From whoever holds it when this is asked, and from nobody who comes after: `changed_hands` then. A holder that is
/// still at work does not know; only fences protect what it writes. A lock that is free already is no error:
/// `released` is false.
#[utoipa::path(post, path = "/api/v1/tasks/{id}/release-lock", tag = "tasks",
    params(("id" = String, Path, description = "the task; percent-encoded")),
    responses((status = 200, body = EvictedView), (status = 400, body = Said),
        (status = 409, description = "`changed_hands`: somebody else holds it by now; nothing was done", body = Said)))]
pub(crate) async fn release(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Task(name): Task,
) -> Result<Json<EvictedView>, Problem> {
    let Some(holder) = app.locks.holder(&name).await? else { return Ok(Json(EvictedView::free(&name))) };
    let reason = "release-lock of its task";
    Ok(Json(take_away(&app, &caller, &name, holder.id, EvictMode::Force, reason).await?))
}
