//! The disk reserve: free pages and log frames that exist before they are needed, so that a lock can be released when
//! the disk is full.
//!
//! A release overwrites a row in place and keeps its length. It needs no page, only a frame or two in the log, and
//! those are on the disk already (`checkpoint`). The database file has its pages on the disk before they can be used,
//! and a limit keeps every process within them. The file grows under the maintenance lock, so that a checkpoint of
//! another process does not truncate it meanwhile.
//!
//! Handing a lock to a waiter needs more: a message, and the row of the new holder. A command that takes pages
//! therefore leaves some in the reserve. If none are left, the lock is freed in place, and its waiters see that with
//! their next request.

use std::path::{Path, PathBuf};

use rusqlite::{Connection, FileControl, ffi, params};

use super::checkpoint::{MaintenanceLock, checkpoint, frames, restart_log};
use super::path::beside;
use super::permissions::Sharing;
use super::schema::{BusyTimeout, failure, sqlite_error};
use crate::store::StoreError;

const PAGE_BYTES: i64 = 1_024;
/// A page and its header in the log.
const FRAME_BYTES: i64 = 1_024 + 24;
/// Smallest size of the log file.
const LOG_MIN_BYTES: i64 = 128 * FRAME_BYTES;
/// Frames that are enough for nearly every command.
const COMMAND_FRAMES: i64 = 32;
/// The fewest and the most pages that the file grows by, unless a command needs more.
const GROW_PAGES_MIN: i64 = 128;
const GROW_PAGES_MAX: i64 = 2_048;
/// Free pages that a command must leave if it takes pages.
const RESERVE_PAGES: i64 = 16;
/// The file's length is a multiple of this. Without a chunk size, SQLite would not extend the file before it writes.
const CHUNK_BYTES: i32 = 4_096;
const FILL: &str = "INSERT OR REPLACE INTO reserve (id, filler) VALUES (1, zeroblob(?1))";
const EMPTY: &str = "DELETE FROM reserve";

/// The disk space that a command needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// Takes pages. Fails on a full disk.
    More,
    /// Takes pages for this many bytes. Fails on a full disk.
    Bytes(usize),
    /// Takes no pages in the end, but may need one on the way.
    Less,
    /// Overwrites existing rows only, and must not fail.
    Nothing,
}

impl Need {
    fn takes_pages(self) -> bool {
        matches!(self, Self::More | Self::Bytes(_))
    }

    fn is_small(self) -> bool {
        !matches!(self, Self::Bytes(_))
    }

    /// How many steps are tried to make space.
    fn steps(self) -> u32 {
        match self {
            Self::More | Self::Bytes(_) => 3,
            Self::Less => 6,
            // A reader that blocks the checkpoint is gone a moment later.
            Self::Nothing => 20,
        }
    }
}

/// The disk reserve of an open database.
pub(super) struct DiskReserve {
    pub(super) lock: MaintenanceLock,
    /// The database file, for its size.
    file: PathBuf,
    /// The log file, for its size.
    log: PathBuf,
    /// Free pages that the open transaction must leave.
    keep_free: i64,
}

impl DiskReserve {
    /// Makes the file and its log long enough for every lock to be released, before any is taken.
    pub(super) fn prepare(
        conn: &Connection,
        busy_timeout: &BusyTimeout,
        path: &Path,
        sharing: Sharing,
    ) -> Result<Self, StoreError> {
        let lock = MaintenanceLock::open(path, sharing)?;
        let reserve = Self { lock, file: path.to_owned(), log: beside(path, "-wal"), keep_free: 0 };
        reserve.set_up(conn, busy_timeout).map_err(|e| sqlite_error(path, &e))?;
        Ok(reserve)
    }

    fn set_up(&self, conn: &Connection, busy_timeout: &BusyTimeout) -> rusqlite::Result<()> {
        let mut chunk = CHUNK_BYTES;
        conn.file_control(Some("main"), FileControl::ChunkSize(&mut chunk))?;
        limit_to_existing_pages(conn)?;
        if self.is_sufficient(conn)? {
            return Ok(());
        }
        // Another process may have grown the file meanwhile.
        let grow = || if self.is_sufficient(conn)? { Ok(()) } else { grow(conn, busy_timeout, Need::More) };
        let grown = self.lock.hold(grow);
        // If the disk is full already, held locks can still be released.
        if self.is_whole(conn)? { Ok(()) } else { grown }
    }

    fn is_sufficient(&self, conn: &Connection) -> rusqlite::Result<bool> {
        Ok(size_of(&self.log) >= LOG_MIN_BYTES && self.is_whole(conn)? && free_pages(conn)? >= RESERVE_PAGES)
    }

    /// Whether every page of the file is on the disk. It is not if a process died, or the disk was full, while it grew.
    fn is_whole(&self, conn: &Connection) -> rusqlite::Result<bool> {
        Ok(size_of(&self.file) >= page_count(conn)? * PAGE_BYTES)
    }

