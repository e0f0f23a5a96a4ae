//! The leases of a process, by when each needs attention next.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;

use super::core::{Core, lock};
use super::lease_cell::{Due, LeaseCell};
use crate::clock::Moment;
use crate::events::{EventKind, Transition};
use crate::facts::Token;
use crate::loss::LossReason;
use crate::store::Note;

/// Messages kept for leases that are just being granted. Some are for leases that have ended, so the oldest are dropped.
const EARLY_KEPT: usize = 256;

/// Later than the end of any lease.
const NEVER: Moment = Moment::from_boot(Duration::MAX);

/// The leases that the renewal task takes care of.
pub(crate) struct Leases {
    core: Arc<Core>,
    schedule: Mutex<Schedule>,
    /// Wakes the renewal task.
    pub(super) changed: Notify,
    emptied: Notify,
}

#[derive(Default)]
struct Schedule {
    due: BTreeMap<Due, Arc<LeaseCell>>,
    next_id: u64,
    /// When the renewal task wakes by itself; `None`: only when it is woken.
    wakes_at: Option<Moment>,
    /// Messages that came before the lease they are for, oldest first.
    early: VecDeque<(Token, Early)>,
}

/// A message for a lease that does not exist yet.
enum Early {
    Revoked,
    Finish(String),
}

impl Leases {
    pub(super) fn new(core: Arc<Core>) -> Arc<Self> {
        Arc::new(Self { core, schedule: Mutex::default(), changed: Notify::new(), emptied: Notify::new() })
    }

    /// Begins to renew and check a lease. It may be lost already.
    pub(super) fn insert(self: &Arc<Self>, cell: &Arc<LeaseCell>) {
        let at = cell.state().first_look();
        let mut schedule = self.lock();
        let due = (at, schedule.next_id);
        schedule.next_id += 1;
        *lock(&cell.due) = Some(due);
        schedule.due.insert(due, cell.clone());
        let too_late = schedule.wakes_at.is_none_or(|wakes_at| wakes_at > at);
        let early = schedule.take_early(&cell.token);
        drop(schedule);
        if too_late {
            self.changed.notify_one();
        }
        for message in early {
            match message {
                Early::Revoked => self.lose_and_observe_later(cell, LossReason::Revoked),
                Early::Finish(reason) => cell.ask_to_finish(reason),
            }
        }
        // A shutdown that went through all leases may have missed this one.
        if self.core.closing.is_cancelled() {
            self.lose_and_observe_later(cell, LossReason::Shutdown);
        }
    }

    /// Stops renewing and checking a lease.
    pub(super) fn remove(&self, cell: &LeaseCell) {
        let mut schedule = self.lock();
        if let Some(due) = lock(&cell.due).take() {
            schedule.due.remove(&due);
        }
        if schedule.due.is_empty() {
            self.emptied.notify_waiters();
        }
    }

    /// Looks at a lease now, because something about it changed.
    pub(super) fn touch(&self, cell: &LeaseCell) {
        self.lock().put(cell, Moment::from_boot(Duration::ZERO));
        self.changed.notify_one();
    }

    /// Looks at a lease at this moment, unless something happens before.
    pub(super) fn look_at(&self, cell: &LeaseCell, at: Moment) {
        self.lock().put(cell, at);
    }

    /// Checks every lease now: after a reconnect the store may have forgotten everything.
    pub(super) fn check_all(&self) {
        let now = Moment::now();
        for cell in self.all() {
            cell.state().reconnected(now);
            self.lock().put(&cell, now);
        }
        self.changed.notify_one();
    }

    /// Returns every lease that is to be looked at until then.
    pub(super) fn due_until(&self, then: Moment) -> Vec<Arc<LeaseCell>> {
        self.lock().due.range(..=(then, u64::MAX)).map(|(_, cell)| cell.clone()).collect()
    }

    /// Returns when the next lease is to be looked at. The renewal task sleeps until then.
    pub(super) fn next_look(&self) -> Moment {
        let mut schedule = self.lock();
        let next = schedule.due.first_key_value().map_or(NEVER, |((due, _), _)| *due);
        schedule.wakes_at = Some(next);
        next
    }

    /// The store says that a lease was revoked. Called on the task or thread of the store.
    pub(super) fn revoked(self: &Arc<Self>, token: &Token) {
        if let Some(cell) = self.find_or_keep(token, || Early::Revoked) {
            self.lose_and_observe_later(&cell, LossReason::Revoked);
        }
    }

