//! Leases that belong to a token and to no process: taken under a token that the caller chose, for somebody who
//! asks through us, may be cut off, and asks again; or handed on by a guard.
//!
//! Nothing of a chosen token is undone here, whatever becomes of the call. An undo names the token, and the same
//! token may have been granted to the caller's second try meanwhile: the lease would be gone under its feet. What
//! a lost call may have taken is had by asking again with its token, or ends by its ttl.

use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::acquiring::{self, Ended, FIRST_PAUSE, LONGEST_PAUSE, Undo, Wait, Wish, not_acquired, worth_asking_again};
use super::lease_cell::LeaseCell;
use super::rooms::{Seen, jittered};
use super::{Alive, Core, lock};
use crate::clock::{Moment, sleep_until, wall_ms};
use crate::error::{Error, Operation};
use crate::event::{EventKind, LockEvent, LossReason, Transition};
use crate::facts::{Fence, LockName, Owner, Token, Ttl};
use crate::lease::Belief;
use crate::store::{Claim, Note, Renewal, Renewed, StoreError, StoreErrorKind, Try};

/// How often a grant is asked for anew when it is another one by the time it is confirmed: two calls with
/// one token are at it together, and the second finds what the first has written.
const CONFIRMS: usize = 4;
/// Who stands in line looks now and then whether its token has the lock by another way: the same request, sent
/// again, may stand in another line.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Takes a lock as wished; the fence of the lease, which lasts its full ttl from some moment of this call.
pub(crate) async fn acquire(alive: &Arc<Alive>, wish: Wish, token: &Token) -> Result<Option<Fence>, Error> {
    let core = &alive.0;
    // Before the look: a shutdown either is seen here, or waits for this call.
    let _call = core.call();
    if core.closing.is_cancelled() {
        return Err(Error::ShutDown { name: wish.name });
    }
    let began = Moment::now();
    let seen = Mutex::new(Seen::default());
    let answer_by = wish.wait.answer_by(began, core.options.answer_within);
    let outcome = tokio::select! {
        biased;
        outcome = obtain(alive, &wish, token, began, &seen) => outcome,
        () = sleep_until(answer_by) => Err(Ended::Late),
    };
    let waited = began.until(Moment::now());
    match outcome {
        Ok((fence, handed_over)) => {
            core.stats.total_locks.add_one();
            tracing::debug!(name = %wish.name, ?waited, ?fence, "acquired");
            core.observe(&Transition::Acquired { name: wish.name.as_str(), waited, handed_over });
            Ok(fence)
        }
        Err(Ended::Error(error)) => Err(error),
        Err(Ended::Late) => {
            let seen = seen.into_inner().unwrap_or_else(PoisonError::into_inner);
            if let Some(failed) = seen.unknown() {
                return Err(core.store_error(Operation::Acquire, &wish.name, failed));
            }
            core.stats.not_acquired.add_one();
            core.observe(&Transition::NotAcquired { name: wish.name.as_str(), waited });
            Err(not_acquired(core, &wish, waited, seen))
        }
    }
}

