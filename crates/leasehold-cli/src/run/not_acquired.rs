//! The report of a lock that was not acquired.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold::inspect::Holder;
use leasehold::{Error, LockManager};
use serde::Serialize;

use crate::exit::{Exit, Failure};
use crate::output;

/// Returns the failure of an acquisition. With `json` it first prints the lock, or the GPUs, and their holders as data.
pub(super) async fn failure(error: Error, locks: Option<&LockManager>, json: bool, code: Option<u8>) -> Failure {
    let printed = match &error {
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
    if let Err(failure) = printed {
        return failure;
    }
    let failure = Failure::from(error);
    Failure { exit: code.map_or(failure.exit, Exit::Code), ..failure }
}

/// Writes to stdout on a thread of its own: a slow reader must not keep signals waiting.
async fn write_json(value: impl Serialize + Send + 'static) -> Result<bool, Failure> {
    let (send_result, written) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || send_result.send(output::json(&value)));
    written.await.unwrap_or_else(|_| Err(Failure::new(Exit::Output, "the output could not be written")))
}

/// Returns for how long a holder has held its lock, if that is known.
pub(super) fn held_for(holder: &Holder) -> Option<Duration> {
    let since = UNIX_EPOCH.checked_add(Duration::from_millis(holder.since_ms)).filter(|_| holder.since_ms > 0)?;
    // Another machine's clock may be ahead of this one's.
    Some(SystemTime::now().duration_since(since).unwrap_or_default())
}
