use std::fmt;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_all;
use tokio_util::sync::CancellationToken;

use super::held_lease::HeldLease;
use super::lease_cell::LeaseCell;
use super::{EngineHandle, hand_on};
use crate::client::renewal::Verdict;
use crate::clock::Moment;
use crate::error::Error;
use crate::facts::{Fence, HolderId, LockName, Owner, Token, Ttl};
use crate::lease::Lease;
use crate::lease::belief::Plan;
use crate::loss::LossReason;
use crate::store::{Operation, Renewed};

/// Holds a lock. Dropping it releases the lock in the background; [`Guard::release`] waits until that is done.
///
/// While it lives the lease is renewed, unless that was switched off. If the lease is lost all the same, [`Guard::lost`]
/// returns at once: the work must stop then, because another holder may have the lock soon.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// let locks = leasehold::LockManager::connect("memory:").await?;
/// let guard = locks.lock("order:42").await?;
/// tokio::select! {
///     why = guard.lost() => return Err(leasehold::Error::Lost { name: guard.name().clone(), why }),
///     () = pay(guard.fence()) => {}
/// }
/// guard.release().await?;
/// # Ok(()) }
/// # async fn pay(_: leasehold::Fence) {}
/// ```
#[must_use = "dropping the guard releases the lock"]
pub struct Guard {
    /// There until it is released or handed on.
    lease: Option<HeldLease>,
    engine: Arc<EngineHandle>,
}

impl Guard {
    pub(super) fn new(engine: Arc<EngineHandle>, lease: HeldLease) -> Self {
        Self { lease: Some(lease), engine }
    }

    /// How long this process has known that it holds the lock.
    pub(crate) fn held_for(&self) -> Duration {
        self.cell().granted_at.until(Moment::now())
    }

    /// Returns the lock.
    pub fn name(&self) -> &LockName {
        &self.cell().name
    }

    /// Returns the secret that renews and releases the lease.
    pub fn token(&self) -> &Token {
        &self.cell().token
    }

    /// Returns the public id of this holder.
    pub fn holder_id(&self) -> HolderId {
        self.cell().token.holder_id()
    }

    /// Returns the owner, for people.
    pub fn owner(&self) -> Owner {
        self.cell().state().owner.clone()
    }

    /// Returns the fence of this grant: higher than that of every earlier grant of this name.
    ///
    /// A guard that was requested [`unfenced`](crate::LockRequest::unfenced), or that is
    /// [unprotected](Self::is_protected), has none and returns [`Fence::NONE`], which a resource that checks fences
    /// refuses. It is a value and not a type of its own, because an outage decides at run time whether a guard is
    /// unprotected. [`try_fence`](Self::try_fence) tells the two apart.
    pub fn fence(&self) -> Fence {
        self.try_fence().unwrap_or(Fence::NONE)
    }

    /// Returns the fence of this grant, or `None` when the guard is unfenced or unprotected.
    pub fn try_fence(&self) -> Option<Fence> {
        self.cell().fence.filter(|_| self.cell().fenced)
    }

    /// Returns until when the lease is proven; every renewal moves it.
    pub fn valid_until(&self) -> Moment {
        self.cell().state().belief.valid_until()
    }

    /// Returns whether the lease is proven at this moment.
    pub fn is_valid(&self) -> bool {
        !self.cell().protected || self.cell().is_valid(Moment::now())
    }

    /// Returns whether the lock is held. `false`: the store was unreachable and the policy is to go on without a lock, so
    /// others may be at work too.
    pub fn is_protected(&self) -> bool {
        self.cell().protected
    }

    /// Waits until the lease is lost, and returns why.
    ///
    /// # Cancel safety
    /// Cancel safe: a later call returns the same loss.
    pub async fn lost(&self) -> LossReason {
        self.cell().wait_for(|state| state.lost).await
    }

    /// Returns why the lease was lost, if it was.
    pub fn loss(&self) -> Option<LossReason> {
        self.cell().state().lost
    }

    /// Returns a token that is cancelled when the lease is lost, for work that already listens to one.
    pub fn cancellation(&self) -> CancellationToken {
        self.cell().cancellation()
    }

    /// Waits until this holder is asked to finish soon, and returns the reason. The lease stays valid.
    ///
    /// # Cancel safety
    /// Cancel safe: a later call returns the same reason.
    pub async fn asked_to_finish(&self) -> String {
        self.cell().wait_for(|state| state.finish_reason.clone()).await
    }

