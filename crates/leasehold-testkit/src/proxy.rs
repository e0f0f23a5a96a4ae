//! A TCP proxy that parses RESP and injects faults.
//!
//! It forwards whole frames and matches replies to commands, so it can drop exactly the reply that a test names. It runs on
//! a thread with its own runtime, so it continues while the test's runtime is paused, busy or gone.
//!
//! It does not support `MONITOR`, `SYNC` and `CLIENT REPLY`.

mod command;
mod connection;
mod rule;

use std::collections::{BTreeMap, HashMap};
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};

use crate::RedisServer;
use crate::random::{Sequence, random_u64};
pub use command::{Command, on};
pub use rule::Rule;
use rule::{ActiveRule, Fault};

/// The variable with the seed of [`FaultProxy::latency`], to repeat a run.
pub const SEED_VAR: &str = "LEASEHOLD_SEED";

/// A handle to a proxy. The proxy ends when all clones of the handle are dropped.
#[derive(Clone, Debug)]
pub struct FaultProxy {
    inner: Arc<Inner>,
}

impl FaultProxy {
    /// Starts a proxy for a server, on a free loopback port, without faults.
    pub fn in_front_of(server: &RedisServer) -> Self {
        Self::start(SocketAddr::from((Ipv4Addr::LOCALHOST, server.port())))
    }

