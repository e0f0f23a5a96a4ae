//! Holders, waiters, lists of locks, and the metrics of the fleet.
//!
//! [`LockManager::info`], [`overview`](LockManager::overview) and [`long_held`](LockManager::long_held) return
//! [`LockInfo`] and [`Holder`]. The types whose names end in `View` are their JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::sync::mpsc;

use crate::clock::{Moment, wall_ms};
use crate::error::Error;
use crate::events::LockEvent;
use crate::facts::{LockName, Owner, Token, Ttl};
use crate::lease::IntoLockName;
use crate::manager::LockManager;
use crate::store::{AcquireRequest, Grant, Operation, Release, StoreError, StoreErrorKind, Try};

pub(crate) mod view;

pub use crate::facts::HolderId;
pub use crate::journal::{Journal, JournalEntry, JournalKind};
pub use crate::metrics::{FleetCount, FleetHistogram, fleet_counts, fleet_histograms};
pub use crate::stats::Statistics;
pub use crate::store::finding::{Finding, Level};
pub use crate::store::holder::{Cursor, EvictMode, Evicted, FinishRequest, Holder, Page, Waiter};
pub use view::{AcquiredView, EvictOutcome, EvictedView, LockInfo, LockView, ReleasedView, WaiterView};

/// The number of locks per page of an overview.
const LIST_PAGE: usize = 1_000;
/// The number of queues that are read concurrently.
const QUEUES_AT_ONCE: usize = 64;
/// The time limit of a checkup. It reads a whole database file, or sends a server many requests.
const CHECKUP_TIMEOUT: Duration = Duration::from_secs(20);

