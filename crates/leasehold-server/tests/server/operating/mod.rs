//! What operators need: alerts and their sinks, the journal, the audit, GPUs, TLS, metrics, and what is in
//! `deploy/`.

mod alerts;
mod deploy;
mod metrics;
mod routes;
mod secrets;
mod tls;
mod webhook;

use std::time::Duration;

use leasehold_server::{AlertSettings, Settings};
use serde_json::Value;

use crate::support::Place;

/// Settings of a server from the section `alerts` of a file.
fn settings(yaml: &str) -> Settings {
    let mut read = leasehold::config::Settings::new().yaml("test.yaml", yaml);
    let alerts = AlertSettings::read(&mut read);
    read.finish().unwrap_or_else(|error| panic!("{error}"));
    let mut settings = Settings::default();
    settings.alerts = alerts;
    settings
}

/// Waits until an alert fires.
async fn alert(place: &Place, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let looking = async {
        loop {
            let listed = place.get("/api/v1/alerts").await.ok();
            let alerts = listed["alerts"].as_array().expect("a list").clone();
            if let Some(found) = alerts.into_iter().find(|alert| wanted(alert)) {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let found = tokio::time::timeout(Duration::from_secs(30), looking).await;
    found.unwrap_or_else(|_| panic!("{}: timed out: {what}", place.kind))
}
