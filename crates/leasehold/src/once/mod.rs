//! Work that is done once for an id: the first caller does it, and the others get its result.
//!
//! The lock `once:<id>` says who works now, so others wait in its line and are woken by its release. The
//! record says how far the work is. It carries the claim and the fence of its runner, and the store compares
//! them with every step: a runner that was paused for longer than its lease meets the record of a higher
//! fence, or a finished one, and touches neither.

use std::fmt;
use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::bindings::{BindingUndo, json, request_id};
use crate::clock::{Moment, sleep_until};
use crate::engine::Core;
use crate::engine::guard::Guard;
use crate::engine::wish::Wait;
use crate::error::Error;
use crate::facts::{BindingKind, Invalid, LockName, Retention};
use crate::lease::Terms;
use crate::lease::terms::setters;
use crate::loss::LossReason;
use crate::manager::LockManager;
use crate::request::LockRequest;
use crate::scope;
use crate::store::record::{self, State};
use crate::store::{BindingId, Bound, Changed, Operation, StoreErrorKind};

mod running;

pub use running::{Done, ResultSlot, Running, Started};

/// The longest id: its lock is called `once:<id>`.
const ID_BYTES_MAX: usize = LockName::MAX_BYTES - "once:".len();
/// How long a result is kept unless said.
const KEEP: Duration = Duration::from_secs(24 * 60 * 60);
/// A call may overrun its deadline by this much to hear the answer to a question already asked. Longer than
/// the lock's own, so that the lock says who holds it.
const GRACE: Duration = Duration::from_millis(170);

/// Work that is done once for an id; see [`LockManager::once`].
///
/// Without a limit it waits for as long as another runner works. The lock is renewed while the work runs, and the
/// [`ttl`](Self::ttl) is how long it outlives a runner that crashed. A limit bounds everything before the work begins, a
/// store that does not answer included.
#[must_use = "nothing happens until it is run"]
pub struct Once {
    manager: LockManager,
    id: Result<LockName, Invalid>,
    keep: Duration,
    payload: Result<Option<String>, Invalid>,
    /// The lock that the work runs under. Its wait bounds everything before the work begins.
    request: LockRequest,
}

/// The result of work that is done once.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome<R> {
    /// The result.
    pub value: R,
    /// Whether the work was done by this very call. Otherwise it was done before, and this is its stored
    /// result.
    pub fresh: bool,
    /// Whether the result is stored. `false` only for a fresh one when the store went away: the work was
    /// done, and the next caller does it again, unless the store took the result and only its answer was lost.
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
        let request = self.lock(name);
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

    /// Sets the payload as bytes; see [`payload`](Self::payload).
    pub fn payload_bytes(mut self, payload: &[u8]) -> Self {
        self.payload = Ok(Some(fingerprint(payload)));
        self
    }

    setters!(ttl, wait_up_to, no_wait, owner, owned_by, max_hold, retry_every, terms);

    fn terms_mut(&mut self) -> &mut Terms {
        self.request.terms_mut()
    }

    /// Does the work, or gets its stored result. Whatever it returns is stored, a `Result`'s error as well:
    /// then everybody gets the same error.
    ///
    /// # Errors
    /// [`Error::OtherPayload`]; [`Error::NotAcquired`] when the time to wait is over; [`Error::Lost`] when
    /// the lease was lost (the work was cancelled, and nothing stored); [`Error::Store`] before the work
    /// began; [`Error::Invalid`] also for a result that is larger than 1 MiB or cannot be written as JSON: the
    /// work was done, that is stored in its place, and later callers get [`Error::ResultNotStored`];
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
                let id = running.id().clone();
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
                let id = running.id().clone();
                let written = |value: &Result<T, E>| value.as_ref().ok().map(|value| json(&id, value));
                let (value, stored) = running.work(work, written).await?;
                Ok(value.map(|value| Outcome { value, fresh: true, stored }))
            }
        }
    }

    /// The stored result, without doing anything; `None` when there is none (yet).
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Unreadable`], [`Error::ResultNotStored`].
    pub async fn result<R: DeserializeOwned>(self) -> Result<Option<R>, Error> {
        let id = BindingId { kind: BindingKind::Results, id: self.id? };
        let Some((bound, _)) = self.manager.core().read(&id).await? else { return Ok(None) };
        match look(&id.id, &bound, None)? {
            Found::Done(done) => Ok(Some(done.value()?)),
            Found::Running => Ok(None),
        }
    }

    /// Forgets the stored result, or that it could not be stored: the next caller does the work. `false`: there
    /// is none. Work under way is not touched.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Unreadable`].
    pub async fn forget(self) -> Result<bool, Error> {
        let (core, id) = (self.manager.core(), BindingId { kind: BindingKind::Results, id: self.id? });
        let Some((bound, _)) = core.read(&id).await? else { return Ok(false) };
        match look(&id.id, &bound, None) {
            Ok(Found::Done(_)) | Err(Error::ResultNotStored { .. }) => core.remove(&id, &bound.claim).await,
            Ok(Found::Running) => Ok(false),
            Err(error) => Err(error),
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
        let (core, id) = (self.manager.core().clone(), BindingId { kind: BindingKind::Results, id: self.id? });
        let (keep, payload) = (Retention::new(self.keep)?, self.payload?);
        let deadline = Deadline::of(&core, self.request.wait());
        let read = deadline.bound(&core, Operation::Read, &id.id, core.read(&id)).await?;
        if let Some((bound, _)) = read
            && let Found::Done(done) = look(&id.id, &bound, payload.as_deref())?
        {
            return Ok(Started::Done(done));
        }
        // Without the lock, or after its end, two runners would work at once. The fence sets their records apart.
        let request = deadline.left(self.request).protected().renew(true);
        let guard = deadline.bound(&core, Operation::Acquire, &id.id, request.into_future()).await?;
        let slot = ResultSlot::new(self.manager, id, keep, payload, &guard);
        match begin(&core, &deadline, &guard, &slot).await {
            Ok(None) => Ok(Started::Run(Running::new(guard, slot))),
            Ok(Some(done)) => {
                deadline.give_back(guard).await;
                Ok(Started::Done(done))
            }
            Err(error) => {
                deadline.give_back(guard).await;
                Err(error)
            }
        }
    }
}

