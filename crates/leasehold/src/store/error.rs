use std::borrow::Cow;

use crate::facts::Invalid;

/// The store refused or failed a request, or did not answer it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", display(*kind, detail))]
pub struct StoreError {
    kind: StoreErrorKind,
    /// A text for people. It never contains a secret.
    detail: Cow<'static, str>,
    /// Whether nothing was sent, so that the store cannot have done anything.
    unsent: bool,
}

/// Formats the error. A mistake of the caller needs no introduction: the detail alone says what it is.
fn display(kind: StoreErrorKind, detail: &str) -> String {
    match kind {
        _ if detail.is_empty() => kind.to_string(),
        StoreErrorKind::Refused => detail.to_owned(),
        _ => format!("{kind}: {detail}"),
    }
}

impl StoreError {
    pub(crate) fn new(kind: StoreErrorKind, detail: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, detail: detail.into(), unsent: false }
    }

    /// Marks an error as one of a request that was never sent.
    pub(crate) fn unsent(self) -> Self {
        Self { unsent: true, ..self }
    }

    /// Returns the kind of the failure.
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// Returns the detail of the error besides its kind.
    #[cfg(feature = "config")]
    pub(crate) fn detail(&self) -> &str {
        &self.detail
    }

    /// Returns whether a later retry can succeed.
    pub fn is_passing(&self) -> bool {
        use StoreErrorKind as K;
        matches!(
            self.kind,
            K::Unreachable
                | K::NoAnswer
                | K::Busy
                | K::Loading
                | K::ReadOnly
                | K::OutOfMemory
                | K::DiskFull
                | K::TryAgain
        )
    }

    /// Returns whether nothing was done: the request was not sent, the store is closed, belongs to another process, or
    /// its disk is full (a transaction is carried out as a whole or not at all), or the request is invalid. Out of
    /// memory does not count: a server also refuses the second step of a request for that reason.
    pub(crate) fn was_refused(&self) -> bool {
        use StoreErrorKind as K;
        self.unsent || matches!(self.kind, K::Closed | K::Forked | K::Refused | K::DiskFull)
    }

    /// Returns whether the request may have been carried out despite the error.
    pub fn may_have_happened(&self) -> bool {
        matches!(self.kind, StoreErrorKind::Unreachable | StoreErrorKind::NoAnswer)
    }
}

/// A name that has no key.
impl From<Invalid> for StoreError {
    fn from(invalid: Invalid) -> Self {
        Self::new(StoreErrorKind::Refused, invalid.to_string())
    }
}

impl From<StoreErrorKind> for StoreError {
    fn from(kind: StoreErrorKind) -> Self {
        Self::new(kind, "")
    }
}

/// The kinds of failure of a store, by what the caller can do about them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// No connection, or the connection broke.
    #[error("the store cannot be reached")]
    Unreachable,
    /// Connected, but no answer in time.
    #[error("the store did not answer in time")]
    NoAnswer,
    /// Out of memory (`OOM`): held locks can still be renewed and released.
    #[error("the store is out of memory; free some or raise maxmemory")]
    OutOfMemory,
    /// A read-only replica (`READONLY`).
    #[error("the server is a read-only replica; connect to the primary")]
    ReadOnly,
    /// A long script or function runs (`BUSY`), or the database is locked.
    #[error("the store is busy")]
    Busy,
    /// Still reading its data (`LOADING`).
    #[error("the server is still loading its data")]
    Loading,
    /// Writes are refused because persistence fails (`MISCONF`).
    #[error("the server refuses writes because it cannot save to disk")]
    CannotSave,
    /// Missing or wrong password (`NOAUTH`, `WRONGPASS`).
    #[error("the server requires a password, or rejected the given one")]
    NotAuthenticated,
    /// The user lacks permission (`NOPERM`).
    #[error("the user is not permitted to do this; see the minimal ACL in docs/protocol.md")]
    NotPermitted,
    /// One of leasehold's keys holds a value of another type (`WRONGTYPE`).
    #[error("one of leasehold's keys holds a value of another type")]
    WrongType,
    /// The server has reached its limit of clients (`ERR max number of clients reached`).
    #[error("the server accepts no more clients")]
    TooManyClients,
    /// The cluster is down or moves slots (`CLUSTERDOWN`, `MOVED`, `ASK`, `CROSSSLOT`).
    #[error("the cluster cannot serve this key now")]
    Cluster,
    /// `TRYAGAIN`, `MASTERDOWN`, `NOREPLICAS`.
    #[error("the server asks to try again")]
    TryAgain,
    /// The fence counter is unusable: above 2⁵², or not a number.
    #[error("the fence counter is unusable; nothing is granted until it is repaired")]
    FenceUnusable,
    /// A script could not be run (`NOSCRIPT` after EVAL, a Lua error, an old server).
    #[error("the server could not run leasehold's script")]
    Script,
    /// The store holds a record of a newer version of leasehold.
    #[error("the store holds records of a newer leasehold")]
    NewerVersion,
    /// The disk is full.
    #[error("the disk is full")]
    DiskFull,
    /// The database file cannot be used: permissions, corruption, not a database.
    #[error("the database file cannot be used")]
    File,
    /// This process was forked from the one that opened the store.
    #[error("the store was opened before a fork; open it again in this process")]
    Forked,
    /// The store was closed.
    #[error("the store was closed")]
    Closed,
    /// A cursor, URL or option is invalid.
    #[error("the store rejects the request as invalid")]
    Refused,
    /// Any other error of the server.
    #[error("the store answered with an error")]
    Other,
}
