//! The engine carries out what [`client`](crate::client) decides: it reads the clock, sends the requests and wakes the
//! tasks.
//!
//! A file uses only those above it in this table.
//!
//! | file | what it does |
//! |---|---|
//! | [`environment`] | where tasks run and random numbers come from |
//! | [`publishing`] | collects and writes notes, counters and metrics; calls the observer |
//! | [`core`](self::core) | what all parts share: the store, the options, background tasks |
//! | [`lease_cell`] | one lease: what its guard, the renewal task and a release share |
//! | [`leases`], [`renewal`] | the leases of the process, and the task that renews them |
//! | [`releasing`] | releases locks, with fallbacks and the journal |
//! | [`leaving`] | gives up tokens |
//! | [`hand_on`] | hands a lease on to another token |
//! | [`held_lease`] | a lease that is released when it is dropped |
//! | [`wish`], [`call`] | what a call asks for; its deadline and accounting |
//! | [`waiting`] | the waiting rooms |
//! | this file | puts the parts together |
//! | [`guard`] | the guard that users hold |
//! | [`acquiring`] | acquires a lock: one try, then a seat in a waiting room |
//! | [`by_token`], [`pooling`] | leases without a guard; members of a pool |

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::clock::timeout;
use crate::options::Options;
use crate::store::{Push, PushReceiver, SharedStore};

pub(crate) mod acquiring;
pub(crate) mod by_token;
pub(crate) mod call;
mod core;
pub(crate) mod environment;
pub(crate) mod guard;
mod hand_on;
mod held_lease;
pub(crate) mod lease_cell;
mod leases;
mod leaving;
pub(crate) mod pooling;
mod publishing;
pub(crate) mod releasing;
mod renewal;
mod waiting;
pub(crate) mod wish;

pub(crate) use self::core::Core;
use environment::Environment;
use leases::Leases;
use releasing::Releases;
use waiting::WaitingRooms;

/// The journal is replayed this long after the start: many processes have ended by then, and leave it to the next one.
const BEFORE_THE_JOURNAL: Duration = Duration::from_secs(1);

/// Held by every manager and guard. When the last one is dropped, the background tasks end.
pub(crate) struct EngineHandle {
    pub(crate) core: Arc<Core>,
    pub(crate) leases: Arc<Leases>,
    pub(crate) waiting: Arc<WaitingRooms>,
    pub(crate) releases: Arc<Releases>,
}

impl EngineHandle {
    /// Starts the background tasks on the current runtime.
    pub(crate) fn start(store: SharedStore, options: Options) -> Arc<Self> {
        Self::start_in(Environment::current(), store, options)
    }

    /// Starts the background tasks in an environment.
    pub(crate) fn start_in(environment: Environment, store: SharedStore, options: Options) -> Arc<Self> {
        let core = Core::new(environment, store, options);
        let leases = Leases::new(core.clone());
        let releases = Releases::new(core.clone(), leases.clone());
        let waiting = WaitingRooms::new(core.clone(), releases.clone());
        core.spawn_until_end(publishing::run(core.publisher.clone(), core.ended.clone()));
        core.spawn_until_end(renewal::run(core.clone(), leases.clone(), core.ended.clone()));
        core.spawn_until_end(waiting::run_timers(waiting.clone(), core.ended.clone()));
        core.store.deliver_to(Arc::new(Listener {
            leases: Arc::downgrade(&leases),
            releases: Arc::downgrade(&releases),
            waiting: Arc::downgrade(&waiting),
            ended: core.ended.clone(),
        }));
        releases.replay_journal_in_background(BEFORE_THE_JOURNAL);
        Arc::new(Self { core, leases, waiting, releases })
    }

    /// Returns what the engine has left to do, if anything.
    #[cfg(test)]
    pub(crate) fn unfinished(&self) -> Option<&'static str> {
        if !self.waiting.is_idle() {
            Some("waits, asks or leaves")
        } else if !self.leases.is_empty() {
            Some("has a lease")
        } else if !self.core.tasks.is_empty() || !self.core.calls.is_empty() {
            Some("works in the background")
        } else {
            None
        }
    }

    /// Stops new calls and waits for background work, for at most `limit`.
    pub(crate) async fn drain(&self, limit: Duration) {
        let core = &self.core;
        core.closing.cancel();
        self.waiting.close();
        self.leases.lose_all();
        core.tasks.close();
        core.calls.close();
        let all_done = async {
            // A call ends in a guard or in a release in the background, so each of the three is looked at again after the
            // others.
            loop {
                self.leases.wait_until_empty().await;
                // With a limit: a future that is not polled any more never ends.
                let in_time = timeout(core.options.request_timeout, core.calls.wait()).await.is_some();
                core.tasks.wait().await;
                if self.leases.is_empty() && (core.calls.is_empty() || !in_time) {
                    return;
                }
            }
        };
        // What did not finish in time ends with its lease.
        let _ = timeout(limit, all_done).await;
        core.publisher.flush(true).await;
        core.end();
        core.store.close().await;
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        self.core.end();
    }
}

/// Passes every message of the store to the room or lease it is for, on the task or thread that read it.
struct Listener {
    leases: Weak<Leases>,
    releases: Weak<Releases>,
    waiting: Weak<WaitingRooms>,
    ended: CancellationToken,
}

impl PushReceiver for Listener {
    fn receive(&self, push: Push) {
        match push {
            Push::Revoked { token } => with(&self.leases, |leases| leases.revoked(&token)),
            Push::Finish { token, reason } => with(&self.leases, |leases| leases.asked_to_finish(&token, reason)),
            Push::Resync => {
                with(&self.waiting, |waiting| waiting.deliver(Push::Resync));
                with(&self.leases, |leases| leases.check_all());
                with(&self.releases, |releases| releases.replay_journal_in_background(Duration::ZERO));
            }
            for_waiters => with(&self.waiting, |waiting| waiting.deliver(for_waiters)),
        }
    }

    fn is_open(&self) -> bool {
        // Not by upgrading: the last reference must not be dropped here, on a thread of the store.
        !self.ended.is_cancelled() && self.waiting.strong_count() > 0
    }
}

/// Uses a part of the engine, if there still is one.
fn with<T>(part: &Weak<T>, act: impl FnOnce(&Arc<T>)) {
    if let Some(part) = part.upgrade() {
        act(&part);
    }
}
