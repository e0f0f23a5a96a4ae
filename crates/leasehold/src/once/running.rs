//! The work of a [`Once`](super::Once), from its beginning to its stored result.

use std::fmt;
use std::time::Duration;

use serde::de::DeserializeOwned;

use crate::backoff::Backoff;
use crate::bindings::{fits, from_json};
use crate::clock::Moment;
use crate::engine::guard::Guard;
use crate::error::Error;
use crate::facts::{ClaimId, Invalid, LockName, Retention};
use crate::loss::LossReason;
use crate::manager::LockManager;
use crate::scope::{self, Entered, OnLoss};
use crate::store::record::{Head, State};
use crate::store::{BindingId, Changed, Step};

/// The pauses between attempts to store a result while the store is unreachable.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(1));
/// Longer texts about a result that cannot be stored are cut.
const PROBLEM_CHARS_MAX: usize = 1_000;

/// The result of work that is done once.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome<R> {
    /// The result.
    pub value: R,
    /// Whether this call did the work. Otherwise the value is the stored result of an earlier call.
    pub fresh: bool,
    /// Whether the result is stored. It is `false` only for a fresh result, when the store became unreachable. The next caller
    /// then does the work again, unless the store received the result and only its reply was lost.
    pub stored: bool,
}

/// The stored result, or the right to do the work.
#[derive(Debug)]
pub enum Started {
    /// The work was done before.
    Done(Done),
    /// The caller is to do the work.
    Run(Running),
}

/// The stored result of work that was done before.
pub struct Done {
    id: LockName,
    result: Vec<u8>,
    by: String,
    at_ms: u64,
}

impl Done {
    /// Returns the stored result.
    pub fn bytes(&self) -> &[u8] {
        &self.result
    }

    /// Returns the owner of the run that did the work.
    pub fn by(&self) -> &str {
        &self.by
    }

    /// Returns when the result was stored, in wall-clock milliseconds.
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

/// Work that the caller is to do. If it is dropped, nothing is stored and the next caller does the work.
#[must_use = "if this is dropped, another caller does the work"]
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

    /// Returns the guard of the lock. Stop the work when it is lost.
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Stores the result and releases the lock; see [`ResultSlot::store`].
    ///
    /// # Errors
    /// As [`ResultSlot::store`].
    pub async fn finish(self, result: &[u8]) -> Result<bool, Error> {
        let stored = self.slot.store(&self.guard, result).await;
        release(self.guard).await;
        stored
    }

    /// Splits it into the guard and the result slot, for a caller that releases the lock by itself.
    pub fn split(self) -> (Guard, ResultSlot) {
        (self.guard, self.slot)
    }

    /// Runs the work under the lock, then stores what `written` returns for its value; `None` stores nothing.
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
                // The caller gets the work's own error. If the record cannot be removed, the next runner takes it over.
                None => {
                    if let Err(error) = slot.forget().await {
                        tracing::warn!(id = %slot.id.id, error = %format_args!("{error:#}"), "the record of unfinished work could not be removed");
                    }
                    Ok(false)
                }
            },
        };
        entered.leave().await;
        Ok((done?, stored?))
    }
}

/// Stores the result of running work.
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
        // `once` requests a fence: without it the store could not replace the record of a dead runner.
        let fence = guard.fence().get();
        Self { manager, id, claim, fence, keep, payload, by }
    }

    /// Stores the result if the lease is still valid, and never replaces the record of another runner. Returns `false` when the
    /// store stayed unreachable for [`outage_timeout`](crate::Options::outage_timeout) or until the lease ended.
    ///
    /// # Errors
    /// [`Error::Lost`] when the lease ended or another runner began; [`Error::Invalid`] for a result of more than 1 MiB, which
    /// is recorded as by [`store_problem`](Self::store_problem); [`Error::Store`] when the store rejected the request.
    pub async fn store(&self, guard: &Guard, result: &[u8]) -> Result<bool, Error> {
        let step = self.step(State::Done, result);
        if let Err(invalid) = fits(&self.id.id, step.value.len()) {
            self.note_unstorable(guard, &invalid).await;
            return Err(invalid.into());
        }
        self.settle(guard, &step).await
    }

    /// Stores, instead of a result, that the work was done and why its result cannot be stored. The work is not done again:
    /// callers get [`Error::ResultNotStored`] until the record is [forgotten](crate::once::Once::forget) or expires. The text is cut to 1,000
    /// characters.
    ///
    /// # Errors
    /// As [`store`](Self::store).
    pub async fn store_problem(&self, guard: &Guard, problem: &str) -> Result<bool, Error> {
        let problem: String = problem.chars().take(PROBLEM_CHARS_MAX).collect();
        self.settle(guard, &self.step(State::Unstored, problem.as_bytes())).await
    }

    /// Removes the record that the work was begun, unless a result is stored or another runner began.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer.
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

    /// Builds the record of this run in a state.
    pub(super) fn step(&self, state: State, result: &[u8]) -> Step {
        let head = Head::new(state, self.by.clone(), self.fence, self.payload.clone());
        let (id, claim, fence, keep) = (self.id.clone(), self.claim.clone(), self.fence, self.keep);
        Step { id, claim, fence, over: state != State::Running, keep, value: head.with(result) }
    }

    /// Records that the result cannot be stored. The caller gets the problem itself, so errors are only logged.
    async fn note_unstorable(&self, guard: &Guard, problem: &Invalid) {
        if let Err(error) = self.store_problem(guard, &problem.to_string()).await {
            tracing::error!(id = %self.id.id, error = %format_args!("{error:#}"), "the work was done, but that could not be recorded");
        }
    }

    /// Writes the last record. It is repeated while the store does not answer and the lease is valid.
    async fn settle(&self, guard: &Guard, step: &Step) -> Result<bool, Error> {
        let lost = |why| Error::Lost { name: guard.name().clone(), why };
        let core = self.manager.core();
        let give_up_at = Moment::now() + core.options.outage_timeout;
        let mut backoff = BACKOFF;
        let mut unreachable = false;
        loop {
            if let Some(why) = guard.loss().or_else(|| (!guard.is_valid()).then_some(LossReason::Expired)) {
                return if unreachable { Ok(false) } else { Err(lost(why)) };
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
                    tracing::warn!(id = %self.id.id, error = %format_args!("{error:#}"), "the result is not stored yet; trying again");
                }
            }
            unreachable = true;
            tokio::select! {
                () = tokio::time::sleep(backoff.pause()) => {}
                _ = guard.lost() => {}
            }
        }
    }
}

/// Releases the lock. If that fails, the release continues in the background and the caller still gets its result.
pub(super) async fn release(guard: Guard) {
    scope::log_release(guard.release().await);
}

/// Omits the result, which may be confidential and does not belong in a log.
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
