//! The engine carries out what [`client`](crate::client) decides: it reads the clock, sends the requests and wakes the
//! tasks. Acquiring ([`acquiring`], and [`by_token`] without a guard), waiting ([`waiting`]), giving up ([`leaving`]),
//! any of several ([`pooling`]), renewing ([`renewal`]), releasing ([`releasing`]).

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::client::Policy;
use crate::clock::{Moment, timeout};
use crate::error::Error;
use crate::events::Transition;
use crate::facts::LockName;
use crate::journal::Journal;
use crate::metrics::Metrics;
use crate::options::Options;
use crate::stats::Stats;
use crate::store::{Note, Operation, Push, PushReceiver, SharedStore, StoreError};

pub(crate) mod acquiring;
pub(crate) mod by_token;
pub(crate) mod call;
pub(crate) mod environment;
pub(crate) mod guard;
pub(crate) mod lease_cell;
mod leaving;
pub(crate) mod pooling;
pub(crate) mod releasing;
pub(crate) mod renewal;
pub(crate) mod waiting;

use environment::Environment;
use renewal::Leases;
use waiting::WaitingRooms;

/// A process that has just begun does not read the journal: many are over before that, and the next one does.
const BEFORE_THE_JOURNAL: Duration = Duration::from_secs(1);

/// Alerts that are kept while the store is away.
const ALERTS_KEPT: usize = 64;

/// What all handles of one manager share.
pub(crate) struct Core {
    pub(crate) store: SharedStore,
    pub(crate) options: Options,
    /// The part of the options that decisions depend on.
    policy: Policy,
    pub(crate) leases: Leases,
    pub(crate) waiting: WaitingRooms,
    pub(crate) stats: Stats,
    pub(crate) metrics: Metrics,
    pub(crate) journal: Option<Journal>,
    replaying: AtomicBool,
    environment: Environment,
    tasks: TaskTracker,
    /// Acquires and releases that callers are awaiting.
    under_way: TaskTracker,
    /// Set when nothing new may begin.
    pub(crate) closing: CancellationToken,
    /// Set when the background tasks are to end: nobody is left who could need them.
    ended: CancellationToken,
}

/// Held by every manager and guard; when the last one is gone the background tasks end.
pub(crate) struct EngineHandle {
    pub(crate) core: Arc<Core>,
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        self.core.end();
    }
}

impl Core {
    /// Starts the background tasks on the current runtime.
    pub(crate) fn start(store: SharedStore, options: Options) -> Arc<EngineHandle> {
        Self::start_in(Environment::current(), store, options)
    }

    /// Starts the background tasks in an environment.
    pub(crate) fn start_in(environment: Environment, store: SharedStore, options: Options) -> Arc<EngineHandle> {
        let journal = options.journal.clone().map(Journal::new);
        let core = Arc::new(Self {
            store,
            policy: Policy::from(&options),
            options,
            leases: Leases::default(),
            waiting: WaitingRooms::default(),
            stats: Stats::default(),
            metrics: Metrics::default(),
            journal,
            replaying: AtomicBool::new(false),
            environment,
            tasks: TaskTracker::new(),
            under_way: TaskTracker::new(),
            closing: CancellationToken::new(),
            ended: CancellationToken::new(),
        });
        // Not tracked: these end with the core, whereas `drain` waits for work that ends by itself.
        core.environment.spawn(renewal::run(core.clone(), core.ended.clone()));
        core.environment.spawn(waiting::run_timers(core.clone(), core.ended.clone()));
        core.store.deliver_to(Arc::new(Listener { core: Arc::downgrade(&core), ended: core.ended.clone() }));
        core.replay_journal_in_background(BEFORE_THE_JOURNAL);
        Arc::new(EngineHandle { core })
    }

