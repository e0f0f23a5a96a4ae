//! What the server knows of all locks without asking the store each time: the picture the page shows.
//!
//! One task looks at the store, often while somebody watches and seldom otherwise, and never for more than a
//! tenth of the time: ten thousand locks make it look less often, not the store slower. Between two such looks it looks
//! at what it is told of, for another tenth at most.

mod figures;
mod history;
mod lane;
mod record;
mod routes;
mod told;

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::future::try_join_all;
use leasehold::{Cursor, Error, Holder, LockEvent, LockInfo, LockName};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use crate::App;
use crate::health::{self, ExceptionStats};
use crate::monitor;
use figures::{Figures, Now};
use history::History;
use record::Found;
pub(crate) use routes::{__path_live, __path_overview, __path_timeline, live, overview, timeline};
use told::Told;

/// Between two looks, at least: while somebody watches, and while nobody does.
const WATCHED: Duration = Duration::from_millis(250);
const UNWATCHED: Duration = Duration::from_secs(5);
/// After a look that took `t` nothing is asked for this many times `t`.
const REST: u32 = 9;
const LONGEST_REST: Duration = Duration::from_secs(30);
/// A store that did not answer is asked again after this.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// A page that was not heard of for so long is closed.
const WATCHES_FOR: Duration = Duration::from_secs(4);
/// How long a page that comes after a pause may wait for a fresh look.
const FRESH_WITHIN: Duration = Duration::from_millis(500);
/// How long any page may wait for a look at what it was told of.
const CAUGHT_UP_WITHIN: Duration = Duration::from_millis(150);
/// After this a look is not fresh.
const STALE: Duration = Duration::from_millis(1_500);
/// Locks looked at one by one, with their queues, in one look; the others have their turn later.
const CLOSELY: usize = 500;
const AT_ONCE: usize = 64;
/// Between two pages of the search for foreign locks, and the length of one.
const SEARCH_EVERY: Duration = Duration::from_secs(3);
const SEARCH_PAGE: usize = 200;

/// What is known.
pub(crate) struct Picture {
    /// Sets the versions of this server apart from another's.
    run: String,
    known: Mutex<Known>,
    /// Since when somebody asks again and again, and when the last time was.
    watched: Mutex<Option<(Instant, Instant)>>,
    /// Somebody began to watch.
    wanted: Notify,
    /// What happened since the last look, while somebody watches.
    told: Told,
    /// Looks so far.
    looks: watch::Sender<u64>,
}

#[derive(Default)]
struct Known {
    history: History,
    figures: Figures,
    exceptions: ExceptionStats,
    /// The last look that succeeded.
    looked: Option<(Instant, u64)>,
    down_since_ms: Option<u64>,
    events_missed: bool,
}

/// What one task remembers from look to look.
#[derive(Default)]
struct Looking {
    /// Where the search for foreign locks goes on.
    search: Option<Cursor>,
    searched: Option<Instant>,
    /// Whose turn it is to be looked at closely.
    turn: usize,
}

impl Picture {
    pub(crate) fn new() -> Self {
        Self {
            run: leasehold::Token::random().holder_id().to_string(),
            known: Mutex::default(),
            watched: Mutex::default(),
            wanted: Notify::new(),
            told: Told::default(),
            looks: watch::channel(0).0,
        }
    }

    /// Something was told by the fleet.
    pub(crate) fn happened(&self, event: &LockEvent) {
        if is_ours(&event.name) {
            return;
        }
        if self.is_watched() {
            self.told.add(&event.name);
        }
        let mut known = self.known();
        known.history.happened(event);
        known.count(now_ms());
    }

    /// Some events may have been missed.
    pub(crate) fn missed(&self) {
        self.known().events_missed = true;
    }

    /// Looks until the server stops.
    pub(crate) fn keep(app: App) -> JoinHandle<()> {
        let stopping = app.stopping.clone();
        let keep = async move {
            let mut looking = Looking::default();
            loop {
                let began = Instant::now();
                let looked = looking.look(&app).await;
                let took = began.elapsed();
                let rest = if looked.is_ok() { took * REST } else { ASK_AGAIN };
                app.picture.take(looked);
                app.picture.looks.send_modify(|looks| *looks += 1);
                let next = Instant::now() + rest.clamp(WATCHED, LONGEST_REST);
                glance_until(&app, next.into()).await;
                let idle = UNWATCHED.saturating_sub(began.elapsed());
                if !app.picture.is_watched() {
                    let _ = tokio::time::timeout(idle, app.picture.wanted.notified()).await;
                }
            }
        };
        tokio::spawn(async move {
            tokio::select! {
                () = stopping.cancelled() => {}
                () = keep => {}
            }
        })
    }

