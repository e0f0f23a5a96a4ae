use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::Invalid;

/// The secret of one attempt to hold a lock: whoever knows it can renew and release.
///
/// 192 random bits from the operating system, fresh for every attempt, written as 32 characters.
/// It is a capability, so it never shows itself: `Debug` prints the [`HolderId`], and there is no
/// `Display`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token([u8; Token::LEN]);

impl Token {
    /// Characters in a token.
    pub const LEN: usize = 32;

    /// A fresh token.
    ///
    /// # Panics
    /// When the operating system has no randomness to give: nothing safe can be done then.
    pub fn random() -> Self {
        let mut bytes = [0_u8; Self::LEN / 4 * 3];
        getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
        let mut text = [0_u8; Self::LEN];
        URL_SAFE_NO_PAD.encode_slice(bytes, &mut text).expect("24 bytes are 32 characters of base64");
        Self(text)
    }

    /// Reads back what [`Token::reveal`] wrote.
    ///
    /// # Errors
    /// [`Invalid::Id`] when it is not 32 characters of `[A-Za-z0-9_-]`.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        let bytes: [u8; Self::LEN] = text
            .as_bytes()
            .try_into()
            .map_err(|_| Invalid::Id { what: "token", problem: "is not 32 characters long" })?;
        let ours = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_' || *b == b'-';
        if !bytes.iter().all(ours) {
            return Err(Invalid::Id { what: "token", problem: "has a character outside A-Z a-z 0-9 _ -" });
        }
        Ok(Self(bytes))
    }

    /// The secret itself, for a script that must hand it to another process. Never log it.
    pub fn reveal(&self) -> &str {
        std::str::from_utf8(&self.0).expect("a token is ASCII")
    }

    /// The public name of the holder of this token.
    pub fn holder_id(&self) -> HolderId {
        HolderId::of(&self.0)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token(holder {})", self.holder_id())
    }
}

/// Names a holder without its secret: the first 12 hex digits of the SHA-1 of its token.
///
/// For a foreign holder (a key another client wrote) it is taken from the whole value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HolderId([u8; HolderId::LEN]);

impl HolderId {
    /// Hex digits in a holder id.
    pub const LEN: usize = 12;

    /// The id of whoever wrote `secret`.
    pub(crate) fn of(secret: &[u8]) -> Self {
        let hex = sha1_smol::Sha1::from(secret).digest().to_string();
        let mut id = [0_u8; Self::LEN];
        id.copy_from_slice(&hex.as_bytes()[..Self::LEN]);
        Self(id)
    }

    /// Reads an id as a person typed it.
    ///
    /// # Errors
    /// [`Invalid::Id`] when it is not 12 lower-case hex digits.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        let wrong = Invalid::Id { what: "holder id", problem: "is not 12 lower-case hex digits" };
        let id: [u8; Self::LEN] = text.as_bytes().try_into().map_err(|_| wrong.clone())?;
        let hex = |b: &u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        if id.iter().all(hex) { Ok(Self(id)) } else { Err(wrong) }
    }

    /// The twelve digits.
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
    fn tokens_are_fresh_and_read_back() {
        let (a, b) = (Token::random(), Token::random());
        assert_ne!(a, b);
        assert_eq!(Token::parse(a.reveal()), Ok(a));
        assert!(Token::parse("short").is_err());
        assert!(Token::parse(&" ".repeat(32)).is_err());
    }

    #[test]
    fn a_token_does_not_show_itself() {
        let token = Token::random();
        assert!(!format!("{token:?}").contains(token.reveal()));
        assert_eq!(HolderId::parse(token.holder_id().as_str()), Ok(token.holder_id()));
        assert!(HolderId::parse("XYZ").is_err());
    }
}
