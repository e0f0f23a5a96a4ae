//! How many connections there may be, in all and per address, and which one is closed when there are too many.
//!
//! A connection without a request, or whose client neither reads the answer nor sends the body, is *idle*. When a bound is reached, those that have been
//! idle longest are closed to make room: a flood of silent connections displaces itself, not the clients that send requests.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use rustix::process::{Resource, getrlimit};
use tokio_util::sync::CancellationToken;

use crate::failures::network;

/// Connections at once, where the descriptor limit allows it.
const CONNECTIONS: usize = 4_096;
/// Descriptors that are left for the store, files, webhooks, and connections that are being closed.
const RESERVED: u64 = 256;
/// One address may have this part of all connections, unless configured otherwise.
const SHARE: usize = 4;
/// A bound that is reached frees this part of itself at once, so that finding the idle ones costs little per connection.
const AT_ONCE: usize = 64;
/// A full server leaves a connection this long to send its first request before it closes it for another.
const GRACE: Duration = Duration::from_millis(100);
/// `State::idle_since` of a connection that is at work, and of one that was closed.
const AT_WORK: u64 = 0;
const CLOSED: u64 = u64::MAX;

/// The connections of one server.
#[derive(Debug)]
pub(crate) struct Seats {
    most: usize,
    per_address: usize,
    grace_ms: u64,
    began: Instant,
    table: Mutex<Table>,
    figures: Figures,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    taken: HashMap<u64, Arc<State>>,
    of: HashMap<IpAddr, usize>,
}

/// One connection's place; given back when dropped.
#[derive(Debug)]
pub(crate) struct Seat {
    seats: Arc<Seats>,
    number: u64,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    address: IpAddr,
    /// Milliseconds since the server began, plus one; or [`AT_WORK`], or [`CLOSED`].
    idle_since: AtomicU64,
    has_request: AtomicBool,
    close: CancellationToken,
}

/// Why there is no place for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Full {
    /// All connections of the address are at work.
    Address,
    /// All connections are at work.
    Server,
    /// Some are idle, but only for a moment: ask again shortly.
    ForNow,
}

/// Whether idle connections were closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Room {
    Made,
    Soon,
    None,
}

/// What is counted of connections.
#[derive(Debug, Clone, Default)]
pub(crate) struct Figures {
    open: Gauge,
    dropped: Family<Dropped, Counter>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Dropped {
    why: &'static str,
}

impl Figures {
    pub(crate) fn register(&self, registry: &mut Registry) {
        for why in ["idle", "address_full", "server_full", "not_reading"] {
            drop(self.dropped.get_or_create(&Dropped { why }));
        }
        registry.register("connections", "Connections that are open", self.open.clone());
        let help = "Connections closed to protect the others, by why";
        registry.register("connections_dropped", help, self.dropped.clone());
    }

    fn dropped(&self, why: &'static str) {
        self.dropped.get_or_create(&Dropped { why }).inc();
    }
}

impl Seats {
    /// As many as the descriptor limit of this process allows.
    pub(crate) fn new(per_address: Option<usize>, figures: Figures) -> Arc<Self> {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let most = usize::try_from(limit.saturating_sub(RESERVED)).unwrap_or(usize::MAX).clamp(16, CONNECTIONS);
        if most < CONNECTIONS {
            tracing::warn!(
                limit,
                connections = most,
                "the descriptor limit allows few connections: raise it (ulimit -n)"
            );
        }
        Self::with(most, per_address.unwrap_or(most / SHARE).clamp(1, most), GRACE, figures)
    }

    pub(crate) fn with(most: usize, per_address: usize, grace: Duration, figures: Figures) -> Arc<Self> {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        Arc::new(Self { most, per_address, grace_ms, began: Instant::now(), table: Mutex::default(), figures })
    }

