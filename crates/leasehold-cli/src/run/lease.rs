//! The lease of a run: one lock, or the locks of its GPUs.

use std::time::Duration;

use futures_util::future::{join_all, select_all};
use leasehold::gpu::{Device, Gpus};
use leasehold::lease::Moment;
use leasehold::{Error, Guard, LockName, LossReason};

/// The guards of a run, at least one.
pub(super) struct Lease {
    guards: Vec<Guard>,
    /// The devices of the guards; empty for a named lock.
    devices: Vec<Device>,
}

impl From<Guard> for Lease {
    fn from(guard: Guard) -> Self {
        Self { guards: vec![guard], devices: Vec::new() }
    }
}

impl From<Gpus> for Lease {
    fn from(gpus: Gpus) -> Self {
        let (guards, devices) = gpus.into_guards();
        Self { guards, devices }
    }
}

impl Lease {
    /// Returns the guard of a named lock, or the first GPU's guard.
    pub(super) fn guard(&self) -> &Guard {
        &self.guards[0]
    }

    pub(super) fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Returns the name of the lock; of several, the name of one that was lost, if any.
    pub(super) fn name(&self) -> &LockName {
        let lost = self.guards.iter().find(|guard| guard.loss().is_some());
        lost.unwrap_or(&self.guards[0]).name()
    }

    /// Returns the names for CMD, with commas between them.
    pub(super) fn names(&self) -> String {
        joined(self.guards.iter().map(|guard| guard.name().to_string()))
    }

    /// Returns the fences for CMD, in the order of the names.
    pub(super) fn fences(&self) -> String {
        joined(self.guards.iter().filter_map(|guard| guard.try_fence().map(|fence| fence.to_string())))
    }

    /// Returns until when all locks are proven.
    pub(super) fn valid_until(&self) -> Moment {
        self.guards.iter().map(Guard::valid_until).min().expect("at least one")
    }

    pub(super) fn remaining(&self) -> Duration {
        Moment::now().until(self.valid_until())
    }

    pub(super) fn loss(&self) -> Option<LossReason> {
        self.guards.iter().find_map(Guard::loss)
    }

    /// Waits until any lock is lost.
    pub(super) async fn lost(&self) -> LossReason {
        select_all(self.guards.iter().map(|guard| Box::pin(guard.lost()))).await.0
    }

    pub(super) async fn extend(&self, ttl: Duration) -> Result<(), Error> {
        let prolonged = join_all(self.guards.iter().map(|guard| guard.extend(ttl))).await;
        prolonged.into_iter().collect()
    }

    /// Releases all locks. Returns whether all were held until now.
    pub(super) async fn release(self) -> Result<bool, Error> {
        let mut held = true;
        for answer in join_all(self.guards.into_iter().map(Guard::release)).await {
            held &= answer?;
        }
        Ok(held)
    }
}

fn joined(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(",")
}
