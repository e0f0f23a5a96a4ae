//! The server: the state machine of every lock, the fence counter, and commands that run one at a time.

use std::collections::BTreeMap;

use crate::clock::Moment;
use crate::facts::{Fence, HolderId, LockName, Token};
use crate::machine::{
    self, AcquireReply, CallContext, Contender, EvictReply, FinishReply, Flag, InboxId, Limits, Lock, Message,
    PassReply, RenewReply, Slot, YieldReply,
};
use crate::store::{AcquireRequest, Holder, Renewal, StoreErrorKind, Ticket, Waiter};

/// One command, as the server runs it.
#[derive(Debug, Clone)]
pub(super) enum Command {
    Hello,
    /// Ends the connection with this number.
    Kill(Option<usize>),
    Subscribe,
    Raise {
        seen: u64,
    },
    Probe(u64),
    Increment,
    /// `SET NX PX`
    Set {
        claim: AcquireRequest,
        inbox: Option<InboxId>,
    },
    QueueExists(LockName),
    Read(LockName),
    Yield {
        name: LockName,
        token: Token,
        fence: u64,
    },
    RepairFence {
        name: LockName,
        token: Token,
        seen: u64,
    },
    Acquire {
        claim: AcquireRequest,
        inbox: Option<InboxId>,
        ticket: Option<u64>,
    },
    Release {
        name: LockName,
        token: Token,
    },
    ReleaseUncontended {
        name: LockName,
        token: Token,
    },
    Renew(Renewal),
    Leave {
        name: LockName,
        token: Token,
    },
    Evict {
        name: LockName,
        holder: HolderId,
        force: bool,
    },
    AskToFinish {
        name: LockName,
        holder: HolderId,
    },
    Holder(LockName),
    Queue(LockName),
}

/// The reply to one command.
#[derive(Debug, Clone)]
pub(super) enum Reply {
    Done,
    /// Not set: the key exists.
    NotSet,
    Number(u64),
    Queue(Vec<Waiter>),
    Exists(bool),
    Role {
        is_replica: bool,
    },
    Found(Slot, Option<Holder>),
    Yielded(YieldReply, Option<Holder>),
    Acquired(AcquireReply, Option<Holder>),
    Passed(PassReply),
    /// Others wait: a release has to be sent.
    WaitedFor,
    NotOurs,
    Renewed(RenewReply),
    Evicted(EvictReply, Option<Holder>),
    Asked(FinishReply),
    Error(StoreErrorKind),
}

/// One server with its data.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) locks: BTreeMap<LockName, Lock>,
    pub(super) counter: u64,
    pub(super) is_replica: bool,
}

/// What a command runs with.
pub(super) struct Surroundings<'a> {
    pub(super) clock: ServerClock,
    pub(super) now: Moment,
    pub(super) listening: &'a mut dyn FnMut(&InboxId) -> bool,
    pub(super) told: &'a mut Vec<(InboxId, Message)>,
    pub(super) sweep: usize,
}

/// The server's clocks. They run up to 1 % faster or slower than those of the clients.
#[derive(Debug, Clone, Copy)]
pub(super) struct ServerClock {
    /// How much faster the server's clock is, in millionths.
    pub(super) faster_ppm: i64,
}

impl ServerClock {
    fn micros(self, now: Moment) -> u64 {
        let us = i128::try_from(now.since_boot().as_micros()).expect("a short time");
        u64::try_from(us + us * i128::from(self.faster_ppm) / 1_000_000).expect("after the beginning")
    }

    pub(super) fn now_ms(self, now: Moment) -> u64 {
        self.micros(now) / 1_000
    }

    /// The wall clock, the lower bound of fences.
    pub(super) fn wall_us(self, now: Moment) -> u64 {
        1_700_000_000_000_000 + self.micros(now)
    }

    /// The first moment of the clients' clock at which the server's clock shows this time.
    pub(super) fn moment_of(self, server_ms: u64) -> Moment {
        let us = i128::from(server_ms) * 1_000 * 1_000_000 / (1_000_000 + i128::from(self.faster_ppm));
        Moment::from_boot(std::time::Duration::from_micros(u64::try_from(us).expect("after the beginning")))
    }
}

