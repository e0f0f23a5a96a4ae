//! What can happen next, and what must be true afterwards.

use super::client::{Client, Lease, User};
use super::driver::Driver;
use super::message::Verb;
use super::rule::Violation;
use super::world::{NOW, Operates, Operator, Setup, World, client_of, number_of};
use crate::clock::Moment;
use crate::facts::Token;

/// Ticks after which a wait that nothing disturbs must be over.
const PATIENCE: u8 = 24;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Tick,
    Try(u8),
    Wait(u8),
    Ask(u8),
    Probe(u8),
    Renew(u8),
    Check(u8),
    HandOn(u8),
    /// Releases what it holds, and gives up what it waits for.
    Close(u8),
    /// Leaves again under a token that may come back.
    LeaveAgain(u8),
    Run(u8),
    RunOld(u8),
    /// The server notices that a connection is dead.
    OldEnds(u8),
    Read(u8),
    /// Reads a push before the answers that came before it.
    ReadPush(u8),
    Cut(u8),
    Reconnect(u8),
    Die(u8),
    LosePush(u8),
    Look,
    Evict,
}

impl World {
    pub(super) fn steps(&self, setup: &Setup) -> Vec<Step> {
        let mut steps = Vec::with_capacity(16);
        for c in 0..setup.clients {
            self.steps_of(setup, c, &mut steps);
        }
        match self.rest.operator {
            Operator::Ready if self.held().is_some() => steps.push(Step::Look),
            Operator::Looked(_) => steps.push(Step::Evict),
            _ => {}
        }
        steps.push(Step::Tick);
        steps
    }

    fn steps_of(&self, setup: &Setup, c: u8, steps: &mut Vec<Step>) {
        let client = &self.clients[usize::from(c)];
        if client.old.as_ref().is_some_and(|requests| !requests.is_empty()) {
            steps.push(Step::RunOld(c));
        }
        if client.old.is_some() {
            steps.push(Step::OldEnds(c));
        }
        if !client.alive {
            return;
        }
        if !client.requests.is_empty() && client.answers.len() < setup.most_answers {
            steps.push(Step::Run(c));
        }
        if !client.answers.is_empty() {
            steps.push(Step::Read(c));
            if client.is_waiting() && client.answers.iter().skip(1).any(|answer| answer.says.is_push()) {
                steps.push(Step::ReadPush(c));
            }
        }
        if client.up && client.requests.len() < setup.most_requests {
            steps_of_own(client, setup, c, steps);
            if client.closing.iter().any(|closing| self.comes_back(&closing.token, closing.asking)) {
                steps.push(Step::LeaveAgain(c));
            }
        }
        if !client.is_idle() {
            steps.push(Step::Close(c));
        }
        if !client.up {
            steps.push(Step::Reconnect(c));
        }
        if self.rest.faults > 0 {
            // A cut or a death of a client that is doing nothing is of no interest.
            let busy = !client.is_idle() || !client.closing.is_empty() || !client.requests.is_empty();
            if client.up && busy {
                steps.push(Step::Cut(c));
            }
            if busy {
                steps.push(Step::Die(c));
            }
            if client.answers.iter().any(|answer| answer.says.is_push()) {
                steps.push(Step::LosePush(c));
            }
        }
    }

    /// Whether a token that has left once is known to the lock again.
    fn comes_back(&self, token: &Token, asking: bool) -> bool {
        !asking && self.knows(token)
    }

    pub(super) fn take(&mut self, setup: &Setup, step: Step) -> Result<(), Violation> {
        let at = usize::from;
        if matches!(step, Step::Cut(_) | Step::Die(_) | Step::LosePush(_)) {
            self.rest.faults -= 1;
        }
        match step {
            Step::Tick => self.tick(setup),
            Step::Try(c) => return self.driver(setup, c).begin(false),
            Step::Wait(c) => return self.driver(setup, c).begin(true),
            Step::Ask(c) => return self.driver(setup, c).ask(),
            Step::Probe(c) => self.driver(setup, c).probe(),
            Step::Renew(c) => self.driver(setup, c).look_at_lease(true),
            Step::Check(c) => self.driver(setup, c).look_at_lease(false),
            Step::HandOn(c) => self.driver(setup, c).hand_on(),
            Step::Close(c) => return self.driver(setup, c).close(),
            Step::LeaveAgain(c) => {
                let closing = self.clients[at(c)].closing.iter();
                let back: Vec<Token> = closing
                    .filter(|closing| self.comes_back(&closing.token, closing.asking))
                    .map(|closing| closing.token.clone())
                    .collect();
                back.iter().for_each(|token| self.driver(setup, c).leave_again(token));
            }
            Step::Run(c) => self.run(setup, at(c), false),
            Step::RunOld(c) => self.run(setup, at(c), true),
            Step::OldEnds(c) => self.clients[at(c)].old = None,
            Step::Read(c) => {
                let tried = matches!(self.clients[at(c)].user, User::Trying { .. });
                self.driver(setup, c).read(false)?;
                if let (true, Some(lease)) = (tried, self.clients[at(c)].holding()) {
                    return self.in_order(setup, lease.fence);
                }
            }
            Step::ReadPush(c) => return self.driver(setup, c).read(true),
            Step::Cut(c) => return self.driver(setup, c).cut(),
            Step::Reconnect(c) => return self.driver(setup, c).reconnect(),
            Step::Die(c) => self.driver(setup, c).die(),
            Step::LosePush(c) => {
                let answers = &mut self.clients[at(c)].answers;
                if let Some(place) = answers.iter().position(|answer| answer.says.is_push()) {
                    answers.remove(place);
                }
            }
            Step::Look => {
                self.rest.operator = self.held().map_or(Operator::Done, |(token, ..)| Operator::Looked(token.clone()));
            }
            Step::Evict => self.evict(setup),
        }
        Ok(())
    }

