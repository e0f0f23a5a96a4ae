//! Facts: names, owners, tokens, fences and ttls. Parsed once, valid ever after.

mod claim_id;
mod fence;
mod name;
mod owner;
mod retention;
mod token;
mod ttl;

pub use claim_id::ClaimId;
pub use fence::Fence;
pub use name::{BindingKind, KeySpace, LockName, Namespace, RawPattern};
pub use owner::Owner;
pub use retention::Retention;
pub use token::{HolderId, Token};
pub use ttl::Ttl;

/// A value refused before anything was written: what was wrong with it, and what would be right.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Invalid {
    /// A lock name that is empty, too long, or holds control characters.
    #[error("lock name {name:?} {problem}")]
    Name {
        /// The beginning of the name that was refused.
        name: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A time-to-live outside [`Ttl::MIN`]`..=`[`Ttl::MAX`] or not in whole milliseconds.
    #[error("ttl {given:?} {problem}")]
    Ttl {
        /// The duration that was refused.
        given: std::time::Duration,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A time to keep something outside [`Retention::MIN`]`..=`[`Retention::MAX`] or not in whole milliseconds.
    #[error("keeping it for {given:?} is not possible: that {problem}")]
    Retention {
        /// The duration that was refused.
        given: std::time::Duration,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A value that is too large to be stored, or cannot be written as JSON.
    #[error("the value of {id:?} {problem}")]
    Value {
        /// What it was to be stored under.
        id: String,
        /// What is wrong with it.
        problem: String,
    },
    /// An owner that is empty, too long, or holds control characters.
    #[error("owner {owner:?} {problem}")]
    Owner {
        /// The beginning of the owner that was refused.
        owner: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A token, holder id, claim id or request id that cannot be one.
    #[error("{what} {problem}")]
    Id {
        /// Which kind of id it was; the text itself may be secret and is not repeated.
        what: &'static str,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A namespace or raw-name pattern that would let two names share a key.
    #[error("{setting} {given:?} {problem}")]
    Setting {
        /// The setting that was refused.
        setting: &'static str,
        /// Its value.
        given: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// The first characters of a text that is too long or too strange to be repeated whole.
pub(crate) fn beginning(text: &str) -> String {
    text.chars().take(64).collect()
}
