//! The monitor: one server among all looks at every lock again and again, tells what is wrong with them, asks the
//! living to finish, revokes the leases of the dead, and forces only foreign holders.
//!
//! | file | what it is about |
//! |---|---|
//! | `judge` | what is thought of one holder: no clock, no I/O |
//! | `memory` | what the leader remembers from one look to the next |
//! | `pass` | looking at every lock |
//! | `act` | asking and evicting: audited, compared, told |

mod act;
mod judge;
mod memory;
mod pass;

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use leasehold::Error;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use serde::Serialize;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::{App, alerts, wall_ms};
use act::Done;
use pass::{Seen, Watch};

/// The election of the one that looks: a lock like any other.
pub(crate) const ELECTION: &str = "leasehold-monitor";
/// The dead leader's successor leads after this at the latest.
const LEAD: Duration = Duration::from_secs(10);
/// Shorter, and a busy machine would change the leader again and again.
const SHORTEST_LEAD: Duration = Duration::from_secs(3);
/// The pause before a server stands again that could not stand at all.
const PAUSE: Duration = Duration::from_secs(5);
/// Actions that are shown.
const KEPT: usize = 50;

/// What this server's monitor does, for people.
#[derive(Debug, Default)]
pub(crate) struct Monitor(Mutex<Doing>);

#[derive(Debug, Default)]
struct Doing {
    leads: bool,
    last_pass: Option<(u64, Duration)>,
    seen: Seen,
    done: VecDeque<Done>,
}

/// How the locks are monitored.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct MonitorView {
    /// Whether this server is the one that looks.
    leader: bool,
    /// The server that is; `null` while nobody is, or the store does not answer.
    leader_owner: Option<String>,
    /// When this server last looked at every lock.
    last_pass_ms: Option<u64>,
    /// How long that took.
    pass_took_ms: Option<u64>,
    /// How many locks it saw.
    locks_seen: usize,
    /// How many of them are held by another kind of client.
    foreign_seen: usize,
    /// Whether this server stands for election at all.
    enabled: bool,
    /// Whether locks are taken away, or only told about.
    auto_recovery: bool,
    levels: LevelsView,
    /// Without a sign of life for so long, a holder counts as dead.
    heartbeat_timeout_ms: u64,
    /// The last things this server's monitor did, the newest first.
    actions: Vec<Done>,
}

/// Held for so long, somebody is told.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct LevelsView {
    warning_ms: u64,
    /// The holder is asked to finish.
    soft_ms: u64,
    /// The lease of a holder without a sign of life is revoked; a foreign holder loses the lock by force.
    hard_ms: u64,
}

/// How the locks are monitored, and what the monitor did
///
/// One server of a store looks; the others answer for themselves, and name it.
#[utoipa::path(get, path = "/api/v1/monitor", tag = "locks", responses((status = 200, body = MonitorView)))]
pub(crate) async fn show(State(app): State<App>) -> Json<MonitorView> {
    let leader = app.locks.elect(ELECTION).leader().await.ok().flatten();
    let section = &app.settings.monitor;
    let doing = app.monitor.lock();
    Json(MonitorView {
        leader: doing.leads,
        leader_owner: leader.map(|leader| leader.owner.to_string()),
        last_pass_ms: doing.last_pass.map(|(at_ms, _)| at_ms),
        pass_took_ms: doing.last_pass.map(|(_, took)| whole_ms(took)),
        locks_seen: doing.seen.locks,
        foreign_seen: doing.seen.foreign,
        enabled: section.enabled,
        auto_recovery: section.auto_recovery,
        levels: LevelsView {
            warning_ms: whole_ms(section.timeout_levels.warning),
            soft_ms: whole_ms(section.timeout_levels.soft_timeout),
            hard_ms: whole_ms(section.timeout_levels.hard_timeout),
        },
        heartbeat_timeout_ms: whole_ms(section.heartbeat.timeout.duration()),
        actions: doing.done.iter().rev().cloned().collect(),
    })
}

