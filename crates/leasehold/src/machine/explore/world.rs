//! A small world: one lock, its clients, what is on its way between them.
//!
//! Time is counted in ticks and always seen from the present: a tick that passes makes everything
//! else older, so that worlds that differ only in their history are the same world. Fences and
//! tickets are renumbered by rank for the same reason.

use std::hash::{Hash, Hasher};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use super::super::{Flag, InboxId, Limits, Lock, Rules, Slot};
use super::message::{Answer, Request, Says, Verb};
use super::rule::{ClientRule, ClientRules};
use crate::clock::Moment;
use crate::facts::{Owner, Token};

pub(super) const TICK_MS: u64 = 1_000;
/// The present, always.
const NOW_TICKS: u64 = 100;
pub(super) const NOW_MS: u64 = NOW_TICKS * TICK_MS;
/// Long ago: too old to count from.
pub(super) const OLD: u8 = 9;
/// A number of ticks that never pass.
pub(super) const NEVER: u8 = 9;

/// What may happen in a world.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setup {
    pub(super) clients: u8,
    /// Attempts of each client.
    pub(super) attempts: [u8; 3],
    /// Cuts, deaths and lost messages, together.
    pub(super) faults: u8,
    pub(super) operator: Operates,
    pub(super) ttl: u8,
    pub(super) provisional: u8,
    pub(super) sweep: usize,
    pub(super) queue_ttl: u8,
    pub(super) rules: Rules,
    pub(super) client_rules: ClientRules,
    /// Whether those who came first must be served first: holds only while nothing fails.
    pub(super) in_order: bool,
    /// Whether a client may kill the connection it has lost. Where it may not, what was sent can
    /// run at any time, and a token that was given up can come back until it lapses.
    pub(super) kills: bool,
    /// Whether every state is followed to its end to see that nobody waits for ever.
    pub(super) liveness: bool,
    /// Whether a holder that was forced out counts as a second holder.
    pub(super) force_counts: bool,
    /// Whether a holder may hand its lease on to another token.
    pub(super) hands_on: bool,
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

    pub(super) fn ttl_ms(&self) -> u64 {
        u64::from(self.ttl) * TICK_MS
    }
}

#[derive(Clone)]
pub(super) struct World {
    pub(super) lock: Lock,
    pub(super) counter: u64,
    pub(super) clients: Vec<Client>,
    pub(super) rest: Rest,
}

#[derive(Clone, Hash)]
pub(super) struct Rest {
    pub(super) faults: u8,
    pub(super) operator: Operator,
    /// The token that was forced out: only fences protect from its client.
    pub(super) forced: u8,
    /// A lease that was taken away, and when it must end.
    pub(super) doomed: Option<(u8, u8)>,
    /// The highest fence anybody believed in.
    pub(super) highest: u64,
}

#[derive(Clone, Copy, Hash, PartialEq, Eq)]
pub(super) enum Operator {
    Ready,
    /// Has seen this token hold the lock.
    Looked(u8),
    Done,
}

#[derive(Clone, Hash)]
pub(super) struct Client {
    pub(super) alive: bool,
    pub(super) up: bool,
    /// Attempts begun.
    pub(super) attempt: u8,
    /// The token of the present attempt.
    pub(super) token: u8,
    pub(super) phase: Phase,
    pub(super) fence: u64,
    pub(super) ticket: u64,
    /// How long ago that was asked from which a belief will count once a yield is answered.
    pub(super) asked: u8,
    /// For how long the lease is believed.
    pub(super) until: u8,
    /// How long ago the newest command was sent whose answer was read.
    pub(super) stamp: u8,
    /// How long ago the newest command was sent (only where that is looked at).
    pub(super) sent: u8,
    /// Tokens given up, until that is answered.
    pub(super) closing: Vec<Closing>,
    pub(super) requests: Vec<Request>,
    pub(super) answers: Vec<Answer>,
    /// A connection the client has lost and the server has not: what was sent may still run.
    pub(super) old: Option<Vec<Request>>,
    /// The last token that was told of a grant (only where order is looked at).
    pub(super) served: u8,
}

