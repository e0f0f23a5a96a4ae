//! The alerts that the servers of one store share. All servers show the same alerts, and the next leader neither
//! repeats notifications nor forgets to send "resolved".

use std::time::Duration;

use leasehold::Error;
use leasehold::bindings::Bindings;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::alert::SharedAlert;
use crate::App;

/// The id of the binding that stores the alerts.
const BINDING_ID: &str = "leasehold-alerts";
/// How long the alerts are stored. If no server runs for longer, firing alerts are sent again.
const RETENTION: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// The most alerts that are stored, the worst first: more than a person reads, and fewer than one value can hold.
const MAX_ALERTS: usize = 1_000;
/// How often followers read the alerts, and how often the leader writes unchanged ones.
const SYNC_INTERVAL: Duration = Duration::from_secs(2);
/// The shortest interval between two writes.
const MIN_INTERVAL: Duration = Duration::from_millis(200);

/// Reads the shared alerts, or writes them while this server leads, until the server stops.
pub(crate) fn start_sharing(app: App) -> JoinHandle<()> {
    let stopping = app.stopping.clone();
    tokio::spawn(async move {
        // Without an election, each server sends its own alerts.
        if app.settings.monitor.enabled {
            let _ = stopping.run_until_cancelled(sync_forever(&app)).await;
        }
    })
}

async fn sync_forever(app: &App) {
    loop {
        let next = Instant::now() + SYNC_INTERVAL;
        if let Err(error) = sync(app).await {
            tracing::debug!(error = %format_args!("{error:#}"), "the alerts were not shared with other servers");
        }
        tokio::time::sleep(MIN_INTERVAL).await;
        let _ = tokio::time::timeout_at(next, app.alerts.changed.notified()).await;
    }
}

async fn sync(app: &App) -> Result<(), Error> {
    match app.alerts.alerts_to_share() {
        Some(shared) => store_alerts(app, shared).await,
        None => {
            if let Some(shared) = load_alerts(app).await? {
                app.alerts.mirror(shared);
            }
            Ok(())
        }
    }
}

/// Makes this server the leader, which continues with the alerts of the previous one.
///
/// # Errors
/// Fails if the store does not answer: a server that does not know what was sent must not send anything.
pub(crate) async fn take_over(app: &App) -> Result<(), Error> {
    app.alerts.start_leading(load_alerts(app).await?.unwrap_or_default());
    Ok(())
}

async fn store_alerts(app: &App, mut shared: Vec<SharedAlert>) -> Result<(), Error> {
    shared.truncate(MAX_ALERTS);
    if !bindings(app).update(BINDING_ID, &shared, Some(RETENTION)).await? {
        bindings(app).try_create(BINDING_ID, &shared, RETENTION).await?;
    }
    Ok(())
}

/// Reads the stored alerts; `None` if there has been no leader yet, or the store was emptied.
async fn load_alerts(app: &App) -> Result<Option<Vec<SharedAlert>>, Error> {
    match bindings(app).get(BINDING_ID).await {
        Ok(found) => Ok(found.map(|found| found.value)),
        // Written by another version; the leader overwrites it.
        Err(error @ Error::Unreadable { .. }) => {
            tracing::warn!(error = %format_args!("{error:#}"), "cannot parse the alerts that another server stored");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn bindings(app: &App) -> Bindings<Vec<SharedAlert>> {
    app.locks.bindings()
}
