//! Acquiring: one try, and where that says "held" and the caller can wait, a seat in the room.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use super::call::{CallScope, Ended, Wait};
use super::lease_cell::{LeaseCell, NewLease};
use super::waiting::Reply;
use super::{Core, EngineHandle, lock};
use crate::client::Seen;
use crate::client::renewal::Record;
use crate::client::trying::{AfterTry, Trying};
use crate::clock::{Moment, sleep, sleep_until, wall_ms};
use crate::engine::guard::Guard;
use crate::error::Error;
use crate::events::Transition;
use crate::facts::{LockName, Owner, Token, Ttl};
use crate::journal::JournalKind;
use crate::loss::LossReason;
use crate::options::OnUnavailable;
use crate::store::{Claim, Operation, StoreError, StoreErrorKind, Ticket};

/// A request as the caller put it, checked.
#[derive(Debug, Clone)]
pub(crate) struct Wish {
    pub(crate) name: LockName,
    pub(crate) ttl: Ttl,
    pub(crate) owner: Owner,
    pub(crate) fenced: bool,
    /// `None`: never renewed.
    pub(crate) renew_every: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) wait: Wait,
    pub(crate) retry_every: Option<Duration>,
    pub(crate) on_unavailable: OnUnavailable,
}

/// Gives back, in the background, whatever an unanswered or cancelled request may have got.
///
/// Armed before the request leaves: if the future is dropped, or the reply is lost, the store may
/// hold a grant that only this token can give back.
pub(super) struct Undo<'a> {
    core: &'a Arc<Core>,
    claim: Option<Claim>,
}

impl<'a> Undo<'a> {
    pub(super) fn arm(core: &'a Arc<Core>, claim: Claim) -> Self {
        Self { core, claim: Some(claim) }
    }

    fn claim(&self) -> &Claim {
        self.claim.as_ref().expect("armed until disarmed, which consumes it")
    }

    pub(super) fn disarm(mut self) -> Claim {
        self.claim.take().expect("armed until disarmed, which consumes it")
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        if let Some(claim) = self.claim.take() {
            self.core.undo_in_background(claim);
        }
    }
}

/// Takes a lock as wished.
pub(crate) async fn acquire(engine: &Arc<EngineHandle>, wish: Wish) -> Result<Guard, Error> {
    let core = &engine.core;
    let call = CallScope::begin(core, &wish.name, wish.wait)?;
    let seen = Mutex::new(Seen::default());
    let (outcome, waited) = call.run(obtain(engine, &wish, call.began, &seen)).await;
    let error = match outcome {
        Ok((guard, handed_over)) => {
            call.acquired(&wish.name, guard.try_fence(), waited, handed_over);
            if handed_over {
                core.metrics.handed_over(guard.held_for());
            }
            return Ok(guard);
        }
        Err(Ended::Error(error)) => error,
        Err(Ended::Late) => late(&call, &wish.name, waited, seen),
    };
    match error {
        Error::Store { source, .. } if wish.on_unavailable == OnUnavailable::FailOpen && source.is_passing() => {
            Ok(Box::pin(go_on_unprotected(engine, wish, source)).await)
        }
        error => Err(error),
    }
}

/// Returns the error of a call that timed out: `NotAcquired`, or the store's error where the holder is unknown.
pub(super) fn late(call: &CallScope<'_>, name: &LockName, waited: Duration, seen: Mutex<Seen>) -> Error {
    let seen = seen.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(source) = seen.unknown(Moment::now()) {
        return call.store_error(name, source);
    }
    Error::NotAcquired {
        name: name.clone(),
        waited: call.not_acquired(name, waited),
        holder: seen.holder.map(Box::new),
        store: call.store(),
    }
}

/// The guard, and whether another holder handed the lock over.
async fn obtain(
    engine: &Arc<EngineHandle>,
    wish: &Wish,
    began: Moment,
    seen: &Mutex<Seen>,
) -> Result<(Guard, bool), Ended> {
    let core = &engine.core;
    // A call that can wait does not overtake tasks of its own process that wait already, and does not try in vain for a
    // lock that was just handed on.
    if wish.wait == Wait::Not || !core.waiting.is_contended(&wish.name) {
        if let Some(guard) = try_once(engine, wish, seen).await? {
            return Ok((guard, false));
        }
        if wish.wait == Wait::Not {
            return Err(Ended::Late);
        }
    }
    // Boxed: a lock that is free should not carry the room for waiting around.
    Ok((Box::pin(wait(engine, wish, None, began, seen)).await?, true))
}

