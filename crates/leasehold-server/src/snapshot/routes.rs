//! The routes of the snapshot.

use axum::extract::State;
use axum::{Extension, Json};
use serde::{Deserialize, Serialize};

use super::SnapshotState;
use super::history::KEPT_MS;
use super::record::{ObservedLock, Tenure, Wait};
use super::trends::Point;
use crate::App;
use crate::alerts::Level;
use crate::caller::Caller;
use crate::clock::unix_ms;
use crate::extract::QueryParams;
use crate::health::{self, ExceptionStats};
use crate::keys::Role;
use crate::problem::{Problem, ProblemBody};

/// The state of all locks in a few numbers.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Overview {
    /// The store, without credentials.
    store: String,
    /// The namespace of the locks.
    namespace: String,
    /// The version of this server.
    version: &'static str,
    /// The role of the caller: `viewer` or `operator`.
    #[schema(value_type = String, example = "operator")]
    role: Role,
    /// Whether this server requires keys.
    keyed: bool,
    /// The time of this response, in wall-clock milliseconds.
    now_ms: u64,
    /// When the store was last scanned; `null` before the first scan.
    looked_ms: Option<u64>,
    /// `healthy`, `degraded` or `unhealthy`.
    #[schema(value_type = String, example = "healthy")]
    status: &'static str,
    /// Why the status is not `healthy`.
    reasons: Vec<String>,
    /// Since when the store does not answer. The other fields show the last known state.
    store_down_since_ms: Option<u64>,
    /// The number of held locks.
    held: usize,
    /// The number of waiters.
    waiting: usize,
    /// How long the longest of the current waiters has waited.
    longest_wait_ms: u64,
    /// Observed hand-offs to waiters in the last minute.
    handoffs_per_minute: usize,
    /// Tenures of the last hour that were lost, revoked, forced, expired or released in an emergency.
    bad_ends_last_hour: u64,
    /// The points of the last half hour.
    history: Vec<Point>,
    /// Counters of all clients of the store.
    exception_stats: ExceptionStats,
}

/// The holders and waiters of the last hour.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Timeline {
    /// The time of this response, in wall-clock milliseconds.
    now_ms: u64,
    /// The tenures, in no particular order.
    tenures: Vec<Tenure>,
    /// The waits, in no particular order.
    waits: Vec<Wait>,
}

/// The changes since an earlier response.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Live {
    /// The value to send as `after` in the next request.
    after: String,
    /// Whether this is the complete state rather than the changes.
    complete: bool,
    overview: Overview,
    /// Changed locks that are held or have waiters.
    locks: Vec<ObservedLock>,
    /// Names of locks that have become free.
    gone: Vec<String>,
    /// Tenures that have begun, ended or changed.
    tenures: Vec<Tenure>,
    /// Waits that have begun, ended or changed.
    waits: Vec<Wait>,
}

/// The query of the timeline.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct TimelineParams {
    /// Leaves out what ended before this time, in wall-clock milliseconds. At most the last hour is returned.
    since_ms: Option<u64>,
}

/// The query of the live state.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct LiveParams {
    /// The `after` of the last response. Without it, or with another server's, the complete state is returned.
    after: Option<String>,
}

/// Summarize all locks
///
/// From this server's last scan of the store, which is at most some seconds old.
#[utoipa::path(get, path = "/api/v1/overview", tag = "overview", responses((status = 200, body = Overview)))]
pub(crate) async fn overview(State(app): State<App>, Extension(caller): Extension<Caller>) -> Json<Overview> {
    app.snapshot.mark_watched().await;
    Json(build_overview(&app, &caller, &app.snapshot.state()))
}

/// List the holders and waiters of the last hour
///
/// As observed by this server: tenures shorter than half a second may be missing.
#[utoipa::path(get, path = "/api/v1/timeline", tag = "overview", params(TimelineParams),
    responses((status = 200, body = Timeline), (status = 400, body = ProblemBody)))]
pub(crate) async fn timeline(
    State(app): State<App>,
    QueryParams(params): QueryParams<TimelineParams>,
) -> Json<Timeline> {
    app.snapshot.mark_watched().await;
    let now_ms = unix_ms();
    let since_ms = params.since_ms.unwrap_or(0).max(now_ms.saturating_sub(KEPT_MS));
    let (tenures, waits) = app.snapshot.state().history.after(since_ms);
    Json(Timeline { now_ms, tenures, waits })
}

/// Get the changes since an earlier response
///
/// For dashboards that show all locks. It is cheap to poll twice a second: one scan of the store serves all clients.
#[utoipa::path(get, path = "/api/v1/live", tag = "overview", params(LiveParams),
    responses((status = 200, body = Live), (status = 400, body = ProblemBody)))]
pub(crate) async fn live(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    QueryParams(params): QueryParams<LiveParams>,
) -> Result<Json<Live>, Problem> {
    app.snapshot.mark_watched().await;
    app.snapshot.wait_for_changes().await;
    let run = &app.snapshot.run;
    let version = params.after.as_deref().and_then(|after| after.strip_prefix(run)?.strip_prefix('-')?.parse().ok());
    let state = app.snapshot.state();
    // A version that this server never returned would hide future changes.
    let version = version.filter(|version| *version <= state.history.version()).unwrap_or(0);
    let changes = state.history.since(version);
    Ok(Json(Live {
        after: format!("{run}-{}", state.history.version()),
        complete: version == 0,
        overview: build_overview(&app, &caller, &state),
        locks: changes.locks,
        gone: changes.gone,
        tenures: changes.tenures,
        waits: changes.waits,
    }))
}

fn build_overview(app: &App, caller: &Caller, state: &SnapshotState) -> Overview {
    let now_ms = unix_ms();
    let (status, reasons) = status(app, state, now_ms);
    let totals = state.trends.totals;
    Overview {
        store: app.locks.store(),
        namespace: app.locks.namespace().to_owned(),
        version: env!("CARGO_PKG_VERSION"),
        role: caller.role,
        keyed: app.keys.is_some(),
        now_ms,
        looked_ms: state.last_scan.map(|(_, at_ms)| at_ms),
        status,
        reasons,
        store_down_since_ms: state.down_since_ms,
        held: totals.held,
        waiting: totals.waiting,
        longest_wait_ms: totals.longest_wait_ms,
        handoffs_per_minute: state.trends.handoffs_per_minute(now_ms),
        bad_ends_last_hour: state.trends.bad_ends(),
        history: state.trends.recent_points(),
        exception_stats: state.exceptions.clone(),
    }
}

fn status(app: &App, state: &SnapshotState, now_ms: u64) -> (&'static str, Vec<String>) {
    if state.down_since_ms.is_some() {
        return ("unhealthy", vec!["the store does not answer".to_owned()]);
    }
    let mut reasons = Vec::new();
    let zombies =
        state.history.locks().filter(|seen| health::is_zombie(&seen.lock, now_ms, &app.settings.monitor)).count();
    if zombies > 0 {
        let holders = if zombies == 1 { "holder is" } else { "holders are" };
        reasons.push(format!("{zombies} {holders} gone or without a heartbeat"));
    }
    if health::is_alarming(&state.exceptions) {
        reasons.push("more than 5 % of all releases were emergencies".to_owned());
    }
    let firing = app.alerts.count(Level::Critical) + app.alerts.count(Level::Warning);
    if firing > 0 {
        reasons.push(format!("{firing} alert{}", if firing == 1 { "" } else { "s" }));
    }
    (if reasons.is_empty() { "healthy" } else { "degraded" }, reasons)
}
