//! The types of values.

use std::path::PathBuf;
use std::time::Duration;

use crate::facts::{Namespace, Owner, RawPattern, Ttl};
use crate::options::OnUnavailable;

/// The unparsed value of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Written {
    /// One value.
    Text(String),
    /// A list.
    List(Vec<String>),
}

/// A type of configuration values.
pub trait Setting: Sized {
    /// Parses a value.
    ///
    /// # Errors
    /// A sentence that says what is wrong and what would be right.
    fn parse(text: &str) -> Result<Self, String>;

    /// Returns the value as text, without secrets.
    fn show(&self) -> String;

    /// Parses a single value or a list. List types override it.
    ///
    /// # Errors
    /// A sentence that says what is wrong and what would be right.
    fn read(written: &Written) -> Result<Self, String> {
        match written {
            Written::Text(text) => Self::parse(text),
            Written::List(_) => Err("is a list, but one value is expected".into()),
        }
    }
}

/// Parses a duration: seconds (`2`, `0.5`) or a text such as `500ms`, `30s`, `5m`, `1h30m`, `1d`.
///
/// ```
/// use std::time::Duration;
/// use leasehold::config::duration;
///
/// assert_eq!(duration("90"), Ok(Duration::from_secs(90)));
/// assert_eq!(duration("1m30s"), Ok(Duration::from_secs(90)));
/// assert!(duration("1 fortnight").is_err());
/// ```
///
/// # Errors
/// A sentence that says what would be right.
pub fn duration(text: &str) -> Result<Duration, String> {
    let wrong =
        || format!("`{text}` is not a duration: write seconds (2, 0.5) or a text such as 500ms, 30s, 5m or 1h30m");
    if let Ok(seconds) = text.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).map_err(|_| wrong());
    }
    let mut total = Duration::ZERO;
    let mut rest = text.trim();
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).filter(|&n| n > 0).ok_or_else(wrong)?;
        let number: u32 = rest[..digits].parse().map_err(|_| wrong())?;
        let letters = rest[digits..].find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len() - digits);
        let unit = match &rest[digits..digits + letters] {
            "ms" => Duration::from_millis(1),
            "s" => Duration::from_secs(1),
            "m" => Duration::from_secs(60),
            "h" => Duration::from_secs(60 * 60),
            "d" => Duration::from_secs(24 * 60 * 60),
            _ => return Err(wrong()),
        };
        let part = unit.checked_mul(number).ok_or_else(wrong)?;
        total = total.checked_add(part).ok_or_else(wrong)?;
        rest = rest[digits + letters..].trim_start();
    }
    if text.trim().is_empty() { Err(wrong()) } else { Ok(total) }
}

impl Setting for Duration {
    fn parse(text: &str) -> Result<Self, String> {
        duration(text)
    }

    fn show(&self) -> String {
        if self.subsec_millis() == 0 { format!("{}s", self.as_secs()) } else { format!("{}ms", self.as_millis()) }
    }
}

impl Setting for Ttl {
    fn parse(text: &str) -> Result<Self, String> {
        Self::new(duration(text)?).map_err(|invalid| invalid.to_string())
    }

    fn show(&self) -> String {
        self.duration().show()
    }
}

impl Setting for bool {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(format!("`{text}` is neither true nor false")),
        }
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Setting for u32 {
    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| format!("`{text}` is not a whole number from 0 to {}", Self::MAX))
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl Setting for String {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(text.to_owned())
    }

    fn show(&self) -> String {
        self.clone()
    }
}

/// An optional value.
impl<T: Setting> Setting for Option<T> {
    fn parse(text: &str) -> Result<Self, String> {
        T::parse(text).map(Some)
    }

    fn show(&self) -> String {
        self.as_ref().map_or_else(|| "(none)".into(), Setting::show)
    }

    fn read(written: &Written) -> Result<Self, String> {
        T::read(written).map(Some)
    }
}

/// The path of a file or directory.
impl Setting for PathBuf {
    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() { Err("is empty: write a path".into()) } else { Ok(text.into()) }
    }

    fn show(&self) -> String {
        self.display().to_string()
    }
}

/// A list of texts; as text, separated by commas.
impl Setting for Vec<String> {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(text.split(',').map(str::trim).filter(|item| !item.is_empty()).map(str::to_owned).collect())
    }

    fn show(&self) -> String {
        self.join(", ")
    }

    fn read(written: &Written) -> Result<Self, String> {
        match written {
            Written::Text(text) => Self::parse(text),
            Written::List(items) => Ok(items.clone()),
        }
    }
}

impl Setting for Namespace {
    fn parse(text: &str) -> Result<Self, String> {
        Self::new(text).map_err(|invalid| invalid.to_string())
    }

    fn show(&self) -> String {
        if self.as_str().is_empty() { "(empty)".into() } else { self.as_str().into() }
    }
}

