use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::client::renewal::{Record, Verdict};
use crate::clock::Moment;
use crate::engine::lease_cell::{LeaseCell, NewLease};
use crate::engine::{Alive, by_token};
use crate::error::{Error, Operation};
use crate::event::LossReason;
use crate::facts::{Fence, HolderId, LockName, Owner, Token, Ttl};
use crate::lease::{self, Plan};
use crate::store::{Grant, Renewed, StoreErrorKind};

/// Holds a lock. Dropping it gives the lock up, in the background; [`Guard::release`] waits until
/// that is done.
///
/// While it lives the lease is renewed (unless that was switched off). Should the lease be lost all
/// the same, [`Guard::lost`] tells at once: the work must stop then, because somebody else may hold
/// the lock soon.
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
/// # async fn pay(_: Option<leasehold::Fence>) {}
/// ```
#[must_use = "dropping the guard gives the lock up"]
pub struct Guard {
    held: Option<Tended>,
}

struct Tended {
    alive: Arc<Alive>,
    cell: Arc<LeaseCell>,
}

impl Guard {
    pub(crate) fn begin(alive: Arc<Alive>, lease: NewLease, grant: &Grant, record: Record) -> Self {
        let cell = Arc::new(LeaseCell::new(lease, grant, record));
        alive.0.leases.insert(&alive.0, &cell);
        // A shutdown that told every holder may have passed while this grant was on its way.
        if alive.0.closing.is_cancelled() {
            alive.0.lose(&cell, LossReason::Shutdown);
        }
        Self { held: Some(Tended { alive, cell }) }
    }

    pub(crate) fn unprotected(alive: Arc<Alive>, cell: Arc<LeaseCell>) -> Self {
        Self { held: Some(Tended { alive, cell }) }
    }

    /// Since this process knows that it holds it.
    pub(crate) fn held_for(&self) -> Duration {
        self.cell().granted_at.until(Moment::now())
    }

    /// The lock.
    pub fn name(&self) -> &LockName {
        &self.cell().name
    }

    /// The secret that renews and releases it.
    pub fn token(&self) -> &Token {
        &self.cell().token
    }

    /// This holder's public id.
    pub fn holder_id(&self) -> HolderId {
        self.cell().token.holder_id()
    }

    /// Who holds it, for people.
    pub fn owner(&self) -> Owner {
        self.cell().state().owner.clone()
    }

    /// The fence of this grant: higher than that of every grant of this name before. `None` when it
    /// was asked for [`unfenced`](crate::LockRequest::unfenced), or is unprotected.
    pub fn fence(&self) -> Option<Fence> {
        self.cell().fence.filter(|_| self.cell().fenced)
    }

    /// Until when the lease is proven; every renewal moves it.
    pub fn valid_until(&self) -> Moment {
        self.cell().state().belief.valid_until()
    }

    /// Whether the lease is proven at this moment.
    pub fn is_valid(&self) -> bool {
        !self.cell().protected || self.cell().is_valid(Moment::now())
    }

    /// `false`: the store was unreachable and the policy is to go on without a lock. Somebody else
    /// may be at work too.
    pub fn is_protected(&self) -> bool {
        self.cell().protected
    }

    /// Waits until the lease is lost, and says why.
    ///
    /// # Cancel safety
    /// Cancel safe: the loss stays told.
    pub async fn lost(&self) -> LossReason {
        self.cell().wait_for(|state| state.lost).await
    }

    /// Why the lease was lost, if it was.
    pub fn loss(&self) -> Option<LossReason> {
        self.cell().state().lost
    }

    /// Is cancelled when the lease is lost: for work that already listens to such a token.
    pub fn lost_token(&self) -> CancellationToken {
        self.cell().lost_token()
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
        let Tended { alive, cell } = self.tended();
        let core = &alive.0;
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
        let Tended { alive, cell } = self.held.take().expect("a guard holds until it is released");
        alive.0.release(cell).await
    }

    /// Lets go of the guard and keeps the lease, which belongs to no process from then on: it is renewed no
    /// more, no death of ours ends it, and it ends by its ttl, counted from this call, unless whoever has its
    /// token renews or releases it. For handing a lock to another process.
    ///
    /// # Errors
    /// [`Error::Lost`] when the lease is over, [`Error::Store`] when the store did not answer; the lock
    /// is released in the background then.
    ///
    /// # Cancel safety
    /// Dropped before the answer, the lock is released in the background.
    pub async fn into_token(self) -> Result<Token, Error> {
        let token = self.token().clone();
        self.hand_to(&token).await?;
        Ok(token)
    }

    /// The same under another token.
    pub(crate) async fn hand_to(mut self, token: &Token) -> Result<(), Error> {
        let Tended { alive, cell } = self.held.take().expect("a guard holds until it is released");
        if cell.protected { by_token::hand_on(&alive.0, &cell, token).await } else { Ok(()) }
    }

    /// From now on held on these terms; the store is told with the next pass. For a lease that was taken
    /// on shorter ones.
    pub(crate) fn settle(&self, ttl: Ttl, renew_every: Option<Duration>, max_hold: Option<Duration>) {
        let Tended { alive, cell } = self.tended();
        let now = Moment::now();
        let mut state = cell.state();
        state.change_terms(ttl, Plan { every: renew_every, at_most_until: max_hold.map(|hold| now + hold) });
        state.renew_at = Some(now);
        drop(state);
        alive.0.leases.touch(cell);
    }

    /// How long the lease is still proven.
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
        if let Some(Tended { alive, cell }) = self.held.take() {
            alive.0.release_in_background(cell);
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("name", self.name())
            .field("holder", &self.holder_id())
            .field("fence", &self.fence())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}

impl crate::options::Options {
    /// A third of the ttl: two renewals can fail before the lease is in danger.
    pub(crate) fn renew_every(&self, ttl: Ttl) -> Duration {
        (ttl.duration() / 3).min(self.heartbeat).max(lease::drift(ttl.duration()))
    }
}