    /// The store passes on that a holder is asked to finish.
    pub(super) fn asked_to_finish(&self, token: &Token, reason: String) {
        if let Some(cell) = self.find_or_keep(token, || Early::Finish(reason.clone())) {
            cell.ask_to_finish(reason);
        }
    }

    /// Notifies a holder that its lease is over. The lock itself is released when its guard is dropped: before that, work
    /// may still be going on.
    pub(super) fn lose(&self, cell: &LeaseCell, why: LossReason) {
        if self.mark_lost(cell, why) {
            self.observe_loss(cell, why);
        }
    }

    /// Notifies a holder, and the observer from a task of its own: it is the user's code, which must not run on the task
    /// or thread of the store.
    fn lose_and_observe_later(self: &Arc<Self>, cell: &Arc<LeaseCell>, why: LossReason) {
        if self.mark_lost(cell, why) {
            let (leases, cell) = (self.clone(), cell.clone());
            self.core.spawn(async move { leases.observe_loss(&cell, why) });
        }
    }

    /// Notifies every holder that the manager shuts down.
    pub(super) fn lose_all(&self) {
        for cell in self.all() {
            self.lose(&cell, LossReason::Shutdown);
        }
    }

    /// Notifies a holder whose lease was removed from the schedule before.
    pub(super) fn lose_removed(&self, cell: &LeaseCell, why: LossReason) {
        if self.notify(cell, why) {
            self.observe_loss(cell, why);
        }
    }

    /// `false`: the lease was lost before, or is being released. A renewal that was on its way then finds it gone, and
    /// no holder lost anything.
    fn mark_lost(&self, cell: &LeaseCell, why: LossReason) -> bool {
        // It stays in the schedule until its guard is dropped, because a shutdown waits for that.
        let is_renewed = self.lock().put(cell, NEVER);
        is_renewed && self.notify(cell, why)
    }

    fn notify(&self, cell: &LeaseCell, why: LossReason) -> bool {
        if !cell.lose(why) {
            return false;
        }
        tracing::warn!(name = %cell.name, holder = %cell.token.holder_id(), %why, "lease lost");
        self.core.publisher.stats.lost_leases.add_one();
        let state = cell.state();
        if state.published {
            let event = cell.event(EventKind::Lost, &state.owner.to_string(), &why.to_string());
            self.core.publisher.note(Note::Tell(event));
        }
        true
    }

    fn observe_loss(&self, cell: &LeaseCell, why: LossReason) {
        self.core.publisher.observe(&Transition::Lost { name: cell.name.as_str(), why });
    }

    pub(super) async fn wait_until_empty(&self) {
        loop {
            let emptied = self.emptied.notified();
            if self.is_empty() {
                return;
            }
            emptied.await;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.lock().due.is_empty()
    }

    /// Finds the lease that a message is for. Where there is none the message is kept, because the lease may have been
    /// granted just now. Messages are rare, so a linear search is good enough.
    fn find_or_keep(&self, token: &Token, message: impl FnOnce() -> Early) -> Option<Arc<LeaseCell>> {
        let mut schedule = self.lock();
        if let Some(cell) = schedule.due.values().find(|cell| cell.token == *token) {
            return Some(cell.clone());
        }
        if schedule.early.len() >= EARLY_KEPT {
            schedule.early.pop_front();
        }
        schedule.early.push_back((token.clone(), message()));
        None
    }

    pub(crate) fn all(&self) -> Vec<Arc<LeaseCell>> {
        self.lock().due.values().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Schedule> {
        lock(&self.schedule)
    }
}

impl Schedule {
    /// Moves a lease. `false`: it was removed.
    fn put(&mut self, cell: &LeaseCell, at: Moment) -> bool {
        let mut due = lock(&cell.due);
        let Some((old, id)) = *due else { return false };
        let Some(cell) = self.due.remove(&(old, id)) else { return false };
        *due = Some((at, id));
        self.due.insert((at, id), cell);
        true
    }

    fn take_early(&mut self, token: &Token) -> Vec<Early> {
        let mut found = Vec::new();
        while let Some(at) = self.early.iter().position(|(t, _)| t == token) {
            found.extend(self.early.remove(at).map(|(_, message)| message));
        }
        found
    }
}
