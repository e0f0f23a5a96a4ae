//! Leader election: a lock whose holder leads, for as long as it can hold it, again and again.

use std::fmt::{self, Display};
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::engine::lease_cell::LeaseCell;
use crate::error::Error;
use crate::facts::{Fence, HolderId, LockName};
use crate::lease::terms::setters;
use crate::lease::{IntoLockName, Terms};
use crate::loss::LossReason;
use crate::manager::LockManager;
use crate::request::LockRequest;
use crate::scope::{Entered, Entry, OnLoss};
use crate::store::Holder;

/// The pause after a first term that came to nothing; each further one waits twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause: whoever fails for hours costs nobody anything, and is back soon when it is well.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// A candidate in an election, in which one of all candidates leads at a time; see [`LockManager::elect`].
///
/// When a leader dies, the next one leads after the [`ttl`](Self::ttl) at the latest, and on SQLite at once.
#[must_use = "a candidate does nothing until it is run"]
pub struct Election {
    locks: LockManager,
    /// What is asked for at the beginning of every term.
    request: LockRequest,
}

impl LockManager {
    /// Stands for election: of all that stand under one name, in all processes, one leads at a time.
    ///
    /// An election is a lock, and its leader the holder: `leasehold why` shows it and who is in line
    /// after it, `leasehold evict` takes the lead away.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// # let locks = leasehold::LockManager::connect("memory:").await?;
    /// let planned = locks.elect("scheduler").owner("node-7").run(async |term| {
    ///     // Only here, and only now. Everything written carries the fence of this term.
    ///     println!("leading, fence {}", term.fence());
    ///     // Anybody can ask who leads.
    ///     let leader = locks.elect("scheduler").leader().await?;
    ///     assert_eq!(leader.expect("somebody leads").owner.task(), "node-7");
    ///     Ok::<_, leasehold::Error>(17) // done: gives the lead up
    /// }).await?;
    /// assert_eq!(planned, 17);
    /// assert!(locks.elect("scheduler").leader().await?.is_none());
    /// # Ok(()) }
    /// ```
    pub fn elect<N>(&self, name: N) -> Election
    where
        N: IntoLockName,
    {
        // Two leaders are worse than none.
        let request = self.lock(name).protected();
        Election { locks: self.clone(), request }
    }
}

impl Election {
    setters!(ttl, owner, owned_by, max_hold, retry_every);

    fn terms_mut(&mut self) -> &mut Terms {
        self.request.terms_mut()
    }

    /// Waits to be elected, then runs the work for as long as the lead lasts:
    ///
    /// - `Ok` ends it: the lead is given up and `run` returns what the work gave.
    /// - `Err` gives the lead up as well, so that another one may do better; then, after a pause, it
    ///   stands again, at the end of the line. So does work whose lead was lost: it is cancelled at
    ///   once, before anybody else can lead.
    /// - While the store cannot be reached, it waits and stands again.
    ///
    /// Terms that fail soon after they began pause for longer each time (0.1 s to 30 s): work that
    /// cannot even begin does not take the lead ten times a second.
    ///
    /// Nobody leads unprotected: the manager's [`OnUnavailable::FailOpen`](crate::OnUnavailable::FailOpen) does not count here.
    ///
    /// The work is called anew for every term. An `async` closure borrows what it uses, so it is written
    /// without `move`, inside a task that owns that:
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let locks = leasehold::LockManager::connect("memory:").await?;
    /// let node = String::from("node-7");
    /// let campaign = tokio::spawn(async move {
    ///     locks.elect("scheduler").run(async |term| {
    ///         println!("{node} leads, fence {}", term.fence());
    ///         Ok::<_, leasehold::Error>(())
    ///     }).await
    /// });
    /// campaign.await??;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// What standing again cannot mend: a bad name, a store that refuses, [`Error::ShutDown`].
    ///
    /// # Panics
    /// When the work does; the lead is given up.
    ///
    /// # Cancel safety
    /// Dropped, the work is dropped first and the lead is given up in the background.
    pub async fn run<T, E, F>(self, mut work: impl FnMut(Term) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, E>>,
        E: Display,
    {
        let Self { locks, request } = self;
        let (_, name) = request.of()?;
        let mut short_in_a_row = 0;
        loop {
            let mut began = None;
            let led = match Entered::by(request.clone(), Entry::Once).await {
                Ok(entered) => {
                    began = Some(Moment::now());
                    let term = Term(entered.guard().share_cell());
                    tracing::info!(%name, holder = %term.holder_id(), "leading");
                    let led = entered.work(OnLoss::Cancel, work(term)).await;
                    entered.leave().await;
                    led
                }
                Err(error) => Err(error),
            };
            let end = match led {
                Ok(Ok(done)) => return Ok(done),
                Ok(Err(error)) => {
                    tracing::warn!(%name, error = %format_args!("{error:#}"), "the leader's work failed; another may lead, and this one stands again");
                    TermEnd::Failed
                }
                Err(error) if !error.is_retryable() => return Err(error),
                Err(error) => {
                    tracing::warn!(%name, error = %format_args!("{error:#}"), "does not lead; stands again");
                    if matches!(error, Error::Lost { .. }) { TermEnd::Lost } else { TermEnd::Failed }
                }
            };
            let was_long = began.is_some_and(|began| began.until(Moment::now()) > LONGEST_PAUSE);
            short_in_a_row = if was_long { 0 } else { short_in_a_row + 1 };
            tokio::select! {
                () = tokio::time::sleep(pause(end, short_in_a_row)) => {}
                () = locks.core().closing.cancelled() => {}
            }
        }
    }

    /// Returns the present leader, or `None` while nobody leads. The answer may be out of date when it is read: only a
    /// fence protects what a leader writes to.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn leader(&self) -> Result<Option<Holder>, Error> {
        let (_, name) = self.request.of()?;
        self.locks.holder(name).await
    }
}

