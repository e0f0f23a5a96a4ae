//! The picture as it is asked for.

use axum::extract::State;
use axum::{Extension, Json};
use serde::{Deserialize, Serialize};

use super::figures::Point;
use super::history::KEPT_MS;
use super::record::{Seen, Tenure, Wait};
use super::{Known, now_ms};
use crate::App;
use crate::alerts::Level;
use crate::answer::{Problem, Said};
use crate::asked::Asked;
use crate::health::{self, ExceptionStats};
use crate::keys::{Caller, Role};

/// How everything is.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Overview {
    /// The store, without its secrets.
    store: String,
    /// The namespace of its locks.
    namespace: String,
    /// The version of this server.
    version: &'static str,
    /// What the caller may do: `viewer` or `operator`.
    #[schema(value_type = String, example = "operator")]
    role: Role,
    /// Whether keys are needed here.
    keyed: bool,
    /// When this was answered.
    now_ms: u64,
    /// When the store was last looked at; `null` before the first time.
    looked_ms: Option<u64>,
    /// `healthy`, `degraded` or `unhealthy`.
    #[schema(value_type = String, example = "healthy")]
    status: &'static str,
    /// Why it is not healthy.
    reasons: Vec<String>,
    /// Since when the store does not answer; the rest is what was known then.
    store_down_since_ms: Option<u64>,
    /// Locks held.
    held: usize,
    /// Those who wait.
    waiting: usize,
    /// The longest that somebody who waits has been waiting.
    longest_wait_ms: u64,
    /// Locks handed to somebody who waited, in the last minute, as far as they were seen.
    handoffs_per_minute: usize,
    /// Tenures of the last hour that were lost, revoked, forced, expired or released in an emergency.
    bad_ends_last_hour: u64,
    /// The last half hour.
    history: Vec<Point>,
    /// What all clients of the store counted.
    exception_stats: ExceptionStats,
}

/// Who held what, and who waited.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Timeline {
    /// When this was answered.
    now_ms: u64,
    /// In no promised order.
    tenures: Vec<Tenure>,
    /// In no promised order.
    waits: Vec<Wait>,
}

/// What has changed.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Live {
    /// To be sent as `after` the next time.
    after: String,
    /// Everything that is known, not only what has changed.
    complete: bool,
    overview: Overview,
    /// Locks that are held or waited for, and have changed.
    locks: Vec<Seen>,
    /// Locks that are free by now.
    gone: Vec<String>,
    /// Tenures that have begun, ended or become better known.
    tenures: Vec<Tenure>,
    /// Likewise.
    waits: Vec<Wait>,
}

/// From when on.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Since {
    /// Leaves out what ended before, in wall-clock milliseconds. Never more than the last hour.
    since_ms: Option<u64>,
}

/// What is known already.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct After {
    /// The `after` of the last answer; without it, or with another server's, everything is answered.
    after: Option<String>,
}

/// How everything is, in a few numbers
///
/// From the server's last look at the store, at most some seconds ago.
#[utoipa::path(get, path = "/api/v1/overview", tag = "picture", responses((status = 200, body = Overview)))]
pub(crate) async fn overview(State(app): State<App>, Extension(caller): Extension<Caller>) -> Json<Overview> {
    app.picture.watch().await;
    Json(of(&app, &caller, &app.picture.known()))
}

/// Who held what, and who waited, in the last hour
///
/// As far as this server has seen it: tenures of less than half a second may be missing.
#[utoipa::path(get, path = "/api/v1/timeline", tag = "picture", params(Since),
    responses((status = 200, body = Timeline), (status = 400, body = Said)))]
pub(crate) async fn timeline(State(app): State<App>, Asked(asked): Asked<Since>) -> Json<Timeline> {
    app.picture.watch().await;
    let now_ms = now_ms();
    let since_ms = asked.since_ms.unwrap_or(0).max(now_ms.saturating_sub(KEPT_MS));
    let (tenures, waits) = app.picture.known().history.after(since_ms);
    Json(Timeline { now_ms, tenures, waits })
}

/// What has changed since the last time: for a page that shows everything
///
/// Cheap to ask for twice a second: the store is looked at for all who ask together.
#[utoipa::path(get, path = "/api/v1/live", tag = "picture", params(After),
    responses((status = 200, body = Live), (status = 400, body = Said)))]
pub(crate) async fn live(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Asked(asked): Asked<After>,
) -> Result<Json<Live>, Problem> {
    app.picture.watch().await;
    app.picture.catch_up().await;
    let run = &app.picture.run;
    let version = asked.after.as_deref().and_then(|after| after.strip_prefix(run)?.strip_prefix('-')?.parse().ok());
    let known = app.picture.known();
    // One that was never given out would hide what is to come.
    let version = version.filter(|version| *version <= known.history.version()).unwrap_or(0);
    let changes = known.history.since(version);
    Ok(Json(Live {
        after: format!("{run}-{}", known.history.version()),
        complete: version == 0,
        overview: of(&app, &caller, &known),
        locks: changes.locks,
        gone: changes.gone,
        tenures: changes.tenures,
        waits: changes.waits,
    }))
}

fn of(app: &App, caller: &Caller, known: &Known) -> Overview {
    let now_ms = now_ms();
    let (status, reasons) = status(app, known, now_ms);
    let now = known.figures.now;
    Overview {
        store: app.locks.store(),
        namespace: app.locks.namespace().to_owned(),
        version: env!("CARGO_PKG_VERSION"),
        role: caller.role,
        keyed: app.keys.is_some(),
        now_ms,
        looked_ms: known.looked.map(|(_, at_ms)| at_ms),
        status,
        reasons,
        store_down_since_ms: known.down_since_ms,
        held: now.held,
        waiting: now.waiting,
        longest_wait_ms: now.longest_wait_ms,
        handoffs_per_minute: known.figures.handoffs_per_minute(now_ms),
        bad_ends_last_hour: known.figures.bad_ends(),
        history: known.figures.shown(),
        exception_stats: known.exceptions.clone(),
    }
}

fn status(app: &App, known: &Known, now_ms: u64) -> (&'static str, Vec<String>) {
    if known.down_since_ms.is_some() {
        return ("unhealthy", vec!["the store does not answer".to_owned()]);
    }
    let mut reasons = Vec::new();
    let zombies =
        known.history.locks().filter(|seen| health::is_zombie(&seen.lock, now_ms, &app.settings.monitor)).count();
    if zombies > 0 {
        let holders = if zombies == 1 { "holder is" } else { "holders are" };
        reasons.push(format!("{zombies} {holders} gone or silent"));
    }
    if health::is_alarming(&known.exceptions) {
        reasons.push("more than 5 % of all releases were emergencies".to_owned());
    }
    let firing = app.alerts.count(Level::Critical) + app.alerts.count(Level::Warning);
    if firing > 0 {
        reasons.push(format!("{firing} alert{}", if firing == 1 { "" } else { "s" }));
    }
    (if reasons.is_empty() { "healthy" } else { "degraded" }, reasons)
}
