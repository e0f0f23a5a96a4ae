//! Acquires a lock: one try, then a seat in the waiting room if the lock is held and the caller waits. Replaces
//! `engine/acquiring.rs`.

use std::rc::Rc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::coverage::Situation;
use super::lease::{Guard, NewLease};
use super::leaving::Undo;
use super::process::{CallError, Process, SeatReply, Seated, Wait, Wish};
use crate::client::Seen;
use crate::client::renewal::Record;
use crate::client::trying::{AfterTry, Trying};
use crate::clock::Moment;
use crate::facts::Token;
use crate::loss::LossReason;
use crate::store::{AcquireRequest, StoreErrorKind, Ticket};

const GRACE: Duration = Duration::from_millis(150);
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// How a call ended without a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ended {
    /// The deadline has passed.
    Late,
    Error(CallError),
}

impl From<CallError> for Ended {
    fn from(error: CallError) -> Self {
        Self::Error(error)
    }
}

impl Wait {
    pub(super) fn deadline(self, began: Moment) -> Option<Moment> {
        match self {
            Self::UpTo(wait) => Some(began + wait),
            Self::Not | Self::Forever => None,
        }
    }

    /// The deadline of a call.
    pub(super) fn answer_by(self, began: Moment) -> Option<Moment> {
        match self {
            Self::Not => Some(began + ANSWER_WITHIN),
            Self::UpTo(wait) => Some(began + wait + GRACE),
            Self::Forever => None,
        }
    }
}

impl Wish {
    pub(super) fn lease(&self, token: Token) -> NewLease {
        NewLease {
            name: self.name.clone(),
            token,
            ttl: self.ttl,
            owner: self.owner.clone(),
            renew_every: self.renew_every,
            max_hold: self.max_hold,
            waited: false,
        }
    }

    fn claim(&self, token: Token) -> AcquireRequest {
        AcquireRequest {
            name: self.name.clone(),
            token,
            ttl: self.ttl,
            owner: self.owner.clone(),
            fenced: self.fenced,
            listens: true,
            since_ms: 0,
        }
    }
}

impl Process {
    /// Acquires a lock.
    pub(super) async fn acquire(self: Rc<Self>, wish: Wish) -> Result<Guard, Ended> {
        let began = self.now();
        let by = wish.wait.answer_by(began);
        tokio::select! {
            biased;
            outcome = self.obtain(&wish, began) => outcome,
            () = self.world.sleep_until(by) => Err(Ended::Late),
        }
    }

    async fn obtain(self: &Rc<Self>, wish: &Wish, began: Moment) -> Result<Guard, Ended> {
        if wish.wait == Wait::Not || !self.is_contended(&wish.name) {
            if let Some(guard) = self.try_once(wish).await? {
                return Ok(guard);
            }
            if wish.wait == Wait::Not {
                return Err(Ended::Late);
            }
        }
        self.wait(wish, None, began).await
    }

    /// One try; `None` if another token holds the lock. It is sent again if the store does not answer.
    pub(super) async fn try_once(self: &Rc<Self>, wish: &Wish) -> Result<Option<Guard>, Ended> {
        let mut undo = Undo::arm(self, wish.claim(self.token()));
        let mut trying = Trying::new();
        loop {
            let asked_at = self.now();
            let gives_up_at = self.decide(|cx| trying.gives_up_at(cx));
            let answer = tokio::select! {
                biased;
                answer = self.ask_try(undo.claim()) => answer,
                () = self.world.sleep_until(gives_up_at) => Err(StoreErrorKind::NoAnswer.into()),
            };
            let mut next = self.decide(|cx| trying.answered(cx, asked_at, answer));
            if let AfterTry::Granted(grant) = next {
                let lease = wish.lease(undo.disarm().token);
                let record = if wish.fenced { Record::Fence } else { Record::Complete };
                self.world.saw(Situation::GrantByTry);
                self.world.check_order(&wish.name, grant.fence);
                if let Some(guard) = received(Guard::begin(self.clone(), lease, &grant, record))? {
                    return Ok(Some(guard));
                }
                undo = Undo::arm(self, wish.claim(self.token()));
                next = self.decide(|cx| trying.lapsed(cx, asked_at));
            }
            let (after, new_token) = match next {
                AfterTry::Again { after, new_token, .. } => (after, new_token),
                AfterTry::Failed { error, undo: armed } => {
                    if !armed {
                        undo.disarm();
                    }
                    return Err(CallError::Store(error).into());
                }
                AfterTry::Held(_) => {
                    undo.disarm();
                    return Ok(None);
                }
                AfterTry::Granted(_) => unreachable!("taken care of before"),
            };
            if new_token {
                self.world.saw(Situation::NewToken);
                // The old token is undone when its `Undo` is dropped.
                undo = Undo::arm(self, wish.claim(self.token()));
            }
            self.world.sleep(after).await;
        }
    }

    /// Waits in the waiting room of the name, under its own ticket or the room's.
    pub(super) async fn wait(
        self: &Rc<Self>,
        wish: &Wish,
        ticket: Option<Ticket>,
        began: Moment,
    ) -> Result<Guard, Ended> {
        let deadline = wish.wait.deadline(began);
        loop {
            let (reply, mut answer) = oneshot::channel();
            let mut seated = Seated::sit(self, wish, ticket, SeatReply::One(reply));
            let answered = tokio::select! {
                biased;
                answered = &mut answer => answered,
                () = self.world.sleep_until(deadline) => {
                    let _: Option<Seen> = seated.seen();
                    if seated.leave().await {
                        self.world.saw(Situation::WaiterGaveUp);
                        return Err(Ended::Late);
                    }
                    answer.await
                }
            };
            let guard = answered.unwrap_or(Err(CallError::ShutDown))?;
            if let Some(guard) = received(guard)? {
                return Ok(guard);
            }
            self.world.saw(Situation::LapsedInReply);
        }
    }
}

/// The guard that a task receives, perhaps long after the grant. `None`: the lease has ended.
pub(super) fn received(guard: Guard) -> Result<Option<Guard>, Ended> {
    Ok(match guard.loss() {
        Some(LossReason::Shutdown) => return Err(CallError::ShutDown.into()),
        Some(LossReason::MaxHold) => Some(guard),
        Some(_) => None,
        None => Some(guard).filter(Guard::is_valid),
    })
}
