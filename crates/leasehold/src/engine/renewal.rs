//! Renewing: one task renews or checks all leases of a process that are due, in one batched pass, earliest deadline
//! first. It notifies a holder the moment its lease is lost, or can no longer be proven. [`LeaseState`] decides.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::lease_cell::{Due, LeaseCell};
use super::{Core, lock};
use crate::client::renewal::{PASS, Sent, Then, Verdict};
use crate::clock::{Moment, Sleeper, timeout, wall_ms};
use crate::events::{EventKind, LockEvent, Transition};
use crate::facts::Token;
use crate::loss::LossReason;
use crate::store::{Note, Renewal, Renewed, StoreError, StoreErrorKind};

/// Renewals in one request.
const PASS_SIZE: usize = 1_000;
/// Notes are written this long after the first of them: a lock that is taken and given back thousands of times a second
/// must not cost two requests for people each time.
const WRITTEN_AFTER: Duration = Duration::from_millis(20);
/// The fleet's counters are at most this old.
const COUNTED_EVERY: Duration = Duration::from_secs(5);

/// Messages kept for leases that are just being granted. Some are for leases that are over: the oldest
/// are forgotten.
const EARLY_KEPT: usize = 256;

/// Further away than any lease.
const NEVER: Moment = Moment::from_boot(Duration::MAX);

/// The leases of a process, by when they need to be looked at.
#[derive(Default)]
pub(crate) struct Leases {
    schedule: Mutex<Schedule>,
    woken: Notify,
    emptied: Notify,
}

#[derive(Default)]
struct Schedule {
    due: BTreeMap<Due, Arc<LeaseCell>>,
    next_id: u64,
    /// When the tending task looks next; `None`: when it is woken.
    looks_at: Option<Moment>,
    notes: Vec<Note>,
    /// When they are to be written; `None` where there are none.
    write_at: Option<Moment>,
    /// Notes that could not be written, for the next regular pass.
    later: Vec<Note>,
    /// Messages that came before the lease they are for, oldest first.
    early: VecDeque<(Token, Early)>,
}

/// What was said of a lease before its guard existed.
enum Early {
    Revoked,
    Finish(String),
}

impl Leases {
    /// Begins to tend a lease.
    pub(crate) fn insert(&self, core: &Core, cell: &Arc<LeaseCell>) {
        let at = cell.state().first_look();
        let mut schedule = self.lock();
        let due = (at, schedule.next_id);
        schedule.next_id += 1;
        *lock(&cell.due) = Some(due);
        schedule.due.insert(due, cell.clone());
        let too_late = schedule.looks_at.is_none_or(|looks_at| looks_at > at);
        let early = schedule.take_early(&cell.token);
        drop(schedule);
        if too_late {
            self.woken.notify_one();
        }
        for message in early {
            match message {
                Early::Revoked => core.lose(cell, LossReason::Revoked),
                Early::Finish(reason) => cell.ask_to_finish(reason),
            }
        }
    }

    /// Stops tending a lease.
    pub(crate) fn remove(&self, cell: &LeaseCell) {
        let mut schedule = self.lock();
        if let Some(due) = lock(&cell.due).take() {
            schedule.due.remove(&due);
        }
        if schedule.due.is_empty() {
            self.emptied.notify_waiters();
        }
    }

    /// Looks at a lease again now, because something about it changed.
    pub(crate) fn touch(&self, cell: &LeaseCell) {
        self.lock().put(cell, Moment::from_boot(Duration::ZERO));
        self.woken.notify_one();
    }

    /// The connection was lost and is back: the store may have forgotten everything, so every lease
    /// is proven now rather than at its next renewal.
    pub(crate) fn look_at_all(&self) {
        let now = Moment::now();
        for cell in self.all() {
            cell.state().reconnected(now);
            self.lock().put(&cell, now);
        }
        self.woken.notify_one();
    }

    pub(crate) fn note(&self, note: Note) {
        let mut schedule = self.lock();
        schedule.notes.push(note);
        if schedule.write_at.is_some() {
            return;
        }
        let at = Moment::now() + WRITTEN_AFTER;
        schedule.write_at = Some(at);
        let too_late = schedule.looks_at.is_none_or(|looks_at| looks_at > at);
        drop(schedule);
        if too_late {
            self.woken.notify_one();
        }
    }

    /// Notes that were not written, for the next pass; nobody is woken for them, or a store that is away would be
    /// asked without pause.
    pub(crate) fn keep_for_later(&self, notes: Vec<Note>) {
        self.lock().later.extend(notes);
    }

