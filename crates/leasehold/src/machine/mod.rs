//! The state machine of one lock: what every verb of a store means, without clock, I/O or async.
//!
//! The memory store runs it, the SQLite store runs it inside a transaction whenever somebody waits,
//! and the Redis scripts say the same in Lua; a property test drives all three and compares every
//! answer. `explore` (a test) walks through every state of small worlds and shows that at most one
//! client believes in a lease at a time, that fences rise, that what was taken away stays so, and
//! that one of these fails as soon as one [`Rule`] is left out.

use crate::facts::{Fence, HolderId, Owner, Token};

#[cfg(test)]
mod explore;
mod rules;

pub(crate) use rules::{Rule, Rules};

/// The address of a process that can be told something. `None` where one is expected: it polls,
/// or the lease belongs to no process.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct InboxId(pub(crate) std::sync::Arc<str>);

/// One lock: who has it, who waits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Lock {
    pub(crate) slot: Slot,
    /// In order of tickets.
    pub(crate) queue: Vec<Waiting>,
    /// A queue whose waiters stopped asking vanishes.
    pub(crate) queue_ends_ms: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) enum Slot {
    #[default]
    Free,
    Held(Held),
    /// Written by another kind of client: excluded and respected, never changed.
    Foreign {
        value: String,
        ends_ms: Option<u64>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Held {
    pub(crate) flag: Flag,
    pub(crate) token: Token,
    /// 0 until it is known.
    pub(crate) fence: u64,
    pub(crate) inbox: Option<InboxId>,
    pub(crate) since_ms: u64,
    pub(crate) ttl_ms: u64,
    pub(crate) owner: Owner,
    /// `None`: somebody removed the expiry.
    pub(crate) ends_ms: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Flag {
    NobodyWaits,
    SomebodyWaits,
    Revoked,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Waiting {
    pub(crate) ticket: u64,
    pub(crate) token: Token,
    pub(crate) inbox: Option<InboxId>,
    pub(crate) ttl_ms: u64,
    pub(crate) since_ms: u64,
    pub(crate) owner: Owner,
    /// When it last asked; counts only for one that polls.
    pub(crate) polled_ms: u64,
}

/// What a process is told.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Message {
    Granted { token: Token, fence: u64, lasts_ms: u64 },
    LookAgain { token: Token, after_ms: u64 },
    Revoked { token: Token },
    Finish { token: Token, reason: String },
}

/// Fixed numbers of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// A grant nobody has confirmed yet ends after this: what a hung waiter costs.
    pub(crate) provisional_ms: u64,
    /// Dead waiters passed over in one call.
    pub(crate) sweep: usize,
    /// A queue lives this long after its last waiter asked.
    pub(crate) queue_ttl_ms: u64,
    /// A polling waiter that has not asked for this long is passed over.
    pub(crate) poll_grace_ms: u64,
}

impl Limits {
    pub(crate) const DEFAULT: Self =
        Self { provisional_ms: 2_000, sweep: 200, queue_ttl_ms: 60_000, poll_grace_ms: 3_000 };
}

/// One call's surroundings.
pub(crate) struct Turn<'a> {
    /// The clock that leases end by.
    pub(crate) now_ms: u64,
    /// Wall-clock time: `since_ms`, and the floor of fences.
    pub(crate) wall_us: u64,
    /// The store's fence counter.
    pub(crate) counter: &'a mut u64,
    /// Whether anybody listens at an inbox.
    pub(crate) listening: &'a mut dyn FnMut(&InboxId) -> bool,
    /// What is to be told once the call has taken effect.
    pub(crate) told: &'a mut Vec<(InboxId, Message)>,
    pub(crate) limits: Limits,
    pub(crate) rules: Rules,
}

/// The fence counter is above 2⁵²: nothing may be granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FenceUnusable;

/// An attempt as the machine sees it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Asking {
    pub(crate) token: Token,
    pub(crate) inbox: Option<InboxId>,
    pub(crate) ttl_ms: u64,
    pub(crate) since_ms: u64,
    pub(crate) owner: Owner,
    pub(crate) fenced: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TryReply {
    Granted { fence: u64 },
    Held,
    Revoked,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum AcquireReply {
    Granted {
        fence: u64,
    },
    Queued {
        ticket: u64,
        position: usize,
    },
    Revoked,
    /// The very same call must be sent again: dead waiters were passed over, more may follow.
    Again {
        ticket: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PassReply {
    Done,
    NotOurs,
    Again,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RenewReply {
    Renewed,
    Lost,
    Revoked,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EvictReply {
    Done,
    ChangedHands,
    Free,
    Foreign,
    Again,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AskReply {
    Told,
    Deaf,
    ChangedHands,
    Free,
}

enum HandOff {
    Me(u64),
    Gave,
    Nobody,
    Again,
    Unusable,
}

impl Lock {
    /// Nothing is left to remember.
    pub(crate) fn is_gone(&self) -> bool {
        self.slot == Slot::Free && self.queue.is_empty()
    }

    /// Lets time pass: what has ended is gone.
    pub(crate) fn lapse(&mut self, now_ms: u64) {
        let ends = match &self.slot {
            Slot::Free => None,
            Slot::Held(held) => held.ends_ms,
            Slot::Foreign { ends_ms, .. } => *ends_ms,
        };
        if ends.is_some_and(|end| end <= now_ms) {
            self.slot = Slot::Free;
        }
        if self.queue_ends_ms <= now_ms {
            self.queue.clear();
        }
    }

    /// A dead process holds it: it is free. For stores that can see a death.
    pub(crate) fn holder_died(&mut self, inbox: &InboxId) {
        if let Slot::Held(held) = &self.slot
            && held.inbox.as_ref() == Some(inbox)
        {
            self.slot = Slot::Free;
        }
    }

    /// Takes the lock if it is free and nobody who came before listens, in one step.
    ///
    /// On Redis this is three plain commands and, where somebody waits, [`Lock::yield_to_queue`].
    pub(crate) fn try_acquire(&mut self, turn: &mut Turn<'_>, asking: &Asking) -> Result<TryReply, FenceUnusable> {
        self.lapse(turn.now_ms);
        if let Some(held) = self.held_by(&asking.token) {
            // A re-sent try. The re-send did not restart the countdown: renew before believing.
            if held.flag == Flag::Revoked {
                return Ok(TryReply::Revoked);
            }
            held.prolong(turn.now_ms, asking.ttl_ms);
            return Ok(TryReply::Granted { fence: held.fence });
        }
        if self.slot != Slot::Free {
            return Ok(TryReply::Held);
        }
        let fence = if asking.fenced { turn.fence()? } else { 0 };
        while asking.fenced && !self.queue.is_empty() {
            match self.hand_off(turn, None, Some(fence)) {
                HandOff::Gave => return Ok(TryReply::Held),
                HandOff::Again => {}
                HandOff::Nobody | HandOff::Me(_) => break,
                HandOff::Unusable => return Err(FenceUnusable),
            }
        }
        self.hold(turn, fence, asking.clone().into(), asking.ttl_ms);
        Ok(TryReply::Granted { fence })
    }

    /// The first of a try's three commands: `SET NX GET`. `None`: it was free and is ours now.
    #[cfg(test)]
    pub(crate) fn plant(&mut self, turn: &mut Turn<'_>, asking: &Asking) -> Option<Slot> {
        self.lapse(turn.now_ms);
        if self.slot != Slot::Free {
            return Some(self.slot.clone());
        }
        self.slot = Slot::Held(Held {
            flag: Flag::NobodyWaits,
            token: asking.token.clone(),
            fence: 0,
            inbox: asking.inbox.clone(),
            since_ms: turn.wall_us / 1_000,
            ttl_ms: asking.ttl_ms,
            owner: asking.owner.clone(),
            ends_ms: Some(turn.now_ms + asking.ttl_ms),
        });
        None
    }

    /// A try found a queue: hands over to the first listening waiter with a ticket below our fence.
    #[cfg(test)]
    pub(crate) fn yield_to_queue(
        &mut self,
        turn: &mut Turn<'_>,
        token: &Token,
        fence: u64,
    ) -> Result<YieldReply, FenceUnusable> {
        self.lapse(turn.now_ms);
        let Some(held) = self.held_by(token) else { return Ok(YieldReply::NotOurs) };
        if held.flag == Flag::Revoked {
            return Ok(YieldReply::Revoked);
        }
        // Another call with this token has confirmed the lease meanwhile, and its caller relies on it.
        if held.fence != 0 && held.fence != fence {
            return Ok(YieldReply::Ours);
        }
        let outcome = self.hand_off(turn, None, Some(fence));
        if matches!(outcome, HandOff::Gave) {
            return Ok(YieldReply::NotOurs);
        }
        let somebody = !self.queue.is_empty();
        if let Some(held) = self.held_by(token)
            && somebody
        {
            held.flag = Flag::SomebodyWaits;
        }
        Ok(if matches!(outcome, HandOff::Again) { YieldReply::Again } else { YieldReply::Ours })
    }

    /// Takes the lock or stands in line. Idempotent on the token.
    pub(crate) fn acquire(
        &mut self,
        turn: &mut Turn<'_>,
        asking: &Asking,
        ticket: Option<u64>,
    ) -> Result<AcquireReply, FenceUnusable> {
        self.lapse(turn.now_ms);
        if let Some(held) = self.held_by(&asking.token) {
            // Re-sent, or granted by a message that was lost: confirm.
            if held.flag == Flag::Revoked {
                return Ok(AcquireReply::Revoked);
            }
            held.prolong(turn.now_ms, asking.ttl_ms);
            if held.fence == 0 {
                held.fence = turn.fence()?;
            }
            return Ok(AcquireReply::Granted { fence: held.fence });
        }
        if self.slot == Slot::Free && self.queue.is_empty() {
            let fence = turn.fence()?;
            self.hold(turn, fence, asking.clone().into(), asking.ttl_ms);
            return Ok(AcquireReply::Granted { fence });
        }
        let ticket = self.stand_in_line(turn, asking, ticket)?;
        match &mut self.slot {
            Slot::Free => match self.hand_off(turn, Some(&asking.token), None) {
                HandOff::Me(fence) => return Ok(AcquireReply::Granted { fence }),
                HandOff::Again => return Ok(AcquireReply::Again { ticket }),
                HandOff::Unusable => return Err(FenceUnusable),
                HandOff::Gave | HandOff::Nobody => {}
            },
            Slot::Held(held) => {
                if held.flag == Flag::NobodyWaits || !turn.rules.keep(Rule::AskingKeepsARevocation) {
                    held.flag = Flag::SomebodyWaits;
                }
                if held.ends_ms.is_none() {
                    // Somebody removed the expiry: a full ttl from now outlasts any belief.
                    held.ends_ms = Some(turn.now_ms + held.ttl_ms);
                }
            }
            Slot::Foreign { .. } => {}
        }
        let position = self.queue.iter().position(|w| w.token == asking.token).unwrap_or(0);
        Ok(AcquireReply::Queued { ticket, position })
    }

    /// The holder is done.
    pub(crate) fn release(&mut self, turn: &mut Turn<'_>, token: &Token) -> PassReply {
        self.lapse(turn.now_ms);
        let ours = self.held_by(token).is_some();
        if !ours && (turn.rules.keep(Rule::ReleaseComparesTheToken) || !matches!(self.slot, Slot::Held(_))) {
            return PassReply::NotOurs;
        }
        self.pass_on(turn)
    }

    /// An attempt is given up wherever it stands.
    pub(crate) fn leave(&mut self, turn: &mut Turn<'_>, token: &Token) -> PassReply {
        self.lapse(turn.now_ms);
        self.queue.retain(|w| w.token != *token);
        if self.held_by(token).is_none() {
            return PassReply::NotOurs;
        }
        self.pass_on(turn)
    }

    /// Restarts the countdown. Never shortens, never re-creates.
    pub(crate) fn renew(
        &mut self,
        turn: &mut Turn<'_>,
        token: &Token,
        ttl_ms: u64,
        fence: Option<Fence>,
        rewrite: Option<&Owner>,
        hand_to: Option<&Token>,
    ) -> RenewReply {
        self.lapse(turn.now_ms);
        let rules = turn.rules;
        if !rules.keep(Rule::RenewalComparesTheToken)
            && let Slot::Held(held) = &mut self.slot
        {
            held.prolong(turn.now_ms, ttl_ms);
            return RenewReply::Renewed;
        }
        let Slot::Held(held) = &mut self.slot else { return RenewReply::Lost };
        // Handed on already, and sent again: the fence says that it is still the same lease.
        let handed_on = hand_to == Some(&held.token) && fence.is_some_and(|fence| fence.get() == held.fence);
        if held.token != *token && !handed_on {
            return RenewReply::Lost;
        }
        if held.flag == Flag::Revoked && rules.keep(Rule::RenewalRespectsARevocation) {
            return RenewReply::Revoked;
        }
        if let Some(fence) = fence.map(Fence::get)
            && fence != held.fence
        {
            if held.fence != 0 && rules.keep(Rule::RenewalComparesTheFence) {
                return RenewReply::Lost;
            }
            held.fence = fence;
        }
        held.prolong(turn.now_ms, ttl_ms);
        if let Some(owner) = rewrite {
            held.ttl_ms = ttl_ms;
            held.owner = owner.clone();
        }
        if let Some(to) = hand_to {
            held.token = to.clone();
            held.inbox = None;
        }
        RenewReply::Renewed
    }

    /// Says whether a lease is still its holder's, and changes nothing.
    pub(crate) fn check(&mut self, now_ms: u64, token: &Token, fence: Option<Fence>) -> RenewReply {
        self.lapse(now_ms);
        let Some(held) = self.held_by(token) else { return RenewReply::Lost };
        if held.flag == Flag::Revoked {
            return RenewReply::Revoked;
        }
        let granted_anew = held.fence != 0 && fence.is_some_and(|fence| fence.get() != held.fence);
        if granted_anew { RenewReply::Lost } else { RenewReply::Renewed }
    }

    /// Takes the lock away from the holder that was looked at.
    pub(crate) fn evict(&mut self, turn: &mut Turn<'_>, holder: HolderId, force: bool) -> EvictReply {
        self.lapse(turn.now_ms);
        let Some(found) = self.slot.holder_id() else { return EvictReply::Free };
        if found != holder && turn.rules.keep(Rule::EvictComparesTheHolder) {
            return EvictReply::ChangedHands;
        }
        if let Slot::Held(held) = &mut self.slot {
            if let Some(inbox) = held.inbox.clone() {
                turn.say(&inbox, Message::Revoked { token: held.token.clone() });
            }
            if force {
                return match self.pass_on(turn) {
                    PassReply::Again => EvictReply::Again,
                    PassReply::Done | PassReply::NotOurs => EvictReply::Done,
                };
            }
            held.flag = Flag::Revoked;
            return EvictReply::Done;
        }
        if !force {
            return EvictReply::Foreign;
        }
        // A foreign value is never written into: it stays until somebody is found.
        match self.hand_off(turn, None, None) {
            HandOff::Gave => {}
            HandOff::Again => return EvictReply::Again,
            HandOff::Nobody | HandOff::Unusable | HandOff::Me(_) => self.slot = Slot::Free,
        }
        EvictReply::Done
    }

    /// Asks the holder that was looked at to come to an end.
    pub(crate) fn ask_to_finish(&mut self, turn: &mut Turn<'_>, holder: HolderId, reason: &str) -> AskReply {
        self.lapse(turn.now_ms);
        let Some(found) = self.slot.holder_id() else { return AskReply::Free };
        if found != holder {
            return AskReply::ChangedHands;
        }
        let Slot::Held(Held { inbox: Some(inbox), token, .. }) = &self.slot else { return AskReply::Deaf };
        let message = Message::Finish { token: token.clone(), reason: reason.to_owned() };
        if turn.say(&inbox.clone(), message) { AskReply::Told } else { AskReply::Deaf }
    }

    fn held_by(&mut self, token: &Token) -> Option<&mut Held> {
        match &mut self.slot {
            Slot::Held(held) if held.token == *token => Some(held),
            _ => None,
        }
    }

    fn stand_in_line(
        &mut self,
        turn: &mut Turn<'_>,
        asking: &Asking,
        ticket: Option<u64>,
    ) -> Result<u64, FenceUnusable> {
        self.queue_ends_ms = turn.now_ms + turn.limits.queue_ttl_ms;
        if let Some(waiting) = self.queue.iter_mut().find(|w| w.token == asking.token) {
            waiting.polled_ms = turn.now_ms;
            return Ok(waiting.ticket);
        }
        let ticket = match ticket {
            Some(ticket) => ticket,
            None => turn.fence()?,
        };
        let mut waiting = Waiting::from(asking.clone());
        waiting.ticket = ticket;
        waiting.polled_ms = turn.now_ms;
        let place = self.queue.partition_point(|w| w.ticket < ticket);
        self.queue.insert(place, waiting);
        Ok(ticket)
    }

    /// Gives the lock to the first waiter that is there; `me` is served by the reply, in full.
    /// With `before`, only tickets below it are served. A dead waiter is never put back.
    fn hand_off(&mut self, turn: &mut Turn<'_>, me: Option<&Token>, before: Option<u64>) -> HandOff {
        if self.queue.is_empty() {
            return HandOff::Nobody;
        }
        let Ok(fence) = turn.fence() else { return HandOff::Unusable };
        for _ in 0..turn.limits.sweep {
            let Some(first) = self.queue.first() else { return HandOff::Nobody };
            if before.is_some_and(|limit| first.ticket > limit) {
                return HandOff::Nobody;
            }
            let next = self.queue.remove(0);
            let lasts_ms = next.ttl_ms.min(turn.limits.provisional_ms);
            if me == Some(&next.token) {
                let full = next.ttl_ms;
                self.hold(turn, fence, next, full);
                return HandOff::Me(fence);
            }
            let there = match &next.inbox {
                Some(inbox) => turn.say(inbox, Message::Granted { token: next.token.clone(), fence, lasts_ms }),
                None => turn.now_ms.saturating_sub(next.polled_ms) < turn.limits.poll_grace_ms,
            };
            if there {
                self.hold(turn, fence, next, lasts_ms);
                self.hint(turn, self.queue.first().cloned(), lasts_ms);
                return HandOff::Gave;
            }
        }
        HandOff::Again
    }

    /// The holder is done with the lock: the next waiter has it, or it is free.
    fn pass_on(&mut self, turn: &mut Turn<'_>) -> PassReply {
        match self.hand_off(turn, None, None) {
            HandOff::Gave | HandOff::Me(_) => PassReply::Done,
            HandOff::Nobody | HandOff::Unusable => {
                self.slot = Slot::Free;
                PassReply::Done
            }
            HandOff::Again => {
                // Still under its token, but no renewal can prolong it. The dead stand in front:
                // the first and the last are told, should the caller die now.
                let limit = turn.limits.provisional_ms;
                if let Slot::Held(held) = &mut self.slot {
                    if turn.rules.keep(Rule::AnUnfinishedReleaseRevokes) {
                        held.flag = Flag::Revoked;
                    }
                    let cut = turn.now_ms + limit;
                    held.ends_ms = Some(held.ends_ms.map_or(cut, |end| end.min(cut)));
                }
                self.hint(turn, self.queue.first().cloned(), limit);
                self.hint(turn, self.queue.last().cloned(), limit);
                PassReply::Again
            }
        }
    }

    fn hold(&mut self, turn: &Turn<'_>, fence: u64, new: Waiting, lasts_ms: u64) {
        self.slot = Slot::Held(Held {
            flag: if self.queue.is_empty() { Flag::NobodyWaits } else { Flag::SomebodyWaits },
            token: new.token,
            fence,
            inbox: new.inbox,
            since_ms: turn.wall_us / 1_000,
            ttl_ms: new.ttl_ms,
            owner: new.owner,
            ends_ms: Some(turn.now_ms + lasts_ms),
        });
    }

    /// Tells a waiter when to look again.
    #[expect(clippy::unused_self, reason = "reads like the rest")]
    fn hint(&self, turn: &mut Turn<'_>, waiter: Option<Waiting>, after_ms: u64) {
        if let Some(Waiting { inbox: Some(inbox), token, .. }) = waiter {
            turn.say(&inbox, Message::LookAgain { token, after_ms });
        }
    }
}

impl Slot {
    pub(crate) fn holder_id(&self) -> Option<HolderId> {
        match self {
            Self::Free => None,
            Self::Held(held) => Some(held.token.holder_id()),
            Self::Foreign { value, .. } => Some(HolderId::of(value.as_bytes())),
        }
    }

    /// Where its holder can be told something.
    pub(crate) fn inbox(&self) -> Option<&InboxId> {
        match self {
            Self::Held(held) => held.inbox.as_ref(),
            Self::Free | Self::Foreign { .. } => None,
        }
    }
}

impl Held {
    /// Restarts the countdown where that is later than its present end.
    fn prolong(&mut self, now_ms: u64, ttl_ms: u64) {
        let end = now_ms + ttl_ms;
        self.ends_ms = Some(self.ends_ms.map_or(end, |old| old.max(end)));
    }
}

impl From<Asking> for Waiting {
    fn from(asking: Asking) -> Self {
        Self {
            ticket: 0,
            token: asking.token,
            inbox: asking.inbox,
            ttl_ms: asking.ttl_ms,
            since_ms: asking.since_ms,
            owner: asking.owner,
            polled_ms: 0,
        }
    }
}

/// The next number of a store's counter: a fence, or a ticket.
pub(crate) fn draw(counter: &mut u64, wall_us: u64) -> Result<u64, FenceUnusable> {
    let next = (*counter + 1).max(wall_us);
    if next > Fence::MAX {
        return Err(FenceUnusable);
    }
    *counter = next;
    Ok(next)
}

impl Turn<'_> {
    fn fence(&mut self) -> Result<u64, FenceUnusable> {
        draw(self.counter, self.wall_us)
    }

    /// Whether somebody heard it.
    fn say(&mut self, inbox: &InboxId, message: Message) -> bool {
        let heard = (self.listening)(inbox);
        if heard {
            self.told.push((inbox.clone(), message));
        }
        heard
    }
}

#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum YieldReply {
    Ours,
    NotOurs,
    Revoked,
    Again,
}
