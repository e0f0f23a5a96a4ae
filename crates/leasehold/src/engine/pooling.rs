//! Any of several: a request for one or more members of a pool, which are ordinary locks.
//!
//! What is free is taken by tries. Whoever has to wait draws a ticket and sits in the room of every member
//! under it, so that the queues of all members have one order; the first rooms that are granted their lock
//! serve the request, and the others move on to whoever is next.
//!
//! A request for several must never hold a part while another one holds the rest. So they collect one at a
//! time, under a lock of the pool's own, the *turn*; it is asked for with the same ticket. Requests for one
//! hold nothing while they wait and need no turn; nor does a request for several that takes what is free at
//! once, or gives it back.

use std::future::pending;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::{join_all, select_all, try_join_all};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use super::acquiring::{Ended, FIRST_PAUSE, LONGEST_PAUSE, Wait, Wish, received, try_once, wait, worth_asking_again};
use super::rooms::{Room, Seen, jittered};
use super::seat::{Arrival, Reply, Seat};
use super::{Alive, Core, lock};
use crate::clock::{Moment, sleep_until};
use crate::error::{Error, Operation};
use crate::event::Transition;
use crate::facts::{LockName, Token, Ttl};
use crate::guard::Guard;
use crate::store::{StoreErrorKind, Ticket};
use crate::view::{LockInfo, PoolMember};

/// The lease of the turn, and of what is collected under it, until the set is whole: so long a collector
/// that died keeps others from collecting.
const COLLECTING: Duration = Duration::from_secs(5);

/// What requests for one pool share.
pub(crate) struct PoolParts {
    pub(crate) name: LockName,
    pub(crate) turn: LockName,
    pub(crate) members: Vec<Member>,
}

pub(crate) struct Member {
    pub(crate) index: u32,
    pub(crate) name: LockName,
}

/// One member that was taken: its place among the members, and its guard.
pub(crate) type Taken = (usize, Guard);

/// Takes `count` members as wished; the wish names the pool.
pub(crate) async fn acquire(
    alive: &Arc<Alive>,
    pool: &PoolParts,
    count: usize,
    wish: Wish,
) -> Result<Vec<Taken>, Error> {
    let core = &alive.0;
    // Before the look: a shutdown either is seen here, or waits for this call.
    let _call = core.call();
    if core.closing.is_cancelled() {
        return Err(Error::ShutDown { name: wish.name });
    }
    let hunt = Hunt::new(alive, pool, count, wish);
    let outcome = {
        let mut obtaining = pin!(hunt.obtain());
        match hunt.wish.wait.answer_by(hunt.began, core.options.answer_within) {
            None => obtaining.await,
            Some(by) => tokio::select! {
                biased;
                outcome = &mut obtaining => outcome,
                () = sleep_until(Some(by)) => Err(Ended::Late),
            },
        }
    };
    let waited = hunt.began.until(Moment::now());
    match outcome {
        Ok((mut taken, handed_over)) => {
            taken.sort_by_key(|(which, _)| *which);
            for (_, guard) in &taken {
                core.stats.total_locks.add_one();
                tracing::debug!(name = %guard.name(), ?waited, fence = ?guard.fence(), "acquired from its pool");
                core.observe(&Transition::Acquired { name: guard.name().as_str(), waited, handed_over });
                if handed_over {
                    core.figures.handed_over(guard.held_for());
                }
            }
            Ok(taken)
        }
        Err(Ended::Error(error)) => Err(error),
        Err(Ended::Late) => Err(hunt.late(waited)),
    }
}

/// One request under way.
struct Hunt<'a> {
    alive: &'a Arc<Alive>,
    pool: &'a PoolParts,
    count: usize,
    wish: Wish,
    began: Moment,
    /// What is known of each member.
    seen: Vec<Mutex<Seen>>,
    seen_of_turn: Mutex<Seen>,
}

impl<'a> Hunt<'a> {
    fn new(alive: &'a Arc<Alive>, pool: &'a PoolParts, count: usize, wish: Wish) -> Self {
        let seen = pool.members.iter().map(|_| Mutex::default()).collect();
        Self { alive, pool, count, wish, began: Moment::now(), seen, seen_of_turn: Mutex::default() }
    }

