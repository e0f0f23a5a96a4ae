use serde::{Deserialize, Serialize};

/// Why a lease was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LossReason {
    /// The lease ran out before a renewal was confirmed.
    Expired,
    /// The store no longer has the lease.
    Gone,
    /// The lease was revoked.
    Revoked,
    /// The lease reached the longest time that its holder had set.
    MaxHold,
    /// The manager was shut down.
    Shutdown,
    /// The database file was removed or replaced while the lease was held.
    Displaced,
}

impl std::fmt::Display for LossReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Expired => "its lease ran out before a renewal was confirmed",
            Self::Gone => "the store no longer knows the lease",
            Self::Revoked => "it was taken away",
            Self::MaxHold => "it was held for as long as its holder allowed",
            Self::Shutdown => "the lock manager was shut down",
            Self::Displaced => "the database file was removed or replaced",
        })
    }
}
