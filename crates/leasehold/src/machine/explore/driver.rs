//! Runs the machines of a client in the place of the engine and of the connection. It decides nothing: it sends the requests
//! that the machines ask for, and passes answers, pushes and failures to them (`reading`). A timer of theirs may fire at
//! any time, so it is a step of the world (`make_due`).

use std::sync::LazyLock;

use super::client::{Client, Closing, HowClosed, Lease, User};
use super::message::{Request, Verb};
use super::rule::{EngineRule, Violation};
use super::world::{NOW, OLD, Rest, Setup, owner, policy, token};
use crate::client::leaving::{AfterLeave, LeaveReply, PendingLeave};
use crate::client::renewal::{LeaseState, Record, Then};
use crate::client::retry::Retry;
use crate::client::rooms::{Effect, Rooms, Seat};
use crate::client::trying::Trying;
use crate::client::{Context, RandomSource};
use crate::facts::{LockName, Token};
use crate::store::redis::try_steps::TrySteps;
use crate::store::{AcquireRequest, Grant, Push, Renewed, StoreError, StoreErrorKind, Ticket};

/// A client with what its machines need to decide.
pub(super) struct Driver<'a> {
    pub(super) setup: &'a Setup,
    pub(super) id: u8,
    pub(super) client: &'a mut Client,
    pub(super) rest: &'a mut Rest,
}

pub(super) type Outcome = Result<(), Violation>;

/// New tokens, numbered. No jitter.
struct Tokens {
    id: u8,
    used: usize,
    fresh: bool,
}

impl RandomSource for Tokens {
    fn token(&mut self) -> Token {
        let number = if self.fresh { u8::try_from(self.used).expect("few") } else { 0 };
        self.used += 1;
        token(self.id * 16 + number)
    }
    fn byte(&mut self) -> u32 {
        0
    }
    fn wall_ms(&mut self) -> u64 {
        0
    }
}

