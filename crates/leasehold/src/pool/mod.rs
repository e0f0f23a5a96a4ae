//! Pools: any one, or any few, of a set of locks.

mod permit;
mod request;

use std::fmt;
use std::sync::Arc;

use futures_util::future::try_join_all;

pub use permit::{Permit, Permits};
pub use request::PoolRequest;

use crate::engine::EngineHandle;
use crate::engine::pooling::{Member, PoolParts};
use crate::error::Error;
use crate::facts::{Invalid, LockName};
pub use crate::inspect::view::PoolMember;
use crate::manager::LockManager;

/// The last part of the name of the lock under which a request for several members collects them.
const COLLECTOR: &str = "collecting";

/// A set of interchangeable locks: GPUs, licences, places in a queue of jobs. Cheap to clone.
///
/// Its members are ordinary locks, `gpu_lock:0` and so on, which can also be asked for by name; what holds for
/// a lock (fences, renewal, loss, eviction) holds for a member. A counted semaphore is a pool of as many members
/// as may be inside at once.
///
/// ```
/// # use std::time::Duration;
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// let locks = leasehold::LockManager::connect("memory:").await?;
/// let gpus = locks.pool("gpu_lock", 0..4)?;
///
/// let one = gpus.acquire().owner("tts-worker-3").await?; // waits for whichever is free first
/// println!("on GPU {}, under fence {}", one.index(), one.fence());
///
/// let three = gpus.any(3).wait_up_to(Duration::from_secs(60)).await?; // all three, or none
/// assert_eq!(three.indices(), [1, 2, 3]);
///
/// assert!(gpus.acquire().no_wait().optional().await?.is_none(), "all four are in use");
/// assert!(locks.is_locked("gpu_lock:0").await?, "a member is a lock");
/// one.release().await?;
/// three.release().await?;
/// # Ok(()) }
/// ```
///
/// Requests are served in the order of asking, those for a member by name among them: see
/// `docs/guarantees.md`.
#[derive(Clone)]
pub struct Pool {
    locks: LockManager,
    parts: Arc<PoolParts>,
}

impl Pool {
    /// The most members that a pool can have: a waiter is in the queue of each.
    pub const MAX_MEMBERS: usize = 64;

    pub(crate) fn new(
        locks: &LockManager,
        name: Result<LockName, Invalid>,
        members: impl IntoIterator<Item = u32>,
    ) -> Result<Self, Invalid> {
        let name = name?;
        let keys = &locks.core().options.keys;
        let lock = |last: &dyn fmt::Display| {
            let lock = LockName::new(format!("{name}:{last}"))?;
            keys.check(&lock).map(|()| lock)
        };
        let refused = |problem: String| Invalid::Setting { setting: "pool", given: name.to_string(), problem };
        let mut found: Vec<Member> = Vec::new();
        for index in members {
            if found.iter().any(|member| member.index == index) {
                return Err(refused(format!("has member {index} twice")));
            }
            if found.len() == Self::MAX_MEMBERS {
                return Err(refused(format!("has more than {} members", Self::MAX_MEMBERS)));
            }
            found.push(Member { index, name: lock(&index)? });
        }
        if found.is_empty() {
            return Err(refused(format!("has no members: give it 1 to {}, such as 0..4", Self::MAX_MEMBERS)));
        }
        let collector = lock(&COLLECTOR)?;
        Ok(Self { locks: locks.clone(), parts: Arc::new(PoolParts { name, collector, members: found }) })
    }

    /// Returns the name of the pool, with which the names of its members begin.
    pub fn name(&self) -> &LockName {
        &self.parts.name
    }

    /// Returns the numbers of the members, in the order in which they were given.
    pub fn indices(&self) -> Vec<u32> {
        self.parts.members.iter().map(|member| member.index).collect()
    }

    /// Asks for any one member: await the request, or first set its terms. By default it waits without limit, and the lease
    /// is renewed while the permit lives. Of several members that are free it takes the first.
    pub fn acquire(&self) -> PoolRequest<Permit> {
        PoolRequest::new(self.engine().clone(), self.parts.clone(), 1)
    }

    /// Asks for any `count` members, all of them or none: see [`Pool::acquire`].
    ///
    /// While it waits, members that become free are kept for it, so that later requests for fewer do
    /// not keep it waiting for ever. Requests for several are collected one at a time, under the lock
    /// `<pool>:collecting`: two of them never hold a part each.
    pub fn any(&self, count: usize) -> PoolRequest<Permits> {
        PoolRequest::new(self.engine().clone(), self.parts.clone(), count)
    }

    /// Returns who holds each member and who waits for it. A request for any of them waits in the queue of each.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// # let locks = leasehold::LockManager::connect("memory:").await?;
    /// let gpus = locks.pool("gpu_lock", 0..2)?;
    /// let permit = gpus.acquire().owner("tts-worker-3").await?;
    /// for member in gpus.status().await? {
    ///     match member.lock.holder {
    ///         Some(holder) => println!("GPU {}: {}, {} wait", member.index, holder.owner, member.lock.waiters.len()),
    ///         None => println!("GPU {}: free", member.index),
    ///     }
    /// }
    /// # drop(permit); Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn status(&self) -> Result<Vec<PoolMember>, Error> {
        let looks = self.parts.members.iter().map(async |member| {
            let lock = self.locks.info(&member.name).await?;
            Ok(PoolMember { index: member.index, lock })
        });
        try_join_all(looks).await
    }

    fn engine(&self) -> &Arc<EngineHandle> {
        self.locks.engine()
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("name", self.name()).field("members", &self.indices()).finish_non_exhaustive()
    }
}
