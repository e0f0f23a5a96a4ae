use std::sync::Arc;

use super::background::Background;
use super::guard::Guard;
use crate::error::Error;
use crate::lease::Terms;
use crate::lease::terms::setters;

/// A request for a lock, sent by [`acquire`](Self::acquire).
///
/// ```
/// # use std::time::Duration;
/// # fn main() -> Result<(), leasehold::Error> {
/// let locks = leasehold::blocking::LockManager::connect("memory:")?;
/// let guard = locks.lock("billing/invoice-42").ttl(Duration::from_secs(10)).no_wait().acquire()?;
/// # drop(guard); Ok(()) }
/// ```
#[must_use = "a request does nothing until `acquire` or `run` is called"]
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
    /// [`Error::NotAcquired`] when the lock is held and the wait is over; [`Error::Store`] when the store did not answer;
    /// [`Error::InsideRuntime`].
    pub fn acquire(self) -> Result<Guard, Error> {
        let Self { background, request } = self;
        let guard = background.ask(|_| request.into_future())?;
        Ok(Guard::new(guard, background))
    }

    /// Sends the request and returns `None` when the lock is held and the wait is over.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), except [`Error::NotAcquired`].
    pub fn optional(self) -> Result<Option<Guard>, Error> {
        match self.acquire() {
            Ok(guard) => Ok(Some(guard)),
            Err(Error::NotAcquired { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Runs work under the lock, in this thread. The lock is released afterwards, also after a panic.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire). [`Error::Lost`] when the lease was lost before the work ended: the work ran to its end,
    /// but without protection. A release that fails continues in the background and does not affect the result.
    pub fn run<T>(self, work: impl FnOnce(&Guard) -> T) -> Result<T, Error> {
        let guard = self.acquire()?;
        let done = work(&guard);
        match guard.loss() {
            Some(why) => Err(Error::Lost { name: guard.name().clone(), why }),
            None => Ok(done),
        }
    }
}
