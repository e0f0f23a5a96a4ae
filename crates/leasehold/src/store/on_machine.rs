//! The operations on a lock for the stores that run the state machine: they translate between its types and the
//! store's, and repeat an operation that passed over dead waiters.

use std::time::Duration;

use super::{
    Acquire, AcquireRequest, Evicted, FinishRequest, Grant, Holder, Left, Place, Push, Release, Renewal, Renewed,
    StoreError, StoreErrorKind, Ticket, Try,
};
use crate::clock::Moment;
use crate::facts::{Fence, HolderId, Token};
use crate::machine::{
    AcquireReply, CallContext, Contender, EvictReply, FenceUnusable, FinishReply, Flag, InboxId, Lock, Message,
    PassReply, RenewReply, Slot, TryReply,
};

/// The state machine of one lock within a store.
pub(crate) trait RunMachine {
    type Error: From<FenceUnusable>;

    /// Runs one operation in one step, then delivers its messages. `me` is the token of the attempt that the operation
    /// is about. `verb` may run twice; only the last run counts.
    fn run<R>(
        &mut self,
        me: Option<&Token>,
        verb: &mut dyn FnMut(&mut Lock, &mut CallContext<'_>) -> R,
    ) -> Result<MachineReply<R>, Self::Error>;
}

/// The result of an operation of the state machine.
pub(crate) struct MachineReply<R> {
    pub(crate) reply: R,
    /// The holder after the operation.
    pub(crate) holder: Option<Holder>,
}

/// A try or an acquire.
#[derive(Clone)]
pub(crate) struct Asking {
    pub(crate) contender: Contender,
    pub(crate) lasts: Duration,
    pub(crate) asked_at: Moment,
}

impl Asking {
    /// A request that leaves at `asked_at`. Messages for it are sent to `inbox`, if it listens.
    pub(crate) fn new(request: &AcquireRequest, inbox: &InboxId, asked_at: Moment) -> Self {
        let contender = Contender {
            token: request.token.clone(),
            inbox: request.listens.then(|| inbox.clone()),
            ttl_ms: request.ttl.as_millis(),
            since_ms: request.since_ms,
            owner: request.owner.clone(),
            fenced: request.fenced,
        };
        Self { contender, lasts: request.ttl.duration(), asked_at }
    }

    pub(crate) fn grant(&self, fence: u64) -> Grant {
        let fence = self.contender.fenced.then_some(Fence::new(fence));
        Grant { fence, asked_at: self.asked_at, lasts: self.lasts }
    }
}

pub(crate) fn try_acquire<M: RunMachine>(mut lock: M, asking: &Asking) -> Result<Try, M::Error> {
    let contender = &asking.contender;
    let called = lock.run(Some(&contender.token), &mut |lock, cx| lock.try_acquire(cx, contender))?;
    Ok(match called.reply? {
        TryReply::Granted { fence } => Try::Granted(asking.grant(fence)),
        TryReply::Held => Try::Held(called.holder),
        TryReply::Revoked => Try::Revoked,
    })
}

pub(crate) fn acquire<M: RunMachine>(
    mut lock: M,
    asking: &Asking,
    ticket: Option<Ticket>,
) -> Result<Acquire, M::Error> {
    let contender = &asking.contender;
    let mut ticket = ticket.map(|ticket| ticket.0);
    loop {
        let called = lock.run(Some(&contender.token), &mut |lock, cx| lock.acquire(cx, contender, ticket))?;
        return Ok(match called.reply? {
            AcquireReply::Again { ticket: mine } => {
                ticket = Some(mine);
                continue;
            }
            AcquireReply::Granted { fence } => Acquire::Granted(asking.grant(fence)),
            AcquireReply::Revoked => Acquire::Revoked,
            AcquireReply::Queued { ticket, position } => {
                Acquire::Queued(Place { ticket: Ticket(ticket), position, holder: called.holder })
            }
        });
    }
}

pub(crate) fn release<M: RunMachine>(mut lock: M, token: &Token) -> Result<Release, M::Error> {
    loop {
        match lock.run(None, &mut |lock, cx| lock.release(cx, token))?.reply {
            PassReply::Done => return Ok(Release::Released),
            PassReply::NotOurs => return Ok(Release::NotOwner),
            PassReply::Again => {}
        }
    }
}

pub(crate) fn leave<M: RunMachine>(mut lock: M, token: &Token) -> Result<Left, M::Error> {
    loop {
        match lock.run(Some(token), &mut |lock, cx| lock.leave(cx, token))?.reply {
            PassReply::Done => return Ok(Left::WasGranted),
            PassReply::NotOurs => return Ok(Left::WasWaiting),
            PassReply::Again => {}
        }
    }
}

pub(crate) fn renew<M: RunMachine>(mut lock: M, r: &Renewal) -> Result<Renewed, M::Error> {
    let called = lock.run(None, &mut |lock, cx| {
        if !r.prolong {
            return lock.check(cx.now_ms, &r.token, r.fence);
        }
        lock.renew(cx, &r.token, r.ttl.as_millis(), r.fence, r.rewrite.as_ref(), r.hand_to.as_ref())
    })?;
    Ok(called.reply.into())
}

pub(crate) fn evict<M: RunMachine>(mut lock: M, holder: HolderId, force: bool) -> Result<Evicted, M::Error> {
    loop {
        let mut verb = |lock: &mut Lock, cx: &mut CallContext<'_>| {
            lock.lapse(cx.now_ms);
            let before = view(&lock.slot, cx.now_ms);
            (lock.evict(cx, holder, force), before)
        };
        let (reply, before) = lock.run(None, &mut verb)?.reply;
        let Some(found) = before else { return Ok(Evicted::Free) };
        return Ok(match reply {
            EvictReply::Again => continue,
            EvictReply::Done => Evicted::Done(found),
            EvictReply::ChangedHands => Evicted::ChangedHands(found),
            EvictReply::Free => Evicted::Free,
            EvictReply::Foreign => Evicted::Foreign(found),
        });
    }
}

