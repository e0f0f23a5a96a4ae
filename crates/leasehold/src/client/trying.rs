//! One try for a lock, and its retries while the store does not answer.

use std::time::Duration;

use super::retry::Retry;
use super::{Context, may_still_run};
use crate::clock::Moment;
use crate::lease::belief::Belief;
use crate::rules::Rule;
use crate::store::{Grant, Holder, StoreError, StoreErrorKind, Try};

/// A try in progress.
#[derive(Debug, Clone)]
pub(crate) struct Trying {
    retry: Retry,
    /// Whether the store may have done anything for the present token.
    touched: bool,
}

/// What to do after an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AfterTry {
    /// The lock is ours.
    Granted(Grant),
    /// Another token holds the lock, and nothing is left to undo.
    Held(Option<Holder>),
    /// Send it again after a pause. `new_token`: under another token, and the present one has to be undone.
    Again { after: Duration, new_token: bool, error: StoreError },
    /// Give up. `undo`: the store may have granted the token.
    Failed { error: StoreError, undo: bool },
}

impl Trying {
    pub(crate) fn new() -> Self {
        Self { retry: Retry::new(), touched: false }
    }

    /// When the try gives up, even while a request is in flight.
    pub(crate) fn gives_up_at(&self, cx: &Context<'_>) -> Option<Moment> {
        self.retry.gives_up_at(cx)
    }

    /// The store answered a request that was sent at `asked_at`, or failed to.
    pub(crate) fn answered(
        &mut self,
        cx: &mut Context<'_>,
        asked_at: Moment,
        answer: Result<Try, StoreError>,
    ) -> AfterTry {
        match answer {
            Ok(Try::Granted(grant)) if Belief::new(cx.now, grant.asked_at, grant.lasts).is_valid(cx.now) => {
                AfterTry::Granted(grant)
            }
            // The answer took as long as the lease, so it is too late to begin. Asking again with the token renews it.
            Ok(Try::Granted(_)) => self.again(cx, asked_at, StoreErrorKind::NoAnswer.into(), false),
            Ok(Try::Held(holder)) => AfterTry::Held(holder),
            // The token is used up.
            Ok(Try::Revoked) => self.again(cx, asked_at, StoreErrorKind::TryAgain.into(), true),
            Err(error) => self.again(cx, asked_at, error, false),
        }
    }

    /// The lease ended, or was revoked, before its task received it. It is released, and the task tries again.
    pub(crate) fn lapsed(&mut self, cx: &mut Context<'_>, asked_at: Moment) -> AfterTry {
        self.again(cx, asked_at, StoreErrorKind::TryAgain.into(), true)
    }

    fn again(&mut self, cx: &mut Context<'_>, asked_at: Moment, error: StoreError, used_up: bool) -> AfterTry {
        self.touched |= !error.was_refused();
        let Some(after) = self.retry.failed(cx, asked_at, &error) else {
            // A try has several steps, and an error of the last one says nothing of the first. Only where nothing was
            // done at all is there nothing to undo.
            return AfterTry::Failed { error, undo: self.touched || used_up };
        };
        // With the same token: should the lost request have been granted, it is ours.
        let may_run_later = may_still_run(&error) && !cx.may_resend;
        let new_token = used_up || (may_run_later && Rule::LostTryGetsNewToken.applies());
        AfterTry::Again { after, new_token, error }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{Policy, RandomSource};
    use crate::facts::Token;

    struct NoJitter;

    impl RandomSource for NoJitter {
        fn token(&mut self) -> Token {
            Token::random()
        }
        fn byte(&mut self) -> u32 {
            0
        }
        fn wall_ms(&mut self) -> u64 {
            0
        }
    }

    fn at(ms: u64) -> Moment {
        Moment::from_boot(Duration::from_millis(ms))
    }

    fn answered(trying: &mut Trying, now_ms: u64, may_resend: bool, answer: Result<Try, StoreError>) -> AfterTry {
        let policy = Policy {
            events: true,
            poll_interval: Duration::from_millis(10),
            max_poll_interval: Duration::from_millis(100),
            ask_again_within: Duration::from_secs(30),
            patience: Duration::from_secs(10),
        };
        let mut cx = Context { now: at(now_ms), policy: &policy, may_resend, source: &mut NoJitter };
        trying.answered(&mut cx, at(0), answer)
    }

    #[test]
    fn an_unanswered_try_is_sent_again_under_its_token_where_that_is_safe() {
        let error: StoreError = StoreErrorKind::NoAnswer.into();
        for may_resend in [true, false] {
            let mut trying = Trying::new();
            let next = answered(&mut trying, 100, may_resend, Err(error.clone()));
            assert_eq!(
                next,
                AfterTry::Again { after: Duration::from_millis(5), new_token: !may_resend, error: error.clone() }
            );
        }
    }

    #[test]
    fn an_answer_as_old_as_the_lease_grants_nothing() {
        let grant = Grant { fence: None, asked_at: at(0), lasts: Duration::from_secs(1) };
        let next = answered(&mut Trying::new(), 500, true, Ok(Try::Granted(grant)));
        assert_eq!(next, AfterTry::Granted(grant));
        let next = answered(&mut Trying::new(), 990, true, Ok(Try::Granted(grant)));
        assert!(matches!(next, AfterTry::Again { new_token: false, .. }), "{next:?}");
    }

    #[test]
    fn a_revoked_token_is_not_used_again() {
        let next = answered(&mut Trying::new(), 1, true, Ok(Try::Revoked));
        assert!(matches!(next, AfterTry::Again { new_token: true, .. }), "{next:?}");
    }

    #[test]
    fn only_a_try_that_the_store_never_saw_needs_no_undo() {
        let refused: StoreError = StoreErrorKind::Refused.into();
        let next = answered(&mut Trying::new(), 1, true, Err(refused.clone().unsent()));
        assert_eq!(next, AfterTry::Failed { error: refused.unsent(), undo: false });
        let next = answered(&mut Trying::new(), 10_000, true, Err(StoreErrorKind::NoAnswer.into()));
        assert!(matches!(next, AfterTry::Failed { undo: true, .. }), "{next:?}");
    }
}
