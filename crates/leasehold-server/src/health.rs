//! The health of the GPU locks, under the path that existing dashboards and probes use.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use leasehold::Error;
use leasehold::config::GpuLockMonitor;
use leasehold::inspect::{LockInfo, LockView};
use serde::Serialize;

use crate::App;
use crate::alerts::EMERGENCY_RATE;
use crate::gpus::GPU_PREFIX;

/// How many locks are read at a time.
const PAGE_LEN: usize = 500;

/// The health of the GPU locks.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Health {
    /// `healthy`; `degraded`: there are zombies, or more than 5 % of all releases were emergencies; `unhealthy`: the
    /// store does not answer.
    #[schema(value_type = String, example = "healthy")]
    status: &'static str,
    /// Whether the store answered, whether or not it is Redis.
    redis_connected: bool,
    /// Locks whose holder is gone or has sent no heartbeat for `gpu_lock_monitor.heartbeat.timeout` (five minutes by
    /// default).
    zombie_locks: Vec<LockView>,
    /// Locks held for longer than `gpu_lock_monitor.timeout_levels.warning` (five minutes by default).
    long_held_locks: Vec<LockView>,
    /// Counters of all clients of the store.
    exception_stats: ExceptionStats,
    /// The time of this response, in seconds since 1970.
    timestamp: f64,
}

/// The four counters of failed releases, and their rates over all locks.
#[derive(Debug, Clone, Default, Serialize, utoipa::ToSchema)]
pub(crate) struct ExceptionStats {
    /// Releases whose first attempt failed.
    normal_release_failures: u64,
    /// Releases done by a fallback.
    emergency_releases: u64,
    /// Releases that failed because the store could not run the script.
    release_script_errors: u64,
    /// Releases of a lock that the caller no longer held.
    ownership_violations: u64,
    /// `normal_release_failures` divided by the number of locks acquired.
    exception_rate: f64,
    /// `emergency_releases` divided by the number of locks acquired.
    emergency_release_rate: f64,
}

/// Show the health of the GPU locks
///
/// Covers the whole fleet, not only this server. When `unhealthy`, the status is 503 and the fields are the same.
#[utoipa::path(get, path = "/api/v1/monitoring/gpu-lock/health", tag = "locks",
    responses((status = 200, body = Health), (status = 503, description = "`unhealthy`", body = Health)))]
pub(crate) async fn gpu(State(app): State<App>) -> (StatusCode, Json<Health>) {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    match gpu_locks(&app).await {
        Ok((views, exception_stats)) => {
            let (zombie_locks, long_held_locks) = zombies_and_long_held(views, since, &app.settings.monitor);
            let degraded = !zombie_locks.is_empty() || is_alarming(&exception_stats);
            let status = if degraded { "degraded" } else { "healthy" };
            let timestamp = since.as_secs_f64();
            let health =
                Health { status, redis_connected: true, zombie_locks, long_held_locks, exception_stats, timestamp };
            (StatusCode::OK, Json(health))
        }
        Err(error) => {
            tracing::warn!(error = %format_args!("{error:#}"), "unhealthy: the store does not answer");
            let health = Health {
                status: "unhealthy",
                redis_connected: false,
                zombie_locks: Vec::new(),
                long_held_locks: Vec::new(),
                exception_stats: ExceptionStats::default(),
                timestamp: since.as_secs_f64(),
            };
            (StatusCode::SERVICE_UNAVAILABLE, Json(health))
        }
    }
}

