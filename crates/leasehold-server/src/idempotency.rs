//! Repeated requests: a client may send an acquire request again, to this server or another, while the first one still
//! waits. Once one of them has the lease, all are answered. The store notifies one waiter; the others learn of the
//! grant from its event.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use leasehold::events::{EventKind, LockEvent};
use leasehold::inspect::HolderId;
use tokio::sync::Notify;

/// The acquire requests that wait for a lease, counted by holder id.
#[derive(Default)]
pub(crate) struct WaitingRequests(Mutex<HashMap<HolderId, (usize, Arc<Notify>)>>);

/// One request that waits for a lease under its own token.
pub(crate) struct WaitingRequest<'a> {
    all: &'a WaitingRequests,
    holder: HolderId,
    granted: Arc<Notify>,
}

impl WaitingRequests {
    pub(crate) fn register(&self, holder: HolderId) -> WaitingRequest<'_> {
        let mut all = self.lock();
        let (requests, granted) = all.entry(holder).or_default();
        *requests += 1;
        WaitingRequest { all: self, holder, granted: granted.clone() }
    }

    pub(crate) fn notify(&self, event: &LockEvent) {
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

impl WaitingRequest<'_> {
    /// Waits until one of the requests has been granted the lease.
    pub(crate) async fn notified(&mut self) {
        self.granted.notified().await;
    }
}

impl Drop for WaitingRequest<'_> {
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
