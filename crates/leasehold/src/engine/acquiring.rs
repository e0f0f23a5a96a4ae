//! Acquiring: one try, and where that says "held" and the caller can wait, a seat in the room.

use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

use super::EngineHandle;
use super::call::{CallScope, Ended};
use super::core::lock;
use super::guard::Guard;
use super::held_lease::HeldLease;
use super::lease_cell::LeaseCell;
use super::leaving::Undo;
use super::waiting::Reply;
use super::wish::{Wait, Wish};
use crate::client::Seen;
use crate::client::renewal::Record;
use crate::client::trying::{AfterTry, Trying};
use crate::clock::{Moment, sleep, sleep_until};
use crate::error::Error;
use crate::events::Transition;
use crate::facts::LockName;
use crate::journal::JournalKind;
use crate::loss::LossReason;
use crate::options::OnUnavailable;
use crate::store::{Operation, StoreError, StoreErrorKind, Ticket};

/// Acquires a lock for one request.
pub(crate) async fn acquire(engine: &Arc<EngineHandle>, wish: Wish) -> Result<Guard, Error> {
    let core = &engine.core;
    let call = CallScope::begin(core, &wish.name, wish.wait)?;
    let seen = Mutex::new(Seen::default());
    let (outcome, waited) = {
        let obtain = pin!(obtain(engine, &wish, call.began, &seen));
        call.run(obtain).await
    };
    let error = match outcome {
        Ok((guard, handed_over)) => {
            call.acquired(&wish.name, guard.try_fence(), waited, handed_over);
            if handed_over {
                core.publisher.metrics.handed_over(guard.held_for());
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

/// Returns the guard, and whether another holder handed the lock over.
async fn obtain(
    engine: &Arc<EngineHandle>,
    wish: &Wish,
    began: Moment,
    seen: &Mutex<Seen>,
) -> Result<(Guard, bool), Ended> {
    // A call that can wait does not overtake tasks of its own process that wait already, and does not try for a lock
    // that was just handed on.
    if wish.wait == Wait::Not || !engine.waiting.is_contended(&wish.name) {
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

/// Tries once. Returns `None` when another token holds the lock. The try is repeated while the store does not answer.
pub(super) async fn try_once(
    engine: &Arc<EngineHandle>,
    wish: &Wish,
    seen: &Mutex<Seen>,
) -> Result<Option<Guard>, Ended> {
    let core = &engine.core;
    let mut undo = Undo::arm(core, wish.claim(core.environment.token(), true));
    let mut trying = Trying::new();
    loop {
        let (asked_at, gives_up_at) = core.decide(|cx| (cx.now, trying.gives_up_at(cx)));
        let answer = tokio::select! {
            biased;
            answer = core.store.try_acquire(undo.claim()) => answer,
            () = sleep_until(gives_up_at) => Err(StoreErrorKind::NoAnswer.into()),
        };
        let was_answered = answer.is_ok();
        let (now, mut next) = core.decide(|cx| (cx.now, trying.answered(cx, asked_at, answer)));
        if was_answered {
            core.answered(Operation::Acquire, asked_at, now);
        }
        if let AfterTry::Granted(grant) = next {
            let later = wish.fenced && core.store.writes_fence_later();
            let record = if later { Record::Fence } else { Record::Complete };
            let cell = LeaseCell::new(now, wish.clone(), undo.disarm().token, false, &grant, record);
            let lease = HeldLease::begin(&engine.releases, cell);
            if let Some(guard) = received(Guard::new(engine.clone(), lease))? {
                return Ok(Some(guard));
            }
            undo = Undo::arm(core, wish.claim(core.environment.token(), true));
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
            AfterTry::Granted(_) => unreachable!("handled above"),
        };
        lock(seen).failed = Some(error);
        if new_token {
            // The old token is undone when its `Undo` is dropped.
            undo = Undo::arm(core, wish.claim(core.environment.token(), true));
        }
        tokio::select! {
            biased;
            () = core.closing.cancelled() => return Err(Ended::shut_down(&wish.name)),
            () = sleep(after) => {}
        }
    }
}

/// Waits in the room of the name, under a ticket of its own or the room's.
pub(super) async fn wait(
    engine: &Arc<EngineHandle>,
    wish: &Wish,
    ticket: Option<Ticket>,
    began: Moment,
    seen: &Mutex<Seen>,
) -> Result<Guard, Ended> {
    let deadline = wish.wait.deadline(began);
    loop {
        let (reply, mut answer) = oneshot::channel();
        let mut seated = engine.waiting.sit(wish, ticket, Reply::One(reply));
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
        let lease = answered.unwrap_or_else(|_| Err(Error::ShutDown { name: wish.name.clone() }));
        let lease = lease.map_err(Ended::Error)?;
        if let Some(guard) = received(Guard::new(engine.clone(), lease))? {
            return Ok(guard);
        }
        tracing::debug!(name = %wish.name, "the lease ended before its task received it; waiting goes on");
        *lock(seen) = Seen::held_by(None);
    }
}

/// A guard at the moment its task gets it, which may be long after it was granted: the process may have
/// been stopped in between. `None`: that lease has ended, and is released.
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
    core.publisher.stats.unprotected_runs.add_one();
    tracing::warn!(name = %wish.name, store = core.store.describe(), error = %why,
        "going on WITHOUT the lock: the store is unreachable and the policy is fail_open");
    core.publisher.observe(&Transition::Unprotected { name: wish.name.as_str() });
    let cell = Arc::new(LeaseCell::unprotected(wish, core.environment.token()));
    engine.releases.write_journal(JournalKind::Unprotected, &cell, &why).await;
    Guard::new(engine.clone(), HeldLease::unprotected(&engine.releases, cell))
}