impl LockManager {
    /// Returns whether a lock is held.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn is_locked<N: IntoLockName>(&self, name: N) -> Result<bool, Error> {
        Ok(self.holder(name).await?.is_some())
    }

    /// Returns the holder of a lock.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn holder<N: IntoLockName>(&self, name: N) -> Result<Option<Holder>, Error> {
        let name = name.into_lock_name()?;
        self.read(&name, self.core().store.holder(&name)).await
    }

    /// Returns the time left of a lock's lease; `None` when the lock is free or has no expiry.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn ttl_left<N: IntoLockName>(&self, name: N) -> Result<Option<Duration>, Error> {
        Ok(self.holder(name).await?.and_then(|holder| holder.ttl_left))
    }

    /// Returns the holder and the waiters of a lock.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn info<N: IntoLockName>(&self, name: N) -> Result<LockInfo, Error> {
        let name = name.into_lock_name()?;
        let holder = self.read(&name, self.core().store.holder(&name)).await?;
        let waiters = self.read(&name, self.core().store.queue(&name)).await?;
        Ok(LockInfo { name, holder, waiters })
    }

    /// Returns a page of about `limit` locks whose names begin with `prefix`. Pass the cursor of the page before to get the next
    /// one.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer, or does not know the cursor.
    pub async fn list(&self, prefix: &str, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        let name = LockName::new(if prefix.is_empty() { "*" } else { prefix })?;
        self.read(&name, self.core().store.list(prefix, after, limit.clamp(1, 10_000))).await
    }

    /// Returns all locks whose names begin with `prefix`, sorted by name, with their waiters.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn overview(&self, prefix: &str) -> Result<Vec<LockInfo>, Error> {
        let mut held = BTreeMap::new();
        let mut after = None;
        loop {
            let page = self.list(prefix, after, LIST_PAGE).await?;
            held.extend(page.locks);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        self.with_queues(held.into_iter()).await
    }

    /// Returns a page of [`overview`](Self::overview): about `limit` locks in any order, with their waiters. Pass the cursor of
    /// the page before to get the next one. A page may be empty without being the last.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer, or does not know the cursor.
    pub async fn overview_page(
        &self,
        prefix: &str,
        after: Option<Cursor>,
        limit: usize,
    ) -> Result<(Vec<LockInfo>, Option<Cursor>), Error> {
        let page = self.list(prefix, after, limit).await?;
        Ok((self.with_queues(page.locks.into_iter()).await?, page.next))
    }

    async fn with_queues(&self, held: impl Iterator<Item = (LockName, Holder)>) -> Result<Vec<LockInfo>, Error> {
        let mut infos = Vec::with_capacity(held.size_hint().0);
        let mut held = held.peekable();
        while held.peek().is_some() {
            let queues = held.by_ref().take(QUEUES_AT_ONCE).map(async |(name, holder)| {
                let waiters = self.read(&name, self.core().store.queue(&name)).await?;
                Ok::<_, Error>(LockInfo { name, holder: Some(holder), waiters })
            });
            infos.extend(try_join_all(queues).await?);
        }
        Ok(infos)
    }

    /// Checks whether the store is set up safely. Returns one finding per check; the last checks acquire and release a lock.
    pub async fn checkup(&self) -> Vec<Finding> {
        let core = self.core();
        let mut findings = match tokio::time::timeout(CHECKUP_TIMEOUT, core.store.checkup()).await {
            Ok(findings) => findings,
            Err(_) => vec![Finding::bad("reachable", format!("no answer within {CHECKUP_TIMEOUT:?}"))],
        };
        findings.push(match core.within(self.acquire_and_release()).await {
            Ok(text) => Finding::ok("grant", text),
            Err(error) => Finding::bad("grant", format!("a lock cannot be acquired and released: {error}")),
        });
        // No finding when the check fails or finds nothing: few stores have GPU locks.
        if let Ok(gpus) = self.gpus_held().await {
            findings.extend(gpus_of_several_hosts(&gpus).map(|text| Finding::warn("gpu_scope", text)));
        }
        findings
    }

    /// Returns the locks that have been held for longer than half a second. They are read from the store's index, which is
    /// cheap for any number of keys and has all holders except foreign ones.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn long_held(&self) -> Result<Vec<(LockName, Holder)>, Error> {
        let mut held = BTreeMap::new();
        let mut after = None;
        loop {
            let page = self.long_held_page(after, LIST_PAGE).await?;
            held.extend(page.locks);
            after = page.next;
            if after.is_none() {
                return Ok(held.into_iter().collect());
            }
        }
    }

    /// Returns a page of [`long_held`](Self::long_held): about `limit` locks in any order. Pass the cursor of the page before to
    /// get the next one. A page may be empty without being the last, and a lock may be on two pages.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer, or does not know the cursor.
    pub async fn long_held_page(&self, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        let name = LockName::new("*")?;
        self.read(&name, self.core().store.long_held(after, limit.clamp(1, 10_000))).await
    }

    /// Subscribes to the events of the whole fleet. A subscriber that is too slow misses events.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn events(&self) -> Result<mpsc::Receiver<LockEvent>, Error> {
        let name = LockName::new("*")?;
        self.read(&name, self.core().store.follow()).await
    }

    /// Returns the counters of the whole fleet, a few seconds old at most.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn fleet_counters(&self) -> Result<Vec<(String, u64)>, Error> {
        let name = LockName::new("*")?;
        self.read(&name, self.core().store.counters()).await
    }

    /// Adds to the counters of [`fleet_counters`](Self::fleet_counters), for programs with counters of their own.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer; the counts may have been added.
    pub async fn add_to_fleet_counters(&self, counts: &[(&'static str, u64)]) -> Result<(), Error> {
        let name = LockName::new("*")?;
        if counts.is_empty() {
            return Ok(());
        }
        self.read(&name, self.core().store.count(counts)).await
    }

    /// Returns the long-held GPU locks. They are read from the index, because a server may have millions of keys.
    async fn gpus_held(&self) -> Result<Vec<LockInfo>, Error> {
        let held = self.long_held().await?.into_iter().map(|(name, _)| name);
        let gpus = held.filter(|name| name.as_str().starts_with("gpu_lock:")).take(LIST_PAGE);
        try_join_all(gpus.map(async |name| self.info(&name).await)).await
    }

    async fn acquire_and_release(&self) -> Result<String, StoreError> {
        let core = self.core();
        let token = Token::random();
        let name = format!("leasehold-checkup:{}", token.holder_id());
        let claim = AcquireRequest {
            name: LockName::new(name).expect("a name"),
            token,
            ttl: Ttl::new(core.options.request_timeout.clamp(Ttl::MIN, Ttl::MAX)).unwrap_or_default(),
            owner: core.options.owner.clone(),
            fenced: true,
            listens: false,
            since_ms: wall_ms(),
        };
        let sent_at = Moment::now();
        let acquired = core.store.try_acquire(&claim).await?;
        let released = core.store.release(&claim.name, &claim.token).await?;
        let took = sent_at.until(Moment::now());
        match (acquired, released) {
            (Try::Granted(Grant { fence: Some(fence), .. }), Release::Released) => {
                Ok(format!("a lock was acquired and released in {took:.1?}, fence {fence}"))
            }
            _ => Err(StoreError::new(StoreErrorKind::Other, "it was not granted, or it was lost at once")),
        }
    }

    async fn read<T>(&self, name: &LockName, request: impl Future<Output = Result<T, StoreError>>) -> Result<T, Error> {
        let core = self.core();
        core.within(request).await.map_err(|e| core.store_error(Operation::Inspect, name, e))
    }
}

/// Finds a GPU lock that several hosts use. They probably have a GPU of that number each, and share one lock by mistake.
fn gpus_of_several_hosts(gpus: &[LockInfo]) -> Option<String> {
    let suspicious = gpus.iter().find_map(|gpu| {
        // With `gpu_scope: host` the name has the host before the number.
        gpu.name.as_str().strip_prefix("gpu_lock:")?.parse::<u32>().ok()?;
        let owners =
            gpu.holder.iter().map(|holder| &holder.owner).chain(gpu.waiters.iter().map(|waiter| &waiter.owner));
        let hosts: BTreeSet<&str> = owners.map(Owner::host).filter(|host| !host.is_empty()).collect();
        (hosts.len() > 1).then(|| (&gpu.name, hosts.into_iter().collect::<Vec<_>>().join(", ")))
    });
    suspicious.map(|(name, hosts)| {
        format!(
            "{name} is used by the hosts {hosts}. If each has GPUs of its own, set gpu_scope to host on all of them."
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Fence;
    use crate::store::Ticket;

    fn gpu(name: &str, holder: &str, waiters: &[&str]) -> LockInfo {
        let owner = |host: &&str| Owner::from_wire(&format!("tts@{host}:1"));
        let holder = Holder {
            id: Token::random().holder_id(),
            owner: owner(&holder),
            fence: Some(Fence::new(1)),
            since_ms: 1,
            ttl: None,
            ttl_left: None,
            revoked: false,
            foreign: false,
            listens: true,
            connected: None,
        };
        let waiter = |host| Waiter { ticket: Ticket(1), owner: owner(host), since_ms: 1, listens: true };
        let waiters = waiters.iter().map(waiter).collect();
        LockInfo { name: LockName::new(name).expect("a name"), holder: Some(holder), waiters }
    }

    #[test]
    fn one_gpu_lock_on_several_hosts_is_suspicious() {
        assert_eq!(gpus_of_several_hosts(&[gpu("gpu_lock:0", "a", &["a", "a"]), gpu("gpu_lock:1", "b", &[])]), None);
        assert_eq!(gpus_of_several_hosts(&[gpu("gpu_lock:a:0", "a", &["b"])]), None, "one per host");
        assert_eq!(gpus_of_several_hosts(&[gpu("gpu_lock:collecting", "a", &["b"])]), None);
        let text = gpus_of_several_hosts(&[gpu("gpu_lock:0", "a", &[]), gpu("gpu_lock:1", "b", &["b", "a"])]);
        let text = text.expect("suspicious");
        assert!(text.contains("gpu_lock:1") && text.contains("a, b") && text.contains("gpu_scope"), "{text}");
    }
}
