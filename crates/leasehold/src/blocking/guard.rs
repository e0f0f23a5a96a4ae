use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::background::Background;
use crate::error::Error;
use crate::facts::{Fence, HolderId, LockName};
use crate::loss::LossReason;

/// Holds a lock. Dropping it gives the lock back, and waits until that is done, so that a program which
/// ends then leaves nothing behind; [`release`](Self::release) also tells how it went.
///
/// While it lives the lease is renewed in the background (unless that was switched off). Should it be
/// lost all the same, [`is_valid`](Self::is_valid) is false from that moment on, and the work must
/// stop: somebody else may hold the lock soon.
///
/// ```
/// # fn main() -> Result<(), leasehold::Error> {
/// # let locks = leasehold::blocking::LockManager::connect("memory:")?;
/// let guard = locks.lock("nightly-report").acquire()?;
/// for part in 0..10 {
///     if !guard.is_valid() {
///         break; // somebody else may be at it by now
///     }
///     println!("part {part} under fence {}", guard.fence());
/// }
/// # Ok(()) }
/// ```
#[must_use = "dropping the guard gives the lock up"]
pub struct Guard {
    /// There until it is released.
    guard: Option<crate::Guard>,
    background: Arc<Background>,
}

impl Guard {
    pub(super) fn new(guard: crate::Guard, background: Arc<Background>) -> Self {
        Self { guard: Some(guard), background }
    }

    /// The lock.
    pub fn name(&self) -> &LockName {
        self.held().name()
    }

    /// This holder's public id.
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

    /// Whether the lease is proven at this moment. Never in a forked child: the lease is the parent's.
    pub fn is_valid(&self) -> bool {
        !self.background.is_forked() && self.held().is_valid()
    }

    /// `false`: the store was unreachable and the policy is to go on without a lock. Somebody else
    /// may be at work too.
    pub fn is_protected(&self) -> bool {
        self.held().is_protected()
    }

    /// How long the lease is still proven.
    pub fn remaining(&self) -> Duration {
        if self.background.is_forked() { Duration::ZERO } else { self.held().remaining() }
    }

    /// Why the lease was lost, if it was.
    pub fn loss(&self) -> Option<LossReason> {
        if self.background.is_forked() { None } else { self.held().loss() }
    }

    /// Waits until the lease is lost, at most so long: for a thread that stops the work then.
    ///
    /// # Errors
    /// [`Error::InsideRuntime`].
    pub fn lost_within(&self, wait: Duration) -> Result<Option<LossReason>, Error> {
        self.background.ask(async |_| Ok(tokio::time::timeout(wait, self.held().lost()).await.ok()))
    }

    /// Waits until somebody asks this holder to come to an end soon, at most so long, and says why.
    /// The lease stays valid.
    ///
    /// # Errors
    /// [`Error::InsideRuntime`].
    pub fn asked_to_finish_within(&self, wait: Duration) -> Result<Option<String>, Error> {
        self.background.ask(async |_| Ok(tokio::time::timeout(wait, self.held().asked_to_finish()).await.ok()))
    }

    /// Prolongs the lease to `ttl` from now, and keeps renewing to that. It never shortens the
    /// present lease.
    ///
    /// # Errors
    /// [`Error::Lost`] when the lease is over, [`Error::Store`] when the store did not answer (the
    /// lease is as valid as before), [`Error::Invalid`] for a ttl out of bounds.
    pub fn extend(&self, ttl: Duration) -> Result<(), Error> {
        self.background.ask(|_| self.held().extend(ttl))
    }

    /// Gives the lock back. `true`: it was ours until now. `false`: it was not ours any more, and
    /// nothing was touched.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer; the release goes on in the background, and
    /// if everything fails, in the journal. [`Error::InsideRuntime`]: it goes on in the background.
    pub fn release(mut self) -> Result<bool, Error> {
        // What may not wait drops the guard, which does the rest.
        self.background.may_wait()?;
        let guard = self.guard.take().expect("held until it is released");
        self.background.ask(|_| guard.release())
    }

    fn held(&self) -> &crate::Guard {
        self.guard.as_ref().expect("held until it is released")
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Some(guard) = self.guard.take() else { return };
        if self.background.is_forked() {
            // The lease is the parent's, and so is everything that would give it back.
            std::mem::forget(guard);
            return;
        }
        match self.background.may_wait() {
            Ok(()) => {
                if let Err(error) = self.background.ask(|_| guard.release()) {
                    tracing::warn!(error = %format_args!("{error:#}"), "the lock is released in the background");
                }
            }
            // Inside a runtime nobody waits: in the background, as an async guard does it.
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
