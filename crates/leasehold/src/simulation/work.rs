//! What the tasks of a plan do with their locks.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use super::coverage::Situation;
use super::leases::TokenLease;
use super::plan::{Acts, COLLECTOR, Ends, Hold, TaskPlan, Terms, What};
use super::process::Process;
use super::world::World;
use crate::clock::{Moment, sleep, timeout};
use crate::engine::acquiring;
use crate::engine::by_token;
use crate::engine::guard::Guard;
use crate::engine::pooling::{self, Member, PoolParts};
use crate::engine::wish::{Wait, Wish};
use crate::error::Error;
use crate::facts::LockName;
use crate::lease::Lease;
use crate::lease::belief::Belief;
use crate::loss::LossReason;
use crate::machine::EvictReply;
use crate::options::{OnUnavailable, Options};

/// How much later than its deadline a call may return.
const LATE_BY: Duration = Duration::from_millis(250);

/// Counts a task as open until it ends, however it ends.
struct Open(Rc<World>);

impl Open {
    fn begin(world: &Rc<World>) -> Self {
        world.open_tasks.set(world.open_tasks.get() + 1);
        Self(world.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open_tasks.set(self.0.open_tasks.get() - 1);
    }
}

impl World {
    pub(super) fn start_task(self: &Rc<Self>, number: usize, task: TaskPlan) {
        let Some(process) = self.processes.borrow()[task.process].clone() else { return };
        let open = Open::begin(self);
        let life = process.clone();
        let work = async move {
            let _open = open;
            let world = process.world.clone();
            let who = format!("task {number} of {}", process.name());
            let work = Box::pin(process.work(who.clone(), task.what));
            match task.dropped_after {
                None => work.await,
                Some(limit) => {
                    if timeout(limit, work).await.is_none() {
                        world.saw(Situation::CallCancelled);
                        world.tell(|| format!("{who} is cancelled"));
                    }
                }
            }
        };
        life.spawn(work);
    }
}

impl Terms {
    /// The request, as the API makes it.
    fn wish(&self, options: &Options) -> Wish {
        Wish {
            name: self.name.clone(),
            ttl: self.ttl,
            owner: self.owner.clone(),
            fenced: self.fenced,
            renew_every: self.renews.then(|| options.renew_every(self.ttl)),
            max_hold: self.max_hold,
            wait: self.wait,
            retry_every: self.retry_every,
            on_unavailable: OnUnavailable::FailClosed,
        }
    }
}

impl Process {
    async fn work(self: Rc<Self>, who: String, what: What) {
        let options = &self.engine.core.options;
        match what {
            What::Lock { terms, holds } => {
                for hold in holds {
                    self.world.tell(|| format!("{who} asks for {}, {:?}", terms.name, terms.wait));
                    if terms.wait != Wait::Not && self.engine.waiting.is_open(&terms.name) {
                        self.world.saw(Situation::TwoTasksInRoom);
                    }
                    let asked = Moment::now();
                    let outcome = acquiring::acquire(&self.engine, terms.wish(options)).await;
                    self.check_deadline(&who, terms.wait, asked);
                    match outcome {
                        Ok(guard) => {
                            self.receives(&who, &guard);
                            self.hold(guard, hold).await;
                        }
                        Err(error) => self.note_failure(&who, terms.wait, &error),
                    }
                    sleep(hold.rests).await;
                }
            }
            What::Pool { terms, members, count, holds } => {
                let member = |(index, name): (u32, &LockName)| Member { index, name: name.clone() };
                let pool = PoolParts {
                    name: LockName::new("p").expect("a name"),
                    collector: LockName::new(COLLECTOR).expect("a name"),
                    members: (0..).zip(&members).map(member).collect(),
                };
                for hold in holds {
                    self.world
                        .tell(|| format!("{who} asks for {count} of {} members, {:?}", members.len(), terms.wait));
                    let asked = Moment::now();
                    let wish = Wish { name: pool.name.clone(), ..terms.wish(options) };
                    let outcome = pooling::acquire(&self.engine, &pool, count, wish).await;
                    self.check_deadline(&who, terms.wait, asked);
                    match outcome {
                        Ok(taken) => {
                            self.world.saw(Situation::GrantOfPool);
                            self.world.tell(|| format!("{who} has {} members", taken.len()));
                            taken.iter().for_each(|(_, guard)| self.receives(&who, guard));
                            let guards = taken.into_iter().map(|(_, guard)| self.hold(guard, hold));
                            futures_util::future::join_all(guards).await;
                        }
                        Err(error) => self.note_failure(&who, terms.wait, &error),
                    }
                    sleep(hold.rests).await;
                }
            }
            What::Token { terms, calls, renewals, hold } => {
                self.hold_by_token(&who, &terms, calls, renewals, hold).await;
            }
            What::Operator { name, acts, thinks, times } => {
                for _ in 0..times {
                    self.operate(&name, acts, thinks).await;
                    sleep(thinks + Duration::from_millis(150)).await;
                }
            }
        }
    }

    fn note_failure(&self, who: &str, wait: Wait, error: &Error) {
        self.world.tell(|| format!("{who} gets no lock: {error:#}"));
        match error {
            Error::Store { .. } => self.world.saw(Situation::CallFailed),
            Error::NotAcquired { .. } | Error::PoolBusy { .. } if wait != Wait::Not => {
                self.world.saw(Situation::WaiterGaveUp);
            }
            _ => {}
        }
    }

