//! Guards: locks that are held.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use futures_util::FutureExt;
use leasehold::lease::Token;
use leasehold::{Fence, LockName, LossReason};
use pyo3::prelude::*;
use tokio_util::sync::CancellationToken;

use crate::call::{Call, NOTHING};
use crate::engine::{Engine, Process};
use crate::failure::{Failure, reason};
use crate::lock;
use crate::terms::{duration, ttl};

/// The pause between two looks of a release that waits for an `extend` in flight, which ends within one request timeout.
const RECHECK_INTERVAL: Duration = Duration::from_millis(1);

/// The library's guard. A forked child never touches or drops its parent's.
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
        self.guard.as_ref().expect("taken only when it is dropped")
    }

    /// Waits until no other call uses the guard, and takes it.
    pub(crate) async fn into_guard(mut self) -> leasehold::Guard {
        let mut guard = self.guard.take().expect("taken only when it is dropped");
        loop {
            match Arc::try_unwrap(guard) {
                Ok(guard) => return guard,
                Err(shared) => guard = shared,
            }
            tokio::time::sleep(RECHECK_INTERVAL).await;
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
        // Released in the background.
        drop(guard);
        if let Some(engine) = Engine::running() {
            engine.wake();
        }
    }
}

impl<'py> IntoPyObject<'py> for Held {
    type Target = Guard;
    type Output = Bound<'py, Guard>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        Bound::new(py, Guard::new(self))
    }
}

/// Holds a lock until it is released or dropped.
#[pyclass(frozen, weakref, module = "leasehold._native")]
pub(crate) struct Guard {
    process: Process,
    name: LockName,
    token: Token,
    fence: Option<Fence>,
    protected: bool,
    /// `None` after the release. The mutex is taken only under the GIL, so no thread holds it at a fork.
    held: Mutex<Option<Held>>,
    /// Why the lease was lost, if it was lost before the release.
    last_loss: OnceLock<LossReason>,
    /// Ends the waiting for a loss, which cannot happen after the release. `None` only while the guard is dropped.
    released: Option<CancellationToken>,
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
            released: Some(CancellationToken::new()),
        }
    }

    /// Reads the library's guard, if it belongs to this process and was not released.
    fn read<T>(&self, value: impl FnOnce(&Arc<leasehold::Guard>) -> T) -> Option<T> {
        if !self.process.is_this() {
            return None;
        }
        lock(&self.held).as_ref().map(|held| value(held.guard()))
    }

    /// Takes the library's guard out.
    pub(crate) fn take(&self) -> Option<Held> {
        let held = lock(&self.held).take()?;
        if let Some(why) = held.guard().loss() {
            let _ = self.last_loss.set(why);
        }
        self.released().cancel();
        Some(held)
    }

    /// Takes the library's guard out, if it belongs to this process.
    pub(crate) fn take_ours(&self) -> Option<Held> {
        if self.process.is_this() { self.take() } else { None }
    }

    fn released(&self) -> &CancellationToken {
        self.released.as_ref().expect("taken only when it is dropped")
    }

    fn check_process(&self) -> Result<(), Failure> {
        if self.process.is_this() {
            return Ok(());
        }
        Err(Failure::Inherited { name: self.name.to_string(), pid: self.process.pid() })
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

    /// `False` if the store was unreachable and the work goes on without a lock.
    #[getter]
    fn is_protected(&self) -> bool {
        self.protected
    }

    /// Whether the lease is proven at this moment.
    #[getter]
    fn is_valid(&self) -> bool {
        self.read(|guard| guard.is_valid()).unwrap_or(false)
    }

    /// Whether this process holds it: it was not released, and was not inherited by a fork.
    #[getter]
    fn is_held(&self) -> bool {
        self.read(|_| ()).is_some()
    }

    /// Seconds for which the lease is still proven.
    #[getter]
    fn time_left(&self) -> f64 {
        self.read(|guard| if guard.is_valid() { guard.remaining().as_secs_f64() } else { 0.0 }).unwrap_or(0.0)
    }

    /// Why the lease was lost, if it was.
    #[getter]
    fn loss(&self) -> Option<&'static str> {
        if !self.process.is_this() {
            return Some("forked");
        }
        self.read(|guard| guard.loss()).unwrap_or_else(|| self.last_loss.get().copied()).map(reason)
    }

    /// The reason given by a request to finish soon, if there was one.
    #[getter]
    fn asked_to_finish(&self) -> Option<String> {
        self.read(|guard| guard.asked_to_finish().now_or_never()).flatten()
    }

    /// The process that acquired it.
    #[getter]
    fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Makes a call that waits for the loss and returns its reason. It returns `None` after the release, or after `timeout`
    /// seconds without a loss.
    #[pyo3(signature = (timeout = None))]
    fn lost(&self, timeout: Option<f64>) -> PyResult<Call> {
        let timeout = timeout.map(|seconds| duration("timeout", seconds)).transpose()?;
        let known = self.loss();
        // A weak reference: waiting for the loss must not keep a lock whose last guard was dropped.
        let waiting = self.read(|guard| (guard.cancellation(), Arc::downgrade(guard)));
        let released = self.released().clone();
        Call::new(async move {
            let (None, Some((lost, guard))) = (known, waiting) else { return Ok(known) };
            let why = async {
                tokio::select! {
                    () = lost.cancelled() => guard.upgrade().and_then(|guard| guard.loss()).map(reason),
                    () = released.cancelled() => None,
                }
            };
            Ok(match timeout {
                Some(timeout) => tokio::time::timeout(timeout, why).await.ok().flatten(),
                None => why.await,
            })
        })
    }

    /// Makes a call that extends the lease to `ttl` seconds from now.
    fn extend(&self, ttl: f64) -> PyResult<Call> {
        self.check_process()?;
        let ttl = self::ttl("ttl", ttl)?;
        let guard = self.read(Arc::clone);
        let released = Failure::Released { name: self.name.to_string() };
        Call::new(async move {
            let Some(guard) = guard else { return Err(released) };
            guard.extend(ttl).await?;
            Ok(NOTHING)
        })
    }

    /// Makes a call that releases the lock and returns whether this guard held it until then.
    fn release(&self) -> PyResult<Call> {
        self.check_process()?;
        let held = self.take();
        Call::uncancellable(async move {
            let Some(held) = held else { return Ok(false) };
            Ok(held.into_guard().await.release().await?)
        })
    }

    /// Makes a call that gives up the guard but keeps the lease, and returns whether there was one. From then on the
    /// token alone renews and releases it, and it ends by its ttl, counted from now.
    fn detach(&self) -> PyResult<Call> {
        self.check_process()?;
        let held = self.take();
        Call::new(async move {
            let Some(held) = held else { return Ok(false) };
            held.into_guard().await.detach().await?;
            Ok(true)
        })
    }

    /// Releases the lock in the background.
    fn drop(&self) {
        drop(self.take_ours());
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let released = self.released.take();
        if self.process.is_this() {
            // Ends the calls that wait for a loss.
            released.inspect(CancellationToken::cancel);
        } else {
            // A thread of the parent may have been using it at the fork.
            std::mem::forget(released);
        }
    }
}
