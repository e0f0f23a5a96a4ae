//! The client's side of a small world: what it sends, what it believes, and by which rules.

use std::time::Duration;

use super::super::Waiting;
use super::message::{Answer, Request, Saw, Says, Verb};
use super::rule::{ClientRule, Violation};
use super::world::{
    Client, Closing, OLD, Phase, Setup, TICK_MS, World, client_of, handed_on, moment, number, number_of,
};
use crate::lease::Belief;

impl World {
    pub(super) fn begin(&mut self, setup: &Setup, c: usize, wait: bool) {
        self.next_attempt(setup, c);
        let client = &mut self.clients[c];
        if wait {
            client.phase = Phase::Waiting { asking: true };
            client.send(setup, Verb::Acquire { ticket: 0 });
        } else {
            client.phase = Phase::Trying;
            client.send(setup, Verb::Plant);
        }
    }

    fn next_attempt(&mut self, setup: &Setup, c: usize) {
        let client = &mut self.clients[c];
        client.attempt += 1;
        if setup.client_rules.keep(ClientRule::TokenDeadAfterReleaseOrLeave) || client.token == 0 {
            client.token = number(c, client.attempt);
        }
        client.ticket = 0;
    }

    pub(super) fn ask(&mut self, setup: &Setup, c: usize) {
        let client = &mut self.clients[c];
        client.phase = Phase::Waiting { asking: true };
        client.send(setup, Verb::Acquire { ticket: client.ticket });
    }

    pub(super) fn renew(&mut self, setup: &Setup, c: usize) {
        let client = &mut self.clients[c];
        let Phase::Holding { asking, .. } = client.phase else { return };
        client.phase = Phase::Holding { renewing: true, asking };
        client.send(setup, Verb::Renew { fence: client.fence, hand_on: false });
    }

    /// Belief in the present token ends before the lease can be another's.
    pub(super) fn hand_on(&mut self, setup: &Setup, c: usize) {
        let client = &mut self.clients[c];
        client.until = 0;
        client.phase = Phase::HandingOn;
        client.send(setup, Verb::Renew { fence: client.fence, hand_on: true });
    }

    fn handed_on(&mut self, setup: &Setup, c: usize, age: u8) {
        let client = &mut self.clients[c];
        if client.phase != Phase::HandingOn {
            return;
        }
        let belief = Belief::new(moment(age), lasting(setup.ttl));
        if !belief.is_valid(moment(0)) {
            return self.hand_on(setup, c);
        }
        client.token = handed_on(client.token);
        client.until = ticks(&belief);
        client.phase = Phase::Holding { renewing: false, asking: false };
    }

    /// The present attempt is over: belief is given up, then the lock.
    pub(super) fn close(&mut self, setup: &Setup, c: usize) {
        let client = &mut self.clients[c];
        let asks = match client.phase {
            Phase::Holding { asking, .. } => asking && setup.client_rules.keep(ClientRule::HolderThatStillAsksLeaves),
            Phase::Yielding => false,
            // A leave does not mind when the lease was handed on and that was not heard.
            Phase::Confirming { .. } | Phase::Idle | Phase::Trying | Phase::Waiting { .. } | Phase::HandingOn => true,
        };
        if setup.client_rules.keep(ClientRule::BeliefGivenUpBeforeRelease) {
            client.until = 0;
        }
        client.phase = Phase::Idle;
        let closing = Closing { token: client.token, leave: asks };
        client.closing.push(closing);
        client.send_closing(setup, closing);
    }

    /// The connection is gone; what was sent may still run.
    pub(super) fn cut(&mut self, c: usize) {
        let client = &mut self.clients[c];
        client.up = false;
        client.answers.clear();
        let sent = std::mem::take(&mut client.requests).into_iter().map(|request| Request { age: OLD, ..request });
        client.old.get_or_insert_default().extend(sent);
    }

    pub(super) fn die(&mut self, c: usize) {
        if self.clients[c].up {
            self.cut(c);
        }
        let client = &mut self.clients[c];
        client.alive = false;
        client.phase = Phase::Idle;
        client.until = 0;
        client.closing.clear();
    }

