//! Names of keys and channels. A lock's key is its own; helpers begin with `lh1:` and are shared by
//! all namespaces.

use crate::facts::{Invalid, KeySpace, LockName, Token};
use crate::store::{StoreError, StoreErrorKind};

pub(super) const FENCE: &str = "lh1:fence";
const QUEUE: &str = "lh1:queue:";
const POLLS: &str = "lh1:polls:";
/// No namespace has an `@`.
const RAW_INDEX: &str = "lh1:index:@raw";

/// The keys of one lock.
pub(super) struct LockKeys {
    queue: String,
    polls: String,
}

impl LockKeys {
    /// # Errors
    /// `Refused` for a name that would fall among the helper keys.
    pub(super) fn new(keys: &KeySpace, name: &LockName) -> Result<Self, StoreError> {
        let lock = keys.key(name).map_err(refused)?;
        Ok(Self { queue: [QUEUE, &lock].concat(), polls: [POLLS, &lock].concat() })
    }

    pub(super) fn lock(&self) -> &str {
        &self.queue[QUEUE.len()..]
    }

    pub(super) fn queue(&self) -> &str {
        &self.queue
    }

    /// As the scripts expect them.
    pub(super) fn all(&self) -> [&str; 4] {
        [self.lock(), &self.queue, FENCE, &self.polls]
    }
}

/// Keys and channels of a whole namespace.
pub(super) struct Shared {
    /// Long-held locks, by the end of their lease.
    pub(super) index: String,
    /// The same for raw names, which all namespaces share.
    pub(super) raw_index: &'static str,
    /// Where events are published.
    pub(super) events: String,
    /// The fleet's counters.
    pub(super) stats: String,
}

impl Shared {
    pub(super) fn new(keys: &KeySpace) -> Self {
        let ns = keys.namespace().as_str();
        Self {
            index: format!("lh1:index:{ns}"),
            raw_index: RAW_INDEX,
            events: format!("lh1:events:{ns}"),
            stats: format!("lh1:stats:{ns}"),
        }
    }
}

/// The channel of one process: nobody can guess it.
pub(super) fn random_inbox() -> String {
    format!("lh1:inbox:{}", &Token::random().reveal()[..22])
}

pub(super) fn refused(invalid: Invalid) -> StoreError {
    StoreError::new(StoreErrorKind::Refused, invalid.to_string())
}