    /// Somebody watches: whoever comes after a pause gets a fresh look, if there is one soon. Later nobody waits, however
    /// long a look takes.
    async fn watch(&self) {
        let (mut looks, now) = (self.looks.subscribe(), Instant::now());
        let since = {
            let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
            let going_on = watched.filter(|(_, last)| last.elapsed() <= WATCHES_FOR);
            let since = going_on.map_or(now, |(since, _)| since);
            *watched = Some((since, now));
            since
        };
        if since == now {
            self.wanted.notify_one();
        }
        let fresh = self.known().looked.is_some_and(|(looked, _)| looked.elapsed() < STALE || looked >= since);
        if !fresh {
            let _ = tokio::time::timeout(FRESH_WITHIN, looks.changed()).await;
        }
    }

    /// Waits a moment for what the caller may have been told of already.
    async fn catch_up(&self) {
        let mut looks = self.looks.subscribe();
        if self.told.is_ahead() {
            let _ = tokio::time::timeout(CAUGHT_UP_WITHIN, looks.changed()).await;
        }
    }

    /// Looks at what was told of, and at nothing else.
    async fn glance(&self, app: &App) {
        let (names, at_ms) = (self.told.take(), now_ms());
        // Where the store does not answer, the next look at everything says so.
        if let Ok(found) = look_at(app, &names).await {
            let mut known = self.known();
            known.history.glanced(at_ms, &names, found);
            known.sum_up(at_ms);
        }
        self.told.looked();
        self.looks.send_modify(|looks| *looks += 1);
    }

    fn is_watched(&self) -> bool {
        let watched = *self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.is_some_and(|(_, last)| last.elapsed() < WATCHES_FOR)
    }

