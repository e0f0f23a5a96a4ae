//! Carries out requests for members of a pool, as [`PoolCall`] decides.

use std::future::pending;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use super::EngineHandle;
use super::acquiring::{is_usable, received, try_once, wait};
use super::call::{CallScope, Ended};
use super::core::{Core, lock};
use super::guard::{Guard, first_lost};
use super::held_lease::HeldLease;
use super::waiting::{Arrival, Reply, Seated};
use super::wish::{Wait, Wish};
use crate::client::pool::{Do, Event, PoolCall};
use crate::client::retry::Retry;
use crate::client::{Seen, worth_asking_again};
use crate::clock::{Moment, sleep, sleep_until};
use crate::error::Error;
use crate::facts::{LockName, Ttl};
use crate::inspect::view::{LockInfo, PoolMember};
use crate::store::{Operation, StoreErrorKind, Ticket};

/// The lease of the collector lock, and of the members collected under it until the set is complete. A collector that
/// died keeps others from collecting for this long.
const COLLECTING: Duration = Duration::from_secs(5);

/// What all requests for one pool share.
pub(crate) struct PoolParts {
    pub(crate) name: LockName,
    /// The lock that a request for several members holds while it collects them.
    pub(crate) collector: LockName,
    pub(crate) members: Vec<Member>,
}

pub(crate) struct Member {
    pub(crate) index: u32,
    pub(crate) name: LockName,
}

/// One member that was taken: its place among the members, and its guard.
pub(crate) type Taken = (usize, Guard);

/// Acquires `count` members; the wish names the pool.
pub(crate) async fn acquire(
    engine: &Arc<EngineHandle>,
    pool: &PoolParts,
    count: usize,
    wish: Wish,
) -> Result<Vec<Taken>, Error> {
    let call = CallScope::begin(&engine.core, &wish.name, wish.wait)?;
    let hunt = Hunt::new(engine, pool, count, wish, call.began);
    let (outcome, waited) = {
        let obtain = pin!(hunt.obtain());
        call.run(obtain).await
    };
    match outcome {
        Ok((mut taken, handed_over)) => {
            taken.sort_by_key(|(which, _)| *which);
            for (_, guard) in &taken {
                call.acquired(guard.name(), guard.try_fence(), waited, handed_over);
                if handed_over {
                    engine.core.publisher.metrics.handed_over(guard.held_for());
                }
            }
            Ok(taken)
        }
        Err(Ended::Error(error)) => Err(error),
        Err(Ended::Late) => Err(hunt.late(&call, waited)),
    }
}

/// One request in progress.
struct Hunt<'a> {
    engine: &'a Arc<EngineHandle>,
    pool: &'a PoolParts,
    count: usize,
    wish: Wish,
    began: Moment,
    /// What is known about each member.
    seen: Vec<Mutex<Seen>>,
    seen_of_collector: Mutex<Seen>,
}

impl<'a> Hunt<'a> {
    fn new(engine: &'a Arc<EngineHandle>, pool: &'a PoolParts, count: usize, wish: Wish, began: Moment) -> Self {
        let seen = pool.members.iter().map(|_| Mutex::default()).collect();
        Self { engine, pool, count, wish, began, seen, seen_of_collector: Mutex::default() }
    }

    /// Returns the members, and whether others handed them over.
    async fn obtain(&self) -> Result<(Vec<Taken>, bool), Ended> {
        let may_try = |which: usize| self.may_try(&self.pool.members[which].name);
        let mut call = PoolCall::new(self.count, self.pool.members.len(), self.wish.wait != Wait::Not);
        let mut collector: Option<Guard> = None;
        let mut taken = Vec::with_capacity(self.count);
        let mut seats = Seats::default();
        let mut next = call.begin(&may_try);
        loop {
            // A member may be lost while others are tried.
            if matches!(next, Do::Done { .. }) && !taken.iter().all(|(_, guard)| is_usable(guard)) {
                next = Do::GiveBack;
            }
            let event = match next {
                Do::TryCollectorLock { draw } => {
                    let (tried, drawn) = tokio::join!(self.try_collector_lock(), async {
                        if draw { self.draw().await.map(Some) } else { Ok(None) }
                    });
                    let ticket = drawn?;
                    collector = tried?;
                    Event::CollectorLockTried { granted: collector.is_some(), ticket }
                }
                Do::Look => Event::Free(self.look().await?),
                Do::LookForWaiters => Event::OthersWait(self.others_wait_to_collect().await),
                Do::Try(which) => Event::Took(self.try_these(&which, &mut taken).await?),
                Do::Draw => Event::Drew(self.draw().await?),
                Do::WaitForCollectorLock(ticket) => {
                    let wish = self.terms(&self.pool.collector);
                    let guard = wait(self.engine, &wish, Some(ticket), self.began, &self.seen_of_collector).await?;
                    collector = Some(guard);
                    Event::CollectorLockGranted
                }
                Do::WaitForRest(ticket) => {
                    if self.wait_for_rest(collector.as_ref(), ticket, &mut taken, &mut seats).await? {
                        Event::Complete
                    } else {
                        tracing::debug!(pool = %self.pool.name, "the collector lock was lost; starting again");
                        Event::CollectorLockLost
                    }
                }
                Do::GiveBack => {
                    taken.clear();
                    seats = Seats::default();
                    collector = None;
                    next = call.given_back(&may_try);
                    continue;
                }
                Do::Late => {
                    self.remember(&seats, &taken);
                    return Err(Ended::Late);
                }
                Do::Done { waited } => {
                    if self.count > 1 {
                        self.settle(&taken);
                    }
                    self.stop_collecting(collector, seats);
                    return Ok((taken, waited));
                }
            };
            next = call.next(event, &may_try);
        }
    }

