//! What the servers of one store leave to each other: the alerts that fire, so that all of them show the same, and
//! whoever leads next neither tells anew what was told nor forgets to tell that it is over.

use std::time::Duration;

use leasehold::{Bindings, Error};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::board::Left;
use crate::App;

/// Where they stand in the store.
const ID: &str = "leasehold-alerts";
/// Without any server for so long, what fires then is told anew.
const KEPT_FOR: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// More than anybody reads, and less than a store takes in one value; the worst come first.
const MOST: usize = 1_000;
/// How often the others look, and the one that leads writes also what has not changed.
const EVERY: Duration = Duration::from_secs(2);
/// Between two writes.
const PAUSE: Duration = Duration::from_millis(200);

/// Reads, or while this server leads writes, until it stops.
pub(crate) fn share(app: App) -> JoinHandle<()> {
    let stopping = app.stopping.clone();
    tokio::spawn(async move {
        // Where nobody is elected each server tells for itself.
        if app.settings.monitor.enabled {
            let _ = stopping.run_until_cancelled(again_and_again(&app)).await;
        }
    })
}

async fn again_and_again(app: &App) {
    loop {
        let next = Instant::now() + EVERY;
        if let Err(error) = once(app).await {
            tracing::debug!(%error, "the alerts were not shared with other servers");
        }
        tokio::time::sleep(PAUSE).await;
        let _ = tokio::time::timeout_at(next, app.alerts.changed.notified()).await;
    }
}

async fn once(app: &App) -> Result<(), Error> {
    match app.alerts.to_leave() {
        Some(left) => leave(app, left).await,
        None => {
            if let Some(left) = found(app).await? {
                app.alerts.show(left);
            }
            Ok(())
        }
    }
}

/// This server leads from now on: it goes on where the last one that led stopped.
///
/// # Errors
/// When the store does not answer: whoever does not know what was told does not tell.
pub(crate) async fn take_over(app: &App) -> Result<(), Error> {
    app.alerts.begin_to_lead(found(app).await?.unwrap_or_default());
    Ok(())
}

async fn leave(app: &App, mut left: Vec<Left>) -> Result<(), Error> {
    left.truncate(MOST);
    if !bindings(app).update(ID, &left, Some(KEPT_FOR)).await? {
        bindings(app).try_create(ID, &left, KEPT_FOR).await?;
    }
    Ok(())
}

/// `None`: nobody has led yet, or the store was emptied.
async fn found(app: &App) -> Result<Option<Vec<Left>>, Error> {
    match bindings(app).get(ID).await {
        Ok(found) => Ok(found.map(|found| found.value)),
        // Of another version: it is written anew.
        Err(error @ Error::Unreadable { .. }) => {
            tracing::warn!(%error, "the alerts another server left are not understood");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn bindings(app: &App) -> Bindings<Vec<Left>> {
    app.locks.bindings()
}
