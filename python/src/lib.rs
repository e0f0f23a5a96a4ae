//! The native module of the Python package `leasehold`.
//!
//! Connections, renewals and waiting run in one native thread, and in Python threads while these wait for an answer. None
//! of it takes the GIL, so leases are renewed while Python code holds it. An event loop waits for a descriptor that
//! becomes readable.
//!
//! | file | what it does |
//! |---|---|
//! | `engine` | the runtime of this process, which no forked child touches |
//! | `driver` | which thread drives the runtime: the native one, or a Python thread that waits |
//! | `call` | one request: a thread waits for its answer, or an event loop is notified by its `Mailbox` |
//! | `terms` | the terms of a request, and times as Python gives them |
//! | `config` | the configuration: file, environment, and keys set by the program |
//! | `client`, `guard`, `pool`, `once` | the objects that Python holds |
//! | `failure` | errors, and their Python exceptions |
//! | `log` | passes the library's log events to Python's `logging` |

mod call;
mod client;
mod config;
mod driver;
mod engine;
mod failure;
mod guard;
mod log;
mod once;
mod pool;
mod terms;

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;

/// The native module; `_native.pyi` has its types.
#[pymodule(gil_used = true)]
mod _native {
    #[pymodule_export]
    use super::call::{Call, Mailbox};
    #[pymodule_export]
    use super::client::{Client, after_fork_in_child, after_fork_in_parent, before_fork, close_all, new_token};
    #[pymodule_export]
    use super::config::Config;
    #[pymodule_export]
    use super::guard::Guard;
    #[pymodule_export]
    use super::log::{begin_log, end_log};
    #[pymodule_export]
    use super::once::{Running, claim, once, once_forget, once_result};
    #[pymodule_export]
    use super::pool::{acquire_any, pool_status};
    #[pymodule_export]
    use super::terms::{Terms, check_retention, check_ttl};

    /// The version of the package.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_init]
    fn init() {
        super::log::subscribe();
    }
}

/// Locks a mutex, poisoned or not.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes a value as JSON. The views of the library reach Python this way, with the fields of the command and the API.
fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("a view is JSON")
}
