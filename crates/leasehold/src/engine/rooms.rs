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

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::lease_cell::{NewLease, Record};
use super::seat::Seat;
use super::{Alive, Core, lock};
use crate::clock::{Moment, sleep_until, wall_ms};
use crate::error::Error;
use crate::facts::{LockName, Token, Ttl};
use crate::guard::Guard;
use crate::lease::Belief;
use crate::store::{Acquire, Claim, Grant, Holder, Place, Push, StoreError, StoreErrorKind, Ticket};

/// However sure the messages are: near the head of a queue ask again this often.
const ASK_EVERY: Duration = Duration::from_secs(5);
/// Waiters before this position are near the head.
const NEAR: usize = 8;
/// Each place further back asks so much less often, up to the longest: a thousand that wait must not be a
/// load. Whoever comes to the head is told so, and a queue outlives twice the longest pause.
const LESS_OFTEN: Duration = Duration::from_millis(500);
const ASK_AT_LEAST_EVERY: Duration = Duration::from_secs(30);
/// Those further back ask a little later after a lease has ended, so that they do not all come at once.
const PER_POSITION: Duration = Duration::from_millis(20);
/// Behind a holder that sends no message when it is done, the head of the queue asks this often.
const BEHIND_FOREIGN: Duration = Duration::from_millis(100);

/// Whose time is over, and who is the last of its room, waits this long at most until the store knows that it is
/// gone: otherwise the lock could still be given to it, and be passed on, after its call has ended.
const LEAVES_WITHIN: Duration = Duration::from_millis(100);

/// Whoever gave a lock to the next in line and wants it again within this stands in line, without a try.
const CROWDED_FOR: Duration = Duration::from_secs(1);
/// So many names are remembered for that.
const CROWDED_KEPT: usize = 256;

/// What a waiting task can say about its wait.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    pub(crate) holder: Option<Holder>,
    /// Whether the store has answered at all.
    pub(crate) answered: bool,
    /// The last failure, if the store failed last.
    pub(crate) failed: Option<StoreError>,
}

#[derive(Default)]
pub(crate) struct Rooms {
    rooms: Mutex<HashMap<LockName, Arc<Room>>>,
    /// Which room a message is for.
    by_token: Mutex<HashMap<Token, Arc<Room>>>,
    /// Locks that this process handed on, and when: others are likely to stand in line.
    crowded: Mutex<HashMap<LockName, Moment>>,
    /// Messages do not arrive: rooms have to poll.
    deaf: AtomicBool,
}

pub(crate) struct Room {
    name: LockName,
    seats: Mutex<VecDeque<Seat>>,
    seen: Mutex<Seen>,
    knock: mpsc::UnboundedSender<Knock>,
    /// The position in the queue, and the ttl of who waits there.
    place: Mutex<(usize, Option<Ttl>)>,
    /// Nobody sits there any more, and the store knows it.
    gone: CancellationToken,
}

