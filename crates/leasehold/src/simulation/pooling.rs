//! Requests for members of a pool, as [`PoolCall`] decides. Replaces `engine/pooling.rs`.

use std::future::pending;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{join_all, select_all};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use super::acquiring::{Ended, received};
use super::coverage::Situation;
use super::lease::Guard;
use super::plan::renew_every;
use super::process::{Arrival, CallError, Process, SeatReply, Seated, Wait, Wish};
use crate::client::pool::{Do, Event, PoolCall};
use crate::client::retry::Retry;
use crate::client::worth_asking_again;
use crate::clock::Moment;
use crate::facts::{LockName, Ttl};
use crate::store::Ticket;

/// The lease of the collector lock, and of the members collected under it until the set is complete.
const COLLECTING: Duration = Duration::from_secs(5);

pub(super) struct PoolParts {
    pub(super) collector: LockName,
    pub(super) members: Vec<LockName>,
}

/// One acquired member: its index among the members, and its guard.
pub(super) type Taken = (usize, Guard);

impl Process {
    /// Acquires `count` members; the name in the request is ignored.
    pub(super) async fn acquire_members(
        self: Rc<Self>,
        pool: PoolParts,
        count: usize,
        wish: Wish,
    ) -> Result<Vec<Taken>, Ended> {
        let began = self.now();
        let by = wish.wait.answer_by(began);
        let hunt = Hunt { process: &self, pool: &pool, count, wish, began };
        let mut obtaining = Box::pin(hunt.obtain());
        let outcome = tokio::select! {
            biased;
            outcome = &mut obtaining => outcome,
            () = self.world.sleep_until(by) => Err(Ended::Late),
        };
        drop(obtaining);
        outcome
    }
}

/// One request in progress.
struct Hunt<'a> {
    process: &'a Rc<Process>,
    pool: &'a PoolParts,
    count: usize,
    wish: Wish,
    began: Moment,
}

