use std::fmt;

use super::invalid::{Invalid, parse_base64, random_base64};

/// Identifies one claim on a request id: 128 random bits, new for every attempt to create, written as 22 characters.
///
/// A creator recognises its own claim by it, even if the reply to the creation was lost. It is not a secret: it is stored
/// in the binding, where every client can read it, so it protects against mistakes and not against attacks.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClaimId([u8; ClaimId::LEN]);

impl ClaimId {
    /// The number of characters of a claim id.
    pub const LEN: usize = 22;

    /// Creates a new claim id.
    ///
    /// # Panics
    /// When the operating system returns no random bytes.
    pub fn random() -> Self {
        Self(random_base64())
    }

    /// Parses a claim id.
    ///
    /// # Errors
    /// [`Invalid::Id`] when it is not 22 characters of `[A-Za-z0-9_-]`.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        parse_base64(text, "claim id", "is not 22 characters long").map(Self)
    }

    /// Returns the claim id as text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("a claim id is ASCII")
    }
}

impl fmt::Display for ClaimId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for ClaimId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_id_is_parsed_from_its_text() {
        let id = ClaimId::random();
        assert_eq!(ClaimId::parse(id.as_str()), Ok(id.clone()));
        assert_ne!(id, ClaimId::random());
        for bad in ["", "short", "has a space in the mid", "ünïünïünïünï"] {
            assert!(ClaimId::parse(bad).is_err(), "{bad}");
        }
    }
}
