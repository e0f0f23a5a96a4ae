//! What is said when there is no lock to be had.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold::inspect::Holder;
use leasehold::{Error, LockManager};
use serde::Serialize;

use crate::exit::{Exit, Failure};
use crate::say;

/// The failure of an acquire. With `json`, whoever holds the lock is printed as data as well.
pub(super) async fn failure(error: Error, locks: Option<&LockManager>, json: bool, code: Option<u8>) -> Failure {
    let said = match &error {
        Error::NotAcquired { name, .. } if json => match locks {
            Some(locks) => match locks.info(name).await {
                Ok(info) => write_json(info.view()).await,
                Err(_) => Ok(true),
            },
            None => Ok(true),
        },
        Error::PoolBusy { members, .. } if json => {
            write_json(members.iter().map(|member| member.lock.view()).collect::<Vec<_>>()).await
        }
        Error::NotAcquired { .. } | Error::PoolBusy { .. } => Ok(true),
        _ => return error.into(),
    };
    if let Err(failure) = said {
        return failure;
    }
    let failure = Failure::from(error);
    Failure { exit: code.map_or(failure.exit, Exit::Code), ..failure }
}

/// Writes to stdout on a thread of its own: a reader that is slow must not keep signals waiting.
async fn write_json(value: impl Serialize + Send + 'static) -> Result<bool, Failure> {
    let (tell, written) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || tell.send(say::json(&value)));
    written.await.unwrap_or_else(|_| Err(Failure::new(Exit::Output, "the output could not be written")))
}

/// For how long somebody has held a lock, if that is known.
pub(super) fn held_for(holder: &Holder) -> Option<Duration> {
    let since = UNIX_EPOCH.checked_add(Duration::from_millis(holder.since_ms)).filter(|_| holder.since_ms > 0)?;
    // Another machine's clock may be ahead of ours.
    Some(SystemTime::now().duration_since(since).unwrap_or_default())
}
