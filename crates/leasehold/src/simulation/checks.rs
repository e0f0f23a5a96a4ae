//! The invariants of every world, checked after every step that could break them.
//!
//! - At most one lease of a name is believed at a time. A lease that its store has lost (lost data, a deleted key,
//!   force) is excused until the moment at which it would have ended.
//! - A believed lease is in the store under its holder's token, for as long as it is believed.
//! - No task is given a lease that has ended.
//! - Fences rise from grant to grant.
//! - The store never takes a lock from a holder that has not given it up.
//! - A revoked lease is never prolonged.
//! - A lock is handed over in the order of tickets.
//! - A token that has left never comes back.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::coverage::Situation;
use super::leases::TokenLease;
use super::network::Network;
use super::server::{Command, ServerClock};
use super::world::World;
use crate::clock::Moment;
use crate::engine::lease_cell::LeaseCell;
use crate::facts::{Fence, LockName, Token};
use crate::loss::LossReason;
use crate::machine::{Flag, InboxId, Slot};

/// How long a loss may stay unnoticed, besides the pause between two checks.
const ONE_TIMEOUT: Duration = Duration::from_secs(2);

/// After this, an abandoned lease or queue has ended.
const LEFT_FOR: Duration = Duration::from_secs(100);

#[derive(Default)]
pub(super) struct Checks {
    pub(super) violation: Option<String>,
    believed: BTreeMap<LockName, Vec<Believed>>,
    /// The highest fence that was believed, and its token.
    highest: BTreeMap<LockName, (Fence, Token)>,
    /// Leases that the store has lost, and when they would have ended.
    disowned: BTreeMap<Token, Disowned>,
    /// Tokens whose leave has run and was not lost with the data.
    leave_ran: BTreeSet<Token>,
    /// Tokens that have left for certain.
    left: BTreeSet<Token>,
    /// Leases that were handed over and are not confirmed yet, and when they end on the server's clock.
    provisional: BTreeMap<LockName, (Token, u64)>,
    /// Whether a lost connection can be killed, so that nothing it sent runs later.
    can_kill: bool,
    /// Nothing fails in this world.
    is_calm: bool,
}

#[derive(Debug, Clone, Copy)]
struct Disowned {
    at: Moment,
    until: Moment,
    /// The token was granted the lock again since.
    is_regained: bool,
}

/// A lease that a holder believes in.
#[derive(Clone)]
enum Believed {
    Guarded(usize, Arc<LeaseCell>),
    ByToken(Rc<TokenLease>),
}

impl Believed {
    fn token(&self) -> &Token {
        match self {
            Self::Guarded(_, lease) => &lease.token,
            Self::ByToken(lease) => &lease.token,
        }
    }

    fn process(&self) -> usize {
        match self {
            Self::Guarded(process, _) => *process,
            Self::ByToken(lease) => lease.process,
        }
    }

    /// The end of the belief, if it is believed now.
    fn valid_until(&self, now: Moment) -> Option<Moment> {
        match self {
            Self::Guarded(_, lease) => lease.is_valid(now).then(|| lease.state().belief.valid_until()),
            Self::ByToken(lease) => Some(lease.valid_until.get()).filter(|until| now < *until),
        }
    }
}

/// The state of a lock before or after a command.
pub(super) struct Picture {
    holder: Option<(Token, Option<u64>, Flag)>,
    queue: Vec<(u64, Token, Option<InboxId>, u64)>,
    now_ms: u64,
}

impl Checks {
    pub(super) fn new(can_kill: bool, is_calm: bool) -> Self {
        Self { can_kill, is_calm, ..Self::default() }
    }

    /// The current state of the lock that a command names.
    pub(super) fn before(&self, network: &Network, node: usize, command: &Command, now: Moment) -> Option<Picture> {
        let now_ms = network.clock.now_ms(now);
        let mut lock = network.nodes[node].locks.get(command.name()?).cloned().unwrap_or_default();
        lock.lapse(now_ms);
        let holder = match &lock.slot {
            Slot::Held(held) => Some((held.token.clone(), held.ends_ms, held.flag)),
            Slot::Free | Slot::Foreign { .. } => None,
        };
        let queue = lock.queue.into_iter().map(|w| (w.ticket, w.token, w.inbox, w.polled_ms)).collect();
        Some(Picture { holder, queue, now_ms })
    }

