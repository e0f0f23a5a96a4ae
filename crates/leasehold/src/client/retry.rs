//! How long a call goes on while the store does not answer.

use std::time::Duration;

use super::{Context, worth_asking_again};
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::store::StoreError;

/// Pauses between two requests.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(5), Duration::from_millis(200));

/// How long a call has gone without an answer, and how long it pauses before it asks again.
#[derive(Debug, Clone)]
pub(crate) struct Retry {
    backoff: Backoff,
    failing_since: Option<Moment>,
}

impl Retry {
    pub(crate) fn new() -> Self {
        Self { backoff: BACKOFF, failing_since: None }
    }

    /// When the call gives up, even while a request is in flight.
    pub(crate) fn gives_up_at(&self, cx: &Context<'_>) -> Option<Moment> {
        self.failing_since.map(|since| since + cx.policy.patience)
    }

    /// Whether the last request failed.
    pub(crate) fn is_failing(&self) -> bool {
        self.failing_since.is_some()
    }

    /// A request that was sent at `asked_at` failed. The pause before the next one; `None`: give up.
    pub(crate) fn failed(&mut self, cx: &mut Context<'_>, asked_at: Moment, error: &StoreError) -> Option<Duration> {
        let since = *self.failing_since.get_or_insert(asked_at);
        if !worth_asking_again(error) || since.until(cx.now) >= cx.policy.patience {
            return None;
        }
        Some(cx.jittered(self.backoff.pause()))
    }

    /// The store answered.
    pub(crate) fn answered(&mut self) {
        self.failing_since = None;
    }
}