impl Command {
    /// The lock that the command names.
    pub(super) fn name(&self) -> Option<&LockName> {
        match self {
            Self::Set { claim, .. } | Self::Acquire { claim, .. } => Some(&claim.name),
            Self::QueueExists(name) | Self::Read(name) | Self::Holder(name) | Self::Queue(name) => Some(name),
            Self::Yield { name, .. }
            | Self::RepairFence { name, .. }
            | Self::Release { name, .. }
            | Self::ReleaseUncontended { name, .. }
            | Self::Leave { name, .. }
            | Self::Evict { name, .. }
            | Self::AskToFinish { name, .. } => Some(name),
            Self::Renew(renewal) => Some(&renewal.name),
            Self::Hello | Self::Kill(_) | Self::Subscribe | Self::Raise { .. } | Self::Probe(_) | Self::Increment => {
                None
            }
        }
    }

    /// Whether a replica refuses it.
    pub(super) fn writes(&self) -> bool {
        match self {
            Self::Renew(renewal) => renewal.prolong,
            Self::Hello
            | Self::Kill(_)
            | Self::Subscribe
            | Self::Probe(_)
            | Self::QueueExists(_)
            | Self::Read(_)
            | Self::Holder(_)
            | Self::AskToFinish { .. }
            | Self::Queue(_) => false,
            _ => true,
        }
    }

    /// The command in words, for a story.
    pub(super) fn words(&self) -> String {
        match self {
            Self::Hello => "the server's role".into(),
            Self::Kill(_) => "the end of its previous connection".into(),
            Self::Subscribe => "its messages".into(),
            Self::Raise { .. } => "the counter to be raised".into(),
            Self::Probe(number) => format!("probe {number}"),
            Self::Increment => "the next number".into(),
            Self::Set { claim, .. } => format!("to set {}", claim.name),
            Self::QueueExists(name) => format!("whether {name} has a queue"),
            Self::Read(name) => format!("what is at {name}"),
            Self::Yield { name, .. } => format!("to yield {name}"),
            Self::RepairFence { name, .. } => format!("a fence for {name}"),
            Self::Acquire { claim, ticket: None, .. } => format!("to acquire {}", claim.name),
            Self::Acquire { claim, ticket: Some(ticket), .. } => {
                format!("to acquire {} with ticket …{}", claim.name, ticket % 1_000_000)
            }
            Self::Release { name, .. } | Self::ReleaseUncontended { name, .. } => format!("to release {name}"),
            Self::Renew(Renewal { name, hand_to: Some(_), .. }) => format!("to hand on {name}"),
            Self::Renew(Renewal { name, prolong: true, .. }) => format!("to renew {name}"),
            Self::Renew(Renewal { name, .. }) => format!("whether {name} is still its own"),
            Self::Leave { name, .. } => format!("to leave {name}"),
            Self::Evict { name, force: true, .. } => format!("to force the holder out of {name}"),
            Self::Evict { name, .. } => format!("to revoke {name}"),
            Self::AskToFinish { name, .. } => format!("the holder of {name} to finish"),
            Self::Holder(name) => format!("who holds {name}"),
            Self::Queue(name) => format!("who waits for {name}"),
        }
    }
}

impl Reply {
    /// The reply in words, for a story.
    pub(super) fn words(&self) -> String {
        let by = |holder: &Option<Holder>| match holder {
            Some(holder) => format!("held by {}", holder.id),
            None => "free".into(),
        };
        match self {
            Self::Done => "done".into(),
            Self::NotSet => "no, it exists".into(),
            Self::Queue(waiters) => format!("{} wait", waiters.len()),
            Self::Number(number) => format!("…{}", number % 1_000_000),
            Self::Exists(exists) => if *exists { "yes" } else { "no" }.into(),
            Self::Role { is_replica } => if *is_replica { "a replica" } else { "the primary" }.into(),
            Self::Found(_, holder) => by(holder),
            Self::Yielded(reply, holder) => format!("{reply:?}, {}", by(holder)),
            Self::Acquired(AcquireReply::Queued { ticket, position }, holder) => {
                format!("ticket …{}, position {position}, {}", ticket % 1_000_000, by(holder))
            }
            Self::Acquired(AcquireReply::Granted { fence }, _) => format!("granted, fence …{}", fence % 1_000_000),
            Self::Acquired(reply, _) => format!("{reply:?}"),
            Self::Passed(reply) => format!("{reply:?}"),
            Self::WaitedFor => "others wait".into(),
            Self::NotOurs => "it is another's".into(),
            Self::Renewed(reply) => format!("{reply:?}"),
            Self::Evicted(reply, holder) => format!("{reply:?}, {}", by(holder)),
            Self::Asked(reply) => format!("{reply:?}"),
            Self::Error(kind) => format!("{kind}"),
        }
    }
}