    /// Checks that a call returned in time, unless its process was stopped meanwhile.
    fn check_deadline(&self, who: &str, wait: Wait, asked: Moment) {
        let Wait::UpTo(limit) = wait else { return };
        let by = asked + limit;
        let was_stopped = self.world.undisturbed_since(self.which) > asked;
        if Moment::now() > by + LATE_BY && !was_stopped {
            self.world.fail(|| format!("{who} was answered late, by {:?}", by.until(Moment::now())));
        }
    }

    /// A task receives a guard. Checks that its lease has not ended.
    fn receives(&self, who: &str, guard: &Guard) {
        self.received.borrow_mut().insert(guard.token().clone());
        if !guard.is_valid() && guard.loss() != Some(LossReason::MaxHold) {
            self.world.fail(|| format!("{who} was given a lease of \"{}\" that was over", guard.name()));
        }
    }

    /// Works under a lock until the work is done or the lease is lost, then releases it.
    async fn hold(self: &Rc<Self>, guard: Guard, hold: Hold) {
        tokio::select! {
            biased;
            _ = guard.lost() => return drop(guard),
            () = sleep(hold.works) => {}
        }
        match hold.ends {
            Ends::Release => drop(guard.release().await),
            Ends::Drop => drop(guard),
            Ends::Extend => {
                let ttl = guard.share_cell().state().ttl;
                let _ = guard.extend(ttl.duration()).await;
                tokio::select! {
                    biased;
                    _ = guard.lost() => {}
                    () = sleep(hold.works) => {}
                }
                drop(guard.release().await);
            }
            Ends::HandOn => {
                if let Ok(lease) = guard.detach().await {
                    self.world.saw(Situation::HandedOn);
                    self.release_in_background(lease);
                }
            }
        }
    }

    async fn hold_by_token(self: &Rc<Self>, who: &str, terms: &Terms, calls: usize, renewals: usize, hold: Duration) {
        let token = self.token();
        self.world.tell(|| format!("{who} asks for {} by token, {:?}, {calls} times", terms.name, terms.wait));
        let asked = Moment::now();
        let call = async |again: usize| {
            sleep(Duration::from_millis(30 * again as u64)).await;
            let fence = by_token::acquire(&self.engine, terms.wish(&self.engine.core.options), &token).await?;
            self.world.saw(Situation::GrantToToken);
            // Until when it is proven is not known to the caller; the request shows it.
            let from = self.proven.borrow().get(&token).copied().unwrap_or(asked);
            let valid_until = Cell::new(Belief::new(from, from, terms.ttl.duration()).valid_until());
            let (process, name, token) = (self.which, terms.name.clone(), token.clone());
            Ok::<_, Error>(TokenLease { process, name, token, fence, valid_until, was_asked_twice: calls > 1 })
        };
        let outcomes = futures_util::future::join_all((0..calls).map(call)).await;
        if calls == 1 {
            self.check_deadline(who, terms.wait, asked);
        }
        let mut leases = Vec::new();
        for outcome in outcomes {
            match outcome {
                Ok(lease) => {
                    let lease = Rc::new(lease);
                    self.world.believes_token(&lease);
                    leases.push(lease);
                }
                Err(error) => self.note_failure(who, terms.wait, &error),
            }
        }
        if leases.len() > 1 {
            self.world.saw(Situation::SameCallAgain);
        }
        let lease = Lease::new(self.engine.clone(), terms.name.clone(), token.clone(), None);
        for _ in 0..renewals {
            sleep(hold / 2).await;
            match lease.renew(None).await {
                Ok(until) => leases.iter().for_each(|lease| lease.valid_until.set(lease.valid_until.get().max(until))),
                Err(Error::Lost { .. }) => break,
                Err(_) => {}
            }
            self.world.check_belief(&terms.name, &token);
        }
        sleep(hold).await;
        self.release_lease(&lease).await;
    }

    /// Releases by token, even if the task is dropped.
    fn release_in_background(self: &Rc<Self>, lease: Lease) {
        let (process, open) = (self.clone(), Open::begin(&self.world));
        self.spawn(async move {
            process.release_lease(&lease).await;
            drop(open);
        });
    }

    /// Releases by token, and repeats it until the store answers.
    async fn release_lease(&self, lease: &Lease) {
        self.world.gave_up(lease.name(), lease.token());
        for _ in 0..20 {
            if lease.release_without_event().await.is_ok() {
                return;
            }
            sleep(Duration::from_millis(200)).await;
        }
    }

    /// An operator inspects a lock and acts on the holder that it saw.
    async fn operate(&self, name: &LockName, acts: Acts, thinks: Duration) {
        let Ok(Some(holder)) = self.within(self.ask_holder(name)).await else { return };
        sleep(thinks).await;
        if acts == Acts::AskToFinish {
            let _ = self.within(self.ask_to_finish(name, holder.id)).await;
            return;
        }
        match self.within(self.ask_evict(name, holder.id, acts == Acts::Force)).await {
            Ok(EvictReply::Done) if acts == Acts::Revoke => self.world.saw(Situation::Revoked),
            Ok(EvictReply::ChangedHands) => self.world.saw(Situation::ChangedHands),
            _ => {}
        }
    }
}
