//! Who holds what, who waits for it, and what the fleet counted.
//!
//! [`LockManager::info`], [`overview`](LockManager::overview) and [`long_held`](LockManager::long_held) answer with
//! [`LockInfo`] and [`Holder`]; the types whose names end in `View` are the same in JSON.

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
use crate::store::{Claim, Grant, Operation, Release, StoreError, StoreErrorKind, Try};

pub(crate) mod view;

pub use crate::facts::HolderId;
pub use crate::journal::{Journal, JournalEntry, JournalKind};
pub use crate::metrics::{FleetCount, FleetHistogram, fleet_counts, fleet_histograms};
pub use crate::stats::Statistics;
pub use crate::store::finding::{Finding, Level};
pub use crate::store::holder::{Cursor, EvictMode, Evicted, FinishRequest, Holder, Page, Waiter};
pub use view::{AcquiredView, EvictOutcome, EvictedView, LockInfo, LockView, ReleasedView, WaiterView};

/// Locks asked for in one page of an overview, and queues looked at at once.
const LIST_PAGE: usize = 1_000;
const QUEUES_AT_ONCE: usize = 64;
/// A checkup reads a whole file, and asks a server many things.
const CHECKUP_WITHIN: Duration = Duration::from_secs(20);

impl LockManager {
    /// Whether anybody holds a lock.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn is_locked<N: IntoLockName>(&self, name: N) -> Result<bool, Error> {
        Ok(self.holder(name).await?.is_some())
    }

    /// Who holds a lock.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn holder<N: IntoLockName>(&self, name: N) -> Result<Option<Holder>, Error> {
        let name = name.into_lock_name()?;
        self.look(&name, self.core().store.holder(&name)).await
    }

    /// How long a lock's lease still runs; `None` when it is free or has no end.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn ttl_left<N: IntoLockName>(&self, name: N) -> Result<Option<Duration>, Error> {
        Ok(self.holder(name).await?.and_then(|holder| holder.ttl_left))
    }

    /// Who holds a lock and who waits for it.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn info<N: IntoLockName>(&self, name: N) -> Result<LockInfo, Error> {
        let name = name.into_lock_name()?;
        let holder = self.look(&name, self.core().store.holder(&name)).await?;
        let waiters = self.look(&name, self.core().store.queue(&name)).await?;
        Ok(LockInfo { name, holder, waiters })
    }

    /// A page of the locks whose names begin with `prefix`, at most about `limit` of them; go on
    /// with the cursor of the page before.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer, or does not know the cursor.
    pub async fn list(&self, prefix: &str, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        let name = LockName::new(if prefix.is_empty() { "*" } else { prefix })?;
        self.look(&name, self.core().store.list(prefix, after, limit.clamp(1, 10_000))).await
    }

    /// All locks whose names begin with `prefix`, by name, with who waits for them.
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

    /// A page of [`overview`](Self::overview): at most about `limit` locks, in no promised order, with who waits
    /// for them. Go on with the cursor of the page before; a page may be empty and not the last.
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
            let asked = held.by_ref().take(QUEUES_AT_ONCE).map(async |(name, holder)| {
                let waiters = self.look(&name, self.core().store.queue(&name)).await?;
                Ok::<_, Error>(LockInfo { name, holder: Some(holder), waiters })
            });
            infos.extend(try_join_all(asked).await?);
        }
        Ok(infos)
    }

    /// Whether the store can keep a promise: one finding per check, the last of them a lock that is
    /// taken and given back.
    pub async fn checkup(&self) -> Vec<Finding> {
        let core = self.core();
        let mut findings = match tokio::time::timeout(CHECKUP_WITHIN, core.store.checkup()).await {
            Ok(findings) => findings,
            Err(_) => vec![Finding::bad("reachable", format!("no answer within {CHECKUP_WITHIN:?}"))],
        };
        findings.push(match core.within(self.try_a_grant()).await {
            Ok(text) => Finding::ok("grant", text),
            Err(error) => Finding::bad("grant", format!("a lock cannot be taken and given back: {error}")),
        });
        // Nothing is said where nothing is known, and nothing where all is well: few have GPUs.
        if let Ok(gpus) = self.gpus_held().await {
            findings.extend(gpus_of_several_hosts(&gpus).map(|text| Finding::warn("gpu_scope", text)));
        }
        findings
    }

    /// Locks held for longer than half a second, from the store's index: cheap however many keys
    /// the store holds, and complete for holders that are leasehold's.
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

    /// A page of [`long_held`](Self::long_held): at most about `limit` locks, in no promised order. Go on with the
    /// cursor of the page before; a page may be empty and not the last, and a lock may be on two of them.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer, or does not know the cursor.
    pub async fn long_held_page(&self, after: Option<Cursor>, limit: usize) -> Result<Page, Error> {
        let name = LockName::new("*")?;
        self.look(&name, self.core().store.long_held(after, limit.clamp(1, 10_000))).await
    }

    /// Events of the whole fleet from now on. A follower that does not keep up misses some.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn events(&self) -> Result<mpsc::Receiver<LockEvent>, Error> {
        let name = LockName::new("*")?;
        self.look(&name, self.core().store.follow()).await
    }

    /// What the whole fleet counted, at most some seconds old.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn fleet_counters(&self) -> Result<Vec<(String, u64)>, Error> {
        let name = LockName::new("*")?;
        self.look(&name, self.core().store.counters()).await
    }

    /// Adds to what [`fleet_counters`](Self::fleet_counters) answers, for programs that count something of their own.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer; it may have been added all the same.
    pub async fn add_to_fleet_counters(&self, counts: &[(&'static str, u64)]) -> Result<(), Error> {
        let name = LockName::new("*")?;
        if counts.is_empty() {
            return Ok(());
        }
        self.look(&name, self.core().store.count(counts)).await
    }

    /// The locks of GPUs that are held for a while, from the index: a server may hold millions of keys.
    async fn gpus_held(&self) -> Result<Vec<LockInfo>, Error> {
        let held = self.long_held().await?.into_iter().map(|(name, _)| name);
        let gpus = held.filter(|name| name.as_str().starts_with("gpu_lock:")).take(LIST_PAGE);
        try_join_all(gpus.map(async |name| self.info(&name).await)).await
    }

    async fn try_a_grant(&self) -> Result<String, StoreError> {
        let core = self.core();
        let token = Token::random();
        let name = format!("leasehold-checkup:{}", token.holder_id());
        let claim = Claim {
            name: LockName::new(name).expect("a name"),
            token,
            ttl: Ttl::new(core.options.request_timeout.clamp(Ttl::MIN, Ttl::MAX)).unwrap_or_default(),
            owner: core.options.owner.clone(),
            fenced: true,
            listens: false,
            since_ms: wall_ms(),
        };
        let asked_at = Moment::now();
        let taken = core.store.try_acquire(&claim).await?;
        let given_back = core.store.release(&claim.name, &claim.token).await?;
        let took = asked_at.until(Moment::now());
        match (taken, given_back) {
            (Try::Granted(Grant { fence: Some(fence), .. }), Release::Released) => {
                Ok(format!("a lock was taken and given back in {took:.1?}, fence {fence}"))
            }
            _ => Err(StoreError::new(StoreErrorKind::Other, "it was not granted, or was gone at once")),
        }
    }

    async fn look<T>(&self, name: &LockName, ask: impl Future<Output = Result<T, StoreError>>) -> Result<T, Error> {
        let core = self.core();
        core.within(ask).await.map_err(|e| core.store_error(Operation::Inspect, name, e))
    }
}

/// What is suspicious about locks of GPUs: one number, on hosts that have a GPU of that number each.
fn gpus_of_several_hosts(gpus: &[LockInfo]) -> Option<String> {
    let suspicious = gpus.iter().find_map(|gpu| {
        // With `gpu_scope: host` the host stands in between.
        gpu.name.as_str().strip_prefix("gpu_lock:")?.parse::<u32>().ok()?;
        let owners =
            gpu.holder.iter().map(|holder| &holder.owner).chain(gpu.waiters.iter().map(|waiter| &waiter.owner));
        let hosts: BTreeSet<&str> = owners.map(Owner::host).filter(|host| !host.is_empty()).collect();
        (hosts.len() > 1).then(|| (&gpu.name, hosts.into_iter().collect::<Vec<_>>().join(", ")))
    });
    suspicious.map(|(name, hosts)| {
        format!(
            "{name} is wanted by the hosts {hosts}. If each has GPUs of its own, set gpu_scope to host on all of them."
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
        assert_eq!(gpus_of_several_hosts(&[gpu("gpu_lock:a:0", "a", &["b"])]), None, "that is its own");
        assert_eq!(gpus_of_several_hosts(&[gpu("gpu_lock:collecting", "a", &["b"])]), None);
        let told = gpus_of_several_hosts(&[gpu("gpu_lock:0", "a", &[]), gpu("gpu_lock:1", "b", &["b", "a"])]);
        let told = told.expect("suspicious");
        assert!(told.contains("gpu_lock:1") && told.contains("a, b") && told.contains("gpu_scope"), "{told}");
    }
}
