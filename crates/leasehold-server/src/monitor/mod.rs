//! The monitor. One elected server inspects every lock in regular passes, reports problems, asks living holders to
//! finish, revokes the leases of dead ones, and uses force only on foreign holders.
//!
//! | module | topic |
//! |---|---|
//! | `judge` | the verdict on one holder: no clock, no I/O |
//! | `memory` | what the leader remembers between passes |
//! | `pass` | inspecting every lock |
//! | `act` | asking and evicting: audited, compared with the holder id, published |

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

use crate::clock::unix_ms;
use crate::{App, alerts};
use act::ActionView;
pub(crate) use judge::ELECTION;
use pass::{Leader, PassCounts};

/// The longest lease of the leader: the latest time by which a successor takes over from a dead leader.
const MAX_LEASE: Duration = Duration::from_secs(10);
/// The shortest lease of the leader. With a shorter one, the leader would change often on a busy machine.
const MIN_LEASE: Duration = Duration::from_secs(3);
/// The pause before a server that could not take part in the election tries again.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// The most recent actions that are shown.
const MAX_ACTIONS: usize = 50;

/// The state of this server's monitor, as shown to people.
#[derive(Debug, Default)]
pub(crate) struct Monitor(Mutex<MonitorState>);

#[derive(Debug, Default)]
struct MonitorState {
    leads: bool,
    last_pass: Option<(u64, Duration)>,
    seen: PassCounts,
    actions: VecDeque<ActionView>,
}

/// The state of the monitor.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct MonitorView {
    /// Whether this server is the leader.
    leader: bool,
    /// The leader; `null` if there is none or the store does not answer.
    leader_owner: Option<String>,
    /// When this server last finished a pass, in wall-clock milliseconds.
    last_pass_ms: Option<u64>,
    /// How long that pass took.
    pass_took_ms: Option<u64>,
    /// How many locks the pass saw.
    locks_seen: usize,
    /// How many of them are held by another kind of client.
    foreign_seen: usize,
    /// Whether this server takes part in the election.
    enabled: bool,
    /// Whether the monitor evicts holders or only reports them.
    auto_recovery: bool,
    levels: LevelsView,
    /// A holder without a heartbeat for this long counts as dead.
    heartbeat_timeout_ms: u64,
    /// The most recent actions of this server's monitor, newest first.
    actions: Vec<ActionView>,
}

/// The timeout levels: how long a lock may be held.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct LevelsView {
    /// The lock is reported.
    warning_ms: u64,
    /// The holder is asked to finish.
    soft_ms: u64,
    /// The lease of a dead holder is revoked; a foreign holder is evicted by force.
    hard_ms: u64,
}

/// Show the monitor and its recent actions
///
/// One server of a store monitors. The others show their own state and name the leader.
#[utoipa::path(get, path = "/api/v1/monitor", tag = "locks", responses((status = 200, body = MonitorView)))]
pub(crate) async fn show(State(app): State<App>) -> Json<MonitorView> {
    let leader = app.locks.elect(ELECTION).leader().await.ok().flatten();
    let section = &app.settings.monitor;
    let state = app.monitor.lock();
    Json(MonitorView {
        leader: state.leads,
        leader_owner: leader.map(|leader| leader.owner.to_string()),
        last_pass_ms: state.last_pass.map(|(at_ms, _)| at_ms),
        pass_took_ms: state.last_pass.map(|(_, took)| millis(took)),
        locks_seen: state.seen.locks,
        foreign_seen: state.seen.foreign,
        enabled: section.enabled,
        auto_recovery: section.auto_recovery,
        levels: LevelsView {
            warning_ms: millis(section.timeout_levels.warning),
            soft_ms: millis(section.timeout_levels.soft_timeout),
            hard_ms: millis(section.timeout_levels.hard_timeout),
        },
        heartbeat_timeout_ms: millis(section.heartbeat.timeout.duration()),
        actions: state.actions.iter().rev().cloned().collect(),
    })
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Monitor {
    /// Takes part in the election until the server stops, and monitors while it leads.
    pub(crate) fn start(app: App) -> JoinHandle<()> {
        let stopping = app.stopping.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = stopping.cancelled() => {}
                () = campaign(app) => {}
            }
        })
    }

    fn lock(&self) -> MutexGuard<'_, MonitorState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record_action(&self, actions: ActionView) {
        let mut state = self.lock();
        if state.actions.len() >= MAX_ACTIONS {
            state.actions.pop_front();
        }
        state.actions.push_back(actions);
    }
}

