//! Taking a lock under a token that the caller chose, without a guard: for somebody who asks through us,
//! may be cut off, and asks again.
//!
//! Nothing is undone here, whatever becomes of the call. An undo names the token, and the same token may
//! have been granted to the caller's second try meanwhile: the lease would be gone under its feet. What a
//! lost call may have taken is had by asking again with its token, or ends by its ttl.

use std::sync::{Mutex, PoisonError};

use super::acquiring::{Ended, FIRST_PAUSE, GRACE, Wait, Wish, not_acquired, worth_asking_again};
use super::rooms::{Seen, jittered};
use super::{Core, lock};
use crate::clock::{Moment, sleep_until, wall_ms};
use crate::error::{Error, Operation};
use crate::event::{EventKind, LockEvent, LossReason, Transition};
use crate::facts::{Fence, LockName, Owner, Token, Ttl};
use crate::lease::Belief;
use crate::store::{Claim, Note, Renewal, Renewed, StoreError, StoreErrorKind, Try};

/// How often a grant is asked for anew when it is another one by the time it is confirmed: two calls with
/// one token are at it together, and the second finds what the first has written.
const CONFIRMS: usize = 4;

/// Takes a lock as wished; the fence of the lease, which lasts its full ttl from some moment of this call.
pub(crate) async fn acquire(core: &Core, wish: Wish, token: &Token) -> Result<Option<Fence>, Error> {
    // Before the look: a shutdown either is seen here, or waits for this call.
    let _call = core.call();
    if core.closing.is_cancelled() {
        return Err(Error::ShutDown { name: wish.name });
    }
    let began = Moment::now();
    let seen = Mutex::new(Seen::default());
    let answer_by = match wish.wait {
        Wait::Not => Some(began + core.options.answer_within),
        Wait::UpTo(wait) => Some(began + wait + GRACE),
        Wait::Forever => None,
    };
    let outcome = tokio::select! {
        biased;
        outcome = obtain(core, &wish, token, began, &seen) => outcome,
        () = sleep_until(answer_by) => Err(Ended::Late),
    };
    let waited = began.until(Moment::now());
    match outcome {
        Ok(fence) => {
            core.stats.total_locks.add_one();
            tracing::debug!(name = %wish.name, ?waited, ?fence, "acquired");
            core.observe(&Transition::Acquired { name: wish.name.as_str(), waited, handed_over: false });
            core.tell_granted(&wish.name, token, &wish.owner, fence, wish.ttl);
            Ok(fence)
        }
        Err(Ended::Error(error)) => Err(error),
        Err(Ended::Late) => {
            let seen = seen.into_inner().unwrap_or_else(PoisonError::into_inner);
            if let Some(failed) = seen.failed.clone().or((!seen.answered).then(|| StoreErrorKind::NoAnswer.into())) {
                return Err(core.store_error(Operation::Acquire, &wish.name, failed));
            }
            core.stats.not_acquired.add_one();
            core.observe(&Transition::NotAcquired { name: wish.name.as_str(), waited });
            Err(not_acquired(core, &wish, waited, seen))
        }
    }
}

async fn obtain(
    core: &Core,
    wish: &Wish,
    token: &Token,
    began: Moment,
    seen: &Mutex<Seen>,
) -> Result<Option<Fence>, Ended> {
    let claim = Claim {
        name: wish.name.clone(),
        token: token.clone(),
        ttl: wish.ttl,
        owner: wish.owner.clone(),
        fenced: wish.fenced,
        listens: false,
        since_ms: wall_ms(),
    };
    let deadline = match wish.wait {
        Wait::Not => Some(began),
        Wait::UpTo(wait) => Some(began + wait),
        Wait::Forever => None,
    };
    let mut pause = wish.retry_every.unwrap_or(core.options.poll_interval).max(FIRST_PAUSE);
    let mut failing_since = None;
    loop {
        match core.within(ask(core, &claim)).await {
            Ok(Answer::Granted(fence)) => return Ok(fence),
            Ok(Answer::Revoked) => {
                return Err(Ended::Error(Error::Lost { name: wish.name.clone(), why: LossReason::Revoked }));
            }
            Ok(Answer::Held(holder)) => {
                failing_since = None;
                *lock(seen) = Seen { holder: holder.map(|holder| *holder), answered: true, failed: None };
                if deadline.is_some_and(|end| Moment::now() >= end) {
                    return Err(Ended::Late);
                }
            }
            Err(error) => {
                lock(seen).failed = Some(error.clone());
                let since = *failing_since.get_or_insert(Moment::now());
                if !worth_asking_again(&error) || since.until(Moment::now()) >= core.options.patience {
                    return Err(Ended::Error(core.store_error(Operation::Acquire, &wish.name, error)));
                }
            }
        }
        // Not beyond the end of the wait, where one last look is due; but a store that fails is given the
        // time it may take to answer.
        let next = Moment::now() + jittered(pause);
        let next = deadline.filter(|_| failing_since.is_none()).map_or(next, |end| end.min(next));
        tokio::select! {
            biased;
            () = core.closing.cancelled() => return Err(Ended::shut_down(&wish.name)),
            () = sleep_until(Some(next)) => {}
        }
        if wish.retry_every.is_none() {
            pause = pause.saturating_mul(2).min(core.options.max_poll_interval).max(FIRST_PAUSE);
        }
    }
}

enum Answer {
    Granted(Option<Fence>),
    Held(Option<Box<crate::store::Holder>>),
    Revoked,
}

/// A try, and where it is granted a confirmation: it writes the fence into the record, so that whoever has
/// the same token gets the same one, and the lease lasts its whole ttl also when it was taken before.
async fn ask(core: &Core, claim: &Claim) -> Result<Answer, StoreError> {
    for _ in 0..CONFIRMS {
        let grant = match core.store.try_acquire(claim).await? {
            Try::Granted(grant) => grant,
            Try::Held(holder) => return Ok(Answer::Held(holder.map(Box::new))),
            Try::Revoked => return Ok(Answer::Revoked),
        };
        let renewal = Renewal {
            name: claim.name.clone(),
            token: claim.token.clone(),
            fence: grant.fence,
            ttl: claim.ttl,
            rewrite: Some(claim.owner.clone()),
        };
        let asked_at = Moment::now();
        match core.store.renew(&[renewal]).await.pop() {
            // The answer may have taken as long as the lease: nobody may begin with that.
            Some(Renewed::Renewed) if Belief::new(asked_at, claim.ttl.duration()).is_valid(Moment::now()) => {
                return Ok(Answer::Granted(grant.fence));
            }
            Some(Renewed::Renewed | Renewed::Lost) => {}
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
        self.note(Note::Remove { name: name.clone(), holder: token.holder_id() });
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
