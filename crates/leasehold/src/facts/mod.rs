//! Names, owners, tokens, fences and ttls. Each is checked once, when it is created.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

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

/// A value that is out of bounds or malformed. Nothing was sent to the store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Invalid {
    /// A lock name that is empty, too long, or has control characters.
    #[error("lock name {name:?} {problem}")]
    Name {
        /// The beginning of the name.
        name: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A ttl outside [`Ttl::MIN`]`..=`[`Ttl::MAX`] or with a fraction of a millisecond.
    #[error("ttl {given:?} {problem}")]
    Ttl {
        /// The given duration.
        given: std::time::Duration,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A retention outside [`Retention::MIN`]`..=`[`Retention::MAX`] or with a fraction of a millisecond.
    #[error("it cannot be kept for {given:?}: that {problem}")]
    Retention {
        /// The given duration.
        given: std::time::Duration,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A value that is too large or cannot be written as JSON.
    #[error("the value of {id:?} {problem}")]
    Value {
        /// The id under which it was to be stored.
        id: String,
        /// What is wrong with it.
        problem: String,
    },
    /// An owner that is empty, too long, or has control characters.
    #[error("owner {owner:?} {problem}")]
    Owner {
        /// The beginning of the owner.
        owner: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A malformed token, holder id, claim id, request id or node id.
    #[error("{what} {problem}")]
    Id {
        /// The kind of id. The text itself may be secret and is not repeated.
        what: &'static str,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A namespace or raw-name pattern that would let two names share a key.
    #[error("{setting} {given:?} {problem}")]
    Setting {
        /// The setting.
        setting: &'static str,
        /// Its value.
        given: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// Returns the first 64 characters of a text that may be too long for an error message.
pub(crate) fn beginning(text: &str) -> String {
    text.chars().take(64).collect()
}

/// Returns random bits of the operating system as base64, 6 per character.
fn random_base64<const CHARS: usize>() -> [u8; CHARS] {
    let mut bytes = [0_u8; 24];
    let bytes = &mut bytes[..CHARS * 3 / 4];
    getrandom::fill(bytes).expect("the operating system returns random bytes");
    let mut text = [0_u8; CHARS];
    URL_SAFE_NO_PAD.encode_slice(bytes, &mut text).expect("as many characters as the bytes need");
    text
}

/// Checks the length and the characters of a random id.
fn parse_base64<const CHARS: usize>(
    text: &str,
    what: &'static str,
    wrong_length: &'static str,
) -> Result<[u8; CHARS], Invalid> {
    let bytes: [u8; CHARS] = text.as_bytes().try_into().map_err(|_| Invalid::Id { what, problem: wrong_length })?;
    if bytes.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-')) {
        Ok(bytes)
    } else {
        Err(Invalid::Id { what, problem: "has a character outside A-Z a-z 0-9 _ -" })
    }
}
