//! Leader election: the holder of a lock leads for as long as it holds the lock.

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

/// The pause after the first short term; each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause. It is short enough that a candidate returns soon after its problem is solved.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// A candidate in an election; see [`LockManager::elect`].
///
/// When a leader dies, the next one leads after at most the [`ttl`](Self::ttl), and on SQLite at once.
#[must_use = "a candidate does nothing until `run` is called"]
pub struct Election {
    locks: LockManager,
    /// The request for the lock, sent at the beginning of every term.
    request: LockRequest,
}

impl LockManager {
    /// Creates a candidate for an election. Of all candidates with the same name, in all processes, one leads at a time.
    ///
    /// An election is a lock, and the leader is its holder: `leasehold why` shows the leader and the waiting candidates, and
    /// `leasehold evict` ends its term.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// # let locks = leasehold::LockManager::connect("memory:").await?;
    /// let planned = locks.elect("scheduler").owner("node-7").run(async |term| {
    ///     // One process at a time runs this. Send the fence with every write.
    ///     println!("leading, fence {}", term.fence());
    ///     // Every process can read who leads.
    ///     let leader = locks.elect("scheduler").leader().await?;
    ///     assert_eq!(leader.expect("there is a leader").owner.task(), "node-7");
    ///     Ok::<_, leasehold::Error>(17) // done: the term ends
    /// }).await?;
    /// assert_eq!(planned, 17);
    /// assert!(locks.elect("scheduler").leader().await?.is_none());
    /// # Ok(()) }
    /// ```
    pub fn elect<N>(&self, name: N) -> Election
    where
        N: IntoLockName,
    {
        // Two leaders are worse than no leader.
        let request = self.lock(name).protected();
        Election { locks: self.clone(), request }
    }
}

impl Election {
    setters!(ttl, owner, owned_by, max_hold, retry_every);

    fn terms_mut(&mut self) -> &mut Terms {
        self.request.terms_mut()
    }

    /// Waits to be elected, then runs the work until it ends or the term is lost:
    ///
    /// - If the work returns `Ok`, the term ends and `run` returns the value.
    /// - If the work returns `Err`, the term ends too, so that another candidate may lead. After a pause this candidate goes to
    ///   the end of the queue.
    /// - If the lock is lost, the work is cancelled at once, before another candidate can lead. This candidate goes to the end
    ///   of the queue.
    /// - While the store is unreachable, the candidate waits and tries again.
    ///
    /// The pause grows from 0.1 s to 30 s with every term in a row that fails soon after its beginning, so that work that cannot
    /// start does not lead ten times a second.
    ///
    /// A leader always holds the lock: [`OnUnavailable::FailOpen`](crate::OnUnavailable::FailOpen) of the manager has no effect.
    ///
    /// The work is called once for every term. An `async` closure borrows what it uses, so write it without `move`, inside a
    /// task that owns those values:
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
    /// Errors that are not [retryable](Error::is_retryable): a bad name, a store that rejects the request, [`Error::ShutDown`].
    ///
    /// # Panics
    /// When the work panics. The lock is released.
    ///
    /// # Cancel safety
    /// If the future is dropped, the work is dropped first, then the lock is released in the background.
    pub async fn run<T, E, F>(self, mut work: impl FnMut(Term) -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, E>>,
        E: Display,
    {
        let Self { locks, request } = self;
        let (_, name) = request.of()?;
        let mut short_terms = 0;
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
                    tracing::warn!(%name, error = %format_args!("{error:#}"), "the leader's work failed; this candidate runs again");
                    TermEnd::Failed
                }
                Err(error) if !error.is_retryable() => return Err(error),
                Err(error) => {
                    tracing::warn!(%name, error = %format_args!("{error:#}"), "not leading; this candidate runs again");
                    if matches!(error, Error::Lost { .. }) { TermEnd::Lost } else { TermEnd::Failed }
                }
            };
            let was_long = began.is_some_and(|began| began.until(Moment::now()) > LONGEST_PAUSE);
            short_terms = if was_long { 0 } else { short_terms + 1 };
            tokio::select! {
                () = tokio::time::sleep(pause(end, short_terms)) => {}
                () = locks.core().closing.cancelled() => {}
            }
        }
    }

    /// Returns the current leader, or `None` when there is none. The result may already be out of date: only the fence protects
    /// the resources that a leader writes to.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
    pub async fn leader(&self) -> Result<Option<Holder>, Error> {
        let (_, name) = self.request.of()?;
        self.locks.holder(name).await
    }
}

/// The term of a leader, passed to its work. The term ends with the work, even if this value is kept.
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

    /// Returns whether the lease is proven at this moment.
    pub fn is_valid(&self) -> bool {
        self.0.is_valid(Moment::now())
    }

    /// Returns why the term was lost, if it was. Values that are dropped when the work is cancelled can read it.
    pub fn loss(&self) -> Option<LossReason> {
        self.0.state().lost
    }

    /// Returns until when the lease is proven. Every renewal extends it.
    pub fn valid_until(&self) -> Moment {
        self.0.state().belief.valid_until()
    }

    /// Returns a token that is cancelled when the term is lost, for spawned tasks, which are not cancelled with the work.
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

/// How a term ended, if it was not the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TermEnd {
    /// The work failed, or the store did not answer.
    Failed,
    /// The lock was lost.
    Lost,
}

/// Returns the pause before the next candidacy. `short_terms` counts the terms in a row that were shorter than the longest
/// pause.
fn pause(end: TermEnd, short_terms: u32) -> Duration {
    let doublings = match (end, short_terms) {
        // The first time the candidate goes to the end of the queue at once.
        (TermEnd::Lost, 0 | 1) => return Duration::ZERO,
        (TermEnd::Lost, short) => short - 2,
        // Even after a long term: it lets candidates that have just started go first.
        (TermEnd::Failed, short) => short.saturating_sub(1),
    };
    Backoff::new(FIRST_PAUSE, LONGEST_PAUSE).after(doublings).pause()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_after_failed_terms_grow_to_a_limit() {
        let pauses: Vec<u128> = (1..=4).map(|short| pause(TermEnd::Failed, short).as_millis()).collect();
        assert_eq!(pauses, [100, 200, 400, 800]);
        assert_eq!(pause(TermEnd::Failed, 10), LONGEST_PAUSE);
        assert_eq!(pause(TermEnd::Failed, u32::MAX), LONGEST_PAUSE);
        assert_eq!(pause(TermEnd::Failed, 0), FIRST_PAUSE, "after a long term as after the first short one");
    }

    #[test]
    fn only_the_first_lost_term_has_no_pause() {
        assert_eq!(pause(TermEnd::Lost, 0), Duration::ZERO);
        assert_eq!(pause(TermEnd::Lost, 1), Duration::ZERO);
        assert_eq!(pause(TermEnd::Lost, 2), FIRST_PAUSE);
        assert_eq!(pause(TermEnd::Lost, 100), LONGEST_PAUSE);
    }
}
