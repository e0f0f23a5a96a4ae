use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::background::Background;
use crate::error::Error;
use crate::facts::{Fence, HolderId, LockName};
use crate::loss::LossReason;

/// Holds a lock. Dropping it releases the lock and waits for that, so that a program that ends then leaves no lock behind.
/// [`release`](Self::release) also reports the result.
///
/// The lease is renewed in the background unless renewal is switched off. When the lease is lost,
/// [`is_valid`](Self::is_valid) is false from that moment on. The work must stop, because another holder may get the lock.
///
/// ```
/// # fn main() -> Result<(), leasehold::Error> {
/// # let locks = leasehold::blocking::LockManager::connect("memory:")?;
/// let guard = locks.lock("nightly-report").acquire()?;
/// for part in 0..10 {
///     if !guard.is_valid() {
///         break; // another holder may have the lock
///     }
///     println!("part {part} under fence {}", guard.fence());
/// }
/// # Ok(()) }
/// ```
#[must_use = "dropping the guard releases the lock"]
pub struct Guard {
    /// `None` only while it is released.
    guard: Option<crate::Guard>,
    background: Arc<Background>,
}

impl Guard {
    pub(super) fn new(guard: crate::Guard, background: Arc<Background>) -> Self {
        Self { guard: Some(guard), background }
    }

    /// Returns the name of the lock.
    pub fn name(&self) -> &LockName {
        self.held().name()
    }

    /// Returns the holder's public id.
    pub fn holder_id(&self) -> HolderId {
        self.held().holder_id()
    }

    /// Returns the fence of this grant: higher than that of every earlier grant of this name. A guard that is unfenced or
    /// unprotected returns [`Fence::NONE`]; see [`leasehold::Guard::fence`](crate::Guard::fence).
    pub fn fence(&self) -> Fence {
        self.held().fence()
    }

    /// Returns the fence of this grant, or `None` when the guard is unfenced or unprotected.
    pub fn try_fence(&self) -> Option<Fence> {
        self.held().try_fence()
    }

    /// Returns whether the lease is proven at this moment. It is always `false` in a forked child: the lease belongs to the
    /// parent.
    pub fn is_valid(&self) -> bool {
        !self.background.is_forked() && self.held().is_valid()
    }

    /// Returns `false` when the store was unreachable and the options allow work without a lock. Other processes may do the same
    /// work.
    pub fn is_protected(&self) -> bool {
        self.held().is_protected()
    }

    /// Returns for how long the lease is still proven.
    pub fn remaining(&self) -> Duration {
        if self.background.is_forked() { Duration::ZERO } else { self.held().remaining() }
    }

    /// Returns why the lease was lost, if it was.
    pub fn loss(&self) -> Option<LossReason> {
        if self.background.is_forked() { None } else { self.held().loss() }
    }

    /// Waits for at most `wait` until the lease is lost, and returns the reason. Use it in a thread that stops the work.
    ///
    /// # Errors
    /// [`Error::InsideRuntime`].
    pub fn lost_within(&self, wait: Duration) -> Result<Option<LossReason>, Error> {
        self.background.ask(async |_| Ok(tokio::time::timeout(wait, self.held().lost()).await.ok()))
    }

    /// Waits for at most `wait` until the holder is asked to finish soon, and returns the reason. The lease stays valid.
    ///
    /// # Errors
    /// [`Error::InsideRuntime`].
    pub fn asked_to_finish_within(&self, wait: Duration) -> Result<Option<String>, Error> {
        self.background.ask(async |_| Ok(tokio::time::timeout(wait, self.held().asked_to_finish()).await.ok()))
    }

    /// Extends the lease to `ttl` from now; later renewals use the same ttl. It never shortens the lease.
    ///
    /// # Errors
    /// [`Error::Lost`] when the lease has ended; [`Error::Store`] when the store did not answer (the lease is as valid as
    /// before); [`Error::Invalid`] for a ttl out of bounds.
    pub fn extend(&self, ttl: Duration) -> Result<(), Error> {
        self.background.ask(|_| self.held().extend(ttl))
    }

    /// Releases the lock. Returns `true` when the lock was still held, and `false` when the lease had already ended; then
    /// nothing was changed.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer; [`Error::InsideRuntime`]. In both cases the release continues in the
    /// background, and in the journal if all attempts fail.
    pub fn release(mut self) -> Result<bool, Error> {
        // If this thread must not wait, the guard is dropped and released in the background.
        self.background.may_wait()?;
        let guard = self.guard.take().expect("present until it is released");
        self.background.ask(|_| guard.release())
    }

    fn held(&self) -> &crate::Guard {
        self.guard.as_ref().expect("present until it is released")
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Some(guard) = self.guard.take() else { return };
        if self.background.is_forked() {
            // The lease and the connection belong to the parent.
            std::mem::forget(guard);
            return;
        }
        match self.background.may_wait() {
            Ok(()) => {
                if let Err(error) = self.background.ask(|_| guard.release()) {
                    tracing::warn!(error = %format_args!("{error:#}"), "the lock is released in the background");
                }
            }
            // Inside a runtime: an async guard releases in the background.
            Err(_) => drop(guard),
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("name", self.name())
            .field("holder", &self.holder_id())
            .field("fence", &self.try_fence())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}
