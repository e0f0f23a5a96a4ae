//! A lock that is held.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use leasehold::lease::Token;
use leasehold::{Fence, LockName, LossReason};
use pyo3::prelude::*;
use tokio_util::sync::CancellationToken;

use crate::answer::Answer;
use crate::call::Call;
use crate::client::{lease, span};
use crate::engine::{Engine, Process};
use crate::failure::Failure;

/// While somebody else's `extend` is under way a release waits for it, at most as long as for one answer.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// The library's guard, which a forked child never touches: it drops nothing of its parent's.
pub(crate) struct Held {
    process: Process,
    guard: Option<Arc<leasehold::Guard>>,
}

impl From<leasehold::Guard> for Held {
    fn from(guard: leasehold::Guard) -> Self {
        Self { process: Process::this(), guard: Some(Arc::new(guard)) }
    }
}

impl Held {
    pub(crate) fn guard(&self) -> &Arc<leasehold::Guard> {
        self.guard.as_ref().expect("there until it is dropped")
    }

    /// The guard alone, when nobody else uses it any more.
    pub(crate) async fn alone(mut self) -> leasehold::Guard {
        let mut guard = self.guard.take().expect("there until it is dropped");
        loop {
            match Arc::try_unwrap(guard) {
                Ok(guard) => return guard,
                Err(shared) => guard = shared,
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(guard) = self.guard.take() else { return };
        if !self.process.is_this() {
            std::mem::forget(guard);
            return;
        }
        // It is given back in the background.
        drop(guard);
        if let Some(engine) = Engine::running() {
            engine.is_needed();
        }
    }
}

/// A lock that is held, until it is released or dropped.
#[pyclass(frozen, weakref, module = "leasehold._native")]
pub(crate) struct Guard {
    process: Process,
    name: LockName,
    token: Token,
    fence: Option<Fence>,
    protected: bool,
    /// `None` once it was given back. Taken only under the interpreter's lock, so never held at a fork.
    held: Mutex<Option<Held>>,
    /// What was known when it was given back.
    last_loss: OnceLock<LossReason>,
    /// Ends the waiting for a loss that cannot come any more. There until it is dropped.
    given_back: Option<CancellationToken>,
}

impl Guard {
    pub(crate) fn new(held: Held) -> Self {
        let guard = held.guard();
        Self {
            process: held.process,
            name: guard.name().clone(),
            token: guard.token().clone(),
            fence: guard.try_fence(),
            protected: guard.is_protected(),
            held: Mutex::new(Some(held)),
            last_loss: OnceLock::new(),
            given_back: Some(CancellationToken::new()),
        }
    }

    /// Looks at the guard if it is ours and held.
    fn look<T>(&self, at: impl FnOnce(&Arc<leasehold::Guard>) -> T) -> Option<T> {
        if !self.process.is_this() {
            return None;
        }
        self.held.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|held| at(held.guard()))
    }

    /// Gives it up, into the hands of whoever asked.
    pub(crate) fn take(&self) -> Option<Held> {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        if let Some(why) = held.guard().loss() {
            let _ = self.last_loss.set(why);
        }
        self.given_back().cancel();
        Some(held)
    }

    /// The same, if it is this process's.
    pub(crate) fn take_ours(&self) -> Option<Held> {
        if self.process.is_this() { self.take() } else { None }
    }

    fn given_back(&self) -> &CancellationToken {
        self.given_back.as_ref().expect("there until it is dropped")
    }

    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        if self.process.is_this() {
            return Ok(());
        }
        Err(Failure::Inherited { name: self.name.to_string(), pid: self.process.pid() }.raise(py))
    }
}

#[pymethods]
impl Guard {
    #[getter]
    fn name(&self) -> &str {
        self.name.as_str()
    }

    #[getter]
    fn token(&self) -> &str {
        self.token.reveal()
    }

    #[getter]
    fn holder_id(&self) -> String {
        self.token.holder_id().to_string()
    }

    #[getter]
    fn fence(&self) -> Option<u64> {
        self.fence.map(Fence::get)
    }

    #[getter]
    fn owner(&self) -> Option<String> {
        self.look(|guard| guard.owner().to_string())
    }

    /// `False`: the store was unreachable, and the work goes on without a lock.
    #[getter]
    fn is_protected(&self) -> bool {
        self.protected
    }