async fn campaign(app: App) {
    if !app.settings.monitor.enabled {
        return;
    }
    let lease = app.settings.monitor.monitor_interval.clamp(MIN_LEASE, MAX_LEASE);
    loop {
        let election = app.locks.elect(ELECTION).owner("leasehold serve").ttl(lease);
        let Err(error) = election.run(|_| lead(app.clone())).await else { return };
        tracing::error!(error = %format_args!("{error:#}"), "this server cannot take part in the monitor's election");
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

/// Monitors until the leadership is lost, which drops this future.
async fn lead(app: App) -> Result<(), Error> {
    alerts::take_over(&app).await?;
    let _leading = LeadershipGuard::start(&app);
    let interval = app.settings.monitor.monitor_interval;
    let mut leader = Leader::new(app.clone());
    loop {
        let began = Instant::now();
        match leader.pass().await {
            Ok(seen) => {
                let took = began.elapsed();
                app.metrics.monitor.record_pass(took, seen);
                let mut state = app.monitor.lock();
                (state.last_pass, state.seen) = (Some((unix_ms(), took)), seen);
            }
            Err(error) => tracing::warn!(error = %format_args!("{error:#}"), "a pass over the locks was interrupted"),
        }
        // Pause even after a pass that took longer than the interval: others need the store as well.
        let next = (began + interval).max(Instant::now() + interval / 10);
        leader.search_until(next).await;
    }
}

/// Marks this server as the leader until dropped.
struct LeadershipGuard(App);

impl LeadershipGuard {
    fn start(app: &App) -> Self {
        app.monitor.lock().leads = true;
        app.metrics.monitor.leader.set(1);
        Self(app.clone())
    }
}

impl Drop for LeadershipGuard {
    fn drop(&mut self) {
        self.0.monitor.lock().leads = false;
        self.0.metrics.monitor.leader.set(0);
        self.0.alerts.stop_leading();
    }
}

/// The metrics of the monitor.
#[derive(Debug, Default)]
pub(crate) struct MonitorMetrics {
    leader: Gauge,
    pass_seconds: Gauge<f64, std::sync::atomic::AtomicU64>,
    passes: Counter,
    locks: Gauge,
    foreign: Gauge,
    actions: Family<ActionLabels, Counter>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ActionLabels {
    action: &'static str,
    outcome: &'static str,
}

impl MonitorMetrics {
    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register("monitor_leader", "Whether this server leads the monitor", self.leader.clone());
        registry.register("monitor_passes", "Passes over every lock", self.passes.clone());
        let help = "How long the last pass over every lock took";
        registry.register_with_unit("monitor_pass", help, Unit::Seconds, self.pass_seconds.clone());
        registry.register("monitor_locks", "Locks seen by the last pass", self.locks.clone());
        registry.register("monitor_foreign_locks", "Locks held by another kind of client", self.foreign.clone());
        registry.register("monitor_actions", "Actions of the monitor, by outcome", self.actions.clone());
    }

    fn record_pass(&self, took: Duration, seen: PassCounts) {
        self.passes.inc();
        self.pass_seconds.set(took.as_secs_f64());
        self.locks.set(i64::try_from(seen.locks).unwrap_or(i64::MAX));
        self.foreign.set(i64::try_from(seen.foreign).unwrap_or(i64::MAX));
    }

    fn count_action(&self, action: &'static str, outcome: &'static str) {
        self.actions.get_or_create(&ActionLabels { action, outcome }).inc();
    }
}
