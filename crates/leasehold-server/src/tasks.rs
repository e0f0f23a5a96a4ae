//! Task locks, by the id of their task: the locks `task_lock:{id}`.

use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use axum::{Extension, Json};
use leasehold::LockName;
use leasehold::inspect::{EvictMode, EvictedView, LockView};

use crate::App;
use crate::caller::Caller;
use crate::evict::evict_for_caller;
use crate::extract::{QueryParams, path_param};
use crate::locks::{self, LocksPage, PageParams};
use crate::problem::{Problem, ProblemBody};

/// The prefix of task lock names.
const TASK_PREFIX: &str = "task_lock:";

/// The lock of the task `{id}` in the path.
pub(crate) struct TaskLock(LockName);

impl<S: Send + Sync> FromRequestParts<S> for TaskLock {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        Ok(Self(LockName::new(format!("{TASK_PREFIX}{}", path_param(parts, state).await?))?))
    }
}

/// List held task locks, page by page
#[utoipa::path(get, path = "/api/v1/tasks/locks", params(PageParams), tag = "tasks",
    responses((status = 200, body = LocksPage), (status = 400, body = ProblemBody)))]
pub(crate) async fn list(
    State(app): State<App>,
    QueryParams(page): QueryParams<PageParams>,
) -> Result<Json<LocksPage>, Problem> {
    Ok(Json(locks::page(&app, TASK_PREFIX, page).await?))
}

/// Show the lock of a task
#[utoipa::path(get, path = "/api/v1/tasks/{id}/lock", tag = "tasks",
    params(("id" = String, Path, description = "the task; percent-encoded")),
    responses((status = 200, body = LockView), (status = 400, body = ProblemBody)))]
pub(crate) async fn show(State(app): State<App>, TaskLock(name): TaskLock) -> Result<Json<LockView>, Problem> {
    Ok(Json(app.locks.info(&name).await?.view()))
}

/// Release the lock of a task by force
///
/// Evicts only the current holder. If the lock changes hands meanwhile, nothing is done and the response is
/// `changed_hands`. A holder that is still running is not notified; only fences protect what it writes. If the lock is
/// free already, `released` is false.
#[utoipa::path(post, path = "/api/v1/tasks/{id}/release-lock", tag = "tasks",
    params(("id" = String, Path, description = "the task; percent-encoded")),
    responses((status = 200, body = EvictedView), (status = 400, body = ProblemBody),
        (status = 409, description = "`changed_hands`: another holder has the lock now; nothing was done", body = ProblemBody)))]
pub(crate) async fn release(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    TaskLock(name): TaskLock,
) -> Result<Json<EvictedView>, Problem> {
    let Some(holder) = app.locks.holder(&name).await? else { return Ok(Json(EvictedView::free(&name))) };
    let reason = "release-lock of its task";
    Ok(Json(evict_for_caller(&app, &caller, &name, holder.id, EvictMode::Force, reason).await?))
}
