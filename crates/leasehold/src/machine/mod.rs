//! The state machine of one lock: what every operation of a store means, without clock, I/O or async.
//!
//! The memory store runs it, the SQLite store runs it inside a transaction when an attempt waits, and the Redis scripts
//! implement it again in Lua. A property test drives all three and compares every answer. `explore` (a test) visits every
//! state of small worlds in which the real client code ([`crate::client`]) runs against it: at most one client believes
//! in a lease at a time, fences rise, and a lease that was taken away stays so. Without any one [`Rule`] it finds a
//! violation.

mod call;
#[cfg(test)]
mod explore;
mod state;

#[cfg(test)]
pub(crate) use self::call::YieldReply;
pub(crate) use self::call::{
    AcquireReply, CallContext, Contender, EvictReply, FenceUnusable, FinishReply, Limits, Message, PassReply,
    RenewReply, TryReply, draw,
};
pub(crate) use self::state::{Flag, Held, InboxId, Lock, QueueEntry, Slot};
use crate::facts::{Fence, HolderId, Owner, Token};
use crate::rules::Rule;

enum HandOff {
    /// The caller is the next waiter, and holds the lock under this fence.
    ToCaller(u64),
    ToWaiter,
    NoWaiter,
    /// Dead waiters were passed over, and more may follow.
    Again,
    FenceUnusable,
}

impl Lock {
    /// Whether the lock is free and has no queue.
    pub(crate) fn is_gone(&self) -> bool {
        self.slot == Slot::Free && self.queue.is_empty()
    }

    /// Removes a lease and a queue that have ended.
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

    /// Frees the lock if the process at this inbox holds it. For stores that can see a process die.
    pub(crate) fn holder_died(&mut self, inbox: &InboxId) {
        if let Slot::Held(held) = &self.slot
            && held.inbox.as_ref() == Some(inbox)
        {
            self.slot = Slot::Free;
        }
    }

    /// Takes the lock if it is free and no earlier waiter listens, in one step.
    ///
    /// On Redis this is three plain commands and, if a queue exists, [`Lock::yield_to_queue`].
    pub(crate) fn try_acquire(
        &mut self,
        cx: &mut CallContext<'_>,
        contender: &Contender,
    ) -> Result<TryReply, FenceUnusable> {
        self.lapse(cx.now_ms);
        if let Some(held) = self.held_by(&contender.token) {
            // Sent again. The second send must restart the countdown.
            if held.flag == Flag::Revoked {
                return Ok(TryReply::Revoked);
            }
            held.prolong(cx.now_ms, contender.ttl_ms);
            return Ok(TryReply::Granted { fence: held.fence });
        }
        if self.slot != Slot::Free {
            return Ok(TryReply::Held);
        }
        let fence = if contender.fenced { cx.fence()? } else { 0 };
        while contender.fenced && !self.queue.is_empty() {
            match self.hand_off(cx, None, Some(fence)) {
                HandOff::ToWaiter => return Ok(TryReply::Held),
                HandOff::Again => {}
                HandOff::NoWaiter | HandOff::ToCaller(_) => break,
                HandOff::FenceUnusable => return Err(FenceUnusable),
            }
        }
        self.hold(cx, fence, contender.clone().into(), contender.ttl_ms);
        Ok(TryReply::Granted { fence })
    }

    /// Runs the first of the three commands of a try on Redis, `SET NX`. `None`: the lock was free and is taken now.
    #[cfg(test)]
    pub(crate) fn plant(&mut self, cx: &mut CallContext<'_>, contender: &Contender) -> Option<Slot> {
        self.lapse(cx.now_ms);
        if self.slot != Slot::Free {
            return Some(self.slot.clone());
        }
        self.slot = Slot::Held(Held {
            flag: Flag::Uncontended,
            token: contender.token.clone(),
            fence: 0,
            inbox: contender.inbox.clone(),
            since_ms: cx.wall_us / 1_000,
            ttl_ms: contender.ttl_ms,
            owner: contender.owner.clone(),
            ends_ms: Some(cx.now_ms + contender.ttl_ms),
        });
        None
    }

