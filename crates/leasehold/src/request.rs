use std::future::IntoFuture;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::acquiring::{self, Wait, Wish};
use crate::engine::{Alive, Core, by_token};
use crate::error::Error;
use crate::facts::{Fence, Invalid, LockName, Owner, Token, Ttl};
use crate::guard::Guard;
use crate::options::OnUnavailable;
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
    alive: Arc<Alive>,
    wish: Result<Wish, Invalid>,
    renew: bool,
}

impl LockRequest {
    pub(crate) fn new(alive: Arc<Alive>, name: Result<LockName, Invalid>) -> Self {
        let options = &alive.0.options;
        // A name that has no key is refused here, like one that is malformed.
        let name = name.and_then(|name| options.keys.check(&name).map(|()| name));
        let wish = name.map(|name| Wish {
            name,
            ttl: options.ttl,
            owner: options.owner.clone(),
            fenced: true,
            renew_every: None,
            max_hold: None,
            wait: Wait::Forever,
            retry_every: None,
            on_unavailable: options.on_unavailable,
        });
        Self { alive, wish, renew: true }
    }

    /// How long the store keeps the lease when nobody renews it. 30 s unless the manager was told
    /// otherwise.
    pub fn ttl(self, ttl: Duration) -> Self {
        self.with(|wish| {
            wish.ttl = Ttl::new(ttl)?;
            Ok(())
        })
    }

    /// Waits at most so long, then answers [`Error::NotAcquired`]. Without this it waits without
    /// limit.
    pub fn wait_up_to(self, wait: Duration) -> Self {
        self.with(|wish| {
            wish.wait = if wait.is_zero() { Wait::Not } else { Wait::UpTo(wait) };
            Ok(())
        })
    }

    /// Does not wait: [`Error::NotAcquired`] at once when somebody else holds the lock.
    pub fn no_wait(self) -> Self {
        self.wait_up_to(Duration::ZERO)
    }

    /// What people read who ask for the holder: a task name. Host and process id are added.
    pub fn owner(self, task: impl AsRef<str>) -> Self {
        self.with(|wish| {
            wish.owner = Owner::named(task)?;
            Ok(())
        })
    }

    /// The same for somebody else than this process: whom it asks for.
    pub fn owned_by(self, owner: Owner) -> Self {
        self.with(|wish| {
            wish.owner = owner;
            Ok(())
        })
    }

    /// Whether the lease is renewed for as long as the guard lives (the default), or ends after its
    /// ttl.
    pub fn renew(mut self, renew: bool) -> Self {
        self.renew = renew;
        self
    }

    /// The longest time the lock may be held, renewals included: after that it counts as lost.
    pub fn max_hold(self, hold: Duration) -> Self {
        self.with(|wish| {
            wish.max_hold = Some(hold);
            Ok(())
        })
    }

    /// Without a fence: a little cheaper, for work whose result nobody could check a fence against.
    pub fn unfenced(self) -> Self {
        self.with(|wish| {
            wish.fenced = false;
            Ok(())
        })
    }

    /// The pause between two looks where a waiter has to poll. Without this it grows from the
    /// manager's `poll_interval` to its `max_poll_interval`.
    pub fn retry_every(self, pause: Duration) -> Self {
        self.with(|wish| {
            wish.retry_every = Some(pause);
            Ok(())
        })
    }

    /// What happens when the store cannot be reached. The manager's own rule unless said.
    pub fn on_unavailable(self, policy: OnUnavailable) -> Self {
        self.with(|wish| {
            wish.on_unavailable = policy;
            Ok(())
        })
    }

    /// Takes the lock under a token of the caller's choice, without a guard: a lease that belongs to no process,
    /// which its token alone renews and releases
    /// ([`renew_token`](crate::LockManager::renew_token), [`release_token`](crate::LockManager::release_token)).
    ///
    /// Asked again with the same token, it answers with the same lease and fence, counted anew: so whoever
    /// lost the answer asks again, and does not block itself. For the same reason nothing is undone when the
    /// call fails or is dropped: what it may have taken is had by asking again, or ends by its ttl.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// # let locks = leasehold::LockManager::connect("memory:").await?;
    /// let token = leasehold::Token::random();
    /// let fence = locks.lock("deploy").no_wait().under_token(&token).await?;
    /// assert_eq!(locks.lock("deploy").no_wait().under_token(&token).await?, fence, "the same lease");
    /// assert!(locks.release_token("deploy", &token).await?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As awaiting the request; [`Error::Lost`] when the lease of this token was revoked.
    ///
    /// # Cancel safety
    /// Dropped before the answer, the lock may have been taken or not.
    pub async fn under_token(self, token: &Token) -> Result<Option<Fence>, Error> {
        by_token::acquire(&self.alive, self.wish?, token).await
    }

    /// The guard, or `None` when somebody else holds the lock (and the time to wait is over).
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

    /// Runs work under the lock: released afterwards in any case; cancelled, with [`Error::Lost`],
    /// when the lease is lost.
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
    /// `#[lock]`, enters again instead of waiting for itself. The lock is given back when the first
    /// that entered leaves; the ttl and whatever else this request says counts only for the first.
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

    /// Which lock of which manager this asks for.
    pub(crate) fn of(&self) -> Result<(&Arc<Core>, &LockName), Error> {
        match &self.wish {
            Ok(wish) => Ok((&self.alive.0, &wish.name)),
            Err(invalid) => Err(invalid.clone().into()),
        }
    }

    /// What it asks for, checked.
    pub(crate) fn into_wish(self) -> Result<(Arc<Alive>, Wish), Invalid> {
        let mut wish = self.wish?;
        wish.renew_every = self.renew.then(|| self.alive.0.options.renew_every(wish.ttl));
        Ok((self.alive, wish))
    }

    fn with(mut self, change: impl FnOnce(&mut Wish) -> Result<(), Invalid>) -> Self {
        if let Ok(wish) = &mut self.wish
            && let Err(invalid) = change(wish)
        {
            self.wish = Err(invalid);
        }
        self
    }
}

impl IntoFuture for LockRequest {
    type Output = Result<Guard, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    /// Sends the request.
    ///
    /// # Cancel safety
    /// Dropped at any point, it keeps no lock: what the store may have granted is given back in the
    /// background.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let (alive, wish) = self.into_wish()?;
            acquiring::acquire(&alive, wish).await
        })
    }
}