    /// The members, and whether others handed them over.
    async fn obtain(&self) -> Result<(Vec<Taken>, bool), Ended> {
        let mut ticket = None;
        loop {
            let mut turn = None;
            let mut waited = false;
            if self.count > 1 {
                turn = self.try_turn_and_draw(&mut ticket).await?;
                if turn.is_none()
                    && let Some(taken) = self.take_at_once().await?
                {
                    return Ok((taken, false));
                }
                if turn.is_none() {
                    turn = Some(self.wait_for_turn(&mut ticket).await?);
                    waited = true;
                }
            }
            if let Some(found) = self.collect(turn, waited, &mut ticket).await? {
                return Ok(found);
            }
            tracing::debug!(pool = %self.pool.name, "the turn was lost while collecting; from the start");
        }
    }

    /// Tries for the turn and draws a ticket at the same time, so that a request that has to wait is as old as its
    /// first question.
    async fn try_turn_and_draw(&self, ticket: &mut Option<Ticket>) -> Result<Option<Guard>, Ended> {
        if self.wish.wait == Wait::Not {
            return self.try_turn().await;
        }
        let (turn, drawn) = tokio::join!(self.try_turn(), self.draw(ticket));
        drawn?;
        turn
    }

    /// The right to hold a part, if nobody has it.
    async fn try_turn(&self) -> Result<Option<Guard>, Ended> {
        if !self.may_try(&self.pool.turn) {
            return Ok(None);
        }
        try_once(self.alive, &self.terms(&self.pool.turn), &self.seen_of_turn).await
    }

    async fn wait_for_turn(&self, ticket: &mut Option<Ticket>) -> Result<Guard, Ended> {
        if self.wish.wait == Wait::Not {
            return Err(Ended::Late);
        }
        let ticket = self.draw(ticket).await?;
        wait(self.alive, &self.terms(&self.pool.turn), Some(ticket), self.began, &self.seen_of_turn).await
    }

    /// Somebody else collects. It may want other members than we do, or be about to finish: all that we want
    /// is taken if it is free now and nobody came before us.
    async fn take_at_once(&self) -> Result<Option<Vec<Taken>>, Ended> {
        let free = self.look().await?;
        if free.len() < self.count || (self.wish.wait != Wait::Not && self.others_wait_for_turn().await) {
            return Ok(None);
        }
        let mut taken = Vec::with_capacity(self.count);
        self.take_of(free, &mut taken).await?;
        if taken.len() < self.count {
            // Given back: nobody waits with a part in hand and no turn.
            return Ok(None);
        }
        self.settle(&taken);
        Ok(Some(taken))
    }

    /// Whether somebody stands in line for the turn, as far as is known.
    async fn others_wait_for_turn(&self) -> bool {
        let (core, turn) = (self.core(), &self.pool.turn);
        core.rooms.is_open(turn) || core.within(core.store.queue(turn)).await.is_ok_and(|line| !line.is_empty())
    }

    /// `None`: the turn was lost, and everything is given back.
    async fn collect(
        &self,
        turn: Option<Guard>,
        waited_for_turn: bool,
        ticket: &mut Option<Ticket>,
    ) -> Result<Option<(Vec<Taken>, bool)>, Ended> {
        let mut taken = Vec::with_capacity(self.count);
        // A request that has waited for its turn is older than others that wait for the members. A try would pass a free
        // member to the first of them; its ticket puts it before them.
        if !waited_for_turn {
            self.take_free(&mut taken).await?;
        }
        let waited = taken.len() < self.count;
        let mut seats = Seats::default();
        if waited {
            if self.wish.wait == Wait::Not {
                self.remember(&seats, &taken);
                return Err(Ended::Late);
            }
            let ticket = self.draw(ticket).await?;
            if !self.wait_for_the_rest(turn.as_ref(), ticket, &mut taken, &mut seats).await? {
                return Ok(None);
            }
        }
        if let Some(turn) = turn {
            self.settle(&taken);
            // The next who collects stands in line, by its older ticket, about when we have left it:
            // otherwise those who came after it would be served in between.
            self.core().spawn(async move {
                if let Err(error) = turn.release().await {
                    tracing::debug!(%error, "the turn is released in the background");
                }
                drop(seats);
            });
        }
        Ok(Some((taken, waited)))
    }

    /// Takes what is free: at first, in one round trip, those a free pool would give; then those that a
    /// look at all of them finds.
    async fn take_free(&self, taken: &mut Vec<Taken>) -> Result<(), Ended> {
        let may_try = |which: &usize| self.may_try(&self.pool.members[*which].name);
        let first: Vec<usize> = (0..self.pool.members.len()).filter(may_try).take(self.count).collect();
        self.try_these(&first, taken).await?;
        if taken.len() == self.count || first.is_empty() {
            return Ok(());
        }
        let free = self.look().await?;
        self.take_of(free.into_iter().filter(|which| !first.contains(which)), taken).await
    }

