//! A small world: one lock, its clients, and what is on its way between them.
//!
//! Time is counted in ticks and always seen from the present: when a tick passes, everything else becomes older, so that
//! worlds that differ only in their history are the same world. Fences, tickets and tokens are renumbered by rank for
//! the same reason.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use super::super::{Flag, InboxId, Limits, Lock, Slot};
use super::client::{Client, Closing};
use super::rule::EngineRule;
use crate::client::Policy;
use crate::client::visit::Visit;
use crate::clock::Moment;
use crate::facts::{Fence, Owner, Token, Ttl};
use crate::rules::Rule;

pub(super) const TICK_MS: u64 = 1_000;
pub(super) const TICK: Duration = Duration::from_millis(TICK_MS);
/// The present, always.
pub(super) const NOW: Moment = Moment::from_boot(Duration::from_millis(NOW_MS));
pub(super) const NOW_MS: u64 = 100 * TICK_MS;
/// Too long ago to count from.
pub(super) const OLD: Moment = Moment::from_boot(Duration::ZERO);
/// When a timer fires that this test fires at any time.
const SOME_TIME: Moment = Moment::from_boot(Duration::from_millis(u64::MAX / 2));
/// A number of ticks that never pass.
pub(super) const NEVER: u8 = 9;

/// What may happen in a world.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setup {
    pub(super) clients: u8,
    /// How often each client wants the lock.
    pub(super) attempts: [u8; 3],
    /// Cuts, deaths and lost messages, together.
    pub(super) faults: u8,
    pub(super) operator: Operates,
    pub(super) ttl: u8,
    pub(super) provisional: u8,
    pub(super) sweep: usize,
    pub(super) queue_ttl: u8,
    pub(super) without: Option<Rule>,
    pub(super) without_engine: Option<EngineRule>,
    /// Whether earlier waiters must be served first. That holds only while nothing fails.
    pub(super) in_order: bool,
    /// Whether a client may kill the connection it has lost. Otherwise a command that was sent on it can run at any time.
    pub(super) kills: bool,
    /// Whether every state is followed to its end to see that no client waits forever.
    pub(super) liveness: bool,
    /// Whether a holder that was forced out counts as a second holder.
    pub(super) force_counts: bool,
    /// Whether a holder may hand its lease on to another token.
    pub(super) hands_on: bool,
    /// Whether leases are renewed. A provisional grant is confirmed either way.
    pub(super) renews: bool,
    /// Whether any client may try or wait in line at once. Otherwise the first one tries, and the others wait.
    pub(super) any_beginning: bool,
    /// The number of requests on their way above which a client sends none that it could do without.
    pub(super) most_requests: usize,
    /// How many answers a client leaves unread.
    pub(super) most_answers: usize,
    /// The number of states after which the exploration goes no deeper.
    pub(super) most_states: usize,
    /// Whether a waiting client also sends a command that has nothing to do with the lock: a push probe.
    pub(super) probes: bool,
    /// Whether a holder also checks its lease without prolonging it.
    pub(super) checks: bool,
}

/// What the operator does, once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operates {
    Never,
    Revokes,
    Forces,
}

impl Setup {
    pub(super) fn limits(&self) -> Limits {
        Limits {
            provisional_ms: u64::from(self.provisional) * TICK_MS,
            sweep: self.sweep,
            queue_ttl_ms: u64::from(self.queue_ttl) * TICK_MS,
            poll_grace_ms: Limits::DEFAULT.poll_grace_ms,
        }
    }

    pub(super) fn ttl(&self) -> Ttl {
        Ttl::new(TICK * u32::from(self.ttl)).expect("a ttl")
    }

    pub(super) fn keeps(&self, rule: EngineRule) -> bool {
        self.without_engine != Some(rule)
    }
}

#[derive(Clone)]
pub(super) struct World {
    pub(super) lock: Lock,
    pub(super) counter: u64,
    pub(super) clients: Vec<Client>,
    pub(super) rest: Rest,
}

#[derive(Clone)]
pub(super) struct Rest {
    pub(super) faults: u8,
    pub(super) operator: Operator,
    /// The token that was forced out. Only fences protect from its client.
    pub(super) forced: Option<Token>,
    /// A lease that was taken away, and when it must end.
    pub(super) doomed: Option<(Token, u8)>,
    /// The highest fence that a client believed in.
    pub(super) highest: u64,
}

#[derive(Clone)]
pub(super) enum Operator {
    Ready,
    /// Has seen this token hold the lock.
    Looked(Token),
    Done,
}

/// Tokens are numbered: the client in the upper bits.
pub(super) fn token(number: u8) -> Token {
    static ALL: LazyLock<Vec<Token>> = LazyLock::new(|| {
        let text = |n: u8| format!("{}{}", char::from(b'A' + n / 16), char::from(b'A' + n % 16));
        let padded = |n: u8| text(n) + &"-".repeat(Token::LEN - 2);
        (0..48).map(|n| Token::parse(&padded(n)).expect("32 characters")).collect()
    });
    ALL[usize::from(number)].clone()
}

