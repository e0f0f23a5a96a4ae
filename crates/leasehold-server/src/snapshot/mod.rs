//! A cached view of all locks, so that the dashboard does not query the store for each viewer.
//!
//! One task scans the store: often while somebody views the dashboard, rarely otherwise, and never for more than a
//! tenth of the time. With ten thousand locks it scans less often instead of slowing the store down. Between two full
//! scans it refreshes the locks that events named, for at most another tenth of the time.

mod changed;
mod history;
mod lane;
mod record;
mod routes;
mod trends;

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use leasehold::events::LockEvent;
use leasehold::inspect::{Cursor, Holder, LockInfo};
use leasehold::{Error, LockName};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use crate::App;
use crate::clock::unix_ms;
use crate::health::{self, ExceptionStats};
use crate::monitor;
use changed::ChangedLocks;
use history::History;
use record::ScannedLock;
pub(crate) use routes::{__path_live, __path_overview, __path_timeline, live, overview, timeline};
use trends::{Totals, Trends};

/// The shortest interval between two full scans, with viewers and without.
const WATCHED_INTERVAL: Duration = Duration::from_millis(250);
const UNWATCHED_INTERVAL: Duration = Duration::from_secs(5);
/// After a scan that took `t`, the task rests for this many times `t`.
const REST_FACTOR: u32 = 9;
const MAX_REST: Duration = Duration::from_secs(30);
/// The pause before a store that did not answer is scanned again.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// A viewer that has sent no request for this long is gone.
const VIEWER_TIMEOUT: Duration = Duration::from_secs(4);
/// How long the first request after a pause may wait for a fresh scan.
const FRESH_SCAN_TIMEOUT: Duration = Duration::from_millis(500);
/// How long any request may wait for the locks that events named.
const CHANGES_TIMEOUT: Duration = Duration::from_millis(150);
/// The age at which a scan is no longer fresh.
const STALE_AFTER: Duration = Duration::from_millis(1_500);
/// The most locks inspected one by one, with their queues, in one scan. The others are inspected in later scans.
const MAX_INSPECTED: usize = 500;
/// How many locks are inspected at the same time.
const CONCURRENCY: usize = 64;
/// The interval between two pages of the search for foreign locks.
const SEARCH_INTERVAL: Duration = Duration::from_secs(3);
/// The length of one page of that search.
const SEARCH_PAGE: usize = 200;

/// The cached view of all locks.
pub(crate) struct Snapshot {
    /// Distinguishes the versions of this server from those of others.
    run: String,
    state: Mutex<SnapshotState>,
    /// When the current viewers arrived, and when the last request came.
    watched: Mutex<Option<(Instant, Instant)>>,
    /// Notified when a viewer arrives after a pause.
    viewer_arrived: Notify,
    /// Locks with events since the last scan, while there are viewers.
    changed: ChangedLocks,
    /// The number of scans so far.
    scans: watch::Sender<u64>,
}

#[derive(Default)]
struct SnapshotState {
    history: History,
    trends: Trends,
    exceptions: ExceptionStats,
    /// The last scan that succeeded.
    last_scan: Option<(Instant, u64)>,
    down_since_ms: Option<u64>,
    events_missed: bool,
}

/// What the scanning task remembers between scans.
#[derive(Default)]
struct Scanner {
    /// Where the search for foreign locks continues.
    search: Option<Cursor>,
    searched: Option<Instant>,
    /// Where the round-robin inspection continues.
    turn: usize,
}

impl Snapshot {
    pub(crate) fn new() -> Self {
        Self {
            run: leasehold::lease::Token::random().holder_id().to_string(),
            state: Mutex::default(),
            watched: Mutex::default(),
            viewer_arrived: Notify::new(),
            changed: ChangedLocks::default(),
            scans: watch::channel(0).0,
        }
    }