    /// Checks a command that has run on the primary. Returns the violation.
    pub(super) fn ran(
        &mut self,
        world: &World,
        command: &Command,
        before: Option<Picture>,
        after: Option<Picture>,
        clock: ServerClock,
        is_listening: &dyn Fn(&InboxId) -> bool,
    ) -> Option<String> {
        let (before, after, name) = (before?, after?, command.name()?);
        let token = |picture: &Picture| picture.holder.as_ref().map(|(token, ..)| token.clone());
        if let Some((old, ends_ms, flag)) = &before.holder {
            match &after.holder {
                Some((new, new_ends_ms, new_flag)) if new == old => {
                    if let Command::Evict { holder, force: true, .. } = command
                        && *holder == old.holder_id()
                    {
                        // The release is not done yet: the lease is revoked and shortened.
                        let until =
                            ends_ms.map_or(Moment::now(), |end| clock.moment_of(end) + Duration::from_millis(1));
                        self.disown(old, Moment::now(), until);
                    }
                    let is_longer = new_ends_ms.is_none_or(|new| ends_ms.is_some_and(|old| new > old));
                    if *flag == Flag::Revoked && (*new_flag != Flag::Revoked || (is_longer && ends_ms.is_some())) {
                        return Some(format!("the revoked lease of {name} was prolonged"));
                    }
                }
                _ => match command {
                    Command::Evict { holder, force: true, .. } if *holder == old.holder_id() => {
                        world.saw(Situation::Forced);
                        let until =
                            ends_ms.map_or(Moment::now(), |end| clock.moment_of(end) + Duration::from_millis(1));
                        self.disown(old, Moment::now(), until);
                    }
                    _ if gives_up(command, old) => {}
                    _ => return Some(format!("{} took {name} from its holder", command.words())),
                },
            }
        }
        let (old, new) = (token(&before), token(&after));
        self.follow_provisional(world, name, &before, &after);
        if let Some(new) = new.filter(|new| Some(new) != old.as_ref()) {
            if let Some(disowned) = self.disowned.get_mut(&new) {
                disowned.is_regained = true;
            }
            if self.can_kill && self.left.contains(&new) {
                return Some(format!("{name} was granted to a token that had left"));
            }
            if let Some((ticket, ..)) = before.queue.iter().find(|(_, token, ..)| *token == new) {
                let is_there = |(_, _, inbox, polled): &(u64, Token, Option<InboxId>, u64)| match inbox {
                    Some(inbox) => is_listening(inbox),
                    None => before.now_ms.saturating_sub(*polled) < 3_000,
                };
                let earlier = before.queue.iter().filter(|(earlier, ..)| earlier < ticket);
                if earlier.clone().any(is_there) {
                    return Some(format!("{name} was handed over past a waiter with an earlier ticket"));
                }
                if let Some((token, Some(ends_ms), _)) = &after.holder {
                    self.provisional.insert(name.clone(), (token.clone(), *ends_ms));
                }
                if earlier.count() > 0 {
                    world.saw(Situation::DeadWaiterPassedOver);
                }
            }
        }
        if let Command::Leave { token, .. } = command {
            self.leave_ran.insert(token.clone());
        }
        let came_back = |(_, token, ..): &&(u64, Token, Option<InboxId>, u64)| self.left.contains(token);
        if self.can_kill && after.queue.iter().find(came_back).is_some() {
            return Some(format!("a token that had left stands in the queue of {name}"));
        }
        None
    }

    /// Counts grants that were not confirmed in time.
    fn follow_provisional(&mut self, world: &World, name: &LockName, before: &Picture, after: &Picture) {
        let Some((token, ends_ms)) = self.provisional.get(name) else { return };
        let still_held = |picture: &Picture| picture.holder.as_ref().is_some_and(|(holder, ..)| holder == token);
        let is_confirmed =
            after.holder.as_ref().is_some_and(|(holder, end, _)| holder == token && *end > Some(*ends_ms));
        if !still_held(before) && before.now_ms >= *ends_ms {
            world.saw(Situation::ProvisionalLapsed);
            self.provisional.remove(name);
        } else if is_confirmed || !still_held(after) {
            self.provisional.remove(name);
        }
    }

    fn disown(&mut self, token: &Token, at: Moment, until: Moment) {
        let disowned = self.disowned.entry(token.clone()).or_insert(Disowned { at, until, is_regained: false });
        disowned.until = disowned.until.max(until);
    }

    /// The store has lost data, so tokens that left may be back.
    pub(super) fn data_lost(&mut self) {
        self.left.clear();
        self.leave_ran.clear();
    }

    fn excuses(&self, token: &Token, until: Moment) -> bool {
        self.disowned.get(token).is_some_and(|disowned| until <= disowned.until)
    }
}

/// Whether the holder gives up its lock with a command.
fn gives_up(command: &Command, holder: &Token) -> bool {
    match command {
        Command::Release { token, .. }
        | Command::ReleaseUncontended { token, .. }
        | Command::Leave { token, .. }
        | Command::Yield { token, .. } => token == holder,
        Command::Renew(renewal) => renewal.hand_to.is_some() && renewal.token == *holder,
        _ => false,
    }
}

