//! What was asked, read from a request, or what is wrong with it.

use axum::extract::rejection::PathRejection;
use axum::extract::{FromRequestParts, Path, Query};
use axum::http::request::Parts;
use leasehold::LockName;
use serde::de::DeserializeOwned;

use crate::answer::Problem;

/// The `{name}` of a route: percent-encoded, so that a name may have any character.
pub(crate) struct Name(pub(crate) LockName);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        Ok(Self(LockName::new(segment(parts, state).await?)?))
    }
}

/// The one variable part of a path, decoded.
pub(crate) async fn segment<S: Send + Sync>(parts: &mut Parts, state: &S) -> Result<String, Problem> {
    let refused = |_: PathRejection| Problem::bad_request("invalid_name", "the name in the path is not UTF-8");
    let Path(text) = Path::<String>::from_request_parts(parts, state).await.map_err(refused)?;
    Ok(text)
}

/// The query of a request. What is not known is refused: a misspelt `prefx` would answer something else.
pub(crate) struct Asked<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Asked<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let query = parts.uri.query().unwrap_or("");
        // How a key may be sent; it is read, and answered for, before any route.
        let others = query.split('&').filter(|pair| *pair != "api_key" && !pair.starts_with("api_key="));
        let others = format!("/?{}", others.collect::<Vec<_>>().join("&"));
        let uri = others.parse().map_err(|_| Problem::bad_request("invalid_query", "the query cannot be read"))?;
        match Query::try_from_uri(&uri) {
            Ok(Query(asked)) => Ok(Self(asked)),
            Err(refused) => Err(Problem::bad_request("invalid_query", refused.body_text())),
        }
    }
}
