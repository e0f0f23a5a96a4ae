//! One process: the production engine, its connection to the server, and its leases as far as they have been seen.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::mpsc::{self, UnboundedReceiver};

use super::executor::Life;
use super::leases::KnownLease;
use super::link::Link;
use super::random::Random;
use super::store::{Request, Shared, SimulatedStore};
use super::story::process_name;
use super::world::World;
use crate::client::RandomSource;
use crate::clock::{Moment, timeout};
use crate::engine::EngineHandle;
use crate::engine::environment::Environment;
use crate::engine::environment::simulated::SimulatedEnvironment;
use crate::facts::Token;
use crate::machine::InboxId;
use crate::store::{StoreError, StoreErrorKind};

/// How long an operator waits for an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

pub(super) struct Process {
    pub(super) world: Rc<World>,
    /// Its index among the processes of the world.
    pub(super) which: usize,
    /// How many times it was started before.
    pub(super) incarnation: u64,
    pub(super) life: Rc<Life>,
    pub(super) engine: Arc<EngineHandle>,
    pub(super) link: Link,
    pub(super) shared: Arc<Shared>,
    /// Tasks that the engine has started, and requests that it has made, since the last step.
    started: RefCell<UnboundedReceiver<BoxFuture<'static, ()>>>,
    requested: RefCell<UnboundedReceiver<Request>>,
    /// The leases as they were after the last step.
    pub(super) known: RefCell<BTreeMap<Token, KnownLease>>,
    /// The tokens whose lease a task has received.
    pub(super) received: RefCell<BTreeSet<Token>>,
    /// The tokens with an acquire in flight, with a try that was not answered, and with a leave that is not confirmed.
    pub(super) asking: RefCell<BTreeSet<Token>>,
    pub(super) tried: RefCell<BTreeSet<Token>>,
    pub(super) leaving: RefCell<BTreeSet<Token>>,
    /// When the last successful renewal of a token was requested.
    pub(super) proven: RefCell<BTreeMap<Token, Moment>>,
    source: RefCell<Tokens>,
}

/// Tokens and jitter from the seed.
struct Tokens {
    random: Random,
    process: u64,
    next: u64,
}

impl RandomSource for Tokens {
    fn token(&mut self) -> Token {
        self.next += 1;
        let text = format!("{:04}-{:08}-{:018x}", self.process, self.next, self.random.next());
        Token::parse(&text).expect("32 characters")
    }

    fn byte(&mut self) -> u32 {
        u32::try_from(self.random.below(256)).expect("a byte")
    }

    fn wall_ms(&mut self) -> u64 {
        0
    }
}

impl Process {
    /// Starts a process.
    pub(super) fn start(world: &Rc<World>, which: usize, incarnation: u64) -> Rc<Self> {
        let number = world.incarnations.get();
        world.incarnations.set(number + 1);
        let setup = &world.plan.setup;
        let inbox = InboxId(format!("inbox-{number}").into());
        let tokens = |stream, process| Tokens { random: Random::new(setup.seed, stream), process, next: 0 };
        let (tasks, started) = mpsc::unbounded_channel();
        let (store, requested, shared) = SimulatedStore::new();
        let environment = SimulatedEnvironment::new(tasks, tokens(100 + number, number));
        let engine = EngineHandle::start_in(Environment::Simulated(environment), Arc::new(store), setup.options(which));
        let process = Rc::new(Self {
            world: world.clone(),
            which,
            incarnation,
            life: Rc::default(),
            engine,
            link: Link::new(inbox, Random::new(setup.seed, 500 + number)),
            shared,
            started: RefCell::new(started),
            requested: RefCell::new(requested),
            known: RefCell::default(),
            received: RefCell::default(),
            asking: RefCell::default(),
            tried: RefCell::default(),
            leaving: RefCell::default(),
            proven: RefCell::default(),
            source: RefCell::new(tokens(700 + number, 5_000 + number)),
        });
        process.spawn(process.clone().supervise());
        process.spawn(process.clone().probe());
        process.take_work();
        process
    }

    pub(super) fn name(&self) -> String {
        process_name(self.which, self.incarnation)
    }

    pub(super) fn spawn(&self, work: impl Future<Output = ()> + 'static) {
        self.world.executor.spawn(&self.life, work);
    }

    /// Returns a token that a caller chooses.
    pub(super) fn token(&self) -> Token {
        self.source.borrow_mut().token()
    }

    /// Starts what the engine has started, and makes its requests in order.
    pub(super) fn take_work(self: &Rc<Self>) {
        loop {
            while let Some(work) = next(&self.started) {
                self.world.executor.spawn(&self.life, work);
            }
            let Some(request) = next(&self.requested) else { return };
            self.world.executor.begin(&self.life, request(self.clone()));
        }
    }

    /// Returns what the engine has left to do, if anything.
    pub(super) fn unfinished(&self) -> Option<String> {
        self.engine.unfinished().map(|what| format!("{} still {what}", self.name()))
    }

    /// Drops what the engine still starts, after a crash.
    pub(super) fn discard_work(&self) {
        self.started.borrow_mut().close();
        self.requested.borrow_mut().close();
        while next(&self.started).is_some() || next(&self.requested).is_some() {}
    }

    /// Bounds a request of an operator.
    pub(super) async fn within<T>(&self, ask: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        timeout(ANSWER_WITHIN, ask).await.unwrap_or_else(|| Err(StoreErrorKind::NoAnswer.into()))
    }
}

/// Takes what has come. The channel is not borrowed while the caller uses or drops it.
fn next<T>(channel: &RefCell<UnboundedReceiver<T>>) -> Option<T> {
    channel.borrow_mut().try_recv().ok()
}