    /// Records an event of the fleet.
    pub(crate) fn record_event(&self, event: &LockEvent) {
        if is_internal(&event.name) {
            return;
        }
        if self.is_watched() {
            self.changed.add(&event.name);
        }
        let mut state = self.state();
        state.history.record_event(event);
        state.count(unix_ms());
    }

    /// Records that some events may have been missed.
    pub(crate) fn events_missed(&self) {
        self.state().events_missed = true;
    }

    /// Scans until the server stops.
    pub(crate) fn start(app: App) -> JoinHandle<()> {
        let stopping = app.stopping.clone();
        let scan_forever = async move {
            let mut scanner = Scanner::default();
            loop {
                let began = Instant::now();
                let scanned = scanner.scan(&app).await;
                let took = began.elapsed();
                let rest = if scanned.is_ok() { took * REST_FACTOR } else { RETRY_INTERVAL };
                app.snapshot.apply(scanned);
                app.snapshot.scans.send_modify(|scans| *scans += 1);
                let next = Instant::now() + rest.clamp(WATCHED_INTERVAL, MAX_REST);
                refresh_changed_until(&app, next.into()).await;
                let idle = UNWATCHED_INTERVAL.saturating_sub(began.elapsed());
                if !app.snapshot.is_watched() {
                    let _ = tokio::time::timeout(idle, app.snapshot.viewer_arrived.notified()).await;
                }
            }
        };
        tokio::spawn(async move {
            tokio::select! {
                () = stopping.cancelled() => {}
                () = scan_forever => {}
            }
        })
    }

    /// Records a request of a viewer. The first request after a pause waits a moment for a fresh scan; later ones do
    /// not wait, however long a scan takes.
    async fn mark_watched(&self) {
        let (mut scans, now) = (self.scans.subscribe(), Instant::now());
        let since = {
            let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
            let current = watched.filter(|(_, last)| last.elapsed() <= VIEWER_TIMEOUT);
            let since = current.map_or(now, |(since, _)| since);
            *watched = Some((since, now));
            since
        };
        if since == now {
            self.viewer_arrived.notify_one();
        }
        let fresh = self.state().last_scan.is_some_and(|(at, _)| at.elapsed() < STALE_AFTER || at >= since);
        if !fresh {
            let _ = tokio::time::timeout(FRESH_SCAN_TIMEOUT, scans.changed()).await;
        }
    }

    /// Waits a moment for the locks whose events the caller may already have received.
    async fn wait_for_changes(&self) {
        let mut scans = self.scans.subscribe();
        if self.changed.has_pending() {
            let _ = tokio::time::timeout(CHANGES_TIMEOUT, scans.changed()).await;
        }
    }

    /// Refreshes the locks that events named.
    async fn refresh_changed(&self, app: &App) {
        let (names, at_ms) = (self.changed.take(), unix_ms());
        // If the store does not answer, the next full scan reports it.
        if let Ok(found) = scan_locks(app, &names).await {
            let mut state = self.state();
            state.history.apply_partial_scan(at_ms, &names, found);
            state.update_trends(at_ms);
        }
        self.changed.refreshed();
        self.scans.send_modify(|scans| *scans += 1);
    }

    fn is_watched(&self) -> bool {
        let watched = *self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.is_some_and(|(_, last)| last.elapsed() < VIEWER_TIMEOUT)
    }

