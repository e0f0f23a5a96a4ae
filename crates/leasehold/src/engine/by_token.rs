//! Leases that belong to a token and to no process, acquired under a token that the caller chose. The caller may lose its
//! connection to this process and ask again.
//!
//! A call under a chosen token is never undone. An undo names the token, which may have been granted to the caller's
//! second call meanwhile, and would end that lease. What a lost call may have acquired is returned when its caller asks
//! again with the token, or ends by its ttl.

use std::pin::pin;
use std::sync::{Arc, Mutex};

use super::EngineHandle;
use super::acquiring::{self, late};
use super::call::{CallScope, Ended};
use super::core::{Core, lock};
use super::wish::{Wait, Wish};
use crate::client::Seen;
use crate::client::by_token::{AfterLook, Confirmed, TokenAnswer, TokenCall, confirmed};
use crate::clock::{Moment, sleep};
use crate::error::Error;
use crate::facts::{Fence, Token};
use crate::loss::LossReason;
use crate::store::{AcquireRequest, Operation, Renewal, StoreError, StoreErrorKind, Try};

/// How many times a grant is requested again when its confirmation finds another grant: two calls with one token run at
/// the same time, and the second finds what the first has written.
const CONFIRMS: usize = 4;

/// Acquires a lock under a token. Returns the fence of the lease, which lasts its full ttl from some moment of this call.
pub(crate) async fn acquire(engine: &Arc<EngineHandle>, wish: Wish, token: &Token) -> Result<Option<Fence>, Error> {
    let call = CallScope::begin(&engine.core, &wish.name, wish.wait)?;
    let seen = Mutex::new(Seen::default());
    let (outcome, waited) = {
        let obtain = pin!(obtain(engine, &wish, token, call.began, &seen));
        call.run(obtain).await
    };
    match outcome {
        Ok((fence, handed_over)) => {
            call.acquired(&wish.name, fence, waited, handed_over);
            Ok(fence)
        }
        Err(Ended::Error(error)) => Err(error),
        Err(Ended::Late) => Err(late(&call, &wish.name, waited, seen)),
    }
}

/// Returns the fence, and whether another holder handed the lock over.
async fn obtain(
    engine: &Arc<EngineHandle>,
    wish: &Wish,
    token: &Token,
    began: Moment,
    seen: &Mutex<Seen>,
) -> Result<(Option<Fence>, bool), Ended> {
    let core = &engine.core;
    let claim = wish.claim(token.clone(), false);
    // Waits in the room of this process, under the room's own token. It takes its seat when it is first polled.
    let mut seat = pin!(acquiring::wait(engine, wish, None, began, seen));
    let mut call = TokenCall::new(wish.wait != Wait::Not);
    loop {
        let asked_at = Moment::now();
        lock(seen).asking_since.get_or_insert(asked_at);
        let answer = core.within(ask(core, &claim)).await;
        let look_after = match core.decide(|cx| call.answered(cx, asked_at, answer)) {
            AfterLook::Granted(fence) => {
                core.publisher.granted(&wish.name, token, &wish.owner.to_string(), fence, wish.ttl);
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
            guard = &mut seat, if call.waits_in_line() => {
                let guard = match guard {
                    Err(Ended::Late) => {
                        call.waited_in_vain();
                        continue;
                    }
                    guard => guard?,
                };
                let fence = guard.try_fence();
                // From here on a caller that gets no answer may have the lock.
                lock(seen).failed = Some(StoreErrorKind::NoAnswer.into());
                match guard.hand_to(token).await {
                    Ok(()) => return Ok((fence, true)),
                    // The confirmation took longer than the lease, so the call waits again.
                    Err(Error::Lost { why: LossReason::Gone | LossReason::Expired, .. }) => {
                        seat.set(acquiring::wait(engine, wish, None, began, seen));
                    }
                    Err(error) => return Err(Ended::Error(error)),
                }
            }
            () = sleep(look_after) => {}
        }
    }
}

/// Tries, and confirms a grant: that writes the fence into the record, so that every caller with the same token gets the
/// same fence, and the lease lasts its whole ttl even if it was acquired before.
async fn ask(core: &Core, claim: &AcquireRequest) -> Result<TokenAnswer, StoreError> {
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
        let (asked_at, answer) = core.renew(renewal).await;
        match confirmed(Moment::now(), asked_at, claim.ttl, &answer) {
            Confirmed::Yes => return Ok(TokenAnswer::Granted(grant.fence)),
            Confirmed::Lost(LossReason::Revoked) => return Ok(TokenAnswer::Revoked),
            Confirmed::Lost(_) => {}
            Confirmed::Unknown(error) => return Err(error),
        }
    }
    Err(StoreErrorKind::TryAgain.into())
}
