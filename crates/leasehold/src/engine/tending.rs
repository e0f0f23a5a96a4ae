//! Renewing: one task tends all leases of a process. It renews or checks those that are due in one batched pass,
//! earliest deadline first, and tells a holder the moment its lease is lost or can no longer be proven.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::lease_cell::{Due, LeaseCell, LeaseState, NOTED_AFTER};
use super::{Core, lock};
use crate::clock::{Moment, Sleeper, wall_ms};
use crate::event::{EventKind, LockEvent, LossReason, Transition};
use crate::facts::Token;
use crate::lease::{Step, check_every};
use crate::store::{Note, Renewal, Renewed, StoreError, StoreErrorKind};

/// Leases due within this are renewed in the same pass.
const PASS: Duration = Duration::from_millis(10);
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
        let at = first_look(cell);
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
            let mut state = cell.state();
            if state.renew_at.is_some() {
                state.renew_at = Some(now);
            }
            state.check_at = now;
            drop(state);
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

    fn all(&self) -> Vec<Arc<LeaseCell>> {
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

/// When a new lease needs attention for the first time.
fn first_look(cell: &LeaseCell) -> Moment {
    let state = cell.state();
    let noted = cell.granted_at + NOTED_AFTER;
    let ends = state.belief.valid_until();
    let first = noted.min(ends).min(state.check_at);
    state.renew_at.into_iter().chain(state.plan.at_most_until).fold(first, Moment::min)
}

/// One renewal or check on its way.
struct Sent {
    cell: Arc<LeaseCell>,
    renewal: Renewal,
}

/// The tending task.
pub(crate) async fn tend(core: Arc<Core>, ended: CancellationToken) {
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
            Some((asked_at, sent, answers)) = passes.next(), if !passes.is_empty() => {
                for (sent, answer) in sent.into_iter().zip(answers) {
                    take_answer(&core, &sent, asked_at, answer);
                }
            }
            Some(()) = writing_notes.next(), if !writing_notes.is_empty() => {}
            () = sleeper.until(next) => {}
            () = core.leases.woken.notified() => {}
            () = ended.cancelled() => {
                core.flush(true).await;
                return;
            }
        }
    }
}

/// Looks at every lease that is due. Returns those to renew or check, earliest deadline first.
fn look(core: &Core, now: Moment) -> Vec<Sent> {
    let due = core.leases.lock().due_until(now + PASS);
    let mut to_renew = Vec::new();
    for cell in due {
        let mut state = cell.state();
        if !state.noted && now >= cell.granted_at + NOTED_AFTER {
            state.noted = true;
            core.note(Note::Tell(lock_event(&cell, &state.owner.to_string(), EventKind::Granted, "")));
            core.note(Note::Enter {
                name: cell.name.clone(),
                holder: cell.token.holder_id(),
                lasts: state.ttl.duration(),
            });
        }
        let renew_at = state.renew_at.filter(|_| !state.renewing);
        let check_at = Some(state.check_at).filter(|_| !state.renewing);
        let step = state.plan.next_step(&state.belief, renew_at, check_at, now + PASS);
        let look_again = match step {
            Step::Renew | Step::Check => {
                state.renewing = true;
                let renewal = if step == Step::Renew { cell.renewal(&state) } else { cell.check(&state) };
                to_renew.push((state.belief.valid_until(), Sent { cell: cell.clone(), renewal }));
                // Whether it is answered or not.
                end_of(&state)
            }
            Step::Sleep(until) => until,
            // The pass looks a little ahead; the end itself is never told early.
            Step::Lost | Step::MaxHold if !over_by(&state, now) => end_of(&state),
            Step::Lost | Step::MaxHold => {
                let why = if step == Step::Lost { LossReason::Expired } else { LossReason::MaxHold };
                drop(state);
                core.lose(&cell, why);
                continue;
            }
        };
        let unnoted = (!state.noted).then_some(cell.granted_at + NOTED_AFTER);
        drop(state);
        core.leases.lock().put(&cell, unnoted.map_or(look_again, |at| at.min(look_again)));
    }
    to_renew.sort_by_key(|(deadline, _)| *deadline);
    to_renew.into_iter().map(|(_, sent)| sent).collect()
}

