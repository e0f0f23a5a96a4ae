//! Gives up tokens in the background, as [`PendingLeave`] decides.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};

use super::Core;
use super::releasing::is_script_error;
use crate::client::leaving::{AfterLeave, LeaveReply, PendingLeave};
use crate::clock::sleep;
use crate::store::{Claim, Release, StoreErrorKind};

/// A shutdown waits at most this long for tokens that are given up. Its subscription ends with it, so the queues pass
/// over those that are left.
const CLOSES_WITHIN: Duration = Duration::from_millis(1_500);

/// A token that is given up.
pub(crate) struct GivenUp {
    pub(crate) claim: Claim,
    /// Whether it may be in a queue.
    pub(crate) queued: bool,
    /// Whether one of its requests was not answered.
    pub(crate) unanswered: bool,
}

impl Core {
    /// Gives up a token that is in no queue, in the background.
    pub(crate) fn undo_in_background(self: &Arc<Self>, claim: Claim) {
        let core = self.clone();
        let given_up = GivenUp { claim, queued: false, unanswered: true };
        self.spawn(async move { core.leave(&given_up, &Notify::new(), oneshot::channel().0).await });
    }

    /// Gives up a token. `wake` sends the request again at once; `answered` is dropped when the store has confirmed it.
    pub(super) async fn leave(self: &Arc<Self>, given_up: &GivenUp, wake: &Notify, answered: oneshot::Sender<()>) {
        let closed = async {
            self.closing.cancelled().await;
            sleep(CLOSES_WITHIN).await;
        };
        let is_certain = tokio::select! {
            biased;
            is_certain = self.leave_until_certain(given_up, wake, answered) => is_certain,
            () = closed => false,
        };
        if !is_certain {
            let (claim, ttl) = (&given_up.claim, given_up.claim.ttl.duration());
            tracing::info!(
                name = %claim.name, holder = %claim.token.holder_id(), ?ttl,
                "shutting down before it is certain that an attempt was undone; \
                 if the store still grants it, the lock is free again when that lease ends"
            );
        }
    }

    /// Asks until the store has confirmed it, or must have forgotten the token. `false`: the manager shuts down first.
    async fn leave_until_certain(
        self: &Arc<Self>,
        given_up: &GivenUp,
        wake: &Notify,
        answered: oneshot::Sender<()>,
    ) -> bool {
        let claim = &given_up.claim;
        let mut leaving = self.decide(|cx| PendingLeave::new(cx, claim, given_up.queued, given_up.unanswered));
        let mut answered = Some(answered);
        loop {
            let reply = self.ask_to_leave(claim).await;
            let closing = self.closing.is_cancelled();
            let next = self.decide(|cx| leaving.answered(cx, reply, closing));
            if leaving.is_confirmed() {
                drop(answered.take());
            }
            let pause = match next {
                AfterLeave::Done => return true,
                AfterLeave::Abandoned => return false,
                AfterLeave::Again(pause) => pause,
            };
            tokio::select! {
                biased;
                () = wake.notified() => {}
                // Once: the pauses after that are short.
                () = self.closing.cancelled(), if leaving.may_hurry() => leaving.hurry(),
                () = sleep(pause) => {}
            }
        }
    }

    async fn ask_to_leave(&self, claim: &Claim) -> LeaveReply {
        let error = match self.within(self.store.leave(claim)).await {
            Ok(_) => return LeaveReply::Confirmed,
            Err(error) if error.kind() == StoreErrorKind::Closed => return LeaveReply::Settled,
            Err(error) => error,
        };
        tracing::debug!(name = %claim.name, %error, "an attempt is not given up yet");
        if !is_script_error(&error) {
            return LeaveReply::Failed;
        }
        // Scripts do not run, but what they would give back may have been taken without one.
        if self.options.emergency_release {
            let answer = self.within(self.store.release_emergency(&claim.name, &claim.token)).await;
            if matches!(answer, Ok(Release::Released)) {
                return LeaveReply::Settled;
            }
        }
        if error.was_refused() { LeaveReply::Failed } else { LeaveReply::Forbidden }
    }
}
