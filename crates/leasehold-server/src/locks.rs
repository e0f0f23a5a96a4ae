//! Looking at locks.

use axum::Json;
use axum::extract::State;
use leasehold::{Cursor, Error, LockInfo, LockView, StoreErrorKind};
use serde::{Deserialize, Serialize};

use crate::App;
use crate::answer::{Problem, Said};
use crate::asked::{Asked, Name};

/// Locks of a page nobody said the length of.
const USUAL: usize = 100;
/// The longest page: each lock costs the store a look at its queue.
const MOST: usize = 1_000;

/// Which locks.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Which {
    /// Only names that begin with this.
    #[serde(default)]
    prefix: String,
    /// The `next_cursor` of the page before.
    cursor: Option<String>,
    /// About how many: 1 to 1000, 100 by default. A page may have a few more.
    #[param(minimum = 1, maximum = 1_000)]
    limit: Option<usize>,
}

/// Which page.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Page {
    /// The `next_cursor` of the page before.
    cursor: Option<String>,
    /// About how many: 1 to 1000, 100 by default. A page may have a few more.
    #[param(minimum = 1, maximum = 1_000)]
    limit: Option<usize>,
}

/// A page of locks.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct LocksPage {
    /// Locks that are held, in no promised order.
    locks: Vec<LockView>,
    /// Where the next page begins; `null` on the last one. A page may be empty and not the last.
    next_cursor: Option<String>,
}

/// The locks that are held, page by page
#[utoipa::path(get, path = "/api/v1/locks", params(Which), tag = "locks",
    responses((status = 200, body = LocksPage), (status = 400, body = Said)))]
pub(crate) async fn list(State(app): State<App>, Asked(which): Asked<Which>) -> Result<Json<LocksPage>, Problem> {
    let Which { prefix, cursor, limit } = which;
    Ok(Json(page(&app, &prefix, Page { cursor, limit }).await?))
}

/// One page of the locks whose names begin with `prefix`.
pub(crate) async fn page(app: &App, prefix: &str, Page { cursor, limit }: Page) -> Result<LocksPage, Problem> {
    let limit = limit.unwrap_or(USUAL);
    if !(1..=MOST).contains(&limit) {
        return Err(Problem::bad_request("invalid_limit", format!("limit is {limit}; it must be 1 to {MOST}")));
    }
    let asked_with_cursor = cursor.is_some();
    let after = cursor.map(Cursor::from_text);
    match app.locks.overview_page(prefix, after, limit).await {
        Ok((infos, next)) => Ok(LocksPage {
            locks: infos.iter().map(LockInfo::view).collect(),
            next_cursor: next.map(|cursor| cursor.as_str().to_owned()),
        }),
        Err(Error::Store { source, .. }) if asked_with_cursor && source.kind() == StoreErrorKind::Refused => {
            Err(Problem::bad_request("invalid_cursor", "no page gave this cursor; begin without one"))
        }
        Err(error) => Err(error.into()),
    }
}

/// Who holds a lock, since when, whether it lives, and who waits
///
/// A name that nobody ever locked is a lock that is free.
#[utoipa::path(get, path = "/api/v1/locks/{name}", tag = "locks",
    params(("name" = String, Path, description = "the lock; percent-encoded, `/` as `%2F`")),
    responses((status = 200, body = LockView), (status = 400, body = Said)))]
pub(crate) async fn show(State(app): State<App>, Name(name): Name) -> Result<Json<LockView>, Problem> {
    Ok(Json(app.locks.info(&name).await?.view()))
}
