//! Giving up attempts: an attempt is taken out of the store wherever it is, in line or granted. The request is repeated
//! until the store has confirmed it or must have forgotten the attempt. A store that refuses it (no permission, no
//! scripts) is asked until the attempt's lease would have ended.
//!
//! A waiter's token stays known here until the store has confirmed that it left. A grant that reaches such a token
//! is passed on at once, instead of lasting until it runs out unconfirmed. A token that was handed to a guard is
//! known to that guard alone: whatever arrives for it again changes nothing.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};

use super::Core;
use super::releasing::is_script_error;
use super::rooms::jittered;
use crate::clock::Moment;
use crate::store::{Claim, Release, StoreErrorKind};

/// The first pause between two requests; each one is twice the last.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// The pause once the lease and the patience are over. A connection that comes back, or a grant, ends it early.
const PAUSE_IN_AN_OUTAGE: Duration = Duration::from_secs(10);

/// A shutdown waits at most this long for attempts that are given up. Its subscription ends with it, so the queues
/// pass over what is left of them.
const CLOSES_WITHIN: Duration = Duration::from_millis(1_500);

/// An attempt that is given up.
pub(crate) struct GivenUp {
    pub(crate) claim: Claim,
    /// Whether it may be in a queue. A queue lives for as long as others ask, so only an answer of the store ends such an
    /// attempt; any other ends with its lease.
    pub(crate) queued: bool,
    /// Whether one of its requests was not answered. Where the connection cannot be ended for certain, that request may
    /// still be carried out after the attempt was given up.
    pub(crate) unanswered: bool,
}

impl Core {
    /// Gives up an attempt in the background. The receiver ends when the store has answered.
    pub(crate) fn leave_in_background(self: &Arc<Self>, attempt: GivenUp) -> oneshot::Receiver<()> {
        let core = self.clone();
        let (answered, left) = oneshot::channel();
        let wake = Arc::new(Notify::new());
        if attempt.queued {
            self.rooms.leaves(&attempt.claim.token, &wake);
        }
        self.spawn(async move {
            core.leave(&attempt, &wake, answered).await;
            if attempt.queued {
                core.rooms.forget(&attempt.claim.token);
            }
        });
        left
    }

    async fn leave(self: &Arc<Self>, attempt: &GivenUp, wake: &Notify, answered: oneshot::Sender<()>) {
        let closed = async {
            self.closing.cancelled().await;
            tokio::time::sleep(CLOSES_WITHIN).await;
        };
        let undone = tokio::select! {
            undone = self.leave_until_known(attempt, wake, answered) => undone,
            () = closed => false,
        };
        if !undone {
            let (claim, ttl) = (&attempt.claim, attempt.claim.ttl.duration());
            tracing::info!(
                name = %claim.name, holder = %claim.token.holder_id(), ?ttl,
                "shutting down before it is certain that an attempt was undone; \
                 if the store still grants it, the lock is free again when that lease ends"
            );
        }
    }

    /// Asks until the store has answered for certain, or must have forgotten the attempt. `false`: the manager shuts
    /// down first.
    async fn leave_until_known(
        self: &Arc<Self>,
        attempt: &GivenUp,
        wake: &Notify,
        answered: oneshot::Sender<()>,
    ) -> bool {
        let claim = &attempt.claim;
        let lease_ends = Moment::now() + claim.ttl.duration() + self.options.patience;
        let mut answered = Some(answered);
        let mut pause = FIRST_PAUSE;
        let mut hurried = false;
        loop {
            // Such a refusal does not pass by itself, so it is not repeated beyond the lease.
            let mut forbidden = false;
            match self.within(self.store.leave(claim)).await {
                Ok(_) if !attempt.unanswered || self.store.may_resend_try() => return true,
                Ok(_) if self.closing.is_cancelled() => return false,
                // A lost connection may still carry out what it was sent, so once is not enough.
                Ok(_) => {
                    drop(answered.take());
                    pause = LONGEST_PAUSE;
                }
                Err(error) if error.kind() == StoreErrorKind::Closed => return true,
                // Scripts do not run, but what they would give back may have been taken without one.
                Err(error)
                    if is_script_error(&error)
                        && self.options.emergency_release
                        && self.given_back_by_other_means(claim).await =>
                {
                    return true;
                }
                Err(error) => {
                    forbidden = !error.was_refused() && is_script_error(&error);
                    tracing::debug!(name = %claim.name, %error, "an attempt is not given up yet");
                }
            }
            if Moment::now() >= lease_ends {
                if !attempt.queued || answered.is_none() || forbidden {
                    return true;
                }
                pause = PAUSE_IN_AN_OUTAGE;
            }
            tokio::select! {
                () = tokio::time::sleep(jittered(pause)) => {}
                () = wake.notified() => {}
                () = self.closing.cancelled(), if !hurried => {
                    hurried = true;
                    pause = FIRST_PAUSE;
                }
            }
            pause = (pause * 2).min(LONGEST_PAUSE.max(pause));
        }
    }

    async fn given_back_by_other_means(&self, claim: &Claim) -> bool {
        let answer = self.within(self.store.release_emergency(&claim.name, &claim.token)).await;
        matches!(answer, Ok(Release::Released))
    }
}
