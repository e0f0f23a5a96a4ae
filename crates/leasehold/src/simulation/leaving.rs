//! Gives up tokens in the background, as [`PendingLeave`] decides. Replaces `engine/leaving.rs`.

use std::rc::Rc;

use tokio::sync::{Notify, oneshot};

use super::coverage::Situation;
use super::process::Process;
use crate::client::leaving::{AfterLeave, LeaveReply, PendingLeave};
use crate::store::AcquireRequest;

impl Process {
    /// Gives up a token that is in no queue, in the background.
    pub(super) fn undo_in_background(self: &Rc<Self>, claim: AcquireRequest) {
        let process = self.clone();
        self.spawn(async move { process.leave(claim, false, true, &Notify::new(), oneshot::channel().0).await });
    }

    /// Gives up a token. `wake` sends the request again at once; `answered` is dropped when the store has confirmed it.
    pub(super) async fn leave(
        self: Rc<Self>,
        claim: AcquireRequest,
        queued: bool,
        unanswered: bool,
        wake: &Notify,
        answered: oneshot::Sender<()>,
    ) {
        let mut leaving = self.decide(|cx| PendingLeave::new(cx, &claim, queued, unanswered));
        let mut answered = Some(answered);
        let mut again = false;
        loop {
            if std::mem::replace(&mut again, true) {
                self.world.saw(Situation::LeaveRepeated);
            }
            let reply = match self.within(self.ask_leave(&claim)).await {
                Ok(()) => LeaveReply::Confirmed,
                Err(_) => LeaveReply::Failed,
            };
            let next = self.decide(|cx| leaving.answered(cx, reply, false));
            if leaving.is_confirmed() {
                drop(answered.take());
            }
            let pause = match next {
                AfterLeave::Done => {
                    if leaving.is_confirmed() {
                        self.world.has_left(&claim.name, &claim.token);
                    }
                    return;
                }
                AfterLeave::Abandoned => return,
                AfterLeave::Again(pause) => pause,
            };
            tokio::select! {
                biased;
                () = wake.notified() => {}
                () = self.world.sleep(pause) => {}
            }
        }
    }
}

/// Releases, in the background, whatever an unanswered or cancelled request may have been granted.
pub(super) struct Undo {
    process: Rc<Process>,
    claim: Option<AcquireRequest>,
}

impl Undo {
    pub(super) fn arm(process: &Rc<Process>, claim: AcquireRequest) -> Self {
        Self { process: process.clone(), claim: Some(claim) }
    }

    pub(super) fn claim(&self) -> &AcquireRequest {
        self.claim.as_ref().expect("armed until disarmed")
    }

    pub(super) fn disarm(mut self) -> AcquireRequest {
        self.claim.take().expect("armed until disarmed")
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if let Some(claim) = self.claim.take()
            && !self.process.life.is_dead.get()
        {
            self.process.undo_in_background(claim);
        }
    }
}
