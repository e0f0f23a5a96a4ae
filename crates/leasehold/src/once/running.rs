//! A run of work that is done once, from its beginning to its stored result.

use std::fmt;
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::{Outcome, give_back};
use crate::backoff::Backoff;
use crate::bindings::{fits, from_json};
use crate::clock::Moment;
use crate::engine::guard::Guard;
use crate::error::Error;
use crate::facts::{ClaimId, Invalid, LockName, Retention};
use crate::loss::LossReason;
use crate::manager::LockManager;
use crate::scope::{Entered, OnLoss};
use crate::store::record::{Head, State};
use crate::store::{BindingId, Changed, Step};

/// Pauses between attempts to store a result while the store is away.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));
/// The longest reason that is kept for a result that cannot be stored.
const PROBLEM_CHARS_MAX: usize = 1_000;

/// Whether there is anything left to do.
#[derive(Debug)]
pub enum Started {
    /// It was done before.
    Done(Done),
    /// It is ours to do.
    Run(Running),
}

/// Work that was done before.
pub struct Done {
    id: LockName,
    /// The result as it was stored.
    result: Vec<u8>,
    by: String,
    at_ms: u64,
}

impl Done {
    /// The result, as it was stored.
    pub fn bytes(&self) -> &[u8] {
        &self.result
    }

    /// Who did it, for people.
    pub fn by(&self) -> &str {
        &self.by
    }

    /// When, in wall-clock milliseconds.
    pub fn at_ms(&self) -> u64 {
        self.at_ms
    }

    pub(super) fn new(id: LockName, result: Vec<u8>, by: String, at_ms: u64) -> Self {
        Self { id, result, by, at_ms }
    }

    pub(super) fn value<R: DeserializeOwned>(&self) -> Result<R, Error> {
        from_json(&self.id, &self.result)
    }

    pub(super) fn outcome<R: DeserializeOwned>(&self) -> Result<Outcome<R>, Error> {
        Ok(Outcome { value: self.value()?, fresh: false, stored: true })
    }
}

/// Work that is ours to do. Dropped, nothing is stored, and the next one does it.
#[must_use = "dropped, somebody else does the work"]
pub struct Running {
    guard: Guard,
    slot: ResultSlot,
}

impl Running {
    pub(super) fn new(guard: Guard, slot: ResultSlot) -> Self {
        Self { guard, slot }
    }

    pub(super) fn id(&self) -> &LockName {
        &self.slot.id.id
    }

    /// The lock the work is done under: stop when it is lost.
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Stores the result and lets the others have it; see [`ResultSlot::store`].
    ///
    /// # Errors
    /// As [`ResultSlot::store`].
    pub async fn finish(self, result: &[u8]) -> Result<bool, Error> {
        let stored = self.slot.store(&self.guard, result).await;
        give_back(self.guard).await;
        stored
    }

    /// Splits it into its two parts, for a caller that releases the lock by other means.
    pub fn split(self) -> (Guard, ResultSlot) {
        (self.guard, self.slot)
    }

    /// Works under the lock, then stores what `written` makes of the value: `None` stores nothing.
    pub(super) async fn work<R>(
        self,
        work: impl AsyncFnOnce(&Guard) -> R,
        written: impl FnOnce(&R) -> Option<Result<Vec<u8>, Invalid>>,
    ) -> Result<(R, bool), Error> {
        let Self { guard, slot } = self;
        let entered = Entered::with(slot.manager.core().clone(), guard);
        let done = entered.work(OnLoss::Cancel, work(entered.guard())).await;
        let stored = match &done {
            Err(_) => Ok(false),
            Ok(value) => match written(value) {
                Some(Ok(result)) => slot.store(entered.guard(), &result).await,
                Some(Err(invalid)) => {
                    slot.note_unstorable(entered.guard(), &invalid).await;
                    Err(invalid.into())
                }
                // Nothing came of it: the id is as good as new. The work's own error is what the caller has to
                // know; a record that stays is taken over by the next runner.
                None => {
                    if let Err(error) = slot.forget().await {
                        tracing::warn!(id = %slot.id.id, error = %format_args!("{error:#}"), "the record of work that came to nothing stays");
                    }
                    Ok(false)
                }
            },
        };
        entered.leave().await;
        Ok((done?, stored?))
    }
}

/// Where the result of work under way is stored.
pub struct ResultSlot {
    manager: LockManager,
    id: BindingId,
    claim: ClaimId,
    fence: u64,
    keep: Retention,
    payload: Option<String>,
    by: String,
}