    fn apply(&self, scanned: Result<Scan, Error>) {
        let mut state = self.state();
        match scanned {
            Ok(Scan { at_ms, found, exceptions }) => {
                let missed = std::mem::take(&mut state.events_missed);
                state.history.apply_scan(at_ms, found, missed);
                state.update_trends(at_ms);
                state.exceptions = exceptions;
                state.last_scan = Some((Instant::now(), at_ms));
                if state.down_since_ms.take().is_some() {
                    tracing::info!("the store answers again");
                }
            }
            Err(error) => {
                let began = state.down_since_ms.is_none();
                // Events that are published meanwhile are missed.
                state.events_missed = true;
                state.down_since_ms.get_or_insert_with(unix_ms);
                if began {
                    tracing::warn!(error = %format_args!("{error:#}"), "the store does not answer");
                }
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, SnapshotState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SnapshotState {
    fn update_trends(&mut self, at_ms: u64) {
        let totals = Totals::of(self.history.locks(), at_ms);
        self.trends.record_totals(at_ms, totals);
        self.count(at_ms);
    }

    fn count(&mut self, at_ms: u64) {
        let counted = self.history.take_counts();
        self.trends.count(at_ms, &counted);
    }
}

/// Refreshes locks as events name them, until the next full scan is due. A refresh that has started is completed,
/// because its names are no longer pending.
async fn refresh_changed_until(app: &App, next: tokio::time::Instant) {
    while tokio::time::timeout_at(next, app.snapshot.changed.added()).await.is_ok() {
        let began = Instant::now();
        app.snapshot.refresh_changed(app).await;
        let rested = tokio::time::Instant::now() + began.elapsed() * REST_FACTOR;
        tokio::time::sleep_until(rested.min(next)).await;
    }
}

/// The result of a full scan.
struct Scan {
    at_ms: u64,
    found: Vec<ScannedLock>,
    exceptions: ExceptionStats,
}

impl Scanner {
    async fn scan(&mut self, app: &App) -> Result<Scan, Error> {
        let mut held = app.locks.long_held().await?;
        held.retain(|(name, _)| !is_internal(name.as_str()));
        let inspected = self.locks_to_inspect(app, &held);
        let mut names: HashSet<LockName> = inspected.iter().cloned().collect();
        let at_ms = unix_ms();
        let mut found: Vec<ScannedLock> = held
            .into_iter()
            .filter(|(name, _)| !names.contains(name))
            .map(|(name, holder)| LockInfo { name, holder: Some(holder), waiters: Vec::new() })
            .map(|info| ScannedLock { lock: info.view(), with_queue: false })
            .collect();
        found.extend(scan_locks(app, &inspected).await?);
        let foreign: Vec<LockName> =
            self.search(app).await?.into_iter().filter(|name| names.insert(name.clone())).collect();
        found.extend(scan_locks(app, &foreign).await?);
        let exceptions = health::stats(&app.locks.fleet_counters().await?);
        Ok(Scan { at_ms, found, exceptions })
    }

    /// Chooses the locks to inspect one by one: those with waiters, those that are not in the index (foreign, just
    /// handed over, or free by now), and all others in round-robin order, because the index does not contain queues.
    fn locks_to_inspect(&mut self, app: &App, held: &[(LockName, Holder)]) -> Vec<LockName> {
        let indexed: HashSet<&str> = held.iter().map(|(name, _)| name.as_str()).collect();
        let state = app.snapshot.state();
        let waited_for = |name: &str| state.history.lock(name).is_some_and(|seen| !seen.lock.waiters.is_empty());
        let unindexed =
            state.history.locks().map(|seen| &seen.lock.name).filter(|name| !indexed.contains(name.as_str()));
        let mut names: Vec<LockName> = unindexed.filter_map(|name| LockName::new(name.as_str()).ok()).collect();
        let (contended, others): (Vec<&LockName>, Vec<&LockName>) =
            held.iter().map(|(name, _)| name).partition(|name| waited_for(name.as_str()));
        names.extend(contended.into_iter().take(MAX_INSPECTED).cloned());
        let turn = if others.is_empty() { 0 } else { self.turn % others.len() };
        let in_turn = others.iter().cycle().skip(turn).take(others.len().min(MAX_INSPECTED));
        names.extend(in_turn.map(|name| (*name).clone()));
        self.turn = turn + MAX_INSPECTED;
        names
    }

    /// Reads one page of all keys from time to time, which is the only way to find foreign locks in Redis. The other
    /// stores list everything anyway.
    async fn search(&mut self, app: &App) -> Result<Vec<LockName>, Error> {
        let due = self.searched.is_none_or(|searched| searched.elapsed() >= SEARCH_INTERVAL);
        if !due || !app.locks.store().starts_with("redis") {
            return Ok(Vec::new());
        }
        let page = app.locks.list("", self.search.take(), SEARCH_PAGE).await?;
        self.search = page.next;
        self.searched = Some(Instant::now());
        Ok(page.locks.into_iter().filter(|(_, holder)| holder.foreign).map(|(name, _)| name).collect())
    }
}

/// Reads the holder and waiters of each lock. Free locks are left out.
async fn scan_locks(app: &App, names: &[LockName]) -> Result<Vec<ScannedLock>, Error> {
    let mut found = Vec::with_capacity(names.len());
    for names in names.chunks(CONCURRENCY) {
        let infos = try_join_all(names.iter().map(async |name| app.locks.info(name).await)).await?;
        let taken = infos.iter().filter(|info| info.holder.is_some() || !info.waiters.is_empty());
        found.extend(taken.map(|info| ScannedLock { lock: info.view(), with_queue: true }));
    }
    Ok(found)
}

/// Whether this is the lock that elects the monitor, which `GET /api/v1/monitor` shows. It is not a user's lock.
fn is_internal(name: &str) -> bool {
    name == monitor::ELECTION
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt;
    use leasehold::LockManager;
    use leasehold::events::EventKind;

    use super::*;
    use crate::Settings;

    fn granted(name: &str) -> LockEvent {
        let (name, owner, holder_id, reason) = (name.to_owned(), "o".to_owned(), "h".to_owned(), String::new());
        LockEvent { kind: EventKind::Granted, name, owner, holder_id, fence: None, at_ms: unix_ms(), reason }
    }

    #[tokio::test]
    async fn locks_with_events_are_refreshed_without_a_full_scan() {
        let locks = LockManager::connect("memory:").await.expect("a store");
        let app = App::new(locks.clone(), Settings::default()).unwrap_or_else(|error| panic!("{error}"));
        let snapshot = &app.snapshot;
        let names = || snapshot.state().history.locks().map(|seen| seen.lock.name.clone()).collect::<Vec<_>>();
        let (first, second) = (locks.lock("first").await.expect("free"), locks.lock("second").await.expect("free"));
        snapshot.record_event(&granted("first"));
        assert!(!snapshot.changed.has_pending(), "there are no viewers");

        *snapshot.watched.lock().expect("whole") = Some((Instant::now(), Instant::now()));
        snapshot.record_event(&granted("second"));
        snapshot.record_event(&granted(monitor::ELECTION));
        assert!(snapshot.changed.has_pending() && names().is_empty());
        snapshot.refresh_changed(&app).await;
        assert!(!snapshot.changed.has_pending());
        assert_eq!((names(), snapshot.state().trends.totals.held), (vec!["second".to_owned()], 1));

        // Locks without events keep their state, and free locks disappear.
        first.release().await.expect("ours");
        second.release().await.expect("ours");
        snapshot.record_event(&granted("first"));
        snapshot.refresh_changed(&app).await;
        assert_eq!(names(), ["second"]);
        snapshot.record_event(&granted("second"));
        snapshot.refresh_changed(&app).await;
        assert!(names().is_empty());
    }

    /// A caller that has received an event finds its lock in the response.
    #[tokio::test]
    async fn only_requests_after_an_event_wait_for_the_refresh() {
        let snapshot = Snapshot::new();
        assert!(snapshot.wait_for_changes().now_or_never().is_some(), "nothing happened");
        snapshot.changed.add("a");
        let mut waiting = pin!(snapshot.wait_for_changes());
        assert!(waiting.as_mut().now_or_never().is_none());
        snapshot.changed.take();
        assert!(snapshot.wait_for_changes().now_or_never().is_none(), "the refresh is running");
        snapshot.changed.refreshed();
        snapshot.scans.send_modify(|scans| *scans += 1);
        assert!(waiting.now_or_never().is_some() && snapshot.wait_for_changes().now_or_never().is_some());
    }
}
