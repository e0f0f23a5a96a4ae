//! Waiting: one room per name in which this process's tasks wait. The room, not the task, stands in
//! the store's queue: it has one token and one ticket however many tasks wait, and only it asks and
//! leaves. A task that gives up just gets up.
//!
//! A task that waits for some of several locks sits in the room of each, under a ticket of its own. While it
//! is the first there the room stands under that ticket, and for nobody else: whoever is next in the room
//! has another place in the store's order, and the room takes it up when the first is gone.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::attempt::{Attempt, Carried, Waiting};
use super::lease_cell::{NewLease, Record};
use super::leaving::GivenUp;
use super::seat::Seat;
use super::{Alive, Core, lock};
use crate::clock::{Moment, wall_ms};
use crate::error::Error;
use crate::facts::{LockName, Token, Ttl};
use crate::guard::Guard;
use crate::store::{Claim, Grant, Holder, Push, StoreError, StoreErrorKind, Ticket};

/// Whose time is over, and who is the last of its room, waits this long at most until the store knows that it is
/// gone: otherwise the lock could still be given to it, and be passed on, after its call has ended.
const LEAVES_WITHIN: Duration = Duration::from_millis(100);

/// Whoever gave a lock to the next in line and wants it again within this stands in line, without a try.
const CROWDED_FOR: Duration = Duration::from_secs(1);
/// So many names are remembered for that.
const CROWDED_KEPT: usize = 256;

/// A store that has not answered for this long may be gone, and its last answer no longer counts.
const SILENT_AFTER: Duration = Duration::from_millis(500);

/// What a waiting task can say about its wait.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    pub(crate) holder: Option<Holder>,
    /// Whether the store has answered at all.
    pub(crate) answered: bool,
    /// The last failure, if the store failed last.
    pub(crate) failed: Option<StoreError>,
    /// When the oldest unanswered question was asked.
    pub(crate) asking_since: Option<Moment>,
}

impl Seen {
    /// As the store has just said.
    pub(crate) fn held_by(holder: Option<Holder>) -> Self {
        Self { holder, answered: true, failed: None, asking_since: None }
    }

    /// The reason why the holder is unknown; `None` where it is known.
    pub(crate) fn unknown(&self) -> Option<StoreError> {
        let no_answer = || (self.is_silent() || !self.answered).then(|| StoreErrorKind::NoAnswer.into());
        self.failed.clone().or_else(no_answer)
    }

    /// The store failed last, or owes an answer.
    pub(crate) fn is_failing(&self) -> bool {
        self.failed.is_some() || self.is_silent()
    }

    fn is_silent(&self) -> bool {
        self.asking_since.is_some_and(|since| since.until(Moment::now()) >= SILENT_AFTER)
    }
}

#[derive(Default)]
pub(crate) struct Rooms {
    rooms: Mutex<HashMap<LockName, Arc<Room>>>,
    /// Every token under which this process is, or may still be, in a queue.
    queued: Mutex<HashMap<Token, Queued>>,
    /// Locks that this process handed on, and when: others are likely to stand in line.
    crowded: Mutex<HashMap<LockName, Moment>>,
    /// Messages do not arrive: rooms have to poll.
    deaf: AtomicBool,
}

/// The state of a token that the store may grant a lock to by message. A token is entered before its first request and
/// removed when its guard exists or when it has left the queue.
enum Queued {
    /// Waiting: a grant goes to this room.
    Waits(Arc<Room>),
    /// Given up, and not yet confirmed by the store: a grant wakes the task that leaves the queue.
    Leaves(Arc<Notify>),
}

pub(crate) struct Room {
    pub(super) name: LockName,
    seats: Mutex<VecDeque<Seat>>,
    pub(super) seen: Mutex<Seen>,
    knock: mpsc::UnboundedSender<Knock>,
    /// The position in the queue, and the ttl of who waits there.
    pub(super) place: Mutex<(usize, Option<Ttl>)>,
    /// Nobody sits there any more, and the store knows it.
    gone: CancellationToken,
}

/// What wakes a room.
pub(super) enum Knock {
    Push(Push),
    /// Somebody sat down or got up.
    Seats,
    Disconnected,
    Resync,
    Close,
}

impl Rooms {
    /// Sits down in the room of a name; the first one opens it.
    pub(crate) fn sit(&self, alive: &Arc<Alive>, seat: Seat) -> Arc<Room> {
        let name = seat.lease.name.clone();
        let mut rooms = self.lock();
        if let Some(room) = rooms.get(&name) {
            room.add(seat);
            let closing = alive.0.closing.is_cancelled();
            let _ = room.knock.send(if closing { Knock::Close } else { Knock::Seats });
            return room.clone();
        }
        let (knock, knocks) = mpsc::unbounded_channel();
        let room = Arc::new(Room {
            name: name.clone(),
            seats: Mutex::new(VecDeque::from([seat])),
            seen: Mutex::default(),
            knock,
            place: Mutex::new((0, None)),
            gone: CancellationToken::new(),
        });
        rooms.insert(name, room.clone());
        // A shutdown that closed every room may have passed just before.
        if alive.0.closing.is_cancelled() {
            let _ = room.knock.send(Knock::Close);
        }
        drop(rooms);
        alive.0.spawn(run(alive.clone(), room.clone(), knocks));
        room
    }

