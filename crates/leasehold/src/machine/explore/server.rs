//! The server of a small world: the production state machine, one command at a time.

use super::super::{
    AcquireReply, CallContext, Contender, EvictReply, Held, InboxId, Lock, Message, PassReply, QueueEntry, RenewReply,
    Slot,
};
use super::message::{Answer, Request, Saw, Says, Verb};
use super::rule::Violation;
use super::world::{NOW_MS, OLD, Operates, Operator, Setup, World, client_at, client_of, inbox, owner};
use crate::facts::Fence;

impl World {
    /// Runs the first command of a client's connection, or of the one it has lost.
    pub(super) fn run(&mut self, setup: &Setup, client: usize, old: bool) {
        let request = self.stream(client, old).remove(0);
        let mut outbox = Vec::new();
        match self.execute(setup, client, &request, &mut outbox) {
            Done::Next(verb) => self.stream(client, old).insert(0, Request { verb, ..request }),
            Done::Says(says) if !old => {
                self.clients[client].answers.push(Answer { says, token: request.token, asked_at: request.asked_at });
            }
            Done::Says(_) => {}
        }
        self.deliver(setup, outbox);
    }

    fn stream(&mut self, client: usize, old: bool) -> &mut Vec<Request> {
        let client = &mut self.clients[client];
        match &mut client.old {
            Some(requests) if old => requests,
            _ => &mut client.requests,
        }
    }

    /// The operator evicts the holder that it has looked at.
    pub(super) fn evict(&mut self, setup: &Setup) {
        let Operator::Looked(looked) = std::mem::replace(&mut self.rest.operator, Operator::Done) else { return };
        let force = setup.operator == Operates::Forces;
        let before = self.held().map(|(token, ends, _)| (token.clone(), ends));
        let mut outbox = Vec::new();
        let reply = self.call(setup, &mut outbox, |lock, cx| lock.evict(cx, looked.holder_id(), force));
        if let Some((found, ends)) = before {
            if force && matches!(reply, EvictReply::Done | EvictReply::Again) {
                self.rest.forced = Some(looked);
            }
            match reply {
                EvictReply::Done if !force => self.rest.doomed = Some((found, ends)),
                EvictReply::Again => self.rest.doomed = Some((found, ends.min(setup.provisional))),
                _ => {}
            }
        }
        self.deliver(setup, outbox);
    }

    fn execute(
        &mut self,
        setup: &Setup,
        client: usize,
        request: &Request,
        outbox: &mut Vec<(InboxId, Message)>,
    ) -> Done {
        let token = &request.token;
        let ttl_ms = setup.ttl().as_millis();
        let contender = || Contender {
            token: token.clone(),
            inbox: Some(inbox(client)),
            ttl_ms,
            since_ms: 0,
            owner: owner(),
            fenced: true,
        };
        let usable = "fences are small here";
        Done::Says(match &request.verb {
            Verb::TrySet => {
                let found = self.call(setup, outbox, |lock, cx| lock.plant(cx, &contender()));
                return Done::Next(Verb::TryCount { written: found.is_none() });
            }
            Verb::TryCount { written } => {
                self.counter += 1;
                return Done::Next(Verb::TryExists { written: *written, counted: self.counter });
            }
            Verb::TryExists { written, counted } => {
                Says::TrySet { written: *written, counted: *counted, queue: !self.lock.queue.is_empty() }
            }
            Verb::TryRead => Says::TryRead(match &self.lock.slot {
                Slot::Held(Held { token: held, fence, .. }) if held == token => Saw::Own { fence: *fence },
                Slot::Free => Saw::Nothing,
                Slot::Held(_) | Slot::Foreign { .. } => Saw::Another,
            }),
            Verb::TryRenew { fence } => Says::TryRenewed(self.renew(setup, outbox, request, *fence)),
            Verb::Renew { fence } => Says::Renewed(self.renew(setup, outbox, request, *fence)),
            Verb::Check { fence } => Says::Renewed(self.lock.check(NOW_MS, token, Some(Fence::new(*fence)))),
            Verb::HandOn { fence, .. } => Says::HandedOn(self.renew(setup, outbox, request, *fence)),
            Verb::Yield { fence } => {
                let reply = self.call(setup, outbox, |lock, cx| lock.yield_to_queue(cx, token, *fence));
                Says::Yielded(reply.expect(usable))
            }
            Verb::Acquire { ticket } => {
                let ticket = Some(*ticket).filter(|ticket| *ticket > 0);
                let reply = self.call(setup, outbox, |lock, cx| lock.acquire(cx, &contender(), ticket)).expect(usable);
                if setup.in_order && matches!(reply, AcquireReply::Granted { .. }) {
                    self.clients[client].served = Some(token.clone());
                }
                let holder = if let Slot::Held(held) = &self.lock.slot { held.fence } else { 0 };
                Says::Acquired(reply, holder)
            }
            Verb::Probe => Says::Probed,
            Verb::Release | Verb::Leave => {
                let before = self.held().map(|(token, ends, _)| (token.clone(), ends));
                let leaves = request.verb == Verb::Leave;
                let reply =
                    self.call(
                        setup,
                        outbox,
                        |lock, cx| {
                            if leaves { lock.leave(cx, token) } else { lock.release(cx, token) }
                        },
                    );
                if let (PassReply::Again, Some((found, ends))) = (reply, before) {
                    self.rest.doomed = Some((found, ends.min(setup.provisional)));
                }
                Says::Closed(reply)
            }
        })
    }