impl World {
    /// A holder begins to believe in a lease.
    pub(super) fn believes(&self, process: usize, lease: &Arc<LeaseCell>) {
        let until = lease.state().belief.valid_until();
        self.tell(|| {
            format!(
                "{} believes that it holds {} until {:.4} s, with fence …{}",
                self.name_of(process),
                lease.name,
                self.began.until(until).as_secs_f64(),
                lease.fence.map_or(0, Fence::get) % 1_000_000
            )
        });
        if !lease.is_valid(Moment::now()) {
            let who = self.name_of(process);
            return self.fail(|| format!("{who} was given a lease of \"{}\" that was over", lease.name));
        }
        self.check_fence(&lease.name, lease.fence, &lease.token, false);
        self.checks
            .borrow_mut()
            .believed
            .entry(lease.name.clone())
            .or_default()
            .push(Believed::Guarded(process, lease.clone()));
        self.check_belief(&lease.name, &lease.token);
    }

    /// A caller begins to believe in a lease by token.
    pub(super) fn believes_token(&self, lease: &Rc<TokenLease>) {
        self.tell(|| {
            let until = self.began.until(lease.valid_until.get()).as_secs_f64();
            format!("{} believes that its token holds {} until {until:.4} s", self.name_of(lease.process), lease.name)
        });
        if Moment::now() >= lease.valid_until.get() {
            return;
        }
        self.check_fence(&lease.name, lease.fence, &lease.token, lease.was_asked_twice);
        self.checks.borrow_mut().believed.entry(lease.name.clone()).or_default().push(Believed::ByToken(lease.clone()));
        self.check_belief(&lease.name, &lease.token);
    }

    pub(super) fn gave_up(&self, name: &LockName, token: &Token) {
        if let Some(believed) = self.checks.borrow_mut().believed.get_mut(name) {
            believed.retain(|lease| lease.token() != token);
        }
    }

    /// Ends the beliefs of a process that died.
    pub(super) fn forget_beliefs_of(&self, process: usize) {
        for believed in self.checks.borrow_mut().believed.values_mut() {
            believed.retain(|lease| lease.process() != process);
        }
    }

    fn check_fence(&self, name: &LockName, fence: Option<Fence>, token: &Token, was_asked_twice: bool) {
        let Some(fence) = fence else { return };
        let mut checks = self.checks.borrow_mut();
        let lost = |checks: &Checks, token: &Token| checks.disowned.contains_key(token);
        if let Some((highest, whose)) = checks.highest.get(name)
            && *highest >= fence
        {
            // The same lease, handed on or confirmed again.
            let is_same = *highest == fence;
            if is_same || lost(&checks, token) || lost(&checks, whose) {
                return;
            }
            drop(checks);
            if was_asked_twice {
                return self.saw(Situation::StaleFence);
            }
            return self.fail(|| format!("the fences of {name} do not rise"));
        }
        checks.highest.insert(name.clone(), (fence, token.clone()));
    }

    /// Checks all beliefs in leases of a name, after that of `token` began or was prolonged.
    pub(super) fn check_belief(&self, name: &LockName, token: &Token) {
        let now = Moment::now();
        let mut network = self.network.borrow_mut();
        let (clock, now_ms) = (network.clock, network.clock.now_ms(now));
        let held = network.primary().holder(name, now_ms);
        drop(network);
        let checks = self.checks.borrow();
        let Some(believed) = checks.believed.get(name) else { return };
        let valid: Vec<(Believed, Moment)> =
            believed.iter().filter_map(|lease| Some((lease.clone(), lease.valid_until(now)?))).collect();
        let mut problem = None;
        for (lease, until) in &valid {
            let is_held = held.as_ref().is_some_and(|(holder, ends_ms)| {
                holder == lease.token() && ends_ms.is_none_or(|end| clock.moment_of(end) >= *until)
            });
            if is_held || checks.excuses(lease.token(), *until) {
                continue;
            }
            let others = valid.iter().any(|(other, _)| other.token() != lease.token());
            problem = Some(if others {
                format!("two holders of \"{name}\"")
            } else if lease.token() == token {
                format!(
                    "{} believes in its lease of \"{name}\" for longer than the store keeps it",
                    self.name_of(lease.process())
                )
            } else {
                format!("a lease of \"{name}\" that was believed is not in the store")
            });
        }
        let tokens: BTreeSet<&Token> = valid.iter().map(|(lease, _)| lease.token()).collect();
        if tokens.len() > 1 && problem.is_none() {
            self.saw(Situation::OverlapExcused);
        }
        drop(checks);
        if let Some(problem) = problem {
            self.fail(|| problem);
        }
    }