/// When the holder has to be told that it is over, as things stand.
fn end_of(state: &LeaseState) -> Moment {
    let believed = state.belief.valid_until();
    state.plan.at_most_until.map_or(believed, |end| end.min(believed))
}

fn over_by(state: &LeaseState, now: Moment) -> bool {
    !state.belief.is_valid(now) || state.plan.at_most_until.is_some_and(|end| now >= end)
}

async fn renew(core: &Core, sent: Vec<Sent>) -> (Moment, Vec<Sent>, Vec<Renewed>) {
    let renewals: Vec<Renewal> = sent.iter().map(|s| s.renewal.clone()).collect();
    let asked_at = Moment::now();
    let answered = tokio::time::timeout(core.options.answer_within, core.store.renew(&renewals)).await;
    if answered.is_ok() {
        core.answered(crate::Operation::Renew, asked_at);
    }
    let answers =
        answered.unwrap_or_else(|_| vec![Renewed::Unknown(StoreError::from(StoreErrorKind::NoAnswer)); renewals.len()]);
    (asked_at, sent, answers)
}

fn take_answer(core: &Core, sent: &Sent, asked_at: Moment, answer: Renewed) {
    let cell = &sent.cell;
    let now = Moment::now();
    let mut state = cell.state();
    state.renewing = false;
    match answer {
        Renewed::Renewed if !sent.renewal.prolong => {
            state.check_at = asked_at + check_every(state.ttl.duration());
            drop(state);
            tracing::trace!(name = %cell.name, "checked");
        }
        Renewed::Renewed => {
            if !state.belief.renewed(now, asked_at, sent.renewal.ttl.duration()) {
                drop(state);
                return core.lose(cell, LossReason::Expired);
            }
            if sent.renewal.rewrite.as_ref() == Some(&state.owner) && sent.renewal.ttl == state.ttl {
                state.rewrite = false;
            }
            state.renew_at = state.plan.every.map(|every| asked_at + every);
            state.check_at = asked_at + check_every(state.ttl.duration());
            if state.rewrite {
                state.renew_at = Some(now);
            }
            let slack = now.until(state.belief.valid_until());
            if state.noted {
                let lasts = state.ttl.duration();
                core.note(Note::Enter { name: cell.name.clone(), holder: cell.token.holder_id(), lasts });
            }
            drop(state);
            tracing::trace!(name = %cell.name, ?slack, "renewed");
            core.observe(&Transition::Renewed { name: cell.name.as_str(), slack });
        }
        Renewed::Lost => {
            drop(state);
            return core.lose(cell, LossReason::Gone);
        }
        Renewed::Revoked => {
            drop(state);
            return core.lose(cell, LossReason::Revoked);
        }
        Renewed::Displaced => {
            drop(state);
            return core.lose(cell, LossReason::Displaced);
        }
        Renewed::Unknown(error) => {
            // Neither renewed nor lost: ask again soon, until the deadline.
            let pause = state.ttl.duration() / 20;
            let again = now + pause.clamp(Duration::from_millis(5), Duration::from_secs(1));
            state.check_at = again;
            if sent.renewal.prolong {
                state.renew_at = Some(again);
                drop(state);
                tracing::warn!(name = %cell.name, %error, "a renewal was not answered");
            } else {
                drop(state);
                tracing::debug!(name = %cell.name, %error, "a check was not answered");
            }
            core.observe(&Transition::StoreFailed { operation: crate::Operation::Renew, kind: error.kind() });
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
        if state.noted {
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
        fence: cell.fence.map(crate::Fence::get),
        at_ms: wall_ms(),
        reason: reason.to_owned(),
    }
}