pub(crate) fn ask_to_finish<M: RunMachine>(
    mut lock: M,
    holder: HolderId,
    reason: &str,
) -> Result<FinishRequest, M::Error> {
    let called = lock.run(None, &mut |lock, cx| lock.ask_to_finish(cx, holder, reason))?;
    Ok(match (called.reply, called.holder) {
        (FinishReply::Free, _) | (_, None) => FinishRequest::Free,
        (FinishReply::Sent, Some(found)) => FinishRequest::Delivered(found),
        (FinishReply::NotListening, Some(found)) => FinishRequest::Undeliverable(found),
        (FinishReply::ChangedHands, Some(found)) => FinishRequest::ChangedHands(found),
    })
}

impl From<RenewReply> for Renewed {
    fn from(reply: RenewReply) -> Self {
        match reply {
            RenewReply::Renewed => Self::Renewed,
            RenewReply::Lost => Self::Lost,
            RenewReply::Revoked => Self::Revoked,
        }
    }
}

/// Returns the holder in a slot.
pub(crate) fn view(slot: &Slot, now_ms: u64) -> Option<Holder> {
    let left = |ends_ms: Option<u64>| ends_ms.map(|end| Duration::from_millis(end.saturating_sub(now_ms)));
    let id = slot.holder_id()?;
    Some(match slot {
        Slot::Free => return None,
        Slot::Held(held) => Holder {
            id,
            owner: held.owner.clone(),
            fence: (held.fence != 0).then_some(Fence::new(held.fence)),
            since_ms: held.since_ms,
            ttl: Some(Duration::from_millis(held.ttl_ms)),
            ttl_left: left(held.ends_ms),
            revoked: held.flag == Flag::Revoked,
            foreign: false,
            listens: held.inbox.is_some(),
            connected: None,
        },
        Slot::Foreign { value, ends_ms } => Holder::foreign(value.as_bytes(), left(*ends_ms)),
    })
}

impl Message {
    /// Converts the message for the process that receives it.
    pub(crate) fn into_push(self, asked_at: Moment) -> Push {
        match self {
            Self::Granted { token, fence, lasts_ms } => {
                let grant = Grant { fence: Some(Fence::new(fence)), asked_at, lasts: Duration::from_millis(lasts_ms) };
                Push::Granted { token, grant }
            }
            Self::LookAgain { token, after_ms } => Push::LookAgain { token, after: Duration::from_millis(after_ms) },
            Self::Revoked { token } => Push::Revoked { token },
            Self::Finish { token, reason } => Push::Finish { token, reason },
        }
    }
}

impl From<FenceUnusable> for StoreError {
    fn from(_: FenceUnusable) -> Self {
        StoreErrorKind::FenceUnusable.into()
    }
}
