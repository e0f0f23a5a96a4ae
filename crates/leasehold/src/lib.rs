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

pub mod clock;
#[cfg(feature = "config")]
pub mod config;
mod engine;
mod error;
mod event;
mod facts;
mod guard;
mod journal;
mod lease;
mod looking;
mod machine;
mod manager;
mod options;
mod request;
mod stats;
pub mod store;
mod view;

pub use error::{Error, Operation};
pub use event::{EventKind, LockEvent, LossReason, Observer, ReleaseLayer, Transition};
pub use facts::{Fence, HolderId, Invalid, KeySpace, LockName, Namespace, Owner, RawPattern, Token, Ttl};
pub use guard::Guard;
pub use journal::{Journal, JournalEntry, JournalKind};
pub use manager::LockManager;
pub use options::{OnUnavailable, Options};
pub use request::LockRequest;
pub use stats::Statistics;
/// The examples of the README run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
mod readme {}
/// So do those of the guides.
#[cfg(all(doctest, feature = "config"))]
#[doc = include_str!("../../../docs/configuration.md")]
mod configuration {}

pub use store::{Asked, Cursor, EvictMode, Evicted, Finding, Holder, Level, Page, StoreError, StoreErrorKind, Waiter};
pub use view::{LockInfo, LockView, WaiterView};
