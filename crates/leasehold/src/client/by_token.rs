//! A call that takes a lock under a token its caller chose. The same call may be sent again, and several at once.

use std::time::Duration;

use super::Context;
use super::retry::Retry;
use crate::clock::Moment;
use crate::facts::{Fence, Ttl};
use crate::lease::belief::Belief;
use crate::loss::LossReason;
use crate::store::{Holder, Renewed, StoreError, StoreErrorKind};

/// The interval at which a call that waits checks whether its token got the lock in another way: the same call, sent again,
/// may wait in another process.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A call in progress.
#[derive(Debug, Clone)]
pub(crate) struct TokenCall {
    retry: Retry,
    /// The call cannot wait, or not any longer.
    time_is_over: bool,
}

/// What the store said of the token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TokenAnswer {
    Granted(Option<Fence>),
    Held(Box<Holder>),
    Revoked,
}

/// What to do after an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AfterLook {
    Granted(Option<Fence>),
    Revoked,
    /// Another token holds the lock, and the call timed out.
    Late(Box<Holder>),
    Failed(StoreError),
    /// Look again after this. Wait in the queue meanwhile, unless the store failed: a call that does not know whether it has
    /// the lock already must not wait for it.
    Wait {
        look_after: Duration,
        seen: Result<Box<Holder>, StoreError>,
    },
}

impl TokenCall {
    pub(crate) fn new(may_wait: bool) -> Self {
        Self { retry: Retry::new(), time_is_over: !may_wait }
    }

    /// Whether the call may wait in the queue now.
    pub(crate) fn waits_in_line(&self) -> bool {
        !self.retry.is_failing() && !self.time_is_over
    }

    /// The wait is over. The call looks one last time.
    pub(crate) fn waited_in_vain(&mut self) {
        self.time_is_over = true;
    }

    /// The store answered a look that began at `asked_at`, or failed to.
    pub(crate) fn answered(
        &mut self,
        cx: &mut Context<'_>,
        asked_at: Moment,
        answer: Result<TokenAnswer, StoreError>,
    ) -> AfterLook {
        match answer {
            Ok(TokenAnswer::Granted(fence)) => AfterLook::Granted(fence),
            Ok(TokenAnswer::Revoked) => AfterLook::Revoked,
            Ok(TokenAnswer::Held(holder)) if self.time_is_over => AfterLook::Late(holder),
            Ok(TokenAnswer::Held(holder)) => {
                self.retry.answered();
                AfterLook::Wait { look_after: cx.jittered(LOOK_EVERY), seen: Ok(holder) }
            }
            Err(error) => match self.retry.failed(cx, asked_at, &error) {
                Some(look_after) => AfterLook::Wait { look_after, seen: Err(error) },
                None => AfterLook::Failed(error),
            },
        }
    }
}

/// What a renewal means that makes a lease its token's for a full ttl.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Confirmed {
    /// The lease lasts its ttl from some moment of the call.
    Yes,
    /// The token does not hold it any more.
    Lost(LossReason),
    /// The answer is unknown, or came too late to rely on the lease.
    Unknown(StoreError),
}

/// Reads the answer to a renewal that was sent at `asked_at`.
pub(crate) fn confirmed(now: Moment, asked_at: Moment, ttl: Ttl, answer: &Renewed) -> Confirmed {
    match answer {
        Renewed::Renewed if Belief::new(now, asked_at, ttl.duration()).is_valid(now) => Confirmed::Yes,
        Renewed::Renewed => Confirmed::Unknown(StoreErrorKind::NoAnswer.into()),
        Renewed::Lost => Confirmed::Lost(LossReason::Gone),
        Renewed::Revoked => Confirmed::Lost(LossReason::Revoked),
        Renewed::Displaced => Confirmed::Lost(LossReason::Displaced),
        Renewed::Unknown(error) => Confirmed::Unknown(error.clone()),
    }
}