pub(super) fn number_of(token: &Token) -> u8 {
    let text = token.reveal().as_bytes();
    (text[0] - b'A') * 16 + (text[1] - b'A')
}

pub(super) fn client_of(token: &Token) -> usize {
    usize::from(token.reveal().as_bytes()[0] - b'A')
}

pub(super) fn inbox(client: usize) -> InboxId {
    static ALL: LazyLock<Vec<InboxId>> = LazyLock::new(|| ["0", "1", "2"].map(|n| InboxId(Arc::from(n))).into());
    ALL[client].clone()
}

pub(super) fn client_at(inbox: &InboxId) -> usize {
    usize::from(inbox.0.as_bytes()[0] - b'0')
}

pub(super) fn owner() -> Owner {
    static ONE: LazyLock<Owner> = LazyLock::new(Owner::default);
    ONE.clone()
}

/// No call gives up by itself: that is a step of its own.
pub(super) fn policy() -> &'static Policy {
    static ONE: LazyLock<Policy> = LazyLock::new(|| Policy {
        events: true,
        poll_interval: Duration::from_millis(10),
        max_poll_interval: Duration::from_millis(100),
        ask_again_within: Duration::from_secs(30),
        patience: Duration::from_secs(u64::MAX / 4),
    });
    &ONE
}

impl World {
    pub(super) fn new(setup: &Setup) -> Self {
        Self {
            lock: Lock::default(),
            counter: Fence::SANE_MIN,
            clients: (0..setup.clients).map(|_| Client::new()).collect(),
            rest: Rest {
                faults: setup.faults,
                operator: if setup.operator == Operates::Never { Operator::Done } else { Operator::Ready },
                forced: None,
                doomed: None,
                highest: 0,
            },
        }
    }

    /// The token that holds the lock, the ticks until its lease ends, and whether it is revoked.
    pub(super) fn held(&self) -> Option<(&Token, u8, bool)> {
        let Slot::Held(held) = &self.lock.slot else { return None };
        let left = (held.ends_ms.unwrap_or(NOW_MS) - NOW_MS) / TICK_MS;
        Some((&held.token, u8::try_from(left).expect("short"), held.flag == Flag::Revoked))
    }

    /// Whether the lock knows a token.
    pub(super) fn knows(&self, token: &Token) -> bool {
        self.held().is_some_and(|(held, ..)| held == token) || self.lock.queue.iter().any(|w| w.token == *token)
    }

    /// A tick passes.
    pub(super) fn tick(&mut self, setup: &Setup) {
        if let Slot::Held(held) = &mut self.lock.slot {
            held.ends_ms = held.ends_ms.map(|end| end - TICK_MS);
        }
        if setup.queue_ttl < NEVER {
            self.lock.queue_ends_ms = self.lock.queue_ends_ms.saturating_sub(TICK_MS);
        }
        self.lock.lapse(NOW_MS);
        if let Some((_, end)) = &mut self.rest.doomed {
            *end = end.saturating_sub(1);
        }
        self.clients.iter_mut().for_each(|client| client.visit(&mut Age));
    }

    /// Forgets what can make no difference any more, and writes down what is left: equal texts are equal worlds.
    pub(super) fn tidy(&mut self, setup: &Setup, text: &mut Vec<u8>) {
        let held = self.held().map(|(token, ..)| token.clone());
        self.rest.doomed = self.rest.doomed.take().filter(|(token, _)| held.as_ref() == Some(token));
        let forced = self.rest.forced.take();
        for client in &mut self.clients {
            client.tidy(setup);
        }
        self.forget_handed_on();
        self.forget_left();
        let mut known = Known { ttl: TICK * u32::from(setup.ttl), tokens: Vec::with_capacity(16), numbers: vec![0] };
        self.visit(&mut known);
        self.rest.forced = forced.filter(|token| known.tokens.contains(&number_of(token)));
        let Known { mut tokens, mut numbers, .. } = known;
        tokens.sort_unstable();
        tokens.dedup();
        numbers.sort_unstable();
        numbers.dedup();
        self.counter = Fence::SANE_MIN + numbers.len() as u64 - 1;
        for (id, client) in self.clients.iter_mut().enumerate() {
            client.tokens_used = tokens.iter().filter(|token| usize::from(*token / 16) == id).count();
        }
        text.clear();
        self.visit(&mut Renumber { tokens, numbers, text });
    }

    /// A lease that was handed on belongs to the holder of its token, for as long as it is known anywhere.
    fn forget_handed_on(&mut self) {
        for id in 0..self.clients.len() {
            let mut handed_on = std::mem::take(&mut self.clients[id].handed_on);
            handed_on.retain(|token| self.knows(token) || self.clients[id].mentions(token));
            self.clients[id].handed_on = handed_on;
        }
    }

