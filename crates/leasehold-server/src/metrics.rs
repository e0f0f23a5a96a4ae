//! Figures for Prometheus. No lock name is a label: the number of series is bounded, whatever people lock.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use leasehold::{EventKind, LockEvent};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::alerts::Level;
use crate::fleet::{Census, Fleet};
use crate::{App, monitor, seats};

/// Notifications of alerts, by sink and outcome.
#[derive(Debug, Clone, Default)]
pub(crate) struct Notified(Family<Notification, Counter>);

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Notification {
    sink: &'static str,
    outcome: &'static str,
}

impl Notified {
    /// Every series is there from the beginning: one that appears with a count of one shows no increase.
    fn all() -> Self {
        let new = Self::default();
        for sink in ["webhook", "command"] {
            for outcome in ["sent", "failed", "given_up", "dropped"] {
                drop(new.0.get_or_create(&Notification { sink, outcome }));
            }
        }
        new
    }

    pub(crate) fn count(&self, sink: &'static str, outcome: &'static str) {
        self.0.get_or_create(&Notification { sink, outcome }).inc();
    }
}

/// Events that are counted from the beginning.
const KINDS: [EventKind; 7] = [
    EventKind::Granted,
    EventKind::Released,
    EventKind::Lost,
    EventKind::Revoked,
    EventKind::Forced,
    EventKind::AskedToFinish,
    EventKind::Alert,
];
/// From a look at memory to a long wait, in seconds.
const BUCKETS: [f64; 12] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0, 300.0];
const OPEN_METRICS: &str = "application/openmetrics-text";

/// Everything that is counted here.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<Request, Counter>,
    took: Family<Route, Histogram>,
    events: Family<Kind, Counter>,
    events_dropped: Counter,
    fleet: Arc<Fleet>,
    census: Census,
    firing: Family<AtLevel, Gauge>,
    pub(crate) notified: Notified,
    store_up: Gauge,
    pub(crate) in_flight: Gauge,
    pub(crate) streams: Gauge,
    pub(crate) connections: seats::Figures,
    pub(crate) monitor: monitor::Figures,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    route: String,
    method: &'static str,
    status: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Route {
    route: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AtLevel {
    level: &'static str,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("leasehold");
        let new = Self {
            registry: Registry::default(),
            requests: Family::default(),
            took: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            events: Family::default(),
            events_dropped: Counter::default(),
            fleet: Arc::default(),
            census: Census::default(),
            firing: Family::default(),
            notified: Notified::all(),
            store_up: Gauge::<i64, _>::default(),
            in_flight: Gauge::default(),
            streams: Gauge::default(),
            connections: seats::Figures::default(),
            monitor: monitor::Figures::default(),
        };
        for kind in KINDS {
            drop(new.events.get_or_create(&Kind { kind: word(kind) }));
        }
        registry.register("http_requests", "Requests answered", new.requests.clone());
        registry.register("http_request_seconds", "From the head of a request to that of its answer", new.took.clone());
        registry.register("http_requests_in_flight", "Requests being answered", new.in_flight.clone());
        registry.register("events", "Events of the fleet seen by this server", new.events.clone());
        let help = "Published events that were dropped: too long, unreadable, or about no lock";
        registry.register("events_dropped", help, new.events_dropped.clone());
        registry.register("event_streams", "Readers of the events", new.streams.clone());
        registry.register("store_up", "Whether the store answered when this was asked", new.store_up.clone());
        registry.register("alerts_firing", "Alerts that fire", new.firing.clone());
        registry.register("alert_notifications", "Alerts sent to a sink, by what became of it", new.notified.0.clone());
        new.census.register(&mut registry);
        registry.register_collector(Box::new(new.fleet.clone()));
        new.connections.register(&mut registry);
        new.monitor.register(&mut registry);
        Self { registry, ..new }
    }

    /// A request was answered.
    pub(crate) fn answered(&self, route: &str, method: &Method, status: StatusCode, took: Duration) {
        let method = match *method {
            Method::GET => "GET",
            Method::HEAD => "HEAD",
            Method::POST => "POST",
            // Anybody can make up more of them.
            _ => "other",
        };
        let status = match status.as_u16() {
            200..=299 => "2xx",
            300..=399 => "3xx",
            400..=499 => "4xx",
            _ => "5xx",
        };
        self.requests.get_or_create(&Request { route: route.to_owned(), method, status }).inc();
        self.took.get_or_create(&Route { route: route.to_owned() }).observe(took.as_secs_f64());
    }

    /// An event was seen.
    pub(crate) fn happened(&self, kind: EventKind) {
        self.events.get_or_create(&Kind { kind: word(kind) }).inc();
    }
}

