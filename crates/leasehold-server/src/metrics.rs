//! Prometheus metrics. No label is a lock name, so the number of series is bounded, however many locks there are.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use leasehold::events::{EventKind, LockEvent};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::App;
use crate::alerts::{Level, NotificationCounter};
use crate::connection_limits::ConnectionMetrics;
use crate::fleet::{FleetCounters, LockGauges};
use crate::monitor::MonitorMetrics;

/// Kinds of events whose series exist from the start.
const KINDS: [EventKind; 7] = [
    EventKind::Granted,
    EventKind::Released,
    EventKind::Lost,
    EventKind::Revoked,
    EventKind::Forced,
    EventKind::AskedToFinish,
    EventKind::Alert,
];
/// Histogram buckets in seconds, from a lookup in memory to a long wait.
const BUCKETS: [f64; 12] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0, 300.0];
const OPEN_METRICS: &str = "application/openmetrics-text";

/// The metrics of this server.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    request_seconds: Family<RouteLabels, Histogram>,
    events: Family<EventLabels, Counter>,
    events_dropped: Counter,
    fleet: Arc<FleetCounters>,
    locks: LockGauges,
    firing: Family<LevelLabels, Gauge>,
    pub(crate) notifications: NotificationCounter,
    store_up: Gauge,
    pub(crate) in_flight: Gauge,
    pub(crate) streams: Gauge,
    pub(crate) connections: ConnectionMetrics,
    pub(crate) monitor: MonitorMetrics,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    route: String,
    method: &'static str,
    status: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteLabels {
    route: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EventLabels {
    kind: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LevelLabels {
    level: &'static str,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("leasehold");
        let new = Self {
            registry: Registry::default(),
            requests: Family::default(),
            request_seconds: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            events: Family::default(),
            events_dropped: Counter::default(),
            fleet: Arc::default(),
            locks: LockGauges::default(),
            firing: Family::default(),
            notifications: NotificationCounter::new(),
            store_up: Gauge::<i64, _>::default(),
            in_flight: Gauge::default(),
            streams: Gauge::default(),
            connections: ConnectionMetrics::default(),
            monitor: MonitorMetrics::default(),
        };
        for kind in KINDS {
            drop(new.events.get_or_create(&EventLabels { kind: kind_name(kind) }));
        }
        registry.register("http_requests", "Requests answered", new.requests.clone());
        registry.register(
            "http_request_seconds",
            "Time from the head of a request to the head of its response",
            new.request_seconds.clone(),
        );
        registry.register("http_requests_in_flight", "Requests being answered", new.in_flight.clone());
        registry.register("events", "Events of the fleet seen by this server", new.events.clone());
        let help = "Published events that were dropped: too long, unreadable, or about no lock";
        registry.register("events_dropped", help, new.events_dropped.clone());
        registry.register("event_streams", "Open event streams", new.streams.clone());
        registry.register("store_up", "Whether the store answered this scrape", new.store_up.clone());
        registry.register("alerts_firing", "Firing alerts", new.firing.clone());
        new.notifications.register(&mut registry);
        new.locks.register(&mut registry);
        registry.register_collector(Box::new(new.fleet.clone()));
        new.connections.register(&mut registry);
        new.monitor.register(&mut registry);
        Self { registry, ..new }
    }

    /// Counts a response and its latency.
    pub(crate) fn record_response(&self, route: &str, method: &Method, status: StatusCode, took: Duration) {
        let method = match *method {
            Method::GET => "GET",
            Method::HEAD => "HEAD",
            Method::POST => "POST",
            // A client can invent any number of methods.
            _ => "other",
        };
        let status = match status.as_u16() {
            200..=299 => "2xx",
            300..=399 => "3xx",
            400..=499 => "4xx",
            _ => "5xx",
        };
        self.requests.get_or_create(&RequestLabels { route: route.to_owned(), method, status }).inc();
        self.request_seconds.get_or_create(&RouteLabels { route: route.to_owned() }).observe(took.as_secs_f64());
    }

    /// Counts an event of the fleet.
    pub(crate) fn count_event(&self, kind: EventKind) {
        self.events.get_or_create(&EventLabels { kind: kind_name(kind) }).inc();
    }
}

/// The name of an event kind in JSON.
fn kind_name(kind: EventKind) -> String {
    let word = serde_json::to_value(kind).ok().and_then(|kind| kind.as_str().map(str::to_owned));
    word.unwrap_or_default()
}

/// Prometheus metrics
///
/// Metrics named `leasehold_fleet_…` cover all clients of the store and may be some seconds old. The format is
/// OpenMetrics if `Accept` asks for it, as Prometheus does, and the older text format otherwise.
#[utoipa::path(get, path = "/metrics", tag = "server",
    responses((status = 200, description = "the metrics",
        content((String = "text/plain"), (String = "application/openmetrics-text")))))]
pub(crate) async fn metrics(State(app): State<App>, headers: HeaderMap) -> Response {
    let metrics = &app.metrics;
    match app.locks.fleet_counters().await {
        Ok(counted) => {
            metrics.store_up.set(1);
            metrics.fleet.set(counted);
            metrics.locks.refresh(&app.locks).await;
        }
        // Keep the last known counts: a counter that falls to zero would look like a restart.
        Err(error) => {
            tracing::warn!(error = %format_args!("{error:#}"), "cannot read the fleet's counters");
            metrics.store_up.set(0);
        }
    }
    for level in [Level::Warning, Level::Critical] {
        let firing = i64::try_from(app.alerts.count(level)).unwrap_or(i64::MAX);
        metrics.firing.get_or_create(&LevelLabels { level: level.as_str() }).set(firing);
    }
    metrics.events_dropped.inner().store(LockEvent::dropped(), Ordering::Relaxed);
    let mut text = String::new();
    if prometheus_client::encoding::text::encode(&mut text, &metrics.registry).is_err() {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    let accepts = headers.get_all(header::ACCEPT).iter().filter_map(|accept| accept.to_str().ok());
    if accepts.flat_map(|accept| accept.split(',')).any(|kind| kind.trim().starts_with(OPEN_METRICS)) {
        return ([(header::CONTENT_TYPE, format!("{OPEN_METRICS}; version=1.0.0; charset=utf-8"))], text)
            .into_response();
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], to_prometheus_text(&text)).into_response()
}

/// Converts OpenMetrics to the older Prometheus text format, which describes a counter by its full name and has neither
/// units nor an end marker.
fn to_prometheus_text(text: &str) -> String {
    let counters: HashSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter")).collect();
    let mut before = String::with_capacity(text.len());
    for line in text.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "EOF" | "UNIT", ..] => continue,
            ["#", what, name, rest] if counters.contains(name) => before += &format!("# {what} {name}_total {rest}"),
            _ => before += line,
        }
        before.push('\n');
    }
    before
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_older_text_format_names_counters_in_full() {
        let text = "# HELP a_requests Requests, by route.\n# TYPE a_requests counter\na_requests_total{route=\"/ x\"} 3\n\
                    # HELP a_pass_seconds How long.\n# TYPE a_pass_seconds gauge\n# UNIT a_pass_seconds seconds\n\
                    a_pass_seconds 0.5\n# EOF\n";
        let before = "# HELP a_requests_total Requests, by route.\n# TYPE a_requests_total counter\n\
                      a_requests_total{route=\"/ x\"} 3\n# HELP a_pass_seconds How long.\n# TYPE a_pass_seconds gauge\n\
                      a_pass_seconds 0.5\n";
        assert_eq!(to_prometheus_text(text), before);
    }
}
