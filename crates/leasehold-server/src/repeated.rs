//! The same request, sent again while its first sending still waits, here or at another server: once one of them has
//! the lease, all are answered. The store tells one waiter; the others learn it by the event.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold::{EventKind, HolderId, LockEvent};
use tokio::sync::Notify;

/// Whose leases are waited for, and by how many requests.
#[derive(Default)]
pub(crate) struct Repeated(Mutex<HashMap<HolderId, (usize, Arc<Notify>)>>);

/// One request that waits for a lease under a token of its own.
pub(crate) struct Watch<'a> {
    all: &'a Repeated,
    holder: HolderId,
    granted: Arc<Notify>,
}

impl Repeated {
    pub(crate) fn watch(&self, holder: HolderId) -> Watch<'_> {
        let mut all = self.lock();
        let (requests, granted) = all.entry(holder).or_default();
        *requests += 1;
        Watch { all: self, holder, granted: granted.clone() }
    }

    pub(crate) fn happened(&self, event: &LockEvent) {
        if event.kind == EventKind::Granted
            && let Ok(holder) = HolderId::parse(&event.holder_id)
            && let Some((_, granted)) = self.lock().get(&holder)
        {
            granted.notify_waiters();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<HolderId, (usize, Arc<Notify>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch<'_> {
    /// Somebody has the lease.
    pub(crate) async fn told(&mut self) {
        self.granted.notified().await;
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        let mut all = self.all.lock();
        if let Some((requests, _)) = all.get_mut(&self.holder) {
            *requests -= 1;
            if *requests == 0 {
                all.remove(&self.holder);
            }
        }
    }
}