impl Node {
    pub(super) fn new() -> Self {
        Self { locks: BTreeMap::new(), counter: 0, is_replica: false }
    }

    /// Runs a command that is not about connections.
    pub(super) fn run(&mut self, around: &mut Surroundings<'_>, command: &Command) -> Reply {
        if self.is_replica && command.writes() {
            return Reply::Error(StoreErrorKind::ReadOnly);
        }
        let Some(name) = command.name().cloned() else { return self.run_without_lock(around, command) };
        let now_ms = around.clock.now_ms(around.now);
        let lock = self.locks.entry(name.clone()).or_default();
        lock.lapse(now_ms);
        let mut cx = CallContext {
            now_ms,
            wall_us: around.clock.wall_us(around.now),
            counter: &mut self.counter,
            listening: around.listening,
            outbox: around.told,
            limits: Limits { sweep: around.sweep, ..Limits::DEFAULT },
        };
        let reply = run_on(lock, &mut cx, command);
        if lock.is_gone() {
            self.locks.remove(&name);
        }
        reply
    }

    fn run_without_lock(&mut self, around: &Surroundings<'_>, command: &Command) -> Reply {
        match command {
            Command::Increment => {
                self.counter += 1;
                Reply::Number(self.counter)
            }
            Command::Raise { seen } => {
                self.counter = self.counter.max(*seen).max(around.clock.wall_us(around.now));
                Reply::Done
            }
            Command::Hello => Reply::Role { is_replica: self.is_replica },
            _ => Reply::Done,
        }
    }

    /// The token that holds the lock, and when its lease ends.
    pub(super) fn holder(&mut self, name: &LockName, now_ms: u64) -> Option<(Token, Option<u64>)> {
        let lock = self.locks.get_mut(name)?;
        lock.lapse(now_ms);
        match &lock.slot {
            Slot::Held(held) => Some((held.token.clone(), held.ends_ms)),
            Slot::Free | Slot::Foreign { .. } => None,
        }
    }
}

fn run_on(lock: &mut Lock, cx: &mut CallContext<'_>, command: &Command) -> Reply {
    let now_ms = cx.now_ms;
    match command {
        Command::Set { claim, inbox } => match lock.plant(cx, &asking(claim, inbox)) {
            None => Reply::Done,
            Some(_) => Reply::NotSet,
        },
        Command::QueueExists(_) => Reply::Exists(!lock.queue.is_empty()),
        Command::Read(_) | Command::Holder(_) => Reply::Found(lock.slot.clone(), view(lock, now_ms)),
        Command::Queue(_) => Reply::Queue(
            lock.queue
                .iter()
                .map(|waiting| Waiter {
                    ticket: Ticket(waiting.ticket),
                    owner: waiting.owner.clone(),
                    since_ms: waiting.since_ms,
                    listens: waiting.inbox.is_some(),
                })
                .collect(),
        ),
        Command::Yield { token, fence, .. } => match lock.yield_to_queue(cx, token, *fence) {
            Ok(reply) => Reply::Yielded(reply, view(lock, now_ms)),
            Err(error) => Reply::Error(crate::store::StoreError::from(error).kind()),
        },
        Command::RepairFence { token, seen, .. } => {
            let Slot::Held(held) = &mut lock.slot else { return Reply::NotOurs };
            if held.token != *token {
                return Reply::NotOurs;
            }
            *cx.counter = (*cx.counter).max(*seen);
            match machine::draw(cx.counter, cx.wall_us) {
                Ok(fence) => {
                    held.fence = fence;
                    Reply::Number(fence)
                }
                Err(_) => Reply::Error(StoreErrorKind::FenceUnusable),
            }
        }
        Command::Acquire { claim, inbox, ticket } => match lock.acquire(cx, &asking(claim, inbox), *ticket) {
            Ok(reply) => Reply::Acquired(reply, view(lock, now_ms)),
            Err(error) => Reply::Error(crate::store::StoreError::from(error).kind()),
        },
        Command::Release { token, .. } => Reply::Passed(lock.release(cx, token)),
        Command::ReleaseUncontended { token, .. } => match &lock.slot {
            Slot::Held(held) if held.token == *token && held.flag == Flag::Uncontended => {
                lock.slot = Slot::Free;
                Reply::Passed(PassReply::Done)
            }
            Slot::Held(held) if held.token == *token => Reply::WaitedFor,
            _ => Reply::Passed(PassReply::NotOurs),
        },
        Command::Renew(r) if !r.prolong => Reply::Renewed(lock.check(now_ms, &r.token, r.fence)),
        Command::Renew(r) => {
            let ttl_ms = r.ttl.as_millis();
            Reply::Renewed(lock.renew(cx, &r.token, ttl_ms, r.fence, r.rewrite.as_ref(), r.hand_to.as_ref()))
        }
        Command::Leave { token, .. } => Reply::Passed(lock.leave(cx, token)),
        Command::Evict { holder, force, .. } => {
            let found = view(lock, now_ms);
            Reply::Evicted(lock.evict(cx, *holder, *force), found)
        }
        Command::AskToFinish { holder, .. } => Reply::Asked(lock.ask_to_finish(cx, *holder, "please")),
        Command::Hello
        | Command::Kill(_)
        | Command::Subscribe
        | Command::Raise { .. }
        | Command::Probe(_)
        | Command::Increment => Reply::Done,
    }
}

