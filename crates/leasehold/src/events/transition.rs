//! The transitions of the locks of one process, for its metrics.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::loss::LossReason;
use crate::store::{Operation, StoreErrorKind};

/// Gets every transition of this process as it happens: the place for metrics.
///
/// Called from the lock path, so an observer must not block.
pub trait Observer: Send + Sync + 'static {
    /// One transition.
    fn observe(&self, transition: &Transition<'_>);
}

/// A transition of one lock in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transition<'a> {
    /// A lock was acquired.
    Acquired {
        /// Which.
        name: &'a str,
        /// From asking to holding.
        waited: Duration,
        /// Whether another holder handed it over.
        handed_over: bool,
    },
    /// A request ended without the lock.
    NotAcquired {
        /// Which.
        name: &'a str,
        /// From asking to giving up.
        waited: Duration,
    },
    /// A lease was renewed.
    Renewed {
        /// Which.
        name: &'a str,
        /// What was left of the lease when the renewal was answered.
        slack: Duration,
    },
    /// A lease was lost.
    Lost {
        /// Which.
        name: &'a str,
        /// Why.
        why: LossReason,
    },
    /// A lock was released.
    Released {
        /// Which.
        name: &'a str,
        /// How long it was held.
        held: Duration,
        /// Which layer did it.
        layer: ReleaseLayer,
    },
    /// The store failed to answer.
    StoreFailed {
        /// What was asked.
        operation: Operation,
        /// What went wrong.
        kind: StoreErrorKind,
    },
    /// The store answered.
    Answered {
        /// What was asked.
        operation: Operation,
        /// From the question to the answer.
        took: Duration,
    },
    /// Something a person should know of.
    Alert {
        /// Which kind: `lua_script_error`, `gpu_lock_emergency_release`, `release_journalled`.
        kind: &'static str,
        /// Which lock.
        name: &'a str,
        /// Who held it.
        owner: &'a str,
        /// What went wrong.
        detail: &'a str,
    },
    /// Work runs without protection, because the store is unreachable and the policy says so.
    Unprotected {
        /// Which.
        name: &'a str,
    },
}

/// How a lock came to be released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ReleaseLayer {
    /// At the first try.
    Normal,
    /// By a retry of the same call.
    Retried,
    /// By other means.
    Emergency,
    /// Not at all: it stands in the journal.
    Journalled,
    /// It was not ours any more.
    NotOwner,
}