/// What wakes a room.
enum Knock {
    Push(Push),
    /// Somebody sat down or got up.
    Seats,
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
            _ => return,
        };
        if let Some(room) = lock(&self.by_token).get(token) {
            let _ = room.knock.send(Knock::Push(push));
        }
    }

    pub(crate) fn resync(&self) {
        self.knock_all(|| Knock::Resync);
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
    fn tell_store(&self, core: &Core) {
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

    pub(crate) fn seen(&self) -> Seen {
        lock(&self.seen).clone()
    }
}

/// How one attempt of a room ended.
enum Attempt {
    /// The lock is ours. `confirm`: provisionally, by a message.
    Granted {
        grant: Grant,
        confirm: bool,
    },
    /// Everybody got up.
    Deserted,
    /// The token is used up: try with another.
    UsedUp,
    /// The store failed for longer than our patience, or in a way that waiting does not mend.
    Failed(StoreError),
    Closed,
}

/// The life of a room: one lap per token, until nobody sits there.
async fn run(alive: Arc<Alive>, room: Arc<Room>, mut knocks: mpsc::UnboundedReceiver<Knock>) {
    let core = &alive.0;
    while let Some((claim, ticket)) = room.next_claim(core) {
        lock(&core.rooms.by_token).insert(claim.token.clone(), room.clone());
        core.rooms.tell_store(core);
        let attempt = Waiting::new(core, &room, &claim, ticket).wait(&mut knocks).await;
        lock(&core.rooms.by_token).remove(&claim.token);
        match attempt {
            Attempt::Granted { grant, confirm } => room.give(&alive, &claim, ticket, &grant, confirm),
            Attempt::Deserted => {
                let left = core.leave_in_background(claim);
                let _ = tokio::time::timeout(LEAVES_WITHIN, left).await;
            }
            Attempt::UsedUp => drop(core.leave_in_background(claim)),
            Attempt::Failed(error) => {
                drop(core.leave_in_background(claim));
                room.fail(core, &error);
            }
            Attempt::Closed => {
                drop(core.leave_in_background(claim));
                for seat in lock(&room.seats).drain(..) {
                    seat.reply.send(Err(Error::ShutDown { name: room.name.clone() }));
                }
            }
        }
    }
    room.gone.cancel();
    core.rooms.tell_store(core);
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
            listens: core.options.events && !core.rooms.deaf.load(Ordering::Relaxed),
            since_ms: wall_ms(),
        };
        Some((claim, first.ticket))
    }

    /// Gives the lock to the first task that still waits.
    fn give(&self, alive: &Arc<Alive>, claim: &Claim, ticket: Option<Ticket>, grant: &Grant, confirm: bool) {
        let Some(seat) = self.take_first(ticket) else {
            // Everybody it was for got up while the grant was on its way. The store knows who is next.
            return drop(alive.0.leave_in_background(claim.clone()));
        };
        let mine = seat.lease.ttl == claim.ttl && seat.lease.owner == claim.owner;
        let record = match (mine, confirm) {
            (false, _) => Record::Anothers,
            (true, true) => Record::Provisional,
            (true, false) => Record::Whole,
        };
        let lease = NewLease { token: claim.token.clone(), waited: true, ..seat.lease };
        let guard = Guard::begin(alive.clone(), lease, grant, record);
        // Should the task have gone this very moment, the guard is dropped, which releases.
        seat.reply.send(Ok(guard));
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
    fn stands_for_another_than(&self, ticket: Option<Ticket>) -> bool {
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

    fn deserted(&self) -> bool {
        lock(&self.seats).iter().all(|seat| seat.reply.is_closed())
    }

    /// The shortest pause between polls that anybody here asked for.
    fn retry_every(&self) -> Option<Duration> {
        lock(&self.seats).iter().filter_map(|seat| seat.retry_every).min()
    }
}

/// One attempt of a room: asks, waits for its turn, asks again.
struct Waiting<'a> {
    core: &'a Core,
    room: &'a Room,
    claim: &'a Claim,
    /// That of the task it is made for, where it has one of its own.
    own_ticket: Option<Ticket>,
    ticket: Option<Ticket>,
    ask_at: Moment,
    /// Consecutive polls, for the backoff.
    polls: u32,
    /// Since when the store has failed.
    failing_since: Option<Moment>,
    /// A grant that came by message while a question was still open.
    pushed: Option<Grant>,
    /// A message asked for a look by then; the answer to an older question does not undo it.
    look_by: Option<Moment>,
}

impl<'a> Waiting<'a> {
    fn new(core: &'a Core, room: &'a Room, claim: &'a Claim, ticket: Option<Ticket>) -> Self {
        Self {
            core,
            room,
            claim,
            own_ticket: ticket,
            ticket,
            ask_at: Moment::now(),
            polls: 0,
            failing_since: None,
            pushed: None,
            look_by: None,
        }
    }

    async fn wait(mut self, knocks: &mut mpsc::UnboundedReceiver<Knock>) -> Attempt {
        loop {
            let asked = if Moment::now() >= self.ask_at {
                // A push may overtake the answer, so both are listened to. But an attempt never ends in a
                // grant with a question of its own still open: after a release that question would put a
                // dead token into the queue.
                let asking = tokio::time::timeout(
                    self.core.options.answer_within,
                    self.core.store.acquire(self.claim, self.ticket),
                );
                tokio::pin!(asking);
                loop {
                    tokio::select! {
                        biased;
                        Some(knock) = knocks.recv() => match self.knocked(knock) {
                            Some(Attempt::Granted { grant, .. }) => self.pushed = Some(grant),
                            Some(end) => return end,
                            None => {}
                        },
                        answer = &mut asking => {
                            let no_answer = |_| Err(StoreError::from(StoreErrorKind::NoAnswer));
                            break Some(answer.unwrap_or_else(no_answer));
                        }
                    }
                }
            } else {
                tokio::select! {
                    biased;
                    Some(knock) = knocks.recv() => if let Some(end) = self.knocked(knock) { return end },
                    () = sleep_until(Some(self.ask_at)) => {}
                }
                None
            };
            if let Some(answer) = asked
                && let Some(end) = self.answered(answer)
            {
                return end;
            }
        }
    }

