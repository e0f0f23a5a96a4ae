//! What is said when there is no lock to be had.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold::{Error, Holder, LockManager, LockName};

use crate::duration::shown;
use crate::exit::{Exit, Failure};

/// The failure of an acquire, in the command's words.
pub(super) async fn failure(error: Error, _locks: Option<&LockManager>, _json: bool, code: Option<u8>) -> Failure {
    match &error {
        Error::NotAcquired { name, waited, holder, store } => {
            let exit = code.map_or(Exit::NotAcquired, Exit::Code);
            let mut line = held_by(name, holder.as_deref());
            if !waited.is_zero() {
                line += &format!("; waited {}", shown(*waited));
            }
            Failure::new(exit, line).detail(format!("store: {store} · see who waits: leasehold why {name}"))
        }
        _ => error.into(),
    }
}

/// `nightly is held by backup@db-1 (pid 4711) for 2m 10s, lease ends in 21s`
fn held_by(name: &LockName, holder: Option<&Holder>) -> String {
    let Some(holder) = holder else { return format!("{name} is held by somebody else") };
    let mut line = match holder.foreign {
        true => format!("{name} is held by another kind of client ({})", holder.owner),
        false => format!("{name} is held by {}", holder.owner),
    };
    if let Some(held) = held_for(holder) {
        line += &format!(" for {}", shown(held));
    }
    match holder.ttl_left {
        Some(left) => line + &format!(", lease ends in {}", shown(left)),
        None => line + ", without an end",
    }
}

/// For how long somebody has held a lock, if that is known.
pub(super) fn held_for(holder: &Holder) -> Option<Duration> {
    let since = UNIX_EPOCH.checked_add(Duration::from_millis(holder.since_ms)).filter(|_| holder.since_ms > 0)?;
    // Another machine's clock may be ahead of ours.
    Some(SystemTime::now().duration_since(since).unwrap_or_default())
}