    pub(super) fn reconnect(&mut self, setup: &Setup, c: usize) {
        let rules = setup.client_rules;
        let client = &mut self.clients[c];
        if setup.kills && rules.keep(ClientRule::OldConnectionKilledBeforeReAsking) {
            client.old = None;
        }
        client.up = true;
        client.stamp = OLD;
        for closing in client.closing.clone() {
            client.send_closing(setup, closing);
        }
        match client.phase {
            Phase::Idle => {}
            Phase::Yielding if rules.keep(ClientRule::TokenDeadAfterYield) => self.close(setup, c),
            Phase::Waiting { .. } | Phase::Confirming { asking: true, .. } => self.ask(setup, c),
            Phase::Trying | Phase::Confirming { .. }
                if !setup.kills && rules.keep(ClientRule::TryNotResentBesideAnOldConnection) =>
            {
                self.close(setup, c);
            }
            Phase::Trying | Phase::Confirming { .. } | Phase::Yielding => {
                client.phase = Phase::Trying;
                client.send(setup, Verb::Plant);
            }
            Phase::HandingOn => self.hand_on(setup, c),
            // A question that was on its way may have run.
            Phase::Holding { asking, .. } => client.phase = Phase::Holding { renewing: false, asking },
        }
    }

    /// Reads the first answer. `hurried`: a pushed grant has too little time left to be worth
    /// believing before its confirmation is read.
    pub(super) fn read(&mut self, setup: &Setup, c: usize, hurried: bool) -> Result<(), Violation> {
        let client = &mut self.clients[c];
        let answer = client.answers.remove(0);
        if answer.age < client.stamp {
            client.stamp = answer.age;
        }
        if matches!(answer.says, Says::Closed | Says::CloseAgain) {
            self.closed(setup, c, answer);
            return Ok(());
        }
        if answer.token != client.token || client.phase == Phase::Idle {
            let revive = matches!(answer.says, Says::Renewed { .. })
                && !setup.client_rules.keep(ClientRule::GivenUpBeliefNeverRevived)
                && client.phase == Phase::Idle
                && answer.token == client.token;
            return if revive { self.renewed(setup, c, answer) } else { Ok(()) };
        }
        match answer.says {
            Says::Tried { saw, fence, queue } => self.tried(setup, c, answer.age, saw, fence, queue),
            Says::YieldedOurs => {
                let (fence, asked) = (client.fence, client.asked);
                if !self.believe(setup, c, asked, setup.ttl, fence)? {
                    self.close(setup, c);
                }
                self.in_order(setup, fence)
            }
            Says::YieldedNot => {
                client.phase = Phase::Idle;
                Ok(())
            }
            Says::YieldedAgain => {
                client.send(setup, Verb::Yield { fence: client.fence });
                Ok(())
            }
            Says::YieldedRevoked | Says::AcquiredRevoked | Says::RenewLost | Says::RenewRevoked | Says::PushRevoked => {
                // A waiter whose provisional lease was revoked may never have known of it.
                self.close(setup, c);
                Ok(())
            }
            Says::Acquired { fence } => self.acquired(setup, c, answer.age, fence),
            Says::Queued { ticket } | Says::AcquireAgain { ticket } => {
                self.queued(setup, c, ticket, matches!(answer.says, Says::AcquireAgain { .. }));
                Ok(())
            }
            Says::Renewed { .. } => self.renewed(setup, c, answer),
            Says::HandedOn => {
                self.handed_on(setup, c, answer.age);
                Ok(())
            }
            Says::PushGranted { fence, lasts } => self.pushed(setup, c, fence, lasts, hurried),
            Says::Closed | Says::CloseAgain => Ok(()),
        }
    }

    fn closed(&mut self, setup: &Setup, c: usize, answer: Answer) {
        let client = &mut self.clients[c];
        let Some(place) = client.closing.iter().position(|closing| closing.token == answer.token) else { return };
        if answer.says == Says::CloseAgain {
            client.send_closing(setup, client.closing[place]);
            return;
        }
        client.closing.remove(place);
        if client.phase == Phase::Idle {
            client.until = 0;
        }
    }