    /// A knock at the door. `Some` ends the attempt.
    fn knocked(&mut self, knock: Knock) -> Option<Attempt> {
        match knock {
            Knock::Push(Push::Granted { token, grant }) if token == self.claim.token => {
                if believable(&grant) {
                    return Some(Attempt::Granted { grant, confirm: true });
                }
                // Read too late: asked for again, which proves it anew, or hands it on.
                self.look_by(Moment::now());
            }
            Knock::Push(Push::LookAgain { token, after }) if token == self.claim.token => {
                self.look_by(Moment::now() + after);
                // Said to the first in line: however far back it was when it last asked, from now on its
                // messages are proven as often as the head's.
                self.moved_to(0);
            }
            Knock::Push(_) => {}
            Knock::Seats => {
                if self.room.deserted() {
                    return Some(Attempt::Deserted);
                }
                if self.room.stands_for_another_than(self.own_ticket) {
                    return Some(Attempt::UsedUp);
                }
                if self.polling() {
                    self.ask_at = self.ask_at.min(Moment::now() + self.poll_pause());
                }
            }
            Knock::Resync => self.look_by(Moment::now()),
            Knock::Close => return Some(Attempt::Closed),
        }
        None
    }

    /// The store answered an acquire. `Some` ends the attempt.
    fn answered(&mut self, answer: Result<Acquire, StoreError>) -> Option<Attempt> {
        let now = Moment::now();
        if let Some(grant) = self.pushed.take() {
            match &answer {
                // Asked before the grant: the grant stands.
                Ok(Acquire::Queued(_)) if believable(&grant) => {
                    return Some(Attempt::Granted { grant, confirm: true });
                }
                // Whether the question was heard is unknown: the token is given back.
                Err(_) => return Some(Attempt::UsedUp),
                Ok(_) => self.look_by(now),
            }
        }
        match answer {
            Ok(Acquire::Granted(grant)) if believable(&grant) => {
                return Some(Attempt::Granted { grant, confirm: false });
            }
            // Too slow an answer: ask again, which starts the lease anew.
            Ok(Acquire::Granted(_)) => self.ask_at = now,
            Ok(Acquire::Revoked) => return Some(Attempt::UsedUp),
            Ok(Acquire::Queued(place)) => {
                self.failing_since = None;
                self.ticket = Some(place.ticket);
                self.moved_to(place.position);
                let by_itself = now + self.pause(&place);
                self.ask_at = self.look_by.take().map_or(by_itself, |by| by.min(by_itself));
                *lock(&self.room.seen) = Seen { holder: place.holder, answered: true, failed: None };
            }
            Err(error) => {
                lock(&self.room.seen).failed = Some(error.clone());
                let since = *self.failing_since.get_or_insert(now);
                if !error.is_passing() || since.until(now) >= self.core.options.patience {
                    return Some(Attempt::Failed(error));
                }
                tracing::debug!(name = %self.room.name, %error, "waiting goes on");
                self.ask_at = now + self.poll_pause();
            }
        }
        None
    }

    /// Where we stand now, as far as is known.
    fn moved_to(&self, position: usize) {
        let before = std::mem::replace(&mut lock(&self.room.place).0, position);
        if before != position {
            self.core.rooms.tell_store(self.core);
        }
    }

    fn look_by(&mut self, by: Moment) {
        self.look_by = Some(self.look_by.map_or(by, |old| old.min(by)));
        self.ask_at = self.ask_at.min(by);
    }

    /// How long until the next question.
    fn pause(&mut self, place: &Place) -> Duration {
        if self.polling() {
            // At the head of the queue the lock can be free any moment.
            return self.poll_pause();
        }
        self.polls = 0;
        // However short a time was set: never a busy loop.
        let at_most = self.core.options.ask_again_within.max(PER_POSITION);
        let pause = ask_again_after(place).min(at_most);
        // Those that came together do not march in step; near the head nothing is late or early.
        if place.position < NEAR { pause } else { jittered(pause) }
    }

