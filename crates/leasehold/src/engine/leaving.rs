//! Gives up tokens in the background, as [`PendingLeave`] decides.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};

use super::core::Core;
use super::releasing::is_script_error;
use crate::client::leaving::{AfterLeave, LeaveReply, PendingLeave};
use crate::clock::sleep;
use crate::store::{AcquireRequest, Release, StoreErrorKind};

/// A shutdown waits at most this long for tokens that are given up. Its subscription ends with it, so the queues pass
/// over those that are left.
const CLOSES_WITHIN: Duration = Duration::from_millis(1_500);

/// Gives up, in the background, the token of a request that was not answered or was cancelled.
///
/// Armed before the request leaves: if the future is dropped, or the reply is lost, the store may hold a grant that only
/// this token can release.
pub(super) struct Undo<'a> {
    core: &'a Arc<Core>,
    claim: Option<AcquireRequest>,
}

impl<'a> Undo<'a> {
    pub(super) fn arm(core: &'a Arc<Core>, claim: AcquireRequest) -> Self {
        Self { core, claim: Some(claim) }
    }

    pub(super) fn claim(&self) -> &AcquireRequest {
        self.claim.as_ref().expect("armed until disarmed, which consumes it")
    }

    pub(super) fn disarm(mut self) -> AcquireRequest {
        self.claim.take().expect("armed until disarmed, which consumes it")
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        let Some(claim) = self.claim.take() else { return };
        let core = self.core.clone();
        let given_up = GivenUp { claim, queued: false, unanswered: true };
        self.core.spawn(async move { leave(&core, &given_up, &Notify::new(), oneshot::channel().0).await });
    }
}

/// A token that is given up.
pub(super) struct GivenUp {
    pub(super) claim: AcquireRequest,
    /// Whether it may be in a queue.
    pub(super) queued: bool,
    /// Whether one of its requests was not answered.
    pub(super) unanswered: bool,
}

/// Gives up a token. `wake` sends the request again at once; `answered` is dropped when the store has confirmed it.
pub(super) async fn leave(core: &Core, given_up: &GivenUp, wake: &Notify, answered: oneshot::Sender<()>) {
    let closed = async {
        core.closing.cancelled().await;
        sleep(CLOSES_WITHIN).await;
    };
    let is_certain = tokio::select! {
        biased;
        is_certain = leave_until_certain(core, given_up, wake, answered) => is_certain,
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
async fn leave_until_certain(core: &Core, given_up: &GivenUp, wake: &Notify, answered: oneshot::Sender<()>) -> bool {
    let claim = &given_up.claim;
    let mut leaving = core.decide(|cx| PendingLeave::new(cx, claim, given_up.queued, given_up.unanswered));
    let mut answered = Some(answered);
    loop {
        let reply = ask_to_leave(core, claim).await;
        let closing = core.closing.is_cancelled();
        let next = core.decide(|cx| leaving.answered(cx, reply, closing));
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
            () = core.closing.cancelled(), if leaving.may_hurry() => leaving.hurry(),
            () = sleep(pause) => {}
        }
    }
}

async fn ask_to_leave(core: &Core, claim: &AcquireRequest) -> LeaveReply {
    let error = match core.within(core.store.leave(claim)).await {
        Ok(_) => return LeaveReply::Confirmed,
        Err(error) if error.kind() == StoreErrorKind::Closed => return LeaveReply::Settled,
        Err(error) => error,
    };
    tracing::debug!(name = %claim.name, %error, "an attempt is not given up yet");
    if !is_script_error(&error) {
        return LeaveReply::Failed;
    }
    // Scripts do not run, but what they would release may have been acquired without one.
    if core.options.emergency_release {
        let answer = core.within(core.store.release_emergency(&claim.name, &claim.token)).await;
        if matches!(answer, Ok(Release::Released)) {
            return LeaveReply::Settled;
        }
    }
    if error.was_refused() { LeaveReply::Failed } else { LeaveReply::Forbidden }
}
