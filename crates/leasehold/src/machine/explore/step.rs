//! What can happen next, and what must be true afterwards.

use super::message::Says;
use super::rule::Violation;
use super::world::{Client, Closing, Operates, Operator, Phase, Setup, World, client_of, handed_on, number_of};

/// Requests on their way at most before a client sends one it could do without.
const MOST_REQUESTS: usize = 3;
/// Answers a client leaves unread at most.
const MOST_ANSWERS: usize = 4;
/// Ticks after which a wait that nothing disturbs must be over.
const PATIENCE: u8 = 24;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Tick,
    Try(u8),
    Wait(u8),
    Ask(u8),
    Renew(u8),
    HandOn(u8),
    /// Releases what it holds, leaves what it waits for.
    Close(u8),
    Run(u8),
    RunOld(u8),
    /// The server notices that a connection is dead.
    OldEnds(u8),
    Read(u8),
    /// The same for a grant with little time left.
    ReadHurried(u8),
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
        if !client.requests.is_empty() && client.answers.len() < MOST_ANSWERS {
            steps.push(Step::Run(c));
        }
        if !client.answers.is_empty() {
            steps.push(Step::Read(c));
        }
        if let (Some(Says::PushGranted { .. }), Phase::Waiting { .. }) =
            (client.answers.first().map(|a| a.says), client.phase)
        {
            steps.push(Step::ReadHurried(c));
        }
        if client.up && client.requests.len() < MOST_REQUESTS {
            match client.phase {
                Phase::Idle if client.attempt < setup.attempts[usize::from(c)] && client.until == 0 => {
                    steps.extend([Step::Try(c), Step::Wait(c)]);
                }
                Phase::Waiting { asking: false } => steps.push(Step::Ask(c)),
                Phase::Holding { renewing: false, .. } if client.until > 0 => steps.push(Step::Renew(c)),
                _ => {}
            }
        }
        let unasked = matches!(client.phase, Phase::Holding { asking: false, .. });
        if setup.hands_on && unasked && client.up && client.until > 0 && client.token != handed_on(client.token) {
            steps.push(Step::HandOn(c));
        }
        if client.phase != Phase::Idle {
            steps.push(Step::Close(c));
        }
        if !client.up {
            steps.push(Step::Reconnect(c));
        }
        if self.rest.faults > 0 {
            // A cut or a death of a client that has nothing going on is of no interest.
            let busy = client.phase != Phase::Idle || !client.closing.is_empty() || !client.requests.is_empty();
            if client.up && busy {
                steps.push(Step::Cut(c));
            }
            if busy {
                steps.push(Step::Die(c));
            }
            if client.answers.iter().any(|a| a.says.is_push()) {
                steps.push(Step::LosePush(c));
            }
        }
    }

    pub(super) fn take(&mut self, setup: &Setup, step: Step) -> Result<(), Violation> {
        let at = usize::from;
        if matches!(step, Step::Cut(_) | Step::Die(_) | Step::LosePush(_)) {
            self.rest.faults -= 1;
        }
        match step {
            Step::Tick => self.tick(setup),
            Step::Try(c) => self.begin(setup, at(c), false),
            Step::Wait(c) => self.begin(setup, at(c), true),
            Step::Ask(c) => self.ask(setup, at(c)),
            Step::Renew(c) => self.renew(setup, at(c)),
            Step::HandOn(c) => self.hand_on(setup, at(c)),
            Step::Close(c) => self.close(setup, at(c)),
            Step::Run(c) => self.run(setup, at(c), false),
            Step::RunOld(c) => self.run(setup, at(c), true),
            Step::OldEnds(c) => self.clients[at(c)].old = None,
            Step::Read(c) => return self.read(setup, at(c), false),
            Step::ReadHurried(c) => return self.read(setup, at(c), true),
            Step::Cut(c) => self.cut(at(c)),
            Step::Reconnect(c) => self.reconnect(setup, at(c)),
            Step::Die(c) => self.die(at(c)),
            Step::LosePush(c) => {
                let answers = &mut self.clients[at(c)].answers;
                if let Some(place) = answers.iter().position(|a| a.says.is_push()) {
                    answers.remove(place);
                }
            }
            Step::Look => self.rest.operator = Operator::Looked(self.held().map_or(0, |(token, ..)| token)),
            Step::Evict => self.evict(setup),
        }
        Ok(())
    }

    /// What must be true of every world.
    pub(super) fn check(&self, setup: &Setup) -> Result<(), Violation> {
        let excused = |token: u8| !setup.force_counts && token == self.rest.forced;
        let believers = self.clients.iter().filter(|c| c.until > 0 && !excused(c.token)).count();
        if believers > 1 {
            return Err(Violation::TwoHolders);
        }
        if let (Some((token, ends, _)), Some((doomed, latest))) = (self.held(), self.rest.doomed)
            && token == doomed
            && ends > latest
        {
            return Err(Violation::TakenAwayAndProlonged);
        }
        let waiting = self.lock.queue.iter().map(|w| number_of(&w.token));
        if setup.kills && waiting.chain(self.held().map(|(token, ..)| token)).any(|token| self.is_done_with(token)) {
            return Err(Violation::Leaked);
        }
        Ok(())
    }

    /// Whether a live client has given a token up and heard that the lock knows.
    fn is_done_with(&self, token: u8) -> bool {
        let client = &self.clients[client_of(token)];
        let present = token == client.token && client.phase != Phase::Idle;
        // What was handed on and not heard of belongs to whoever knows its token: nobody undoes it.
        let unheard_of = token == handed_on(token) && token != client.token;
        client.alive && !present && !unheard_of && !client.closing.iter().any(|closing| closing.token == token)
    }

    /// If from now on nothing fails and everybody who gets the lock gives it back, nobody waits
    /// for ever.
    pub(super) fn ends_well(&self, setup: &Setup) -> Result<(), Violation> {
        if !setup.liveness {
            return Ok(());
        }
        let mut world = self.clone();
        let waits = |c: &Client| matches!(c.phase, Phase::Waiting { .. });
        let mut waiting: Vec<bool> = world.clients.iter().map(waits).collect();
        for _ in 0..PATIENCE {
            for c in 0..setup.clients {
                let held = world.settle(setup, c)?;
                let waits = &mut waiting[usize::from(c)];
                *waits &= !held;
                if *waits && setup.operator == Operates::Never && world.clients[usize::from(c)].phase == Phase::Idle {
                    return Err(Violation::TurnedAway);
                }
            }
            if world.clients.iter().all(|c| c.phase == Phase::Idle && c.closing.is_empty()) {
                return Ok(());
            }
            world.take(setup, Step::Tick)?;
            world.tidy(setup);
        }
        Err(Violation::WaitsForEver)
    }

    /// Everything of one client arrives and is answered; it gives back what it got, and asks again
    /// for what it did not get. Whether it ever held the lock.
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
            let step = match client.phase {
                _ if !client.answers.is_empty() => Step::Read(c),
                _ if !client.requests.is_empty() => Step::Run(c),
                Phase::Holding { .. } => Step::Close(c),
                Phase::Waiting { asking: false } if !asked => Step::Ask(c),
                _ => return Ok(held),
            };
            held |= client.until > 0;
            asked |= matches!(step, Step::Ask(_));
            self.take(setup, step)?;
        }
    }

    pub(super) fn words(&self, step: Step) -> String {
        let name = |c: u8| char::from(b'A' + c);
        let first =
            |c: u8| self.clients[usize::from(c)].requests.first().map(|r| format!("{:?} {}", r.verb, r.token % 8));
        let old = |c: u8| self.clients[usize::from(c)].old.iter().flatten().next().map(|r| format!("{:?}", r.verb));
        let answer =
            |c: u8| self.clients[usize::from(c)].answers.first().map(|a| format!("{:?} {}", a.says, a.token % 8));
        match step {
            Step::Tick => "a tick passes".to_owned(),
            Step::Try(c) => format!("{} sends a try", name(c)),
            Step::Wait(c) => format!("{} sends an acquire", name(c)),
            Step::Ask(c) => format!("{} asks again", name(c)),
            Step::Renew(c) => format!("{} sends a renewal", name(c)),
            Step::HandOn(c) => format!("{} hands its lease on to another token", name(c)),
            Step::Close(c) => format!("{} gives up what it has or waits for", name(c)),
            Step::Run(c) => format!("{}'s {} runs", name(c), first(c).unwrap_or_default()),
            Step::RunOld(c) => format!("{}'s {} runs from the old connection", name(c), old(c).unwrap_or_default()),
            Step::OldEnds(c) => format!("the server notices that {}'s old connection is dead", name(c)),
            Step::Read(c) => format!("{} reads {}", name(c), answer(c).unwrap_or_default()),
            Step::ReadHurried(c) => format!("{} reads {}, in a hurry", name(c), answer(c).unwrap_or_default()),
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
        let holder = self.held().map_or("free".to_owned(), |(token, ends, revoked)| {
            let mark = if revoked { " R" } else { "" };
            format!("{}{} for {ends}{mark}", char::from(b'A' + token / 8), token % 8)
        });
        let queue: Vec<u8> = self.lock.queue.iter().map(|w| number_of(&w.token)).collect();
        let client = |c: &Client| {
            let closing: Vec<u8> = c.closing.iter().map(|Closing { token, .. }| token % 8).collect();
            format!("{:?} believes {} closing {closing:?}", c.phase, c.until)
        };
        let clients: Vec<String> = self.clients.iter().map(client).collect();
        format!("| {holder}, queue {queue:?} | {}", clients.join(" | "))
    }
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
