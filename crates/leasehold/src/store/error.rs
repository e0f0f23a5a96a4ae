use std::borrow::Cow;

use crate::facts::Invalid;

/// The store did not do what was asked, or did not say whether it did.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", told(*kind, detail))]
pub struct StoreError {
    kind: StoreErrorKind,
    /// For people; never a secret.
    detail: Cow<'static, str>,
    /// Nothing was sent: the store cannot have done anything.
    unsent: bool,
}

/// Who made the mistake knows that it was one: the detail says which.
fn told(kind: StoreErrorKind, detail: &str) -> String {
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

    /// The same, of a request that never left.
    pub(crate) fn unsent(self) -> Self {
        Self { unsent: true, ..self }
    }

    /// What kind of failure it was.
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// What there is to say besides its kind.
    #[cfg(feature = "config")]
    pub(crate) fn detail(&self) -> &str {
        &self.detail
    }

    /// Whether asking again later can help.
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

    /// Whether nothing was done: nothing was sent, the store is closed, belongs to another process, or its disk is full (a
    /// transaction is carried out whole or not at all), or the request makes no sense. Not out of memory:
    /// a server refuses the second step of a request for that, too.
    pub(crate) fn was_refused(&self) -> bool {
        use StoreErrorKind as K;
        self.unsent || matches!(self.kind, K::Closed | K::Forked | K::Refused | K::DiskFull)
    }

    /// Whether the request may have been carried out all the same.
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

/// Every failure of a store by what it means to whoever has to act on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// No connection, or it broke.
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
    /// No or wrong password (`NOAUTH`, `WRONGPASS`).
    #[error("the server wants a password, or another one")]
    NotAuthenticated,
    /// The user may not do this (`NOPERM`).
    #[error("the user is not permitted to do this; see the minimal ACL in docs/protocol.md")]
    NotPermitted,
    /// A key of ours holds something else (`WRONGTYPE`).
    #[error("one of leasehold's keys holds a value of another type")]
    WrongType,
    /// The server has no room for another client (`ERR max number of clients reached`).
    #[error("the server accepts no more clients")]
    TooManyClients,
    /// A cluster that is down or moving (`CLUSTERDOWN`, `MOVED`, `ASK`, `CROSSSLOT`).
    #[error("the cluster cannot serve this key now")]
    Cluster,
    /// `TRYAGAIN`, `MASTERDOWN`, `NOREPLICAS`.
    #[error("the server asks to try again")]
    TryAgain,
    /// The fence counter cannot be used: above 2⁵², or not a number.
    #[error("the fence counter is unusable; nothing is granted until it is repaired")]
    FenceUnusable,
    /// A script could not be run (`NOSCRIPT` after EVAL, a Lua error, an old server).
    #[error("the server could not run leasehold's script")]
    Script,
    /// A record of a newer version of leasehold.
    #[error("the store holds records of a newer leasehold")]
    NewerVersion,
    /// The disk is full.
    #[error("the disk is full")]
    DiskFull,
    /// The database file cannot be used: permissions, corruption, not a database.
    #[error("the database file cannot be used")]
    File,
    /// This process was forked off the one that opened the store.
    #[error("the store was opened before a fork; open it again in this process")]
    Forked,
    /// The store was closed.
    #[error("the store was closed")]
    Closed,
    /// A cursor, URL or option that makes no sense.
    #[error("the request makes no sense to the store")]
    Refused,
    /// Anything else the server said.
    #[error("the store answered with an error")]
    Other,
}
