//! What a client reads: each answer and push goes to the machine that awaits it.

use std::sync::LazyLock;
use std::time::Duration;

use super::super::{AcquireReply, PassReply, RenewReply, YieldReply};
use super::client::{Closing, HowClosed, Lease, User};
use super::driver::{Driver, Outcome};
use super::message::{Answer, Saw, Says, Verb};
use super::rule::EngineRule;
use super::world::{NOW, owner};
use crate::client::by_token::{Confirmed, confirmed};
use crate::client::leaving::{AfterLeave, LeaveReply};
use crate::client::renewal::{LeaseState, Record, Verdict};
use crate::client::trying::AfterTry;
use crate::clock::Moment;
use crate::facts::{Fence, Token};
use crate::loss::LossReason;
use crate::store::redis::push_stamp::PushStamp;
use crate::store::redis::try_steps::{StepReply, TryStep};
use crate::store::{Acquire, Grant, Holder, Place, Push, Renewed, StoreError, Ticket, Try};

impl Driver<'_> {
    /// Reads the first answer or push, or the first push: the connection delivers a push at once, and wakes the tasks that
    /// await the answers before it.
    pub(super) fn read(&mut self, push: bool) -> Outcome {
        let answers = &mut self.client.answers;
        let place = if push { answers.iter().position(|answer| answer.says.is_push()).unwrap_or(0) } else { 0 };
        let stamp = PushStamp::default();
        stamp.answered(self.client.stamp);
        for answer in answers[..=place].iter().filter(|answer| !answer.says.is_push()) {
            stamp.answered(answer.asked_at);
        }
        self.client.stamp = stamp.moment();
        let Answer { says, token, asked_at } = answers.remove(place);
        match says {
            Says::TrySet { written, counted, queue } => {
                let counted = Some(Fence::new(counted));
                self.tried(&token, StepReply::Set { asked_at, written, counted, queue })
            }
            Says::TryRead(Saw::Nothing) => self.tried(&token, StepReply::Gone),
            Says::TryRead(Saw::Own { fence }) => {
                self.tried(&token, StepReply::Ours { written_fence: Some(Fence::new(fence)).filter(|_| fence > 0) })
            }
            Says::TryRead(Saw::Another) => self.tried(&token, StepReply::Others(None)),
            Says::TryRenewed(RenewReply::Renewed) => self.tried(&token, StepReply::Renewed { asked_at }),
            Says::TryRenewed(RenewReply::Lost) | Says::Yielded(YieldReply::NotOurs) => {
                self.tried(&token, StepReply::Lost(None))
            }
            Says::TryRenewed(RenewReply::Revoked) | Says::Yielded(YieldReply::Revoked) => {
                self.tried(&token, StepReply::Revoked)
            }
            Says::Yielded(YieldReply::Ours) => self.tried(&token, StepReply::Kept),
            Says::Yielded(YieldReply::Again) => self.tried(&token, StepReply::YieldAgain),
            Says::Acquired(reply, holder) => self.acquired(token, asked_at, &reply, holder),
            Says::Renewed(reply) => {
                self.renewed(&token, asked_at, &renewed(reply));
                Ok(())
            }
            Says::HandedOn(reply) => {
                self.handed_on(&token, asked_at, renewed(reply));
                Ok(())
            }
            Says::Closed(reply) => {
                self.closed(&token, reply);
                Ok(())
            }
            Says::PushGranted { fence, lasts_ms } => {
                let grant = Grant {
                    fence: Some(Fence::new(fence)),
                    asked_at: self.pushed_at(),
                    lasts: Duration::from_millis(lasts_ms),
                };
                self.rooms(|rooms, cx| rooms.deliver(cx, Push::Granted { token, grant }))
            }
            Says::Probed => Ok(()),
            Says::PushRevoked => {
                if let User::Holding(lease) = &mut self.client.user
                    && lease.token == token
                {
                    lease.state.lose(LossReason::Revoked);
                }
                Ok(())
            }
        }
    }

    /// The moment that a pushed grant counts from.
    fn pushed_at(&self) -> Moment {
        if !self.setup.keeps(EngineRule::PushNotStampedByArrival) {
            return NOW;
        }
        if !self.setup.keeps(EngineRule::PushNotStampedByNewestSent) {
            return self.client.newest_sent;
        }
        self.client.stamp
    }

    fn tried(&mut self, token: &Token, reply: StepReply) -> Outcome {
        let User::Trying { token: mine, steps, .. } = &mut self.client.user else { return Ok(()) };
        if mine != token {
            return Ok(());
        }
        let verb = match steps.answered(reply) {
            TryStep::Read => Verb::TryRead,
            TryStep::Renew(fence) => Verb::TryRenew { fence: fence.map_or(0, Fence::get) },
            TryStep::Yield(fence) => Verb::Yield { fence: fence.get() },
            TryStep::RepairFence => unreachable!("the counter is never lost here"),
            TryStep::Done(answer) => return self.answered_try(Ok(answer)),
        };
        self.send(verb, token.clone());
        Ok(())
    }

    pub(super) fn answered_try(&mut self, answer: Result<Try, StoreError>) -> Outcome {
        let User::Trying { token, mut trying, .. } = std::mem::replace(&mut self.client.user, User::Idle) else {
            return Ok(());
        };
        match self.decide(|_, cx| trying.answered(cx, NOW, answer)) {
            AfterTry::Granted(grant) => self.begin_lease(token, &grant, Record::Fence),
            AfterTry::Held(_) => self.sit(),
            AfterTry::Again { new_token, .. } => {
                let next = if new_token { self.new_token() } else { token.clone() };
                if new_token {
                    self.undo(token);
                }
                self.send_try(next, trying);
                Ok(())
            }
            AfterTry::Failed { undo, .. } => {
                if undo {
                    self.undo(token);
                }
                Ok(())
            }
        }
    }

    fn acquired(&mut self, token: Token, asked_at: Moment, reply: &AcquireReply, holder: u64) -> Outcome {
        let answer = match *reply {
            AcquireReply::Granted { fence } => {
                let fence = Some(Fence::new(fence));
                Acquire::Granted(Grant { fence, asked_at, lasts: self.setup.ttl().duration() })
            }
            AcquireReply::Queued { ticket, position } => {
                let holder = Holder { fence: Some(Fence::new(holder)).filter(|_| holder > 0), ..some_holder() };
                Acquire::Queued(Place { ticket: Ticket(ticket), position, holder: Some(holder) })
            }
            AcquireReply::Revoked => Acquire::Revoked,
            // The store repeats the request itself, unless nobody awaits its answer any more.
            AcquireReply::Again { ticket } => {
                if self.client.rooms.waits(&token) {
                    self.send(Verb::Acquire { ticket }, token);
                }
                return Ok(());
            }
        };
        self.rooms(|rooms, cx| rooms.answered(cx, &token, Ok(answer)))
    }

    pub(super) fn renewed(&mut self, token: &Token, asked_at: Moment, answer: &Renewed) {
        let released = self.client.closing.iter_mut().filter_map(|closing| match &mut closing.how {
            HowClosed::Release(lease) => lease.as_deref_mut().map(|lease| (lease, false)),
            HowClosed::Leave(_) => None,
        });
        let held = if let User::Holding(lease) = &mut self.client.user { Some((lease, true)) } else { None };
        let Some((lease, is_held)) = held.into_iter().chain(released).find(|(lease, _)| lease.token == *token) else {
            return;
        };
        let Some(sent) = lease.sent.take() else { return };
        if let Verdict::Lost(why) = lease.state.answered(NOW, &sent, asked_at, answer)
            && is_held
        {
            lease.state.lose(why);
        }
    }

    pub(super) fn handed_on(&mut self, token: &Token, asked_at: Moment, answer: Renewed) {
        let user = std::mem::replace(&mut self.client.user, User::Idle);
        let User::HandingOn { mut lease, to, mut retry } = user else {
            self.client.user = user;
            return;
        };
        if lease.token != *token {
            self.client.user = User::HandingOn { lease, to, retry };
            return;
        }
        let ttl = self.setup.ttl();
        match confirmed(NOW, asked_at, ttl, &answer) {
            Confirmed::Yes => {
                let grant = Grant { fence: Some(lease.fence), asked_at, lasts: ttl.duration() };
                let renew_every = self.setup.renews.then(|| ttl.duration() / 3);
                lease.state = LeaseState::new(NOW, (ttl, owner()), renew_every, None, &grant, Record::Complete);
                self.client.user =
                    User::Holding(Lease { token: to, sent: None, was_over: false, is_handed_on: true, ..lease });
            }
            Confirmed::Lost(_) => {
                self.client.handed_on.push(to);
                self.undo(lease.token);
            }
            Confirmed::Unknown(error) => {
                let pause = self.decide(|_, cx| retry.failed(cx, NOW, &error));
                assert!(pause.is_some(), "no call gives up by itself");
                let fence = lease.fence.get();
                self.client.user = User::HandingOn { lease, to: to.clone(), retry };
                self.send(Verb::HandOn { fence, to }, token.clone());
            }
        }
    }

    fn closed(&mut self, token: &Token, reply: PassReply) {
        let closing = self.client.closing.iter().position(|closing| closing.token == *token && closing.asking);
        let Some(place) = closing else { return };
        if reply == PassReply::Again {
            // The store repeats the request itself.
            let verb = match self.client.closing[place].how {
                HowClosed::Leave(_) => Verb::Leave,
                HowClosed::Release(_) => Verb::Release,
            };
            return self.send(verb, token.clone());
        }
        if let HowClosed::Leave(mut leaving) = self.client.closing[place].how.clone() {
            let next = self.decide(|_, cx| leaving.answered(cx, LeaveReply::Confirmed, false));
            if next != AfterLeave::Done {
                self.client.closing[place] =
                    Closing { token: token.clone(), how: HowClosed::Leave(leaving), asking: false };
                return;
            }
            self.client.rooms.left(token);
        }
        self.client.closing.remove(place);
    }
}

fn renewed(reply: RenewReply) -> Renewed {
    match reply {
        RenewReply::Renewed => Renewed::Renewed,
        RenewReply::Lost => Renewed::Lost,
        RenewReply::Revoked => Renewed::Revoked,
    }
}

fn some_holder() -> Holder {
    static ONE: LazyLock<Holder> = LazyLock::new(|| Holder::foreign(b"", None));
    ONE.clone()
}