impl Hunt<'_> {
    async fn obtain(&self) -> Result<Vec<Taken>, Ended> {
        let may_try = |which: usize| self.may_try(&self.pool.members[which]);
        let mut call = PoolCall::new(self.count, self.pool.members.len(), self.wish.wait != Wait::Not);
        let mut collector: Option<Guard> = None;
        let mut taken = Vec::with_capacity(self.count);
        let mut seats = Seats::default();
        let mut next = call.begin(&may_try);
        loop {
            let event = match next {
                Do::TryCollectorLock { draw } => {
                    let (tried, drawn) = futures_util::join!(self.try_collector_lock(), async {
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
                    collector = Some(self.process.wait(&wish, Some(ticket), self.began).await?);
                    Event::CollectorLockGranted
                }
                Do::WaitForRest(ticket) => {
                    self.check_collecting(collector.as_ref(), &taken);
                    if self.wait_for_rest(collector.as_ref(), ticket, &mut taken, &mut seats).await? {
                        Event::Complete
                    } else {
                        self.process.world.saw(Situation::CollectorLockLost);
                        Event::CollectorLockLost
                    }
                }
                Do::GiveBack => {
                    self.process.world.saw(Situation::PoolGaveBack);
                    taken.clear();
                    seats = Seats::default();
                    collector = None;
                    next = call.given_back(&may_try);
                    continue;
                }
                Do::Late => return Err(Ended::Late),
                Do::Done { .. } => {
                    if self.count > 1 {
                        self.settle(&taken);
                    }
                    self.stop_collecting(collector, seats);
                    return Ok(taken);
                }
            };
            next = call.next(event, &may_try);
        }
    }

    /// Checks that a request that holds a part and waits has the collector lock.
    fn check_collecting(&self, collector: Option<&Guard>, taken: &[Taken]) {
        if self.count > 1 && collector.is_none() && !taken.is_empty() {
            self.process
                .world
                .fail(|| format!("{} waits with a part of a set, without the collector lock", self.process.name()));
        }
    }

    async fn try_collector_lock(&self) -> Result<Option<Guard>, Ended> {
        if !self.may_try(&self.pool.collector) {
            return Ok(None);
        }
        self.process.try_once(&self.terms(&self.pool.collector)).await
    }

    async fn others_wait_to_collect(&self) -> bool {
        let collector = &self.pool.collector;
        self.process.is_open(collector)
            || self.process.within(self.process.ask_waiters(collector)).await.is_ok_and(|waiters| waiters > 0)
    }

    /// Releases the collector lock to the next request, then leaves the seats.
    fn stop_collecting(&self, collector: Option<Guard>, seats: Seats) {
        let Some(collector) = collector else { return };
        self.process.spawn(async move {
            collector.release().await;
            drop(seats);
        });
    }

    fn may_try(&self, name: &LockName) -> bool {
        self.wish.wait == Wait::Not || !self.process.is_open(name)
    }

    async fn try_these(&self, which: &[usize], taken: &mut Vec<Taken>) -> Result<Vec<usize>, Ended> {
        let tries = which.iter().map(async |&which| {
            let wish = self.terms(&self.pool.members[which]);
            let guard = self.process.try_once(&wish).await?;
            Ok::<_, Ended>(guard.map(|guard| (which, guard)))
        });
        let mut took = Vec::new();
        for answer in join_all(tries).await {
            if let Some((which, guard)) = answer? {
                took.push(which);
                taken.push((which, guard));
            }
        }
        Ok(took)
    }

    async fn look(&self) -> Result<Vec<usize>, Ended> {
        let looks = self.pool.members.iter().map(|name| self.process.ask_holder(name));
        let looking = async { join_all(looks).await.into_iter().collect::<Result<Vec<_>, _>>() };
        match self.process.within(looking).await {
            Ok(found) => {
                Ok(found.iter().enumerate().filter(|(_, holder)| holder.is_none()).map(|(which, _)| which).collect())
            }
            Err(error) if self.wish.wait != Wait::Not && worth_asking_again(&error) => Ok(Vec::new()),
            Err(error) => Err(CallError::Store(error).into()),
        }
    }

    /// Draws the ticket of the request, valid in every queue.
    async fn draw(&self) -> Result<Ticket, Ended> {
        let process = self.process;
        let mut retry = Retry::new();
        loop {
            let asked_at = process.now();
            let error = match process.within(process.ask_ticket()).await {
                Ok(drawn) => return Ok(drawn),
                Err(error) => error,
            };
            let Some(pause) = process.decide(|cx| retry.failed(cx, asked_at, &error)) else {
                return Err(CallError::Store(error).into());
            };
            process.world.sleep(pause).await;
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
            tokio::select! {
                biased;
                () = lost(collector) => return Ok(false),
                gone = first_lost(taken) => {
                    self.process.world.saw(Situation::MemberLost);
                    let (which, _) = taken.swap_remove(gone);
                    self.sit(which, ticket, &reply, seats);
                }
                Some((which, answer)) = arrivals.recv() => {
                    seats.waiting -= 1;
                    match received(answer?)? {
                        Some(guard) => taken.push((which, guard)),
                        None => self.sit(which, ticket, &reply, seats),
                    }
                }
                () = self.process.world.sleep_until(deadline) => {
                    let got_up = seats.leave().await;
                    self.take_last(&mut arrivals, seats.waiting - got_up, taken).await;
                    if taken.len() < self.count {
                        return Err(Ended::Late);
                    }
                }
            }
        }
        Ok(true)
    }

    fn sit(&self, which: usize, ticket: Ticket, reply: &UnboundedSender<Arrival>, seats: &mut Seats) {
        let wish = self.terms(&self.pool.members[which]);
        let reply = SeatReply::Some(reply.clone(), which);
        seats.seated.push(Seated::sit(self.process, &wish, Some(ticket), reply));
        seats.waiting += 1;
    }

    async fn take_last(&self, arrivals: &mut UnboundedReceiver<Arrival>, coming: usize, taken: &mut Vec<Taken>) {
        for _ in 0..coming {
            let Some((which, answer)) = arrivals.recv().await else { return };
            if let Ok(Ok(Some(guard))) = answer.map(received)
                && taken.len() < self.count
            {
                taken.push((which, guard));
            }
        }
    }

    /// The request for one member. Members of an incomplete set are held on short leases.
    fn terms(&self, name: &LockName) -> Wish {
        let mut wish = Wish { name: name.clone(), ..self.wish.clone() };
        if self.count > 1 {
            wish.ttl = Ttl::new(COLLECTING.min(self.wish.ttl.duration())).unwrap_or(self.wish.ttl);
            wish.renew_every = Some(renew_every(wish.ttl));
            wish.max_hold = None;
        }
        wish
    }

    /// Holds a complete set on the terms of the request.
    fn settle(&self, taken: &[Taken]) {
        for (_, guard) in taken {
            guard.settle(self.wish.ttl, self.wish.renew_every, self.wish.max_hold);
        }
    }
}

/// The seats of a request. Dropping it leaves all of them.
#[derive(Default)]
struct Seats {
    seated: Vec<Seated>,
    waiting: usize,
}

impl Seats {
    async fn leave(&mut self) -> usize {
        let left = join_all(self.seated.iter_mut().map(Seated::leave)).await;
        left.into_iter().filter(|was_waiting| *was_waiting).count()
    }
}

async fn lost(collector: Option<&Guard>) {
    match collector {
        Some(collector) => drop(collector.lost().await),
        None => pending().await,
    }
}

/// The index of the first lost member.
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
