//! The same locks for programs without an async runtime: every call waits in its thread until it is
//! answered.
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
//! drop(guard);                                       // given back when this returns
//!
//! let paid = locks.with_lock("order:42", |guard| guard.is_protected())?;
//! assert!(paid);
//! # Ok(()) }
//! ```
//!
//! What there is no call of its own for (pools, bindings, `once`, elections) is had by
//! [`block_on`](LockManager::block_on).
//!
//! Renewals, messages and releases are the work of one thread per manager (clones share it). A manager
//! and its guards can be used from any number of threads.
//!
//! - **Inside an async runtime** a call that waits would stop other tasks, perhaps the very one that
//!   holds the lock: it answers [`Error::InsideRuntime`] and does nothing. Use
//!   [`leasehold::LockManager`](crate::LockManager) there, or go through `tokio::task::spawn_blocking`.
//! - **After a fork** the child has no such thread: there every call answers
//!   [`Forked`](crate::store::StoreErrorKind::Forked), and the parent's locks stay the parent's.
//! - **Work cannot be cancelled** from outside when its lease is lost: long work looks at
//!   [`Guard::is_valid`], or another thread waits for [`Guard::lost_within`].

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

/// Manages the locks of one store, for threads. Cheap to clone: all clones share one connection, one renewal pass and one
/// place in every queue.
#[derive(Clone)]
pub struct LockManager {
    background: Arc<Background>,
}

impl LockManager {
    /// Opens the store that a URL names, with the default options; see
    /// [`connect`](crate::LockManager::connect).
    ///
    /// # Errors
    /// [`Error::Connect`] when the URL makes no sense or the store cannot be used,
    /// [`Error::InsideRuntime`].
    pub fn connect(url: &str) -> Result<Self, Error> {
        Self::connect_with(url, Options::default())
    }

    /// Opens the store that a URL names.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn connect_with(url: &str, options: Options) -> Result<Self, Error> {
        Ok(Self { background: Arc::new(Background::connect(url, options)?) })
    }

    /// Asks for a lock: set its terms, then call [`acquire`](LockRequest::acquire). By default it waits without limit, has a
    /// fence, and is renewed while the guard lives.
    pub fn lock<N: IntoLockName>(&self, name: N) -> LockRequest {
        LockRequest::new(self.background.clone(), self.background.locks().lock(name))
    }

    /// Takes the lock if it is free: `None` when somebody else holds it.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer, which is not the same as "held".
    pub fn try_lock<N: IntoLockName>(&self, name: N) -> Result<Option<Guard>, Error> {
        self.lock(name).no_wait().optional()
    }

    /// Runs work under a lock; see [`LockRequest::run`].
    ///
    /// # Errors
    /// Whatever kept the lock from being acquired, or [`Error::Lost`].
    pub fn with_lock<N, T>(&self, name: N, work: impl FnOnce(&Guard) -> T) -> Result<T, Error>
    where
        N: IntoLockName,
    {
        self.lock(name).run(work)
    }

    /// Whether anybody holds a lock.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub fn is_locked<N: IntoLockName>(&self, name: N) -> Result<bool, Error> {
        Ok(self.holder(name)?.is_some())
    }

    /// Who holds a lock.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub fn holder<N: IntoLockName>(&self, name: N) -> Result<Option<Holder>, Error> {
        self.background.ask(|locks| locks.holder(name))
    }

    /// Who holds a lock and who waits for it.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub fn info<N: IntoLockName>(&self, name: N) -> Result<LockInfo, Error> {
        self.background.ask(|locks| locks.info(name))
    }

    /// A page of the locks whose names begin with `prefix`; see [`list`](crate::LockManager::list).
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer, or does not know the cursor.
    pub fn list(&self, prefix: &str, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        self.background.ask(|locks| locks.list(prefix, after, limit))
    }

    /// Takes a lock away from the holder that was looked at, and from nobody else; see
    /// [`evict`](crate::LockManager::evict).
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub fn evict<N>(&self, name: N, holder: HolderId, mode: EvictMode, reason: &str) -> Result<Evicted, Error>
    where
        N: IntoLockName,
    {
        self.background.ask(|locks| locks.evict(name, holder, mode, reason))
    }

    /// Waits for whatever else the manager can do: pools, bindings, `once`, elections. Its background tasks
    /// run on the manager's own thread, the work itself in this one.
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
    /// What the work answers; [`Error::InsideRuntime`], or forked: it was not begun.
    pub fn block_on<T>(&self, work: impl AsyncFnOnce(&crate::LockManager) -> Result<T, Error>) -> Result<T, Error> {
        self.background.ask(|locks| work(locks))
    }

    /// Which store this is, without its secrets.
    pub fn store(&self) -> &str {
        self.background.store()
    }

    /// Lets nothing new begin, tells every holder that its lease is over, and waits until all locks
    /// are given back, at most one ttl.
    ///
    /// # Errors
    /// [`Error::InsideRuntime`], or forked: nothing was done.
    pub fn shutdown(&self) -> Result<(), Error> {
        self.background.ask(async |locks| {
            locks.shutdown().await;
            Ok(())
        })
    }

    /// Makes it believe that another process connected it, as it would after a fork.
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
