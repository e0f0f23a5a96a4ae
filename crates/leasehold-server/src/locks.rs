//! Inspecting locks.

use axum::Json;
use axum::extract::State;
use leasehold::Error;
use leasehold::inspect::{Cursor, LockInfo, LockView};
use leasehold::store::StoreErrorKind;
use serde::{Deserialize, Serialize};

use crate::App;
use crate::extract::{NameParam, QueryParams};
use crate::problem::{Problem, ProblemBody};

/// The default number of locks on a page.
const DEFAULT_LIMIT: usize = 100;
/// The most locks on a page. Each one costs the store a look at its queue.
const MAX_LIMIT: usize = 1_000;

/// The query of a list of locks.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListParams {
    /// Return only names with this prefix.
    #[serde(default)]
    prefix: String,
    /// The `next_cursor` of the previous page.
    cursor: Option<String>,
    /// The approximate page length: 1 to 1000, 100 by default. A page may have a few more.
    #[param(minimum = 1, maximum = 1_000)]
    limit: Option<usize>,
}

/// The query of one page.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct PageParams {
    /// The `next_cursor` of the previous page.
    cursor: Option<String>,
    /// The approximate page length: 1 to 1000, 100 by default. A page may have a few more.
    #[param(minimum = 1, maximum = 1_000)]
    limit: Option<usize>,
}

/// A page of locks.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct LocksPage {
    /// The held locks of this page, in no particular order.
    locks: Vec<LockView>,
    /// The cursor of the next page; `null` on the last one. A page may be empty without being the last.
    next_cursor: Option<String>,
}

/// List held locks, page by page
#[utoipa::path(get, path = "/api/v1/locks", params(ListParams), tag = "locks",
    responses((status = 200, body = LocksPage), (status = 400, body = ProblemBody)))]
pub(crate) async fn list(
    State(app): State<App>,
    QueryParams(params): QueryParams<ListParams>,
) -> Result<Json<LocksPage>, Problem> {
    let ListParams { prefix, cursor, limit } = params;
    Ok(Json(page(&app, &prefix, PageParams { cursor, limit }).await?))
}

/// Returns one page of the locks whose names begin with `prefix`.
pub(crate) async fn page(
    app: &App,
    prefix: &str,
    PageParams { cursor, limit }: PageParams,
) -> Result<LocksPage, Problem> {
    let limit = limit.unwrap_or(DEFAULT_LIMIT);
    if !(1..=MAX_LIMIT).contains(&limit) {
        return Err(Problem::bad_request("invalid_limit", format!("limit is {limit}; it must be 1 to {MAX_LIMIT}")));
    }
    let has_cursor = cursor.is_some();
    let after = cursor.map(Cursor::from_text);
    match app.locks.overview_page(prefix, after, limit).await {
        Ok((infos, next)) => Ok(LocksPage {
            locks: infos.iter().map(LockInfo::view).collect(),
            next_cursor: next.map(|cursor| cursor.as_str().to_owned()),
        }),
        Err(Error::Store { source, .. }) if has_cursor && source.kind() == StoreErrorKind::Refused => {
            Err(Problem::bad_request("invalid_cursor", "no page returned this cursor; start without one"))
        }
        Err(error) => Err(error.into()),
    }
}

/// Show a lock: its holder, since when, whether the holder is alive, and the waiters
///
/// A name that was never locked is shown as a free lock.
#[utoipa::path(get, path = "/api/v1/locks/{name}", tag = "locks",
    params(("name" = String, Path, description = "the lock; percent-encoded, `/` as `%2F`")),
    responses((status = 200, body = LockView), (status = 400, body = ProblemBody)))]
pub(crate) async fn show(State(app): State<App>, NameParam(name): NameParam) -> Result<Json<LockView>, Problem> {
    Ok(Json(app.locks.info(&name).await?.view()))
}