    /// A token that left once, where once is not enough, and that no command on its way can bring back. The client would
    /// leave for as long as the lease lasts.
    fn forget_left(&mut self) {
        for id in 0..self.clients.len() {
            let mut closing = std::mem::take(&mut self.clients[id].closing);
            closing.retain(|Closing { token, asking, .. }| {
                let keep = *asking || self.knows(token) || self.clients[id].mentions(token);
                if !keep {
                    self.clients[id].rooms.left(token);
                }
                keep
            });
            self.clients[id].closing = closing;
        }
    }

    fn visit(&mut self, visit: &mut dyn Visit) {
        visit.flag(matches!(self.lock.slot, Slot::Held(_)));
        if let Slot::Held(held) = &mut self.lock.slot {
            visit.token(&mut held.token);
            visit.number(&mut held.fence);
            visit.count(usize::try_from((held.ends_ms.unwrap_or(NOW_MS) - NOW_MS) / TICK_MS).expect("short"));
            visit.flag(held.flag == Flag::Revoked);
            visit.flag(held.inbox.is_some());
        }
        visit.count(self.lock.queue.len());
        if !self.lock.queue.is_empty() {
            let left = self.lock.queue_ends_ms.saturating_sub(NOW_MS) / TICK_MS;
            visit.count(usize::try_from(left).expect("short"));
        }
        for waiting in &mut self.lock.queue {
            visit.number(&mut waiting.ticket);
            visit.token(&mut waiting.token);
        }
        self.clients.iter_mut().for_each(|client| client.visit(visit));
        let Rest { faults, operator, forced, doomed, highest } = &mut self.rest;
        visit.count(usize::from(*faults));
        match operator {
            Operator::Ready => visit.count(0),
            Operator::Looked(token) => {
                visit.count(1);
                visit.token(token);
            }
            Operator::Done => visit.count(2),
        }
        visit.flag(forced.is_some());
        forced.iter_mut().for_each(|token| visit.token(token));
        visit.flag(doomed.is_some());
        if let Some((token, end)) = doomed {
            visit.token(token);
            visit.count(usize::from(*end));
        }
        visit.number(highest);
    }
}

/// Makes everything a tick older.
struct Age;

impl Visit for Age {
    fn start(&mut self, moment: &mut Moment) {
        *moment = *moment - TICK;
    }
    fn end(&mut self, moment: &mut Moment) {
        *moment = *moment - TICK;
    }
    fn timer(&mut self, _: &mut Moment) {}
    fn number(&mut self, _: &mut u64) {}
    fn token(&mut self, _: &mut Token) {}
    fn count(&mut self, _: usize) {}
}

/// Collects tokens and numbers, and replaces moments that make no difference any more.
struct Known {
    ttl: Duration,
    tokens: Vec<u8>,
    numbers: Vec<u64>,
}

impl Visit for Known {
    fn start(&mut self, moment: &mut Moment) {
        // As old as a lease: nothing is believed from there.
        if moment.until(NOW) >= self.ttl {
            *moment = OLD;
        }
    }
    fn end(&mut self, moment: &mut Moment) {
        *moment = NOW.max(*moment);
    }
    fn timer(&mut self, moment: &mut Moment) {
        *moment = SOME_TIME;
    }
    fn number(&mut self, number: &mut u64) {
        self.numbers.push(*number);
    }
    fn token(&mut self, token: &mut Token) {
        self.tokens.push(number_of(token));
    }
    fn count(&mut self, _: usize) {}
}

/// Replaces tokens and numbers by their ranks, and writes everything down.
struct Renumber<'a> {
    tokens: Vec<u8>,
    numbers: Vec<u64>,
    text: &'a mut Vec<u8>,
}

impl Renumber<'_> {
    fn small(&mut self, number: u128) {
        let [low, high] = u16::try_from(number).expect("numbers of a small world are small").to_le_bytes();
        if high > 0 || low == u8::MAX {
            self.text.extend_from_slice(&[u8::MAX, high]);
        }
        self.text.push(low);
    }
}

impl Visit for Renumber<'_> {
    fn start(&mut self, moment: &mut Moment) {
        let age = if *moment == OLD { u128::from(NEVER) } else { moment.until(NOW).as_millis() / u128::from(TICK_MS) };
        self.small(age);
    }
    fn end(&mut self, moment: &mut Moment) {
        self.small(NOW.until(*moment).as_millis());
    }
    fn timer(&mut self, _: &mut Moment) {}
    fn number(&mut self, number: &mut u64) {
        let rank = self.numbers.binary_search(number).expect("collected before");
        *number = if rank == 0 { 0 } else { Fence::SANE_MIN + rank as u64 };
        self.text.push(u8::try_from(rank).expect("few"));
    }
    fn token(&mut self, token: &mut Token) {
        let number = number_of(token);
        let first = self.tokens.partition_point(|other| *other < number / 16 * 16);
        let rank = self.tokens.partition_point(|other| *other < number) - first;
        let rank = number / 16 * 16 + u8::try_from(rank).expect("few");
        *token = self::token(rank);
        self.text.push(rank);
    }
    fn count(&mut self, count: usize) {
        self.small(count as u128);
    }
}
