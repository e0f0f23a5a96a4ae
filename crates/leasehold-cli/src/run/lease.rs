//! What a run holds: one lock, or those of its GPUs.

use std::time::Duration;

use futures_util::future::{join_all, select_all};
use leasehold::gpu::{Device, Gpus};
use leasehold::lease::Moment;
use leasehold::{Error, Guard, LockName, LossReason};

/// At least one guard.
pub(super) struct Lease {
    guards: Vec<Guard>,
    /// The devices the guards are for; none for a lock with a name.
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
    /// The guard of a lock with a name; the first one of GPUs.
    pub(super) fn guard(&self) -> &Guard {
        &self.guards[0]
    }

    pub(super) fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The lock; of several, the one that was lost, if one was.
    pub(super) fn name(&self) -> &LockName {
        let lost = self.guards.iter().find(|guard| guard.loss().is_some());
        lost.unwrap_or(&self.guards[0]).name()
    }

    /// For the command: the names, and the fences in the same order.
    pub(super) fn names(&self) -> String {
        joined(self.guards.iter().map(|guard| guard.name().to_string()))
    }

    pub(super) fn fences(&self) -> String {
        joined(self.guards.iter().filter_map(|guard| guard.try_fence().map(|fence| fence.to_string())))
    }

    /// Until when all of it is proven.
    pub(super) fn valid_until(&self) -> Moment {
        self.guards.iter().map(Guard::valid_until).min().expect("at least one")
    }

    pub(super) fn remaining(&self) -> Duration {
        Moment::now().until(self.valid_until())
    }

    pub(super) fn loss(&self) -> Option<LossReason> {
        self.guards.iter().find_map(Guard::loss)
    }

    /// Until any of it is lost.
    pub(super) async fn lost(&self) -> LossReason {
        select_all(self.guards.iter().map(|guard| Box::pin(guard.lost()))).await.0
    }

    pub(super) async fn extend(&self, ttl: Duration) -> Result<(), Error> {
        let prolonged = join_all(self.guards.iter().map(|guard| guard.extend(ttl))).await;
        prolonged.into_iter().collect()
    }

    /// Gives all of it back. `true`: it was ours until now.
    pub(super) async fn release(self) -> Result<bool, Error> {
        let mut ours = true;
        for answer in join_all(self.guards.into_iter().map(Guard::release)).await {
            ours &= answer?;
        }
        Ok(ours)
    }
}

fn joined(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join(",")
}