impl Setting for Owner {
    fn parse(text: &str) -> Result<Self, String> {
        Self::named(text).map_err(|invalid| invalid.to_string())
    }

    fn show(&self) -> String {
        self.task().to_owned()
    }
}

impl Setting for OnUnavailable {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "closed" => Ok(Self::FailClosed),
            "open" => Ok(Self::FailOpen),
            _ => Err(format!("`{text}` is neither `closed` nor `open`")),
        }
    }

    fn show(&self) -> String {
        match self {
            Self::FailClosed => "closed".into(),
            Self::FailOpen => "open".into(),
        }
    }
}

/// A list of patterns; as text, separated by commas.
impl Setting for Vec<RawPattern> {
    fn parse(text: &str) -> Result<Self, String> {
        patterns(Vec::parse(text)?)
    }

    fn show(&self) -> String {
        self.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    }

    fn read(written: &Written) -> Result<Self, String> {
        patterns(Vec::read(written)?)
    }
}

fn patterns(texts: Vec<String>) -> Result<Vec<RawPattern>, String> {
    texts.iter().map(|text| RawPattern::new(text).map_err(|invalid| invalid.to_string())).collect()
}

/// The directory of the journal, or `off`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JournalDir(pub Option<PathBuf>);

impl Setting for JournalDir {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("is empty: write a directory, or `off`".into()),
            "off" => Ok(Self(None)),
            dir => Ok(Self(Some(dir.into()))),
        }
    }

    fn show(&self) -> String {
        self.0.as_ref().map_or_else(|| "off".into(), |dir| dir.display().to_string())
    }
}

/// The URL of a store. `Debug` and [`Setting::show`] omit its secrets.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreUrl(String);

impl StoreUrl {
    /// Returns the URL of the SQLite store in its default place. A build without SQLite rejects it on connecting.
    pub(super) fn embedded() -> Self {
        Self("sqlite:".to_owned())
    }

    /// Returns the URL with its secrets.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl Setting for StoreUrl {
    fn parse(text: &str) -> Result<Self, String> {
        // `sqlite` without a colon is accepted too, because `sqlite:` needs quotes in YAML.
        crate::store::open::check_url(text).map_err(|error| error.detail().to_owned())?;
        Ok(Self(text.to_owned()))
    }

    fn show(&self) -> String {
        crate::store::open::without_secrets(&self.0)
    }
}

impl std::fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StoreUrl({})", self.show())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed() {
        let ms = Duration::from_millis;
        for (text, meant) in [
            ("2", ms(2_000)),
            ("0.5", ms(500)),
            ("0", ms(0)),
            ("250ms", ms(250)),
            ("30s", ms(30_000)),
            ("1h30m", ms(5_400_000)),
            ("1h 30m", ms(5_400_000)),
            ("1d", ms(86_400_000)),
        ] {
            assert_eq!(duration(text), Ok(meant), "{text}");
        }
        for bad in [
            "",
            " ",
            "soon",
            "-1",
            "5 parsecs",
            "s",
            "1.5h",
            "5x",
            "99999999999h",
            "NaN",
            "inf",
            "1e300",
            "4294967295d5ü",
        ] {
            assert!(duration(bad).is_err(), "{bad:?}");
        }
    }

    #[cfg(feature = "redis")]
    #[test]
    fn a_store_is_shown_without_its_password() {
        let store = StoreUrl::parse("redis://u:hunter2@h:1").expect("a URL");
        assert!(!format!("{store:?} {}", store.show()).contains("hunter2"));
    }

    #[cfg(feature = "redis")]
    #[test]
    fn a_bad_url_is_explained_without_its_secrets() {
        for (url, why) in [
            ("hunter2@h", "not the URL of a store"),
            ("redi://:hunter2@h", "not the URL of a store"),
            ("redis", "begins with redis://"),
            ("redis://:hunter2@", "the host is missing"),
            ("redis://:hunter2@h:x", "the port"),
            ("redis://:hunter2@h/x", "a database"),
            ("redis://:hunter2@a:1,,b:2", "not a list"),
            ("unix:///hunter2.sock", "Unix socket"),
            ("redis+unix:///hunter2.sock", "Unix socket"),
            ("redis+sentinel://:hunter2@h:26379", "clusters and sentinels are not supported"),
            ("redis-cluster://:hunter2@h", "clusters and sentinels are not supported"),
            ("valkey://:hunter2@h", "for Valkey, write redis://"),
        ] {
            let problem = StoreUrl::parse(url).expect_err(url);
            assert!(problem.contains(why) && !problem.contains("hunter2"), "{url}: {problem}");
        }
        for works in ["sqlite", "sqlite:", "sqlite:/a/b.db", "memory", "memory:", "redis://h", "redis://u:p@[::1]:1/3"]
        {
            assert!(StoreUrl::parse(works).is_ok(), "{works}");
        }
    }
}
