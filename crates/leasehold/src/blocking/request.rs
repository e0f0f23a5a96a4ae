use std::sync::Arc;

use super::background::Background;
use super::guard::Guard;
use crate::error::Error;
use crate::lease::Terms;
use crate::lease::terms::setters;

/// A request for a lock, read like a sentence and sent by [`acquire`](Self::acquire).
///
/// ```
/// # use std::time::Duration;
/// # fn main() -> Result<(), leasehold::Error> {
/// let locks = leasehold::blocking::LockManager::connect("memory:")?;
/// let guard = locks.lock("billing/invoice-42").ttl(Duration::from_secs(10)).no_wait().acquire()?;
/// # drop(guard); Ok(()) }
/// ```
#[must_use = "a request does nothing until it is acquired"]
#[derive(Clone)]
pub struct LockRequest {
    background: Arc<Background>,
    request: crate::LockRequest,
}

impl LockRequest {
    pub(super) fn new(background: Arc<Background>, request: crate::LockRequest) -> Self {
        Self { background, request }
    }

    setters!(ttl, wait_up_to, no_wait, owner, owned_by, renew, max_hold, unfenced, retry_every, on_unavailable, terms,);

    fn terms_mut(&mut self) -> &mut Terms {
        self.request.terms_mut()
    }

    /// Sends the request and waits for the lock.
    ///
    /// # Errors
    /// [`Error::NotAcquired`] when somebody else holds it and the time to wait is over,
    /// [`Error::Store`] when the store did not answer, [`Error::InsideRuntime`].
    pub fn acquire(self) -> Result<Guard, Error> {
        let Self { background, request } = self;
        let guard = background.ask(|_| request.into_future())?;
        Ok(Guard::new(guard, background))
    }

    /// The guard, or `None` when somebody else holds the lock (and the time to wait is over).
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), but for [`Error::NotAcquired`].
    pub fn optional(self) -> Result<Option<Guard>, Error> {
        match self.acquire() {
            Ok(guard) => Ok(Some(guard)),
            Err(Error::NotAcquired { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Runs work under the lock, in this thread: released afterwards in any case, also by a panic.
    ///
    /// # Errors
    /// Whatever kept the lock from being acquired. [`Error::Lost`] when the lease was lost before the
    /// work was done: it ran to its end, as nobody can stop a thread, but without protection. A
    /// release that fails does not hide the work's result: it goes on in the background.
    pub fn run<T>(self, work: impl FnOnce(&Guard) -> T) -> Result<T, Error> {
        let guard = self.acquire()?;
        let done = work(&guard);
        match guard.loss() {
            Some(why) => Err(Error::Lost { name: guard.name().clone(), why }),
            None => Ok(done),
        }
    }
}