/// Writes that the work is under way, in place of what a dead runner left. `Some`: it was done while we waited.
async fn begin(core: &Arc<Core>, deadline: &Deadline, guard: &Guard, slot: &ResultSlot) -> Result<Option<Done>, Error> {
    let lost = |why| Error::Lost { name: guard.name().clone(), why };
    let (step, _call) = (slot.step(State::Running, b""), core.call());
    // Armed before the request leaves: a record that nobody works under would refuse other payloads.
    let mut undo = BindingUndo::arm(core.clone(), step.id.clone(), step.claim.clone());
    match deadline.bound(core, Operation::Create, &step.id.id, core.advance(&step)).await {
        Ok(Changed::Other(found)) => {
            undo.disarm();
            match look(&step.id.id, &found, slot.payload())? {
                Found::Done(done) => Ok(Some(done)),
                // Its fence is higher: our lease is over, and another runner has begun.
                Found::Running => Err(lost(LossReason::Gone)),
            }
        }
        Ok(_) => match guard.loss().or_else(|| (!guard.is_valid()).then_some(LossReason::Expired)) {
            Some(why) => Err(lost(why)),
            None => {
                undo.disarm();
                Ok(None)
            }
        },
        Err(error) => {
            if matches!(&error, Error::Store { source, .. } if !source.may_have_happened()) {
                undo.disarm();
            }
            Err(error)
        }
    }
}

/// Until when the work has to begin.
struct Deadline {
    ends: Option<Moment>,
    /// The wait that was asked for is zero.
    at_once: bool,
}

impl Deadline {
    /// Without a wait, a store may still take as long as it is allowed for one answer.
    fn of(core: &Core, wait: Wait) -> Self {
        let limit = match wait {
            Wait::Not => Some(core.options.request_timeout),
            Wait::UpTo(limit) => Some(limit),
            Wait::Forever => None,
        };
        Self { ends: limit.map(|limit| Moment::now() + limit), at_once: wait == Wait::Not }
    }

    /// The request with what is left of the wait.
    fn left(&self, request: LockRequest) -> LockRequest {
        match self.ends {
            _ if self.at_once => request.no_wait(),
            // Zero would mean a try with a time limit of its own.
            Some(ends) => request.wait_up_to(Moment::now().until(ends).max(Duration::from_millis(1))),
            None => request,
        }
    }

    /// Asks, but not beyond the deadline.
    async fn bound<T>(
        &self,
        core: &Core,
        operation: Operation,
        id: &LockName,
        ask: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        tokio::select! {
            biased;
            answer = ask => answer,
            () = sleep_until(self.ends.map(|ends| ends + GRACE)) => {
                Err(core.store_error(operation, id, StoreErrorKind::NoAnswer.into()))
            }
        }
    }

    /// Releases, and waits for that until the deadline; what is left goes on in the background.
    async fn give_back(&self, guard: Guard) {
        tokio::select! {
            () = give_back(guard) => {}
            () = sleep_until(self.ends.map(|ends| ends + GRACE)) => {}
        }
    }
}

enum Found {
    Running,
    Done(Done),
}

/// What a record says to a caller with this payload.
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
    match head.state {
        State::Running => Ok(Found::Running),
        State::Done => Ok(Found::Done(Done::new(id.clone(), result.to_vec(), head.by, head.at_ms))),
        State::Unstored => {
            let problem = String::from_utf8_lossy(result).into_owned();
            Err(Error::ResultNotStored { name: id.clone(), by: head.by, problem })
        }
    }
}

/// Tells payloads apart: the same id with another one is a mistake of the caller. It is no protection against a
/// caller that wants two payloads to look the same.
fn fingerprint(payload: &[u8]) -> String {
    sha1_smol::Sha1::from(payload).digest().to_string()
}

async fn give_back(guard: Guard) {
    scope::log_release(guard.release().await);
}

impl fmt::Debug for Once {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Once").field("id", &self.id).field("keep", &self.keep).finish_non_exhaustive()
    }
}