    /// Starts a proxy for any address.
    pub fn start(upstream: SocketAddr) -> Self {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free loopback port");
        listener.set_nonblocking(true).expect("a listener can be non-blocking");
        let port = listener.local_addr().expect("the address just bound").port();
        let shared = Arc::new(Shared::new(upstream));
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("fault-proxy".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || run(listener, shared, stopped)
            })
            .expect("a thread for the proxy");
        Self { inner: Arc::new(Inner { shared, port, stop: Some(stop), thread: Some(thread) }) }
    }

    /// Returns `redis://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.inner.port)
    }

    /// Returns the port on which it listens.
    pub fn port(&self) -> u16 {
        self.inner.port
    }

    /// Forwards new connections to another server, like a changed DNS name. Open connections stay.
    pub fn point_at(&self, server: &RedisServer) {
        *self.shared().upstream() = SocketAddr::from((Ipv4Addr::LOCALHOST, server.port()));
    }

    /// Delays everything from the server: replies, pushes and the end of the stream. Frames in flight keep their time.
    pub fn delay_replies(&self, by: Duration) {
        self.shared().conditions.send_modify(|now| now.delay_replies = by);
    }

    /// Delays everything from the client.
    pub fn delay_commands(&self, by: Duration) {
        self.shared().conditions.send_modify(|now| now.delay_commands = by);
    }

    /// Delays every frame in both directions by a random time of this range, in addition to fixed delays. The order within a
    /// connection is kept. The seed is printed; `LEASEHOLD_SEED` sets it. An empty range switches this off.
    pub fn latency(&self, range: Range<Duration>) {
        let given = std::env::var(SEED_VAR).ok();
        let seed = given.map_or_else(random_u64, |text| text.parse().expect("LEASEHOLD_SEED is a whole number"));
        println!("fault proxy: latency {range:?}, {SEED_VAR}={seed}");
        *self.shared().latency() = (!range.is_empty()).then(|| Latency { range, sequence: Sequence::new(seed) });
    }

    /// Forwards a matching command, then drops its reply and all later replies on that connection, which stays open. Applies to
    /// the next `times` matches.
    pub fn swallow_reply_to(&self, matches: impl Fn(&Command) -> bool + Send + Sync + 'static, times: usize) -> Rule {
        self.add_rule(matches, Fault::SwallowReply, times)
    }

    /// Holds matching commands for `hold` before they are forwarded; later commands on that connection wait. Applies to the next
    /// `times` matches.
    pub fn hold_before_forwarding(
        &self,
        matches: impl Fn(&Command) -> bool + Send + Sync + 'static,
        hold: Duration,
        times: usize,
    ) -> Rule {
        self.add_rule(matches, Fault::HoldCommand(hold), times)
    }

    /// Holds the reply to every matching command for `hold`; later replies on that connection wait.
    pub fn hold_reply_to(&self, matches: impl Fn(&Command) -> bool + Send + Sync + 'static, hold: Duration) -> Rule {
        self.add_rule(matches, Fault::HoldReply(hold), usize::MAX)
    }

    /// Forwards a matching command, waits for its reply, drops it and resets both sides: the command was carried out, but the
    /// client cannot know. Applies to the next `times` matches.
    pub fn cut_after_forwarding(
        &self,
        matches: impl Fn(&Command) -> bool + Send + Sync + 'static,
        times: usize,
    ) -> Rule {
        self.add_rule(matches, Fault::CutAfter, times)
    }

    /// Resets both sides instead of forwarding a matching command: the command was not carried out, but the client cannot know.
    /// Applies to the next `times` matches.
    pub fn cut_before_forwarding(
        &self,
        matches: impl Fn(&Command) -> bool + Send + Sync + 'static,
        times: usize,
    ) -> Rule {
        self.add_rule(matches, Fault::CutBefore, times)
    }

    /// Holds the next matching command, and later commands on that connection, until the rule is removed. Earlier commands are
    /// forwarded. The hit is counted as soon as the command is held.
    pub fn hold_back(&self, matches: impl Fn(&Command) -> bool + Send + Sync + 'static) -> Rule {
        self.add_rule(matches, Fault::HoldBack, 1)
    }

    /// Drops published messages (`message`, `pmessage`, `smessage`) and nothing else.
    pub fn mute_pushes(&self, muted: bool) {
        self.shared().conditions.send_modify(|now| now.mute_pushes = muted);
    }

    /// While on, connections are accepted and kept, but nothing is forwarded, not even the end of a connection. When it is
    /// switched off, everything that was sent meanwhile is delivered.
    pub fn blackhole(&self, on: bool) {
        self.shared().conditions.send_modify(|now| now.blackhole = on);
    }

    /// While on, new connections are reset at once.
    pub fn refuse(&self, on: bool) {
        self.shared().conditions.send_modify(|now| now.refuse = on);
    }

    /// Switches all faults off and removes all rules. A connection whose reply was dropped still gets no replies until it is
    /// reset.
    pub fn heal(&self) {
        self.shared().rules().clear();
        *self.shared().latency() = None;
        self.shared().conditions.send_modify(|now| *now = Conditions::default());
    }

    /// Resets both sides of every connection and returns their number.
    pub fn reset_all(&self) -> usize {
        self.reset(|_| true)
    }

    /// Resets the connections that have sent a subscription and returns their number.
    pub fn reset_pushing_connections(&self) -> usize {
        self.reset(|link| link.pushing.load(Ordering::SeqCst))
    }

    /// Returns the number of accepted connections, without refused ones.
    pub fn connections_made(&self) -> u64 {
        self.shared().made.load(Ordering::SeqCst)
    }

    /// Returns the number of connections that [`FaultProxy::refuse`] has reset.
    pub fn connections_refused(&self) -> u64 {
        self.shared().refused.load(Ordering::SeqCst)
    }

    /// Returns the number of open connections.
    pub fn connections_open(&self) -> usize {
        self.shared().links().len()
    }

    /// Returns how often clients sent a command, forwarded or not. Case does not matter.
    pub fn commands_seen(&self, name: &str) -> u64 {
        self.shared().seen().get(&name.to_ascii_uppercase()).copied().unwrap_or(0)
    }

    fn shared(&self) -> &Shared {
        &self.inner.shared
    }

    fn add_rule(&self, matches: impl Fn(&Command) -> bool + Send + Sync + 'static, fault: Fault, times: usize) -> Rule {
        let (active, rule) = ActiveRule::new(matches, fault, times);
        self.shared().rules().push(active);
        rule
    }

    fn reset(&self, which: impl Fn(&Link) -> bool) -> usize {
        let mut resets = 0;
        for (_, link) in self.shared().links().extract_if(|_, link| which(link)) {
            // Fails if the connection is already ending.
            let _ = link.reset.send(());
            resets += 1;
        }
        resets
    }
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    port: u16,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread is already printed, and another one here would hide that of the test.
            let _ = thread.join();
        }
    }
}