    /// Whether tasks of this process wait for a name.
    pub(crate) fn is_open(&self, name: &LockName) -> bool {
        self.lock().contains_key(name)
    }

    /// A lock that was handed over to this process is given back.
    pub(crate) fn handed_on(&self, name: &LockName) {
        let mut crowded = lock(&self.crowded);
        let now = Moment::now();
        if crowded.len() >= CROWDED_KEPT {
            crowded.retain(|_, since| since.until(now) < CROWDED_FOR);
        }
        if crowded.len() < CROWDED_KEPT {
            crowded.insert(name.clone(), now);
        }
    }

    /// Whether others are likely to stand in line for a name. Asked once: if nobody does, the answer to the next
    /// question is the lock itself, and whoever comes after that tries.
    pub(crate) fn is_crowded(&self, name: &LockName) -> bool {
        let since = lock(&self.crowded).remove(name);
        since.is_some_and(|since| since.until(Moment::now()) < CROWDED_FOR)
    }

    pub(crate) fn deliver(&self, push: Push) {
        let token = match &push {
            Push::Granted { token, .. } | Push::LookAgain { token, .. } => token,
            Push::Hearing(hears) => {
                self.deaf.store(!hears, Ordering::Relaxed);
                return self.knock_all(|| Knock::Seats);
            }
            Push::Disconnected => return self.knock_all(|| Knock::Disconnected),
            _ => return,
        };
        let granted = matches!(push, Push::Granted { .. });
        match lock(&self.queued).get(token) {
            Some(Queued::Waits(room)) => drop(room.knock.send(Knock::Push(push))),
            Some(Queued::Leaves(wake)) if granted => wake.notify_one(),
            // Nothing to do for a token that is given up, nor for a second copy of a grant that made a guard.
            Some(Queued::Leaves(_)) | None => {}
        }
    }

    pub(crate) fn resync(&self) {
        self.knock_all(|| Knock::Resync);
        for queued in lock(&self.queued).values() {
            if let Queued::Leaves(wake) = queued {
                wake.notify_one();
            }
        }
    }

    /// Marks a token as given up.
    pub(super) fn leaves(&self, token: &Token, wake: &Arc<Notify>) {
        lock(&self.queued).insert(token.clone(), Queued::Leaves(wake.clone()));
    }

    /// Removes a token that is in no queue any more.
    pub(super) fn forget(&self, token: &Token) {
        lock(&self.queued).remove(token);
    }

    pub(super) fn is_deaf(&self) -> bool {
        self.deaf.load(Ordering::Relaxed)
    }

    pub(crate) fn close_all(&self) {
        self.knock_all(|| Knock::Close);
    }

    fn knock_all(&self, knock: impl Fn() -> Knock) {
        for room in self.lock().values() {
            let _ = room.knock.send(knock());
        }
    }

    /// Tells the store how many rooms wait, so that it proves its messages only while they do.
    pub(super) fn tell_store(&self, core: &Core) {
        let rooms = self.lock();
        let nearest = rooms.values().map(|room| lock(&room.place).0).min().unwrap_or(0);
        let shortest = rooms.values().filter_map(|room| lock(&room.place).1).min();
        core.store.waiting(rooms.len(), nearest, shortest);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<LockName, Arc<Room>>> {
        lock(&self.rooms)
    }
}

impl Room {
    /// A task got up (its reply is closed): the room may be empty now.
    pub(crate) fn got_up(&self) {
        let _ = self.knock.send(Knock::Seats);
    }

    /// The same, and a moment for the store to know it, unless others still sit here.
    pub(crate) async fn got_up_and_left(&self) {
        self.got_up();
        if self.deserted() {
            let _ = tokio::time::timeout(LEAVES_WITHIN, self.gone.cancelled()).await;
        }
    }