    /// Whether the lease is proven at this moment.
    #[getter]
    fn is_valid(&self) -> bool {
        self.look(|guard| guard.is_valid()).unwrap_or(false)
    }

    /// Whether it has neither been released nor belongs to another process.
    #[getter]
    fn is_held(&self) -> bool {
        self.look(|_| ()).is_some()
    }

    /// Seconds for which the lease is still proven.
    #[getter]
    fn time_left(&self) -> f64 {
        self.look(|guard| if guard.is_valid() { guard.remaining().as_secs_f64() } else { 0.0 }).unwrap_or(0.0)
    }

    /// Why the lease was lost, if it was.
    #[getter]
    fn loss(&self) -> Option<&'static str> {
        if !self.process.is_this() {
            return Some("forked");
        }
        self.look(|guard| guard.loss()).unwrap_or_else(|| self.last_loss.get().copied()).map(reason)
    }

    /// What somebody who wants it to come to an end soon has said.
    #[getter]
    fn asked_to_finish(&self) -> Option<String> {
        self.look(|guard| guard.asked_to_finish().now_or_never()).flatten()
    }

    /// The process that it belongs to.
    #[getter]
    fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// A call that waits for the loss, at most so many seconds: why, or `None` when there was none until then
    /// or until the release.
    #[pyo3(signature = (timeout = None))]
    fn lost(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Call> {
        let timeout = timeout.map(|seconds| span("timeout", seconds)).transpose().map_err(|f| f.raise(py))?;
        let known = self.loss().map(str::to_owned);
        // Not the guard itself: waiting for its loss must not keep a lock that everybody else has let go.
        let waiting = self.look(|guard| (guard.cancellation(), Arc::downgrade(guard)));
        let given_back = self.given_back().clone();
        Call::new(async move {
            let (None, Some((lost, guard))) = (&known, waiting) else { return Ok(Answer::Text(known)) };
            let told = async {
                tokio::select! {
                    () = lost.cancelled() => guard.upgrade().and_then(|guard| guard.loss()).map(reason),
                    () = given_back.cancelled() => None,
                }
            };
            let why = match timeout {
                Some(timeout) => tokio::time::timeout(timeout, told).await.ok().flatten(),
                None => told.await,
            };
            Ok(Answer::Text(why.map(str::to_owned)))
        })
    }

    /// A call that prolongs the lease to so many seconds from now.
    fn extend(&self, py: Python<'_>, ttl: f64) -> PyResult<Call> {
        self.check_process(py)?;
        let ttl = lease("ttl", ttl).map_err(|failure| failure.raise(py))?;
        let guard = self.look(Arc::clone);
        let released = Failure::Released { name: self.name.to_string() };
        Call::new(async move {
            let Some(guard) = guard else { return Err(released) };
            guard.extend(ttl).await?;
            Ok(Answer::Nothing)
        })
    }

    /// A call that gives the lock back: whether it was ours until now.
    fn release(&self, py: Python<'_>) -> PyResult<Call> {
        self.check_process(py)?;
        let held = self.take();
        Call::to_the_end(async move {
            let Some(held) = held else { return Ok(Answer::Bool(false)) };
            Ok(Answer::Bool(held.alone().await.release().await?))
        })
    }

    /// A call that lets go of the guard and keeps the lease, which is its token's alone from then on and ends by
    /// its ttl, counted from now: whether there was one.
    fn keep(&self, py: Python<'_>) -> PyResult<Call> {
        self.check_process(py)?;
        let held = self.take();
        Call::new(async move {
            let Some(held) = held else { return Ok(Answer::Bool(false)) };
            held.alone().await.detach().await?;
            Ok(Answer::Bool(true))
        })
    }

    /// Gives the lock back in the background.
    fn drop(&self) {
        drop(self.take_ours());
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let given_back = self.given_back.take();
        if self.process.is_this() {
            // Whoever waits for a loss is told that none will come.
            given_back.inspect(CancellationToken::cancel);
        } else {
            // A child drops nothing that the parent's thread may have had in hand.
            std::mem::forget(given_back);
        }
    }
}

pub(crate) fn reason(why: LossReason) -> &'static str {
    match why {
        LossReason::Expired => "expired",
        LossReason::Gone => "gone",
        LossReason::Revoked => "revoked",
        LossReason::MaxHold => "max_hold",
        LossReason::Displaced => "displaced",
        LossReason::Shutdown => "shutdown",
        _ => "unknown",
    }
}