    /// Hands a lock that a try took to the first listening waiter with a ticket below its fence.
    #[cfg(test)]
    pub(crate) fn yield_to_queue(
        &mut self,
        cx: &mut CallContext<'_>,
        token: &Token,
        fence: u64,
    ) -> Result<YieldReply, FenceUnusable> {
        self.lapse(cx.now_ms);
        let Some(held) = self.held_by(token) else { return Ok(YieldReply::NotOurs) };
        if held.flag == Flag::Revoked {
            return Ok(YieldReply::Revoked);
        }
        // Another call with this token has confirmed the lease meanwhile, and its caller relies on it.
        if held.fence != 0 && held.fence != fence {
            return Ok(YieldReply::Ours);
        }
        let outcome = self.hand_off(cx, None, Some(fence));
        if matches!(outcome, HandOff::ToWaiter) {
            return Ok(YieldReply::NotOurs);
        }
        let contended = !self.queue.is_empty();
        if let Some(held) = self.held_by(token)
            && contended
        {
            held.flag = Flag::Contended;
        }
        Ok(if matches!(outcome, HandOff::Again) { YieldReply::Again } else { YieldReply::Ours })
    }

    /// Takes the lock or joins the queue. Idempotent on the token.
    pub(crate) fn acquire(
        &mut self,
        cx: &mut CallContext<'_>,
        contender: &Contender,
        ticket: Option<u64>,
    ) -> Result<AcquireReply, FenceUnusable> {
        self.lapse(cx.now_ms);
        if let Some(held) = self.held_by(&contender.token) {
            // Re-sent, or granted by a message that was lost: confirm.
            if held.flag == Flag::Revoked {
                return Ok(AcquireReply::Revoked);
            }
            held.prolong(cx.now_ms, contender.ttl_ms);
            if held.fence == 0 {
                held.fence = cx.fence()?;
            }
            return Ok(AcquireReply::Granted { fence: held.fence });
        }
        if self.slot == Slot::Free && self.queue.is_empty() {
            let fence = cx.fence()?;
            self.hold(cx, fence, contender.clone().into(), contender.ttl_ms);
            return Ok(AcquireReply::Granted { fence });
        }
        let ticket = self.join_queue(cx, contender, ticket)?;
        match &mut self.slot {
            Slot::Free => match self.hand_off(cx, Some(&contender.token), None) {
                HandOff::ToCaller(fence) => return Ok(AcquireReply::Granted { fence }),
                HandOff::Again => return Ok(AcquireReply::Again { ticket }),
                HandOff::FenceUnusable => return Err(FenceUnusable),
                HandOff::ToWaiter | HandOff::NoWaiter => {}
            },
            Slot::Held(held) => {
                if held.flag == Flag::Uncontended || !Rule::AcquireKeepsRevocation.applies() {
                    held.flag = Flag::Contended;
                }
                if held.ends_ms.is_none() {
                    // Another program removed the expiry. A full ttl from now outlasts any belief.
                    held.ends_ms = Some(cx.now_ms + held.ttl_ms);
                }
            }
            Slot::Foreign { .. } => {}
        }
        let position = self.queue.iter().position(|w| w.token == contender.token).unwrap_or(0);
        Ok(AcquireReply::Queued { ticket, position })
    }

    /// Gives the lock back.
    pub(crate) fn release(&mut self, cx: &mut CallContext<'_>, token: &Token) -> PassReply {
        self.lapse(cx.now_ms);
        let ours = self.held_by(token).is_some();
        if !ours && (Rule::ReleaseComparesToken.applies() || !matches!(self.slot, Slot::Held(_))) {
            return PassReply::NotOurs;
        }
        self.pass_on(cx)
    }

    /// Gives an attempt up, in the queue or as the holder.
    pub(crate) fn leave(&mut self, cx: &mut CallContext<'_>, token: &Token) -> PassReply {
        self.lapse(cx.now_ms);
        self.queue.retain(|w| w.token != *token);
        if self.held_by(token).is_none() {
            return PassReply::NotOurs;
        }
        self.pass_on(cx)
    }

