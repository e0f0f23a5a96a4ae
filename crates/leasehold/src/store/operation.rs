//! The operations of a store, by their names in errors and metrics.

use std::fmt;

/// The operation of a store that failed or was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Acquire a lock, or join its queue.
    Acquire,
    /// Release a lock.
    Release,
    /// Renew or check a lease.
    Renew,
    /// Evict a holder.
    Evict,
    /// Ask a holder to finish.
    AskToFinish,
    /// Inspect locks.
    Inspect,
    /// Create a binding, or read the existing one.
    Create,
    /// Read a binding.
    Read,
    /// Change an existing binding.
    Change,
    /// Remove a binding.
    Remove,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Acquire => "acquire",
            Self::Release => "release",
            Self::Renew => "renew",
            Self::Evict => "evict",
            Self::AskToFinish => "ask to finish",
            Self::Inspect => "inspect",
            Self::Create => "create",
            Self::Read => "read",
            Self::Change => "change",
            Self::Remove => "remove",
        })
    }
}