/// One try; `None` when somebody else holds the lock. Sent again where the store did not answer.
pub(super) async fn try_once(
    engine: &Arc<EngineHandle>,
    wish: &Wish,
    seen: &Mutex<Seen>,
) -> Result<Option<Guard>, Ended> {
    let core = &engine.core;
    let mut undo = Undo::arm(core, claim(core, wish));
    let mut trying = Trying::new();
    loop {
        let asked_at = Moment::now();
        let gives_up_at = core.decide(|cx| trying.gives_up_at(cx));
        let answer = tokio::select! {
            biased;
            answer = core.store.try_acquire(undo.claim()) => answer,
            () = sleep_until(gives_up_at) => Err(StoreErrorKind::NoAnswer.into()),
        };
        if answer.is_ok() {
            core.answered(Operation::Acquire, asked_at);
        }
        let mut next = core.decide(|cx| trying.answered(cx, asked_at, answer));
        if let AfterTry::Granted(grant) = next {
            let lease = wish.lease(undo.disarm().token);
            let later = wish.fenced && core.store.writes_fence_later();
            let record = if later { Record::Fence } else { Record::Complete };
            if let Some(guard) = received(Guard::begin(engine.clone(), lease, &grant, record))? {
                return Ok(Some(guard));
            }
            undo = Undo::arm(core, claim(core, wish));
            next = core.decide(|cx| trying.lapsed(cx, asked_at));
        }
        let (after, new_token, error) = match next {
            AfterTry::Again { after, new_token, error } => (after, new_token, error),
            AfterTry::Failed { error, undo: armed } => {
                lock(seen).failed = Some(error.clone());
                if !armed {
                    undo.disarm();
                }
                return Err(Ended::Error(core.store_error(Operation::Acquire, &wish.name, error)));
            }
            AfterTry::Held(holder) => {
                undo.disarm();
                *lock(seen) = Seen::held_by(holder);
                return Ok(None);
            }
            AfterTry::Granted(_) => unreachable!("taken care of before"),
        };
        lock(seen).failed = Some(error);
        if new_token {
            // The old token is undone when its `Undo` is dropped.
            undo = Undo::arm(core, claim(core, wish));
        }
        tokio::select! {
            biased;
            () = core.closing.cancelled() => return Err(Ended::shut_down(&wish.name)),
            () = sleep(after) => {}
        }
    }
}

/// Waits for its turn in the room of the name, under a ticket of its own or the room's.
pub(super) async fn wait(
    engine: &Arc<EngineHandle>,
    wish: &Wish,
    ticket: Option<Ticket>,
    began: Moment,
    seen: &Mutex<Seen>,
) -> Result<Guard, Ended> {
    let core = &engine.core;
    let deadline = wish.wait.deadline(began);
    loop {
        let (reply, mut answer) = oneshot::channel();
        let mut seated = core.waiting.sit(engine, wish, ticket, Reply::One(reply));
        let answered = tokio::select! {
            biased;
            answered = &mut answer => answered,
            () = sleep_until(deadline) => {
                if let Some(last) = seated.seen() {
                    *lock(seen) = last;
                }
                if seated.leave().await {
                    return Err(Ended::Late);
                }
                // Answered at the last moment.
                answer.await
            }
        };
        // A room always answers; one that went down with its runtime counts as shut down.
        let guard = answered.unwrap_or_else(|_| Err(Error::ShutDown { name: wish.name.clone() }));
        let guard = guard.map_err(Ended::Error)?;
        if let Some(guard) = received(guard)? {
            return Ok(guard);
        }
        tracing::debug!(name = %wish.name, "the lease was over before its task got it; waiting goes on");
        *lock(seen) = Seen::held_by(None);
    }
}

/// A guard at the moment its task gets it, which may be long after it was granted: the process may have
/// been stopped in between. `None`: that lease is over, and given back.
pub(super) fn received(guard: Guard) -> Result<Option<Guard>, Ended> {
    if guard.loss() == Some(LossReason::Shutdown) {
        return Err(Ended::shut_down(guard.name()));
    }
    Ok(Some(guard).filter(is_usable))
}

/// Whether a task may be given this guard.
pub(super) fn is_usable(guard: &Guard) -> bool {
    match guard.loss() {
        // The end that the caller asked for. Another request would not make it longer.
        Some(LossReason::MaxHold) => true,
        Some(_) => false,
        None => guard.is_valid(),
    }
}

/// The store is unreachable and the policy is to go on: never silently.
async fn go_on_unprotected(engine: &Arc<EngineHandle>, wish: Wish, why: StoreError) -> Guard {
    let core = &engine.core;
    core.stats.unprotected_runs.add_one();
    tracing::warn!(name = %wish.name, store = core.store.describe(), error = %why,
        "going on WITHOUT the lock: the store is unreachable and the policy is fail_open");
    core.observe(&Transition::Unprotected { name: wish.name.as_str() });
    let cell = Arc::new(LeaseCell::unprotected(wish.lease(core.environment.token())));
    core.write_journal(JournalKind::Unprotected, &cell, &why).await;
    Guard::unprotected(engine.clone(), cell)
}

fn claim(core: &Core, wish: &Wish) -> Claim {
    Claim {
        name: wish.name.clone(),
        token: core.environment.token(),
        ttl: wish.ttl,
        owner: wish.owner.clone(),
        fenced: wish.fenced,
        listens: true,
        since_ms: wall_ms(),
    }
}

impl Wish {
    pub(super) fn lease(&self, token: Token) -> NewLease {
        NewLease {
            name: self.name.clone(),
            token,
            ttl: self.ttl,
            owner: self.owner.clone(),
            fenced: self.fenced,
            renew_every: self.renew_every,
            max_hold: self.max_hold,
            waited: false,
        }
    }
}
