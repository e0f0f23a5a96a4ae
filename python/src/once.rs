//! Work that is done once for an id, and values that are bound once to an id.

use std::sync::{Mutex, PoisonError};

use leasehold::bindings::Claimed;
use leasehold::once::{ResultSlot, Started};
use pyo3::prelude::*;
use pyo3::types::PyString;
use serde_json::{Value, json};

use crate::call::Call;
use crate::client::Client;
use crate::engine::Process;
use crate::failure::Failure;
use crate::guard::{Guard, Held};
use crate::terms::{Terms, retention};

/// Makes a call that returns a `Running` if this caller does the work, or the stored result in JSON.
#[pyfunction]
pub(crate) fn once(
    client: &Client,
    id: String,
    keep: Option<f64>,
    payload: Option<Vec<u8>>,
    terms: &Terms,
) -> PyResult<Call> {
    let keep = keep.map(|keep| retention("keep", keep)).transpose()?;
    let terms = terms.of_this_process();
    client.call(async move |locks| {
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
                Ok(OnceAnswer::Run(guard.into(), slot))
            }
            Started::Done(done) => {
                let result = String::from_utf8_lossy(done.bytes()).into_owned();
                Ok(OnceAnswer::Done(crate::json(&json!({ "result": result, "by": done.by(), "at_ms": done.at_ms() }))))
            }
        }
    })
}

enum OnceAnswer {
    Run(Held, ResultSlot),
    /// The stored result, in JSON.
    Done(String),
}

impl<'py> IntoPyObject<'py> for OnceAnswer {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        match self {
            Self::Run(held, slot) => Ok(Bound::new(py, Running::new(py, held, slot)?)?.into_any()),
            Self::Done(result) => Ok(PyString::new(py, &result).into_any()),
        }
    }
}

/// Makes a call that reads a stored result, in JSON; `None` if there is none (yet).
#[pyfunction]
pub(crate) fn once_result(client: &Client, id: String) -> PyResult<Call> {
    client.call(async move |locks| {
        let result: Option<Value> = locks.once(id).result().await?;
        Ok(result.map(|value| value.to_string()))
    })
}

/// Makes a call that deletes a stored result and returns whether there was one.
#[pyfunction]
pub(crate) fn once_forget(client: &Client, id: String) -> PyResult<Call> {
    client.call(async move |locks| Ok(locks.once(id).forget().await?))
}

/// Makes a call that binds a value to an id unless one is bound already, and returns the bound value in JSON.
#[pyfunction]
pub(crate) fn claim(client: &Client, id: String, value: String, keep: f64) -> PyResult<Call> {
    let keep = retention("lease", keep)?;
    let read = serde_json::from_str(&value);
    let value: Value = read.map_err(|error| Failure::Argument(format!("value: {error}")))?;
    client.call(async move |locks| {
        let claimed = locks.bindings::<Value>().try_create(id, &value, keep).await?;
        Ok(crate::json(&match claimed {
            Claimed::Created(_) => json!({ "created": true, "value": value }),
            Claimed::Exists(first) => json!({ "created": false, "value": first.value }),
        }))
    })
}

/// Work that this caller does. If it is dropped, nothing is stored, and the next caller does the work.
#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Running {
    process: Process,
    guard: Py<Guard>,
    /// `None` once the work has ended. The mutex is taken only under the GIL.
    slot: Mutex<Option<ResultSlot>>,
}

impl Running {
    fn new(py: Python<'_>, held: Held, slot: ResultSlot) -> PyResult<Self> {
        let guard = Py::new(py, Guard::new(held))?;
        Ok(Self { process: Process::this(), guard, slot: Mutex::new(Some(slot)) })
    }

    fn end<F>(&self, how: impl FnOnce(Held, ResultSlot) -> F + Send + 'static) -> PyResult<Call>
    where
        F: Future<Output = Result<bool, Failure>> + Send,
    {
        let slot = if self.process.is_this() { crate::lock(&self.slot).take() } else { None };
        let parts = slot.and_then(|slot| Some((self.guard.get().take()?, slot)));
        Call::uncancellable(async move {
            match parts {
                Some((held, slot)) => how(held, slot).await,
                None => Ok(false),
            }
        })
    }
}

#[pymethods]
impl Running {
    /// The lock that the work runs under.
    #[getter]
    fn guard(&self, py: Python<'_>) -> Py<Guard> {
        self.guard.clone_ref(py)
    }

    /// Makes a call that stores the result, releases the lock, and returns whether the result is stored.
    fn finish(&self, result: Vec<u8>) -> PyResult<Call> {
        self.end(async move |held: Held, slot| {
            let stored = slot.store(held.guard(), &result).await;
            // A release that fails goes on in the background; it must not hide the result.
            let _ = held.into_guard().await.release().await;
            Ok(stored?)
        })
    }

    /// Makes a call that records that the work was not done, so that the next caller does it.
    fn give_up(&self) -> PyResult<Call> {
        self.end(async |held: Held, slot| {
            let forgotten = slot.forget().await;
            let _ = held.into_guard().await.release().await;
            Ok(forgotten?)
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // A child drops nothing of its parent's.
            std::mem::forget(self.slot.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}