    pub(crate) fn take_notes(&self) -> Vec<Note> {
        let mut schedule = self.lock();
        let mut notes = std::mem::take(&mut schedule.later);
        notes.append(&mut schedule.notes);
        schedule.write_at = None;
        notes
    }

    pub(crate) fn revoked(&self, core: &Core, token: &Token) {
        if let Ok(cell) = self.find_or_keep(token, Early::Revoked) {
            core.lose(&cell, LossReason::Revoked);
        }
    }

    pub(crate) fn asked_to_finish(&self, token: &Token, reason: String) {
        // The reason goes one of two ways, and only one of them is taken.
        if let Ok(cell) = self.find_or_keep(token, Early::Finish(reason.clone())) {
            cell.ask_to_finish(reason);
        }
    }

    /// The manager shuts down: whoever holds something is told.
    pub(crate) fn lose_all(&self, core: &Core) {
        for cell in self.all() {
            core.lose(&cell, LossReason::Shutdown);
        }
    }

    pub(crate) async fn wait_until_empty(&self) {
        loop {
            let emptied = self.emptied.notified();
            if self.lock().due.is_empty() {
                return;
            }
            emptied.await;
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lock().due.is_empty()
    }

    /// The lease a message is for. Where there is none yet the message is kept: its grant may be on its
    /// way to a task that has not seen it. A rare look-up, so a walk is good enough.
    fn find_or_keep(&self, token: &Token, message: Early) -> Result<Arc<LeaseCell>, ()> {
        let mut schedule = self.lock();
        if let Some(cell) = schedule.due.values().find(|cell| cell.token == *token) {
            return Ok(cell.clone());
        }
        if schedule.early.len() >= EARLY_KEPT {
            schedule.early.pop_front();
        }
        schedule.early.push_back((token.clone(), message));
        Err(())
    }

    pub(crate) fn all(&self) -> Vec<Arc<LeaseCell>> {
        self.lock().due.values().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Schedule> {
        lock(&self.schedule)
    }
}

impl Schedule {
    /// Moves a lease. `false`: it is tended no more.
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

    /// Everything to be looked at until then.
    fn due_until(&self, then: Moment) -> Vec<Arc<LeaseCell>> {
        self.due.range(..=(then, u64::MAX)).map(|(_, cell)| cell.clone()).collect()
    }
}

/// One renewal or check in flight.
struct RenewalInFlight {
    cell: Arc<LeaseCell>,
    sent: Sent,
}

/// The renewal task.
pub(crate) async fn run(core: Arc<Core>, ended: CancellationToken) {
    let mut passes = FuturesUnordered::new();
    let mut writing_notes = FuturesUnordered::new();
    let mut count_at = Moment::now() + COUNTED_EVERY;
    // A memory store works in a runtime without I/O, and nobody else waits for what it holds.
    let in_memory = core.store.describe() == "memory:";
    let mut sleeper = if in_memory { Sleeper::without_alarm() } else { Sleeper::with_alarm() };
    loop {
        let now = Moment::now();
        let mut due = look(&core, now);
        while !due.is_empty() {
            let rest = due.split_off(due.len().min(PASS_SIZE));
            passes.push(renew(&core, std::mem::replace(&mut due, rest)));
        }
        let counting = now >= count_at;
        let writing = core.leases.lock().write_at.is_some_and(|at| now >= at);
        if writing_notes.is_empty() && (counting || writing) {
            writing_notes.push(core.flush(counting));
            if counting {
                count_at = now + COUNTED_EVERY;
            }
        }
        let next = {
            let mut schedule = core.leases.lock();
            // While something is being written nothing else is: its end wakes us.
            let write_at = schedule.write_at.map_or(count_at, |at| at.min(count_at));
            let write_at = if writing_notes.is_empty() { write_at } else { NEVER };
            let next = schedule.due.first_key_value().map_or(write_at, |((due, _), _)| (*due).min(write_at));
            schedule.looks_at = Some(next);
            next
        };
        tokio::select! {
            biased;
            () = ended.cancelled() => {
                core.flush(true).await;
                return;
            }
            Some((asked_at, pass, answers)) = passes.next(), if !passes.is_empty() => {
                for (in_flight, answer) in pass.iter().zip(answers) {
                    take_answer(&core, in_flight, asked_at, &answer);
                }
            }
            Some(()) = writing_notes.next(), if !writing_notes.is_empty() => {}
            () = sleeper.until(next) => {}
            () = core.leases.woken.notified() => {}
        }
    }
}

/// Looks at every lease that is due. Returns those to renew or check, earliest deadline first.
fn look(core: &Core, now: Moment) -> Vec<RenewalInFlight> {
    let due = core.leases.lock().due_until(now + PASS);
    let mut to_ask = Vec::new();
    for cell in due {
        let mut state = cell.state();
        let look = state.look(now);
        if look.publish {
            core.note(Note::Tell(lock_event(&cell, &state.owner.to_string(), EventKind::Granted, "")));
            core.note(Note::Enter {
                name: cell.name.clone(),
                holder: cell.token.holder_id(),
                lasts: state.ttl.duration(),
            });
        }
        let look_again = match look.then {
            Then::Wait(until) => until,
            Then::Ask { prolong, look_again } => {
                let sent = state.request(prolong);
                to_ask.push((state.belief.valid_until(), RenewalInFlight { cell: cell.clone(), sent }));
                look_again
            }
            Then::Lost(why) => {
                drop(state);
                core.lose(&cell, why);
                continue;
            }
        };
        drop(state);
        core.leases.lock().put(&cell, look_again);
    }
    to_ask.sort_by_key(|(deadline, _)| *deadline);
    to_ask.into_iter().map(|(_, in_flight)| in_flight).collect()
}

async fn renew(core: &Core, pass: Vec<RenewalInFlight>) -> (Moment, Vec<RenewalInFlight>, Vec<Renewed>) {
    let renewals: Vec<Renewal> = pass.iter().map(|RenewalInFlight { cell, sent }| cell.renewal(sent)).collect();
    let asked_at = Moment::now();
    let answered = timeout(core.options.request_timeout, core.store.renew(&renewals)).await;
    if answered.is_some() {
        core.answered(crate::store::Operation::Renew, asked_at);
    }
    let answers =
        answered.unwrap_or_else(|| vec![Renewed::Unknown(StoreError::from(StoreErrorKind::NoAnswer)); renewals.len()]);
    (asked_at, pass, answers)
}

fn take_answer(core: &Core, RenewalInFlight { cell, sent }: &RenewalInFlight, asked_at: Moment, answer: &Renewed) {
    let mut state = cell.state();
    let verdict = state.answered(Moment::now(), sent, asked_at, answer);
    let (published, lasts) = (state.published, state.ttl.duration());
    drop(state);
    match verdict {
        Verdict::Lost(why) => return core.lose(cell, why),
        Verdict::Checked => tracing::trace!(name = %cell.name, "checked"),
        Verdict::Renewed { slack } => {
            if published {
                core.note(Note::Enter { name: cell.name.clone(), holder: cell.token.holder_id(), lasts });
            }
            tracing::trace!(name = %cell.name, ?slack, "renewed");
            core.observe(&Transition::Renewed { name: cell.name.as_str(), slack });
        }
        Verdict::Unanswered => {
            if let Renewed::Unknown(error) = answer {
                if sent.prolong {
                    tracing::warn!(name = %cell.name, %error, "a renewal was not answered");
                } else {
                    tracing::debug!(name = %cell.name, %error, "a check was not answered");
                }
                core.observe(&Transition::StoreFailed {
                    operation: crate::store::Operation::Renew,
                    kind: error.kind(),
                });
            }
        }
    }
    core.leases.touch(cell);
}

impl Core {
    /// Tells the holder that its lease is over. The lock itself is given back when the holder has
    /// stopped, that is, when its guard is dropped: before that, work may still be going on.
    pub(crate) fn lose(&self, cell: &LeaseCell, why: LossReason) {
        // Whatever made us look at it, it needs no more looks; but its guard lives.
        let tended = self.leases.lock().put(cell, NEVER);
        // Given back meanwhile: a renewal that was on its way finds it gone, and nobody lost anything.
        if tended {
            self.tell_lost(cell, why);
        }
    }

    pub(super) fn tell_lost(&self, cell: &LeaseCell, why: LossReason) {
        if !cell.lose(why) {
            return;
        }
        tracing::warn!(name = %cell.name, holder = %cell.token.holder_id(), %why, "lease lost");
        self.observe(&Transition::Lost { name: cell.name.as_str(), why });
        self.stats.lost_leases.add_one();
        let state = cell.state();
        if state.published {
            let event = lock_event(cell, &state.owner.to_string(), EventKind::Lost, &why.to_string());
            self.note(Note::Tell(event));
        }
    }
}

/// What the fleet is told of a lease.
pub(crate) fn lock_event(cell: &LeaseCell, owner: &str, kind: EventKind, reason: &str) -> LockEvent {
    LockEvent {
        kind,
        name: cell.name.to_string(),
        owner: owner.to_owned(),
        holder_id: cell.token.holder_id().to_string(),
        fence: cell.fence.map(crate::facts::Fence::get),
        at_ms: wall_ms(),
        reason: reason.to_owned(),
    }
}
