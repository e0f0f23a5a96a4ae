use std::fmt;

use super::invalid::{Invalid, parse_base64, random_base64};

/// The secret of one attempt to hold a lock. It alone renews and releases.
///
/// 192 random bits from the operating system, new for every attempt, written as 32 characters. `Debug` prints the
/// [`HolderId`], and there is no `Display`, so a token does not get into logs by accident.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token([u8; Token::LEN]);

impl Token {
    /// The number of characters of a token.
    pub const LEN: usize = 32;

    /// Creates a new token.
    ///
    /// # Panics
    /// When the operating system returns no random bytes.
    pub fn random() -> Self {
        Self(random_base64())
    }

    /// Parses a token.
    ///
    /// # Errors
    /// [`Invalid::Id`] when it is not 32 characters of `[A-Za-z0-9_-]`.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        parse_base64(text, "token", "is not 32 characters long").map(Self)
    }

    /// Returns the secret, to pass it to another process. Never log it.
    pub fn reveal(&self) -> &str {
        std::str::from_utf8(&self.0).expect("a token is ASCII")
    }

    /// Returns the public id of the holder of this token.
    pub fn holder_id(&self) -> HolderId {
        HolderId::of(&self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token(holder {})", self.holder_id())
    }
}

/// Identifies a holder without its secret: the first 12 hex digits of the SHA-1 of its token.
///
/// For a foreign holder it is computed from the whole value at the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HolderId([u8; HolderId::LEN]);

impl HolderId {
    /// The number of hex digits of a holder id.
    pub const LEN: usize = 12;

    /// Computes the id for a secret.
    pub(crate) fn of(secret: &[u8]) -> Self {
        let hex = sha1_smol::Sha1::from(secret).digest().to_string();
        let mut id = [0_u8; Self::LEN];
        id.copy_from_slice(&hex.as_bytes()[..Self::LEN]);
        Self(id)
    }

    /// Parses a holder id.
    ///
    /// # Errors
    /// [`Invalid::Id`] when it is not 12 lower-case hex digits.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        let wrong = Invalid::Id { what: "holder id", problem: "is not 12 lower-case hex digits" };
        let id: [u8; Self::LEN] = text.as_bytes().try_into().map_err(|_| wrong.clone())?;
        let hex = |b: &u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        if id.iter().all(hex) { Ok(Self(id)) } else { Err(wrong) }
    }

    /// Returns the holder id as text.
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("hex is ASCII")
    }
}

impl fmt::Display for HolderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for HolderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_unique_and_parsed_from_their_text() {
        let (a, b) = (Token::random(), Token::random());
        assert_ne!(a, b);
        assert_eq!(Token::parse(a.reveal()), Ok(a));
        assert!(Token::parse("short").is_err());
        assert!(Token::parse(&" ".repeat(32)).is_err());
    }

    #[test]
    fn debug_output_does_not_contain_the_token() {
        let token = Token::random();
        assert!(!format!("{token:?}").contains(token.reveal()));
        assert_eq!(HolderId::parse(token.holder_id().as_str()), Ok(token.holder_id()));
        assert!(HolderId::parse("XYZ").is_err());
    }
}
