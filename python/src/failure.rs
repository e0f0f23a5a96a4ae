//! Errors, and the Python exceptions that report them.

use leasehold::inspect::LockInfo;
use leasehold::lease::Invalid;
use leasehold::store::StoreErrorKind;
use leasehold::{Error, LossReason};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::json;

/// An error of the library, or one that only Python callers can cause.
#[derive(Debug)]
pub(crate) enum Failure {
    Lock(Error),
    /// A forked child used a guard of its parent.
    Inherited {
        name: String,
        pid: u32,
    },
    /// A guard was used after its release.
    Released {
        name: String,
    },
    Argument(String),
    Closed {
        store: String,
    },
    /// The lock has another holder by now, or its holder cannot be revoked. `holder` is a view in JSON.
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

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        Python::attach(|py| failure.exception(py).unwrap_or_else(|error| error))
    }
}

impl Failure {
    /// The exception. Its class is defined in Python.
    fn exception(self, py: Python<'_>) -> PyResult<PyErr> {
        let errors = py.import("leasehold._errors")?;
        let class = |name| errors.getattr(name);
        let made = match self {
            Self::Lock(error) => {
                let message = format!("{error:#}");
                match error {
                    Error::NotAcquired { name, waited, holder, store } => {
                        let info = LockInfo { name: name.clone(), holder: holder.map(|h| *h), waiters: Vec::new() };
                        let args = (message, name.to_string(), json(&info.view()), waited.as_secs_f64(), store);
                        class("not_acquired")?.call1(args)?
                    }
                    Error::PoolBusy { name, members, waited, store, .. } => {
                        let members: Vec<_> = members.iter().map(|m| (m.index, json(&m.lock.view()))).collect();
                        class("pool_busy")?.call1((message, name.to_string(), members, waited.as_secs_f64(), store))?
                    }
                    Error::Lost { name, why } => class("LockLost")?.call1((message, name.to_string(), reason(why)))?,
                    Error::Store { name, store, source, .. } => {
                        let args = (message, store, Some(name.to_string()), kind(source.kind()), source.is_passing());
                        class("StoreUnavailable")?.call1(args)?
                    }
                    Error::Connect { source, .. } if source.kind() == StoreErrorKind::Refused => {
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
                    "the lease on {name:?} belongs to process {pid}, from which this one was forked: it is neither held \
                     nor released here. Acquire the lock in this process"
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
            return Err(PyTypeError::new_err("leasehold._errors returned something else than an exception"));
        }
        Ok(PyErr::from_value(made))
    }
}

/// Why a lease was lost, as Python callers compare it.
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

/// The name of the kind, in snake case.
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
