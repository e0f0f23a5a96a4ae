//! Locks in HTTP services (feature `axum`).
//!
//! - [`Error`](crate::Error) implements `IntoResponse`: a handler under `#[lock]` returns `Result<T, leasehold::Error>`, or an
//!   error of its own that contains ours.
//! - [`LockLayer`] runs a route under a lock that is named by path parameters and headers.
//! - [`IdempotencyLayer`] answers a repeated request with the response of the first.
//!
//! | error | status | `code` |
//! |---|---|---|
//! | the lock is held | 409, or the status set with [`answer_held_with`] | `held` |
//! | the lease was lost during the work | 503 | `lease_lost` |
//! | the store did not answer | 503 | `store_unreachable` |
//! | the service is shutting down | 503 | `shutting_down` |
//! | a request id was used with another payload | 422 | `other_payload` |
//! | the work was done before, but its result could not be stored | 409 | `result_not_stored` |
//! | the name is invalid: empty, too long, control characters | 400 | `invalid_name` |
//! | a header that the key requires is missing | 400 | `missing_header` |
//! | an error in the program: a ttl out of bounds, no manager | 500 | `internal` |
//!
//! The body is JSON: `code` for programs, `message` for people, the `name` of the lock, and `retry_after_ms` if the request
//! can be tried again, also as the header `Retry-After`. Hosts, keys, owners and causes are only in the log.
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
