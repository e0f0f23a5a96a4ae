//! Work that is done once: the first who asks does it, the others get its result.
//!
//! The lock `once:<id>` says who works now, so others wait in its line and are woken by its release. The
//! record says how far the work is, and belongs to the claim of whoever works: a runner that was paused
//! for longer than its lease finds another claim there, and stores nothing.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::bindings::{fits, from_json, json, request_id};
use crate::error::Error;
use crate::event::LossReason;
use crate::facts::{ClaimId, Invalid, Keep, LockName, Shelf};
use crate::guard::Guard;
use crate::held::{Entered, OnLoss};
use crate::manager::LockManager;
use crate::options::OnUnavailable;
use crate::request::LockRequest;
use crate::store::{BindingId, Bound, Change, Changed, Create, Expected, NewBinding};

mod record;

use record::{Head, State};

/// The longest id: its lock is called `once:<id>`.
const ID_BYTES_MAX: usize = LockName::MAX_BYTES - "once:".len();
/// How long a result is kept unless said.
const KEEP: Duration = Duration::from_secs(24 * 60 * 60);
/// Pauses between attempts to store a result while the store is away.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// How often somebody else's remains are cleared away before we give up: each time somebody came between,
/// which the lock does not allow.
const TAKE_OVERS_MAX: usize = 8;

/// Work that is done once for an id: see [`LockManager::once`].
#[must_use = "nothing happens until it is run"]
pub struct Once {
    manager: LockManager,
    id: Result<LockName, Invalid>,
    keep: Duration,
    payload: Result<Option<String>, Invalid>,
    request: LockRequest,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome<R> {
    /// The result.
    pub value: R,
    /// Whether the work was done by this very call. Otherwise it was done before, and this is its stored
    /// result.
    pub fresh: bool,
    /// Whether the result is stored. `false` only for a fresh one when the store went away: the work was
    /// done, and whoever asks next does it again.
    pub stored: bool,
}

impl LockManager {
    /// Work that is done once for an id, across all processes: one runs it, everybody else waits for it and
    /// gets its stored result.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// # let locks = leasehold::LockManager::connect("memory:").await?;
    /// let charge = async |_: &leasehold::Guard| -> Result<u32, String> { Ok(999) };
    /// let first = locks.once("payment-7").payload(&("order 42", 999)).run(charge).await?;
    /// assert!(first.fresh && first.value == Ok(999));
    ///
    /// let again = locks.once("payment-7").payload(&("order 42", 999)).run(charge).await?;
    /// assert!(!again.fresh && again.value == Ok(999), "already processed: the stored result");
    ///
    /// let other = locks.once("payment-7").payload(&("order 43", 5)).run(charge).await;
    /// assert!(matches!(other, Err(leasehold::Error::OtherPayload { .. })));
    /// # Ok(()) }
    /// ```
    ///
    /// The work runs under the lock `once:<id>` and is cancelled when that is lost. A runner that crashes
    /// stores nothing: its lease lapses (on SQLite at once), and the next one works. So work may be *begun*
    /// more than once; what is stored is the result of one.
    pub fn once(&self, id: impl AsRef<str>) -> Once {
        let id = request_id(id).and_then(|id| {
            let too_long = Invalid::Id { what: "request id", problem: "is longer than 507 bytes" };
            if id.as_str().len() > ID_BYTES_MAX { Err(too_long) } else { Ok(id) }
        });
        let name = id.as_ref().map_or_else(|_| "once:".into(), |id| format!("once:{id}"));
        // Without the lock two would work: better not at all.
        let request = self.lock(name).on_unavailable(OnUnavailable::FailClosed);
        Once { manager: self.clone(), id, keep: KEEP, payload: Ok(None), request }
    }
}

impl Once {
    /// How long the result is kept: 24 h unless said, 1 s to 400 days. After that the id is new again.
    pub fn keep(mut self, keep: Duration) -> Self {
        self.keep = keep;
        self
    }

    /// What the work is asked with. The id belongs to the first payload: another one under the same id is
    /// refused with [`Error::OtherPayload`]. Only a fingerprint is stored. Its JSON must come out the same
    /// each time, so no `HashMap`.
    pub fn payload(self, payload: &(impl Serialize + ?Sized)) -> Self {
        let written = serde_json::to_vec(payload);
        match written {
            Ok(bytes) => self.payload_bytes(&bytes),
            Err(error) => {
                let id = self.id.as_ref().map_or_else(|_| String::new(), ToString::to_string);
                let problem = format!("cannot be told from others, because its payload is no JSON: {error}");
                Self { payload: Err(Invalid::Value { id, problem }), ..self }
            }
        }
    }

    /// The same for a payload that is bytes already.
    pub fn payload_bytes(mut self, payload: &[u8]) -> Self {
        self.payload = Ok(Some(record::fingerprint(payload)));
        self
    }

    /// How long the lock outlives a runner that crashed; renewed while the work runs.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.request = self.request.ttl(ttl);
        self
    }

    /// Waits at most so long for somebody else's work, then answers [`Error::NotAcquired`].
    pub fn wait_up_to(mut self, wait: Duration) -> Self {
        self.request = self.request.wait_up_to(wait);
        self
    }