impl ResultSlot {
    pub(super) fn new(
        manager: LockManager,
        id: BindingId,
        keep: Retention,
        payload: Option<String>,
        guard: &Guard,
    ) -> Self {
        let (claim, by) = (ClaimId::random(), guard.owner().to_string());
        // Without a fence nothing could be taken over; `once` asks for one.
        let fence = guard.fence().get();
        Self { manager, id, claim, fence, keep, payload, by }
    }

    /// Stores the result, if the lease is still valid: never over another runner's. `false`: the store is
    /// away, and was asked again and again for [`outage_timeout`](crate::Options::outage_timeout) or until the lease
    /// was over.
    ///
    /// # Errors
    /// [`Error::Lost`] when the lease is over, or another runner has begun the work anew; [`Error::Invalid`]
    /// for more than 1 MiB, which is noted as by [`store_problem`](Self::store_problem); [`Error::Store`]
    /// where asking again cannot help.
    pub async fn store(&self, guard: &Guard, result: &[u8]) -> Result<bool, Error> {
        let step = self.step(State::Done, result);
        if let Err(invalid) = fits(&self.id.id, step.value.len()) {
            self.note_unstorable(guard, &invalid).await;
            return Err(invalid.into());
        }
        self.settle(guard, &step).await
    }

    /// Stores, in place of a result, that the work was done and why its result cannot be stored. Nobody does
    /// the work again: until this is forgotten, or its time to keep is over, callers get
    /// [`Error::ResultNotStored`]. At most 1,000 characters of the problem are kept.
    ///
    /// # Errors
    /// As [`store`](Self::store).
    pub async fn store_problem(&self, guard: &Guard, problem: &str) -> Result<bool, Error> {
        let problem: String = problem.chars().take(PROBLEM_CHARS_MAX).collect();
        self.settle(guard, &self.step(State::Unstored, problem.as_bytes())).await
    }

    /// Takes back that the work was begun, if nothing is stored and no other runner has begun.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn forget(&self) -> Result<bool, Error> {
        self.manager.core().withdraw(&self.id, &self.claim).await
    }

    #[cfg(feature = "axum")]
    pub(crate) fn core(&self) -> &std::sync::Arc<crate::engine::Core> {
        self.manager.core()
    }

    pub(super) fn payload(&self) -> Option<&str> {
        self.payload.as_deref()
    }

    /// The record of this run in a state, as the store takes it.
    pub(super) fn step(&self, state: State, result: &[u8]) -> Step {
        let head = Head::new(state, self.by.clone(), self.fence, self.payload.clone());
        let (id, claim, fence, keep) = (self.id.clone(), self.claim.clone(), self.fence, self.keep);
        Step { id, claim, fence, over: state != State::Running, keep, value: head.with(result) }
    }

    /// The caller gets the problem itself; what goes wrong here is logged.
    async fn note_unstorable(&self, guard: &Guard, problem: &Invalid) {
        if let Err(error) = self.store_problem(guard, &problem.to_string()).await {
            tracing::error!(id = %self.id.id, error = %format_args!("{error:#}"), "the work was done, and that is not stored");
        }
    }

    /// Writes the last step, again and again while the store does not answer and the lease is valid.
    async fn settle(&self, guard: &Guard, step: &Step) -> Result<bool, Error> {
        let lost = |why| Error::Lost { name: guard.name().clone(), why };
        let core = self.manager.core();
        let give_up_at = Moment::now() + core.options.outage_timeout;
        let mut backoff = BACKOFF;
        let mut away = false;
        loop {
            if let Some(why) = guard.loss().or_else(|| (!guard.is_valid()).then_some(LossReason::Expired)) {
                return if away { Ok(false) } else { Err(lost(why)) };
            }
            match core.advance(step).await {
                Ok(Changed::Done) => return Ok(true),
                Ok(_) => return Err(lost(LossReason::Gone)),
                Err(error) if !error.is_retryable() => return Err(error),
                Err(error) if Moment::now() >= give_up_at => {
                    tracing::error!(id = %self.id.id, error = %format_args!("{error:#}"), "the work was done, but its result is not stored");
                    return Ok(false);
                }
                Err(error) => {
                    tracing::warn!(id = %self.id.id, error = %format_args!("{error:#}"), "the result is not stored yet");
                }
            }
            away = true;
            tokio::select! {
                () = tokio::time::sleep(backoff.pause()) => {}
                _ = guard.lost() => {}
            }
        }
    }
}

/// Without the result: it is the user's, and a log is no place for it.
impl fmt::Debug for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Done");
        text.field("id", &self.id).field("by", &self.by).field("at_ms", &self.at_ms);
        text.field("bytes", &self.result.len()).finish()
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("guard", &self.guard).field("slot", &self.slot).finish()
    }
}

impl fmt::Debug for ResultSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResultSlot").field("id", &self.id).field("claim", &self.claim).finish_non_exhaustive()
    }
}