    /// A place for a new connection, if need be at the cost of those that are idle.
    pub(crate) fn take(self: &Arc<Self>, peer: SocketAddr) -> Result<Seat, Full> {
        let address = network(peer.ip());
        let mut table = self.lock();
        if table.of.get(&address).is_some_and(|taken| *taken >= self.per_address)
            && self.make_room(&mut table, Some(address), self.per_address, 0) != Room::Made
        {
            self.figures.dropped("address_full");
            return Err(Full::Address);
        }
        if table.taken.len() >= self.most {
            match self.make_room(&mut table, None, self.most, self.grace_ms) {
                Room::Made => {}
                Room::Soon => return Err(Full::ForNow),
                Room::None => {
                    self.figures.dropped("server_full");
                    return Err(Full::Server);
                }
            }
        }
        let state = Arc::new(State {
            address,
            idle_since: AtomicU64::new(self.now()),
            has_request: AtomicBool::new(false),
            close: CancellationToken::new(),
        });
        let number = table.next;
        table.next += 1;
        table.taken.insert(number, state.clone());
        *table.of.entry(address).or_default() += 1;
        self.figures.open.inc();
        Ok(Seat { seats: self.clone(), number, state })
    }

    /// Counts a connection that is refused because none became idle for long enough.
    pub(crate) fn count_full(&self) {
        self.figures.dropped("server_full");
    }

    /// Closes those that are idle longest, because no descriptor is left.
    pub(crate) fn make_room_anywhere(&self) {
        self.make_room(&mut self.lock(), None, self.most, 0);
    }

    /// Closes the connections, of one address or of all, that have been idle longest, and at least as long as `grace_ms`.
    fn make_room(&self, table: &mut Table, of: Option<IpAddr>, bound: usize, grace_ms: u64) -> Room {
        let idle = table.taken.iter().filter(|(_, state)| of.is_none_or(|of| of == state.address));
        let since = |state: &State| state.idle_since.load(Ordering::Acquire);
        let mut idle: Vec<(u64, u64)> = idle.map(|(number, state)| (since(state), *number)).collect();
        idle.retain(|(since, _)| *since != AT_WORK && *since != CLOSED);
        if idle.is_empty() {
            return Room::None;
        }
        let latest = self.now().saturating_sub(grace_ms);
        idle.retain(|(since, _)| *since <= latest);
        let count = (bound / AT_ONCE).max(1).min(idle.len());
        if count == 0 {
            return Room::Soon;
        }
        if count < idle.len() {
            idle.select_nth_unstable(count - 1);
        }
        let mut closed = 0;
        for (since, number) in idle.into_iter().take(count) {
            let Some(state) = table.taken.get(&number) else { continue };
            // Not the one that got a request, or whose client read on, in this moment.
            if state.idle_since.compare_exchange(since, CLOSED, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                continue;
            }
            state.close.cancel();
            self.remove(table, number);
            self.figures.dropped("idle");
            closed += 1;
        }
        if closed > 0 { Room::Made } else { Room::Soon }
    }

