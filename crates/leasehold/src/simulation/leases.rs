//! Renews and checks the leases of a process, as [`LeaseState`](crate::client::renewal::LeaseState) decides. Replaces
//! `engine/renewal.rs`.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Notify;

use super::coverage::Situation;
use super::lease::Lease;
use super::process::Process;
use crate::client::renewal::{PASS, Sent, Then, Verdict};
use crate::clock::Moment;
use crate::facts::Token;
use crate::loss::LossReason;
use crate::store::{Renewal, Renewed, StoreErrorKind};

/// How many revocations are kept for leases that are just being granted.
const EARLY_KEPT: usize = 256;
/// Later than the end of any lease.
const NEVER: Moment = Moment::from_boot(std::time::Duration::MAX);

#[derive(Default)]
pub(super) struct Leases {
    schedule: RefCell<Schedule>,
    woken: Notify,
}

#[derive(Default)]
struct Schedule {
    due: BTreeMap<(Moment, u64), Rc<Lease>>,
    next_id: u64,
    looks_at: Option<Moment>,
    /// Revocations that came before their lease, oldest first.
    early: VecDeque<Token>,
}

impl Leases {
    pub(super) fn knows(&self, token: &Token) -> bool {
        self.schedule.borrow().due.values().any(|lease| lease.token == *token)
    }

    pub(super) fn is_idle(&self) -> Result<(), String> {
        match self.schedule.borrow().due.values().next() {
            None => Ok(()),
            Some(lease) => Err(format!("still tends a lease of {}", lease.name)),
        }
    }
}

impl Schedule {
    /// Changes the state of a lease. `false`: it is not in the table any more.
    fn put(&mut self, lease: &Lease, at: Moment) -> bool {
        let Some((old, id)) = lease.due.get() else { return false };
        let Some(lease) = self.due.remove(&(old, id)) else { return false };
        lease.due.set(Some((at, id)));
        self.due.insert((at, id), lease);
        true
    }
}

/// One renewal or check in flight.
struct InFlight {
    lease: Rc<Lease>,
    sent: Sent,
}

impl Process {
    /// Begins to renew a lease.
    pub(super) fn tend(&self, lease: &Rc<Lease>) {
        let at = lease.state.borrow().first_look();
        let mut schedule = self.leases.schedule.borrow_mut();
        let due = (at, schedule.next_id);
        schedule.next_id += 1;
        lease.due.set(Some(due));
        schedule.due.insert(due, lease.clone());
        let too_late = schedule.looks_at.is_none_or(|looks_at| looks_at > at);
        let early = schedule.early.iter().position(|token| *token == lease.token);
        if let Some(early) = early {
            schedule.early.remove(early);
        }
        drop(schedule);
        if too_late {
            self.leases.woken.notify_one();
        }
        if early.is_some() {
            self.world.saw(Situation::EarlyRevocation);
            self.lose(lease, LossReason::Revoked);
        }
    }

    /// Stops renewing a lease.
    pub(super) fn stop_tending(&self, lease: &Lease) {
        if let Some(due) = lease.due.take() {
            self.leases.schedule.borrow_mut().due.remove(&due);
        }
    }

    /// Looks at a lease again now.
    pub(super) fn touch(&self, lease: &Lease) {
        self.leases.schedule.borrow_mut().put(lease, Moment::from_boot(std::time::Duration::ZERO));
        self.leases.woken.notify_one();
    }

    /// The connection is back: every lease is checked now.
    pub(super) fn look_at_all(&self) {
        let now = self.now();
        let all: Vec<Rc<Lease>> = self.leases.schedule.borrow().due.values().cloned().collect();
        for lease in all {
            lease.state.borrow_mut().reconnected(now);
            self.leases.schedule.borrow_mut().put(&lease, now);
        }
        self.leases.woken.notify_one();
    }

    pub(super) fn revoked(&self, token: &Token) {
        let mut schedule = self.leases.schedule.borrow_mut();
        let found = schedule.due.values().find(|lease| lease.token == *token).cloned();
        if found.is_none() {
            if schedule.early.len() >= EARLY_KEPT {
                schedule.early.pop_front();
            }
            schedule.early.push_back(token.clone());
        }
        drop(schedule);
        if let Some(lease) = found {
            self.lose(&lease, LossReason::Revoked);
        }
    }

