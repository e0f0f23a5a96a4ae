//! The holders that the inbox thread watches for their death, shared with the driver thread.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::liveness::Liveness;
use crate::machine::InboxId;

/// The FIFOs of holders that are watched. The driver thread and the inbox thread share it.
#[derive(Default)]
pub(super) struct DeathWatch {
    holders: Mutex<HashMap<InboxId, Arc<OwnedFd>>>,
    waiting: AtomicUsize,
    stopped: AtomicBool,
}

impl DeathWatch {
    /// Sets how many attempts of this process wait.
    pub(super) fn set_waiting(&self, places: usize, liveness: &Liveness) {
        // The first one starts the periodic check.
        if self.waiting.swap(places, Ordering::Relaxed) == 0 && places > 0 {
            liveness.wake(liveness.id());
        }
    }

    /// Watches another holder. `false` if its FIFO cannot be opened; the holder may have died just now.
    pub(super) fn add(&self, holder: InboxId, liveness: &Liveness) -> bool {
        let mut holders = self.holders();
        if holders.contains_key(&holder) {
            return true;
        }
        let Some(end) = liveness.watch(&holder) else { return false };
        holders.insert(holder, Arc::new(end));
        drop(holders);
        liveness.wake(liveness.id());
        true
    }

    /// Watches exactly these holders. `false` if the FIFO of one of them cannot be opened.
    pub(super) fn keep(&self, wanted: &HashSet<InboxId>, liveness: &Liveness) -> bool {
        self.holders().retain(|id, _| wanted.contains(id));
        wanted.iter().filter(|holder| !self.add((*holder).clone(), liveness)).count() == 0
    }

    /// Stops the thread.
    pub(super) fn stop(&self, liveness: &Liveness) {
        self.stopped.store(true, Ordering::Release);
        liveness.wake(liveness.id());
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Whether any attempt of this process waits.
    pub(super) fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) > 0
    }

    /// The watched holders and their FIFOs.
    pub(super) fn watched(&self) -> Vec<(InboxId, Arc<OwnedFd>)> {
        self.holders().iter().map(|(id, end)| (id.clone(), end.clone())).collect()
    }

    /// Ends the watch of holders that died.
    pub(super) fn remove(&self, dead: &[&InboxId]) {
        self.holders().retain(|id, _| !dead.contains(&id));
    }

    fn holders(&self) -> MutexGuard<'_, HashMap<InboxId, Arc<OwnedFd>>> {
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
