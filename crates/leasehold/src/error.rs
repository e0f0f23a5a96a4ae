//! One error per decision the caller can take.

use std::fmt;
use std::time::Duration;

use crate::facts::{Invalid, LockName};
use crate::inspect::view::PoolMember;
use crate::loss::LossReason;
use crate::store::{Holder, Operation, StoreError};

/// Why a call did not do what it was asked.
///
/// The text of an error does not repeat its cause, which is its [`source`](std::error::Error::source). The alternate
/// form appends it, as logs need it: `format!("{error:#}")`.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Somebody else holds the lock, and the time to wait for it is over (or was zero).
    #[error("{}", not_acquired(name, *waited, holder.as_deref(), store))]
    NotAcquired {
        /// The lock.
        name: LockName,
        /// How long it was waited for.
        waited: Duration,
        /// Who holds it, as far as is known.
        holder: Option<Box<Holder>>,
        /// Which store was asked.
        store: String,
    },
    /// So many members of a pool could not be had, and the time to wait for them is over (or was zero).
    #[error("{}", pool_busy(name, *wanted, *waited, members, store))]
    PoolBusy {
        /// The pool.
        name: LockName,
        /// How many members were asked for.
        wanted: usize,
        /// All of its members, and who holds them, as far as is known. Who waits is not looked at.
        members: Vec<PoolMember>,
        /// How long they were waited for.
        waited: Duration,
        /// Which store was asked.
        store: String,
    },
    /// The lease was lost while work was going on. The work must stop: somebody else may hold the
    /// lock by now.
    #[error("the lease on {name:?} was lost: {why}")]
    Lost {
        /// The lock.
        name: LockName,
        /// Why.
        why: LossReason,
    },
    /// The store did not answer, or not with what was asked. Whether the request was carried out is
    /// unknown; nothing is held on this side, and whatever the store may hold is given back in the
    /// background.
    #[error(fmt = no_answer)]
    Store {
        /// What was asked.
        operation: Operation,
        /// Of which lock.
        name: LockName,
        /// Which store.
        store: String,
        /// What went wrong.
        source: StoreError,
    },
    /// What the store holds under a request id is not what was asked for: another type, or another program
    /// wrote it.
    #[error("what is stored for {name:?} cannot be read as the type that was asked for: {problem}")]
    Unreadable {
        /// The request id.
        name: LockName,
        /// What was expected, in the parser's words.
        problem: String,
    },
    /// This id belongs to work that was asked for with another payload.
    #[error("{name:?} belongs to a request with another payload; use a new id for a new request")]
    OtherPayload {
        /// The request id.
        name: LockName,
    },
    /// The work under this id was done, and its result could not be stored: it is too large, or cannot be
    /// written. It is not done again until that is [forgotten](crate::once::Once::forget) or its time is over.
    #[error(
        "the work of {name:?} was done by {by}, but its result could not be stored: {problem}. Forget {name:?} to have \
         the work done again"
    )]
    ResultNotStored {
        /// The id of the work.
        name: LockName,
        /// The runner that did it.
        by: String,
        /// Why its result is not stored.
        problem: String,
    },
    /// The store itself cannot be used: a bad URL, a file that cannot be opened, a wrong password.
    #[error(fmt = cannot_connect)]
    Connect {
        /// Which store, without secrets.
        store: String,
        /// What went wrong.
        source: StoreError,
    },
    /// A name, ttl, owner or setting was refused before anything was sent.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// [`install`](crate::install) was called before in this process.
    #[error("a lock manager is installed already: `leasehold::install` is called once, at the start of the program")]
    AlreadyInstalled,
    /// `#[lock]` says no `locks = …`, and no manager was installed for the whole process.
    #[error(
        "no lock manager for {name:?}: call `leasehold::install` at the start of the program, or say `#[lock(locks = …)]`"
    )]
    NotInstalled {
        /// The lock.
        name: LockName,
    },
    /// A call of [`blocking`](crate::blocking) inside an async runtime: waiting there would stop other
    /// tasks, perhaps the one that holds the lock. Nothing was asked.
    #[error(
        "a blocking call inside an async runtime would stop its other tasks: use `leasehold::LockManager` there, or \
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
    /// Whether the same call can succeed later without anybody changing anything.
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

    /// The lock (or pool) it is about, if it is about one.
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
        None => format!("{name:?} is held by somebody else"),
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

/// Members that an error lists; a terminal has so many lines.
const LISTED: usize = 8;

fn pool_busy(name: &LockName, wanted: usize, waited: Duration, members: &[PoolMember], store: &str) -> String {
    let all = members.len();
    let free = members.iter().filter(|member| member.lock.holder.is_none()).count();
    let mut text = match wanted {
        1 => format!("none of the {all} members of pool {name:?} is free"),
        _ => format!("{wanted} of the {all} members of pool {name:?} cannot be had together, {free} free"),
    };
    let held = || members.iter().filter_map(|m| m.lock.holder.as_ref().map(|holder| (m.index, &holder.owner)));
    for (number, (index, owner)) in held().take(LISTED).enumerate() {
        let separator = if number == 0 { ":" } else { "," };
        text += &format!("{separator} {index} is held by {owner}");
    }
    let more = held().count().saturating_sub(LISTED);
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
    fn a_text_leaves_the_cause_to_its_source_and_the_alternate_form_appends_it() {
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