    /// Tries the collector lock.
    async fn try_collector_lock(&self) -> Result<Option<Guard>, Ended> {
        if !self.may_try(&self.pool.collector) {
            return Ok(None);
        }
        try_once(self.engine, &self.terms(&self.pool.collector), &self.seen_of_collector).await
    }

    /// Whether others wait for the collector lock, as far as is known.
    async fn others_wait_to_collect(&self) -> bool {
        let (core, collector) = (self.core(), &self.pool.collector);
        self.engine.waiting.is_open(collector)
            || core.within(core.store.queue(collector)).await.is_ok_and(|queue| !queue.is_empty())
    }

    /// Releases the collector lock to the next request before the seats are left. That request is in the queues by then,
    /// with its older ticket; otherwise requests that came after it would be served in between.
    fn stop_collecting(&self, collector: Option<Guard>, seats: Seats) {
        let Some(collector) = collector else { return };
        self.core().spawn(async move {
            if let Err(error) = collector.release().await {
                tracing::debug!(error = %format_args!("{error:#}"), "the collector lock is released in the background");
            }
            drop(seats);
        });
    }

    /// A request that can wait does not overtake tasks of its own process that wait already.
    fn may_try(&self, name: &LockName) -> bool {
        self.wish.wait == Wait::Not || !self.engine.waiting.is_open(name)
    }

    /// Tries these members. Returns those that were acquired.
    async fn try_these(&self, which: &[usize], taken: &mut Vec<Taken>) -> Result<Vec<usize>, Ended> {
        let tries = which.iter().map(async |&which| {
            let wish = self.terms(&self.pool.members[which].name);
            let guard = try_once(self.engine, &wish, &self.seen[which]).await?;
            Ok(guard.map(|guard| (which, guard)))
        });
        let mut took = Vec::new();
        // All are awaited, even if one failed: what the others acquired is released with their guards.
        for answer in join_all(tries).await {
            if let Some((which, guard)) = answer? {
                took.push(which);
                taken.push((which, guard));
            }
        }
        Ok(took)
    }