    /// Runs work in the background. After the runtime is gone this does nothing, quietly: there is
    /// nobody left to do it, and the lease's end takes care of the lock.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.environment.spawn(self.tasks.track_future(work));
    }

    /// To be held by a call for as long as it is under way: the store is not closed before.
    pub(crate) fn call(&self) -> TaskTrackerToken {
        self.under_way.token()
    }

    /// Lets nothing new begin and waits for background work, at most so long.
    pub(crate) async fn drain(self: &Arc<Self>, at_most: Duration) {
        self.closing.cancel();
        self.waiting.close(self);
        self.leases.lose_all(self);
        self.tasks.close();
        self.under_way.close();
        let all_done = async {
            // A call under way ends in a guard, or in something to give back in the background: so each
            // of the three is looked at again after the others.
            loop {
                self.leases.wait_until_empty().await;
                // Not for ever: a future that nobody polls any more never ends.
                let ended = self.under_way.wait();
                let in_time = timeout(self.options.request_timeout, ended).await.is_some();
                self.tasks.wait().await;
                if self.leases.is_empty() && (self.under_way.is_empty() || !in_time) {
                    return;
                }
            }
        };
        // Whoever is late is taken care of by the end of its lease.
        let _ = timeout(at_most, all_done).await;
        self.flush(true).await;
        self.end();
        self.store.close().await;
    }

    fn end(&self) {
        self.closing.cancel();
        if self.ended.is_cancelled() {
            return;
        }
        if self.tasks.is_empty() {
            self.ended.cancel();
            return;
        }
        // Releases are still on their way: the tasks that carry them out end the rest.
        self.tasks.close();
        let (tasks, ended) = (self.tasks.clone(), self.ended.clone());
        self.environment.spawn(async move {
            tasks.wait().await;
            ended.cancel();
        });
    }

    /// Writes what was counted and noted. `figures`: also how long things took, which is many fields and waits for the
    /// regular pass.
    pub(crate) async fn flush(&self, figures: bool) {
        let notes = self.leases.take_notes();
        if !notes.is_empty() {
            // Written when the store is back: it is often the store's failure that they tell of.
            let alerts: Vec<Note> = notes.iter().filter(|note| note.is_alert()).take(ALERTS_KEPT).cloned().collect();
            if let Err(error) = self.store.note(notes).await {
                tracing::debug!(%error, "notes were not written");
                self.leases.keep_for_later(alerts);
            }
        }
        let mut deltas = self.stats.take_deltas();
        if figures {
            deltas.extend(self.metrics.take_deltas());
        }
        if !deltas.is_empty()
            && let Err(error) = self.store.count(&deltas).await
        {
            tracing::debug!(%error, "counters were not written");
            self.stats.put_back(&deltas);
            self.metrics.put_back(&deltas);
        }
    }

    pub(crate) fn observe(&self, transition: &Transition<'_>) {
        self.metrics.count(transition);
        let Some(observer) = &self.options.observer else { return };
        // An observer's panic must not end the task that renews every lease.
        let observed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| observer.observe(transition)));
        if observed.is_err() {
            tracing::error!("an observer panicked");
        }
    }

    /// Counts how long the store took to answer.
    pub(crate) fn answered(&self, operation: Operation, asked_at: Moment) {
        self.observe(&Transition::Answered { operation, took: asked_at.until(Moment::now()) });
    }

    pub(crate) fn store_error(&self, operation: Operation, name: &LockName, source: StoreError) -> Error {
        self.observe(&Transition::StoreFailed { operation, kind: source.kind() });
        Error::Store { operation, name: name.clone(), store: self.store.describe(), source }
    }

    /// Notes that are written together with the next pass.
    pub(crate) fn note(&self, note: Note) {
        self.leases.note(note);
    }
}

/// Takes every message of the store to the room or lease it is for, where the store has read it.
struct Listener {
    core: Weak<Core>,
    ended: CancellationToken,
}

impl PushReceiver for Listener {
    fn receive(&self, push: Push) {
        let Some(core) = self.core.upgrade() else { return };
        match push {
            Push::Revoked { token } => core.leases.revoked(&core, &token),
            Push::Finish { token, reason } => core.leases.asked_to_finish(&token, reason),
            Push::Resync => {
                core.waiting.deliver(&core, Push::Resync);
                core.leases.look_at_all();
                core.replay_journal_in_background(Duration::ZERO);
            }
            for_waiters => core.waiting.deliver(&core, for_waiters),
        }
    }

    fn is_open(&self) -> bool {
        // Not by upgrading: the store asks under its lock, and would drop itself there if the engine ended meanwhile.
        !self.ended.is_cancelled() && self.core.strong_count() > 0
    }
}

/// A mutex held by a task that panicked is used all the same: no state here is left half-changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
