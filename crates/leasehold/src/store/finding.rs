use serde::Serialize;

/// One result of a checkup: whether the store can keep one promise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The severity.
    pub level: Level,
    /// The subject of the check, in a word.
    pub check: &'static str,
    /// The result and, if it is not fine, what to do.
    pub text: String,
}

/// The severity of a [`Finding`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// As it should be.
    Ok,
    /// A promise is weaker than it could be, or could not be checked.
    Warn,
    /// A promise cannot be kept.
    Bad,
}

impl Finding {
    pub(crate) fn ok(check: &'static str, text: impl Into<String>) -> Self {
        Self { level: Level::Ok, check, text: text.into() }
    }

    pub(crate) fn warn(check: &'static str, text: impl Into<String>) -> Self {
        Self { level: Level::Warn, check, text: text.into() }
    }

    pub(crate) fn bad(check: &'static str, text: impl Into<String>) -> Self {
        Self { level: Level::Bad, check, text: text.into() }
    }
}

impl std::fmt::Display for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Bad => "bad",
        })
    }
}
