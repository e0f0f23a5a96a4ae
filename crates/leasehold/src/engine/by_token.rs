//! Leases that belong to a token and to no process: taken under a token that the caller chose, for somebody who
//! asks through us, may be cut off, and asks again; or handed on by a guard.
//!
//! Nothing of a chosen token is undone here, whatever becomes of the call. An undo names the token, and the same
//! token may have been granted to the caller's second try meanwhile: the lease would be gone under its feet. What
//! a lost call may have taken is had by asking again with its token, or ends by its ttl.

use std::pin::pin;
use std::sync::{Arc, Mutex};

use super::acquiring::{self, Undo, Wish, late};
use super::call::{CallScope, Ended, Wait};
use super::lease_cell::LeaseCell;
use super::{Core, EngineHandle, lock};
use crate::client::Seen;
use crate::client::by_token::{AfterLook, Confirmed, TokenAnswer, TokenCall, confirmed};
use crate::client::retry::Retry;
use crate::clock::{Moment, sleep, wall_ms};
use crate::error::Error;
use crate::events::{EventKind, LockEvent};
use crate::facts::{Fence, LockName, Owner, Token, Ttl};
use crate::loss::LossReason;
use crate::store::{Claim, Note, Operation, Renewal, Renewed, StoreError, StoreErrorKind, Try};

/// How often a grant is asked for anew when it is another one by the time it is confirmed: two calls with
/// one token are at it together, and the second finds what the first has written.
const CONFIRMS: usize = 4;

/// Takes a lock as wished; the fence of the lease, which lasts its full ttl from some moment of this call.
pub(crate) async fn acquire(engine: &Arc<EngineHandle>, wish: Wish, token: &Token) -> Result<Option<Fence>, Error> {
    let call = CallScope::begin(&engine.core, &wish.name, wish.wait)?;
    let seen = Mutex::new(Seen::default());
    let (outcome, waited) = call.run(obtain(engine, &wish, token, call.began, &seen)).await;
    match outcome {
        Ok((fence, handed_over)) => {
            call.acquired(&wish.name, fence, waited, handed_over);
            Ok(fence)
        }
        Err(Ended::Error(error)) => Err(error),
        Err(Ended::Late) => Err(late(&call, &wish.name, waited, seen)),
    }
}

/// The fence, and whether another holder handed the lock over.
async fn obtain(
    engine: &Arc<EngineHandle>,
    wish: &Wish,
    token: &Token,
    began: Moment,
    seen: &Mutex<Seen>,
) -> Result<(Option<Fence>, bool), Ended> {
    let core = &engine.core;
    let claim = Claim {
        name: wish.name.clone(),
        token: token.clone(),
        ttl: wish.ttl,
        owner: wish.owner.clone(),
        fenced: wish.fenced,
        listens: false,
        since_ms: wall_ms(),
    };
    // In the room of this process, under a token of the room's own. It sits down when it is first polled.
    let mut turn = pin!(acquiring::wait(engine, wish, None, began, seen));
    let mut call = TokenCall::new(wish.wait != Wait::Not);
    loop {
        let asked_at = Moment::now();
        lock(seen).asking_since.get_or_insert(asked_at);
        let answer = core.within(ask(core, &claim)).await;
        let look_after = match core.decide(|cx| call.answered(cx, asked_at, answer)) {
            AfterLook::Granted(fence) => {
                core.tell_granted(&wish.name, token, &wish.owner, fence, wish.ttl);
                return Ok((fence, false));
            }
            AfterLook::Revoked => {
                return Err(Ended::Error(Error::Lost { name: wish.name.clone(), why: LossReason::Revoked }));
            }
            AfterLook::Late(holder) => {
                *lock(seen) = Seen::held_by(Some(*holder));
                return Err(Ended::Late);
            }
            AfterLook::Failed(error) => {
                return Err(Ended::Error(core.store_error(Operation::Acquire, &wish.name, error)));
            }
            AfterLook::Wait { look_after, seen: Ok(holder) } => {
                *lock(seen) = Seen::held_by(Some(*holder));
                look_after
            }
            AfterLook::Wait { look_after, seen: Err(error) } => {
                lock(seen).failed = Some(error);
                look_after
            }
        };
        tokio::select! {
            biased;
            () = core.closing.cancelled() => return Err(Ended::shut_down(&wish.name)),
            guard = &mut turn, if call.waits_in_line() => {
                let guard = match guard {
                    Err(Ended::Late) => {
                        call.waited_in_vain();
                        continue;
                    }
                    guard => guard?,
                };
                let fence = guard.try_fence();
                // From here on whoever gets no answer may have the lock.
                lock(seen).failed = Some(StoreErrorKind::NoAnswer.into());
                match guard.hand_to(token).await {
                    Ok(()) => return Ok((fence, true)),
                    // So slow were we, or the store. It is the next one's, and our turn comes again.
                    Err(Error::Lost { why: LossReason::Gone | LossReason::Expired, .. }) => {
                        turn.set(acquiring::wait(engine, wish, None, began, seen));
                    }
                    Err(error) => return Err(Ended::Error(error)),
                }
            }
            () = sleep(look_after) => {}
        }
    }
}

