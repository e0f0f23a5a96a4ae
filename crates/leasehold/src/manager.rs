use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::engine::guard::Guard;
use crate::engine::releasing::count_failed_release;
use crate::engine::{Core, EngineHandle};
use crate::error::Error;
use crate::events::{EventKind, LockEvent};
use crate::facts::{HolderId, LockName};
use crate::journal::Journal;
use crate::lease::IntoLockName;
use crate::options::Options;
use crate::pool::Pool;
use crate::request::LockRequest;
use crate::stats::Statistics;
use crate::store::{self, EvictMode, Evicted, FinishRequest, Holder, Note, Operation, Release, SharedStore};

/// Manages the locks of one store. Cheap to clone: all clones share one connection, one renewal pass and one place in
/// every queue.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::LockManager;
///
/// let locks = LockManager::connect("memory:").await?;
/// let guard = locks.lock("nightly-report").await?;
/// assert!(locks.is_locked("nightly-report").await?);
/// assert!(locks.try_lock("nightly-report").await?.is_none(), "one at a time");
/// guard.release().await?;
/// locks.shutdown().await;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct LockManager {
    engine: Arc<EngineHandle>,
}

impl LockManager {
    /// Opens the store that a URL names, with the default options:
    /// `sqlite:` (the default file) or `sqlite:PATH`, `redis://[user:password@]host[:port][/db]`
    /// (with the feature `tls` also `rediss://…`, verified against the CA store of the system, or with `?ca=FILE` against
    /// that file alone), or `memory:`.
    ///
    /// # Errors
    /// [`Error::Connect`] when the URL is invalid, its store is not built in, or the store cannot be used.
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::connect_with(url, Options::default()).await
    }

    /// Opens the store that a URL names, with these options; see [`connect`](Self::connect).
    ///
    /// # Errors
    /// [`Error::Connect`] when the URL is invalid, its store is not built in, or the store cannot be used.
    pub async fn connect_with(url: &str, options: Options) -> Result<Self, Error> {
        let store = store::open::open(url, &options).await?;
        Ok(Self::with_store(store, options))
    }

    /// Creates a manager on a store that is open already. Call it inside a tokio runtime, which runs the background tasks.
    pub fn with_store(store: SharedStore, options: Options) -> Self {
        Self { engine: EngineHandle::start(store, options) }
    }

    /// Asks for a lock: await the request, or first set its terms.
    ///
    /// # Defaults
    #[doc = include_str!("../defaults.md")]
    pub fn lock<N>(&self, name: N) -> LockRequest
    where
        N: IntoLockName,
    {
        LockRequest::new(self.engine.clone(), name.into_lock_name())
    }

    /// Takes the lock if it is free, and returns `None` when it is held.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer, which is not the same as "held".
    pub async fn try_lock<N>(&self, name: N) -> Result<Option<Guard>, Error>
    where
        N: IntoLockName,
    {
        self.lock(name).no_wait().optional().await
    }

    /// Runs work under a lock; see [`LockRequest::run`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// # let locks = leasehold::LockManager::connect("memory:").await?;
    /// let paid = locks.with_lock("order:42", async |guard| {
    ///     println!("paying under fence {}", guard.fence());
    ///     17
    /// }).await?;
    /// assert_eq!(paid, 17);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Whatever kept the lock from being acquired, or [`Error::Lost`].
    pub async fn with_lock<N, T>(&self, name: N, work: impl AsyncFnOnce(&Guard) -> T) -> Result<T, Error>
    where
        N: IntoLockName,
    {
        self.lock(name).run(work).await
    }

    /// Returns the pool of the locks `<name>:<member>`, such as `gpu_lock:0` to `gpu_lock:7` for `pool("gpu_lock", 0..8)`. A
    /// pool has 1 to 64 members, given by range or by list.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a name that cannot be one, and for no, too many or repeated members.
    pub fn pool<N>(&self, name: N, members: impl IntoIterator<Item = u32>) -> Result<Pool, Error>
    where
        N: IntoLockName,
    {
        Ok(Pool::new(self, name.into_lock_name(), members)?)
    }

    /// Takes a lock away from the holder that was looked at ([`Holder::id`]), and from no other. The reason is published
    /// with the event.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn evict<N>(&self, name: N, holder: HolderId, mode: EvictMode, reason: &str) -> Result<Evicted, Error>
    where
        N: IntoLockName,
    {
        let (core, name) = (self.core(), name.into_lock_name()?);
        let outcome = core.within(core.store.evict(&name, holder, mode)).await;
        let outcome = outcome.map_err(|e| core.store_error(Operation::Evict, &name, e))?;
        match &outcome {
            Evicted::Done(old) => {
                core.publisher.stats.evictions.add_one();
                tracing::warn!(%name, %holder, owner = %old.owner, ?mode, reason, "evicted");
                let kind = if mode == EvictMode::Force { EventKind::Forced } else { EventKind::Revoked };
                self.publish(kind, &name, old, reason);
            }
            Evicted::ChangedHands(now) => {
                tracing::info!(%name, %holder, now = %now.id, "not evicted: it has changed hands");
            }
            Evicted::Free | Evicted::Foreign(_) => {}
        }
        Ok(outcome)
    }

    /// Asks the holder that was looked at to finish soon. It keeps the lock until it releases it.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn ask_to_finish<N>(&self, name: N, holder: HolderId, reason: &str) -> Result<FinishRequest, Error>
    where
        N: IntoLockName,
    {
        let (core, name) = (self.core(), name.into_lock_name()?);
        let outcome = core.within(core.store.ask_to_finish(&name, holder, reason)).await;
        let outcome = outcome.map_err(|e| core.store_error(Operation::AskToFinish, &name, e))?;
        if let FinishRequest::Delivered(holder) = &outcome {
            self.publish(EventKind::AskedToFinish, &name, holder, reason);
        }
        Ok(outcome)
    }

    /// Publishes what was done to a holder.
    fn publish(&self, kind: EventKind, name: &LockName, holder: &Holder, reason: &str) {
        let event = LockEvent::new(kind, name, holder.id, &holder.owner.to_string(), holder.fence, reason);
        self.core().publisher.note(Note::Tell(event));
    }

    /// Releases a lock that another kind of client wrote as a plain value, such as `locked_by_<task>`. The whole value is
    /// compared, in one step with the release. `false`: that value does not hold the lock (any more), and nothing was
    /// touched. It is for services that share a lock with older ones during a migration.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn release_value<N>(&self, name: N, value: &str, reason: &str) -> Result<bool, Error>
    where
        N: IntoLockName,
    {
        let (core, name) = (self.core(), name.into_lock_name()?);
        let answer = core.within(core.store.release_value(&name, value)).await;
        let answer = answer.map_err(|error| {
            count_failed_release(core, &error);
            core.store_error(Operation::Release, &name, error)
        })?;
        if answer == Release::NotOwner {
            core.publisher.stats.ownership_violations.add_one();
            tracing::info!(%name, reason, "not released: it is not held by the value that was named");
            return Ok(false);
        }
        tracing::debug!(%name, reason, "released another kind of client's value");
        self.publish(EventKind::Released, &name, &Holder::foreign(value.as_bytes(), None), reason);
        Ok(true)
    }

    /// Returns what this manager counted.
    pub fn statistics(&self) -> Statistics {
        self.core().publisher.stats.snapshot()
    }

    /// Returns the journal of the releases that failed, if one is kept.
    pub fn journal(&self) -> Option<&Journal> {
        self.engine.releases.journal()
    }

    /// Repeats the releases that are in the journal, and returns how many entries were settled. It also happens by itself
    /// whenever the store comes back.
    pub async fn replay_journal(&self) -> usize {
        self.engine.releases.replay_journal().await
    }

    /// Returns the namespace of the locks.
    pub fn namespace(&self) -> &str {
        self.core().options.keys.namespace().as_str()
    }

    /// Returns the URL of the store, without its secrets.
    pub fn store(&self) -> String {
        self.core().store.describe()
    }

    /// Returns a descriptor that keeps the leases of this process alive after its death, until their ttl is over. Hand it to
    /// processes that go on with the work when this one is killed: until they are gone, no other holder gets the locks.
    /// `None` where only the ttl counts (Redis, memory).
    pub fn lifeline(&self) -> Option<OwnedFd> {
        self.core().store.lifeline()
    }

    /// Refuses new requests, reports every lease as lost, and waits until all locks are released, for at most one ttl.
    pub async fn shutdown(&self) {
        self.engine.drain(self.core().options.ttl.duration()).await;
    }

    pub(crate) fn engine(&self) -> &Arc<EngineHandle> {
        &self.engine
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.engine.core
    }
}

impl std::fmt::Debug for LockManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LockManager").field("store", &self.store()).finish_non_exhaustive()
    }
}
