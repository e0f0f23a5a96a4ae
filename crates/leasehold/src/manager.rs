use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::clock::{Moment, wall_ms};
use crate::engine::{Alive, Core};
use crate::error::{Error, Operation};
use crate::event::{EventKind, LockEvent};
use crate::facts::{HolderId, Invalid, LockName, Token, Ttl};
use crate::guard::Guard;
use crate::journal::Journal;
use crate::lease::Belief;
use crate::options::Options;
use crate::pool::Pool;
use crate::request::LockRequest;
use crate::stats::Statistics;
use crate::store::memory::MemoryWorld;
use crate::store::redis::{RedisOptions, RedisStore};
use crate::store::sqlite::{self, SqliteStore};
use crate::store::{
    Asked, EvictMode, Evicted, Holder, Note, Release, Renewal, Renewed, SharedStore, StoreError, StoreErrorKind,
};

/// The way to locks in one store. Cheap to clone; all clones share one connection, one renewal
/// pass and one place in every queue.
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
    alive: Arc<Alive>,
}

impl LockManager {
    /// Opens the store that a URL names, with the default options:
    /// `sqlite:` (the default file) or `sqlite:PATH`, `redis://[user:password@]host[:port][/db]`
    /// (with the feature `tls` also `rediss://…`, which trusts whom the machine trusts, or with `?ca=FILE` the
    /// authorities in that file alone), or `memory:`.
    ///
    /// # Errors
    /// [`Error::Connect`] when the URL makes no sense or the store cannot be used.
    pub async fn connect(url: &str) -> Result<Self, Error> {
        Self::connect_with(url, Options::default()).await
    }

    /// Opens the store that a URL names.
    ///
    /// # Errors
    /// [`Error::Connect`] when the URL makes no sense or the store cannot be used.
    pub async fn connect_with(url: &str, options: Options) -> Result<Self, Error> {
        let connect = |source| Error::Connect { store: without_secrets(url), source };
        let (scheme, rest) = url.split_once(':').unwrap_or((url, ""));
        let store: SharedStore = match scheme {
            "memory" => Arc::new(MemoryWorld::new().open_with(options.keys.clone())),
            "sqlite" => {
                let path = if rest.is_empty() { sqlite::default_path().map_err(connect)? } else { rest.into() };
                let connect = |source| Error::Connect { store: format!("sqlite:{}", path.display()), source };
                Arc::new(SqliteStore::open_with(&path, options.keys.clone()).map_err(connect)?)
            }
            "redis" | "rediss" => {
                // Longer than a day is for ever, and is not beyond what a clock can count.
                let answer_within = options.answer_within.min(Ttl::MAX);
                let redis =
                    RedisOptions::default().response_timeout(answer_within).connect_later(options.connect_later);
                Arc::new(RedisStore::connect(url, options.keys.clone(), redis).await.map_err(connect)?)
            }
            unknown => return Err(connect(not_a_store(unknown))),
        };
        Ok(Self::with_store(store, options))
    }

    /// On a store that is open already. Must be called inside a tokio runtime, which runs the
    /// background tasks.
    pub fn with_store(store: SharedStore, options: Options) -> Self {
        Self { alive: Core::start(store, options) }
    }

    /// Asks for a lock: await the request, or first say more about it. By default it waits without
    /// limit, has a fence, and is renewed while the guard lives.
    pub fn lock<N>(&self, name: N) -> LockRequest
    where
        N: TryInto<LockName, Error = Invalid>,
    {
        LockRequest::new(self.alive.clone(), name.try_into())
    }

    /// Takes the lock if it is free: `None` when somebody else holds it.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer, which is not the same as "held".
    pub async fn try_lock<N>(&self, name: N) -> Result<Option<Guard>, Error>
    where
        N: TryInto<LockName, Error = Invalid>,
    {
        self.lock(name).no_wait().optional().await
    }

    /// Runs work under a lock; see [`LockRequest::run`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// # let locks = leasehold::LockManager::connect("memory:").await?;
    /// let paid = locks.with_lock("order:42", async |guard| {
    ///     println!("paying under fence {:?}", guard.fence());
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
        N: TryInto<LockName, Error = Invalid>,
    {
        self.lock(name).run(work).await
    }