    fn tried(&mut self, setup: &Setup, c: usize, age: u8, saw: Saw, fence: u64, queue: bool) -> Result<(), Violation> {
        let rules = setup.client_rules;
        let yields = queue && rules.keep(ClientRule::TryYieldsToQueue);
        let client = &mut self.clients[c];
        match saw {
            Saw::Another => {
                self.ask(setup, c);
                Ok(())
            }
            Saw::Own { revoked: true, .. } => {
                self.close(setup, c);
                Ok(())
            }
            Saw::Own { fence: written, .. } if rules.keep(ClientRule::ResentTryRenewsFirst) => {
                client.fence = if written == 0 { fence } else { written };
                client.phase = Phase::Confirming { queue: yields, asking: false };
                client.send(setup, Verb::Renew { fence: client.fence, hand_on: false });
                Ok(())
            }
            Saw::Nothing | Saw::Own { .. } if yields => {
                self.yield_to_queue(setup, c, age, fence);
                Ok(())
            }
            Saw::Nothing | Saw::Own { .. } => {
                if !self.believe(setup, c, age, setup.ttl, fence)? {
                    self.too_late(setup, c, fence);
                    return Ok(());
                }
                self.in_order(setup, fence)
            }
        }
    }

    fn yield_to_queue(&mut self, setup: &Setup, c: usize, age: u8, fence: u64) {
        let client = &mut self.clients[c];
        client.phase = Phase::Yielding;
        client.fence = fence;
        client.asked = age;
        client.send(setup, Verb::Yield { fence });
    }