    /// The store is about to lose a lock. Called before it does.
    pub(super) fn disown(&self, name: &LockName) {
        let now = Moment::now();
        let mut network = self.network.borrow_mut();
        let (clock, now_ms) = (network.clock, network.clock.now_ms(now));
        let held = network.primary().holder(name, now_ms);
        drop(network);
        if let Some((token, ends_ms)) = held {
            let until = ends_ms.map_or(now, |end| clock.moment_of(end) + Duration::from_millis(1));
            self.checks.borrow_mut().disown(&token, now, until);
        }
    }

    /// Checks that no older waiter exists when a try is granted a lock.
    pub(super) fn check_order(&self, name: &LockName, fence: Option<Fence>) {
        // Requests for members of a pool draw their tickets before they join the queues.
        let Some(fence) = fence.filter(|_| self.checks.borrow().is_calm && !name.as_str().starts_with("p:")) else {
            return;
        };
        let mut network = self.network.borrow_mut();
        let queue = network.primary().locks.get(name).map(|lock| lock.queue.clone()).unwrap_or_default();
        drop(network);
        if queue.iter().any(|waiting| waiting.ticket < fence.get() && waiting.inbox.is_some()) {
            self.fail(|| format!("a try took \"{name}\" before an older waiter"));
        }
    }

    /// A holder is notified that its lease is lost. Checks that it is in time unless something else failed.
    pub(super) fn knows_loss(&self, process: usize, lease: &LeaseCell, why: LossReason) {
        let is_prompt = self.plan.setup.latency.spike_one_in == 0;
        let checks = self.checks.borrow();
        let (ttl, is_renewed) = {
            let state = lease.state();
            (state.ttl.duration(), state.plan.every.is_some())
        };
        // A room may have asked with the shorter ttl of a task that has left, so pushes have to be quick.
        let is_quick = self.plan.setup.latency.usual_ms <= 2;
        if checks.is_calm && is_quick && why == LossReason::Expired && is_renewed && ttl >= Duration::from_secs(1) {
            drop(checks);
            let name = &lease.name;
            return self.fail(|| format!("the lease of \"{name}\" was not renewed in time, though nothing failed"));
        }
        if !is_prompt {
            return;
        }
        let Some(disowned) = checks.disowned.get(&lease.token) else { return };
        let every = crate::lease::belief::check_every(ttl);
        let limit = disowned.at + every + ONE_TIMEOUT;
        let in_time = disowned.is_regained || Moment::now() <= limit || self.undisturbed_since(process) > disowned.at;
        drop(checks);
        if !in_time {
            self.fail(|| {
                format!("{} learned late that its lease of \"{}\" was lost", self.name_of(process), lease.name)
            });
        }
    }

    /// A token has left, and the store has confirmed it.
    pub(super) fn has_left(&self, name: &LockName, token: &Token) {
        let (can_kill, now) = (self.checks.borrow().can_kill, Moment::now());
        if !self.checks.borrow().leave_ran.contains(token) {
            return;
        }
        self.checks.borrow_mut().left.insert(token.clone());
        let mut network = self.network.borrow_mut();
        let now_ms = network.clock.now_ms(now);
        let is_held = network.primary().holder(name, now_ms).is_some_and(|(holder, _)| holder == *token);
        let is_queued =
            network.primary().locks.get(name).is_some_and(|lock| lock.queue.iter().any(|w| w.token == *token));
        drop(network);
        if can_kill && (is_held || is_queued) {
            self.fail(|| format!("a token that has left is still known to \"{name}\""));
        }
    }

    /// The end of a world: no task waits, and nothing is left behind.
    pub(super) fn check_the_end(&self) {
        if self.open_tasks.get() > 0 {
            let open = self.open_tasks.get();
            return self.fail(|| format!("{open} tasks wait for ever"));
        }
        for process in self.processes.borrow().iter().flatten() {
            if let Some(what) = process.unfinished() {
                return self.fail(|| what);
            }
        }
        // If nothing failed, nothing is left now. Otherwise what was lost ends by itself.
        let all_ended = self.began + self.plan.quiet_from + LEFT_FOR;
        let now = if self.checks.borrow().is_calm { Moment::now() } else { Moment::now().max(all_ended) };
        let mut network = self.network.borrow_mut();
        let now_ms = network.clock.now_ms(now);
        let locks = &mut network.primary().locks;
        locks.values_mut().for_each(|lock| lock.lapse(now_ms));
        locks.retain(|_, lock| !lock.is_gone());
        let left = locks.keys().next().cloned();
        drop(network);
        if let Some(name) = left {
            self.fail(|| format!("something is left of \"{name}\""));
        }
    }
}
