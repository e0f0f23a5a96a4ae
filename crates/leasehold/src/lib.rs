//! Locks that people can hold, see and trust.
//!
//! leasehold grants **leases on names**: every lock has an owner people can read, a secret token
//! that alone can release it, a fence that a resource can check, and an end. A waiter is handed the
//! lock the moment it is released, in order of asking; a holder is told the moment its lease is
//! lost.
//!
//! ```
//! use std::time::Duration;
//! use leasehold::{Error, LockManager};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Error> {
//! let locks = LockManager::connect("memory:").await?;      // or sqlite:, redis://…
//!
//! let guard = locks.lock("order:42").ttl(Duration::from_secs(10)).wait_up_to(Duration::from_secs(5)).await?;
//! println!("inside, fence {}", guard.fence().expect("fenced by default"));
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
//! What is promised, and what is not, stands in `docs/guarantees.md`; how a lock works inside in
//! `docs/protocol.md`.

#[cfg(feature = "macros")]
mod attribute;
mod bindings;
pub mod blocking;
mod client;
pub mod clock;
#[cfg(feature = "config")]
pub mod config;
mod elect;
mod engine;
mod error;
mod event;
mod facts;
mod figures;
#[cfg(feature = "gpu")]
pub mod gpu;
mod guard;
#[cfg(feature = "axum")]
pub mod http;
mod installed;
mod journal;
mod lease;
mod looking;
mod machine;
mod manager;
mod once;
mod options;
mod pool;
mod request;
mod scope;
#[cfg(test)]
mod simulation;
mod stats;
pub mod store;
mod view;

pub use bindings::{Binding, Bindings, Claimed, JobBinding, Reservation, Reserved};
pub use elect::{Election, Term};
pub use error::{Error, Operation};
pub use event::{EventKind, LockEvent, LossReason, Observer, ReleaseLayer, Transition};
pub use facts::{
    ClaimId, Fence, HolderId, Invalid, Keep, KeySpace, LockName, Namespace, Owner, RawPattern, Shelf, Token, Ttl,
};
pub use figures::{FleetCount, FleetHistogram, fleet_counts, fleet_histograms};
pub use guard::Guard;
pub use installed::{AlreadyInstalled, install, installed};
pub use journal::{Journal, JournalEntry, JournalKind};
pub use manager::LockManager;
pub use once::{Done, Once, Outcome, ResultSlot, Running, Started};
pub use options::{OnUnavailable, Options};
pub use pool::{Permit, Permits, Pool, PoolRequest};
pub use request::LockRequest;
pub use scope::current_fence;
pub use stats::Statistics;
/// The examples of the README run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
mod readme {}
/// So do those of the guides.
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

pub use store::{Asked, Cursor, EvictMode, Evicted, Finding, Holder, Level, Page, StoreError, StoreErrorKind, Waiter};
pub use view::{AcquiredView, EvictOutcome, EvictedView, LockInfo, LockView, PoolMember, ReleasedView, WaiterView};

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
///     /// One at a time for each order, wherever it is called.
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
/// The body runs while the lock is held. It is released when the body returns, fails, panics or is
/// dropped; a release that fails hides nobody's result. The function returns `Result<T, E>` with
/// `E: From<leasehold::Error>`: not acquired, lost and "the store did not answer" come back as that.
///
/// | option | default | |
/// |---|---|---|
/// | `key = "order:{order_id}"` | | the name: text, `{param}` and `{param.field}`, shown by `Display`; `{{` is a brace. No expressions |
/// | `locks = self.locks` | the [installed](crate::install) one | a [`LockManager`], by value or reference |
/// | `ttl_ms = 15_000` | 10 000 | the lease |
/// | `wait_ms = 5_000` | 0 | how long to wait for the lock; 0: not at all |
/// | `retry_ms = 50` | 50 | the pause between two looks, where the store cannot tell a waiter its turn |
/// | `renew = true` | `false` | renew the lease while the body runs. Otherwise the call is bounded: after `ttl_ms` the lease is lost |
/// | `max_hold_ms = 600_000` | | with `renew`: at most so long |
/// | `on_lost = "continue"` | `"cancel"` | a lost lease cancels the body, and the caller gets [`Error::Lost`]; or the body goes on |
/// | `reentrant = true` | `false` | a task that holds this lock already enters again; see [`LockRequest::run_reentrant`] |
/// | `on_unavailable = "open"` | as the manager | when the store cannot be reached: fail (`"closed"`), or run without protection |
///
/// Other attributes (`#[tracing::instrument]`, axum's `#[debug_handler]`) go above or below it, and
/// methods under `#[async_trait]` can have it too.
#[cfg(feature = "macros")]
pub use leasehold_macros::lock;

/// Runs an async function, or method, while holding the lock of a GPU.
///
/// ```
/// use leasehold::{Error, LockManager, gpu_lock};
///
/// #[gpu_lock(gpu_id = 0, max_wait_time = 1800, locks = locks)]
/// async fn transcribe(locks: &LockManager, file: &str) -> Result<String, Error> {
///     Ok(format!("{file}: on GPU 0, by one at a time"))
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Error> {
/// # let locks = LockManager::connect("memory:").await?;
/// # assert!(transcribe(&locks, "talk.wav").await?.starts_with("talk.wav"));
/// # Ok(()) }
/// ```
///
/// As [`lock`](macro@lock), with the lock `gpu_lock:<id>`, and defaults from the section `gpu_lock` of the
/// [configuration](crate::gpu::configure). The lease is renewed while the body runs. Times are seconds.
///
/// | option | default | |
/// |---|---|---|
/// | `gpu_id = 0` | | which GPU: a number, or a `u32` such as a parameter |
/// | `locks = self.locks` | the [installed](crate::install) one | a [`LockManager`], by value or reference |
/// | `max_wait_time = 1800` | as configured: 300 | how long to wait for the GPU |
/// | `lock_timeout = 600` | as configured: 600 | the lease; while it is renewed, the heartbeat's timeout if that is shorter |
/// | `cleanup = free_memory` | | an async function of [`Leaving`](crate::gpu::Leaving), or a command (a text, for `sh`): runs before the GPU is given back, whatever happened. See [`CleanUp`](crate::gpu::CleanUp) |
/// | `cleanup_timeout = 5` | 30 | how long that may take |
/// | `on_lost = "continue"` | `"cancel"` | a lost lease cancels the body, and the caller gets [`Error::Lost`]; or the body goes on |
#[cfg(all(feature = "gpu", feature = "macros"))]
pub use leasehold_macros::gpu_lock;

/// For what `#[lock]` and `#[gpu_lock]` expand to.
#[cfg(feature = "macros")]
#[doc(hidden)]
pub mod __private {
    pub use crate::attribute::{Call, LockResult, installed, request, run};
    #[cfg(feature = "gpu")]
    pub use crate::gpu::attribute::{GpuCall, GpuLockResult, run_on_gpu};
}