    pub(super) fn asked_to_finish(&self, _token: &Token) {
        self.world.saw(Situation::AskedToFinish);
    }

    /// Notifies the holder that its lease has ended.
    pub(super) fn lose(&self, lease: &Lease, why: LossReason) {
        let is_tended = self.leases.schedule.borrow_mut().put(lease, NEVER);
        if is_tended && self.tell_lost(lease, why) {
            self.world.knows_loss(lease, why);
        }
    }

    /// `false`: the holder was notified before.
    pub(super) fn tell_lost(&self, lease: &Lease, why: LossReason) -> bool {
        if !lease.lose(why) {
            return false;
        }
        match why {
            LossReason::Gone => self.world.saw(Situation::LostGone),
            LossReason::Revoked => self.world.saw(Situation::LostRevoked),
            LossReason::Expired => self.world.saw(Situation::LapsedBelief),
            _ => {}
        }
        self.world.tell(|| format!("{} loses {}: {why}", self.name(), lease.name));
        true
    }

    /// The renewal task.
    pub(super) async fn run_renewals(self: Rc<Self>) {
        let mut passes = FuturesUnordered::new();
        loop {
            let due = self.look(self.now());
            if !due.is_empty() {
                passes.push(self.renew(due));
            }
            let next = {
                let mut schedule = self.leases.schedule.borrow_mut();
                let next = schedule.due.first_key_value().map(|((due, _), _)| *due);
                schedule.looks_at = Some(next.unwrap_or(NEVER));
                next.filter(|at| *at < NEVER)
            };
            tokio::select! {
                biased;
                Some((asked_at, pass, answers)) = passes.next(), if !passes.is_empty() => {
                    for (in_flight, answer) in pass.iter().zip(answers) {
                        self.take_answer(in_flight, asked_at, &answer);
                    }
                }
                () = self.leases.woken.notified() => {}
                () = self.world.sleep_until(next) => {}
            }
        }
    }

    /// Looks at every lease that is due. Returns those to renew or check, earliest deadline first.
    fn look(&self, now: Moment) -> Vec<InFlight> {
        let until = (now + PASS, u64::MAX);
        let due: Vec<Rc<Lease>> =
            self.leases.schedule.borrow().due.range(..=until).map(|(_, lease)| lease.clone()).collect();
        let mut to_ask = Vec::new();
        for lease in due {
            let mut state = lease.state.borrow_mut();
            let look_again = match state.look(now).then {
                Then::Wait(until) => until,
                Then::Ask { prolong, look_again } => {
                    let sent = state.request(prolong);
                    to_ask.push((state.belief.valid_until(), InFlight { lease: lease.clone(), sent }));
                    look_again
                }
                Then::Lost(why) => {
                    drop(state);
                    self.lose(&lease, why);
                    continue;
                }
            };
            drop(state);
            self.leases.schedule.borrow_mut().put(&lease, look_again);
        }
        to_ask.sort_by_key(|(deadline, _)| *deadline);
        to_ask.into_iter().map(|(_, in_flight)| in_flight).collect()
    }

    async fn renew(&self, pass: Vec<InFlight>) -> (Moment, Vec<InFlight>, Vec<Renewed>) {
        let renewals: Vec<Renewal> = pass.iter().map(|InFlight { lease, sent }| lease.renewal(sent)).collect();
        let asked_at = self.now();
        let answers = self.timed(self.ask_renew(&renewals)).await;
        let answers =
            answers.unwrap_or_else(|| vec![Renewed::Unknown(StoreErrorKind::NoAnswer.into()); renewals.len()]);
        (asked_at, pass, answers)
    }

    fn take_answer(&self, InFlight { lease, sent }: &InFlight, asked_at: Moment, answer: &Renewed) {
        let verdict = lease.state.borrow_mut().answered(self.now(), sent, asked_at, answer);
        match verdict {
            Verdict::Lost(why) => return self.lose(lease, why),
            Verdict::Checked => self.world.saw(Situation::Checked),
            Verdict::Renewed { .. } => {
                self.world.saw(Situation::Renewed);
                self.world.tell(|| format!("{} has renewed {}", self.name(), lease.name));
                self.world.proved(lease);
            }
            Verdict::Unanswered => {}
        }
        self.touch(lease);
    }
}
