//! Opens the store for a URL.

use std::sync::Arc;

use super::memory::MemoryWorld;
use super::{SharedStore, StoreError, StoreErrorKind};
use crate::error::Error;
use crate::options::Options;

/// Opens the store that a URL names.
pub(crate) async fn open(url: &str, options: &Options) -> Result<SharedStore, Error> {
    let (scheme, rest) = url.split_once(':').unwrap_or((url, ""));
    match scheme {
        "memory" => Ok(Arc::new(MemoryWorld::new().open_with(options.keys.clone()))),
        "sqlite" => open_sqlite(rest, options),
        "redis" | "rediss" => open_redis(url, options).await,
        unknown => Err(Error::Connect { store: without_secrets(url), source: not_a_store(unknown) }),
    }
}

#[cfg(feature = "sqlite")]
fn open_sqlite(path: &str, options: &Options) -> Result<SharedStore, Error> {
    use super::sqlite::{SqliteStore, default_path};
    let path = if path.is_empty() {
        default_path().map_err(|source| Error::Connect { store: "sqlite:".into(), source })?
    } else {
        path.into()
    };
    let store = SqliteStore::open_with(&path, options.keys.clone());
    Ok(Arc::new(store.map_err(|source| Error::Connect { store: format!("sqlite:{}", path.display()), source })?))
}

#[cfg(not(feature = "sqlite"))]
fn open_sqlite(path: &str, _options: &Options) -> Result<SharedStore, Error> {
    Err(Error::Connect { store: format!("sqlite:{path}"), source: not_built_in("SQLite", "sqlite") })
}

#[cfg(feature = "redis")]
async fn open_redis(url: &str, options: &Options) -> Result<SharedStore, Error> {
    use super::redis::{RedisOptions, RedisStore};
    use crate::facts::Ttl;
    // A clock cannot count an unbounded duration. A day is long enough here.
    let answer_within = options.request_timeout.min(Ttl::MAX);
    let redis = RedisOptions::default().response_timeout(answer_within).lazy_connect(options.lazy_connect);
    let store = RedisStore::connect(url, options.keys.clone(), redis).await;
    Ok(Arc::new(store.map_err(|source| Error::Connect { store: without_secrets(url), source })?))
}

#[cfg(not(feature = "redis"))]
async fn open_redis(url: &str, _options: &Options) -> Result<SharedStore, Error> {
    Err(Error::Connect { store: without_secrets(url), source: not_built_in("Redis", "redis") })
}

/// Returns the error for a store that this program was built without.
#[cfg(not(all(feature = "redis", feature = "sqlite")))]
fn not_built_in(store: &str, feature: &str) -> StoreError {
    let text = format!("this program was built without {store}: add the feature `{feature}` of the crate leasehold");
    StoreError::new(StoreErrorKind::Refused, text)
}

/// Checks the URL of a store without opening the store.
#[cfg(feature = "config")]
pub(crate) fn check_url(url: &str) -> Result<(), StoreError> {
    match url.split_once(':').map_or(url, |(scheme, _)| scheme) {
        "memory" => Ok(()),
        #[cfg(feature = "sqlite")]
        "sqlite" => Ok(()),
        #[cfg(not(feature = "sqlite"))]
        "sqlite" => Err(not_built_in("SQLite", "sqlite")),
        #[cfg(feature = "redis")]
        "redis" | "rediss" => super::redis::check_url(url),
        #[cfg(not(feature = "redis"))]
        "redis" | "rediss" => Err(not_built_in("Redis", "redis")),
        unknown => Err(not_a_store(unknown)),
    }
}

/// Explains why no store has this scheme. The scheme itself is not repeated, because text without a scheme may begin
/// with anything, including a password.
fn not_a_store(scheme: &str) -> StoreError {
    let why = match scheme {
        "valkey" | "valkeys" => "for Valkey, write redis://HOST:PORT, or rediss://HOST:PORT for TLS",
        "unix" | "redis+unix" | "redis+socket" => "Unix sockets are not supported: write redis://HOST:PORT",
        _ if scheme.contains("sentinel") || scheme.contains("cluster") => {
            "clusters and sentinels are not supported: name one server, as redis://HOST:PORT"
        }
        _ => "not the URL of a store: write sqlite, sqlite:PATH, redis://HOST:PORT, rediss://HOST:PORT or memory",
    };
    StoreError::new(StoreErrorKind::Refused, why)
}

/// Returns a URL without user, password and query, to be displayed.
pub(crate) fn without_secrets(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        // A path may be shown. If the URL lacks its slashes, the password may be anywhere.
        let scheme = url.split_once(':').map_or(url, |(scheme, _)| scheme);
        return if matches!(scheme, "sqlite" | "memory") { url.to_owned() } else { format!("{scheme}:…") };
    };
    let rest = rest.rsplit_once('@').map_or(rest, |(login, host)| {
        // Either character may be part of a password.
        if login.contains('?') { "…" } else { host }
    });
    let rest = rest.split_once('?').map_or(rest, |(path, _)| path);
    format!("{scheme}://{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_shown_without_its_secrets() {
        assert_eq!(without_secrets("redis://u:p@ss@h:1/0?password=x"), "redis://h:1/0");
        assert_eq!(without_secrets("redis://h:1?password=a"), "redis://h:1");
        assert_eq!(without_secrets("redis://h:1?password=a@b"), "redis://…");
        assert_eq!(without_secrets("redis://u:pa?ss@h"), "redis://…");
        assert_eq!(without_secrets("redis:u:secret@h"), "redis:…");
        assert_eq!(without_secrets("sqlite:a/b.db"), "sqlite:a/b.db");
    }

    #[cfg(not(all(feature = "redis", feature = "sqlite")))]
    #[tokio::test]
    async fn a_store_that_is_not_built_in_is_refused_with_an_explanation() {
        for (url, built_in, feature) in
            [("sqlite:a.db", cfg!(feature = "sqlite"), "`sqlite`"), ("redis://h:1", cfg!(feature = "redis"), "`redis`")]
        {
            if !built_in {
                let Err(Error::Connect { source, .. }) = open(url, &Options::default()).await else { panic!("{url}") };
                assert!(source.to_string().contains(feature), "{source}");
            }
        }
    }
}