    fn polling(&self) -> bool {
        !self.claim.listens || self.core.rooms.deaf.load(Ordering::Relaxed)
    }

    /// Exponential backoff with jitter, never a busy loop.
    fn poll_pause(&mut self) -> Duration {
        let options = &self.core.options;
        let pause = match self.room.retry_every() {
            Some(fixed) => fixed,
            None => options.poll_interval.saturating_mul(1 << self.polls.min(16)).min(options.max_poll_interval),
        };
        self.polls = self.polls.saturating_add(1);
        // A waiter that has not asked for three seconds is passed over.
        jittered(pause.clamp(Duration::from_millis(1), Duration::from_secs(1)))
    }
}

/// When a waiter that is told when its turn comes asks again all the same.
fn ask_again_after(place: &Place) -> Duration {
    let behind_foreign = place.holder.as_ref().is_some_and(|h| h.foreign || h.ttl_left.is_none());
    if behind_foreign && place.position == 0 {
        return BEHIND_FOREIGN;
    }
    let back = |position: usize| u32::try_from(position).unwrap_or(u32::MAX);
    let longest = LESS_OFTEN.saturating_mul(back(place.position.saturating_sub(NEAR - 1)));
    let longest = ASK_EVERY.saturating_add(longest).min(ASK_AT_LEAST_EVERY);
    // Behind a key without expiry only the head asks often.
    let left = place.holder.as_ref().map_or(Duration::ZERO, |h| h.ttl_left.unwrap_or(longest));
    let after_end = left.saturating_add(Duration::from_millis(1));
    after_end.saturating_add(PER_POSITION.saturating_mul(back(place.position))).min(longest)
}

/// Enough of the lease is left to begin with it.
fn believable(grant: &Grant) -> bool {
    Belief::new(grant.asked_at, grant.lasts).is_valid(Moment::now() + grant.lasts / 4)
}

/// Between three quarters and the whole of a pause, so that many do not march in step.
pub(crate) fn jittered(pause: Duration) -> Duration {
    let random = getrandom::u32().unwrap_or(0) % 256;
    pause - pause / 1_024 * random
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{HolderId, Owner};

    fn place(position: usize, ttl_left: Option<Duration>) -> Place {
        let holder = Holder {
            id: HolderId::of(b"x"),
            owner: Owner::default(),
            fence: None,
            since_ms: 0,
            ttl: ttl_left,
            ttl_left,
            revoked: false,
            foreign: false,
            listens: true,
            connected: None,
        };
        Place { ticket: Ticket(1), position, holder: Some(holder) }
    }

    #[test]
    fn those_further_back_ask_less_often() {
        let hour = Some(Duration::from_secs(3_600));
        let after = |position| ask_again_after(&place(position, hour));
        assert_eq!([0, 7, 8, 27].map(after), [5_000, 5_000, 5_500, 15_000].map(Duration::from_millis));
        assert_eq!([57, 58, 1_000, usize::MAX].map(after), [30; 4].map(Duration::from_secs));
    }

    #[test]
    fn everybody_asks_soon_after_the_end_of_a_lease() {
        let left = Some(Duration::from_secs(2));
        let after = |position| ask_again_after(&place(position, left));
        assert_eq!([0, 1, 100].map(after), [2_001, 2_021, 4_001].map(Duration::from_millis));
        let nobody = Place { holder: None, ..place(3, None) };
        assert_eq!(ask_again_after(&nobody), Duration::from_millis(61));
    }

    #[test]
    fn only_the_head_asks_often_behind_what_sends_no_message() {
        assert_eq!(ask_again_after(&place(0, None)), BEHIND_FOREIGN);
        assert_eq!(ask_again_after(&place(1, None)), ASK_EVERY);
        assert_eq!(ask_again_after(&place(500, None)), ASK_AT_LEAST_EVERY);
    }

    #[test]
    fn a_pause_is_shortened_by_a_quarter_at_most() {
        for pause in [Duration::ZERO, Duration::from_nanos(5), Duration::from_secs(30), Duration::MAX] {
            for _ in 0..200 {
                let some = jittered(pause);
                assert!(some <= pause && some >= pause / 4 * 3, "{some:?} of {pause:?}");
            }
        }
    }
}