    /// A pool: the locks `<name>:<member>`, of which any are good, such as `gpu_lock:0` to `gpu_lock:7` for
    /// `pool("gpu_lock", 0..8)`. From 1 to 64 members, by range or by list.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a name that cannot be one, and for no, too many or repeated members.
    pub fn pool<N>(&self, name: N, members: impl IntoIterator<Item = u32>) -> Result<Pool, Error>
    where
        N: TryInto<LockName, Error = Invalid>,
    {
        Ok(Pool::new(self, name.try_into(), members)?)
    }

    /// Takes a lock away from the holder that was looked at ([`Holder::id`](crate::Holder::id)), and from nobody else.
    /// The reason goes to whoever follows the events.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn evict<N>(&self, name: N, holder: HolderId, mode: EvictMode, reason: &str) -> Result<Evicted, Error>
    where
        N: TryInto<LockName, Error = Invalid>,
    {
        let (core, name) = (self.core(), name.try_into()?);
        let outcome = core.within(core.store.evict(&name, holder, mode)).await;
        let outcome = outcome.map_err(|e| core.store_error(Operation::Evict, &name, e))?;
        match &outcome {
            Evicted::Done(old) => {
                core.stats.evictions.add_one();
                tracing::warn!(%name, %holder, owner = %old.owner, ?mode, reason, "evicted");
                let kind = if mode == EvictMode::Force { EventKind::Forced } else { EventKind::Revoked };
                self.tell_of(kind, &name, old, reason);
            }
            Evicted::ChangedHands(now) => {
                tracing::info!(%name, %holder, now = %now.id, "not evicted: it has changed hands");
            }
            Evicted::Free | Evicted::Foreign(_) => {}
        }
        Ok(outcome)
    }

    /// Asks the holder that was looked at to come to an end soon. It keeps the lock until it does.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn ask_to_finish<N>(&self, name: N, holder: HolderId, reason: &str) -> Result<Asked, Error>
    where
        N: TryInto<LockName, Error = Invalid>,
    {
        let (core, name) = (self.core(), name.try_into()?);
        let outcome = core.within(core.store.ask_to_finish(&name, holder, reason)).await;
        let outcome = outcome.map_err(|e| core.store_error(Operation::AskToFinish, &name, e))?;
        if let Asked::Told(told) = &outcome {
            self.tell_of(EventKind::AskedToFinish, &name, told, reason);
        }
        Ok(outcome)
    }

    /// Tells whoever follows what was done to a holder.
    fn tell_of(&self, kind: EventKind, name: &LockName, holder: &Holder, reason: &str) {
        self.core().note(Note::Tell(LockEvent {
            kind,
            name: name.to_string(),
            owner: holder.owner.to_string(),
            holder_id: holder.id.to_string(),
            fence: holder.fence.map(crate::Fence::get),
            at_ms: wall_ms(),
            reason: reason.to_owned(),
        }));
    }

    /// Releases a lock by its token, without a guard: for a lease that was handed on with
    /// [`Guard::into_token`]. `false`: it is not that token's (any more), and nothing was touched.
    ///
    /// It is taken out of the index of long-held locks, and no event is published. A lease whose grant was told
    /// is released by [`release_token_and_tell`](Self::release_token_and_tell).
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn release_token<N>(&self, name: N, token: &Token) -> Result<bool, Error>
    where
        N: TryInto<LockName, Error = Invalid>,
    {
        let (core, name) = (self.core(), name.try_into()?);
        let answer = core.within(core.store.let_go(&name, token)).await;
        let answer = answer.map_err(|e| core.store_error(Operation::Release, &name, e))?;
        if answer == Release::NotOwner {
            core.stats.ownership_violations.add_one();
            tracing::warn!(%name, holder = %token.holder_id(), "released a lock that was not ours; nothing was touched");
            return Ok(false);
        }
        // A renewal by token may have entered it, here or in another process.
        core.note(Note::Remove { name, holder: token.holder_id() });
        Ok(true)
    }