/// As in JSON.
fn word(kind: EventKind) -> String {
    let word = serde_json::to_value(kind).ok().and_then(|kind| kind.as_str().map(str::to_owned));
    word.unwrap_or_default()
}

/// Figures for Prometheus
///
/// What is called `leasehold_fleet_…` is of all clients of the store, some seconds old. As OpenMetrics where that is
/// asked for by `Accept`, as Prometheus does, else as the text before it.
#[utoipa::path(get, path = "/metrics", tag = "server",
    responses((status = 200, description = "the figures",
        content((String = "text/plain"), (String = "application/openmetrics-text")))))]
pub(crate) async fn metrics(State(app): State<App>, asked: HeaderMap) -> Response {
    let metrics = &app.metrics;
    match app.locks.fleet_counters().await {
        Ok(counted) => {
            metrics.store_up.set(1);
            metrics.fleet.set(counted);
            metrics.census.take(&app.locks).await;
        }
        // The last known counts are shown on: a counter that falls to zero would be taken for a restart.
        Err(error) => {
            tracing::warn!(%error, "the fleet's counters were not read");
            metrics.store_up.set(0);
        }
    }
    for level in [Level::Warning, Level::Critical] {
        let firing = i64::try_from(app.alerts.count(level)).unwrap_or(i64::MAX);
        metrics.firing.get_or_create(&AtLevel { level: level.as_str() }).set(firing);
    }
    metrics.events_dropped.inner().store(LockEvent::dropped(), Ordering::Relaxed);
    let mut text = String::new();
    if prometheus_client::encoding::text::encode(&mut text, &metrics.registry).is_err() {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    let accepts = asked.get_all(header::ACCEPT).iter().filter_map(|accept| accept.to_str().ok());
    if accepts.flat_map(|accept| accept.split(',')).any(|kind| kind.trim().starts_with(OPEN_METRICS)) {
        return ([(header::CONTENT_TYPE, format!("{OPEN_METRICS}; version=1.0.0; charset=utf-8"))], text)
            .into_response();
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], before_open_metrics(&text)).into_response()
}

/// The same figures for those who read only what was written before OpenMetrics: there a counter is described by its
/// whole name, and neither units nor an end are told.
fn before_open_metrics(text: &str) -> String {
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
    fn those_who_read_only_the_older_text_know_a_counter_by_its_whole_name() {
        let text = "# HELP a_requests Requests, by route.\n# TYPE a_requests counter\na_requests_total{route=\"/ x\"} 3\n\
                    # HELP a_pass_seconds How long.\n# TYPE a_pass_seconds gauge\n# UNIT a_pass_seconds seconds\n\
                    a_pass_seconds 0.5\n# EOF\n";
        let before = "# HELP a_requests_total Requests, by route.\n# TYPE a_requests_total counter\n\
                      a_requests_total{route=\"/ x\"} 3\n# HELP a_pass_seconds How long.\n# TYPE a_pass_seconds gauge\n\
                      a_pass_seconds 0.5\n";
        assert_eq!(before_open_metrics(text), before);
    }
}
