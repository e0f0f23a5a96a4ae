//! The locks with events since they were last scanned. A grant is published when its lease is half a second old, and a
//! viewer should not have to wait for the next full scan to see it.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use leasehold::LockName;
use tokio::sync::Notify;

/// The most pending names. With more changes than this, the next full scan is soon enough.
const MAX_PENDING: usize = 64;

/// The locks to refresh before the next full scan.
#[derive(Debug, Default)]
pub(super) struct ChangedLocks {
    pending: Mutex<PendingNames>,
    added: Notify,
}

#[derive(Debug, Default)]
struct PendingNames {
    names: HashSet<LockName>,
    /// Whether the names taken last are being refreshed.
    refreshing: bool,
}

impl ChangedLocks {
    /// Adds a lock that an event named.
    pub(super) fn add(&self, name: &str) {
        let Ok(name) = LockName::new(name) else { return };
        let mut pending = self.pending();
        if pending.names.len() < MAX_PENDING {
            pending.names.insert(name);
            self.added.notify_one();
        }
    }

    /// Waits until a name is added.
    pub(super) async fn added(&self) {
        self.added.notified().await;
    }

    /// Takes the names to refresh now. [`refreshed`](Self::refreshed) marks them as done.
    pub(super) fn take(&self) -> Vec<LockName> {
        let mut pending = self.pending();
        pending.refreshing = true;
        pending.names.drain().collect()
    }

    pub(super) fn refreshed(&self) {
        self.pending().refreshing = false;
    }

    /// Whether events have named locks that are not refreshed yet.
    pub(super) fn has_pending(&self) -> bool {
        let pending = self.pending();
        pending.refreshing || !pending.names.is_empty()
    }

    fn pending(&self) -> MutexGuard<'_, PendingNames> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
