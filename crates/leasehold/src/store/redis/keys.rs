//! Names of keys and channels. `KeySpace` makes the key of a lock. Helper keys begin with `lh1:` and are shared by all
//! namespaces.

use crate::facts::{KeySpace, LockName, Token};
use crate::store::StoreError;

pub(super) const FENCE: &str = "lh1:fence";
const QUEUE: &str = "lh1:queue:";
const POLLS: &str = "lh1:polls:";
/// The index of raw names. No namespace contains an `@`.
const RAW_INDEX: &str = "lh1:index:@raw";

/// The keys of one lock.
pub(super) struct LockKeys {
    queue: String,
    polls: String,
}

impl LockKeys {
    /// Derives the keys of a lock.
    ///
    /// # Errors
    /// `Refused` for a name whose key would collide with the helper keys.
    pub(super) fn new(keys: &KeySpace, name: &LockName) -> Result<Self, StoreError> {
        let lock = keys.key(name)?;
        Ok(Self { queue: [QUEUE, &lock].concat(), polls: [POLLS, &lock].concat() })
    }

    pub(super) fn lock(&self) -> &str {
        &self.queue[QUEUE.len()..]
    }

    pub(super) fn queue(&self) -> &str {
        &self.queue
    }

    /// The keys in the order that the scripts expect.
    pub(super) fn all(&self) -> [&str; 4] {
        [self.lock(), &self.queue, FENCE, &self.polls]
    }
}

/// Keys and channels that all locks of a namespace share.
pub(super) struct NamespaceKeys {
    /// The index of long-held locks, scored by the end of their lease.
    pub(super) index: String,
    /// The index of long-held raw names, which all namespaces share.
    pub(super) raw_index: &'static str,
    /// The channel that events are published on.
    pub(super) events: String,
    /// The fleet's counters.
    pub(super) stats: String,
}

impl NamespaceKeys {
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

/// A random name for the inbox channel of one process, which other clients cannot guess.
pub(super) fn random_inbox() -> String {
    format!("lh1:inbox:{}", &Token::random().reveal()[..22])
}
