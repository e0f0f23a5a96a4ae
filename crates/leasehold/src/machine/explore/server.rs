//! The server's side of a small world: the production state machine, one command at a time.

use super::super::{
    AcquireReply, Asking, EvictReply, Flag, Held, InboxId, Lock, Message, PassReply, RenewReply, Slot, Turn, YieldReply,
};
use super::message::{Answer, Request, Saw, Says, Verb};
use super::world::{
    Client, NOW_MS, OLD, Operates, Operator, Setup, TICK_MS, World, client_at, client_of, handed_on, inbox, number_of,
    owner, token,
};
use crate::facts::Fence;

impl World {
    /// Runs the first command of a client's connection, or of the one it has lost.
    pub(super) fn run(&mut self, setup: &Setup, client: usize, old: bool) {
        let queue = self.stream(client, old);
        let request = queue.remove(0);
        let mut told = Vec::new();
        match self.execute(setup, client, request, &mut told) {
            Done::Next(verb) => self.stream(client, old).insert(0, Request { verb, ..request }),
            Done::Says(says) if !old => {
                self.clients[client].answers.push(Answer { says, token: request.token, age: request.age });
            }
            Done::Says(_) => {}
        }
        self.deliver(setup, told);
    }

    fn stream(&mut self, client: usize, old: bool) -> &mut Vec<Request> {
        let client = &mut self.clients[client];
        match &mut client.old {
            Some(requests) if old => requests,
            _ => &mut client.requests,
        }
    }

    /// The operator evicts whom it has looked at.
    pub(super) fn evict(&mut self, setup: &Setup) {
        let Operator::Looked(looked) = self.rest.operator else { return };
        self.rest.operator = Operator::Done;
        let force = setup.operator == Operates::Forces;
        let before = self.held();
        let mut told = Vec::new();
        let reply = self.turn(setup, &mut told, |lock, turn| lock.evict(turn, token(looked).holder_id(), force));
        if let Some((found, ends, _)) = before {
            if force && matches!(reply, EvictReply::Done | EvictReply::Again) {
                self.rest.forced = looked;
            }
            match reply {
                EvictReply::Done if !force => self.rest.doomed = Some((found, ends)),
                EvictReply::Again => self.rest.doomed = Some((found, ends.min(setup.provisional))),
                _ => {}
            }
        }
        self.deliver(setup, told);
    }

    fn execute(&mut self, setup: &Setup, client: usize, request: Request, told: &mut Vec<(InboxId, Message)>) -> Done {
        let key = token(request.token);
        let asking = Asking {
            token: key.clone(),
            inbox: Some(inbox(client)),
            ttl_ms: setup.ttl_ms(),
            since_ms: 0,
            owner: owner(),
            fenced: true,
        };
        let usable = "fences are small here";
        match request.verb {
            Verb::Plant => {
                let found = self.turn(setup, told, |lock, turn| lock.plant(turn, &asking));
                let saw = match found {
                    None => Saw::Nothing,
                    Some(Slot::Held(Held { token, fence, flag, .. })) if token == key => {
                        Saw::Own { fence, revoked: flag == Flag::Revoked }
                    }
                    Some(_) => Saw::Another,
                };
                Done::Next(Verb::Count { saw })
            }
            Verb::Count { saw } => {
                self.counter += 1;
                Done::Next(Verb::Exists { saw, fence: self.counter })
            }
            Verb::Exists { saw, fence } => Done::Says(Says::Tried { saw, fence, queue: !self.lock.queue.is_empty() }),
            Verb::Yield { fence } => {
                let reply = self.turn(setup, told, |lock, turn| lock.yield_to_queue(turn, &key, fence));
                Done::Says(match reply.expect(usable) {
                    YieldReply::Ours => Says::YieldedOurs,
                    YieldReply::NotOurs => Says::YieldedNot,
                    YieldReply::Revoked => Says::YieldedRevoked,
                    YieldReply::Again => Says::YieldedAgain,
                })
            }
            Verb::Acquire { ticket } => {
                let ticket = (ticket > 0).then_some(ticket);
                let reply = self.turn(setup, told, |lock, turn| lock.acquire(turn, &asking, ticket));
                Done::Says(match reply.expect(usable) {
                    AcquireReply::Granted { fence } => Says::Acquired { fence },
                    AcquireReply::Queued { ticket, .. } => Says::Queued { ticket },
                    AcquireReply::Revoked => Says::AcquiredRevoked,
                    AcquireReply::Again { ticket } => Says::AcquireAgain { ticket },
                })
            }
            Verb::Renew { fence, hand_on } => {
                let to = hand_on.then(|| token(handed_on(request.token)));
                let reply = self.turn(setup, told, |lock, turn| {
                    lock.renew(turn, &key, setup.ttl_ms(), Some(Fence::new(fence)), None, to.as_ref())
                });
                Done::Says(match reply {
                    RenewReply::Renewed if hand_on => Says::HandedOn,
                    RenewReply::Renewed => Says::Renewed { fence },
                    RenewReply::Lost => Says::RenewLost,
                    RenewReply::Revoked => Says::RenewRevoked,
                })
            }
            Verb::Release | Verb::Leave => {
                let before = self.held();
                let reply = self.turn(setup, told, |lock, turn| {
                    if request.verb == Verb::Leave { lock.leave(turn, &key) } else { lock.release(turn, &key) }
                });
                if let (PassReply::Again, Some((found, ends, _))) = (reply, before) {
                    self.rest.doomed = Some((found, ends.min(setup.provisional)));
                }
                Done::Says(if reply == PassReply::Again { Says::CloseAgain } else { Says::Closed })
            }
        }
    }

    fn turn<T>(
        &mut self,
        setup: &Setup,
        told: &mut Vec<(InboxId, Message)>,
        call: impl FnOnce(&mut Lock, &mut Turn<'_>) -> T,
    ) -> T {
        let clients = &self.clients;
        let mut turn = Turn {
            now_ms: NOW_MS,
            wall_us: 0,
            counter: &mut self.counter,
            listening: &mut |inbox| clients[client_at(inbox)].is_heard(),
            told,
            limits: setup.limits(),
            rules: setup.rules,
        };
        call(&mut self.lock, &mut turn)
    }

    /// Pushes come after the answer to the command that caused them.
    fn deliver(&mut self, setup: &Setup, told: Vec<(InboxId, Message)>) {
        for (_, message) in told {
            let (token, says) = match message {
                Message::Granted { token, fence, lasts_ms } => {
                    let lasts = u8::try_from(lasts_ms / TICK_MS).expect("short");
                    (number_of(&token), Says::PushGranted { fence, lasts })
                }
                Message::Revoked { token } => (number_of(&token), Says::PushRevoked),
                // A waiter may ask again at any time here, told or not.
                Message::LookAgain { .. } | Message::Finish { .. } => continue,
            };
            let client = &mut self.clients[client_of(token)];
            if setup.in_order && matches!(says, Says::PushGranted { .. }) {
                client.served = token;
            }
            if client.up {
                client.answers.push(Answer { says, token, age: OLD });
            }
        }
    }
}

impl Client {
    /// Whether the server still has a connection that listens for this client.
    fn is_heard(&self) -> bool {
        self.up || self.old.is_some()
    }
}

enum Done {
    Next(Verb),
    Says(Says),
}