    fn renew(
        &mut self,
        setup: &Setup,
        outbox: &mut Vec<(InboxId, Message)>,
        request: &Request,
        fence: u64,
    ) -> RenewReply {
        let hand_to = if let Verb::HandOn { to, .. } = &request.verb { Some(to) } else { None };
        let (ttl_ms, fence) = (setup.ttl().as_millis(), Some(fence).filter(|fence| *fence > 0).map(Fence::new));
        self.call(setup, outbox, |lock, cx| lock.renew(cx, &request.token, ttl_ms, fence, None, hand_to))
    }

    fn call<T>(
        &mut self,
        setup: &Setup,
        outbox: &mut Vec<(InboxId, Message)>,
        call: impl FnOnce(&mut Lock, &mut CallContext<'_>) -> T,
    ) -> T {
        let clients = &self.clients;
        let mut cx = CallContext {
            now_ms: NOW_MS,
            wall_us: 0,
            counter: &mut self.counter,
            listening: &mut |inbox| clients[client_at(inbox)].is_heard(),
            outbox,
            limits: setup.limits(),
        };
        call(&mut self.lock, &mut cx)
    }

    /// Pushes come after the answer to the command that caused them.
    fn deliver(&mut self, setup: &Setup, outbox: Vec<(InboxId, Message)>) {
        for (_, message) in outbox {
            let (token, says) = match message {
                Message::Granted { token, fence, lasts_ms } => (token, Says::PushGranted { fence, lasts_ms }),
                Message::Revoked { token } => (token, Says::PushRevoked),
                // A waiter may ask again at any time here, notified or not.
                Message::LookAgain { .. } | Message::Finish { .. } => continue,
            };
            let client = &mut self.clients[client_of(&token)];
            if setup.in_order && matches!(says, Says::PushGranted { .. }) {
                client.served = Some(token.clone());
            }
            if client.up {
                client.answers.push(Answer { says, token, asked_at: OLD });
            }
        }
    }

    /// A try has begun to believe: no earlier waiter may still be in the queue.
    pub(super) fn in_order(&self, setup: &Setup, fence: Fence) -> Result<(), Violation> {
        let passed = |w: &QueueEntry| {
            w.ticket < fence.get() && self.clients[client_of(&w.token)].served.as_ref() != Some(&w.token)
        };
        if setup.in_order && self.lock.queue.iter().any(passed) { Err(Violation::OutOfOrder) } else { Ok(()) }
    }
}

enum Done {
    Next(Verb),
    Says(Says),
}
