//! A lease that this process holds.

use std::sync::Arc;

use super::lease_cell::LeaseCell;
use super::releasing::Releases;
use crate::error::Error;

/// A lease that is renewed until this is dropped, which releases the lock in the background.
pub(crate) struct HeldLease {
    releases: Arc<Releases>,
    /// There until it is given up.
    cell: Option<Arc<LeaseCell>>,
}

impl HeldLease {
    /// Begins to renew a lease that was granted.
    pub(super) fn begin(releases: &Arc<Releases>, cell: LeaseCell) -> Self {
        let cell = Arc::new(cell);
        releases.leases.insert(&cell);
        Self { releases: releases.clone(), cell: Some(cell) }
    }

    /// Represents a lease that could not be asked for; nothing renews or releases it.
    pub(super) fn unprotected(releases: &Arc<Releases>, cell: Arc<LeaseCell>) -> Self {
        Self { releases: releases.clone(), cell: Some(cell) }
    }

    pub(super) fn cell(&self) -> &Arc<LeaseCell> {
        self.cell.as_ref().expect("there until it is given up")
    }

    /// Releases the lock. `Ok(false)`: this process did not hold it any more.
    pub(super) async fn release(self) -> Result<bool, Error> {
        let (releases, cell) = self.into_parts();
        releases.release(cell).await
    }

    /// Takes the lease out, so that dropping this releases nothing.
    pub(super) fn into_cell(self) -> Arc<LeaseCell> {
        self.into_parts().1
    }

    fn into_parts(mut self) -> (Arc<Releases>, Arc<LeaseCell>) {
        let cell = self.cell.take().expect("there until it is given up");
        (self.releases.clone(), cell)
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        if let Some(cell) = self.cell.take() {
            self.releases.release_in_background(cell);
        }
    }
}
