//! One error per decision the caller can take.

use std::fmt;
use std::time::Duration;

use crate::facts::{Invalid, LockName};
use crate::inspect::view::PoolMember;
use crate::loss::LossReason;
use crate::store::{Holder, Operation, StoreError};

/// Why a call failed.
///
/// The text does not repeat the cause, which is the [`source`](std::error::Error::source). The alternate form appends it
/// for logs: `format!("{error:#}")`.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another holder has the lock, and the wait is over (or was zero).
    #[error("{}", not_acquired(name, *waited, holder.as_deref(), store))]
    NotAcquired {
        /// The lock.
        name: LockName,
        /// How long the call waited.
        waited: Duration,
        /// The holder, if it is known.
        holder: Option<Box<Holder>>,
        /// The store, without secrets.
        store: String,
    },
    /// Too few members of the pool were free, and the wait is over (or was zero).
    #[error("{}", pool_busy(name, *wanted, *waited, members, store))]
    PoolBusy {
        /// The pool.
        name: LockName,
        /// The number of members that were requested.
        wanted: usize,
        /// All members with their holders, as far as they are known. Waiters are not read.
        members: Vec<PoolMember>,
        /// How long the call waited.
        waited: Duration,
        /// The store, without secrets.
        store: String,
    },
    /// The lease was lost during the work. The work must stop: another holder may have the lock.
    #[error("the lease on {name:?} was lost: {why}")]
    Lost {
        /// The lock.
        name: LockName,
        /// The reason.
        why: LossReason,
    },
    /// The store did not reply, or its reply was an error. The request may have been carried out. The caller holds nothing;
    /// whatever the store may have granted is released in the background.
    #[error(fmt = no_answer)]
    Store {
        /// The operation that failed.
        operation: Operation,
        /// The lock.
        name: LockName,
        /// The store, without secrets.
        store: String,
        /// The cause.
        source: StoreError,
    },
    /// The value stored under a request id cannot be read as the requested type.
    #[error("the value stored for {name:?} cannot be read as the requested type: {problem}")]
    Unreadable {
        /// The request id.
        name: LockName,
        /// The parser's message.
        problem: String,
    },
    /// The request id was first used with another payload.
    #[error("{name:?} belongs to a request with another payload; use a new id for a new request")]
    OtherPayload {
        /// The request id.
        name: LockName,
    },
    /// The work of this id was done, but its result could not be stored: it is too large or cannot be written as JSON. The
    /// work is not done again until the record is [forgotten](crate::once::Once::forget) or expires.
    #[error(
        "the work of {name:?} was done by {by}, but its result could not be stored: {problem}. Forget {name:?} to have \
         the work done again"
    )]
    ResultNotStored {
        /// The id of the work.
        name: LockName,
        /// The owner of the run that did it.
        by: String,
        /// Why the result is not stored.
        problem: String,
    },
    /// The store cannot be used: a bad URL, a file that cannot be opened, a wrong password.
    #[error(fmt = cannot_connect)]
    Connect {
        /// The store, without secrets.
        store: String,
        /// The cause.
        source: StoreError,
    },
    /// A name, ttl, owner or setting is invalid. No request was sent.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// [`install`](crate::install) was already called in this process.
    #[error("a lock manager is already installed: call `leasehold::install` once, at the start of the program")]
    AlreadyInstalled,
    /// `#[lock]` has no `locks = …`, and no manager is installed.
    #[error(
        "no lock manager for {name:?}: call `leasehold::install` at the start of the program, or use `#[lock(locks = …)]`"
    )]
    NotInstalled {
        /// The lock.
        name: LockName,
    },
    /// A call of [`blocking`](crate::blocking) inside an async runtime. It would block other tasks, perhaps the one that holds
    /// the lock. No request was sent.
    #[error(
        "a blocking call inside an async runtime would block its other tasks: use `leasehold::LockManager` there, or \
         `tokio::task::spawn_blocking`"
    )]
    InsideRuntime,
    /// The manager has been shut down.
    #[error("{name:?} cannot be locked: the lock manager was shut down")]
    ShutDown {
        /// The lock.
        name: LockName,
    },
}