    /// Copies the store's last answer or failure, if there was one.
    pub(crate) fn tell_what_was_seen(&self, to: &Mutex<Seen>) {
        let last = lock(&self.seen).clone();
        if last.answered || last.is_failing() {
            *lock(to) = last;
        }
    }
}

/// The life of a room: one lap per token, until nobody sits there.
async fn run(alive: Arc<Alive>, room: Arc<Room>, mut knocks: mpsc::UnboundedReceiver<Knock>) {
    let core = &alive.0;
    let mut carried = Carried::default();
    while let Some((claim, ticket)) = room.next_claim(core) {
        lock(&core.rooms.queued).insert(claim.token.clone(), Queued::Waits(room.clone()));
        core.rooms.tell_store(core);
        let ended = Waiting::new(core, &room, &claim, ticket, carried).wait(&mut knocks).await;
        carried = ended.carried;
        let leave = |claim| core.leave_unless_unknown(claim, ended.sent, ended.unanswered);
        match ended.attempt {
            Attempt::Granted { grant, confirm } => {
                if let Some(claim) = room.give(&alive, claim, ticket, &grant, confirm) {
                    // Every task that it was for gave up before the grant arrived: the store passes it on.
                    leave(claim);
                }
            }
            Attempt::Deserted => {
                if let Some(left) = leave(claim) {
                    let _ = tokio::time::timeout(LEAVES_WITHIN, left).await;
                }
            }
            Attempt::UsedUp => drop(leave(claim)),
            Attempt::Failed(error) => {
                leave(claim);
                room.fail(core, &error);
            }
            Attempt::Closed => {
                leave(claim);
                for seat in lock(&room.seats).drain(..) {
                    seat.reply.send(Err(Error::ShutDown { name: room.name.clone() }));
                }
            }
        }
    }
    room.gone.cancel();
    core.rooms.tell_store(core);
}

impl Core {
    /// Gives up a room's attempt, unless the store never got a request of it.
    fn leave_unless_unknown(
        self: &Arc<Self>,
        claim: Claim,
        sent: bool,
        unanswered: bool,
    ) -> Option<oneshot::Receiver<()>> {
        if !sent {
            self.rooms.forget(&claim.token);
            return None;
        }
        Some(self.leave_in_background(GivenUp { claim, queued: true, unanswered }))
    }
}

impl Room {
    /// Behind those that came before; where both have tickets of their own, those say who did.
    fn add(&self, seat: Seat) {
        let mut seats = lock(&self.seats);
        let later = |other: &&Seat| seat.ticket.is_some_and(|mine| other.ticket.is_some_and(|theirs| theirs > mine));
        let place = seats.len() - seats.iter().rev().take_while(later).count();
        seats.insert(place, seat);
    }

    /// The claim of the next attempt, in the name of the first task, and that task's own ticket; `None`, and
    /// the room is gone, when nobody waits.
    fn next_claim(&self, core: &Core) -> Option<(Claim, Option<Ticket>)> {
        let mut rooms = core.rooms.lock();
        let mut seats = lock(&self.seats);
        seats.retain(|seat| !seat.reply.is_closed());
        let Some(first) = seats.front() else {
            rooms.remove(&self.name);
            return None;
        };
        *lock(&self.place) = (0, Some(first.lease.ttl));
        let claim = Claim {
            name: self.name.clone(),
            token: Token::random(),
            ttl: first.lease.ttl,
            owner: first.lease.owner.clone(),
            // A queued grant always has a fence: the hand-off writes it anyway.
            fenced: true,
            // A message that cannot arrive is not waited for: the queue is told that this one polls.
            listens: core.options.events && !core.rooms.is_deaf(),
            since_ms: wall_ms(),
        };
        Some((claim, first.ticket))
    }

    /// Gives the lock to the first task that still waits; the claim comes back where none does.
    fn give(
        &self,
        alive: &Arc<Alive>,
        claim: Claim,
        ticket: Option<Ticket>,
        grant: &Grant,
        confirm: bool,
    ) -> Option<Claim> {
        let Some(seat) = self.take_first(ticket) else { return Some(claim) };
        let mine = seat.lease.ttl == claim.ttl && seat.lease.owner == claim.owner;
        let record = match (mine, confirm) {
            (false, _) => Record::Anothers,
            (true, true) => Record::Provisional,
            (true, false) => Record::Whole,
        };
        let token = claim.token.clone();
        let lease = NewLease { token: claim.token, waited: true, ..seat.lease };
        let guard = Guard::begin(alive.clone(), lease, grant, record);
        // From here on the guard alone gives it back.
        alive.0.rooms.forget(&token);
        // Should the task have gone this very moment, the guard is dropped, which releases.
        seat.reply.send(Ok(guard));
        None
    }

    /// The first task that still waits, if its place in the store's order is this one.
    fn take_first(&self, ticket: Option<Ticket>) -> Option<Seat> {
        let mut seats = lock(&self.seats);
        while seats.front()?.reply.is_closed() {
            seats.pop_front();
        }
        if seats.front()?.ticket == ticket { seats.pop_front() } else { None }
    }

    /// Whether somebody else is the first by now, whose place in the store's order is another one.
    pub(super) fn stands_for_another_than(&self, ticket: Option<Ticket>) -> bool {
        let seats = lock(&self.seats);
        let first = seats.iter().find(|seat| !seat.reply.is_closed());
        first.is_some_and(|seat| seat.ticket != ticket)
    }

    fn fail(&self, core: &Core, error: &StoreError) {
        for seat in lock(&self.seats).drain(..) {
            let answer = core.store_error(crate::Operation::Acquire, &self.name, error.clone());
            seat.reply.send(Err(answer));
        }
    }

    pub(super) fn deserted(&self) -> bool {
        lock(&self.seats).iter().all(|seat| seat.reply.is_closed())
    }

    /// The shortest pause between polls that anybody here asked for.
    pub(super) fn retry_every(&self) -> Option<Duration> {
        lock(&self.seats).iter().filter_map(|seat| seat.retry_every).min()
    }
}

/// Between three quarters and the whole of a pause, so that many do not march in step.
pub(crate) fn jittered(pause: Duration) -> Duration {
    let random = getrandom::u32().unwrap_or(0) % 256;
    pause - pause / 1_024 * random
}
