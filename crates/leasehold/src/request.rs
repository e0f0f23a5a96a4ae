use std::future::IntoFuture;
use std::pin::Pin;
use std::sync::Arc;

use crate::engine::guard::Guard;
use crate::engine::wish::{Wait, Wish};
use crate::engine::{Core, EngineHandle, acquiring, by_token};
use crate::error::Error;
use crate::facts::{Invalid, LockName, Token};
use crate::lease::terms::setters;
use crate::lease::{Lease, Terms};
use crate::scope::{Entered, Entry, OnLoss};

/// A request for a lock, read like a sentence and sent by awaiting it.
///
/// ```
/// # use std::time::Duration;
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// let locks = leasehold::LockManager::connect("memory:").await?;
/// let guard = locks.lock("billing/invoice-42").ttl(Duration::from_secs(10)).wait_up_to(Duration::from_secs(5)).await?;
/// # drop(guard); Ok(()) }
/// ```
#[must_use = "a request does nothing until it is awaited"]
#[derive(Clone)]
pub struct LockRequest {
    engine: Arc<EngineHandle>,
    name: Result<LockName, Invalid>,
    terms: Terms,
}

impl LockRequest {
    pub(crate) fn new(engine: Arc<EngineHandle>, name: Result<LockName, Invalid>) -> Self {
        // A name that has no key is refused here, like one that is malformed.
        let name = name.and_then(|name| engine.core.options.keys.check(&name).map(|()| name));
        Self { engine, name, terms: Terms::new() }
    }

    setters!(ttl, wait_up_to, no_wait, owner, owned_by, renew, max_hold, unfenced, retry_every, on_unavailable, terms,);

    pub(crate) fn terms_mut(&mut self) -> &mut Terms {
        &mut self.terms
    }

    /// Requires a fence and a store that answers.
    pub(crate) fn protected(mut self) -> Self {
        self.terms.require_protection();
        self
    }

    /// Acquires the lock under a token that the caller chose, without a guard: as a [`Lease`], which belongs to no process.
    ///
    /// A second request with the same token returns the same lease and fence, with its ttl restarted. So a caller that lost the
    /// answer asks again, and does not block itself. For the same reason nothing is undone when the call fails or is
    /// dropped: what it may have taken is returned by asking again, or ends by its ttl.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// # let locks = leasehold::LockManager::connect("memory:").await?;
    /// let token = leasehold::lease::Token::random();
    /// let lease = locks.lock("deploy").no_wait().under_token(&token).await?;
    /// let again = locks.lock("deploy").no_wait().under_token(&token).await?;
    /// assert_eq!(again.fence(), lease.fence(), "the same lease");
    /// assert!(lease.release().await?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As awaiting the request; [`Error::Lost`] when the lease of this token was revoked.
    ///
    /// # Cancel safety
    /// Dropped before the answer, the lock may have been taken or not.
    pub async fn under_token(self, token: &Token) -> Result<Lease, Error> {
        let (engine, mut wish) = self.into_wish()?;
        // It belongs to no process, so none renews it.
        wish.renew_every = None;
        let name = wish.name.clone();
        let fence = by_token::acquire(&engine, wish, token).await?;
        Ok(Lease::new(engine, name, token.clone(), fence))
    }

    /// Sends the request, and returns `None` when the lock is held and the time to wait is over.
    ///
    /// # Errors
    /// As awaiting the request, but for [`Error::NotAcquired`].
    pub async fn optional(self) -> Result<Option<Guard>, Error> {
        match self.await {
            Ok(guard) => Ok(Some(guard)),
            Err(Error::NotAcquired { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Runs work under the lock, and releases the lock afterwards in any case. When the lease is lost, the work is cancelled
    /// with [`Error::Lost`].
    ///
    /// # Errors
    /// Whatever kept the lock from being acquired, or [`Error::Lost`]. A release that fails does not
    /// hide the work's result: it goes on in the background.
    ///
    /// # Cancel safety
    /// Dropped, the work is dropped first and the lock is released in the background.
    pub async fn run<T>(self, work: impl AsyncFnOnce(&Guard) -> T) -> Result<T, Error> {
        self.enter(Entry::Once, work).await
    }

    /// As [`run`](Self::run), but a task that holds this lock already, by `run`, `run_reentrant` or
    /// `#[lock]`, enters again instead of waiting for itself. The lock is released when the first
    /// that entered leaves. The ttl and all other terms of a request count only for the first.
    ///
    /// Holding is a matter of the task: what it awaits is inside, what it spawns is not.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// # let locks = leasehold::LockManager::connect("memory:").await?;
    /// let again = || locks.lock("order:42").no_wait().run_reentrant(async |guard| guard.fence());
    /// let (outer, inner) = locks.with_lock("order:42", async |guard| (guard.fence(), again().await)).await?;
    /// assert_eq!(inner?, outer, "the same grant");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`run`](Self::run).
    ///
    /// # Cancel safety
    /// As [`run`](Self::run).
    pub async fn run_reentrant<T>(self, work: impl AsyncFnOnce(&Guard) -> T) -> Result<T, Error> {
        self.enter(Entry::Again, work).await
    }

    async fn enter<T>(self, entry: Entry, work: impl AsyncFnOnce(&Guard) -> T) -> Result<T, Error> {
        let entered = Entered::by(self, entry).await?;
        let done = entered.work(OnLoss::Cancel, work(entered.guard())).await;
        entered.leave().await;
        done
    }

    /// Returns the manager and the name of the requested lock.
    pub(crate) fn of(&self) -> Result<(&Arc<Core>, &LockName), Error> {
        match &self.name {
            Ok(name) => Ok((&self.engine.core, name)),
            Err(invalid) => Err(invalid.clone().into()),
        }
    }

    /// Returns how long it waits.
    pub(crate) fn wait(&self) -> Wait {
        self.terms.wait()
    }

    /// Checks the request, and adds the defaults of its manager.
    pub(crate) fn into_wish(self) -> Result<(Arc<EngineHandle>, Wish), Invalid> {
        let wish = self.terms.wish(self.name?, &self.engine.core.options)?;
        Ok((self.engine, wish))
    }
}

impl IntoFuture for LockRequest {
    type Output = Result<Guard, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    /// Sends the request.
    ///
    /// # Cancel safety
    /// Dropped at any point, it keeps no lock: what the store may have granted is released in the background.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let (engine, wish) = self.into_wish()?;
            acquiring::acquire(&engine, wish).await
        })
    }
}