    /// Reads the holders of all members. Returns the members that are free.
    async fn look(&self) -> Result<Vec<usize>, Ended> {
        let core = self.core();
        let looks = self.pool.members.iter().map(|member| core.store.holder(&member.name));
        let found = match core.within(try_join_all(looks)).await {
            Ok(found) => found,
            // A request that waits finds out what is free by waiting.
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

    /// Draws the ticket of the request, its position in every queue.
    async fn draw(&self) -> Result<Ticket, Ended> {
        let core = self.core();
        let mut retry = Retry::new();
        loop {
            let asked_at = Moment::now();
            let error = match core.within(core.store.ticket()).await {
                Ok(drawn) => return Ok(drawn),
                Err(error) => error,
            };
            lock(&self.seen_of_collector).failed = Some(error.clone());
            let Some(pause) = core.decide(|cx| retry.failed(cx, asked_at, &error)) else {
                return Err(Ended::Error(core.store_error(Operation::Acquire, &self.pool.name, error)));
            };
            tokio::select! {
                biased;
                () = core.closing.cancelled() => return Err(Ended::shut_down(&self.pool.name)),
                () = sleep(pause) => {}
            }
        }
    }

    /// Waits in the rooms of all members that are not acquired yet. `false`: the collector lock was lost.
    async fn wait_for_rest(
        &self,
        collector: Option<&Guard>,
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
            let guards: Vec<&Guard> = taken.iter().map(|(_, guard)| guard).collect();
            tokio::select! {
                biased;
                () = lost(collector) => return Ok(false),
                (gone, _) = first_lost(&guards) => {
                    let (which, _) = taken.swap_remove(gone);
                    self.sit(which, ticket, &reply, seats);
                }
                // Never `None`: we have a sender ourselves. What arrives beyond what is wanted is dropped with
                // the channel, which releases it.
                Some((which, answer)) = arrivals.recv() => {
                    seats.waiting -= 1;
                    match received(self.guard(answer.map_err(Ended::Error)?))? {
                        Some(guard) => taken.push((which, guard)),
                        None => self.sit(which, ticket, &reply, seats),
                    }
                }
                () = sleep_until(deadline) => {
                    self.remember(seats, taken);
                    let left = seats.leave().await;
                    self.take_last(&mut arrivals, seats.waiting - left, taken).await;
                    // Leaving takes a moment, in which a member may be lost.
                    taken.retain(|(_, guard)| is_usable(guard));
                    if taken.len() < self.count {
                        self.remember(&Seats::default(), taken);
                        return Err(Ended::Late);
                    }
                }
            }
        }
        Ok(true)
    }

    fn sit(&self, which: usize, ticket: Ticket, reply: &UnboundedSender<Arrival>, seats: &mut Seats) {
        let wish = self.terms(&self.pool.members[which].name);
        let reply = Reply::Some(reply.clone(), which);
        seats.seated.push((which, self.engine.waiting.sit(&wish, Some(ticket), reply)));
        seats.waiting += 1;
    }

    /// Takes what was granted at the last moment, after the request timed out. `coming` answers are there or about to be.
    async fn take_last(&self, arrivals: &mut UnboundedReceiver<Arrival>, coming: usize, taken: &mut Vec<Taken>) {
        for _ in 0..coming {
            let Some((which, answer)) = arrivals.recv().await else { return };
            if let Ok(Ok(Some(guard))) = answer.map(|lease| received(self.guard(lease)))
                && taken.len() < self.count
            {
                taken.push((which, guard));
            }
        }
    }

    /// Records what the rooms know about the holders.
    fn remember(&self, seats: &Seats, taken: &[Taken]) {
        for (which, seated) in &seats.seated {
            if let Some(last) = seated.seen() {
                *lock(&self.seen[*which]) = last;
            }
        }
        // These are released in a moment.
        for (which, _) in taken {
            *lock(&self.seen[*which]) = Seen::held_by(None);
        }
    }

    /// Returns the error of a request that timed out: `PoolBusy`, or the store's error where the holders are unknown.
    fn late(self, call: &CallScope<'_>, waited: Duration) -> Error {
        let open = |seen: Mutex<Seen>| seen.into_inner().unwrap_or_else(PoisonError::into_inner);
        let of_collector = open(self.seen_of_collector);
        let seen: Vec<Seen> = self.seen.into_iter().map(open).collect();
        let now = Moment::now();
        let failed = seen.iter().filter(|seen| seen.is_failing(now)).find_map(|seen| seen.unknown(now));
        if failed.is_some() || !(of_collector.answered || seen.iter().any(|seen| seen.answered)) {
            let source = failed.or(of_collector.failed).unwrap_or(StoreErrorKind::NoAnswer.into());
            return call.store_error(&self.pool.name, source);
        }
        let member = |(member, seen): (&Member, Seen)| PoolMember {
            index: member.index,
            lock: LockInfo { name: member.name.clone(), holder: seen.holder, waiters: Vec::new() },
        };
        Error::PoolBusy {
            name: self.pool.name.clone(),
            wanted: self.count,
            members: self.pool.members.iter().zip(seen).map(member).collect(),
            waited: call.not_acquired(&self.pool.name, waited),
            store: call.store(),
        }
    }

    /// Returns the request for one lock of the pool. The members of an incomplete set are held on short leases.
    fn terms(&self, name: &LockName) -> Wish {
        let mut wish = Wish { name: name.clone(), ..self.wish.clone() };
        if self.count > 1 {
            wish.ttl = Ttl::new(COLLECTING.min(self.wish.ttl.duration())).unwrap_or(self.wish.ttl);
            wish.renew_every = Some(self.core().options.renew_every(wish.ttl));
            wish.max_hold = None;
        }
        wish
    }

    /// Changes the leases of a complete set to the terms of the request.
    fn settle(&self, taken: &[Taken]) {
        for (_, guard) in taken {
            guard.settle(self.wish.ttl, self.wish.renew_every, self.wish.max_hold);
        }
    }

    fn guard(&self, lease: HeldLease) -> Guard {
        Guard::new(self.engine.clone(), lease)
    }

    fn core(&self) -> &'a Arc<Core> {
        &self.engine.core
    }
}

/// The seats of a request. Dropping them leaves all rooms.
#[derive(Default)]
struct Seats {
    seated: Vec<(usize, Seated)>,
    /// How many of them have not received an answer yet.
    waiting: usize,
}

impl Seats {
    /// Leaves all rooms. Returns how many seats had no answer.
    async fn leave(&mut self) -> usize {
        let left = join_all(self.seated.iter_mut().map(|(_, seated)| seated.leave())).await;
        left.into_iter().filter(|was_waiting| *was_waiting).count()
    }
}

async fn lost(collector: Option<&Guard>) {
    match collector {
        Some(collector) => drop(collector.lost().await),
        None => pending().await,
    }
}
