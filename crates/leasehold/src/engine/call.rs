//! A call that acquires a lock, members of a pool or a lease under a token: its start, its deadline, its accounting.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::task::task_tracker::TaskTrackerToken;

use super::core::Core;
use super::wish::Wait;
use crate::clock::{Moment, sleep_until};
use crate::error::Error;
use crate::events::Transition;
use crate::facts::{Fence, LockName};
use crate::store::{Operation, StoreError};

/// Why a call ended without a lock.
pub(super) enum Ended {
    /// It timed out. What was seen until then decides which error the caller gets.
    Late,
    Error(Error),
}

impl Ended {
    pub(super) fn shut_down(name: &LockName) -> Self {
        Self::Error(Error::ShutDown { name: name.clone() })
    }
}

/// A call under way. The store is not closed while it lives.
pub(super) struct CallScope<'a> {
    core: &'a Arc<Core>,
    wait: Wait,
    pub(super) began: Moment,
    _under_way: TaskTrackerToken,
}

impl<'a> CallScope<'a> {
    pub(super) fn begin(core: &'a Arc<Core>, name: &LockName, wait: Wait) -> Result<Self, Error> {
        // Before the look: a shutdown either is seen here, or waits for this call.
        let under_way = core.call();
        if core.closing.is_cancelled() {
            return Err(Error::ShutDown { name: name.clone() });
        }
        Ok(Self { core, wait, began: Moment::now(), _under_way: under_way })
    }

    /// Runs the call until its deadline. The second result is how long it took. The caller pins the future: passed by
    /// value it would take up its space twice, and be copied with every call.
    pub(super) async fn run<T>(
        &self,
        mut obtain: Pin<&mut impl Future<Output = Result<T, Ended>>>,
    ) -> (Result<T, Ended>, Duration) {
        let outcome = match self.wait.answer_by(self.began, self.core.options.request_timeout) {
            None => obtain.await,
            Some(by) => tokio::select! {
                biased;
                outcome = &mut obtain => outcome,
                () = sleep_until(Some(by)) => Err(Ended::Late),
            },
        };
        (outcome, self.began.until(Moment::now()))
    }

    /// Counts a lock that was acquired, and reports it to the observer.
    pub(super) fn acquired(&self, name: &LockName, fence: Option<Fence>, waited: Duration, handed_over: bool) {
        self.core.publisher.stats.total_locks.add_one();
        tracing::debug!(%name, ?waited, ?fence, "acquired");
        self.core.publisher.observe(&Transition::Acquired { name: name.as_str(), waited, handed_over });
    }

    /// Counts a call that timed out, and reports it to the observer. Returns the wait time that the error states.
    pub(super) fn not_acquired(&self, name: &LockName, waited: Duration) -> Duration {
        self.core.publisher.stats.not_acquired.add_one();
        tracing::debug!(%name, ?waited, "not acquired");
        self.core.publisher.observe(&Transition::NotAcquired { name: name.as_str(), waited });
        if self.wait == Wait::Not { Duration::ZERO } else { waited }
    }

    /// The store's description, for errors.
    pub(super) fn store(&self) -> String {
        self.core.store.describe()
    }

    pub(super) fn store_error(&self, name: &LockName, source: StoreError) -> Error {
        self.core.store_error(Operation::Acquire, name, source)
    }
}