/// The fence, and whether another holder handed the lock over.
async fn obtain(
    alive: &Arc<Alive>,
    wish: &Wish,
    token: &Token,
    began: Moment,
    seen: &Mutex<Seen>,
) -> Result<(Option<Fence>, bool), Ended> {
    let core = &alive.0;
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
    let mut turn = pin!(acquiring::wait(alive, wish, None, began, seen));
    let mut time_is_over = wish.wait == Wait::Not;
    let mut pause = FIRST_PAUSE;
    let mut failing_since = None;
    loop {
        lock(seen).asking_since.get_or_insert(Moment::now());
        let look_after = match core.within(ask(core, &claim)).await {
            Ok(Answer::Granted(fence)) => {
                core.tell_granted(&wish.name, token, &wish.owner, fence, wish.ttl);
                return Ok((fence, false));
            }
            Ok(Answer::Revoked) => {
                return Err(Ended::Error(Error::Lost { name: wish.name.clone(), why: LossReason::Revoked }));
            }
            Ok(Answer::Held(holder)) => {
                failing_since = None;
                *lock(seen) = Seen::held_by(Some(*holder));
                if time_is_over {
                    return Err(Ended::Late);
                }
                LOOK_EVERY
            }
            Err(error) => {
                lock(seen).failed = Some(error.clone());
                let since = *failing_since.get_or_insert(Moment::now());
                if !worth_asking_again(&error) || since.until(Moment::now()) >= core.options.patience {
                    return Err(Ended::Error(core.store_error(Operation::Acquire, &wish.name, error)));
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
                pause
            }
        };
        tokio::select! {
            biased;
            () = core.closing.cancelled() => return Err(Ended::shut_down(&wish.name)),
            // Only behind a holder: whoever does not know whether it has the lock already stands in no line for it.
            guard = &mut turn, if failing_since.is_none() && !time_is_over => {
                let guard = match guard {
                    Err(Ended::Late) => {
                        // One last look.
                        time_is_over = true;
                        continue;
                    }
                    guard => guard?,
                };
                let fence = guard.fence();
                // From here on whoever gets no answer may have the lock.
                lock(seen).failed = Some(StoreErrorKind::NoAnswer.into());
                match guard.hand_to(token).await {
                    Ok(()) => return Ok((fence, true)),
                    // So slow were we, or the store. It is the next one's, and our turn comes again.
                    Err(Error::Lost { why: LossReason::Gone | LossReason::Expired, .. }) => {
                        turn.set(acquiring::wait(alive, wish, None, began, seen));
                    }
                    Err(error) => return Err(Ended::Error(error)),
                }
            }
            () = tokio::time::sleep(jittered(look_after)) => {}
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
    let (undo, renewal, noted) = {
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
        (Undo::arm(core, claim), renewal, state.noted)
    };
    let lost = |why| {
        core.tell_lost(cell, why);
        Err(Error::Lost { name: cell.name.clone(), why })
    };
    if let Some(why) = cell.state().lost {
        return lost(why);
    }
    let mut pause = FIRST_PAUSE;
    loop {
        let asked_at = Moment::now();
        let answer = core.within(async { Ok(core.store.renew(std::slice::from_ref(&renewal)).await.pop()) }).await;
        let error = match answer {
            // The answer may have taken as long as the lease: nobody may begin with that.
            Ok(Some(Renewed::Renewed)) if Belief::new(asked_at, renewal.ttl.duration()).is_valid(Moment::now()) => {
                let claim = undo.disarm();
                // Nobody tends it, so nobody would tell of it later.
                if !noted {
                    core.tell_granted(&claim.name, to, &claim.owner, cell.fence, claim.ttl);
                }
                return Ok(());
            }
            Ok(Some(Renewed::Renewed)) => StoreErrorKind::NoAnswer.into(),
            Ok(Some(Renewed::Lost)) => return lost(LossReason::Gone),
            Ok(Some(Renewed::Revoked)) => return lost(LossReason::Revoked),
            Ok(Some(Renewed::Displaced)) => return lost(LossReason::Displaced),
            Ok(Some(Renewed::Unknown(error))) | Err(error) => error,
            Ok(None) => StoreErrorKind::Other.into(),
        };
        if !worth_asking_again(&error) || began.until(Moment::now()) >= core.options.patience {
            return Err(core.store_error(Operation::Renew, &cell.name, error));
        }
        tokio::time::sleep(jittered(pause)).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

enum Answer {
    Granted(Option<Fence>),
    Held(Box<crate::store::Holder>),
    Revoked,
}

/// A try, and where it is granted a confirmation: it writes the fence into the record, so that whoever has
/// the same token gets the same one, and the lease lasts its whole ttl also when it was taken before.
async fn ask(core: &Core, claim: &Claim) -> Result<Answer, StoreError> {
    for _ in 0..CONFIRMS {
        let grant = match core.store.try_acquire(claim).await? {
            Try::Granted(grant) => grant,
            // It was this token's a moment ago: another call has confirmed it with its own fence meanwhile.
            Try::Held(None) => continue,
            Try::Held(Some(holder)) => return Ok(Answer::Held(Box::new(holder))),
            Try::Revoked => return Ok(Answer::Revoked),
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
        match core.store.renew(&[renewal]).await.pop() {
            // The answer may have taken as long as the lease: nobody may begin with that.
            Some(Renewed::Renewed) if Belief::new(asked_at, claim.ttl.duration()).is_valid(Moment::now()) => {
                return Ok(Answer::Granted(grant.fence));
            }
            Some(Renewed::Renewed | Renewed::Lost | Renewed::Displaced) => {}
            Some(Renewed::Revoked) => return Ok(Answer::Revoked),
            Some(Renewed::Unknown(error)) => return Err(error),
            None => return Err(StoreErrorKind::Other.into()),
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
