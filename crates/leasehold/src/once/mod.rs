//! Work that is done once for an id: the first caller does it, and later callers get its result.
//!
//! Callers wait for each other with the lock `once:<id>`. A record in the store says whether the work is running or done. It
//! has the claim and the fence of its runner, and the store compares them in every step: a runner that was paused for
//! longer than its lease finds a finished record or one with a higher fence, and changes neither.

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
use crate::store::record::{self, State};
use crate::store::{BindingId, Bound, Changed, Operation, StoreErrorKind};

mod running;

use running::release;
pub use running::{Done, Outcome, ResultSlot, Running, Started};

/// The longest id. The name of its lock is `once:<id>`.
const ID_BYTES_MAX: usize = LockName::MAX_BYTES - "once:".len();
/// How long a result is kept by default.
const KEEP: Duration = Duration::from_secs(24 * 60 * 60);
/// A call may exceed its deadline by this much to read the reply to a request in flight. It is longer than the lock's own
/// grace, so that the lock's error, which names the holder, comes first.
const GRACE: Duration = Duration::from_millis(170);

/// Work that is done once for an id; see [`LockManager::once`].
///
/// By default it waits for as long as another caller runs the work. A wait limit bounds everything before the work begins,
/// including requests to a store that does not answer. The lock is renewed while the work runs; after a crash it is blocked
/// for the [`ttl`](Self::ttl).
#[must_use = "the work does not start until `run` is called"]
pub struct Once {
    manager: LockManager,
    id: Result<LockName, Invalid>,
    keep: Duration,
    payload: Result<Option<String>, Invalid>,
    /// The request for the lock. Its wait limit bounds everything before the work begins.
    request: LockRequest,
}

impl LockManager {
    /// Returns work that is done once for an id, across all processes: one caller runs it, the others wait and get its stored
    /// result.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
    /// # let locks = leasehold::LockManager::connect("memory:").await?;
    /// let charge = async |_: &leasehold::Guard| -> Result<u32, String> { Ok(999) };
    /// let first = locks.once("payment-7").payload(&("order 42", 999)).run(charge).await?;
    /// assert!(first.fresh && first.value == Ok(999));
    ///
    /// let again = locks.once("payment-7").payload(&("order 42", 999)).run(charge).await?;
    /// assert!(!again.fresh && again.value == Ok(999), "the stored result");
    ///
    /// let other = locks.once("payment-7").payload(&("order 43", 5)).run(charge).await;
    /// assert!(matches!(other, Err(leasehold::Error::OtherPayload { .. })));
    /// # Ok(()) }
    /// ```
    ///
    /// The work runs under the lock `once:<id>` and is cancelled when that lock is lost. A runner that crashes stores nothing;
    /// when its lease ends (on SQLite at once), the next caller runs the work. So the work may *start* more than once, but
    /// only one result is stored.
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
    /// Sets how long the result is kept: 1 s to 400 days, by default 24 h. After that the work can be done again.
    pub fn keep(mut self, keep: Duration) -> Self {
        self.keep = keep;
        self
    }

