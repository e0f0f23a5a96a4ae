//! Connection limits, in total and per address, and the choice of connections to close when a limit is reached.
//!
//! A connection is *idle* when it has no request, or when its client neither reads the response nor sends the body.
//! When a limit is reached, the connections that have been idle longest are closed. A flood of silent connections
//! therefore displaces itself and not the clients that send requests.

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

use crate::peer::network;

/// The most open connections, if the descriptor limit allows that many.
const MAX_CONNECTIONS: usize = 4_096;
/// Descriptors reserved for the store, files, webhooks, and connections that are being closed.
const RESERVED_DESCRIPTORS: u64 = 256;
/// One address may open this fraction (1/n) of all connections, unless configured otherwise.
const ADDRESS_SHARE: usize = 4;
/// Reaching a limit closes this fraction (1/n) of it at once, so that the search for idle connections is cheap per
/// connection.
const FREED_PART: usize = 64;
/// How long a full server leaves a new connection to send its first request before it may close it.
const GRACE: Duration = Duration::from_millis(100);
/// Values of [`SlotState::idle_since`] for a connection with a request in progress and for a closed one.
const ACTIVE: u64 = 0;
const CLOSED: u64 = u64::MAX;

/// The open connections of one server and their limits.
#[derive(Debug)]
pub(crate) struct ConnectionLimits {
    max: usize,
    per_address: usize,
    grace_ms: u64,
    began: Instant,
    table: Mutex<SlotTable>,
    metrics: ConnectionMetrics,
}

#[derive(Debug, Default)]
struct SlotTable {
    next: u64,
    slots: HashMap<u64, Arc<SlotState>>,
    per_address: HashMap<IpAddr, usize>,
}

/// The slot of one open connection. Dropping it frees the slot.
#[derive(Debug)]
pub(crate) struct Slot {
    limits: Arc<ConnectionLimits>,
    number: u64,
    state: Arc<SlotState>,
}

#[derive(Debug)]
struct SlotState {
    address: IpAddr,
    /// Milliseconds since the server started, plus one; or [`ACTIVE`], or [`CLOSED`].
    idle_since: AtomicU64,
    has_request: AtomicBool,
    close: CancellationToken,
}

/// Why a new connection gets no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Full {
    /// All connections of the address have a request in progress.
    Address,
    /// All connections of the server have a request in progress.
    Server,
    /// Some connections are idle, but not yet for long enough. The caller should retry shortly.
    Temporarily,
}

/// Whether closing idle connections made room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Room {
    Made,
    Later,
    None,
}

/// The metrics of connections.
#[derive(Debug, Clone, Default)]
pub(crate) struct ConnectionMetrics {
    open: Gauge,
    dropped: Family<DroppedLabels, Counter>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DroppedLabels {
    why: &'static str,
}

impl ConnectionMetrics {
    pub(crate) fn register(&self, registry: &mut Registry) {
        for why in ["idle", "address_full", "server_full", "not_reading"] {
            drop(self.dropped.get_or_create(&DroppedLabels { why }));
        }
        registry.register("connections", "Open connections", self.open.clone());
        let help = "Connections closed to protect the others, by reason";
        registry.register("connections_dropped", help, self.dropped.clone());
    }

    fn dropped(&self, why: &'static str) {
        self.dropped.get_or_create(&DroppedLabels { why }).inc();
    }
}

impl ConnectionLimits {
    /// Sets the limits as high as the descriptor limit of this process allows.
    pub(crate) fn new(per_address: Option<usize>, metrics: ConnectionMetrics) -> Arc<Self> {
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let max = usize::try_from(limit.saturating_sub(RESERVED_DESCRIPTORS))
            .unwrap_or(usize::MAX)
            .clamp(16, MAX_CONNECTIONS);
        if max < MAX_CONNECTIONS {
            tracing::warn!(
                limit,
                connections = max,
                "the descriptor limit allows few connections: raise it (ulimit -n)"
            );
        }
        Self::with(max, per_address.unwrap_or(max / ADDRESS_SHARE).clamp(1, max), GRACE, metrics)
    }

    pub(crate) fn with(max: usize, per_address: usize, grace: Duration, metrics: ConnectionMetrics) -> Arc<Self> {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        Arc::new(Self { max, per_address, grace_ms, began: Instant::now(), table: Mutex::default(), metrics })
    }