/// Makes a lease of this process that of a token, which may be its own, and of no process. It lasts its full ttl
/// from some moment of this call. Dropped or failed, it is given back where it was not handed on.
pub(crate) async fn hand_on(core: &Arc<Core>, cell: &LeaseCell, to: &Token) -> Result<(), Error> {
    let _call = core.call();
    let began = Moment::now();
    // Nobody tends it from here on: a renewal after this one would find another's token.
    core.leases.remove(cell);
    let (undo, renewal, published) = {
        let state = cell.state();
        let (name, token, ttl, owner) = (cell.name.clone(), cell.token.clone(), state.ttl, state.owner.clone());
        let rewrite = Some(owner.clone());
        let renewal = Renewal {
            name: name.clone(),
            token: token.clone(),
            fence: cell.fence,
            ttl,
            prolong: true,
            rewrite,
            hand_to: Some(to.clone()),
        };
        let claim = Claim { name, token, ttl, owner, fenced: cell.fenced, listens: true, since_ms: wall_ms() };
        // A leave, not a release: what was handed on before an answer was lost is nobody's to complain about.
        (Undo::arm(core, claim), renewal, state.published)
    };
    let lost = |why| {
        core.tell_lost(cell, why);
        Err(Error::Lost { name: cell.name.clone(), why })
    };
    if let Some(why) = cell.state().lost {
        return lost(why);
    }
    let mut retry = Retry::new();
    loop {
        let asked_at = Moment::now();
        let answer = core.within(async { Ok(core.store.renew(std::slice::from_ref(&renewal)).await.pop()) }).await;
        let answer = answer.unwrap_or_else(|error| Some(Renewed::Unknown(error)));
        let error = match confirmed(Moment::now(), asked_at, renewal.ttl, answer) {
            Confirmed::Yes => {
                let claim = undo.disarm();
                // Nobody renews it, so nobody would publish it later.
                if !published {
                    core.tell_granted(&claim.name, to, &claim.owner, cell.fence, claim.ttl);
                }
                return Ok(());
            }
            Confirmed::Lost => return lost(LossReason::Gone),
            Confirmed::Revoked => return lost(LossReason::Revoked),
            Confirmed::Displaced => return lost(LossReason::Displaced),
            Confirmed::Unknown(error) => error,
        };
        match core.decide(|cx| retry.failed(cx, began, &error)) {
            Some(pause) => sleep(pause).await,
            None => return Err(core.store_error(Operation::Renew, &cell.name, error)),
        }
    }
}

/// A try, and where it is granted a confirmation: it writes the fence into the record, so that whoever has
/// the same token gets the same one, and the lease lasts its whole ttl also when it was taken before.
async fn ask(core: &Core, claim: &Claim) -> Result<TokenAnswer, StoreError> {
    for _ in 0..CONFIRMS {
        let grant = match core.store.try_acquire(claim).await? {
            Try::Granted(grant) => grant,
            // It was this token's a moment ago: another call has confirmed it with its own fence meanwhile.
            Try::Held(None) => continue,
            Try::Held(Some(holder)) => return Ok(TokenAnswer::Held(Box::new(holder))),
            Try::Revoked => return Ok(TokenAnswer::Revoked),
        };
        let renewal = Renewal {
            name: claim.name.clone(),
            token: claim.token.clone(),
            fence: grant.fence,
            ttl: claim.ttl,
            prolong: true,
            rewrite: Some(claim.owner.clone()),
            hand_to: None,
        };
        let asked_at = Moment::now();
        let answer = core.store.renew(&[renewal]).await.pop();
        match confirmed(Moment::now(), asked_at, claim.ttl, answer) {
            Confirmed::Yes => return Ok(TokenAnswer::Granted(grant.fence)),
            Confirmed::Revoked => return Ok(TokenAnswer::Revoked),
            Confirmed::Lost | Confirmed::Displaced => {}
            Confirmed::Unknown(error) => return Err(error),
        }
    }
    Err(StoreErrorKind::TryAgain.into())
}

impl Core {
    /// Tells those who watch of a lease that no guard tends, and enters it where long-held leases are found.
    pub(crate) fn tell_granted(&self, name: &LockName, token: &Token, owner: &Owner, fence: Option<Fence>, ttl: Ttl) {
        self.note(Note::Tell(event(EventKind::Granted, name, token, &owner.to_string(), fence, "")));
        self.note(Note::Enter { name: name.clone(), holder: token.holder_id(), lasts: ttl.duration() });
    }

    /// The same for one that was given back.
    pub(crate) fn tell_released(&self, name: &LockName, token: &Token, owner: &str, fence: Option<Fence>) {
        self.note(Note::Tell(event(EventKind::Released, name, token, owner, fence, "normal")));
    }
}

fn event(
    kind: EventKind,
    name: &LockName,
    token: &Token,
    owner: &str,
    fence: Option<Fence>,
    reason: &str,
) -> LockEvent {
    LockEvent {
        kind,
        name: name.to_string(),
        owner: owner.to_owned(),
        holder_id: token.holder_id().to_string(),
        fence: fence.map(Fence::get),
        at_ms: wall_ms(),
        reason: reason.to_owned(),
    }
}
