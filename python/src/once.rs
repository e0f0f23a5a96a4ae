//! Work that is done once, and values that are created once.

use std::sync::{Mutex, PoisonError};

use leasehold::bindings::Claimed;
use leasehold::once::{ResultSlot, Started};
use pyo3::prelude::*;
use serde_json::{Value, json};

use crate::answer::Answer;
use crate::call::{Call, Outcome};
use crate::client::{Client, kept, terms};
use crate::engine::Process;
use crate::failure::Failure;
use crate::guard::{Guard, Held};

/// A call that waits for its turn: work to do, or in JSON what was done before.
#[pyfunction]
#[pyo3(signature = (client, id, keep, payload, ttl, wait, owner))]
#[expect(clippy::too_many_arguments, reason = "Python gives them names")]
pub(crate) fn once(
    py: Python<'_>,
    client: &Client,
    id: String,
    keep: Option<f64>,
    payload: Option<Vec<u8>>,
    ttl: Option<f64>,
    wait: Option<f64>,
    owner: Option<String>,
) -> PyResult<Call> {
    let keep = keep.map(|keep| kept("keep", keep)).transpose().map_err(|failure| failure.raise(py))?;
    let terms = terms(ttl, wait, true, None, owner).map_err(|failure| failure.raise(py))?;
    client.call(py, async move |locks| {
        let mut once = locks.once(id).terms(&terms);
        if let Some(keep) = keep {
            once = once.keep(keep);
        }
        if let Some(payload) = payload {
            once = once.payload_bytes(&payload);
        }
        match once.start().await? {
            Started::Run(running) => {
                let (guard, slot) = running.split();
                Ok(Answer::Running(guard.into(), slot))
            }
            Started::Done(done) => {
                let result = String::from_utf8_lossy(done.bytes()).into_owned();
                Ok(Answer::json(&json!({ "result": result, "by": done.by(), "at_ms": done.at_ms() })))
            }
        }
    })
}

/// A call that reads a stored result, in JSON; `None` when there is none (yet).
#[pyfunction]
pub(crate) fn once_result(py: Python<'_>, client: &Client, id: String) -> PyResult<Call> {
    client.call(py, async move |locks| {
        let result: Option<Value> = locks.once(id).result().await?;
        Ok(Answer::Text(result.map(|value| value.to_string())))
    })
}

/// A call that forgets a stored result: whether there was one.
#[pyfunction]
pub(crate) fn once_forget(py: Python<'_>, client: &Client, id: String) -> PyResult<Call> {
    client.call(py, async move |locks| Ok(Answer::Bool(locks.once(id).forget().await?)))
}

/// A call that binds a value to an id unless one is bound already; in JSON, whichever it is now.
#[pyfunction]
pub(crate) fn claim(py: Python<'_>, client: &Client, id: String, value: String, keep: f64) -> PyResult<Call> {
    let keep = kept("lease", keep).map_err(|failure| failure.raise(py))?;
    let read = serde_json::from_str(&value).map_err(|error| Failure::Argument(format!("value: {error}")));
    let value: Value = read.map_err(|failure| failure.raise(py))?;
    client.call(py, async move |locks| {
        let claimed = locks.bindings::<Value>().try_create(id, &value, keep).await?;
        Ok(Answer::json(&match claimed {
            Claimed::Created(_) => json!({ "created": true, "value": value }),
            Claimed::Exists(first) => json!({ "created": false, "value": first.value }),
        }))
    })
}

/// Work that is ours to do. Dropped, nothing is stored, and the next one does it.
#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Running {
    process: Process,
    guard: Py<Guard>,
    /// `None` once the work is over. Only taken under the interpreter's lock.
    slot: Mutex<Option<ResultSlot>>,
}

impl Running {
    pub(crate) fn new(py: Python<'_>, held: Held, slot: ResultSlot) -> PyResult<Self> {
        let guard = Py::new(py, Guard::new(held))?;
        Ok(Self { process: Process::this(), guard, slot: Mutex::new(Some(slot)) })
    }

    fn end<F>(&self, how: impl FnOnce(Held, ResultSlot) -> F + Send + 'static) -> PyResult<Call>
    where
        F: Future<Output = Outcome> + Send,
    {
        let ours = self.process.is_this();
        let slot = if ours { self.slot.lock().unwrap_or_else(PoisonError::into_inner).take() } else { None };
        let parts = slot.and_then(|slot| Some((self.guard.get().take()?, slot)));
        Call::to_the_end(async move {
            match parts {
                Some((held, slot)) => how(held, slot).await,
                None => Ok(Answer::Bool(false)),
            }
        })
    }
}

#[pymethods]
impl Running {
    /// The lock the work is done under.
    #[getter]
    fn guard(&self, py: Python<'_>) -> Py<Guard> {
        self.guard.clone_ref(py)
    }

    /// A call that stores the result and lets the others have it: whether it is stored.
    fn finish(&self, result: Vec<u8>) -> PyResult<Call> {
        self.end(async move |held: Held, slot| {
            let stored = slot.store(held.guard(), &result).await;
            // What goes wrong with it goes on in the background, and hides nobody's result.
            let _ = held.alone().await.release().await;
            Ok(Answer::Bool(stored?))
        })
    }

    /// A call that takes back that the work was begun, so that the next one does it.
    fn give_up(&self) -> PyResult<Call> {
        self.end(async |held: Held, slot| {
            let forgotten = slot.forget().await;
            let _ = held.alone().await.release().await;
            Ok(Answer::Bool(forgotten?))
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.process.is_this() {
            std::mem::forget(self.slot.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}