    /// Restarts the countdown of a lease. Never shortens it and never creates one.
    pub(crate) fn renew(
        &mut self,
        cx: &mut CallContext<'_>,
        token: &Token,
        ttl_ms: u64,
        fence: Option<Fence>,
        rewrite: Option<&Owner>,
        hand_to: Option<&Token>,
    ) -> RenewReply {
        self.lapse(cx.now_ms);
        if !Rule::RenewalComparesToken.applies()
            && let Slot::Held(held) = &mut self.slot
        {
            held.prolong(cx.now_ms, ttl_ms);
            return RenewReply::Renewed;
        }
        let Slot::Held(held) = &mut self.slot else { return RenewReply::Lost };
        // Handed on already, and sent again. The fence shows that it is still the same lease.
        let handed_on = hand_to == Some(&held.token) && fence.is_some_and(|fence| fence.get() == held.fence);
        if held.token != *token && !handed_on {
            return RenewReply::Lost;
        }
        if held.flag == Flag::Revoked && Rule::RenewalRespectsRevocation.applies() {
            return RenewReply::Revoked;
        }
        if let Some(fence) = fence.map(Fence::get)
            && fence != held.fence
        {
            if held.fence != 0 && Rule::RenewalComparesFence.applies() {
                return RenewReply::Lost;
            }
            held.fence = fence;
        }
        held.prolong(cx.now_ms, ttl_ms);
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

    /// Checks whether a lease is still its holder's, and changes nothing.
    pub(crate) fn check(&mut self, now_ms: u64, token: &Token, fence: Option<Fence>) -> RenewReply {
        self.lapse(now_ms);
        let Some(held) = self.held_by(token) else { return RenewReply::Lost };
        if held.flag == Flag::Revoked {
            return RenewReply::Revoked;
        }
        let granted_anew = held.fence != 0 && fence.is_some_and(|fence| fence.get() != held.fence);
        if granted_anew { RenewReply::Lost } else { RenewReply::Renewed }
    }

    /// Takes the lock away from the holder that was inspected.
    pub(crate) fn evict(&mut self, cx: &mut CallContext<'_>, holder: HolderId, force: bool) -> EvictReply {
        self.lapse(cx.now_ms);
        let Some(found) = self.slot.holder_id() else { return EvictReply::Free };
        if found != holder && Rule::EvictionComparesHolder.applies() {
            return EvictReply::ChangedHands;
        }
        if let Slot::Held(held) = &mut self.slot {
            if let Some(inbox) = held.inbox.clone() {
                cx.send(&inbox, Message::Revoked { token: held.token.clone() });
            }
            if force {
                return match self.pass_on(cx) {
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
        // A foreign value is never changed: it stays until a waiter takes over.
        match self.hand_off(cx, None, None) {
            HandOff::ToWaiter => {}
            HandOff::Again => return EvictReply::Again,
            HandOff::NoWaiter | HandOff::FenceUnusable | HandOff::ToCaller(_) => self.slot = Slot::Free,
        }
        EvictReply::Done
    }

    /// Asks the holder that was inspected to finish.
    pub(crate) fn ask_to_finish(&mut self, cx: &mut CallContext<'_>, holder: HolderId, reason: &str) -> FinishReply {
        self.lapse(cx.now_ms);
        let Some(found) = self.slot.holder_id() else { return FinishReply::Free };
        if found != holder {
            return FinishReply::ChangedHands;
        }
        let Slot::Held(Held { inbox: Some(inbox), token, .. }) = &self.slot else { return FinishReply::NotListening };
        let message = Message::Finish { token: token.clone(), reason: reason.to_owned() };
        if cx.send(&inbox.clone(), message) { FinishReply::Sent } else { FinishReply::NotListening }
    }

    fn held_by(&mut self, token: &Token) -> Option<&mut Held> {
        match &mut self.slot {
            Slot::Held(held) if held.token == *token => Some(held),
            _ => None,
        }
    }

    fn join_queue(
        &mut self,
        cx: &mut CallContext<'_>,
        contender: &Contender,
        ticket: Option<u64>,
    ) -> Result<u64, FenceUnusable> {
        self.queue_ends_ms = cx.now_ms + cx.limits.queue_ttl_ms;
        if let Some(waiting) = self.queue.iter_mut().find(|w| w.token == contender.token) {
            waiting.polled_ms = cx.now_ms;
            return Ok(waiting.ticket);
        }
        let ticket = match ticket {
            Some(ticket) => ticket,
            None => cx.fence()?,
        };
        let mut waiting = QueueEntry::from(contender.clone());
        waiting.ticket = ticket;
        waiting.polled_ms = cx.now_ms;
        let place = self.queue.partition_point(|w| w.ticket < ticket);
        self.queue.insert(place, waiting);
        Ok(ticket)
    }

    /// Gives the lock to the first waiter that listens. The caller (`me`) gets its full lease with the reply. With
    /// `before`, only waiters with a lower ticket are served. A dead waiter is never put back.
    fn hand_off(&mut self, cx: &mut CallContext<'_>, me: Option<&Token>, before: Option<u64>) -> HandOff {
        if self.queue.is_empty() {
            return HandOff::NoWaiter;
        }
        let Ok(fence) = cx.fence() else { return HandOff::FenceUnusable };
        for _ in 0..cx.limits.sweep {
            let Some(first) = self.queue.first() else { return HandOff::NoWaiter };
            if before.is_some_and(|limit| first.ticket > limit) {
                return HandOff::NoWaiter;
            }
            let next = self.queue.remove(0);
            let lasts_ms = next.ttl_ms.min(cx.limits.provisional_ms);
            if me == Some(&next.token) {
                let full = next.ttl_ms;
                self.hold(cx, fence, next, full);
                return HandOff::ToCaller(fence);
            }
            let listens = match &next.inbox {
                Some(inbox) => cx.send(inbox, Message::Granted { token: next.token.clone(), fence, lasts_ms }),
                None => cx.now_ms.saturating_sub(next.polled_ms) < cx.limits.poll_grace_ms,
            };
            if listens {
                self.hold(cx, fence, next, lasts_ms);
                self.notify(cx, self.queue.first().cloned(), lasts_ms);
                return HandOff::ToWaiter;
            }
        }
        HandOff::Again
    }

    /// Passes the lock to the next waiter, or frees it.
    fn pass_on(&mut self, cx: &mut CallContext<'_>) -> PassReply {
        match self.hand_off(cx, None, None) {
            HandOff::ToWaiter | HandOff::ToCaller(_) => PassReply::Done,
            HandOff::NoWaiter | HandOff::FenceUnusable => {
                self.slot = Slot::Free;
                PassReply::Done
            }
            HandOff::Again => {
                // Still under its token, but no renewal can prolong it. Dead waiters are in front: the first and the last
                // waiter are notified in case the caller dies now.
                let limit = cx.limits.provisional_ms;
                if let Slot::Held(held) = &mut self.slot {
                    if Rule::UnfinishedReleaseRevokes.applies() {
                        held.flag = Flag::Revoked;
                    }
                    let cut = cx.now_ms + limit;
                    held.ends_ms = Some(held.ends_ms.map_or(cut, |end| end.min(cut)));
                }
                self.notify(cx, self.queue.first().cloned(), limit);
                self.notify(cx, self.queue.last().cloned(), limit);
                PassReply::Again
            }
        }
    }

    fn hold(&mut self, cx: &CallContext<'_>, fence: u64, new: QueueEntry, lasts_ms: u64) {
        self.slot = Slot::Held(Held {
            flag: if self.queue.is_empty() { Flag::Uncontended } else { Flag::Contended },
            token: new.token,
            fence,
            inbox: new.inbox,
            since_ms: cx.wall_us / 1_000,
            ttl_ms: new.ttl_ms,
            owner: new.owner,
            ends_ms: Some(cx.now_ms + lasts_ms),
        });
    }

    /// Notifies a waiter when to ask again.
    #[expect(clippy::unused_self, reason = "reads like the rest")]
    fn notify(&self, cx: &mut CallContext<'_>, waiter: Option<QueueEntry>, after_ms: u64) {
        if let Some(QueueEntry { inbox: Some(inbox), token, .. }) = waiter {
            cx.send(&inbox, Message::LookAgain { token, after_ms });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Without;

    /// Two calls may use one token that their caller chose. The older lease of the two is over.
    #[test]
    fn a_renewal_of_an_older_grant_of_the_same_token_is_refused() {
        for (rule, expected) in [(None, RenewReply::Lost), (Some(Rule::RenewalComparesFence), RenewReply::Renewed)] {
            let _without = Without::new(rule);
            let token = Token::random();
            let contender = Contender {
                token: token.clone(),
                inbox: None,
                ttl_ms: 1_000,
                since_ms: 0,
                owner: Owner::default(),
                fenced: true,
            };
            let (mut lock, mut counter, mut outbox) = (Lock::default(), 0, Vec::new());
            let mut cx = CallContext {
                now_ms: 0,
                wall_us: 0,
                counter: &mut counter,
                listening: &mut |_| true,
                outbox: &mut outbox,
                limits: Limits::DEFAULT,
            };
            assert_eq!(lock.try_acquire(&mut cx, &contender), Ok(TryReply::Granted { fence: 1 }));
            cx.now_ms = 1_000;
            assert_eq!(lock.try_acquire(&mut cx, &contender), Ok(TryReply::Granted { fence: 2 }));
            let mut renew = |fence| lock.renew(&mut cx, &token, 1_000, Some(Fence::new(fence)), None, None);
            assert_eq!(renew(1), expected);
        }
    }
}
