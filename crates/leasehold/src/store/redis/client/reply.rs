//! Reads replies: error codes, words, numbers and lists.

use super::resp::{ServerError, Value};
use crate::facts::Fence;
use crate::store::{StoreError, StoreErrorKind as Kind};

/// Longest part of a server's message that an error repeats.
const DETAIL_CHARS: usize = 200;

/// Translates an error reply.
pub(crate) fn from_server(error: &ServerError) -> StoreError {
    let (code, message) = (error.code.as_str(), error.detail.as_str());
    let kind = match code {
        "OOM" => Kind::OutOfMemory,
        "READONLY" => Kind::ReadOnly,
        "BUSY" => Kind::Busy,
        "LOADING" => Kind::Loading,
        "MISCONF" => Kind::CannotSave,
        "NOAUTH" | "WRONGPASS" => Kind::NotAuthenticated,
        "NOPERM" => Kind::NotPermitted,
        "WRONGTYPE" => Kind::WrongType,
        "CLUSTERDOWN" | "MOVED" | "ASK" | "CROSSSLOT" => Kind::Cluster,
        "TRYAGAIN" | "MASTERDOWN" | "NOREPLICAS" => Kind::TryAgain,
        "FENCE" => Kind::FenceUnusable,
        "NOSCRIPT" => Kind::Script,
        "UNKILLABLE" | "NOTBUSY" => Kind::Busy,
        "ERR" if message.starts_with("max number of clients") => Kind::TooManyClients,
        "ERR" if message.contains("invalid password") || message.contains("without any password") => {
            Kind::NotAuthenticated
        }
        // Lua errors, and commands inside a script that the server does not know.
        "ERR" if message.contains("user_script") || message.contains("script") => Kind::Script,
        _ => Kind::Other,
    };
    let detail = match kind {
        Kind::Other => format!("{code} {message}"),
        Kind::Script | Kind::NotPermitted | Kind::WrongType | Kind::Cluster | Kind::CannotSave => message.to_owned(),
        // The kind alone is a complete message.
        _ => String::new(),
    };
    StoreError::new(kind, detail.chars().filter(|c| !c.is_control()).take(DETAIL_CHARS).collect::<String>())
}

/// The error for a reply that `what` never gives.
pub(crate) fn unexpected_reply(what: &'static str) -> StoreError {
    StoreError::new(Kind::Other, format!("unexpected reply to {what}"))
}

/// The text of a reply; `None` if it is not UTF-8.
pub(crate) fn word(value: &Value) -> Option<&str> {
    match value {
        Value::Bulk(bytes) => std::str::from_utf8(bytes).ok(),
        Value::Simple(text) => Some(text),
        _ => None,
    }
}

/// The text of a reply, with invalid UTF-8 replaced.
pub(crate) fn text(value: &Value) -> Option<String> {
    match value {
        Value::Bulk(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        Value::Simple(text) => Some(text.clone()),
        _ => None,
    }
}

/// A number, either an integer reply or decimal text.
pub(crate) fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(n) => u64::try_from(*n).ok(),
        Value::Bulk(digits) => std::str::from_utf8(digits).ok()?.parse().ok(),
        _ => None,
    }
}

/// A fence as the scripts write it; `None` if it is out of range.
pub(crate) fn fence(value: &Value) -> Option<Fence> {
    number(value).filter(|n| (1..=Fence::MAX).contains(n)).map(Fence::new)
}

/// The items of an array reply.
pub(crate) fn items(value: Value, what: &'static str) -> Result<Vec<Value>, StoreError> {
    match value {
        Value::Array(items) => Ok(items),
        _ => Err(unexpected_reply(what)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::resp;
    use super::*;

    /// Parses an error line as the server sends it.
    fn error_of(line: &str) -> StoreError {
        match resp::read(format!("-{line}\r\n").as_bytes()) {
            Ok(resp::Read::Value(Value::Error(error), _)) => from_server(&error),
            other => panic!("{other:?} is not an error"),
        }
    }

    #[test]
    fn every_code_has_its_kind() {
        for (line, kind) in [
            ("OOM command not allowed when used memory > 'maxmemory'.", Kind::OutOfMemory),
            ("READONLY You can't write against a read only replica.", Kind::ReadOnly),
            ("BUSY Redis is busy running a script.", Kind::Busy),
            ("LOADING Redis is loading the dataset in memory", Kind::Loading),
            ("MISCONF Redis is configured to save RDB snapshots", Kind::CannotSave),
            ("NOAUTH HELLO must be called with the client already authenticated", Kind::NotAuthenticated),
            ("WRONGPASS invalid username-password pair or user is disabled.", Kind::NotAuthenticated),
            ("NOPERM this user has no permissions to run the 'ssubscribe' command", Kind::NotPermitted),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", Kind::WrongType),
            ("CLUSTERDOWN Hash slot not served", Kind::Cluster),
            ("MOVED 3999 127.0.0.1:6381", Kind::Cluster),
            ("ASK 3999 127.0.0.1:6381", Kind::Cluster),
            ("CROSSSLOT Keys in request don't hash to the same slot", Kind::Cluster),
            ("TRYAGAIN Multiple keys request during rehashing of slot", Kind::TryAgain),
            ("MASTERDOWN Link with MASTER is down", Kind::TryAgain),
            ("NOREPLICAS Not enough good replicas to write.", Kind::TryAgain),
            ("FENCE the counter is above 2^52", Kind::FenceUnusable),
            ("NOSCRIPT No matching script.", Kind::Script),
            ("ERR user_script:3: attempt to index a nil value script: 1234", Kind::Script),
            ("ERR max number of clients reached", Kind::TooManyClients),
            ("ERR something new", Kind::Other),
            ("SURPRISE something newer", Kind::Other),
        ] {
            assert_eq!(error_of(line).kind(), kind, "{line}");
        }
    }

    #[test]
    fn a_message_is_shortened_and_drives_no_terminal() {
        let text = error_of(&format!("ODD \u{1b}[2J{}", "x".repeat(999))).to_string();
        assert!(text.len() < 300 && !text.contains('\u{1b}'), "{text}");
    }
}