    /// Does not wait: [`Error::NotAcquired`] when somebody else is at it.
    pub fn no_wait(self) -> Self {
        self.wait_up_to(Duration::ZERO)
    }

    /// What people read who ask who is at it.
    pub fn owner(mut self, task: impl AsRef<str>) -> Self {
        self.request = self.request.owner(task);
        self
    }

    /// Does the work, or gets its stored result. Whatever it returns is stored, a `Result`'s error as well:
    /// then everybody gets the same error.
    ///
    /// # Errors
    /// [`Error::OtherPayload`]; [`Error::NotAcquired`] when the time to wait is over; [`Error::Lost`] when
    /// the lease was lost (the work was cancelled, and nothing stored); [`Error::Store`] before the work
    /// began; [`Error::Invalid`] also for a result that is larger than 1 MiB, which is not stored;
    /// [`Error::Unreadable`] when the stored result is no `R`.
    ///
    /// # Cancel safety
    /// Dropped, the work is dropped, nothing is stored, and the next one works.
    pub async fn run<R>(self, work: impl AsyncFnOnce(&Guard) -> R) -> Result<Outcome<R>, Error>
    where
        R: Serialize + DeserializeOwned,
    {
        match self.start().await? {
            Started::Done(done) => done.outcome(),
            Started::Run(running) => {
                let id = running.slot.id.id.clone();
                let (value, stored) = running.work(work, |value| Some(json(&id, value))).await?;
                Ok(Outcome { value, fresh: true, stored })
            }
        }
    }

    /// As [`run`](Self::run), but only an `Ok` is stored: an error is this caller's alone, and the next one
    /// tries again. For work whose errors pass. What is stored is the value alone, so one id is run by this
    /// or by [`run`](Self::run), not by both.
    ///
    /// # Errors
    /// As [`run`](Self::run); the work's own error is inside.
    ///
    /// # Cancel safety
    /// As [`run`](Self::run).
    pub async fn run_until_ok<T, E>(
        self,
        work: impl AsyncFnOnce(&Guard) -> Result<T, E>,
    ) -> Result<Result<Outcome<T>, E>, Error>
    where
        T: Serialize + DeserializeOwned,
    {
        match self.start().await? {
            Started::Done(done) => done.outcome().map(Ok),
            Started::Run(running) => {
                let id = running.slot.id.id.clone();
                let written = |value: &Result<T, E>| value.as_ref().ok().map(|value| json(&id, value));
                let (value, stored) = running.work(work, written).await?;
                Ok(value.map(|value| Outcome { value, fresh: true, stored }))
            }
        }
    }

