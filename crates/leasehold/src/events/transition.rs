//! What happened to the locks of this process, for its metrics.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::loss::LossReason;
use crate::store::{Operation, StoreErrorKind};

/// Receives every transition of this process as it happens.
///
/// It is called on the lock path, so it must not block.
pub trait Observer: Send + Sync + 'static {
    /// Receives one transition.
    fn observe(&self, transition: &Transition<'_>);
}

/// Something that happened to a lock of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transition<'a> {
    /// A lock was acquired.
    Acquired {
        /// The lock.
        name: &'a str,
        /// The time from the request to the guard.
        waited: Duration,
        /// Whether the lock was granted by a hand-off.
        handed_over: bool,
    },
    /// A request ended without the lock.
    NotAcquired {
        /// The lock.
        name: &'a str,
        /// The time from the request to its end.
        waited: Duration,
    },
    /// A lease was renewed.
    Renewed {
        /// The lock.
        name: &'a str,
        /// What was left of the lease when the reply to the renewal arrived.
        slack: Duration,
    },
    /// A lease was lost.
    Lost {
        /// The lock.
        name: &'a str,
        /// The reason.
        why: LossReason,
    },
    /// A lock was released.
    Released {
        /// The lock.
        name: &'a str,
        /// How long it was held.
        held: Duration,
        /// How it was released.
        layer: ReleaseLayer,
    },
    /// The store did not reply, or replied with an error.
    StoreFailed {
        /// The operation.
        operation: Operation,
        /// The kind of error.
        kind: StoreErrorKind,
    },
    /// The store replied.
    Answered {
        /// The operation.
        operation: Operation,
        /// The time from the request to the reply.
        took: Duration,
    },
    /// Something that an operator should know.
    Alert {
        /// The kind: `lua_script_error`, `gpu_lock_emergency_release` or `release_journalled`.
        kind: &'static str,
        /// The lock.
        name: &'a str,
        /// Its owner.
        owner: &'a str,
        /// What went wrong.
        detail: &'a str,
    },
    /// Work runs without a lock, because the store is unreachable and the options allow it.
    Unprotected {
        /// The lock.
        name: &'a str,
    },
}

/// How a lock was released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ReleaseLayer {
    /// At the first attempt.
    Normal,
    /// By a retry.
    Retried,
    /// By a fallback, after the release itself had failed.
    Emergency,
    /// Not yet: the release is in the journal.
    Journalled,
    /// Not at all: another holder already had the lock, or it was free.
    NotOwner,
}