fn asking(claim: &AcquireRequest, inbox: &Option<InboxId>) -> Contender {
    Contender {
        token: claim.token.clone(),
        inbox: inbox.clone(),
        ttl_ms: claim.ttl.as_millis(),
        since_ms: claim.since_ms,
        owner: claim.owner.clone(),
        fenced: claim.fenced,
    }
}

fn view(lock: &Lock, now_ms: u64) -> Option<Holder> {
    crate::store::view(&lock.slot, now_ms)
}

/// The fence that a lock's value carries; `None` while it is zero.
pub(super) fn fence_of(held: &machine::Held) -> Option<Fence> {
    (held.fence != 0).then_some(Fence::new(held.fence))
}

mod tests {
    use super::*;
    use crate::facts::{Owner, Ttl};

    fn run(node: &mut Node, command: &Command) -> Reply {
        let mut told = Vec::new();
        let mut around = Surroundings {
            clock: ServerClock { faster_ppm: 0 },
            now: Moment::from_boot(std::time::Duration::from_secs(1)),
            listening: &mut |_| true,
            told: &mut told,
            sweep: 200,
        };
        node.run(&mut around, command)
    }

    fn claim(token: char) -> AcquireRequest {
        AcquireRequest {
            name: LockName::new("a").expect("a name"),
            token: Token::parse(&token.to_string().repeat(Token::LEN)).expect("a token"),
            ttl: Ttl::default(),
            owner: Owner::default(),
            fenced: true,
            listens: false,
            since_ms: 0,
        }
    }

    /// Two concurrent calls with one token: one has confirmed the lease before the other finds a queue.
    #[test]
    fn a_lease_that_was_confirmed_is_not_yielded() {
        for confirms in [false, true] {
            let mut node = Node::new();
            let (mine, waiter) = (claim('m'), claim('w'));
            let (name, token) = (mine.name.clone(), mine.token.clone());
            run(&mut node, &Command::Set { claim: mine.clone(), inbox: None });
            let inbox = Some(InboxId("inbox".into()));
            run(&mut node, &Command::Acquire { claim: waiter, inbox, ticket: Some(5) });
            if confirms {
                let fence = Some(Fence::new(7));
                let (ttl, name, token) = (mine.ttl, name.clone(), token.clone());
                let renewal = Renewal { name, token, fence, ttl, prolong: true, rewrite: None, hand_to: None };
                assert!(matches!(run(&mut node, &Command::Renew(renewal)), Reply::Renewed(RenewReply::Renewed)));
            }
            let expected = if confirms { YieldReply::Ours } else { YieldReply::NotOurs };
            let Reply::Yielded(reply, _) = run(&mut node, &Command::Yield { name, token, fence: 8 }) else {
                panic!("not a reply to a yield");
            };
            assert_eq!(reply, expected);
        }
    }
}
