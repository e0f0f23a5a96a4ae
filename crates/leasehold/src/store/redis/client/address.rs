//! The address of a server: parsed from a URL, displayed without its secrets.

use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;

use crate::store::{StoreError, StoreErrorKind};

const DEFAULT_PORT: u16 = 6379;

/// A parsed `redis://[user:password@]host[:port][/database]`; `rediss://` for TLS.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Address {
    /// How to verify the server's certificate; `None` without TLS.
    pub(crate) tls: Option<Trust>,
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) database: u64,
    /// User and password. A password without a user belongs to the user `default`.
    pub(crate) login: Option<(String, String)>,
}

/// The certificate authorities that a server's certificate is verified against.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Trust {
    /// The system's CA store.
    Machine,
    /// Only the authorities in this file.
    File(PathBuf),
}

impl Address {
    /// Parses a URL.
    ///
    /// # Errors
    /// `Refused`. The text repeats no part of the URL, which may contain a password.
    pub(crate) fn parse(url: &str) -> Result<Self, StoreError> {
        let invalid = |why: &'static str| StoreError::new(StoreErrorKind::Refused, why);
        let (rest, encrypted) = match (url.strip_prefix("redis://"), url.strip_prefix("rediss://")) {
            (Some(rest), _) => (rest, false),
            (_, Some(rest)) => (rest, true),
            _ => return Err(invalid("the URL of a Redis store begins with redis:// or rediss://")),
        };
        if encrypted && !cfg!(feature = "tls") {
            return Err(invalid("rediss:// needs TLS: build leasehold with its feature `tls`"));
        }
        let not_decoded = || invalid("a `%` must be followed by two hex digits; write a literal `%` as %25");
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        if query.contains('@') {
            return Err(invalid("a `?` in a user or password must be written as %3F"));
        }
        let mut trust = Trust::Machine;
        for option in query.split('&').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                // URLs of other clients may ask for RESP3, which this client always uses.
                Some(("protocol", "resp3" | "3")) => {}
                Some(("ca", file)) if encrypted && !file.is_empty() => {
                    trust = Trust::File(percent_decoded(file).ok_or_else(not_decoded)?.into());
                }
                Some(("ca", _)) => return Err(invalid("`?ca=FILE` requires rediss:// and the name of a file")),
                _ => return Err(invalid("redis:// takes no options after `?`, and rediss:// only `ca=FILE`")),
            }
        }
        let (place, database) = rest.split_once('/').unwrap_or((rest, ""));
        if database.contains('@') {
            return Err(invalid("a `/` in a user or password must be written as %2F"));
        }
        let (login, place) = match place.rsplit_once('@') {
            Some((login, place)) => (Some(login), place),
            None => (None, place),
        };
        let (host, port) = host_and_port(place).map_err(invalid)?;
        let database = if database.is_empty() { Some(0) } else { number(database) };
        let database =
            database.ok_or_else(|| invalid("the part after the host and `/` must be the number of a database"))?;
        let login = match login.filter(|login| !login.is_empty()) {
            None => None,
            Some(login) => {
                let (user, password) = login.split_once(':').unwrap_or((login, ""));
                let user = if user.is_empty() { "default" } else { user };
                let decode = |text: &str| percent_decoded(text).ok_or_else(not_decoded);
                Some((decode(user)?, decode(password)?))
            }
        };
        let tls = encrypted.then_some(trust);
        Ok(Self { tls, host: host.to_owned(), port, database, login })
    }
}

/// Writes the address without user and password.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port, database, .. } = self;
        let scheme = if self.tls.is_some() { "rediss" } else { "redis" };
        if host.contains(':') {
            write!(f, "{scheme}://[{host}]:{port}")?;
        } else {
            write!(f, "{scheme}://{host}:{port}")?;
        }
        if *database != 0 {
            write!(f, "/{database}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Splits the host from the port of one server.
fn host_and_port(place: &str) -> Result<(&str, u16), &'static str> {
    if place.contains(',') {
        return Err("name one server, not a list: clusters and sentinels are not supported");
    }
    let (host, port) = match place.strip_prefix('[') {
        Some(v6) => {
            let (host, port) = v6.split_once(']').unwrap_or(("", ""));
            if host.split('%').next().is_none_or(|address| address.parse::<Ipv6Addr>().is_err()) {
                return Err("the text in brackets must be an IPv6 address, such as redis://[::1]:6379");
            }
            (host, port)
        }
        None if place.matches(':').count() > 1 => {
            return Err("write one host and one port; an IPv6 address needs brackets: redis://[::1]:6379");
        }
        None => place.split_at(place.find(':').unwrap_or(place.len())),
    };
    if host.is_empty() {
        return Err("the host is missing: write redis://HOST:PORT");
    }
    if host.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Err("a host must be a name or an address, without spaces");
    }
    let port = match port {
        "" => Some(DEFAULT_PORT),
        port => port.strip_prefix(':').and_then(number).and_then(|port| port.try_into().ok()),
    };
    Ok((host, port.filter(|port| *port != 0).ok_or("the port must be a number from 1 to 65535")?))
}