    /// Prolongs the lease to `ttl` from now, and renews it to that from then on. It never shortens the lease.
    ///
    /// # Errors
    /// [`Error::Lost`] when the lease is over, [`Error::Store`] when the store did not answer (the
    /// lease is as valid as before), [`Error::Invalid`] for a ttl out of bounds.
    ///
    /// # Cancel safety
    /// Dropped before the answer, the lease may have been prolonged or not; both are safe.
    pub async fn extend(&self, ttl: Duration) -> Result<(), Error> {
        let ttl = Ttl::new(ttl)?;
        let (core, cell) = (&self.engine.core, self.cell());
        let lost = |why| Error::Lost { name: cell.name.clone(), why };
        if !cell.protected {
            return Ok(());
        }
        let sent = {
            let mut state = cell.state();
            if let Some(why) = state.lost {
                return Err(lost(why));
            }
            let every = state.plan.every.map(|_| core.options.renew_every(ttl));
            let plan = Plan { every, ..state.plan };
            state.change_terms(ttl, plan);
            state.request(true)
        };
        let (asked_at, answer) = core.renew(cell.renewal(&sent)).await;
        let verdict = cell.state().extended(Moment::now(), &sent, asked_at, &answer);
        if let Verdict::Lost(why) = verdict {
            self.engine.leases.lose(cell, why);
            return Err(lost(why));
        }
        self.engine.leases.touch(cell);
        match answer {
            Renewed::Unknown(error) => Err(core.store_error(Operation::Renew, &cell.name, error)),
            _ => Ok(()),
        }
    }

    /// Releases the lock. `true`: this guard held it until now. `false`: it did not hold it any more, and nothing was
    /// changed.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer; the release goes on in the background, and
    /// if everything fails, in the journal.
    ///
    /// # Cancel safety
    /// Dropped before the answer, the release goes on in the background.
    pub async fn release(mut self) -> Result<bool, Error> {
        self.give_up().release().await
    }

    /// Gives up the guard and keeps the lease, for handing a lock to another process. From then on the lease belongs to
    /// no process: nothing renews it, the death of this process does not end it, and it ends by its ttl, counted from
    /// this call, unless its token renews or releases it.
    ///
    /// # Errors
    /// [`Error::Lost`] when the lease is over, [`Error::Store`] when the store did not answer; the lock
    /// is released in the background then.
    ///
    /// # Cancel safety
    /// Dropped before the answer, the lock is released in the background.
    pub async fn detach(self) -> Result<Lease, Error> {
        let token = self.token().clone();
        let lease = Lease::new(self.engine.clone(), self.name().clone(), token.clone(), self.try_fence());
        self.hand_to(&token).await?;
        Ok(lease)
    }

    /// Makes the lease that of another token; see [`detach`](Self::detach).
    pub(crate) async fn hand_to(mut self, token: &Token) -> Result<(), Error> {
        let lease = self.lease.take().expect("a guard holds until it is released");
        if !lease.cell().protected {
            return Ok(());
        }
        let cell = lease.into_cell();
        hand_on::hand_on(&self.engine.core, &self.engine.leases, &cell, token).await
    }

    /// Changes the terms of a lease that was acquired on shorter ones. They are sent to the store with the next pass.
    pub(crate) fn settle(&self, ttl: Ttl, renew_every: Option<Duration>, max_hold: Option<Duration>) {
        let now = Moment::now();
        let mut state = self.cell().state();
        state.change_terms(ttl, Plan { every: renew_every, at_most_until: max_hold.map(|hold| now + hold) });
        state.renew_at = Some(now);
        drop(state);
        self.engine.leases.touch(self.cell());
    }

    /// Returns for how long the lease is still proven.
    pub fn remaining(&self) -> Duration {
        Moment::now().until(self.valid_until())
    }

    /// Shares what is known of the lease, without keeping it.
    pub(crate) fn share_cell(&self) -> Arc<LeaseCell> {
        self.cell().clone()
    }

    fn cell(&self) -> &Arc<LeaseCell> {
        self.lease.as_ref().expect("a guard holds until it is released").cell()
    }

    fn give_up(&mut self) -> HeldLease {
        let lease = self.lease.take().expect("a guard holds until it is released");
        if lease.cell().handed_over {
            self.engine.waiting.handed_on(&lease.cell().name);
        }
        lease
    }
}

/// Waits until one of these guards is lost, for ever when there are none. Returns its place among them, and why.
pub(crate) async fn first_lost(guards: &[&Guard]) -> (usize, LossReason) {
    match guards {
        [] => pending().await,
        [one] => (0, one.lost().await),
        many => {
            select_all(many.iter().enumerate().map(|(at, guard)| Box::pin(async move { (at, guard.lost().await) })))
                .await
                .0
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.lease.is_some() {
            drop(self.give_up());
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
