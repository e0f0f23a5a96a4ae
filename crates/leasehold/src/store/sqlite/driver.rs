//! The state that the driver thread owns.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use rusqlite::Connection;

use super::death_watch::DeathWatch;
use super::disk_reserve::DiskReserve;
use super::displaced::OpenFiles;
use super::forking::{OpenGuard, Registration};
use super::liveness::Liveness;
use super::permissions::Sharing;
use super::schema::{BusyTimeout, sqlite_error};
use super::waiters::LocalWaiters;
use crate::facts::KeySpace;
use crate::machine::{FenceUnusable, InboxId, Limits};
use crate::store::{PushSender, StoreError};

/// Why a command failed.
#[derive(Debug)]
pub(super) enum Fault {
    Sql(rusqlite::Error),
    Store(StoreError),
}

impl From<rusqlite::Error> for Fault {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sql(error)
    }
}

impl From<FenceUnusable> for Fault {
    fn from(error: FenceUnusable) -> Self {
        Self::Store(error.into())
    }
}

/// The state that the driver thread owns.
pub(super) struct SqliteDriver {
    pub(super) conn: Connection,
    /// Dropped after the connection is closed. `None` while this process forks.
    pub(super) open: Option<OpenGuard>,
    pub(super) _registration: Registration,
    pub(super) path: PathBuf,
    /// Selects the rows to list, and the namespace of counters and events.
    pub(super) keys: KeySpace,
    pub(super) busy_timeout: BusyTimeout,
    pub(super) boot: i64,
    pub(super) liveness: Arc<Liveness>,
    pub(super) watch: Arc<DeathWatch>,
    pub(super) pushes: PushSender,
    pub(super) limits: Limits,
    pub(super) waiters: LocalWaiters,
    /// Off only in tests that compare answers step by step.
    pub(super) checks_holders: bool,
    pub(super) reserve: DiskReserve,
    pub(super) garbage: GarbageProgress,
    pub(super) sharing: Sharing,
    /// The files that the connection has open.
    pub(super) open_files: OpenFiles,
    /// The thread that reads our FIFO.
    pub(super) listener: Option<JoinHandle<()>>,
    /// The id of the last message that was delivered but could not be deleted; 0 if there is none.
    pub(super) read_up_to: i64,
}

/// When garbage was last collected, and where the next collection continues.
#[derive(Default)]
pub(super) struct GarbageProgress {
    pub(super) commits_since_check: u32,
    pub(super) commits_since_collection: u32,
    /// The last name that was examined; empty to start from the first row.
    pub(super) examined_up_to: String,
}

impl SqliteDriver {
    /// Translates an error of this database.
    pub(super) fn store_error(&self, fault: Fault) -> StoreError {
        match fault {
            Fault::Sql(error) => sqlite_error(&self.path, &error),
            Fault::Store(error) => error,
        }
    }

    /// Whether the process that owns a lease is certainly dead.
    pub(super) fn is_dead(&self, inbox: Option<&InboxId>) -> bool {
        inbox.is_some_and(|inbox| self.liveness.is_gone(inbox))
    }
}