impl Error {
    /// Returns whether the same call may succeed later without any change to the program or the store.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::NotAcquired { .. } | Self::PoolBusy { .. } | Self::Lost { .. } => true,
            Self::Store { source, .. } | Self::Connect { source, .. } => source.is_passing(),
            Self::Unreadable { .. }
            | Self::OtherPayload { .. }
            | Self::ResultNotStored { .. }
            | Self::Invalid(_)
            | Self::AlreadyInstalled
            | Self::NotInstalled { .. }
            | Self::InsideRuntime
            | Self::ShutDown { .. } => false,
        }
    }

    /// Returns the lock, pool or request id that the error is about.
    pub fn name(&self) -> Option<&LockName> {
        match self {
            Self::NotAcquired { name, .. }
            | Self::PoolBusy { name, .. }
            | Self::Lost { name, .. }
            | Self::Store { name, .. }
            | Self::Unreadable { name, .. }
            | Self::OtherPayload { name }
            | Self::ResultNotStored { name, .. }
            | Self::NotInstalled { name }
            | Self::ShutDown { name } => Some(name),
            Self::Connect { .. } | Self::Invalid(_) | Self::AlreadyInstalled | Self::InsideRuntime => None,
        }
    }
}

fn not_acquired(name: &LockName, waited: Duration, holder: Option<&Holder>, store: &str) -> String {
    let mut text = match holder {
        Some(holder) if holder.foreign => {
            format!("{name:?} is held by another kind of client ({})", holder.owner)
        }
        Some(holder) => format!("{name:?} is held by {}", holder.owner),
        None => format!("{name:?} is held by another client"),
    };
    if let Some(left) = holder.and_then(|h| h.ttl_left) {
        text += &format!(", lease ends in {left:.1?}");
    }
    if waited > Duration::ZERO {
        text += &format!("; waited {waited:.1?}");
    }
    text + &format!("; store: {store}")
}

fn no_answer(
    operation: &Operation,
    name: &LockName,
    store: &str,
    source: &StoreError,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    write!(f, "`{operation}` of {name:?} on {store} has no answer")?;
    append_cause(source, f)
}

fn cannot_connect(store: &str, source: &StoreError, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(f, "cannot use the store `{store}`")?;
    append_cause(source, f)
}

/// Appends the cause in the alternate form.
fn append_cause(source: &StoreError, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    if f.alternate() { write!(f, ": {source}") } else { Ok(()) }
}

/// The number of holders that the text of an error lists.
const HOLDERS_LISTED: usize = 8;

fn pool_busy(name: &LockName, wanted: usize, waited: Duration, members: &[PoolMember], store: &str) -> String {
    let all = members.len();
    let free = members.iter().filter(|member| member.lock.holder.is_none()).count();
    let mut text = match wanted {
        1 => format!("none of the {all} members of pool {name:?} is free"),
        _ => format!("{wanted} of the {all} members of pool {name:?} are not free at the same time, {free} free"),
    };
    let held = || members.iter().filter_map(|m| m.lock.holder.as_ref().map(|holder| (m.index, &holder.owner)));
    for (number, (index, owner)) in held().take(HOLDERS_LISTED).enumerate() {
        let separator = if number == 0 { ":" } else { "," };
        text += &format!("{separator} {index} is held by {owner}");
    }
    let more = held().count().saturating_sub(HOLDERS_LISTED);
    if more > 0 {
        text += &format!(", and {more} more");
    }
    if waited > Duration::ZERO {
        text += &format!("; waited {waited:.1?}");
    }
    text + &format!("; store: {store}")
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;
    use crate::store::StoreErrorKind;

    #[test]
    fn only_the_alternate_form_contains_the_cause() {
        let cause = StoreError::new(StoreErrorKind::Unreachable, "connection refused");
        let name = LockName::new("order:42").expect("valid");
        let (operation, store) = (Operation::Acquire, "redis://h:1".to_owned());
        let unanswered = Error::Store { operation, name, store: store.clone(), source: cause.clone() };
        for error in [unanswered, Error::Connect { store, source: cause.clone() }] {
            assert!(!error.to_string().contains("refused"), "{error}");
            assert_eq!(format!("{error:#}"), format!("{error}: {cause}"));
            assert_eq!(error.source().expect("a cause").to_string(), cause.to_string());
        }
    }
}