#[derive(Clone, Copy, Hash, PartialEq, Eq, Debug)]
pub(super) enum Phase {
    Idle,
    Trying,
    /// Renews before it believes.
    Confirming {
        queue: bool,
        /// It has stood in line, and may again.
        asking: bool,
    },
    Yielding,
    Waiting {
        asking: bool,
    },
    Holding {
        renewing: bool,
        asking: bool,
    },
    /// Has given up its belief, and will believe under the token that its lease is handed to.
    HandingOn,
}

#[derive(Clone, Copy, Hash, PartialEq, Eq, Debug)]
pub(super) struct Closing {
    pub(super) token: u8,
    pub(super) leave: bool,
}

pub(super) fn moment(age: u8) -> Moment {
    Moment::from_boot(Duration::from_millis(NOW_MS - u64::from(age) * TICK_MS))
}

/// Tokens are numbered: the client in the upper bits, its attempt in the lower.
pub(super) fn number(client: usize, attempt: u8) -> u8 {
    u8::try_from(client).expect("few clients") * 8 + attempt
}

/// The token that the lease of an attempt is handed on to.
pub(super) fn handed_on(token: u8) -> u8 {
    token | 4
}

pub(super) fn client_of(token: u8) -> usize {
    usize::from(token / 8)
}

pub(super) fn token(number: u8) -> Token {
    static ALL: LazyLock<Vec<Token>> = LazyLock::new(|| {
        let text = |n: u8| format!("{}{}", char::from(b'A' + n / 8), n % 8) + &"-".repeat(Token::LEN - 2);
        (0..32).map(|n| Token::parse(&text(n)).expect("32 characters")).collect()
    });
    ALL[usize::from(number)].clone()
}

