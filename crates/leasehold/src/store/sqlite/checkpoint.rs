//! Checkpoints keep the write-ahead log short.
//!
//! The log file is never truncated: after a checkpoint, writers overwrite its frames from the beginning. Its frames on
//! the disk are therefore available on a full disk as well. A checkpoint needs no disk space either, because the
//! database file has all its pages on the disk before they are used (`disk_reserve`).

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::thread;
use std::time::Duration;

use rusqlite::{Connection, ffi};
use rustix::fs::{FlockOperation, flock};

use super::path::{beside, unusable};
use super::permissions::Sharing;
use super::schema::{BusyTimeout, failure};
use crate::store::StoreError;

/// Longest wait for a reader that blocks a checkpoint: writers wait meanwhile.
const CHECKPOINT_TIMEOUT: Duration = Duration::from_millis(50);
/// Attempts to restart the log when the disk is full.
const CHECKPOINT_TRIES: u32 = 20;
/// Attempts to take the maintenance lock.
const LOCK_TRIES: u32 = 500;
const RETRY_INTERVAL: Duration = Duration::from_millis(2);
/// Bytes that are written to see whether the disk takes another block.
const BLOCK_BYTES: usize = 4_096;

/// The lock file `.ckpt`. The process that holds its lock runs a checkpoint or grows the database file, so that neither
/// undoes the other. It is not a file of SQLite's: if this process closed one of those, it would drop SQLite's locks.
pub(super) struct MaintenanceLock(File);

impl MaintenanceLock {
    /// Opens the lock file of a database, and creates it if there is none.
    pub(super) fn open(db: &Path, sharing: Sharing) -> Result<Self, StoreError> {
        let path = beside(db, ".ckpt");
        let mut open = OpenOptions::new();
        open.write(true).mode(0o600);
        let file = match open.clone().create_new(true).open(&path) {
            Ok(file) => sharing.apply(&file).map(|()| file),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => open.open(&path),
            Err(error) => Err(error),
        };
        file.map(Self).map_err(|e| unusable(&path, &e))
    }

    /// Takes the lock if it is free.
    pub(super) fn try_hold(&self) -> Option<HeldMaintenance<'_>> {
        let locked = flock(&self.0, FlockOperation::NonBlockingLockExclusive);
        locked.is_ok().then_some(HeldMaintenance(&self.0))
    }

    /// Runs `run` under the lock. The wait is bounded, because the process that holds the lock may be stopped.
    pub(super) fn hold<R>(&self, run: impl FnOnce() -> rusqlite::Result<R>) -> rusqlite::Result<R> {
        for _ in 0..LOCK_TRIES {
            if let Some(_held) = self.try_hold() {
                return run();
            }
            thread::sleep(RETRY_INTERVAL);
        }
        Err(failure(ffi::SQLITE_BUSY))
    }

    /// Whether the disk or the quota has no space for another block. SQLite reports an exceeded quota like any other
    /// failed write, so this writes a block to the lock file.
    pub(super) fn disk_is_full(&self) -> bool {
        let written = self.0.write_all_at(&[0; BLOCK_BYTES], 0);
        let _ = self.0.set_len(0);
        written.is_err_and(|e| matches!(e.kind(), ErrorKind::QuotaExceeded | ErrorKind::StorageFull))
    }
}

/// The held maintenance lock. Dropping it unlocks it.
pub(super) struct HeldMaintenance<'a>(&'a File);

impl Drop for HeldMaintenance<'_> {
    fn drop(&mut self) {
        let _ = flock(self.0, FlockOperation::Unlock);
    }
}

/// Copies the log into the database, so that the next writer restarts it. Retries while readers block it.
pub(super) fn restart_log(conn: &Connection, busy_timeout: &BusyTimeout) -> rusqlite::Result<()> {
    for _ in 0..CHECKPOINT_TRIES {
        if checkpoint(conn, busy_timeout)? {
            return Ok(());
        }
        thread::sleep(RETRY_INTERVAL);
    }
    Err(failure(ffi::SQLITE_BUSY))
}

/// Runs a checkpoint. Returns `false` if a reader kept it from finishing.
pub(super) fn checkpoint(conn: &Connection, busy_timeout: &BusyTimeout) -> rusqlite::Result<bool> {
    let busy = busy_timeout.limited(CHECKPOINT_TIMEOUT, || {
        conn.query_row("PRAGMA wal_checkpoint(RESTART)", [], |row| row.get::<_, i64>(0))
    });
    Ok(busy? == 0)
}

/// Number of frames in the log.
pub(super) fn frames(conn: &Connection) -> rusqlite::Result<i64> {
    conn.prepare_cached("PRAGMA wal_checkpoint(NOOP)")?.query_row([], |row| row.get(1))
}