    fn acquired(&mut self, setup: &Setup, c: usize, age: u8, fence: u64) -> Result<(), Violation> {
        let client = &mut self.clients[c];
        match client.phase {
            Phase::Waiting { .. } => {
                let believed = self.believe(setup, c, age, setup.ttl, fence)?;
                if !believed {
                    self.too_late(setup, c, fence);
                }
            }
            Phase::Holding { renewing, .. } => {
                client.phase = Phase::Holding { renewing, asking: false };
                if client.fence != fence || !client.prolong(setup, age) {
                    self.close(setup, c);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn queued(&mut self, setup: &Setup, c: usize, ticket: u64, again: bool) {
        let client = &mut self.clients[c];
        match client.phase {
            Phase::Waiting { .. } => {
                client.ticket = ticket;
                client.phase = Phase::Waiting { asking: false };
                if again {
                    self.ask(setup, c);
                }
            }
            // We stand in line again: the lease ended without our knowing. `close` must leave.
            Phase::Holding { .. } => self.close(setup, c),
            _ => {}
        }
    }

    fn renewed(&mut self, setup: &Setup, c: usize, answer: Answer) -> Result<(), Violation> {
        let rules = setup.client_rules;
        let client = &mut self.clients[c];
        match client.phase {
            Phase::Confirming { queue: true, .. } => {
                let fence = client.fence;
                self.yield_to_queue(setup, c, answer.age, fence);
            }
            Phase::Confirming { queue: false, asking } => {
                let fence = client.fence;
                if self.believe(setup, c, answer.age, setup.ttl, fence)? {
                    self.clients[c].phase = Phase::Holding { renewing: false, asking };
                } else {
                    self.too_late(setup, c, fence);
                }
            }
            Phase::Holding { asking, .. } => {
                client.phase = Phase::Holding { renewing: false, asking };
                if !client.prolong(setup, answer.age) {
                    self.close(setup, c);
                }
            }
            Phase::Idle if !rules.keep(ClientRule::GivenUpBeliefNeverRevived) => {
                client.until = ticks(&Belief::new(moment(answer.age), lasting(setup.ttl)));
            }
            _ => {}
        }
        Ok(())
    }

    fn pushed(&mut self, setup: &Setup, c: usize, fence: u64, lasts: u8, hurried: bool) -> Result<(), Violation> {
        let rules = setup.client_rules;
        let client = &mut self.clients[c];
        let Phase::Waiting { asking } = client.phase else { return Ok(()) };
        let age = match () {
            () if !rules.keep(ClientRule::PushNotStampedByArrival) => 0,
            () if !rules.keep(ClientRule::PushNotStampedByNewestSent) => client.sent,
            () => client.stamp,
        };
        if hurried && Belief::new(moment(age), lasting(lasts)).is_valid(moment(0)) {
            client.fence = fence;
            client.phase = Phase::Confirming { queue: false, asking: true };
            client.send(setup, Verb::Renew { fence, hand_on: false });
        } else if self.believe(setup, c, age, lasts, fence)? {
            self.clients[c].phase = Phase::Holding { renewing: false, asking };
        } else if !asking {
            self.too_late(setup, c, fence);
        }
        Ok(())
    }

    fn too_late(&mut self, setup: &Setup, c: usize, fence: u64) {
        if setup.client_rules.keep(ClientRule::LateGrantAskedAgainNotRenewed) {
            self.ask(setup, c);
            return;
        }
        let client = &mut self.clients[c];
        client.fence = fence;
        client.phase = Phase::Confirming { queue: false, asking: true };
        client.send(setup, Verb::Renew { fence, hand_on: false });
    }

    /// Whether a grant is still worth something.
    fn believe(&mut self, setup: &Setup, c: usize, age: u8, lasts: u8, fence: u64) -> Result<bool, Violation> {
        let age = if setup.client_rules.keep(ClientRule::BeliefCountsFromAsking) { age } else { 0 };
        let belief = Belief::new(moment(age), lasting(lasts));
        if !belief.is_valid(moment(0)) {
            return Ok(false);
        }
        let client = &mut self.clients[c];
        client.until = ticks(&belief);
        client.fence = fence;
        client.phase = Phase::Holding { renewing: false, asking: false };
        if client.token != self.rest.forced || setup.force_counts {
            if fence <= self.rest.highest {
                return Err(Violation::FenceFell);
            }
            self.rest.highest = fence;
        }
        Ok(true)
    }

    /// A try has begun to believe: nobody who came before it may still stand in line.
    fn in_order(&self, setup: &Setup, fence: u64) -> Result<(), Violation> {
        let passed = |w: &Waiting| {
            let token = number_of(&w.token);
            w.ticket < fence && self.clients[client_of(token)].served != token
        };
        if setup.in_order && self.lock.queue.iter().any(passed) { Err(Violation::OutOfOrder) } else { Ok(()) }
    }
}

impl Client {
    fn send(&mut self, setup: &Setup, verb: Verb) {
        let token = self.token;
        self.send_for(setup, verb, token);
    }

    fn send_closing(&mut self, setup: &Setup, closing: Closing) {
        self.send_for(setup, if closing.leave { Verb::Leave } else { Verb::Release }, closing.token);
    }

    fn send_for(&mut self, setup: &Setup, verb: Verb, token: u8) {
        if self.up {
            // Nothing is counted from the answer to a release.
            let age = if matches!(verb, Verb::Release | Verb::Leave) { OLD } else { 0 };
            self.requests.push(Request { verb, token, age });
            if !setup.client_rules.keep(ClientRule::PushNotStampedByNewestSent) {
                self.sent = 0;
            }
        }
    }

    /// A renewal was answered with yes; the production arithmetic says whether that counts.
    fn prolong(&mut self, setup: &Setup, age: u8) -> bool {
        let mut belief = Belief::until(moment(0) + lasting(self.until));
        let age = if setup.client_rules.keep(ClientRule::BeliefCountsFromAsking) { age } else { 0 };
        let counts = belief.renewed(moment(0), moment(age), lasting(setup.ttl));
        self.until = if counts { ticks(&belief) } else { 0 };
        counts
    }
}

fn lasting(ticks: u8) -> Duration {
    Duration::from_millis(u64::from(ticks) * TICK_MS)
}

/// At how many ticks from now on, the present one included, a belief is valid.
fn ticks(belief: &Belief) -> u8 {
    let left = moment(0).until(belief.valid_until());
    u8::try_from(left.as_millis().div_ceil(u128::from(TICK_MS))).expect("short")
}
