//! What the tasks of a plan do with their locks.

use std::rc::Rc;
use std::time::Duration;

use super::acquiring::Ended;
use super::by_token::TokenLease;
use super::coverage::Situation;
use super::lease::Guard;
use super::plan::{Acts, COLLECTOR, Ends, Hold, TaskPlan, Terms, What, renew_every};
use super::pooling::PoolParts;
use super::process::{CallError, Process, Wait, Wish};
use super::world::World;
use crate::clock::Moment;
use crate::facts::{LockName, Token};
use crate::loss::LossReason;
use crate::machine::EvictReply;

/// How much later than its deadline a call may return.
const LATE_BY: Duration = Duration::from_millis(250);

/// Counts a task as open until it ends, however it ends.
struct Open(Rc<World>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open_tasks.set(self.0.open_tasks.get() - 1);
    }
}

impl World {
    pub(super) fn start_task(self: &Rc<Self>, number: usize, task: TaskPlan) {
        let Some(process) = self.processes.borrow()[task.process].clone() else { return };
        self.open_tasks.set(self.open_tasks.get() + 1);
        let open = Open(self.clone());
        let life = process.clone();
        let work = async move {
            let _open = open;
            let world = process.world.clone();
            let who = format!("task {number} of {}", process.name());
            let work = Box::pin(process.work(who.clone(), task.what));
            match task.dropped_after {
                None => work.await,
                Some(limit) => {
                    if world.timeout(limit, work).await.is_none() {
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
    fn wish(&self) -> Wish {
        Wish {
            name: self.name.clone(),
            ttl: self.ttl,
            owner: self.owner.clone(),
            fenced: self.fenced,
            renew_every: self.renews.then(|| renew_every(self.ttl)),
            max_hold: self.max_hold,
            wait: self.wait,
            retry_every: self.retry_every,
        }
    }
}

impl Process {
    async fn work(self: Rc<Self>, who: String, what: What) {
        match what {
            What::Lock { terms, holds } => {
                for hold in holds {
                    self.world.tell(|| format!("{who} asks for {}, {:?}", terms.name, terms.wait));
                    let asked = self.now();
                    let outcome = self.clone().acquire(terms.wish()).await;
                    self.check_deadline(&who, terms.wait, asked);
                    match outcome {
                        Ok(guard) => self.hold(guard, hold).await,
                        Err(ended) => self.note_failure(&who, &ended),
                    }
                    self.world.sleep(hold.rests).await;
                }
            }
            What::Pool { terms, members, count, holds } => {
                for hold in holds {
                    self.world
                        .tell(|| format!("{who} asks for {count} of {} members, {:?}", members.len(), terms.wait));
                    let asked = self.now();
                    let collector = LockName::new(COLLECTOR).expect("a name");
                    let pool = PoolParts { collector, members: members.clone() };
                    let outcome = self.clone().acquire_members(pool, count, terms.wish()).await;
                    self.check_deadline(&who, terms.wait, asked);
                    match outcome {
                        Ok(taken) => {
                            self.world.saw(Situation::GrantOfPool);
                            self.world.tell(|| format!("{who} has {} members", taken.len()));
                            let guards = taken.into_iter().map(|(_, guard)| self.hold(guard, hold));
                            futures_util::future::join_all(guards).await;
                        }
                        Err(ended) => self.note_failure(&who, &ended),
                    }
                    self.world.sleep(hold.rests).await;
                }
            }
            What::Token { terms, calls, renewals, hold } => {
                self.hold_by_token(&who, &terms, calls, renewals, hold).await;
            }
            What::Operator { name, acts, thinks, times } => {
                for _ in 0..times {
                    self.operate(&name, acts, thinks).await;
                    self.world.sleep(thinks + Duration::from_millis(150)).await;
                }
            }
        }
    }

    fn note_failure(&self, who: &str, ended: &Ended) {
        self.world.tell(|| format!("{who} gets no lock: {ended:?}"));
        if matches!(ended, Ended::Error(CallError::Store(_))) {
            self.world.saw(Situation::CallFailed);
        }
    }

    /// Checks that a call returned in time, unless its process was stopped meanwhile.
    fn check_deadline(&self, who: &str, wait: Wait, asked: Moment) {
        let Some(by) = wait.deadline(asked) else { return };
        let was_stopped = self.world.undisturbed_since(self.which) > asked;
        if self.now() > by + LATE_BY && !was_stopped {
            self.world.fail(|| format!("{who} was answered late, by {:?}", by.until(self.now())));
        }
    }

    /// Works under a lock until the work is done or the lease is lost, then releases it.
    async fn hold(self: &Rc<Self>, guard: Guard, hold: Hold) {
        tokio::select! {
            biased;
            _ = guard.lost() => return drop(guard),
            () = self.world.sleep(hold.works) => {}
        }
        match hold.ends {
            Ends::Release => guard.release().await,
            Ends::Drop => drop(guard),
            Ends::Extend => {
                let ttl = guard.lease().state.borrow().ttl;
                guard.extend(ttl).await;
                tokio::select! {
                    biased;
                    _ = guard.lost() => {}
                    () = self.world.sleep(hold.works) => {}
                }
                guard.release().await;
            }
            Ends::HandOn => {
                let name = guard.lease().name.clone();
                let token = guard.lease().token.clone();
                if guard.hand_to(&token).await.is_ok() {
                    self.world.saw(Situation::HandedOn);
                    self.release_token_in_background(&name, &token);
                }
            }
        }
    }

    async fn hold_by_token(self: &Rc<Self>, who: &str, terms: &Terms, calls: usize, renewals: usize, hold: Duration) {
        let token = self.token();
        self.world.tell(|| format!("{who} asks for {} by token, {:?}, {calls} times", terms.name, terms.wait));
        let asked = self.now();
        let call = |again: usize| {
            let (process, token, wish) = (self.clone(), token.clone(), terms.wish());
            async move {
                process.world.sleep(Duration::from_millis(30 * again as u64)).await;
                process.acquire_for_token(wish, token).await
            }
        };
        let outcomes = futures_util::future::join_all((0..calls).map(call)).await;
        if calls == 1 {
            self.check_deadline(who, terms.wait, asked);
        }
        let mut leases = Vec::new();
        for outcome in outcomes {
            match outcome {
                Ok(lease) => {
                    let lease = Rc::new(TokenLease { was_asked_twice: calls > 1, ..lease });
                    self.world.believes_token(&lease);
                    leases.push(lease);
                }
                Err(ended) => self.note_failure(who, &ended),
            }
        }
        if leases.len() > 1 {
            self.world.saw(Situation::SameCallAgain);
        }
        for _ in 0..renewals {
            self.world.sleep(hold / 2).await;
            match self.renew_token(&terms.name, &token).await {
                Ok(until) => leases.iter().for_each(|lease| lease.valid_until.set(lease.valid_until.get().max(until))),
                Err(CallError::Lost(LossReason::Gone | LossReason::Revoked)) => break,
                Err(_) => {}
            }
            self.world.check_token_belief(&terms.name, &token);
        }
        self.world.sleep(hold).await;
        self.release_token(&terms.name, &token).await;
    }

    /// Releases by token, even if the task is dropped.
    fn release_token_in_background(self: &Rc<Self>, name: &LockName, token: &Token) {
        let (process, name, token) = (self.clone(), name.clone(), token.clone());
        self.spawn(async move { process.release_token(&name, &token).await });
    }

    /// Releases by token, and repeats it until the store answers.
    async fn release_token(&self, name: &LockName, token: &Token) {
        self.world.gave_up(name, token);
        for _ in 0..20 {
            if self.within(self.ask_release(name, token, false)).await.is_ok() {
                return;
            }
            self.world.sleep(Duration::from_millis(200)).await;
        }
    }

    /// An operator inspects a lock and acts on the holder that it saw.
    async fn operate(&self, name: &LockName, acts: Acts, thinks: Duration) {
        let Ok(Some(holder)) = self.within(self.ask_holder(name)).await else { return };
        self.world.sleep(thinks).await;
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