/// The steps that a client takes by itself.
impl Driver<'_> {
    /// The client wants the lock: by a try, or in line at once because others were waiting a moment ago.
    pub(super) fn begin(&mut self, wait: bool) -> Outcome {
        self.client.attempts += 1;
        if wait {
            return self.sit();
        }
        let token = self.new_token();
        self.send_try(token, Trying::new());
        Ok(())
    }

    /// A timer of the waiting rooms fires.
    pub(super) fn ask(&mut self) -> Outcome {
        self.rooms(Rooms::make_due).map(drop)
    }

    /// The connection sends a push probe.
    pub(super) fn probe(&mut self) {
        self.send(Verb::Probe, token(self.id * 16));
    }

    /// A timer of the lease fires: it is renewed, or checked.
    pub(super) fn look_at_lease(&mut self, prolong: bool) {
        let User::Holding(lease) = &mut self.client.user else { return };
        if !lease.state.make_due(NOW, prolong) {
            return;
        }
        let Then::Ask { prolong, .. } = lease.state.look(NOW).then else { return };
        lease.sent = Some(lease.state.request(prolong));
        let (token, fence) = (lease.token.clone(), lease.fence.get());
        self.send(if prolong { Verb::Renew { fence } } else { Verb::Check { fence } }, token);
    }

    pub(super) fn hand_on(&mut self) {
        let to = self.new_token();
        if let User::Holding(lease) = std::mem::replace(&mut self.client.user, User::Idle) {
            let (token, fence) = (lease.token.clone(), lease.fence.get());
            self.client.user = User::HandingOn { lease, to: to.clone(), retry: Retry::new() };
            self.send(Verb::HandOn { fence, to }, token);
        }
    }

    /// The task is done, or gives up.
    pub(super) fn close(&mut self) -> Outcome {
        match std::mem::replace(&mut self.client.user, User::Idle) {
            User::Idle => {}
            User::Trying { token, .. } => self.undo(token),
            User::Waiting(seat) => self.rooms(|rooms, cx| rooms.leave_seat(cx, &name(), seat)).map(drop)?,
            User::Holding(mut lease) => {
                lease.state.give_up();
                let token = lease.token.clone();
                self.client.closing.push(Closing {
                    token: token.clone(),
                    how: HowClosed::Release(Some(Box::new(lease))),
                    asking: true,
                });
                self.send(Verb::Release, token);
            }
            User::HandingOn { lease, to, .. } => {
                self.client.handed_on.push(to);
                self.undo(lease.token);
            }
        }
        Ok(())
    }

    /// A token leaves again, where once is not enough.
    pub(super) fn leave_again(&mut self, token: &Token) {
        let Some(closing) = self.client.closing.iter_mut().find(|closing| closing.token == *token) else { return };
        if !closing.asking {
            closing.asking = true;
            self.send(Verb::Leave, token.clone());
        }
    }

    pub(super) fn sit(&mut self) -> Outcome {
        let ttl = self.setup.ttl();
        let seat = Seat { ttl, owner: owner(), retry_every: None, ticket: None, task: () };
        // Before the lock can be given to the task.
        let before = std::mem::replace(&mut self.client.user, User::Idle);
        debug_assert!(!matches!(before, User::Holding(_)));
        let seat = self.rooms(|rooms, cx| rooms.sit(cx, &name(), seat))?;
        self.client.user = User::Waiting(seat);
        Ok(())
    }

    /// Gives up a token that is in no queue.
    pub(super) fn undo(&mut self, token: Token) {
        self.client.unsent.retain(|request| request.token != token || !request.verb.is_try());
        if self.setup.keeps(EngineRule::DroppedTryIsUndone) {
            self.leave(token, false, true);
        }
    }

    fn leave(&mut self, token: Token, queued: bool, unanswered: bool) {
        let claim = self.claim(token.clone());
        let leaving = self.decide(|_, cx| PendingLeave::new(cx, &claim, queued, unanswered));
        self.client.closing.push(Closing { token: token.clone(), how: HowClosed::Leave(leaving), asking: true });
        self.send(Verb::Leave, token);
    }

    pub(super) fn send_try(&mut self, token: Token, trying: Trying) {
        let steps = TrySteps::new(true, self.setup.ttl().duration());
        self.client.user = User::Trying { token: token.clone(), trying, steps };
        self.send(Verb::TrySet, token);
    }

    pub(super) fn send(&mut self, verb: Verb, token: Token) {
        // Nothing is counted from the answer to a release or a leave.
        let asked_at = if matches!(verb, Verb::Release | Verb::Leave) { OLD } else { NOW };
        let request = Request { verb, token, asked_at };
        if self.client.up {
            self.client.requests.push(request);
            if !self.setup.keeps(EngineRule::PushNotStampedByNewestSent) {
                self.client.newest_sent = NOW;
            }
        } else {
            self.client.unsent.push(request);
        }
    }

    fn claim(&self, token: Token) -> AcquireRequest {
        AcquireRequest {
            name: name(),
            token,
            ttl: self.setup.ttl(),
            owner: owner(),
            fenced: true,
            listens: true,
            since_ms: 0,
        }
    }

    pub(super) fn new_token(&mut self) -> Token {
        self.decide(|_, cx| cx.source.token())
    }

    /// Lets a machine of the client decide.
    pub(super) fn decide<R>(&mut self, decide: impl FnOnce(&mut Client, &mut Context<'_>) -> R) -> R {
        let fresh = self.setup.keeps(EngineRule::FreshTokens);
        let mut source = Tokens { id: self.id, used: self.client.tokens_used, fresh };
        let mut cx = Context { now: NOW, policy: policy(), may_resend: self.setup.kills, source: &mut source };
        let decided = decide(self.client, &mut cx);
        self.client.tokens_used = source.used;
        decided
    }

    /// Changes the waiting rooms and carries out what follows.
    pub(super) fn rooms<R>(
        &mut self,
        change: impl FnOnce(&mut Rooms<()>, &mut Context<'_>) -> R,
    ) -> Result<R, Violation> {
        let changed = self.decide(|client, cx| change(&mut client.rooms, cx));
        for effect in self.client.rooms.take_effects() {
            match effect {
                Effect::Ask { claim, ticket } => {
                    self.send(Verb::Acquire { ticket: ticket.map_or(0, |Ticket(ticket)| ticket) }, claim.token);
                }
                Effect::Give { token, grant, record, .. } => self.begin_lease(token, &grant, record)?,
                Effect::Fail { .. } => self.client.user = User::Idle,
                Effect::Leave { claim, unanswered } => {
                    self.client.unsent.retain(|request| {
                        request.token != claim.token || !matches!(request.verb, Verb::Acquire { .. })
                    });
                    self.leave(claim.token, true, unanswered);
                }
                Effect::HurryLeave(token) => self.leave_again(&token),
                Effect::Report(_) => {}
            }
        }
        Ok(changed)
    }

    pub(super) fn begin_lease(&mut self, token: Token, grant: &Grant, record: Record) -> Outcome {
        let fence = grant.fence.expect("every grant here has a fence");
        let ttl = self.setup.ttl();
        let renew_every = self.setup.renews.then(|| ttl.duration() / 3);
        let state = LeaseState::new(NOW, (ttl, owner()), renew_every, None, grant, record);
        let excused = self.rest.forced.as_ref() == Some(&token) && !self.setup.force_counts;
        self.client.user =
            User::Holding(Lease { token, fence, state, sent: None, was_over: false, is_handed_on: false });
        if !excused {
            if fence.get() <= self.rest.highest {
                return Err(Violation::FenceFell);
            }
            self.rest.highest = fence.get();
        }
        Ok(())
    }
}

/// What happens to a client.
impl Driver<'_> {
    /// The connection is gone. What was sent may still run.
    pub(super) fn cut(&mut self) -> Outcome {
        let client = &mut *self.client;
        client.up = false;
        client.answers.clear();
        let sent = std::mem::take(&mut client.requests).into_iter().map(|r| Request { asked_at: OLD, ..r });
        client.old.get_or_insert_default().extend(sent);
        let error = || StoreError::from(StoreErrorKind::Unreachable);
        for closing in &mut client.closing {
            if let HowClosed::Release(Some(lease)) = &mut closing.how {
                lease.sent = None;
            }
        }
        let closing: Vec<Closing> = client.closing.iter().filter(|closing| closing.asking).cloned().collect();
        for Closing { token, how, .. } in closing {
            match how {
                HowClosed::Release(_) => self.send(Verb::Release, token),
                HowClosed::Leave(mut leaving) => {
                    let next = self.decide(|_, cx| leaving.answered(cx, LeaveReply::Failed, false));
                    assert!(matches!(next, AfterLeave::Again(_)), "no call gives up by itself");
                    self.send(Verb::Leave, token);
                }
            }
        }
        match &mut self.client.user {
            User::Trying { .. } => self.answered_try(Err(error()))?,
            User::HandingOn { lease, .. } => {
                let token = lease.token.clone();
                self.handed_on(&token, NOW, Renewed::Unknown(error()));
            }
            User::Holding(lease) => {
                let token = lease.token.clone();
                self.renewed(&token, NOW, &Renewed::Unknown(error()));
            }
            User::Idle | User::Waiting(_) => {}
        }
        let asking: Vec<Token> = self.client.rooms.attempts(true).cloned().collect();
        for token in asking {
            self.rooms(|rooms, cx| rooms.answered(cx, &token, Err(error())))?;
        }
        self.rooms(|rooms, cx| rooms.deliver(cx, Push::Disconnected))
    }

    pub(super) fn reconnect(&mut self) -> Outcome {
        let client = &mut *self.client;
        if self.setup.kills && self.setup.keeps(EngineRule::OldConnectionIsKilled) {
            client.old = None;
        }
        client.up = true;
        client.stamp = OLD;
        for Request { verb, token, .. } in std::mem::take(&mut client.unsent) {
            self.send(verb, token);
        }
        if let User::Holding(lease) = &mut self.client.user {
            lease.state.reconnected(NOW);
        }
        self.rooms(|rooms, cx| rooms.deliver(cx, Push::Resync))
    }

    pub(super) fn die(&mut self) {
        let client = &mut *self.client;
        if client.up {
            let sent = std::mem::take(&mut client.requests).into_iter().map(|r| Request { asked_at: OLD, ..r });
            client.old.get_or_insert_default().extend(sent);
        }
        *client = Client { alive: false, up: false, old: client.old.take(), ..Client::new() };
    }
}

fn name() -> LockName {
    static ONE: LazyLock<LockName> = LazyLock::new(|| LockName::new("a").expect("a name"));
    ONE.clone()
}
