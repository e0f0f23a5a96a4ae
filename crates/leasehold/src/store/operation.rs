//! The operations of a store, by their names in errors and metrics.

use std::fmt;

/// What was asked of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Take a lock, or stand in line for it.
    Acquire,
    /// Give it back.
    Release,
    /// Prolong it.
    Renew,
    /// Take it away from somebody.
    Evict,
    /// Ask somebody to come to an end.
    AskToFinish,
    /// Look at locks.
    Inspect,
    /// Create a binding, or read what exists.
    Create,
    /// Read a binding.
    Read,
    /// Change a binding that is there.
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
