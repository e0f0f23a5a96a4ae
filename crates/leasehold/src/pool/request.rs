use std::future::IntoFuture;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;

use super::{Permit, Permits};
use crate::engine::EngineHandle;
use crate::engine::guard::Guard;
use crate::engine::pooling::{self, PoolParts};
use crate::error::Error;
use crate::facts::Invalid;
use crate::lease::Terms;
use crate::lease::terms::setters;
use crate::scope;

/// A request for members of a pool, read like a sentence and sent by awaiting it: for one
/// [`Permit`], or for several [`Permits`].
///
/// ```
/// # use std::time::Duration;
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// # let locks = leasehold::LockManager::connect("memory:").await?;
/// let gpus = locks.pool("gpu_lock", 0..8)?;
/// let pair = gpus.any(2).ttl(Duration::from_secs(300)).wait_up_to(Duration::from_secs(60)).await?;
/// # drop(pair); Ok(()) }
/// ```
///
/// A request always fails when the store cannot be reached, also where the manager lets the work of
/// locks go on: it would be unknown which member that is.
#[must_use = "a request does nothing until it is awaited"]
pub struct PoolRequest<T> {
    engine: Arc<EngineHandle>,
    terms: Terms,
    parts: Arc<PoolParts>,
    count: usize,
    gives: PhantomData<fn() -> T>,
}

impl<T> PoolRequest<T> {
    pub(super) fn new(engine: Arc<EngineHandle>, parts: Arc<PoolParts>, count: usize) -> Self {
        Self { engine, terms: Terms::new(), parts, count, gives: PhantomData }
    }

    setters!(ttl, wait_up_to, no_wait, owner, owned_by, renew, max_hold, retry_every, terms);

    pub(crate) fn terms_mut(&mut self) -> &mut Terms {
        &mut self.terms
    }

    async fn send(mut self) -> Result<Vec<Permit>, Error> {
        let members = self.parts.members.len();
        if self.count == 0 || self.count > members {
            return Err(Error::Invalid(Invalid::Setting {
                setting: "pool",
                given: self.parts.name.to_string(),
                problem: format!("has {members} members: ask for 1 to {members} of them, not {}", self.count),
            }));
        }
        self.terms.require_protection();
        let wish = self.terms.wish(self.parts.name.clone(), &self.engine.core.options)?;
        let taken = pooling::acquire(&self.engine, &self.parts, self.count, wish).await?;
        Ok(taken.into_iter().map(|taken| Permit::new(&self.parts, taken)).collect())
    }
}

impl<T> PoolRequest<T>
where
    Self: IntoFuture<Output = Result<T, Error>>,
{
    /// Sends the request, and returns `None` when not enough members are free and the time to wait is over.
    ///
    /// # Errors
    /// As awaiting the request, but for [`Error::PoolBusy`].
    pub async fn optional(self) -> Result<Option<T>, Error> {
        match self.await {
            Ok(given) => Ok(Some(given)),
            Err(Error::PoolBusy { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl PoolRequest<Permit> {
    /// Runs work with a member, and releases the member afterwards in any case. When the lease is lost, the work is
    /// cancelled with [`Error::Lost`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// # let locks = leasehold::LockManager::connect("memory:").await?;
    /// let gpus = locks.pool("gpu_lock", 0..8)?;
    /// let index = gpus.acquire().run(async |gpu| gpu.index()).await?;
    /// assert_eq!(index, 0);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Whatever kept the member from being acquired, or [`Error::Lost`]. A release that fails does not hide
    /// the work's result: it goes on in the background.
    ///
    /// # Cancel safety
    /// Dropped, the work is dropped first and the member is released in the background.
    pub async fn run<R>(self, work: impl AsyncFnOnce(&Permit) -> R) -> Result<R, Error> {
        let permit = self.await?;
        let done = scope::run(&[&permit], work(&permit)).await;
        scope::log_release(permit.release().await);
        done
    }
}

impl PoolRequest<Permits> {
    /// Runs work with several members; cancelled, with [`Error::Lost`], when any of them is lost. See
    /// [`PoolRequest::<Permit>::run`].
    ///
    /// # Errors
    /// Whatever kept the members from being acquired, or [`Error::Lost`].
    ///
    /// # Cancel safety
    /// Dropped, the work is dropped first and the members are released in the background.
    pub async fn run<R>(self, work: impl AsyncFnOnce(&Permits) -> R) -> Result<R, Error> {
        let permits = self.await?;
        let guards: Vec<&Guard> = permits.iter().map(|permit| &**permit).collect();
        let done = scope::run(&guards, work(&permits)).await;
        scope::log_release(permits.release().await);
        done
    }
}

type RequestFuture<T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send>>;

impl IntoFuture for PoolRequest<Permit> {
    type Output = Result<Permit, Error>;
    type IntoFuture = RequestFuture<Permit>;

    /// Sends the request.
    ///
    /// # Cancel safety
    /// Dropped at any point, it keeps nothing: what the store may have granted is released in the background.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { Ok(self.send().await?.swap_remove(0)) })
    }
}

impl IntoFuture for PoolRequest<Permits> {
    type Output = Result<Permits, Error>;
    type IntoFuture = RequestFuture<Permits>;

    /// Sends the request.
    ///
    /// # Cancel safety
    /// Dropped at any point, it keeps nothing: what the store may have granted is released in the background.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { Ok(Permits::new(self.send().await?)) })
    }
}
