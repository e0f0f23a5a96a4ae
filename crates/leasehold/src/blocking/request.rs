use std::sync::Arc;
use std::time::Duration;

use super::background::Background;
use super::guard::Guard;
use crate::error::Error;
use crate::options::OnUnavailable;

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

    /// How long the store keeps the lease when nobody renews it. 30 s unless the manager was told
    /// otherwise.
    pub fn ttl(self, ttl: Duration) -> Self {
        Self { request: self.request.ttl(ttl), ..self }
    }

    /// Waits at most so long, then answers [`Error::NotAcquired`]. Without this it waits without
    /// limit.
    pub fn wait_up_to(self, wait: Duration) -> Self {
        Self { request: self.request.wait_up_to(wait), ..self }
    }

    /// Does not wait: [`Error::NotAcquired`] at once when somebody else holds the lock.
    pub fn no_wait(self) -> Self {
        Self { request: self.request.no_wait(), ..self }
    }

    /// What people read who ask for the holder: a task name. Host and process id are added.
    pub fn owner(self, task: impl AsRef<str>) -> Self {
        Self { request: self.request.owner(task), ..self }
    }

    /// Whether the lease is renewed for as long as the guard lives (the default), or ends after its
    /// ttl.
    pub fn renew(self, renew: bool) -> Self {
        Self { request: self.request.renew(renew), ..self }
    }

    /// The longest time the lock may be held, renewals included: after that it counts as lost.
    pub fn max_hold(self, hold: Duration) -> Self {
        Self { request: self.request.max_hold(hold), ..self }
    }

    /// Without a fence: a little cheaper, for work whose result nobody could check a fence against.
    pub fn unfenced(self) -> Self {
        Self { request: self.request.unfenced(), ..self }
    }

    /// The pause between two looks where a waiter has to poll.
    pub fn retry_every(self, pause: Duration) -> Self {
        Self { request: self.request.retry_every(pause), ..self }
    }

    /// What happens when the store cannot be reached. The manager's own rule unless said.
    pub fn on_unavailable(self, policy: OnUnavailable) -> Self {
        Self { request: self.request.on_unavailable(policy), ..self }
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