    /// Whether a command on one lock fits in the log without growing it.
    fn fits_in_log(&self, conn: &Connection) -> bool {
        frames(conn).is_ok_and(|frames| (frames + COMMAND_FRAMES) * FRAME_BYTES <= size_of(&self.log))
    }

    /// Sets how many free pages the open transaction must leave. One that takes pages leaves the reserve, or what is
    /// left of it; any other may use all.
    pub(super) fn require(&mut self, conn: &Connection, need: Need) -> rusqlite::Result<()> {
        self.keep_free = if need.takes_pages() { RESERVE_PAGES.min(free_pages(conn)?) } else { 0 };
        Ok(())
    }

    /// Whether the open transaction leaves the free pages that it must leave.
    pub(super) fn is_left(&self, conn: &Connection) -> rusqlite::Result<bool> {
        Ok(self.keep_free == 0 || free_pages(conn)? >= self.keep_free)
    }

    /// Takes the next step that may make space, and counts it in `step`; `false` if no step is left.
    pub(super) fn make_space(&self, conn: &Connection, busy_timeout: &BusyTimeout, need: Need, step: &mut u32) -> bool {
        while *step < need.steps() {
            *step += 1;
            let grows = *step % 2 == 1 && need != Need::Nothing;
            // A checkpoint keeps all other processes from writing, also releases: run it only if it can help.
            let make = || match grows {
                true => grow(conn, busy_timeout, need),
                false if self.fits_in_log(conn) && need.is_small() => Ok(()),
                false => restart_log(conn, busy_timeout),
            };
            if self.lock.hold(make).is_ok() {
                return true;
            }
        }
        false
    }

    /// Runs a checkpoint if the log has more frames than allowed and no other process does maintenance. Returns whether
    /// it tried.
    pub(super) fn shorten_log(&self, conn: &Connection, busy_timeout: &BusyTimeout, frames_allowed: i64) -> bool {
        let is_long = frames(conn).is_ok_and(|frames| frames > frames_allowed);
        let held = if is_long { self.lock.try_hold() } else { None };
        if held.is_some() {
            let _ = checkpoint(conn, busy_timeout);
        }
        held.is_some()
    }
}

/// Grows the file. The caller holds the maintenance lock.
fn grow(conn: &Connection, busy_timeout: &BusyTimeout, need: Need) -> rusqlite::Result<()> {
    // Filler that a process left when it died while the file grew.
    let left = conn.execute(EMPTY, [])?;
    let grown = extend(conn, busy_timeout, need);
    limit_to_existing_pages(conn)?;
    if left > 0 { Ok(()) } else { grown }
}

/// Allocates the pages on the disk first, where a failure has no effect that another process can see. Then adds them to
/// the database as filler, which passes through the log and so makes that long enough too, and removes the filler.
fn extend(conn: &Connection, busy_timeout: &BusyTimeout, need: Need) -> rusqlite::Result<()> {
    let pages = page_count(conn)?;
    let asked =
        if let Need::Bytes(bytes) = need { i64::try_from(bytes).unwrap_or(i64::MAX) / PAGE_BYTES * 2 } else { 0 };
    let step = (pages / 4).clamp(GROW_PAGES_MIN, GROW_PAGES_MAX).max(asked);
    // Some of the new pages hold the tables of the file itself.
    let bound = pages + step + step / 16 + 16;
    allocate(conn, bound)?;
    // Without a checkpoint the filler would double the log. The checkpoint may truncate the file, so allocate again.
    checkpoint(conn, busy_timeout)?;
    allocate(conn, bound)?;
    conn.query_row(&format!("PRAGMA max_page_count = {bound}"), [], |_| Ok(()))?;
    conn.execute(FILL, params![step * PAGE_BYTES])?;
    conn.execute(EMPTY, [])?;
    Ok(())
}

/// Allocates disk blocks for this many pages. SQLite writes into every block, and reports a full disk as a failed
/// write.
fn allocate(conn: &Connection, pages: i64) -> rusqlite::Result<()> {
    let mut bytes = pages * PAGE_BYTES;
    let allocated = conn.file_control(Some("main"), FileControl::SizeHint(&mut bytes));
    allocated.map_err(|_| failure(ffi::SQLITE_FULL))
}

/// Keeps this connection from using pages beyond those that exist.
fn limit_to_existing_pages(conn: &Connection) -> rusqlite::Result<()> {
    let pages = page_count(conn)?;
    conn.query_row(&format!("PRAGMA max_page_count = {pages}"), [], |_| Ok(()))
}

fn page_count(conn: &Connection) -> rusqlite::Result<i64> {
    conn.query_row("PRAGMA page_count", [], |row| row.get(0))
}

fn free_pages(conn: &Connection) -> rusqlite::Result<i64> {
    conn.prepare_cached("PRAGMA freelist_count")?.query_row([], |row| row.get(0))
}