    /// Sets the payload of the request. A call with the same id and another payload fails with [`Error::OtherPayload`]. Only a
    /// hash of its JSON is stored, so the JSON must be the same each time: no `HashMap`.
    pub fn payload(self, payload: &(impl Serialize + ?Sized)) -> Self {
        let written = serde_json::to_vec(payload);
        match written {
            Ok(bytes) => self.payload_bytes(&bytes),
            Err(error) => {
                let id = self.id.as_ref().map_or_else(|_| String::new(), ToString::to_string);
                let problem = format!("has a payload that cannot be written as JSON: {error}");
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

    /// Does the work, or returns its stored result. Everything that the work returns is stored, errors too: later callers get
    /// the same error.
    ///
    /// # Errors
    /// - [`Error::OtherPayload`]: the id was used with another payload.
    /// - [`Error::NotAcquired`]: the wait limit passed.
    /// - [`Error::Lost`]: the lease was lost. The work was cancelled and nothing was stored.
    /// - [`Error::Store`]: the store did not answer before the work began.
    /// - [`Error::Invalid`]: an option is out of bounds, or the result is larger than 1 MiB or cannot be written as JSON. In the
    ///   second case the work was done, and later callers get [`Error::ResultNotStored`].
    /// - [`Error::Unreadable`]: the stored result is not an `R`.
    ///
    /// # Cancel safety
    /// If the future is dropped, the work is dropped and nothing is stored. The next caller does the work.
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

    /// Does the work, or returns its stored result; only an `Ok` is stored. After an error the next caller tries again. The
    /// value is stored without its `Result`, so do not use this and [`run`](Self::run) for the same id.
    ///
    /// # Errors
    /// As [`run`](Self::run). The error of the work is in the inner `Result`.
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

    /// Returns the stored result, or `None` when there is none. It does not wait and runs nothing.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Unreadable`], [`Error::ResultNotStored`].
    pub async fn result<R: DeserializeOwned>(self) -> Result<Option<R>, Error> {
        let id = BindingId { kind: BindingKind::Results, id: self.id? };
        let Some((bound, _)) = self.manager.core().read(&id).await? else { return Ok(None) };
        match read_record(&id.id, &bound, None)? {
            Found::Done(done) => Ok(Some(done.value()?)),
            Found::Running => Ok(None),
        }
    }

    /// Removes the stored result, or the record that it could not be stored, so that the next caller does the work. Returns
    /// `false` when there is none. Running work is not affected.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Unreadable`].
    pub async fn forget(self) -> Result<bool, Error> {
        let (core, id) = (self.manager.core(), BindingId { kind: BindingKind::Results, id: self.id? });
        let Some((bound, _)) = core.read(&id).await? else { return Ok(false) };
        match read_record(&id.id, &bound, None) {
            Ok(Found::Done(_)) | Err(Error::ResultNotStored { .. }) => core.remove(&id, &bound.claim).await,
            Ok(Found::Running) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits for its turn and returns either the stored result or the right to do the work. For work that is not a future and
    /// results that are not JSON.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    ///
    /// # Cancel safety
    /// If the future is dropped, no work was begun.
    pub async fn start(self) -> Result<Started, Error> {
        let (core, id) = (self.manager.core().clone(), BindingId { kind: BindingKind::Results, id: self.id? });
        let (keep, payload) = (Retention::new(self.keep)?, self.payload?);
        let deadline = Deadline::of(&core, self.request.wait());
        let read = deadline.bound(&core, Operation::Read, &id.id, core.read(&id)).await?;
        if let Some((bound, _)) = read
            && let Found::Done(done) = read_record(&id.id, &bound, payload.as_deref())?
        {
            return Ok(Started::Done(done));
        }
        // Without the lock, or after its end, two runners could work at once; without a fence the store could not order their
        // records.
        let request = deadline.left(self.request).protected().renew(true);
        let guard = deadline.bound(&core, Operation::Acquire, &id.id, request.into_future()).await?;
        let slot = ResultSlot::new(self.manager, id, keep, payload, &guard);
        match begin(&core, &deadline, &guard, &slot).await {
            Ok(None) => Ok(Started::Run(Running::new(guard, slot))),
            Ok(Some(done)) => {
                deadline.release(guard).await;
                Ok(Started::Done(done))
            }
            Err(error) => {
                deadline.release(guard).await;
                Err(error)
            }
        }
    }
}

/// Records that the work is running, replacing the record of a dead runner. Returns the result if the work was done while
/// this call waited.
async fn begin(core: &Arc<Core>, deadline: &Deadline, guard: &Guard, slot: &ResultSlot) -> Result<Option<Done>, Error> {
    let lost = |why| Error::Lost { name: guard.name().clone(), why };
    let (step, _call) = (slot.step(State::Running, b""), core.call());
    // Armed before the request is sent: the record of a runner that does not exist would reject other payloads.
    let mut undo = BindingUndo::arm(core.clone(), step.id.clone(), step.claim.clone());
    match deadline.bound(core, Operation::Create, &step.id.id, core.advance(&step)).await {
        Ok(Changed::Other(found)) => {
            undo.disarm();
            match read_record(&step.id.id, &found, slot.payload())? {
                Found::Done(done) => Ok(Some(done)),
                // The record has a higher fence: our lease ended and another runner began.
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

/// The time by which the work has to begin.
struct Deadline {
    ends: Option<Moment>,
    no_wait: bool,
}

impl Deadline {
    /// Without waiting, the deadline is the request timeout.
    fn of(core: &Core, wait: Wait) -> Self {
        let limit = match wait {
            Wait::Not => Some(core.options.request_timeout),
            Wait::UpTo(limit) => Some(limit),
            Wait::Forever => None,
        };
        Self { ends: limit.map(|limit| Moment::now() + limit), no_wait: wait == Wait::Not }
    }

    /// Sets the rest of the wait on the request.
    fn left(&self, request: LockRequest) -> LockRequest {
        match self.ends {
            _ if self.no_wait => request.no_wait(),
            // Zero would mean a try without waiting, which has a time limit of its own.
            Some(ends) => request.wait_up_to(Moment::now().until(ends).max(Duration::from_millis(1))),
            None => request,
        }
    }

    /// Waits for a reply until the deadline.
    async fn bound<T>(
        &self,
        core: &Core,
        operation: Operation,
        id: &LockName,
        request: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        tokio::select! {
            biased;
            reply = request => reply,
            () = sleep_until(self.ends.map(|ends| ends + GRACE)) => {
                Err(core.store_error(operation, id, StoreErrorKind::NoAnswer.into()))
            }
        }
    }

    /// Releases the lock and waits for that until the deadline. After it the release continues in the background.
    async fn release(&self, guard: Guard) {
        tokio::select! {
            () = release(guard) => {}
            () = sleep_until(self.ends.map(|ends| ends + GRACE)) => {}
        }
    }
}

enum Found {
    Running,
    Done(Done),
}

/// Reads a record for a caller with this payload.
fn read_record(id: &LockName, bound: &Bound, payload: Option<&str>) -> Result<Found, Error> {
    let Some((head, result)) = record::parse(&bound.value) else {
        let problem = "it is not a record of `once`".to_owned();
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

/// Hashes a payload, to find an id that is used with another payload by mistake. SHA-1 does not protect against a caller that
/// constructs two payloads with the same hash.
fn fingerprint(payload: &[u8]) -> String {
    sha1_smol::Sha1::from(payload).digest().to_string()
}

impl fmt::Debug for Once {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Once").field("id", &self.id).field("keep", &self.keep).finish_non_exhaustive()
    }
}