    /// As [`release_token`](Self::release_token), and tells those who watch whose lease it was.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn release_token_and_tell<N>(&self, name: N, token: &Token) -> Result<bool, Error>
    where
        N: TryInto<LockName, Error = Invalid>,
    {
        let (core, name) = (self.core(), name.try_into()?);
        // Who it was, for those who watch: nothing depends on it.
        let looking = core.within(core.store.holder(&name));
        let (holder, released) = tokio::join!(looking, self.release_token(&name, token));
        let released = released?;
        if released {
            let holder = holder.ok().flatten().filter(|holder| holder.id == token.holder_id());
            let owner = holder.as_ref().map_or_else(String::new, |holder| holder.owner.to_string());
            core.tell_released(&name, token, &owner, holder.and_then(|holder| holder.fence));
        }
        Ok(released)
    }

    /// Gives back a lock that another kind of client wrote as a plain value, such as `locked_by_<task>`: compared with
    /// the whole value and done in one step, and whoever waits gets it. `false`: the lock is not held by that value (any
    /// more), and nothing was touched. For services that share a lock with older ones during a migration.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn release_value<N>(&self, name: N, value: &str, reason: &str) -> Result<bool, Error>
    where
        N: TryInto<LockName, Error = Invalid>,
    {
        let (core, name) = (self.core(), name.try_into()?);
        let answer = core.within(core.store.release_value(&name, value)).await;
        let answer = answer.map_err(|error| {
            core.count_failed_release(&error);
            core.store_error(Operation::Release, &name, error)
        })?;
        if answer == Release::NotOwner {
            core.stats.ownership_violations.add_one();
            tracing::info!(%name, reason, "not released: it is not held by the value that was named");
            return Ok(false);
        }
        tracing::debug!(%name, reason, "released another kind of client's value");
        self.tell_of(EventKind::Released, &name, &Holder::foreign(value.as_bytes(), None), reason);
        Ok(true)
    }

    /// Renews a lease by its token, without a guard: to another ttl, which becomes the lease's own, or
    /// (`None`) to the one it was taken with. It never shortens the present lease.
    ///
    /// # Errors
    /// [`Error::Lost`] when it is not that token's (any more) or was revoked, [`Error::Store`] when
    /// the store did not answer.
    pub async fn renew_token<N>(&self, name: N, token: &Token, ttl: impl Into<Option<Ttl>>) -> Result<Moment, Error>
    where
        N: TryInto<LockName, Error = Invalid>,
    {
        use crate::event::LossReason;
        let (core, name) = (self.core(), name.try_into()?);
        let holder = core.within(core.store.holder(&name)).await;
        let holder = holder.map_err(|e| core.store_error(Operation::Renew, &name, e))?;
        let Some(holder) = holder.filter(|holder| holder.id == token.holder_id()) else {
            return Err(Error::Lost { name, why: LossReason::Gone });
        };
        let recorded = holder.ttl.and_then(|ttl| Ttl::new(ttl).ok()).unwrap_or_default();
        let ttl = ttl.into().unwrap_or(recorded);
        // Whoever looks reads the last sign of life off the recorded ttl, so another one is written.
        let rewrite = (ttl != recorded).then_some(holder.owner);
        let renewal = Renewal {
            name: name.clone(),
            token: token.clone(),
            fence: holder.fence,
            ttl,
            prolong: true,
            rewrite,
            hand_to: None,
        };
        let asked_at = Moment::now();
        let answer = core.within(async { Ok(core.store.renew(&[renewal]).await.pop()) }).await;
        match answer {
            Ok(Some(Renewed::Renewed)) => {
                core.note(Note::Enter { name, holder: token.holder_id(), lasts: ttl.duration() });
                Ok(Belief::new(asked_at, asked_at, ttl.duration()).valid_until())
            }
            Ok(Some(Renewed::Lost)) => Err(Error::Lost { name, why: LossReason::Gone }),
            Ok(Some(Renewed::Revoked)) => Err(Error::Lost { name, why: LossReason::Revoked }),
            Ok(Some(Renewed::Displaced)) => Err(Error::Lost { name, why: LossReason::Displaced }),
            Ok(Some(Renewed::Unknown(error))) | Err(error) => Err(core.store_error(Operation::Renew, &name, error)),
            Ok(None) => Err(core.store_error(Operation::Renew, &name, StoreErrorKind::Other.into())),
        }
    }