async fn gpu_locks(app: &App) -> Result<(Vec<LockView>, ExceptionStats), Error> {
    // The index is cheap to read, however many keys the store holds.
    let (mut gpus, mut after) = (BTreeMap::new(), None);
    loop {
        let page = app.locks.long_held_page(after, PAGE_LEN).await?;
        gpus.extend(page.locks.into_iter().filter(|(name, _)| name.as_str().starts_with(GPU_PREFIX)));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    let view = |(name, holder)| LockInfo { name, holder: Some(holder), waiters: Vec::new() }.view();
    Ok((gpus.into_iter().map(view).collect(), stats(&app.locks.fleet_counters().await?)))
}

/// Whether the holder of a lock is gone. A missing heartbeat counts only for GPU locks, which are renewed continuously;
/// a lease that belongs to no process sends none.
pub(crate) fn is_zombie(view: &LockView, now_ms: u64, rules: &GpuLockMonitor) -> bool {
    let silence = rules.heartbeat.timeout.duration().as_millis();
    let silent = |seen: u64| u128::from(now_ms.saturating_sub(seen)) > silence;
    view.connected == Some(false) || (view.name.starts_with(GPU_PREFIX) && view.last_seen_ms.is_some_and(silent))
}

/// Returns the zombies and the locks that have been held for long.
fn zombies_and_long_held(
    views: Vec<LockView>,
    now: Duration,
    rules: &GpuLockMonitor,
) -> (Vec<LockView>, Vec<LockView>) {
    let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
    let warning = ms(rules.timeout_levels.warning);
    let zombie = |view: &&LockView| is_zombie(view, ms(now), rules);
    let long = |view: &&LockView| view.held_ms.is_some_and(|held| held > warning);
    (views.iter().filter(zombie).cloned().collect(), views.iter().filter(long).cloned().collect())
}

/// Whether releases fail too often to be accidents.
pub(crate) fn is_alarming(stats: &ExceptionStats) -> bool {
    stats.emergency_release_rate > EMERGENCY_RATE
}

pub(crate) fn stats(counted: &[(String, u64)]) -> ExceptionStats {
    let of = |name: &str| counted.iter().find(|(counter, _)| counter == name).map_or(0, |(_, count)| *count);
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    let rate = |part: u64| part as f64 / of("total_locks").max(1) as f64;
    let (failures, emergencies) = (of("normal_release_failures"), of("emergency_releases"));
    ExceptionStats {
        normal_release_failures: failures,
        emergency_releases: emergencies,
        release_script_errors: of("release_script_errors"),
        ownership_violations: of("ownership_violations"),
        exception_rate: rate(failures),
        emergency_release_rate: rate(emergencies),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(name: &str, held_s: u64, seen_s: u64, connected: Option<bool>) -> LockView {
        let now = 10_000_000;
        LockView {
            name: name.into(),
            held: true,
            owner: None,
            holder_id: None,
            fence: None,
            since_ms: Some(now - held_s * 1_000),
            held_ms: Some(held_s * 1_000),
            ttl_ms: None,
            ttl_left_ms: None,
            last_seen_ms: Some(now - seen_s * 1_000),
            connected,
            revoked: false,
            foreign: false,
            waiters: Vec::new(),
        }
    }

    #[test]
    fn only_dead_holders_are_zombies() {
        let views = vec![
            view("gpu_lock:alive", 3_600, 30, Some(true)),
            view("gone", 10, 10, Some(false)),
            view("gpu_lock:silent", 400, 301, None),
            view("short", 10, 10, None),
        ];
        let names = |views: &[LockView]| views.iter().map(|view| view.name.clone()).collect::<Vec<_>>();
        let mut rules = GpuLockMonitor::default();
        let (zombies, long) = zombies_and_long_held(views.clone(), Duration::from_secs(10_000), &rules);
        assert_eq!(names(&zombies), ["gone", "gpu_lock:silent"]);
        assert_eq!(names(&long), ["gpu_lock:alive", "gpu_lock:silent"]);
        rules.heartbeat.timeout = leasehold::lease::Ttl::new(Duration::from_secs(20)).expect("valid");
        rules.timeout_levels.warning = Duration::from_secs(600);
        let (zombies, long) = zombies_and_long_held(views, Duration::from_secs(10_000), &rules);
        assert_eq!(names(&zombies), ["gpu_lock:alive", "gone", "gpu_lock:silent"], "as configured");
        assert_eq!(names(&long), ["gpu_lock:alive"]);
    }

    #[test]
    fn rates_are_over_all_locks() {
        let counted = [("total_locks", 40), ("emergency_releases", 3), ("normal_release_failures", 10)];
        let stats = stats(&counted.map(|(name, count)| (name.to_owned(), count)));
        assert!((stats.emergency_release_rate - 0.075).abs() < 1e-9 && (stats.exception_rate - 0.25).abs() < 1e-9);
        assert!(super::stats(&[]).exception_rate.abs() < 1e-9);
    }
}