    /// Takes as many as are missing of those that were seen free.
    async fn take_of(&self, free: impl IntoIterator<Item = usize>, taken: &mut Vec<Taken>) -> Result<(), Ended> {
        let mut free = free.into_iter().filter(|which| self.may_try(&self.pool.members[*which].name));
        while taken.len() < self.count {
            let next: Vec<usize> = free.by_ref().take(self.count - taken.len()).collect();
            if next.is_empty() {
                break;
            }
            self.try_these(&next, taken).await?;
        }
        Ok(())
    }

    /// Whoever can wait does not overtake tasks of its own process that wait already.
    fn may_try(&self, name: &LockName) -> bool {
        self.wish.wait == Wait::Not || !self.core().rooms.is_open(name)
    }

    async fn try_these(&self, which: &[usize], taken: &mut Vec<Taken>) -> Result<(), Ended> {
        let tries = which.iter().map(async |&which| {
            let wish = self.terms(&self.pool.members[which].name);
            let guard = try_once(self.alive, &wish, &self.seen[which]).await?;
            Ok(guard.map(|guard| (which, guard)))
        });
        // All are waited for, whatever one says: what the others got is given back with their guards.
        for answer in join_all(tries).await {
            taken.extend(answer?);
        }
        Ok(())
    }

    /// Looks at every member. Returns those that are free.
    async fn look(&self) -> Result<Vec<usize>, Ended> {
        let core = self.core();
        let looks = self.pool.members.iter().map(|member| core.store.holder(&member.name));
        let found = match core.within(try_join_all(looks)).await {
            Ok(found) => found,
            // Whoever waits finds out what is free by waiting.
            Err(error) if self.wish.wait != Wait::Not && worth_asking_again(&error) => return Ok(Vec::new()),
            Err(error) => return Err(Ended::Error(core.store_error(Operation::Acquire, &self.pool.name, error))),
        };
        let mut free = Vec::new();
        for (which, holder) in found.into_iter().enumerate() {
            if holder.is_none() {
                free.push(which);
            }
            *lock(&self.seen[which]) = Seen::held_by(holder);
        }
        Ok(free)
    }