    fn driver<'a>(&'a mut self, setup: &'a Setup, c: u8) -> Driver<'a> {
        Driver { setup, id: c, client: &mut self.clients[usize::from(c)], rest: &mut self.rest }
    }

    /// What must be true of every world.
    pub(super) fn check(&self, setup: &Setup) -> Result<(), Violation> {
        let leases = || self.clients.iter().flat_map(Client::leases);
        if leases().any(Lease::is_revived) {
            return Err(Violation::Revived);
        }
        let excused = |token: &Token| !setup.force_counts && self.rest.forced.as_ref() == Some(token);
        if leases().filter(|lease| lease.state.belief.is_valid(NOW) && !excused(&lease.token)).count() > 1 {
            return Err(Violation::TwoHolders);
        }
        if let (Some((token, ends, _)), Some((doomed, latest))) = (self.held(), &self.rest.doomed)
            && token == doomed
            && ends > *latest
        {
            return Err(Violation::TakenAwayAndProlonged);
        }
        let waiting = self.lock.queue.iter().map(|w| &w.token);
        let is_done_with = |token: &Token| {
            let client = &self.clients[client_of(token)];
            client.alive && !client.uses(token)
        };
        if waiting.chain(self.held().map(|(token, ..)| token)).any(is_done_with) {
            return Err(Violation::Leaked);
        }
        Ok(())
    }

    /// If from now on nothing fails and every client that gets the lock gives it back, no client waits forever.
    pub(super) fn ends_well(&self, setup: &Setup) -> Result<(), Violation> {
        if !setup.liveness {
            return Ok(());
        }
        let mut world = self.clone();
        let mut waiting: Vec<bool> = world.clients.iter().map(Client::is_waiting).collect();
        let mut text = Vec::new();
        for _ in 0..PATIENCE {
            for c in 0..setup.clients {
                let held = world.settle(setup, c)?;
                let waits = &mut waiting[usize::from(c)];
                *waits &= !held;
                if *waits && setup.operator == Operates::Never && world.clients[usize::from(c)].is_idle() {
                    return Err(Violation::TurnedAway);
                }
            }
            if world.clients.iter().all(|client| client.is_idle() && client.closing.is_empty()) {
                return Ok(());
            }
            world.take(setup, Step::Tick)?;
            world.tidy(setup, &mut text);
        }
        Err(Violation::WaitsForever)
    }

    /// Everything of one client arrives and is answered. It confirms and gives back what it gets, and asks again for what
    /// it does not get. Returns whether it ever held the lock.
    fn settle(&mut self, setup: &Setup, c: u8) -> Result<bool, Violation> {
        let at = usize::from(c);
        while self.clients[at].old.as_ref().is_some_and(|requests| !requests.is_empty()) {
            self.take(setup, Step::RunOld(c))?;
        }
        self.clients[at].old = None;
        if !self.clients[at].alive {
            return Ok(true);
        }
        if !self.clients[at].up {
            self.take(setup, Step::Reconnect(c))?;
        }
        let (mut asked, mut held) = (false, false);
        loop {
            let client = &self.clients[at];
            let step = match &client.user {
                _ if !client.answers.is_empty() => Step::Read(c),
                _ if !client.requests.is_empty() => Step::Run(c),
                User::Holding(lease) => {
                    held |= lease.state.belief.is_valid(NOW);
                    confirmation(lease, c)?.unwrap_or(Step::Close(c))
                }
                User::Waiting(_) if !asked => Step::Ask(c),
                _ => return Ok(held),
            };
            asked |= matches!(step, Step::Ask(_));
            self.take(setup, step)?;
        }
    }