    fn take(&self, looked: Result<Look, Error>) {
        let mut known = self.known();
        match looked {
            Ok(Look { at_ms, found, exceptions }) => {
                let missed = std::mem::take(&mut known.events_missed);
                known.history.looked(at_ms, found, missed);
                known.sum_up(at_ms);
                known.exceptions = exceptions;
                known.looked = Some((Instant::now(), at_ms));
                if known.down_since_ms.take().is_some() {
                    tracing::info!("the store answers again");
                }
            }
            Err(error) => {
                let began = known.down_since_ms.is_none();
                // What ends meanwhile is not told.
                known.events_missed = true;
                known.down_since_ms.get_or_insert_with(now_ms);
                if began {
                    tracing::warn!(%error, "the store does not answer");
                }
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn sum_up(&mut self, at_ms: u64) {
        let now = Now::of(self.history.locks(), at_ms);
        self.figures.looked(at_ms, now);
        self.count(at_ms);
    }

    fn count(&mut self, at_ms: u64) {
        let counted = self.history.counted();
        self.figures.count(at_ms, &counted);
    }
}

/// Looks at what is told of, until it is time to look at everything. What was begun is brought to its end: names that
/// were taken are nobody else's to look at.
async fn glance_until(app: &App, next: tokio::time::Instant) {
    while tokio::time::timeout_at(next, app.picture.told.added()).await.is_ok() {
        let began = Instant::now();
        app.picture.glance(app).await;
        let rested = tokio::time::Instant::now() + began.elapsed() * REST;
        tokio::time::sleep_until(rested.min(next)).await;
    }
}

/// What a look found.
struct Look {
    at_ms: u64,
    found: Vec<Found>,
    exceptions: ExceptionStats,
}

impl Looking {
    async fn look(&mut self, app: &App) -> Result<Look, Error> {
        let mut held = app.locks.long_held().await?;
        held.retain(|(name, _)| !is_ours(name.as_str()));
        let closely = self.closely(app, &held);
        let mut names: HashSet<LockName> = closely.iter().cloned().collect();
        let at_ms = now_ms();
        let mut found: Vec<Found> = held
            .into_iter()
            .filter(|(name, _)| !names.contains(name))
            .map(|(name, holder)| LockInfo { name, holder: Some(holder), waiters: Vec::new() })
            .map(|info| Found { lock: info.view(), with_queue: false })
            .collect();
        found.extend(look_at(app, &closely).await?);
        let foreign: Vec<LockName> =
            self.search(app).await?.into_iter().filter(|name| names.insert(name.clone())).collect();
        found.extend(look_at(app, &foreign).await?);
        let exceptions = health::stats(&app.locks.fleet_counters().await?);
        Ok(Look { at_ms, found, exceptions })
    }

    /// The locks to look at one by one: those that somebody waits for, those that are not in the index (foreign, or
    /// just handed over, or free by now), and, in turn, all others, because a queue can only be seen closely.
    fn closely(&mut self, app: &App, held: &[(LockName, Holder)]) -> Vec<LockName> {
        let indexed: HashSet<&str> = held.iter().map(|(name, _)| name.as_str()).collect();
        let known = app.picture.known();
        let waited_for = |name: &str| known.history.lock(name).is_some_and(|seen| !seen.lock.waiters.is_empty());
        let unindexed =
            known.history.locks().map(|seen| &seen.lock.name).filter(|name| !indexed.contains(name.as_str()));
        let mut names: Vec<LockName> = unindexed.filter_map(|name| LockName::new(name.as_str()).ok()).collect();
        let (contended, others): (Vec<&LockName>, Vec<&LockName>) =
            held.iter().map(|(name, _)| name).partition(|name| waited_for(name.as_str()));
        names.extend(contended.into_iter().take(CLOSELY).cloned());
        let turn = if others.is_empty() { 0 } else { self.turn % others.len() };
        let in_turn = others.iter().cycle().skip(turn).take(others.len().min(CLOSELY));
        names.extend(in_turn.map(|name| (*name).clone()));
        self.turn = turn + CLOSELY;
        names
    }

    /// One page of all keys, now and then: only there the locks of other kinds of clients are found. The other
    /// stores list everything anyway.
    async fn search(&mut self, app: &App) -> Result<Vec<LockName>, Error> {
        let due = self.searched.is_none_or(|searched| searched.elapsed() >= SEARCH_EVERY);
        if !due || !app.locks.store().starts_with("redis") {
            return Ok(Vec::new());
        }
        let page = app.locks.list("", self.search.take(), SEARCH_PAGE).await?;
        self.search = page.next;
        self.searched = Some(Instant::now());
        Ok(page.locks.into_iter().filter(|(_, holder)| holder.foreign).map(|(name, _)| name).collect())
    }
}

/// Who holds each of these, and who waits. Those that are free are left out.
async fn look_at(app: &App, names: &[LockName]) -> Result<Vec<Found>, Error> {
    let mut found = Vec::with_capacity(names.len());
    for names in names.chunks(AT_ONCE) {
        let infos = try_join_all(names.iter().map(async |name| app.locks.info(name).await)).await?;
        let taken = infos.iter().filter(|info| info.holder.is_some() || !info.waiters.is_empty());
        found.extend(taken.map(|info| Found { lock: info.view(), with_queue: true }));
    }
    Ok(found)
}

/// The lock by which servers agree who monitors: theirs, not their users'. `GET /api/v1/monitor` tells of it.
fn is_ours(name: &str) -> bool {
    name == monitor::ELECTION
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt;
    use leasehold::{EventKind, LockManager};

    use super::*;
    use crate::Settings;

    fn granted(name: &str) -> LockEvent {
        let (name, owner, holder_id, reason) = (name.to_owned(), "o".to_owned(), "h".to_owned(), String::new());
        LockEvent { kind: EventKind::Granted, name, owner, holder_id, fence: None, at_ms: now_ms(), reason }
    }

    #[tokio::test]
    async fn what_was_told_of_is_there_without_a_look_at_everything() {
        let locks = LockManager::connect("memory:").await.expect("a store");
        let app = App::new(locks.clone(), Settings::default()).unwrap_or_else(|error| panic!("{error}"));
        let picture = &app.picture;
        let names = || picture.known().history.locks().map(|seen| seen.lock.name.clone()).collect::<Vec<_>>();
        let (first, second) = (locks.lock("first").await.expect("free"), locks.lock("second").await.expect("free"));
        picture.happened(&granted("first"));
        assert!(!picture.told.is_ahead(), "nobody watches");

        *picture.watched.lock().expect("whole") = Some((Instant::now(), Instant::now()));
        picture.happened(&granted("second"));
        picture.happened(&granted(monitor::ELECTION));
        assert!(picture.told.is_ahead() && names().is_empty());
        picture.glance(&app).await;
        assert!(!picture.told.is_ahead());
        assert_eq!((names(), picture.known().figures.now.held), (vec!["second".to_owned()], 1));

        // What is not told of stays as it is, and what is free is gone.
        first.release().await.expect("ours");
        second.release().await.expect("ours");
        picture.happened(&granted("first"));
        picture.glance(&app).await;
        assert_eq!(names(), ["second"]);
        picture.happened(&granted("second"));
        picture.glance(&app).await;
        assert!(names().is_empty());
    }

    /// Whoever was told of something and asks gets it with the answer.
    #[tokio::test]
    async fn whoever_was_told_waits_for_the_look_and_nobody_else_does() {
        let picture = Picture::new();
        assert!(picture.catch_up().now_or_never().is_some(), "nothing happened");
        picture.told.add("a");
        let mut asked = pin!(picture.catch_up());
        assert!(asked.as_mut().now_or_never().is_none());
        picture.told.take();
        assert!(picture.catch_up().now_or_never().is_none(), "it is being looked at");
        picture.told.looked();
        picture.looks.send_modify(|looks| *looks += 1);
        assert!(asked.now_or_never().is_some() && picture.catch_up().now_or_never().is_some());
    }
}
