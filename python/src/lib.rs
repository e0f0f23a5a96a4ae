//! The native half of the Python package `leasehold`.
//!
//! What goes on in the background (connections, renewals, waiting) is run by one thread of our own, and by Python
//! threads while they wait. None of it takes the interpreter's lock, so it goes on while Python code hogs that, and
//! whatever event loop Python runs knows nothing of it: it waits at a descriptor that becomes readable.
//!
//! | file | what it is about |
//! |---|---|
//! | `engine` | what runs in the background, and how it is told from what a fork left behind |
//! | `driving` | which thread it runs in: its own, or one that waits for it |
//! | `call` | one question: waited for by a thread, or told to an event loop by its `Mailbox` |
//! | `config` | what a file, the environment and the program say |
//! | `client`, `guard`, `pool`, `once` | what Python holds |
//! | `answer`, `failure` | what Python gets |
//! | `log` | what the library has to say, for Python's `logging` |

mod answer;
mod call;
mod client;
mod config;
mod driving;
mod engine;
mod failure;
mod guard;
mod log;
mod once;
mod pool;

use pyo3::prelude::*;

/// See `_native.pyi`.
#[pymodule(gil_used = true)]
mod _native {
    #[pymodule_export]
    use super::call::{Call, Mailbox};
    #[pymodule_export]
    use super::client::{
        Client, after_fork_in_child, after_fork_in_parent, before_fork, check_kept, check_lease, close_all, new_token,
    };
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

    /// The package's.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_init]
    fn begin() {
        super::log::begin();
    }
}
