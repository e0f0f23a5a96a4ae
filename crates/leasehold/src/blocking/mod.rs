//! Locks for programs without an async runtime: every call blocks its thread until the result is there.
//!
//! ```
//! use std::time::Duration;
//! use leasehold::Error;
//! use leasehold::blocking::LockManager;
//!
//! # fn main() -> Result<(), Error> {
//! let locks = LockManager::connect("memory:")?;      // or sqlite:, redis://…
//!
//! let guard = locks.lock("order:42").ttl(Duration::from_secs(10)).wait_up_to(Duration::from_secs(5)).acquire()?;
//! println!("inside, fence {}", guard.fence());
//! assert!(locks.try_lock("order:42")?.is_none(), "one at a time");
//! drop(guard);                                       // released when this returns
//!
//! let paid = locks.with_lock("order:42", |guard| guard.is_protected())?;
//! assert!(paid);
//! # Ok(()) }
//! ```
//!
//! Use [`block_on`](LockManager::block_on) for pools, bindings, `once` and elections.
//!
//! One thread per manager, shared by its clones, runs renewals and background releases. A manager and its guards can be
//! used from any number of threads.
//!
//! - **Inside an async runtime** a blocking call would block other tasks, perhaps the one that holds the lock. It fails with
//!   [`Error::InsideRuntime`] and does nothing. Use [`leasehold::LockManager`](crate::LockManager) there, or
//!   `tokio::task::spawn_blocking`.
//! - **After a fork** the child does not have that thread. Every call fails with
//!   [`Forked`](crate::store::StoreErrorKind::Forked), and the locks still belong to the parent.
//! - **Work is not cancelled** when its lease is lost. Long work checks [`Guard::is_valid`], or another thread waits with
//!   [`Guard::lost_within`].

mod background;
mod guard;
mod request;

use std::sync::Arc;

use background::Background;
pub use guard::Guard;
pub use request::LockRequest;

use crate::error::Error;
use crate::facts::HolderId;
use crate::inspect::LockInfo;
use crate::lease::IntoLockName;
use crate::options::Options;
use crate::store::{Cursor, EvictMode, Evicted, Holder, Page};

/// Manages the locks of one store for blocking code. Cheap to clone: all clones share one connection, one renewal task and
/// one place in every queue.
#[derive(Clone)]
pub struct LockManager {
    background: Arc<Background>,
}

impl LockManager {
    /// Opens the store that a URL names, with the default options; see
    /// [`connect`](crate::LockManager::connect).
    ///
    /// # Errors
    /// [`Error::Connect`] when the URL is invalid or the store cannot be used; [`Error::InsideRuntime`].
    pub fn connect(url: &str) -> Result<Self, Error> {
        Self::connect_with(url, Options::default())
    }

    /// Opens the store that a URL names, with options.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn connect_with(url: &str, options: Options) -> Result<Self, Error> {
        Ok(Self { background: Arc::new(Background::connect(url, options)?) })
    }

    /// Creates a request for a lock: set its terms, then call [`acquire`](LockRequest::acquire). By default it waits without
    /// limit, has a fence, and is renewed while the guard exists.
    pub fn lock<N: IntoLockName>(&self, name: N) -> LockRequest {
        LockRequest::new(self.background.clone(), self.background.locks().lock(name))
    }

    /// Acquires a lock if it is free, and returns `None` when it is held.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer, which is not the same as "held".
    pub fn try_lock<N: IntoLockName>(&self, name: N) -> Result<Option<Guard>, Error> {
        self.lock(name).no_wait().optional()
    }

    /// Runs work under a lock; see [`LockRequest::run`].
    ///
    /// # Errors
    /// As [`LockRequest::run`].
    pub fn with_lock<N, T>(&self, name: N, work: impl FnOnce(&Guard) -> T) -> Result<T, Error>
    where
        N: IntoLockName,
    {
        self.lock(name).run(work)
    }

    /// Returns whether a lock is held.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub fn is_locked<N: IntoLockName>(&self, name: N) -> Result<bool, Error> {
        Ok(self.holder(name)?.is_some())
    }

    /// Returns the holder of a lock.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub fn holder<N: IntoLockName>(&self, name: N) -> Result<Option<Holder>, Error> {
        self.background.ask(|locks| locks.holder(name))
    }

    /// Returns the holder and the waiters of a lock.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub fn info<N: IntoLockName>(&self, name: N) -> Result<LockInfo, Error> {
        self.background.ask(|locks| locks.info(name))
    }

    /// Returns a page of the locks whose names begin with `prefix`; see [`list`](crate::LockManager::list).
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer, or does not know the cursor.
    pub fn list(&self, prefix: &str, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        self.background.ask(|locks| locks.list(prefix, after, limit))
    }

    /// Takes a lock from the holder with this id, and from no other holder; see [`evict`](crate::LockManager::evict).
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub fn evict<N>(&self, name: N, holder: HolderId, mode: EvictMode, reason: &str) -> Result<Evicted, Error>
    where
        N: IntoLockName,
    {
        self.background.ask(|locks| locks.evict(name, holder, mode, reason))
    }

    /// Runs an async function with the async manager: for pools, bindings, `once` and elections. It runs in this thread;
    /// background tasks run in the manager's thread.
    ///
    /// ```
    /// # fn main() -> Result<(), leasehold::Error> {
    /// # let locks = leasehold::blocking::LockManager::connect("memory:")?;
    /// let gpu = locks.block_on(async |locks| locks.pool("gpu_lock", 0..4)?.acquire().await)?;
    /// println!("on GPU {}", gpu.index());
    ///
    /// let paid = locks.block_on(async |locks| locks.once("payment-7").run(async |_| "receipt 4711".to_owned()).await)?;
    /// assert!(paid.fresh);
    ///
    /// locks.block_on(async |_| gpu.release().await)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The error of the function. It is not called inside an async runtime ([`Error::InsideRuntime`]) or in a forked child.
    pub fn block_on<T>(&self, work: impl AsyncFnOnce(&crate::LockManager) -> Result<T, Error>) -> Result<T, Error> {
        self.background.ask(|locks| work(locks))
    }

    /// Returns the URL of the store, without secrets.
    pub fn store(&self) -> &str {
        self.background.store()
    }

    /// Stops new requests, notifies every holder that its lease has ended, and waits for at most one ttl until all locks are
    /// released.
    ///
    /// # Errors
    /// [`Error::InsideRuntime`], and [`Error::Connect`] in a forked child. Nothing was done.
    pub fn shutdown(&self) -> Result<(), Error> {
        self.background.ask(async |locks| {
            locks.shutdown().await;
            Ok(())
        })
    }

    /// Simulates a fork: the manager behaves as if another process had created it.
    #[cfg(any(test, feature = "test-hooks"))]
    #[doc(hidden)]
    pub fn pretend_forked(&self, forked: bool) {
        self.background.pretend_forked(forked);
    }
}

impl std::fmt::Debug for LockManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LockManager").field("store", &self.store()).finish_non_exhaustive()
    }
}