/// Parses digits only: `parse` alone would accept a sign.
fn number(digits: &str) -> Option<u64> {
    digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

/// Decodes percent-encoding; `None` for a `%` without two hex digits, or for invalid UTF-8.
fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        if *first == b'%' {
            let digits = after.get(..2).filter(|two| two.iter().all(u8::is_ascii_hexdigit))?;
            bytes.push(u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?);
            rest = &after[2..];
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(url: &str) -> Address {
        Address::parse(url).expect(url)
    }

    #[test]
    fn a_description_has_no_secret() {
        for (url, text) in [
            ("redis://localhost", "redis://localhost:6379"),
            ("redis://user:hunter2@db.internal:7000/3", "redis://db.internal:7000/3"),
            ("redis://:hunter2@[::1]:7000", "redis://[::1]:7000"),
            ("redis://[::1]/", "redis://[::1]:6379"),
            ("redis://h?protocol=resp3", "redis://h:6379"),
        ] {
            assert_eq!(address(url).to_string(), text);
            assert_eq!(format!("{:?}", address(url)), text);
        }
    }

    #[test]
    #[cfg(feature = "tls")]
    fn an_encrypted_address_names_its_trusted_authorities() {
        assert_eq!(address("redis://h").tls, None);
        assert_eq!(address("rediss://:hunter2@h").tls, Some(Trust::Machine));
        assert_eq!(address("rediss://:hunter2@h:7000/2").to_string(), "rediss://h:7000/2");
        let own = address("rediss://h?ca=/etc/my%20ca.pem&protocol=resp3");
        assert_eq!(own.tls, Some(Trust::File("/etc/my ca.pem".into())));
    }

    #[test]
    #[cfg(not(feature = "tls"))]
    fn without_tls_nothing_is_sent_in_the_clear_instead() {
        let error = Address::parse("rediss://:hunter2@h").expect_err("not built in");
        assert!(error.to_string().contains("tls") && !error.to_string().contains("hunter2"), "{error}");
    }

    #[test]
    fn a_login_is_decoded() {
        let login = |url| address(url).login;
        let pair = |user: &str, password: &str| Some((user.to_owned(), password.to_owned()));
        assert_eq!(login("redis://h"), None);
        assert_eq!(login("redis://:p%40ss%2F@h"), pair("default", "p@ss/"));
        assert_eq!(login("redis://me:a:b@h"), pair("me", "a:b"));
        assert_eq!(login("redis://me:p@ss@h"), pair("me", "p@ss"), "an unescaped @ belongs to the password");
    }

    #[test]
    fn urls_that_cannot_be_used_are_refused_without_repeating_them() {
        for (url, why) in [
            ("", "begins with"),
            ("hunter2", "begins with"),
            ("http://hunter2", "begins with"),
            ("redis:hunter2", "begins with"),
            ("redis://", "the host is missing"),
            ("redis://:hunter2@", "the host is missing"),
            ("redis://:hunter2@/2", "the host is missing"),
            ("rediss://:hunter2@:6379", "the host is missing"),
            ("redis://:hunter2@h:", "the port"),
            ("redis://:hunter2@h:+1", "the port"),
            ("redis://:hunter2@h:0", "the port"),
            ("redis://:hunter2@h:70000", "the port"),
            ("redis://:hunter2@[::1]x", "the port"),
            ("redis://h/hunter2", "a database"),
            ("redis://h/-1", "a database"),
            ("redis://h/1/hunter2", "a database"),
            ("redis://:hun/ter2@h", "%2F"),
            ("redis://:hun?ter2@h", "%3F"),
            ("redis://:hunter2%zz@h", "%25"),
            ("redis://h?password=hunter2", "takes no options"),
            ("rediss://h?verify=hunter2", "takes no options"),
            ("redis://h?ca=/hunter2", "rediss://"),
            ("redis://[::1hunter2", "brackets"),
            ("redis://[hunter2]:1", "brackets"),
            ("redis://::1:6379", "brackets"),
            ("redis://a hunter2", "without spaces"),
            ("redis://:hunter2@a:7000,b:7001", "not a list"),
            ("redis://:hunter2@a,,b", "not a list"),
        ] {
            let error = Address::parse(url).expect_err(url);
            assert_eq!(error.kind(), StoreErrorKind::Refused, "{url}");
            assert!(error.to_string().contains(why), "{url}: {error}");
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }
}
