use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::Invalid;

/// Names one claim on a request id: 128 random bits, fresh for every attempt to create, written as 22
/// characters. By it a creator knows its own claim again, also when the answer was lost on the way.
///
/// It is no secret: everybody who reads the binding sees it. It keeps those apart who mean well.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClaimId([u8; ClaimId::LEN]);

impl ClaimId {
    /// Characters in a claim id.
    pub const LEN: usize = 22;

    /// A fresh one.
    ///
    /// # Panics
    /// When the operating system has no randomness to give: nothing safe can be done then.
    pub fn random() -> Self {
        let mut bytes = [0_u8; 16];
        getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
        let mut text = [0_u8; Self::LEN];
        URL_SAFE_NO_PAD.encode_slice(bytes, &mut text).expect("16 bytes are 22 characters of base64");
        Self(text)
    }

    /// Reads back what [`ClaimId::as_str`] wrote.
    ///
    /// # Errors
    /// [`Invalid::Id`] when it is not 22 characters of `[A-Za-z0-9_-]`.
    pub fn parse(text: &str) -> Result<Self, Invalid> {
        let wrong = |problem| Invalid::Id { what: "claim id", problem };
        let bytes: [u8; Self::LEN] = text.as_bytes().try_into().map_err(|_| wrong("is not 22 characters long"))?;
        let ours = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_' || *b == b'-';
        if !bytes.iter().all(ours) {
            return Err(wrong("has a character outside A-Z a-z 0-9 _ -"));
        }
        Ok(Self(bytes))
    }

    /// As text.
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
    fn is_read_back_as_it_was_written() {
        let id = ClaimId::random();
        assert_eq!(ClaimId::parse(id.as_str()), Ok(id.clone()));
        assert_ne!(id, ClaimId::random());
        for bad in ["", "short", "has a space in the mid", "ünïünïünïünï"] {
            assert!(ClaimId::parse(bad).is_err(), "{bad}");
        }
    }
}