fn whole_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Monitor {
    /// Stands for election until the server stops, and looks while it leads.
    pub(crate) fn start(app: App) -> JoinHandle<()> {
        let stopping = app.stopping.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = stopping.cancelled() => {}
                () = stand(app) => {}
            }
        })
    }

    fn lock(&self) -> MutexGuard<'_, Doing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn did(&self, done: Done) {
        let mut doing = self.lock();
        if doing.done.len() >= KEPT {
            doing.done.pop_front();
        }
        doing.done.push_back(done);
    }
}

async fn stand(app: App) {
    if !app.settings.monitor.enabled {
        return;
    }
    let lead = app.settings.monitor.monitor_interval.clamp(SHORTEST_LEAD, LEAD);
    loop {
        let election = app.locks.elect(ELECTION).owner("leasehold serve").ttl(lead);
        let Err(error) = election.run(|_| lead_on(app.clone())).await else { return };
        tracing::error!(%error, "this server cannot stand for the monitor's election");
        tokio::time::sleep(PAUSE).await;
    }
}

/// Looks until the lead is lost: this future is dropped then.
async fn lead_on(app: App) -> Result<(), Error> {
    alerts::take_over(&app).await?;
    let _leading = Leading::begin(&app);
    let interval = app.settings.monitor.monitor_interval;
    let mut watch = Watch::new(app.clone());
    loop {
        let began = Instant::now();
        match watch.pass().await {
            Ok(seen) => {
                let took = began.elapsed();
                app.metrics.monitor.passed(took, seen);
                let mut doing = app.monitor.lock();
                (doing.last_pass, doing.seen) = (Some((wall_ms(), took)), seen);
            }
            Err(error) => tracing::warn!(%error, "the locks could not all be looked at"),
        }
        // Also after a pass that took longer than the pause between two: others want the store as well.
        let next = (began + interval).max(Instant::now() + interval / 10);
        watch.search_until(next).await;
    }
}

/// Says that this server leads, for as long as it does.
struct Leading(App);

impl Leading {
    fn begin(app: &App) -> Self {
        app.monitor.lock().leads = true;
        app.metrics.monitor.leader.set(1);
        Self(app.clone())
    }
}

impl Drop for Leading {
    fn drop(&mut self) {
        self.0.monitor.lock().leads = false;
        self.0.metrics.monitor.leader.set(0);
        self.0.alerts.end_to_lead();
    }
}

/// The monitor's figures.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    leader: Gauge,
    pass_seconds: Gauge<f64, std::sync::atomic::AtomicU64>,
    passes: Counter,
    locks: Gauge,
    foreign: Gauge,
    actions: Family<Acted, Counter>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Acted {
    action: &'static str,
    outcome: &'static str,
}

impl Figures {
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register("monitor_leader", "Whether this server is the one that monitors", self.leader.clone());
        registry.register("monitor_passes", "Passes over every lock", self.passes.clone());
        let help = "How long the last pass over every lock took";
        registry.register_with_unit("monitor_pass", help, Unit::Seconds, self.pass_seconds.clone());
        registry.register("monitor_locks", "Locks seen by the last pass", self.locks.clone());
        registry.register("monitor_foreign_locks", "Those held by another kind of client", self.foreign.clone());
        registry.register("monitor_actions", "What the monitor did, and what became of it", self.actions.clone());
    }

    fn passed(&self, took: Duration, seen: Seen) {
        self.passes.inc();
        self.pass_seconds.set(took.as_secs_f64());
        self.locks.set(i64::try_from(seen.locks).unwrap_or(i64::MAX));
        self.foreign.set(i64::try_from(seen.foreign).unwrap_or(i64::MAX));
    }

    fn acted(&self, action: &'static str, outcome: &'static str) {
        self.actions.get_or_create(&Acted { action, outcome }).inc();
    }
}
