//! The error of values that are out of bounds or malformed, and their checks.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

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
    /// A ttl outside [`Ttl::MIN`](super::Ttl::MIN)`..=`[`Ttl::MAX`](super::Ttl::MAX) or with a fraction of a millisecond.
    #[error("ttl {given:?} {problem}")]
    Ttl {
        /// The given duration.
        given: Duration,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A retention outside [`Retention::MIN`](super::Retention::MIN)`..=`[`Retention::MAX`](super::Retention::MAX) or with a fraction of a millisecond.
    #[error("it cannot be kept for {given:?}: that {problem}")]
    Retention {
        /// The given duration.
        given: Duration,
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
pub(super) fn random_base64<const CHARS: usize>() -> [u8; CHARS] {
    let mut bytes = [0_u8; 24];
    let bytes = &mut bytes[..CHARS * 3 / 4];
    getrandom::fill(bytes).expect("the operating system returns random bytes");
    let mut text = [0_u8; CHARS];
    URL_SAFE_NO_PAD.encode_slice(bytes, &mut text).expect("as many characters as the bytes need");
    text
}

/// Checks the length and the characters of a random id.
pub(super) fn parse_base64<const CHARS: usize>(
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

/// Returns what is wrong with a name or an owner.
pub(super) fn text_problem(text: &str, max_bytes: usize, too_long: &'static str) -> Option<&'static str> {
    if text.is_empty() {
        Some("is empty")
    } else if text.len() > max_bytes {
        Some(too_long)
    } else if text.chars().any(char::is_control) {
        Some("has control characters")
    } else {
        None
    }
}

/// Returns what is wrong with a ttl or a retention.
pub(super) const fn duration_problem(
    given: Duration,
    (min, too_short): (Duration, &'static str),
    (max, too_long): (Duration, &'static str),
) -> Option<&'static str> {
    if given.as_nanos() < min.as_nanos() {
        Some(too_short)
    } else if given.as_nanos() > max.as_nanos() {
        Some(too_long)
    } else if !given.subsec_nanos().is_multiple_of(1_000_000) {
        Some("is not a whole number of milliseconds")
    } else {
        None
    }
}
