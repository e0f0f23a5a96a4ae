//! What the server or the connection said, by what it means.

use redis::{ErrorKind, RedisError, ServerError};

use crate::store::{StoreError, StoreErrorKind as Kind};

/// Longest piece of a server's message that is repeated.
const DETAIL_CHARS: usize = 200;

/// Maps an error of the connection, or one the server answered a whole request with.
pub(super) fn from_redis(error: &RedisError) -> StoreError {
    if let Some(code) = error.code() {
        return from_code(code, error.detail().unwrap_or(""));
    }
    let (kind, detail) = match error.kind() {
        _ if error.is_timeout() => (Kind::NoAnswer, String::new()),
        // The texts of I/O errors are the operating system's; they name no secret.
        ErrorKind::Io => (Kind::Unreachable, error.to_string()),
        ErrorKind::AuthenticationFailed => (Kind::NotAuthenticated, String::new()),
        ErrorKind::RESP3NotSupported => (Kind::Refused, "leasehold needs Redis 7.0 or Valkey 7.2 at least".into()),
        ErrorKind::InvalidClientConfig => (Kind::Refused, String::new()),
        // A reply nobody can read: the stream cannot be trusted any further.
        ErrorKind::Parse => (Kind::Unreachable, "the server sent something unreadable".into()),
        _ => (Kind::Other, String::new()),
    };
    StoreError::new(kind, detail)
}

/// Maps an error that is one reply of several.
pub(super) fn from_server(error: &ServerError) -> StoreError {
    from_code(error.code(), error.details().unwrap_or(""))
}

fn from_code(code: &str, message: &str) -> StoreError {
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
        // The kind says it all.
        _ => String::new(),
    };
    StoreError::new(kind, detail.chars().filter(|c| !c.is_control()).take(DETAIL_CHARS).collect::<String>())
}

/// A reply that no script or command of ours gives.
pub(super) fn strange(what: &'static str) -> StoreError {
    StoreError::new(Kind::Other, format!("a reply to {what} makes no sense"))
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::*;

    /// The line as the server sends it.
    fn kind_of(line: &str) -> Kind {
        let value = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).expect("a reply");
        let Value::ServerError(error) = value else { panic!("{value:?} is no error") };
        assert_eq!(from_redis(&error.clone().into()).kind(), from_server(&error).kind(), "{line}");
        from_server(&error).kind()
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
            assert_eq!(kind_of(line), kind, "{line}");
        }
    }

    #[test]
    fn a_broken_connection_may_have_carried_the_request_out() {
        let cut = RedisError::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe));
        let late = RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut));
        assert_eq!(from_redis(&cut).kind(), Kind::Unreachable);
        assert_eq!(from_redis(&late).kind(), Kind::NoAnswer);
        assert!(from_redis(&cut).may_have_happened() && from_redis(&late).may_have_happened());
    }

    #[test]
    fn a_message_is_shortened_and_drives_no_terminal() {
        let value = redis::parse_redis_value(format!("-ODD \u{1b}[2J{}\r\n", "x".repeat(999)).as_bytes());
        let Ok(Value::ServerError(error)) = value else { panic!("no error") };
        let text = from_server(&error).to_string();
        assert!(text.len() < 300 && !text.contains('\u{1b}'), "{text}");
    }
}