/// Reads the size of a file without opening it: closing a file of SQLite's would drop its locks.
fn size_of(file: &Path) -> i64 {
    std::fs::metadata(file).map_or(0, |m| i64::try_from(m.len()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::super::row::Key;
    use super::super::{fast_path, schema};
    use super::*;
    use crate::facts::{Owner, Token};
    use crate::machine::{Contender, InboxId};

    const BOOT: i64 = 1;

    fn opened(dir: &Path) -> (Connection, BusyTimeout, DiskReserve) {
        let path = dir.join("locks.db");
        let sharing = Sharing::of(dir).expect("a directory");
        let (conn, busy_timeout, _) = schema::open(&path, sharing).expect("opens");
        let reserve = DiskReserve::prepare(&conn, &busy_timeout, &path, sharing).expect("room");
        (conn, busy_timeout, reserve)
    }

    /// Uses up every free page. A row keeps some hundred bytes to itself, and each page takes 1,020 of the rest.
    fn use_up(conn: &Connection) {
        let free = free_pages(conn).expect("read");
        conn.execute("INSERT INTO reserve (filler) VALUES (zeroblob(?1))", [free * 1_020 + 480]).expect("room");
        assert_eq!(free_pages(conn), Ok(0));
    }

    #[test]
    fn a_release_needs_no_page_and_hardly_any_log() {
        let dir = tempfile::tempdir().expect("a directory");
        let (conn, _, _reserve) = opened(dir.path());
        let me = InboxId("me".into());
        let mut held = Vec::new();
        for i in 0..60_usize {
            let (name, token) = (Key::from(format!("{i:03}{}", "x".repeat(i * 8))), Token::random());
            let asking = Contender {
                token: token.clone(),
                inbox: Some(me.clone()),
                ttl_ms: 60_000,
                since_ms: 1,
                owner: Owner::named("o".repeat(i * 4 + 1)).expect("valid"),
                fenced: true,
            };
            assert!(fast_path::take(&conn, BOOT, &name, &asking).expect("room").is_some());
            held.push((name, token));
        }
        use_up(&conn);
        for (i, (name, token)) in held.iter().enumerate() {
            let before = frames(&conn).expect("read");
            let freed = if i % 2 == 0 {
                fast_path::release(&conn, &me, name, token)
            } else {
                fast_path::free(&conn, name, token)
            };
            assert_eq!(freed, Ok(true), "{i}");
            let written = frames(&conn).expect("read") - before;
            assert!(written <= 2, "{i}: {written} frames");
        }
        let held: i64 =
            conn.query_row("SELECT count(*) FROM locks WHERE ends > 0", [], |row| row.get(0)).expect("read");
        assert_eq!(held, 0);
    }

    #[test]
    fn pages_are_on_the_disk_before_they_are_used() {
        let dir = tempfile::tempdir().expect("a directory");
        let (conn, busy_timeout, reserve) = opened(dir.path());
        assert!(reserve.is_sufficient(&conn).expect("read"));
        for n in 1..5 {
            let (before, free) = (page_count(&conn).expect("read"), free_pages(&conn).expect("read"));
            conn.execute("INSERT INTO events (ns, json) VALUES ('', zeroblob(?1))", [free * 1_000]).expect("room");
            grow(&conn, &busy_timeout, Need::More).expect("there is room");
            assert!(page_count(&conn).expect("read") > before && reserve.is_whole(&conn).expect("read"));
            // All of it, and not a hole that takes room later.
            let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&reserve.file).expect("there"));
            assert!(
                blocks * 512 >= u64::try_from(page_count(&conn).expect("read") * PAGE_BYTES).expect("small"),
                "{n}"
            );
            let beyond: i64 = conn.query_row("PRAGMA max_page_count", [], |row| row.get(0)).expect("read");
            assert_eq!(beyond, page_count(&conn).expect("read"));
        }
        assert!(conn.query_row("PRAGMA wal_checkpoint(RESTART)", [], |row| row.get::<_, i64>(0)).expect("done") == 0);
        assert!(reserve.is_whole(&conn).expect("read"), "a checkpoint cuts nothing off");
    }

    #[test]
    fn a_missing_log_is_extended_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let (conn, _, reserve) = opened(dir.path());
        let log = reserve.log.clone();
        drop((conn, reserve));
        // As another program leaves it that was the last to close the file.
        let other = Connection::open(dir.path().join("locks.db")).expect("opens");
        other.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).expect("done");
        drop(other);
        assert_eq!(size_of(&log), 0);
        let (_conn, _, _reserve) = opened(dir.path());
        assert!(size_of(&log) >= LOG_MIN_BYTES);
    }

    #[test]
    fn the_filler_of_a_process_that_died_while_the_file_grew_is_reused() {
        let dir = tempfile::tempdir().expect("a directory");
        let (conn, _, reserve) = opened(dir.path());
        use_up(&conn);
        assert!(!reserve.is_sufficient(&conn).expect("read"));
        drop((conn, reserve));
        let (conn, _, reserve) = opened(dir.path());
        assert!(reserve.is_sufficient(&conn).expect("read"));
        let left: i64 = conn.query_row("SELECT count(*) FROM reserve", [], |row| row.get(0)).expect("read");
        assert_eq!(left, 0);
    }
}
