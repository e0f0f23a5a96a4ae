//! What was told of since it was last looked at. A grant is told when its lease is half a second old; whoever watches
//! should not have to wait for the next look at everything.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use leasehold::LockName;
use tokio::sync::Notify;

/// Names kept at once. Where more happens, the next look at everything is soon enough.
const KEPT: usize = 64;

/// Names that are to be looked at first.
#[derive(Debug, Default)]
pub(super) struct Told {
    pending: Mutex<Pending>,
    added: Notify,
}

#[derive(Debug, Default)]
struct Pending {
    names: HashSet<LockName>,
    /// Those that were taken last are being looked at.
    looking: bool,
}

impl Told {
    /// Something happened to a lock.
    pub(super) fn add(&self, name: &str) {
        let Ok(name) = LockName::new(name) else { return };
        let mut pending = self.pending();
        if pending.names.len() < KEPT {
            pending.names.insert(name);
            self.added.notify_one();
        }
    }

    /// Waits until there is something.
    pub(super) async fn added(&self) {
        self.added.notified().await;
    }

    /// What is to be looked at now; [`looked`](Self::looked) says that it was.
    pub(super) fn take(&self) -> Vec<LockName> {
        let mut pending = self.pending();
        pending.looking = true;
        pending.names.drain().collect()
    }

    pub(super) fn looked(&self) {
        self.pending().looking = false;
    }

    /// Whether somebody was told of more than has been looked at.
    pub(super) fn is_ahead(&self) -> bool {
        let pending = self.pending();
        pending.looking || !pending.names.is_empty()
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