    pub(super) fn words(&self, step: Step) -> String {
        let name = |c: u8| char::from(b'A' + c);
        let k = |token: &Token| number_of(token) % 16;
        let client = |c: u8| &self.clients[usize::from(c)];
        let first = |c: u8| client(c).requests.first().map(|r| format!("{:?} {}", r.verb, k(&r.token)));
        let old = |c: u8| client(c).old.iter().flatten().next().map(|r| format!("{:?} {}", r.verb, k(&r.token)));
        let answer = |c: u8| client(c).answers.first().map(|a| format!("{:?} {}", a.says, k(&a.token)));
        match step {
            Step::Tick => "a tick passes".to_owned(),
            Step::Try(c) => format!("{} sends a try", name(c)),
            Step::Wait(c) => format!("{} waits in line", name(c)),
            Step::Ask(c) => format!("{} asks again", name(c)),
            Step::Probe(c) => format!("{} sends a probe", name(c)),
            Step::Renew(c) => format!("{} sends a renewal", name(c)),
            Step::Check(c) => format!("{} sends a check", name(c)),
            Step::HandOn(c) => format!("{} hands its lease on to another token", name(c)),
            Step::Close(c) => format!("{} gives up what it has or waits for", name(c)),
            Step::LeaveAgain(c) => format!("{} leaves again", name(c)),
            Step::Run(c) => format!("{}'s {} runs", name(c), first(c).unwrap_or_default()),
            Step::RunOld(c) => format!("{}'s {} runs from the old connection", name(c), old(c).unwrap_or_default()),
            Step::OldEnds(c) => format!("the server notices that {}'s old connection is dead", name(c)),
            Step::Read(c) => format!("{} reads {}", name(c), answer(c).unwrap_or_default()),
            Step::ReadPush(c) => format!("{} reads a push before its answers", name(c)),
            Step::Cut(c) => format!("{}'s connection is cut", name(c)),
            Step::Reconnect(c) => format!("{} reconnects", name(c)),
            Step::Die(c) => format!("{} dies", name(c)),
            Step::LosePush(c) => format!("a push to {} is lost", name(c)),
            Step::Look => "the operator looks".to_owned(),
            Step::Evict => "the operator evicts".to_owned(),
        }
    }

    /// A world in one line.
    pub(super) fn summary(&self) -> String {
        let shown = |token: &Token| format!("{}{}", char::from(b'A' + number_of(token) / 16), number_of(token) % 16);
        let holder = self.held().map_or("free".to_owned(), |(token, ends, revoked)| {
            format!("{} for {ends}{}", shown(token), if revoked { " R" } else { "" })
        });
        let queue: Vec<String> = self.lock.queue.iter().map(|w| shown(&w.token)).collect();
        let left = |until: Moment| NOW.until(until).as_millis();
        let client = |client: &Client| {
            let user = match &client.user {
                User::Idle => "idle".to_owned(),
                User::Trying { token, .. } => format!("tries {}", shown(token)),
                User::Waiting(_) => "waits".to_owned(),
                User::Holding(lease) if lease.state.belief.is_valid(NOW) => {
                    format!("holds {} for {} ms", shown(&lease.token), left(lease.state.belief.valid_until()))
                }
                User::Holding(lease) => format!("held {}", shown(&lease.token)),
                User::HandingOn { lease, to, .. } => format!("hands {} on to {}", shown(&lease.token), shown(to)),
            };
            let closing: Vec<String> = client.closing.iter().map(|closing| shown(&closing.token)).collect();
            format!("{user}, closing {closing:?}")
        };
        let clients: Vec<String> = self.clients.iter().map(client).collect();
        format!("| {holder}, queue {queue:?} | {}", clients.join(" | "))
    }
}

/// What a client may do by itself.
fn steps_of_own(client: &Client, setup: &Setup, c: u8, steps: &mut Vec<Step>) {
    match &client.user {
        User::Idle if client.attempts < setup.attempts[usize::from(c)] => {
            if setup.any_beginning || c == 0 {
                steps.push(Step::Try(c));
            }
            if setup.any_beginning || c > 0 {
                steps.push(Step::Wait(c));
            }
        }
        User::Waiting(_) => {
            if client.rooms.attempts(false).next().is_some() {
                steps.push(Step::Ask(c));
            }
            if setup.probes && client.requests.iter().all(|request| request.verb != Verb::Probe) {
                steps.push(Step::Probe(c));
            }
        }
        User::Holding(lease) if lease.state.belief.is_valid(NOW) => {
            if lease.sent.is_none() {
                if lease.state.renew_at.is_some() {
                    steps.push(Step::Renew(c));
                }
                if setup.checks {
                    steps.push(Step::Check(c));
                }
            }
            if setup.hands_on && !lease.is_handed_on {
                steps.push(Step::HandOn(c));
            }
        }
        _ => {}
    }
}

/// How a lease that was granted by message is confirmed.
fn confirmation(lease: &Lease, c: u8) -> Result<Option<Step>, Violation> {
    let state = &lease.state;
    if !state.rewrite || !state.belief.is_valid(NOW) {
        return Ok(None);
    }
    if state.renew_at.is_some() { Ok(Some(Step::Renew(c))) } else { Err(Violation::Unconfirmed) }
}

impl Operates {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Never => "",
            Self::Revokes => ", an operator who revokes",
            Self::Forces => ", an operator who forces",
        }
    }
}