    fn remove(&self, table: &mut Table, number: u64) {
        let Some(state) = table.taken.remove(&number) else { return };
        self.figures.open.dec();
        if let Some(taken) = table.of.get_mut(&state.address) {
            *taken -= 1;
            if *taken == 0 {
                table.of.remove(&state.address);
            }
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX - 2) + 1
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seat {
    /// Done when the connection must be closed.
    pub(crate) fn closing(&self) -> CancellationToken {
        self.state.close.clone()
    }

    /// A request came: the connection is at work until the result is dropped. `None`: it is being closed.
    pub(crate) fn work(self: &Arc<Self>) -> Option<Working> {
        self.state.has_request.store(true, Ordering::Release);
        self.set(AT_WORK).then(|| Working(self.clone()))
    }

    /// The client neither takes what is written to it nor sends the body that is waited for.
    pub(crate) fn is_blocked(&self) {
        let now = self.seats.now();
        let _ = self.state.idle_since.compare_exchange(AT_WORK, now, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// The client took or sent some.
    pub(crate) fn is_unblocked(&self) {
        if self.state.has_request.load(Ordering::Acquire) {
            self.set(AT_WORK);
        }
    }

    /// Returns once the connection has been idle for this long.
    pub(crate) async fn idle_for(&self, limit: Duration) {
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        loop {
            let left_ms = match self.state.idle_since.load(Ordering::Acquire) {
                AT_WORK => limit_ms,
                CLOSED => return,
                since => limit_ms.saturating_sub(self.seats.now().saturating_sub(since)),
            };
            if left_ms == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(left_ms)).await;
        }
    }

    /// Counts a connection that is closed because its client stopped reading.
    pub(crate) fn gave_up(&self) {
        self.seats.figures.dropped("not_reading");
    }

    /// Unless it was closed.
    fn set(&self, since: u64) -> bool {
        let keep = |before| (before != CLOSED).then_some(since);
        self.state.idle_since.fetch_update(Ordering::AcqRel, Ordering::Acquire, keep).is_ok()
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.seats.remove(&mut self.seats.lock(), self.number);
    }
}

/// A request that is being answered.
#[derive(Debug)]
pub(crate) struct Working(Arc<Seat>);

impl Drop for Working {
    fn drop(&mut self) {
        self.0.state.has_request.store(false, Ordering::Release);
        self.0.set(self.0.seats.now());
    }
}

/// How long a client may leave what is written to it unread.
pub(crate) const READ_WITHIN: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(host: u8, port: u16) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, host], port))
    }

    fn is_closed(seat: &Seat) -> bool {
        seat.closing().is_cancelled()
    }

    #[test]
    fn an_address_displaces_its_own_idle_connections_and_nobody_elses() {
        let seats = Seats::with(100, 3, GRACE, Figures::default());
        let other = seats.take(peer(2, 1)).expect("free");
        let first = Arc::new(seats.take(peer(1, 1)).expect("free"));
        let working = first.work().expect("open");
        let idle: Vec<Seat> = (2..4).map(|port| seats.take(peer(1, port)).expect("free")).collect();
        let next = Arc::new(seats.take(peer(1, 4)).expect("an idle one makes room"));
        assert_eq!(idle.iter().filter(|seat| is_closed(seat)).count(), 1);
        assert!(!is_closed(&first) && !is_closed(&other), "neither one at work nor another's");
        let last = Arc::new(seats.take(peer(1, 5)).expect("the other idle one"));
        assert!(idle.iter().all(is_closed));
        let at_work = [next.work(), last.work()];
        assert_eq!(seats.take(peer(1, 6)).expect_err("all at work"), Full::Address);
        first.is_blocked();
        let seat = seats.take(peer(1, 7)).expect("a client that does not read is idle");
        assert!(is_closed(&first) && first.work().is_none(), "what is closed gets no request");
        drop((seat, at_work, working));
    }

    #[test]
    fn a_full_server_closes_the_longest_idle_and_counts_what_is_open() {
        let seats = Seats::with(4, 4, GRACE, Figures::default());
        let mut all: Vec<Arc<Seat>> = (0..4).map(|n| Arc::new(seats.take(peer(n, 1)).expect("free"))).collect();
        assert_eq!(seats.take(peer(9, 1)).expect_err("all have just come"), Full::ForNow);
        for (since, seat) in [3, 1, 2, 4].into_iter().zip(&all) {
            assert!(seat.set(since));
        }
        std::thread::sleep(GRACE + Duration::from_millis(5));
        all.push(Arc::new(seats.take(peer(9, 1)).expect("room was made")));
        assert_eq!(all.iter().map(|seat| is_closed(seat)).collect::<Vec<_>>(), [false, true, false, false, false]);
        let working: Vec<_> = all.iter().filter_map(Seat::work).collect();
        assert_eq!((working.len(), seats.take(peer(8, 1)).expect_err("all at work")), (4, Full::Server));
        all[0].is_blocked();
        all[0].is_unblocked();
        assert_eq!(seats.take(peer(8, 1)).expect_err("it reads on"), Full::Server);
        drop(working);
        std::thread::sleep(GRACE + Duration::from_millis(5));
        assert!(seats.take(peer(8, 1)).is_ok());
        drop(all);
        let table = seats.lock();
        assert_eq!((table.taken.len(), table.of.len(), seats.figures.open.get()), (0, 0, 0));
    }
}