    /// What this manager counted.
    pub fn statistics(&self) -> Statistics {
        self.core().stats.snapshot()
    }

    /// The journal of what could not be done, if one is kept.
    pub fn journal(&self) -> Option<&Journal> {
        self.core().journal.as_ref()
    }

    /// Does now what the journal says is still to be done; it also happens by itself whenever the
    /// store comes back. Returns how many entries were settled.
    pub async fn replay_journal(&self) -> usize {
        self.core().replay_journal().await
    }

    /// The namespace of its locks.
    pub fn namespace(&self) -> &str {
        self.core().options.keys.namespace().as_str()
    }

    /// Which store this is, without its secrets.
    pub fn store(&self) -> String {
        self.core().store.describe()
    }

    /// A descriptor that keeps the leases of this process from being taken for a dead one's. Hand it to
    /// processes that go on with the work when this one is killed: until they are gone, or the lease's
    /// ttl is over, nobody else gets the lock. `None` where only the ttl counts (Redis, memory).
    pub fn lifeline(&self) -> Option<OwnedFd> {
        self.core().store.lifeline()
    }

    /// Lets nothing new begin, tells every holder that its lease is over, and waits until all locks
    /// are given back, at most one ttl.
    pub async fn shutdown(&self) {
        self.core().drain(self.core().options.ttl.duration()).await;
    }

    pub(crate) fn alive(&self) -> &Arc<Alive> {
        &self.alive
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.alive.0
    }
}

impl std::fmt::Debug for LockManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LockManager").field("store", &self.store()).finish_non_exhaustive()
    }
}

/// What is wrong with the URL of a store, as far as can be told without opening it.
#[cfg(feature = "config")]
pub(crate) fn check_url(url: &str) -> Result<(), StoreError> {
    match url.split_once(':').map_or(url, |(scheme, _)| scheme) {
        "memory" | "sqlite" => Ok(()),
        "redis" | "rediss" => crate::store::redis::check_url(url),
        unknown => Err(not_a_store(unknown)),
    }
}

/// Why there is no store of this scheme. Nothing of it is repeated: what has no scheme begins with anything.
fn not_a_store(scheme: &str) -> StoreError {
    let why = match scheme {
        "valkey" | "valkeys" => "Valkey is reached as Redis is: write redis://HOST:PORT, or rediss://HOST:PORT for TLS",
        "unix" | "redis+unix" | "redis+socket" => {
            "a Redis server is reached over TCP, not by a Unix socket: write redis://HOST:PORT"
        }
        _ if scheme.contains("sentinel") || scheme.contains("cluster") => {
            "one server is named, by redis://HOST:PORT: neither clusters nor sentinels are supported"
        }
        _ => "not the URL of a store: write sqlite, sqlite:PATH, redis://HOST:PORT, rediss://HOST:PORT or memory",
    };
    StoreError::new(StoreErrorKind::Refused, why)
}

/// A URL as it may be shown: without user and password, and without query.
pub(crate) fn without_secrets(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        // A path may be shown; of a URL that lacks its slashes nobody knows where the password is.
        let scheme = url.split_once(':').map_or(url, |(scheme, _)| scheme);
        return if matches!(scheme, "sqlite" | "memory") { url.to_owned() } else { format!("{scheme}:…") };
    };
    let rest = rest.rsplit_once('@').map_or(rest, |(login, host)| {
        // Which of the two belongs to a password, nobody knows.
        if login.contains('?') { "…" } else { host }
    });
    let rest = rest.split_once('?').map_or(rest, |(path, _)| path);
    format!("{scheme}://{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_shown_without_its_secrets() {
        assert_eq!(without_secrets("redis://u:p@ss@h:1/0?password=x"), "redis://h:1/0");
        assert_eq!(without_secrets("redis://h:1?password=a"), "redis://h:1");
        assert_eq!(without_secrets("redis://h:1?password=a@b"), "redis://…");
        assert_eq!(without_secrets("redis://u:pa?ss@h"), "redis://…");
        assert_eq!(without_secrets("redis:u:secret@h"), "redis:…");
        assert_eq!(without_secrets("sqlite:a/b.db"), "sqlite:a/b.db");
    }
}
