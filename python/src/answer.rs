//! What Python gets when a call is answered.

use leasehold::once::ResultSlot;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;

use crate::guard::{Guard, Held};
use crate::once::Running;

pub(crate) enum Answer {
    Nothing,
    Bool(bool),
    Number(Option<u64>),
    Text(Option<String>),
    Guard(Held),
    /// Members of a pool.
    Permits(Vec<(u32, Held)>),
    /// Work that is ours to do.
    Running(Held, ResultSlot),
}

impl Answer {
    /// Views are told to Python in JSON: one vocabulary for the command, the API and Python.
    pub(crate) fn json(view: &impl serde::Serialize) -> Self {
        Self::Text(Some(serde_json::to_string(view).expect("a view is JSON")))
    }

    pub(crate) fn into_python(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self {
            Self::Nothing => Ok(py.None()),
            Self::Bool(is) => is.into_py_any(py),
            Self::Number(number) => number.into_py_any(py),
            Self::Text(text) => text.into_py_any(py),
            Self::Guard(held) => Guard::new(held).into_py_any(py),
            Self::Permits(permits) => {
                let permits: Vec<_> = permits.into_iter().map(|(index, held)| (index, Guard::new(held))).collect();
                permits.into_py_any(py)
            }
            Self::Running(held, slot) => Running::new(py, held, slot)?.into_py_any(py),
        }
    }
}