pub(super) fn number_of(token: &Token) -> u8 {
    let text = token.reveal().as_bytes();
    (text[0] - b'A') * 8 + (text[1] - b'0')
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

impl World {
    pub(super) fn new(setup: &Setup) -> Self {
        let client = Client {
            alive: true,
            up: true,
            attempt: 0,
            token: 0,
            phase: Phase::Idle,
            fence: 0,
            ticket: 0,
            asked: 0,
            until: 0,
            stamp: OLD,
            sent: OLD,
            closing: Vec::new(),
            requests: Vec::new(),
            answers: Vec::new(),
            old: None,
            served: 0,
        };
        Self {
            lock: Lock::default(),
            counter: 0,
            clients: vec![client; usize::from(setup.clients)],
            rest: Rest {
                faults: setup.faults,
                operator: if setup.operator == Operates::Never { Operator::Done } else { Operator::Ready },
                forced: 0,
                doomed: None,
                highest: 0,
            },
        }
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
        for client in &mut self.clients {
            client.until = client.until.saturating_sub(1);
            let requests = client.requests.iter_mut().map(|r| &mut r.age);
            let answers = client.answers.iter_mut().map(|a| &mut a.age);
            let ages = [&mut client.asked, &mut client.stamp, &mut client.sent];
            for age in requests.chain(answers).chain(ages) {
                *age = OLD.min(*age + 1);
            }
        }
    }

    /// Forgets what can make no difference any more.
    pub(super) fn tidy(&mut self, setup: &Setup) {
        let held = self.held().map(|(token, ..)| token);
        if self.rest.doomed.is_some_and(|(token, _)| held != Some(token)) {
            self.rest.doomed = None;
        }
        for client in &mut self.clients {
            if !client.alive {
                client.attempt = 0;
                client.token = 0;
            }
            // Nobody is left whom it would concern.
            while client.phase == Phase::Idle && setup.client_rules.keep(ClientRule::GivenUpBeliefNeverRevived) {
                match client.answers.first() {
                    Some(Answer { says: Says::Closed | Says::CloseAgain, .. }) | None => break,
                    Some(_) => client.answers.remove(0),
                };
            }
            if !matches!(client.phase, Phase::Waiting { .. }) {
                client.stamp = OLD;
                client.sent = OLD;
                client.ticket = 0;
            }
            if !matches!(client.phase, Phase::Yielding) {
                client.asked = OLD;
            }
            if !matches!(
                client.phase,
                Phase::Yielding | Phase::Confirming { .. } | Phase::Holding { .. } | Phase::HandingOn
            ) {
                client.fence = 0;
            }
            let requests = client.requests.iter_mut().map(|r| &mut r.age);
            let answers = client.answers.iter_mut().map(|a| &mut a.age);
            let ages = [&mut client.asked, &mut client.stamp, &mut client.sent];
            for age in requests.chain(answers).chain(ages) {
                // As old as a lease, or older: nothing is believed from there.
                if *age >= setup.ttl {
                    *age = OLD;
                }
            }
        }
        self.renumber();
    }

    fn renumber(&mut self) {
        let mut known: Vec<u64> = Vec::with_capacity(16);
        self.each_number(&mut |n| known.push(*n));
        known.push(0);
        known.sort_unstable();
        known.dedup();
        let rank = |n: u64| known.binary_search(&n).map_or(0, |place| place as u64);
        self.each_number(&mut |n| *n = rank(*n));
        self.counter = known.len() as u64 - 1;
    }

    /// Every fence and every ticket.
    fn each_number(&mut self, each: &mut impl FnMut(&mut u64)) {
        if let Slot::Held(held) = &mut self.lock.slot {
            each(&mut held.fence);
        }
        self.lock.queue.iter_mut().for_each(|w| each(&mut w.ticket));
        each(&mut self.rest.highest);
        for client in &mut self.clients {
            each(&mut client.fence);
            each(&mut client.ticket);
            for request in client.requests.iter_mut().chain(client.old.iter_mut().flatten()) {
                match &mut request.verb {
                    Verb::Exists { saw, fence } => {
                        each(fence);
                        saw.number().map(&mut *each);
                    }
                    Verb::Count { saw } => {
                        saw.number().map(&mut *each);
                    }
                    Verb::Yield { fence: n } | Verb::Acquire { ticket: n } | Verb::Renew { fence: n, .. } => each(n),
                    Verb::Plant | Verb::Release | Verb::Leave => {}
                }
            }
            for answer in &mut client.answers {
                match &mut answer.says {
                    Says::Tried { saw, fence, .. } => {
                        each(fence);
                        saw.number().map(&mut *each);
                    }
                    Says::Acquired { fence: n }
                    | Says::Queued { ticket: n }
                    | Says::AcquireAgain { ticket: n }
                    | Says::Renewed { fence: n }
                    | Says::PushGranted { fence: n, .. } => each(n),
                    _ => {}
                }
            }
        }
    }

    /// Whose the lock is, when it ends, whether it is revoked.
    pub(super) fn held(&self) -> Option<(u8, u8, bool)> {
        let Slot::Held(held) = &self.lock.slot else { return None };
        let left = (held.ends_ms.unwrap_or(NOW_MS) - NOW_MS) / TICK_MS;
        Some((number_of(&held.token), u8::try_from(left).expect("short"), held.flag == Flag::Revoked))
    }
}

impl Hash for World {
    /// All that makes a difference. Whether the flag says that somebody waits does not: only the
    /// Redis scripts look at it, and only to save a step.
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.held().hash(state);
        if let Slot::Held(held) = &self.lock.slot {
            held.fence.hash(state);
        }
        self.lock.queue.len().hash(state);
        if !self.lock.queue.is_empty() {
            (self.lock.queue_ends_ms.saturating_sub(NOW_MS) / TICK_MS).hash(state);
        }
        for waiting in &self.lock.queue {
            (waiting.ticket, number_of(&waiting.token)).hash(state);
        }
        self.clients.hash(state);
        self.rest.hash(state);
    }
}