    /// The request's one place in every queue.
    async fn draw(&self, ticket: &mut Option<Ticket>) -> Result<Ticket, Ended> {
        if let Some(ticket) = *ticket {
            return Ok(ticket);
        }
        let core = self.core();
        let (failing_since, mut pause) = (Moment::now(), FIRST_PAUSE);
        loop {
            let error = match core.within(core.store.ticket()).await {
                Ok(drawn) => return Ok(*ticket.insert(drawn)),
                Err(error) => error,
            };
            lock(&self.seen_of_turn).failed = Some(error.clone());
            if !worth_asking_again(&error) || failing_since.until(Moment::now()) >= core.options.patience {
                return Err(Ended::Error(core.store_error(Operation::Acquire, &self.pool.name, error)));
            }
            tokio::select! {
                () = tokio::time::sleep(jittered(pause)) => {}
                () = core.closing.cancelled() => return Err(Ended::shut_down(&self.pool.name)),
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Waits in the rooms of all members that are not taken yet. `false`: the turn was lost.
    async fn wait_for_the_rest(
        &self,
        turn: Option<&Guard>,
        ticket: Ticket,
        taken: &mut Vec<Taken>,
        seats: &mut Seats,
    ) -> Result<bool, Ended> {
        let (reply, mut arrivals) = mpsc::unbounded_channel();
        for which in 0..self.pool.members.len() {
            if !taken.iter().any(|(mine, _)| *mine == which) {
                self.sit(which, ticket, &reply, seats);
            }
        }
        let deadline = self.wish.wait.deadline(self.began);
        while taken.len() < self.count {
            tokio::select! {
                biased;
                () = lost(turn) => return Ok(false),
                gone = first_lost(taken) => {
                    let (which, _) = taken.swap_remove(gone);
                    self.sit(which, ticket, &reply, seats);
                }
                // Never `None`: we have a sender ourselves. What arrives beyond what is wanted is dropped with
                // the channel, which gives it back.
                Some((which, answer)) = arrivals.recv() => match received(answer.map_err(Ended::Error)?)? {
                    Some(guard) => taken.push((which, guard)),
                    None => {
                            self.sit(which, ticket, &reply, seats);
                    }
                },
                () = sleep_until(deadline) => {
                    self.take_last(&mut arrivals, taken);
                    if taken.len() < self.count {
                        self.remember(seats, taken);
                        join_all(seats.0.iter().map(|(_, room)| room.got_up_and_left())).await;
                        return Err(Ended::Late);
                    }
                }
            }
        }
        Ok(true)
    }

    fn sit(&self, which: usize, ticket: Ticket, reply: &UnboundedSender<Arrival>, seats: &mut Seats) {
        let wish = self.terms(&self.pool.members[which].name);
        let seat = Seat {
            lease: wish.lease(Token::random()),
            retry_every: wish.retry_every,
            ticket: Some(ticket),
            reply: Reply::Some(reply.clone(), which),
        };
        seats.0.push((which, self.core().rooms.sit(self.alive, seat)));
    }

    /// The time is over: what has arrived still counts.
    fn take_last(&self, arrivals: &mut UnboundedReceiver<Arrival>, taken: &mut Vec<Taken>) {
        // Closed first, so that a grant either is here or stays with its room.
        arrivals.close();
        while let Ok((which, answer)) = arrivals.try_recv() {
            if let Ok(Ok(Some(guard))) = answer.map(received)
                && taken.len() < self.count
            {
                taken.push((which, guard));
            }
        }
    }

    /// What the rooms know of who holds what.
    fn remember(&self, seats: &Seats, taken: &[Taken]) {
        for (which, room) in &seats.0 {
            room.tell_what_was_seen(&self.seen[*which]);
        }
        // Ours, and free again in a moment.
        for (which, _) in taken {
            *lock(&self.seen[*which]) = Seen::held_by(None);
        }
    }

    /// The time is over: says no, or that nobody knows.
    fn late(self, waited: Duration) -> Error {
        let core = &self.alive.0;
        let open = |seen: Mutex<Seen>| seen.into_inner().unwrap_or_else(PoisonError::into_inner);
        let of_turn = open(self.seen_of_turn);
        let seen: Vec<Seen> = self.seen.into_iter().map(open).collect();
        let failed = seen.iter().filter(|seen| seen.is_failing()).find_map(Seen::unknown);
        if failed.is_some() || !(of_turn.answered || seen.iter().any(|seen| seen.answered)) {
            let source = failed.or(of_turn.failed).unwrap_or(StoreErrorKind::NoAnswer.into());
            return core.store_error(Operation::Acquire, &self.pool.name, source);
        }
        core.stats.not_acquired.add_one();
        tracing::debug!(pool = %self.pool.name, wanted = self.count, ?waited, "not acquired");
        core.observe(&Transition::NotAcquired { name: self.pool.name.as_str(), waited });
        let member = |(member, seen): (&Member, Seen)| PoolMember {
            index: member.index,
            lock: LockInfo { name: member.name.clone(), holder: seen.holder, waiters: Vec::new() },
        };
        Error::PoolBusy {
            name: self.pool.name.clone(),
            wanted: self.count,
            members: self.pool.members.iter().zip(seen).map(member).collect(),
            waited: if self.wish.wait == Wait::Not { Duration::ZERO } else { waited },
            store: core.store.describe(),
        }
    }

    /// The request for one lock of the pool. Those of a set that is not whole yet are kept on short terms.
    fn terms(&self, name: &LockName) -> Wish {
        let mut wish = Wish { name: name.clone(), ..self.wish.clone() };
        if self.count > 1 {
            wish.ttl = Ttl::new(COLLECTING.min(self.wish.ttl.duration())).unwrap_or(self.wish.ttl);
            wish.renew_every = Some(self.core().options.renew_every(wish.ttl));
            wish.max_hold = None;
        }
        wish
    }

    /// A set that is whole is held on the terms that were asked for.
    fn settle(&self, taken: &[Taken]) {
        for (_, guard) in taken {
            guard.settle(self.wish.ttl, self.wish.renew_every, self.wish.max_hold);
        }
    }

    fn core(&self) -> &'a Arc<Core> {
        &self.alive.0
    }
}

/// The rooms in which a request sits; dropped, it gets up.
#[derive(Default)]
struct Seats(Vec<(usize, Arc<Room>)>);

impl Drop for Seats {
    fn drop(&mut self) {
        for (_, room) in &self.0 {
            room.got_up();
        }
    }
}

async fn lost(turn: Option<&Guard>) {
    match turn {
        Some(turn) => drop(turn.lost().await),
        None => pending().await,
    }
}

/// The place of the first one that is lost.
async fn first_lost(taken: &[Taken]) -> usize {
    if taken.is_empty() {
        return pending().await;
    }
    let lost = taken.iter().enumerate().map(|(place, (_, guard))| {
        Box::pin(async move {
            guard.lost().await;
            place
        })
    });
    select_all(lost).await.0
}