/// A term of a leader, as its work sees it. It does not keep the lead, which ends when the work does.
#[derive(Clone)]
pub struct Term(Arc<LeaseCell>);

impl Term {
    /// Returns the name of the election.
    pub fn name(&self) -> &LockName {
        &self.0.name
    }

    /// Returns the fence of this term: higher than that of every earlier term. Resources that the leader writes to should
    /// check it.
    pub fn fence(&self) -> Fence {
        self.0.fence.expect("a lead is protected, and fenced")
    }

    /// Returns the public id of the leader, which [`Election::leader`] reports.
    pub fn holder_id(&self) -> HolderId {
        self.0.token.holder_id()
    }

    /// Returns whether the lead is proven at this moment.
    pub fn is_valid(&self) -> bool {
        self.0.is_valid(Moment::now())
    }

    /// Returns why the lead was lost, if it was: for values that are dropped when the work is cancelled.
    pub fn loss(&self) -> Option<LossReason> {
        self.0.state().lost
    }

    /// Returns until when the lead is proven; every renewal moves it.
    pub fn valid_until(&self) -> Moment {
        self.0.state().belief.valid_until()
    }

    /// Returns a token that is cancelled when the lead is lost, for tasks that the work spawned and that are not cancelled
    /// with it.
    pub fn cancellation(&self) -> CancellationToken {
        self.0.cancellation()
    }

    /// Waits until the leader is asked to finish soon, and returns the reason.
    ///
    /// # Cancel safety
    /// Cancel safe: a later call returns the same request.
    pub async fn asked_to_finish(&self) -> String {
        self.0.wait_for(|state| state.finish_reason.clone()).await
    }
}

impl fmt::Debug for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Term").field("name", self.name()).field("fence", &self.fence()).finish_non_exhaustive()
    }
}

/// How a term that was not the last came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TermEnd {
    /// The work failed, or nobody could be asked.
    Failed,
    /// The lead was lost.
    Lost,
}

/// How long to wait before standing again, after so many terms in a row that were shorter than the
/// longest pause.
fn pause(end: TermEnd, short_in_a_row: u32) -> Duration {
    let doublings = match (end, short_in_a_row) {
        // The first to stand again is at the end of the line, whoever it is.
        (TermEnd::Lost, 0 | 1) => return Duration::ZERO,
        (TermEnd::Lost, short) => short - 2,
        // Also after a long term: whoever else stands comes first, even when it had just begun to.
        (TermEnd::Failed, short) => short.saturating_sub(1),
    };
    Backoff::new(FIRST_PAUSE, LONGEST_PAUSE).after(doublings).pause()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_fails_at_once_stands_again_ever_more_slowly() {
        let pauses: Vec<u128> = (1..=4).map(|short| pause(TermEnd::Failed, short).as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 800]);
        assert_eq!(pause(TermEnd::Failed, 10), LONGEST_PAUSE);
        assert_eq!(pause(TermEnd::Failed, u32::MAX), LONGEST_PAUSE);
        assert_eq!(pause(TermEnd::Failed, 0), FIRST_PAUSE, "after a long term as after the first short one");
    }

    #[test]
    fn a_lost_lead_is_stood_for_at_once_but_not_again_and_again() {
        assert_eq!(pause(TermEnd::Lost, 0), Duration::ZERO);
        assert_eq!(pause(TermEnd::Lost, 1), Duration::ZERO);
        assert_eq!(pause(TermEnd::Lost, 2), FIRST_PAUSE);
        assert_eq!(pause(TermEnd::Lost, 100), LONGEST_PAUSE);
    }
}