    /// Takes a slot for a new connection, closing idle connections if necessary.
    pub(crate) fn take(self: &Arc<Self>, peer: SocketAddr) -> Result<Slot, Full> {
        let address = network(peer.ip());
        let mut table = self.lock();
        if table.per_address.get(&address).is_some_and(|taken| *taken >= self.per_address)
            && self.make_room(&mut table, Some(address), self.per_address, 0) != Room::Made
        {
            self.metrics.dropped("address_full");
            return Err(Full::Address);
        }
        if table.slots.len() >= self.max {
            match self.make_room(&mut table, None, self.max, self.grace_ms) {
                Room::Made => {}
                Room::Later => return Err(Full::Temporarily),
                Room::None => {
                    self.metrics.dropped("server_full");
                    return Err(Full::Server);
                }
            }
        }
        let state = Arc::new(SlotState {
            address,
            idle_since: AtomicU64::new(self.now_ms()),
            has_request: AtomicBool::new(false),
            close: CancellationToken::new(),
        });
        let number = table.next;
        table.next += 1;
        table.slots.insert(number, state.clone());
        *table.per_address.entry(address).or_default() += 1;
        self.metrics.open.inc();
        Ok(Slot { limits: self.clone(), number, state })
    }

    /// Counts a connection that was refused because no other became idle for long enough.
    pub(crate) fn count_server_full(&self) {
        self.metrics.dropped("server_full");
    }

    /// Closes the connections that have been idle longest, because no file descriptor is left.
    pub(crate) fn free_descriptors(&self) {
        self.make_room(&mut self.lock(), None, self.max, 0);
    }

    /// Closes the connections, of one address or of all, that have been idle longest and for at least `grace_ms`.
    fn make_room(&self, table: &mut SlotTable, of: Option<IpAddr>, bound: usize, grace_ms: u64) -> Room {
        let idle = table.slots.iter().filter(|(_, state)| of.is_none_or(|of| of == state.address));
        let since = |state: &SlotState| state.idle_since.load(Ordering::Acquire);
        let mut idle: Vec<(u64, u64)> = idle.map(|(number, state)| (since(state), *number)).collect();
        idle.retain(|(since, _)| *since != ACTIVE && *since != CLOSED);
        if idle.is_empty() {
            return Room::None;
        }
        let latest = self.now_ms().saturating_sub(grace_ms);
        idle.retain(|(since, _)| *since <= latest);
        let count = (bound / FREED_PART).max(1).min(idle.len());
        if count == 0 {
            return Room::Later;
        }
        if count < idle.len() {
            idle.select_nth_unstable(count - 1);
        }
        let mut closed = 0;
        for (since, number) in idle.into_iter().take(count) {
            let Some(state) = table.slots.get(&number) else { continue };
            // Skips a connection that has just received a request or whose client has just read on.
            if state.idle_since.compare_exchange(since, CLOSED, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                continue;
            }
            state.close.cancel();
            self.remove(table, number);
            self.metrics.dropped("idle");
            closed += 1;
        }
        if closed > 0 { Room::Made } else { Room::Later }
    }

    fn remove(&self, table: &mut SlotTable, number: u64) {
        let Some(state) = table.slots.remove(&number) else { return };
        self.metrics.open.dec();
        if let Some(taken) = table.per_address.get_mut(&state.address) {
            *taken -= 1;
            if *taken == 0 {
                table.per_address.remove(&state.address);
            }
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX - 2) + 1
    }

    fn lock(&self) -> MutexGuard<'_, SlotTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    /// Returns a token that is cancelled when the connection must be closed.
    pub(crate) fn close_token(&self) -> CancellationToken {
        self.state.close.clone()
    }

    /// Marks the connection as active until the result is dropped. Returns `None` if it is being closed.
    pub(crate) fn start_request(self: &Arc<Self>) -> Option<ActiveRequest> {
        self.state.has_request.store(true, Ordering::Release);
        self.set_idle_since(ACTIVE).then(|| ActiveRequest(self.clone()))
    }

