//! Locks at the edge of an HTTP service (feature `axum`).
//!
//! - [`Error`](crate::Error) is an answer: a handler under `#[lock]` returns
//!   `Result<T, leasehold::Error>`, or an error of its own that turns ours into a response.
//! - [`LockLayer`] takes a lock around a route, by a path parameter or a header.
//! - [`IdempotencyLayer`] answers a request that is sent again with the response of the first.
//!
//! | what happened | status | `code` |
//! |---|---|---|
//! | somebody else holds the lock | 409, or what [`answer_held_with`] says | `held` |
//! | the lease was lost in the middle | 503 | `lease_lost` |
//! | the store did not answer | 503 | `store_unreachable` |
//! | the service is going down | 503 | `shutting_down` |
//! | a request id was used with another payload | 422 | `other_payload` |
//! | work was done before, and its result could not be stored | 409 | `result_not_stored` |
//! | the name is no name (too long, control characters) | 400 | `invalid_name` |
//! | a header that the key needs is missing | 400 | `missing_header` |
//! | the program is wrong: a ttl out of bounds, no manager | 500 | `internal` |
//!
//! The body is JSON: `code` for programs, `message` for people, `name` of the lock, and where trying
//! again makes sense `retry_after_ms`, also as the header `Retry-After`. Hosts, keys, owners and
//! causes are not in it: they go to the log.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() {
//! use axum::response::IntoResponse;
//! # let locks = leasehold::LockManager::connect("memory:").await.expect("memory");
//! # let _guard = locks.lock("order:42").await.expect("free");
//!
//! let error = locks.lock("order:42").no_wait().await.expect_err("held");
//! let response = error.into_response();
//! assert_eq!(response.status(), 409);
//! assert_eq!(response.headers()["retry-after"], "1");
//! # }
//! ```

mod answer;
mod caller;
mod idempotency;
mod layer;
mod stored;

pub use answer::answer_held_with;
pub use idempotency::{IdempotencyLayer, IdempotencyScope, IdempotencyService};
pub use layer::{LockLayer, LockService};