/// State that handles and connections share.
struct Shared {
    upstream: Mutex<SocketAddr>,
    conditions: watch::Sender<Conditions>,
    latency: Mutex<Option<Latency>>,
    rules: Mutex<Vec<ActiveRule>>,
    links: Mutex<HashMap<u64, Link>>,
    seen: Mutex<BTreeMap<String, u64>>,
    made: AtomicU64,
    refused: AtomicU64,
}

/// The faults that apply to all connections.
#[derive(Clone, Copy, Debug, Default)]
struct Conditions {
    delay_replies: Duration,
    delay_commands: Duration,
    mute_pushes: bool,
    blackhole: bool,
    refuse: bool,
}

struct Latency {
    range: Range<Duration>,
    sequence: Sequence,
}

/// A handle's view of a connection.
struct Link {
    reset: oneshot::Sender<()>,
    pushing: Arc<AtomicBool>,
}

impl Shared {
    fn new(upstream: SocketAddr) -> Self {
        Self {
            upstream: Mutex::new(upstream),
            conditions: watch::Sender::new(Conditions::default()),
            latency: Mutex::default(),
            rules: Mutex::default(),
            links: Mutex::default(),
            seen: Mutex::default(),
            made: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    fn now(&self) -> Conditions {
        *self.conditions.borrow()
    }

    /// Waits while the blackhole is on.
    async fn passable(&self) {
        // Fails only without a sender, and `self` has one.
        let _ = self.conditions.subscribe().wait_for(|now| !now.blackhole).await;
    }

    fn command_delay(&self) -> Duration {
        self.now().delay_commands + self.random_delay()
    }

    fn reply_delay(&self) -> Duration {
        self.now().delay_replies + self.random_delay()
    }

    fn random_delay(&self) -> Duration {
        match &mut *self.latency() {
            None => Duration::ZERO,
            Some(Latency { range, sequence }) => {
                let width_ns = u64::try_from((range.end - range.start).as_nanos()).expect("latencies are short");
                range.start + Duration::from_nanos(sequence.next() % width_ns)
            }
        }
    }

    /// Counts a command and returns the fault that applies to it.
    fn judge(&self, command: &Command) -> Option<(Fault, Rule)> {
        *self.seen().entry(command.name().to_string()).or_default() += 1;
        let mut rules = self.rules();
        rules.retain(ActiveRule::is_live);
        rules.iter_mut().find_map(|rule| rule.take(command))
    }

    fn upstream(&self) -> MutexGuard<'_, SocketAddr> {
        self.upstream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn latency(&self) -> MutexGuard<'_, Option<Latency>> {
        self.latency.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rules(&self) -> MutexGuard<'_, Vec<ActiveRule>> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn links(&self) -> MutexGuard<'_, HashMap<u64, Link>> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seen(&self) -> MutexGuard<'_, BTreeMap<String, u64>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("upstream", &*self.upstream()).field("now", &self.now()).finish_non_exhaustive()
    }
}

/// Runs the proxy's thread: accepts connections until it is stopped, then drops them with the runtime.
fn run(listener: std::net::TcpListener, shared: Arc<Shared>, stopped: oneshot::Receiver<()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime for the proxy");
    runtime.block_on(async {
        let listener = TcpListener::from_std(listener).expect("the proxy's listener");
        tokio::select! {
            () = accept(&listener, &shared) => {}
            _ = stopped => {}
        }
    });
}

async fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    loop {
        let client = match listener.accept().await {
            Ok((client, _)) => client,
            // Out of file descriptors, or the client has gone: try again.
            Err(error) => {
                eprintln!("fault proxy: {error}");
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
        };
        if shared.now().refuse {
            shared.refused.fetch_add(1, Ordering::SeqCst);
            connection::make_close_a_reset(&client);
            continue;
        }
        admit(client, shared);
    }
}

fn admit(client: TcpStream, shared: &Arc<Shared>) {
    let id = shared.made.fetch_add(1, Ordering::SeqCst);
    let (reset, reset_asked) = oneshot::channel();
    let pushing = Arc::new(AtomicBool::new(false));
    shared.links().insert(id, Link { reset, pushing: Arc::clone(&pushing) });
    let shared = Arc::clone(shared);
    tokio::spawn(async move {
        let cause = connection::serve(&shared, client, pushing, reset_asked).await;
        shared.links().remove(&id);
        if let Some(rule) = cause {
            rule.count_hit();
        }
    });
}
