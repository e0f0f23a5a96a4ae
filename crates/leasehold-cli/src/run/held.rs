//! What is said when there is no lock to be had.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold::{Error, Holder, LockManager};

use crate::exit::{Exit, Failure};
use crate::say;

/// The failure of an acquire. With `json`, whoever holds the lock is printed as data as well.
pub(super) async fn failure(error: Error, locks: Option<&LockManager>, json: bool, code: Option<u8>) -> Failure {
    let said = match &error {
        Error::NotAcquired { name, .. } if json => match locks {
            Some(locks) => locks.info(name).await.map_or(Ok(true), |info| say::json(&info.view())),
            None => Ok(true),
        },
        Error::PoolBusy { members, .. } if json => {
            say::json(&members.iter().map(|member| member.lock.view()).collect::<Vec<_>>())
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

/// For how long somebody has held a lock, if that is known.
pub(super) fn held_for(holder: &Holder) -> Option<Duration> {
    let since = UNIX_EPOCH.checked_add(Duration::from_millis(holder.since_ms)).filter(|_| holder.since_ms > 0)?;
    // Another machine's clock may be ahead of ours.
    Some(SystemTime::now().duration_since(since).unwrap_or_default())
}