    /// The stored result, without doing anything; `None` when there is none (yet).
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Unreadable`].
    pub async fn result<R: DeserializeOwned>(self) -> Result<Option<R>, Error> {
        let id = BindingId { shelf: Shelf::Results, id: self.id? };
        let Some((bound, _)) = self.manager.core().read(&id).await? else { return Ok(None) };
        match look(&id.id, &bound, None)? {
            Found::Done(done) => Ok(Some(done.value()?)),
            Found::Running => Ok(None),
        }
    }

    /// Forgets the stored result: whoever asks next does the work. `false`: there is none. Work under way
    /// is not touched.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn forget(self) -> Result<bool, Error> {
        let (core, id) = (self.manager.core(), BindingId { shelf: Shelf::Results, id: self.id? });
        let Some((bound, _)) = core.read(&id).await? else { return Ok(false) };
        match look(&id.id, &bound, None)? {
            Found::Done(_) => core.remove(&id, &bound.claim).await,
            Found::Running => Ok(false),
        }
    }

    /// Waits for its turn and says whether there is anything left to do: for work that is not a future, and
    /// results that are not JSON.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    ///
    /// # Cancel safety
    /// Dropped, nothing was begun.
    pub async fn start(self) -> Result<Started, Error> {
        let (core, id) = (self.manager.core().clone(), BindingId { shelf: Shelf::Results, id: self.id? });
        let (keep, payload) = (Keep::new(self.keep)?, self.payload?);
        if let Some((bound, _)) = core.read(&id).await?
            && let Found::Done(done) = look(&id.id, &bound, payload.as_deref())?
        {
            return Ok(Started::Done(done));
        }
        let guard = self.request.await?;
        let claim = ClaimId::random();
        let head = Head::new(State::Running, guard.owner().to_string(), payload.clone());
        let new = NewBinding { id: id.clone(), claim: claim.clone(), keep, slot: None, value: head.with(b"") };
        for _ in 0..TAKE_OVERS_MAX {
            let bound = match core.create(&new).await? {
                Create::Created => {
                    let slot = ResultSlot { manager: self.manager, id, claim, keep, payload, by: head.by };
                    return Ok(Started::Run(Running { guard, slot }));
                }
                Create::Exists(bound) => bound,
                Create::NoSlot => unreachable!("no slot was asked for"),
            };
            match look(&id.id, &bound, payload.as_deref()) {
                // Done while we waited.
                Ok(Found::Done(done)) => {
                    give_back(guard).await;
                    return Ok(Started::Done(done));
                }
                // Its lock is ours, so whoever began it is at it no more, and its claim is worth nothing:
                // should it wake up again, it stores nothing.
                Ok(Found::Running) => drop(core.remove(&id, &bound.claim).await?),
                Err(error) => {
                    give_back(guard).await;
                    return Err(error);
                }
            }
        }
        Err(Error::Lost { name: guard.name().clone(), why: LossReason::Gone })
    }
}

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

    fn value<R: DeserializeOwned>(&self) -> Result<R, Error> {
        from_json(&self.id, &self.result)
    }

    fn outcome<R: DeserializeOwned>(&self) -> Result<Outcome<R>, Error> {
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

    /// Its two parts, for whoever releases the lock by other means.
    pub fn split(self) -> (Guard, ResultSlot) {
        (self.guard, self.slot)
    }

    /// Works under the lock, then stores what `written` makes of the value: `None` stores nothing.
    async fn work<R>(
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
                Some(Err(invalid)) => Err(invalid.into()),
                // Nothing came of it: the id is as good as new.
                None => slot.forget().await.map(|_| false),
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
    keep: Keep,
    payload: Option<String>,
    by: String,
}

impl ResultSlot {
    /// Stores the result, if the lease is still valid: never over somebody else's. `false`: the store is
    /// away, and was asked again and again for [`patience`](crate::Options::patience) or until the lease
    /// was over.
    ///
    /// # Errors
    /// [`Error::Lost`] when the lease is over, or somebody else has begun the work anew;
    /// [`Error::Invalid`] for more than 1 MiB; [`Error::Store`] where asking again cannot help.
    pub async fn store(&self, guard: &Guard, result: &[u8]) -> Result<bool, Error> {
        let lost = |why| Error::Lost { name: guard.name().clone(), why };
        let value = Head::new(State::Done, self.by.clone(), self.payload.clone()).with(result);
        fits(&self.id.id, value.len())?;
        let give_up_at = crate::clock::Moment::now() + self.manager.core().options.patience;
        let mut pause = PAUSE_MIN;
        let mut away = false;
        loop {
            if let Some(why) = guard.loss().or_else(|| (!guard.is_valid()).then_some(LossReason::Expired)) {
                return if away { Ok(false) } else { Err(lost(why)) };
            }
            match self.write(&value).await {
                Ok(true) => return Ok(true),
                Ok(false) => return Err(lost(LossReason::Gone)),
                Err(error) if !error.is_retryable() => return Err(error),
                Err(error) if crate::clock::Moment::now() >= give_up_at => {
                    tracing::error!(id = %self.id.id, %error, "the work was done, but its result is not stored");
                    return Ok(false);
                }
                Err(error) => tracing::warn!(id = %self.id.id, %error, "the result is not stored yet"),
            }
            away = true;
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                _ = guard.lost() => {}
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    #[cfg(feature = "axum")]
    pub(crate) fn core(&self) -> &std::sync::Arc<crate::engine::Core> {
        self.manager.core()
    }

    /// Takes back that the work was begun.
    ///
    /// # Errors
    /// [`Error::Store`].
    pub async fn forget(&self) -> Result<bool, Error> {
        self.manager.core().remove(&self.id, &self.claim).await
    }

    /// `false`: the work is somebody else's by now.
    async fn write(&self, value: &[u8]) -> Result<bool, Error> {
        let (core, expected) = (self.manager.core(), Expected::Claim(self.claim.clone()));
        let change = Change { value: value.to_vec(), keep: Some(self.keep), give_slot_back: false };
        match core.change(&self.id, &expected, &change).await? {
            Changed::Done => Ok(true),
            Changed::Other(_) => Ok(false),
            // The work took longer than results are kept, or the store forgot everything.
            Changed::Gone => {
                let (id, claim) = (self.id.clone(), self.claim.clone());
                let new = NewBinding { id, claim, keep: self.keep, slot: None, value: value.to_vec() };
                Ok(core.create(&new).await? == Create::Created)
            }
        }
    }
}

enum Found {
    Running,
    Done(Done),
}

/// What a record says to somebody who asks with this payload.
fn look(id: &LockName, bound: &Bound, payload: Option<&str>) -> Result<Found, Error> {
    let Some((head, result)) = record::parse(&bound.value) else {
        let problem = "it is not a record of work that is done once".to_owned();
        return Err(Error::Unreadable { name: id.clone(), problem });
    };
    if let (Some(stored), Some(asked)) = (&head.payload, payload)
        && stored != asked
    {
        return Err(Error::OtherPayload { name: id.clone() });
    }
    Ok(match head.state {
        State::Running => Found::Running,
        State::Done => Found::Done(Done { id: id.clone(), result: result.to_vec(), by: head.by, at_ms: head.at_ms }),
    })
}

/// A release that fails goes on in the background; it hides nobody's result.
async fn give_back(guard: Guard) {
    if let Err(error) = guard.release().await {
        tracing::warn!(%error, "the work is done; its lock is released in the background");
    }
}

impl fmt::Debug for Once {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Once").field("id", &self.id).field("keep", &self.keep).finish_non_exhaustive()
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
