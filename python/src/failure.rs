//! Why a call was not answered as asked, and the exception that says so.

use leasehold::Error;
use leasehold::inspect::LockInfo;
use leasehold::lease::Invalid;
use leasehold::store::StoreErrorKind;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::guard::reason;

/// What the library says, and what only Python can get wrong.
#[derive(Debug)]
pub(crate) enum Failure {
    Lock(Error),
    /// A guard that a child inherited.
    Inherited {
        name: String,
        pid: u32,
    },
    /// A guard that was given back.
    Released {
        name: String,
    },
    Argument(String),
    Closed {
        store: String,
    },
    /// What was to be evicted is held by another one, or cannot be revoked: its view.
    NotEvicted {
        message: String,
        name: String,
        holder: String,
    },
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Lock(error)
    }
}

impl From<Invalid> for Failure {
    fn from(invalid: Invalid) -> Self {
        Self::Lock(invalid.into())
    }
}

impl Failure {
    /// The exception, made by Python: its classes are defined there.
    pub(crate) fn raise(self, py: Python<'_>) -> PyErr {
        self.exception(py).unwrap_or_else(|error| error)
    }

    fn exception(self, py: Python<'_>) -> PyResult<PyErr> {
        let errors = py.import("leasehold._errors")?;
        let class = |name| errors.getattr(name);
        let made = match self {
            Self::Lock(error) => {
                let message = format!("{error:#}");
                match error {
                    Error::NotAcquired { name, waited, holder, store } => {
                        let info = LockInfo { name: name.clone(), holder: holder.map(|h| *h), waiters: Vec::new() };
                        let args = (message, name.to_string(), json(&info), waited.as_secs_f64(), store);
                        class("not_acquired")?.call1(args)?
                    }
                    Error::PoolBusy { name, members, waited, store, .. } => {
                        let members: Vec<_> = members.iter().map(|m| (m.index, json(&m.lock))).collect();
                        class("pool_busy")?.call1((message, name.to_string(), members, waited.as_secs_f64(), store))?
                    }
                    Error::Lost { name, why } => class("LockLost")?.call1((message, name.to_string(), reason(why)))?,
                    Error::Store { name, store, source, .. } => {
                        let args = (message, store, Some(name.to_string()), kind(source.kind()), source.is_passing());
                        class("StoreUnavailable")?.call1(args)?
                    }
                    Error::Connect { store, source } if source.kind() == StoreErrorKind::Refused => {
                        let _ = store;
                        class("InvalidArgument")?.call1((message,))?
                    }
                    Error::Connect { store, source } => {
                        let args = (message, store, None::<String>, kind(source.kind()), source.is_passing());
                        class("StoreUnavailable")?.call1(args)?
                    }
                    Error::OtherPayload { name } => class("OtherPayload")?.call1((message, name.to_string()))?,
                    Error::Invalid(_) => class("InvalidArgument")?.call1((message,))?,
                    Error::ShutDown { .. } => class("ClientClosed")?.call1((message,))?,
                    _ => class("LeaseholdError")?.call1((message,))?,
                }
            }
            Self::Inherited { name, pid } => {
                let message = format!(
                    "the lease on {name:?} belongs to process {pid}, which this one was forked from: it is neither \
                     held nor released here. Acquire the lock in this process"
                );
                class("LockLost")?.call1((message, name, "forked"))?
            }
            Self::Released { name } => {
                class("LockLost")?.call1((format!("the lease on {name:?} was released"), name, "released"))?
            }
            Self::Argument(message) => class("InvalidArgument")?.call1((message,))?,
            Self::Closed { store } => {
                class("ClientClosed")?.call1((format!("the client of {store} was closed; connect again"),))?
            }
            Self::NotEvicted { message, name, holder } => class("not_evicted")?.call1((message, name, holder))?,
        };
        if !made.is_instance_of::<pyo3::exceptions::PyBaseException>() {
            return Err(PyTypeError::new_err("leasehold._errors makes no exceptions"));
        }
        Ok(PyErr::from_value(made))
    }
}

pub(crate) fn json(info: &LockInfo) -> String {
    serde_json::to_string(&info.view()).expect("a view is JSON")
}

/// In the words of `StoreErrorKind`, as Python writes words.
fn kind(kind: StoreErrorKind) -> String {
    let mut text = String::new();
    for c in format!("{kind:?}").chars() {
        if c.is_uppercase() && !text.is_empty() {
            text.push('_');
        }
        text.extend(c.to_lowercase());
    }
    text
}