    /// Marks the connection as idle: the client neither reads the response nor sends the body.
    pub(crate) fn mark_blocked(&self) {
        let now = self.limits.now_ms();
        let _ = self.state.idle_since.compare_exchange(ACTIVE, now, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Marks the connection as active again: the client has read or sent something.
    pub(crate) fn mark_unblocked(&self) {
        if self.state.has_request.load(Ordering::Acquire) {
            self.set_idle_since(ACTIVE);
        }
    }

    /// Returns once the connection has been idle for `limit`.
    pub(crate) async fn idle_for(&self, limit: Duration) {
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        loop {
            let left_ms = match self.state.idle_since.load(Ordering::Acquire) {
                ACTIVE => limit_ms,
                CLOSED => return,
                since => limit_ms.saturating_sub(self.limits.now_ms().saturating_sub(since)),
            };
            if left_ms == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(left_ms)).await;
        }
    }

    /// Counts a connection that is closed because its client stopped reading.
    pub(crate) fn count_not_reading(&self) {
        self.limits.metrics.dropped("not_reading");
    }

    /// Returns `false` if the connection was closed.
    fn set_idle_since(&self, since: u64) -> bool {
        let keep = |before| (before != CLOSED).then_some(since);
        self.state.idle_since.fetch_update(Ordering::AcqRel, Ordering::Acquire, keep).is_ok()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.limits.remove(&mut self.limits.lock(), self.number);
    }
}

/// A request in progress.
#[derive(Debug)]
pub(crate) struct ActiveRequest(Arc<Slot>);

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.0.state.has_request.store(false, Ordering::Release);
        self.0.set_idle_since(self.0.limits.now_ms());
    }
}

/// How long a client may leave a response unread.
pub(crate) const READ_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(host: u8, port: u16) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, host], port))
    }

    fn is_closed(slot: &Slot) -> bool {
        slot.close_token().is_cancelled()
    }

    #[test]
    fn an_address_displaces_only_its_own_idle_connections() {
        let limits = ConnectionLimits::with(100, 3, GRACE, ConnectionMetrics::default());
        let other = limits.take(peer(2, 1)).expect("free");
        let first = Arc::new(limits.take(peer(1, 1)).expect("free"));
        let working = first.start_request().expect("open");
        let idle: Vec<Slot> = (2..4).map(|port| limits.take(peer(1, port)).expect("free")).collect();
        let next = Arc::new(limits.take(peer(1, 4)).expect("an idle one makes room"));
        assert_eq!(idle.iter().filter(|slot| is_closed(slot)).count(), 1);
        assert!(!is_closed(&first) && !is_closed(&other), "neither an active one nor another address's");
        let last = Arc::new(limits.take(peer(1, 5)).expect("the other idle one"));
        assert!(idle.iter().all(is_closed));
        let at_work = [next.start_request(), last.start_request()];
        assert_eq!(limits.take(peer(1, 6)).expect_err("all active"), Full::Address);
        first.mark_blocked();
        let slot = limits.take(peer(1, 7)).expect("a client that does not read is idle");
        assert!(is_closed(&first) && first.start_request().is_none(), "what is closed gets no request");
        drop((slot, at_work, working));
    }

    #[test]
    fn a_full_server_closes_the_longest_idle_and_counts_what_is_open() {
        let limits = ConnectionLimits::with(4, 4, GRACE, ConnectionMetrics::default());
        let mut all: Vec<Arc<Slot>> = (0..4).map(|n| Arc::new(limits.take(peer(n, 1)).expect("free"))).collect();
        assert_eq!(limits.take(peer(9, 1)).expect_err("all have just come"), Full::Temporarily);
        for (since, slot) in [3, 1, 2, 4].into_iter().zip(&all) {
            assert!(slot.set_idle_since(since));
        }
        std::thread::sleep(GRACE + Duration::from_millis(5));
        all.push(Arc::new(limits.take(peer(9, 1)).expect("room was made")));
        assert_eq!(all.iter().map(|slot| is_closed(slot)).collect::<Vec<_>>(), [false, true, false, false, false]);
        let working: Vec<_> = all.iter().filter_map(Slot::start_request).collect();
        assert_eq!((working.len(), limits.take(peer(8, 1)).expect_err("all active")), (4, Full::Server));
        all[0].mark_blocked();
        all[0].mark_unblocked();
        assert_eq!(limits.take(peer(8, 1)).expect_err("it reads on"), Full::Server);
        drop(working);
        std::thread::sleep(GRACE + Duration::from_millis(5));
        assert!(limits.take(peer(8, 1)).is_ok());
        drop(all);
        let table = limits.lock();
        assert_eq!((table.slots.len(), table.per_address.len(), limits.metrics.open.get()), (0, 0, 0));
    }
}
