use std::fmt;
use std::ops::Deref;

use futures_util::future::join_all;

use crate::engine::guard::{Guard, first_lost};
use crate::engine::pooling::{PoolParts, Taken};
use crate::error::Error;
use crate::loss::LossReason;

/// Holds one member of a pool: a [`Guard`] on that lock, which knows its number. Dropping it gives the
/// member up, in the background.
#[must_use = "dropping the permit gives the member up"]
pub struct Permit {
    index: u32,
    guard: Guard,
}

impl Permit {
    pub(super) fn new(pool: &PoolParts, (which, guard): Taken) -> Self {
        Self { index: pool.members[which].index, guard }
    }

    /// Which member it is.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The guard on the member's lock; a permit can be used as one directly.
    pub fn guard(&self) -> &Guard {
        &self.guard
    }

    /// The guard alone.
    pub fn into_guard(self) -> Guard {
        self.guard
    }

    /// Releases the member; see [`Guard::release`].
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer; the release goes on in the background.
    ///
    /// # Cancel safety
    /// Dropped before the answer, the release goes on in the background.
    pub async fn release(self) -> Result<bool, Error> {
        self.guard.release().await
    }
}

impl Deref for Permit {
    type Target = Guard;
    fn deref(&self) -> &Guard {
        &self.guard
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("index", &self.index).field("guard", &self.guard).finish()
    }
}

/// Holds several members of a pool, at least one, in the order in which the pool names them.
#[derive(Debug)]
#[must_use = "dropping the permits releases the members"]
pub struct Permits(Vec<Permit>);

impl Permits {
    pub(super) fn new(permits: Vec<Permit>) -> Self {
        Self(permits)
    }

    /// Which members they are.
    pub fn indices(&self) -> Vec<u32> {
        self.0.iter().map(Permit::index).collect()
    }

    /// Waits until any of them is lost; says which, and why.
    ///
    /// # Cancel safety
    /// Cancel safe: a later call returns the same loss.
    pub async fn lost(&self) -> (&Permit, LossReason) {
        let guards: Vec<&Guard> = self.0.iter().map(|permit| &permit.guard).collect();
        let (which, why) = first_lost(&guards).await;
        (&self.0[which], why)
    }

    /// Releases all of them at once. `true`: all were held until now.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer; what is missing goes on in the background.
    ///
    /// # Cancel safety
    /// Dropped before the answers, the releases go on in the background.
    pub async fn release(self) -> Result<bool, Error> {
        let mut all_ours = true;
        for answer in join_all(self.0.into_iter().map(Permit::release)).await {
            all_ours &= answer?;
        }
        Ok(all_ours)
    }
}

impl Deref for Permits {
    type Target = [Permit];
    fn deref(&self) -> &[Permit] {
        &self.0
    }
}

impl IntoIterator for Permits {
    type Item = Permit;
    type IntoIter = std::vec::IntoIter<Permit>;
    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}
