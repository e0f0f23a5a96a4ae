//! Figures for Prometheus. No lock name is a label: the number of series is bounded, whatever people lock.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use leasehold::EventKind;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::alerts::Level;
use crate::fleet::{Census, Fleet};
use crate::{App, monitor};

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
/// Everything that is counted here.
pub(crate) struct Metrics {
    registry: Registry,
    requests: Family<Request, Counter>,
    took: Family<Route, Histogram>,
    events: Family<Kind, Counter>,
    fleet: Arc<Fleet>,
    census: Census,
    firing: Family<AtLevel, Gauge>,
    pub(crate) notified: Notified,
    store_up: Gauge,
    pub(crate) in_flight: Gauge,
    pub(crate) streams: Gauge,
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
            fleet: Arc::default(),
            census: Census::default(),
            firing: Family::default(),
            notified: Notified::all(),
            store_up: Gauge::<i64, _>::default(),
            in_flight: Gauge::default(),
            streams: Gauge::default(),
            monitor: monitor::Figures::default(),
        };
        for kind in KINDS {
            drop(new.events.get_or_create(&Kind { kind: word(kind) }));
        }
        registry.register("http_requests", "Requests answered", new.requests.clone());
        registry.register("http_request_seconds", "From the head of a request to that of its answer", new.took.clone());
        registry.register("http_requests_in_flight", "Requests being answered", new.in_flight.clone());
        registry.register("events", "Events of the fleet seen by this server", new.events.clone());
        registry.register("event_streams", "Readers of the events", new.streams.clone());
        registry.register("store_up", "Whether the store answered when this was asked", new.store_up.clone());
        registry.register("alerts_firing", "Alerts that fire", new.firing.clone());
        registry.register("alert_notifications", "Alerts sent to a sink, by what became of it", new.notified.0.clone());
        new.census.register(&mut registry);
        registry.register_collector(Box::new(new.fleet.clone()));
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
/// What is called `leasehold_fleet_…` is of all clients of the store, some seconds old.
#[utoipa::path(get, path = "/metrics", tag = "server",
    responses((status = 200, description = "OpenMetrics text", content_type = "application/openmetrics-text", body = String)))]
pub(crate) async fn metrics(State(app): State<App>) -> Response {
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
    let mut text = String::new();
    if prometheus_client::encoding::text::encode(&mut text, &metrics.registry).is_err() {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text).into_response()
}
