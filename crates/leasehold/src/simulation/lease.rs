//! One lease of a process and its guard. Replaces `engine/lease_cell.rs`, `guard.rs` and `engine/releasing.rs`.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Notify;

use super::coverage::Situation;
use super::process::Process;
use crate::client::jittered;
use crate::client::renewal::{LeaseState, Record, Sent, Verdict};
use crate::clock::Moment;
use crate::facts::{Fence, LockName, Owner, Token, Ttl};
use crate::lease::belief::Plan;
use crate::loss::LossReason;
use crate::store::{Grant, Release, Renewal, Renewed};

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
const RELEASE_RETRIES: u32 = 3;
const EMERGENCY_AFTER: Duration = Duration::from_secs(5);

/// The initial values of a lease.
#[derive(Debug, Clone)]
pub(super) struct NewLease {
    pub(super) name: LockName,
    pub(super) token: Token,
    pub(super) ttl: Ttl,
    pub(super) owner: Owner,
    pub(super) renew_every: Option<Duration>,
    pub(super) max_hold: Option<Duration>,
    pub(super) waited: bool,
}

pub(super) struct Lease {
    pub(super) process: usize,
    pub(super) name: LockName,
    pub(super) token: Token,
    pub(super) fence: Option<Fence>,
    waited: bool,
    handed_over: bool,
    pub(super) state: RefCell<LeaseState>,
    told: Notify,
    /// Its key in the table of the renewal task.
    pub(super) due: Cell<Option<(Moment, u64)>>,
    /// The last known end of the belief.
    pub(super) believed_until: Cell<Moment>,
}

impl Lease {
    pub(super) fn is_valid(&self, now: Moment) -> bool {
        self.state.borrow().belief.is_valid(now)
    }

    /// Marks the lease as lost. `false`: it was lost already.
    pub(super) fn lose(&self, why: LossReason) -> bool {
        let first = self.state.borrow_mut().lose(why);
        if first {
            self.told.notify_waiters();
        }
        first
    }

    /// The request that carries this out.
    pub(super) fn renewal(&self, sent: &Sent) -> Renewal {
        Renewal {
            name: self.name.clone(),
            token: self.token.clone(),
            fence: self.fence,
            ttl: sent.ttl,
            prolong: sent.prolong,
            rewrite: sent.rewrote.clone(),
            hand_to: None,
        }
    }
}

/// Holds a lock. Dropping it releases the lock in the background.
pub(super) struct Guard {
    process: Rc<Process>,
    lease: Option<Rc<Lease>>,
}

impl Guard {
    pub(super) fn begin(process: Rc<Process>, new: NewLease, grant: &Grant, record: Record) -> Self {
        let now = process.now();
        let terms = (new.ttl, new.owner);
        let lease = Rc::new(Lease {
            process: process.which,
            name: new.name,
            token: new.token,
            fence: grant.fence,
            waited: new.waited,
            handed_over: record == Record::Provisional,
            state: RefCell::new(LeaseState::new(now, terms, new.renew_every, new.max_hold, grant, record)),
            told: Notify::new(),
            due: Cell::new(None),
            believed_until: Cell::new(grant.asked_at),
        });
        lease.believed_until.set(lease.state.borrow().belief.valid_until());
        process.world.believes(&lease);
        process.tend(&lease);
        Self { process, lease: Some(lease) }
    }

    pub(super) fn lease(&self) -> &Rc<Lease> {
        self.lease.as_ref().expect("held until it is released")
    }

    pub(super) fn is_valid(&self) -> bool {
        self.lease().is_valid(self.process.now())
    }

    pub(super) fn loss(&self) -> Option<LossReason> {
        self.lease().state.borrow().lost
    }

    /// Waits until the lease is lost.
    pub(super) async fn lost(&self) -> LossReason {
        loop {
            let told = self.lease().told.notified();
            if let Some(why) = self.loss() {
                return why;
            }
            told.await;
        }
    }

    pub(super) async fn release(mut self) {
        let lease = self.lease.take().expect("held until it is released");
        self.process.give_up(&lease);
        let process = self.process.clone();
        // It continues in the background if the caller is dropped.
        let (answer, answered) = tokio::sync::oneshot::channel::<()>();
        self.process.spawn(async move {
            process.release_in_layers(&lease).await;
            drop(answer);
        });
        let _ = answered.await;
    }

    /// Turns the lease into one by token, which belongs to no process.
    pub(super) async fn hand_to(mut self, token: &Token) -> Result<(), super::process::CallError> {
        let lease = self.lease.take().expect("held until it is released");
        self.process.clone().hand_on(&lease, token).await
    }

    /// Changes the terms of the lease.
    pub(super) fn settle(&self, ttl: Ttl, renew_every: Option<Duration>, max_hold: Option<Duration>) {
        let now = self.process.now();
        let mut state = self.lease().state.borrow_mut();
        state.change_terms(ttl, Plan { every: renew_every, at_most_until: max_hold.map(|hold| now + hold) });
        state.renew_at = Some(now);
        drop(state);
        self.process.touch(self.lease());
    }

    /// Prolongs the lease to `ttl` from now, and renews it to `ttl` from then on.
    pub(super) async fn extend(&self, ttl: Ttl) {
        let (process, lease) = (&self.process, self.lease());
        let sent = {
            let mut state = lease.state.borrow_mut();
            if state.lost.is_some() {
                return;
            }
            let every = state.plan.every.map(|_| super::plan::renew_every(ttl));
            let plan = Plan { every, ..state.plan };
            state.change_terms(ttl, plan);
            state.request(true)
        };
        let asked_at = process.now();
        let renewal = lease.renewal(&sent);
        let asking = async { Ok(process.ask_renew(&[renewal]).await.pop()) };
        let answer = match process.within(asking).await {
            Ok(answer) => answer.unwrap_or(Renewed::Lost),
            Err(error) => Renewed::Unknown(error),
        };
        let verdict = lease.state.borrow_mut().extended(process.now(), &sent, asked_at, &answer);
        match verdict {
            Verdict::Lost(why) => process.lose(lease, why),
            _ => process.world.proved(lease),
        }
        process.touch(lease);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Some(lease) = self.lease.take() else { return };
        if self.process.life.is_dead.get() {
            return;
        }
        self.process.give_up(&lease);
        let process = self.process.clone();
        self.process.spawn(async move { process.release_in_layers(&lease).await });
    }
}

impl Process {
    /// The belief ends before the release is sent.
    fn give_up(&self, lease: &Lease) {
        self.stop_tending(lease);
        lease.state.borrow_mut().give_up();
        self.world.gave_up(&lease.name, &lease.token);
        if lease.handed_over {
            self.handed_on(&lease.name);
        }
    }

    /// Sends the release until the store answers, as often as the fallbacks allow.
    async fn release_in_layers(self: &Rc<Self>, lease: &Lease) {
        let mut pause = FIRST_PAUSE;
        for _ in 0..=RELEASE_RETRIES {
            let answer = self.within(self.ask_release(&lease.name, &lease.token, lease.waited)).await;
            if let Ok(answer) = answer {
                if answer == Release::Released {
                    self.world.saw(Situation::Released);
                }
                return;
            }
            let byte = self.decide(|cx| cx.source.byte());
            self.world.sleep(jittered(pause, byte)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        self.world.sleep(EMERGENCY_AFTER).await;
        // The journal would follow; here the lease ends by itself.
        let _ = self.within(self.ask_release(&lease.name, &lease.token, true)).await;
    }
}
