use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::client::renewal::{Record, Verdict};
use crate::clock::Moment;
use crate::engine::lease_cell::{LeaseCell, NewLease};
use crate::engine::{EngineHandle, by_token};
use crate::error::Error;
use crate::facts::{Fence, HolderId, LockName, Owner, Token, Ttl};
use crate::lease::Lease;
use crate::lease::belief::{self, Plan};
use crate::loss::LossReason;
use crate::store::{Grant, Operation, Renewed, StoreErrorKind};

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
#[must_use = "dropping the guard gives the lock up"]
pub struct Guard {
    held: Option<Tended>,
}

struct Tended {
    engine: Arc<EngineHandle>,
    cell: Arc<LeaseCell>,
}

impl Guard {
    pub(crate) fn begin(engine: Arc<EngineHandle>, lease: NewLease, grant: &Grant, record: Record) -> Self {
        let cell = Arc::new(LeaseCell::new(lease, grant, record));
        engine.core.leases.insert(&engine.core, &cell);
        // A shutdown that told every holder may have passed while this grant was on its way.
        if engine.core.closing.is_cancelled() {
            engine.core.lose(&cell, LossReason::Shutdown);
        }
        Self { held: Some(Tended { engine, cell }) }
    }

    pub(crate) fn unprotected(engine: Arc<EngineHandle>, cell: Arc<LeaseCell>) -> Self {
        Self { held: Some(Tended { engine, cell }) }
    }

    /// Since this process knows that it holds it.
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

    /// Waits until somebody asks this holder to come to an end soon, and says why. The lease stays
    /// valid.
    ///
    /// # Cancel safety
    /// Cancel safe: the request stays told.
    pub async fn asked_to_finish(&self) -> String {
        self.cell().wait_for(|state| state.finish_reason.clone()).await
    }

    /// Prolongs the lease to `ttl` from now, and keeps renewing to that. It never shortens the
    /// present lease.
    ///
    /// # Errors
    /// [`Error::Lost`] when the lease is over, [`Error::Store`] when the store did not answer (the
    /// lease is as valid as before), [`Error::Invalid`] for a ttl out of bounds.
    ///
    /// # Cancel safety
    /// Dropped before the answer, the lease may have been prolonged or not; both are safe.
    pub async fn extend(&self, ttl: Duration) -> Result<(), Error> {
        let ttl = Ttl::new(ttl)?;
        let Tended { engine, cell } = self.tended();
        let core = &engine.core;
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
        let asked_at = Moment::now();
        let renewal = cell.renewal(&sent);
        let answer = core.within(async { Ok(core.store.renew(&[renewal]).await.pop()) }).await;
        let answer = match answer {
            Ok(answer) => answer.unwrap_or(Renewed::Unknown(StoreErrorKind::Other.into())),
            Err(error) => Renewed::Unknown(error),
        };
        let verdict = cell.state().extended(Moment::now(), &sent, asked_at, &answer);
        if let Verdict::Lost(why) = verdict {
            core.lose(cell, why);
            return Err(lost(why));
        }
        core.leases.touch(cell);
        match answer {
            Renewed::Unknown(error) => Err(core.store_error(Operation::Renew, &cell.name, error)),
            _ => Ok(()),
        }
    }

    /// Gives the lock back. `true`: it was ours until now. `false`: it was not ours any more, and
    /// nothing was touched.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer; the release goes on in the background, and
    /// if everything fails, in the journal.
    ///
    /// # Cancel safety
    /// Dropped before the answer, the release goes on in the background.
    pub async fn release(mut self) -> Result<bool, Error> {
        let Tended { engine, cell } = self.held.take().expect("a guard holds until it is released");
        engine.core.release(cell).await
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
        let lease = Lease::new(self.tended().engine.clone(), self.name().clone(), token.clone(), self.try_fence());
        self.hand_to(&token).await?;
        Ok(lease)
    }

    /// Makes the lease that of another token; see [`detach`](Self::detach).
    pub(crate) async fn hand_to(mut self, token: &Token) -> Result<(), Error> {
        let Tended { engine, cell } = self.held.take().expect("a guard holds until it is released");
        if cell.protected { by_token::hand_on(&engine.core, &cell, token).await } else { Ok(()) }
    }

    /// From now on held on these terms; the store is told with the next pass. For a lease that was taken
    /// on shorter ones.
    pub(crate) fn settle(&self, ttl: Ttl, renew_every: Option<Duration>, max_hold: Option<Duration>) {
        let Tended { engine, cell } = self.tended();
        let now = Moment::now();
        let mut state = cell.state();
        state.change_terms(ttl, Plan { every: renew_every, at_most_until: max_hold.map(|hold| now + hold) });
        state.renew_at = Some(now);
        drop(state);
        engine.core.leases.touch(cell);
    }

    /// Returns for how long the lease is still proven.
    pub fn remaining(&self) -> Duration {
        Moment::now().until(self.valid_until())
    }

    fn tended(&self) -> &Tended {
        self.held.as_ref().expect("a guard holds until it is released")
    }

    /// For whoever may know of the lease without keeping it.
    pub(crate) fn share_cell(&self) -> Arc<LeaseCell> {
        self.tended().cell.clone()
    }

    fn cell(&self) -> &LeaseCell {
        &self.tended().cell
    }
}

impl Drop for Guard {
    /// Hands the release to the background: `drop` cannot await, and blocking here could stall the
    /// very runtime that has to answer.
    fn drop(&mut self) {
        if let Some(Tended { engine, cell }) = self.held.take() {
            engine.core.release_in_background(cell);
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

impl crate::options::Options {
    /// A third of the ttl: two renewals can fail before the lease is in danger.
    pub(crate) fn renew_every(&self, ttl: Ttl) -> Duration {
        (ttl.duration() / 3).min(self.heartbeat).max(belief::drift(ttl.duration()))
    }
}
