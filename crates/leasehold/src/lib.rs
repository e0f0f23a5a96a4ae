//! A distributed lock with owners, fences and fair waiting.
//!
//! leasehold grants **leases on names**. Every lock has an owner that people can read, a secret token that alone can
//! release it, a fence that a resource can check, and an expiry. A waiter receives the lock the moment it is released, in
//! the order of the requests; a holder is notified the moment its lease is lost.
//!
//! ```
//! use std::time::Duration;
//! use leasehold::{Error, LockManager};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Error> {
//! let locks = LockManager::connect("memory:").await?;      // or sqlite:, redis://…
//!
//! let guard = locks.lock("order:42").ttl(Duration::from_secs(10)).wait_up_to(Duration::from_secs(5)).await?;
//! println!("inside, fence {}", guard.fence());
//!
//! match locks.lock("order:42").no_wait().await {
//!     Err(Error::NotAcquired { name, holder, .. }) => {
//!         println!("{name} is held by {}", holder.expect("known").owner);
//!     }
//!     other => panic!("one at a time, but: {other:?}"),
//! }
//! assert!(guard.release().await?);
//! # Ok(()) }
//! ```
//!
//! | module | for |
//! |---|---|
//! | [`pool`] | any one, or any few, of several locks |
//! | [`once`] | work that is done once for an id; later callers get its stored result |
//! | [`bindings`] | values bound to request ids, and the jobs of a dispatcher |
//! | [`elect`] | leader election |
//! | [`inspect`] | holders and waiters, eviction, and the metrics of the fleet |
//! | [`events`] | events of locks, for the fleet and for this process |
//! | [`lease`] | the values that describe leases, and leases without a guard |
//! | [`blocking`] | programs without an async runtime |
//! | [`store`] | the stores, their errors, and how names become keys |
//! | `config`, `gpu`, `http` | the features `config`, `gpu` and `axum` |
//!
//! `docs/guarantees.md` says what is promised and what is not. `docs/protocol.md` describes how a lock works inside.

#![cfg_attr(
    not(all(feature = "redis", feature = "sqlite")),
    allow(dead_code, unused_imports, reason = "some helpers serve only one store")
)]

#[cfg(feature = "macros")]
mod attribute;
mod backoff;
pub mod bindings;
pub mod blocking;
mod client;
mod clock;
#[cfg(feature = "config")]
pub mod config;
pub mod elect;
mod engine;
mod error;
pub mod events;
mod facts;
#[cfg(feature = "gpu")]
pub mod gpu;
#[cfg(feature = "axum")]
pub mod http;
pub mod inspect;
mod installed;
mod journal;
pub mod lease;
mod loss;
mod machine;
mod manager;
mod metrics;
pub mod once;
mod options;
pub mod pool;
mod request;
mod rules;
mod scope;
#[cfg(test)]
mod simulation;
mod stats;
pub mod store;

pub use engine::guard::Guard;
pub use error::Error;
pub use facts::{Fence, LockName, Owner};
pub use installed::install;
pub use loss::LossReason;
pub use manager::LockManager;
pub use options::{OnUnavailable, Options};
pub use request::LockRequest;
pub use scope::current_fence;

/// Runs the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
mod readme {}
/// Runs the examples of a guide. The modules below do the same for the other guides.
#[cfg(all(doctest, feature = "config"))]
#[doc = include_str!("../../../docs/configuration.md")]
mod configuration {}
#[cfg(all(doctest, feature = "axum", feature = "macros"))]
#[doc = include_str!("../../../docs/one-order-at-a-time.md")]
mod one_order_at_a_time {}
#[cfg(all(doctest, feature = "axum"))]
#[doc = include_str!("../../../docs/create-it-once.md")]
mod create_it_once {}
#[cfg(doctest)]
#[doc = include_str!("../../../docs/fill-a-cache-once.md")]
mod fill_a_cache_once {}
#[cfg(doctest)]
#[doc = include_str!("../../../docs/using-a-fence.md")]
mod using_a_fence {}
#[cfg(all(doctest, feature = "gpu", feature = "macros"))]
#[doc = include_str!("../../../docs/share-the-gpus.md")]
mod share_the_gpus {}

/// Runs an async function, or method, under a lock.
///
/// ```
/// use leasehold::{Error, LockManager, lock};
///
/// struct Till {
///     locks: LockManager,
/// }
///
/// impl Till {
///     /// One payment at a time for each order, in all processes.
///     #[lock(key = "order:{order_id}", locks = self.locks, ttl_ms = 15_000, wait_ms = 2_000)]
///     async fn pay(&self, order_id: u64, cents: u32) -> Result<String, Error> {
///         let fence = leasehold::current_fence().expect("fenced");
///         Ok(format!("order {order_id}: {cents} paid under fence {fence}"))
///     }
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Error> {
/// # let till = Till { locks: LockManager::connect("memory:").await? };
/// # assert!(till.pay(42, 999).await?.starts_with("order 42: 999 paid"));
/// # Ok(()) }
/// ```
///
/// The body runs while the lock is held. The lock is released when the body returns, fails, panics or is dropped. If the
/// release fails, the caller still gets the body's result. The function returns `Result<T, E>` with
/// `E: From<leasehold::Error>`: the error when the lock was not acquired or was lost, or when the store did not reply.
///
/// | option | default | |
/// |---|---|---|
/// | `key = "order:{order_id}"` | | the name: text, `{param}` and `{param.field}`, formatted with `Display`; `{{` is a brace. No expressions |
/// | `locks = self.locks` | the [installed](crate::install) one | a [`LockManager`], by value or reference |
/// | `ttl_ms = 15_000` | 10 000 | the length of the lease |
/// | `wait_ms = 5_000` | 0 | how long to wait for the lock; 0 does not wait |
/// | `retry_ms = 50` | 50 | the retry interval, where the store cannot notify waiters |
/// | `renew = true` | `false` | renews the lease while the body runs. Without it the call is bounded: the lease is lost after `ttl_ms` |
/// | `max_hold_ms = 600_000` | | the longest time that the lock may be held, with `renew` |
/// | `on_lost = "continue"` | `"cancel"` | a lost lease cancels the body and the caller gets [`Error::Lost`], or the body continues |
/// | `reentrant = true` | `false` | a task that already holds this lock enters again; see [`LockRequest::run_reentrant`] |
/// | `on_unavailable = "open"` | as the manager | when the store is unreachable: fail (`"closed"`), or run without a lock |
///
/// # Defaults
#[doc = include_str!("../defaults.md")]
///
/// Other attributes (`#[tracing::instrument]`, axum's `#[debug_handler]`) go above or below it. It also works on methods
/// under `#[async_trait]`.
#[cfg(feature = "macros")]
pub use leasehold_macros::lock;

/// Used by the expansions of `#[lock]` and `#[gpu_lock]` and by the other crates of this workspace. Not part of the public
/// API: it may change with every version.
#[doc(hidden)]
pub mod __private {
    #[cfg(feature = "macros")]
    pub use crate::attribute::{Call, LockResult, installed, request, run};
    pub use crate::clock::Alarm;
    #[cfg(all(feature = "gpu", feature = "macros"))]
    pub use crate::gpu::attribute::{GpuCall, GpuLockResult, run_on_gpu};
}
