//! Room on the disk: the log is kept short, free rows are cleared away, and enough is held back
//! that a lock can be given up when the disk is full.
//!
//! A release overwrites one row in place, so all it needs is a frame in the log. Three things make
//! sure of that one. The log is never cut short, so after a checkpoint its frames can be written
//! over. A checkpoint never has to make the file longer: `max_page_count` stands at the pages the
//! file really has, and it grows in steps that count only once they are on the disk. And a row of
//! filler is kept, to be spent by a release that needs a page.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rusqlite::{Connection, params};
use rustix::fs::{FlockOperation, flock};

use super::driver::{Driver, Fault};
use super::path::{beside, unusable};
use super::row::{now_ms, sql};
use super::schema::{Patience, is_full, refused};
use crate::clock;
use crate::store::StoreError;

/// Frames in the log before it is started anew.
const LOG_FRAMES: i64 = 4_000;
/// Our own commits between two looks at the log.
const LOOK_EVERY: u32 = 64;
/// Frames in the log before it is started anew by whoever leaves: the first one to come reads it all, and
/// those who come and go make too few commits of their own to look at it.
const LEAVE_FRAMES: i64 = 64;
/// Our own commits between two steps of clearing away, and rows looked at in one.
const CLEAR_EVERY: u32 = 256;
const CLEAR_ROWS: u32 = 512;
/// A free row is kept this long: whoever takes the same name again finds it there.
const KEEP_FREE_US: u64 = 1_000_000;
/// A reader in the way is not waited for any longer: writers stand still meanwhile.
const CHECKPOINT_PATIENCE: Duration = Duration::from_millis(50);
/// Tries to start the log anew, and to be the one who makes room, when the disk is full.
const TRIES: u32 = 500;
const TRY_EVERY: Duration = Duration::from_millis(2);
/// Rounds of making room for what must not fail: a reader in the way of the log is gone a moment later.
const ROUNDS: u32 = 20;
/// Frames the log has to have beyond those of a step of growth, so that the step can be undone.
const UNDO_FRAMES: i64 = 96;
const PAGE_BYTES: i64 = 1_024;
/// A page and its header in the log.
const FRAME_BYTES: u64 = 1_024 + 24;
/// The least the file grows by.
const GROW_PAGES: i64 = 128;
/// Kept back for releases.
const RESERVE_BYTES: i64 = 16 << 10;
const RESERVE_ROW: i64 = 1;
/// What the file is made longer by. A number of its own: the first one that SQLite would choose in an empty
/// table is the reserve's, and growth that failed would be kept for it.
const GROWTH_ROW: i64 = 2;
const KEEP: &str = "INSERT OR REPLACE INTO reserve (id, filler) VALUES (?1, zeroblob(?2))";
/// Bytes of filler on a page, so that it takes at least as many pages as meant.
const FILL_BYTES: i64 = 1_024;
/// Bytes of filler that fit on a page for certain.
const SAFE_FILL_BYTES: i64 = 1_000;

/// What a command needs when the disk is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// It takes room: it is refused.
    More,
    /// The same, and so many bytes of it.
    Bytes(usize),
    /// It gives room back, or keeps what there is: it must not fail.
    Less,
}

/// The thread's bookkeeping.
pub(super) struct Room {
    /// Whoever has it locked runs the checkpoint. Not a file of SQLite's: those must never be
    /// opened or closed by anybody else in the process.
    checkpointer: File,
    /// The names of the file and its log, to look at their sizes.
    file: PathBuf,
    log: PathBuf,
    commits: u32,
    since_clearing: u32,
    cleared_up_to: String,
    reserve_spent: bool,
}

impl Room {
    /// Makes sure of the reserve, as far as the disk has room for it.
    pub(super) fn prepare(conn: &Connection, patience: &Patience, path: &Path) -> Result<Self, StoreError> {
        let lock = beside(path, ".ckpt");
        let mode = std::fs::metadata(path).map_or(0o600, |m| std::os::unix::fs::MetadataExt::mode(&m) & 0o666);
        let checkpointer = OpenOptions::new()
            .create(true)
            .write(true)
            .truncate(false)
            .mode(mode)
            .open(&lock)
            .map_err(|e| unusable(&lock, &e))?;
        let mut room = Self {
            checkpointer,
            file: path.to_owned(),
            log: beside(path, "-wal"),
            commits: 0,
            since_clearing: 0,
            cleared_up_to: String::new(),
            reserve_spent: false,
        };
        // Not while another process makes the file longer: should that fail, its pages never were.
        room.alone(|room| room.bound(conn)).map_err(|e| refused(path, &e))?;
        let has = "SELECT ifnull(max(length(filler)), 0) FROM reserve WHERE id = ?1";
        let reserved: i64 = conn.query_row(has, [RESERVE_ROW], |row| row.get(0)).map_err(|e| refused(path, &e))?;
        if reserved < RESERVE_BYTES {
            room.reserve_spent = room.alone(|room| room.grow(conn, patience, Need::More)).is_err();
        }
        Ok(room)
    }

    /// Nothing may go beyond the pages there are. Says whether there are more than we knew.
    fn bound(&self, conn: &Connection) -> rusqlite::Result<bool> {
        let before: i64 = conn.query_row("PRAGMA max_page_count", [], |row| row.get(0))?;
        let pages = page_count(conn)?;
        let now: i64 = conn.query_row(&format!("PRAGMA max_page_count = {pages}"), [], |row| row.get(0))?;
        Ok(now > before)
    }

    /// Makes the file longer, for good: pages count once they are on the disk.
    ///
    /// Each step can fail for want of room and leaves all as it was. That is why the log is made
    /// long enough first: taking back what the disk had no room for needs frames, too.
    fn grow(&mut self, conn: &Connection, patience: &Patience, need: Need) -> rusqlite::Result<()> {
        let pages = page_count(conn)?;
        let asked =
            if let Need::Bytes(bytes) = need { i64::try_from(bytes).unwrap_or(i64::MAX) / FILL_BYTES * 2 } else { 0 };
        let step = (pages / 4).max(GROW_PAGES).max(asked);
        // Some of the new pages hold the tables of the file itself.
        let bound = pages + step + step / 16 + 16;
        self.lengthen_log(conn, bound - pages + UNDO_FRAMES)?;
        self.start_log_anew(conn, patience)?;
        conn.query_row(&format!("PRAGMA max_page_count = {bound}"), [], |_| Ok(()))?;
        let filled = conn.execute(
            "INSERT OR REPLACE INTO reserve (id, filler) VALUES (?1, zeroblob(?2))",
            params![GROWTH_ROW, step * FILL_BYTES],
        );
        let grown = filled.and_then(|_| self.start_log_anew(conn, patience));
        if grown.is_err() {
            self.undo_growth(conn);
        }
        let emptied = conn.execute("DELETE FROM reserve WHERE id <> ?1", [RESERVE_ROW]);
        self.bound(conn)?;
        grown.and(emptied)?;
        conn.execute(KEEP, params![RESERVE_ROW, RESERVE_BYTES])?;
        self.reserve_spent = false;
        Ok(())
    }

    /// Writes one frame after the other until the log has as many on the disk.
    fn lengthen_log(&self, conn: &Connection, frames: i64) -> rusqlite::Result<()> {
        let wanted = FRAME_BYTES * u64::try_from(frames).unwrap_or(0);
        for _ in 0..frames {
            // Looking at its size opens nothing.
            if std::fs::metadata(&self.log).is_ok_and(|m| m.len() >= wanted) {
                break;
            }
            // Something has to change: SQLite writes no page that stays as it is. A higher floor harms nobody.
            conn.prepare_cached("UPDATE meta SET floor = floor + 1")?.execute([])?;
        }
        Ok(())
    }

    /// Cuts off pages that did not reach the disk, also those of a process that died over it. Free pages
    /// that are on the disk stay: a release may need one.
    ///
    /// One transaction: a page that is free for a moment would be taken by somebody else, could not be cut off
    /// any more, and the log would never fit into the file again.
    fn undo_growth(&self, conn: &Connection) {
        let undone = begin(conn).and_then(|()| {
            conn.execute("DELETE FROM reserve WHERE id <> ?1", [RESERVE_ROW])?;
            // Looking at its size opens nothing.
            let on_disk = std::fs::metadata(&self.file).map_or(0, |m| i64::try_from(m.len()).unwrap_or(0) / PAGE_BYTES);
            let beyond = page_count(conn)? - on_disk;
            if beyond > 0 {
                // One page a row: they have to be asked for.
                let mut cut = conn.prepare(&format!("PRAGMA incremental_vacuum({beyond})"))?;
                let mut rows = cut.query([])?;
                while rows.next()?.is_some() {}
            }
            conn.execute_batch("COMMIT")
        });
        if let Err(error) = undone {
            tracing::debug!(%error, "a file that could not be made longer is not cut yet");
        }
        roll_back(conn);
    }

    /// Copies the log into the file, so that the next writer starts it anew; insists.
    fn start_log_anew(&self, conn: &Connection, patience: &Patience) -> rusqlite::Result<()> {
        for _ in 0..TRIES {
            if Self::restart_log(conn, patience)? {
                return Ok(());
            }
            thread::sleep(TRY_EVERY);
        }
        Err(rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_BUSY), None))
    }

    /// Waits to be the only process that makes room.
    fn alone<R>(&mut self, run: impl FnOnce(&mut Self) -> R) -> R {
        for _ in 0..TRIES {
            if flock(&self.checkpointer, FlockOperation::NonBlockingLockExclusive).is_ok() {
                break;
            }
            thread::sleep(TRY_EVERY);
        }
        let result = run(self);
        let _ = flock(&self.checkpointer, FlockOperation::Unlock);
        result
    }

    /// Keeps the log short, unless another process is at it.
    fn checkpoint(&self, conn: &Connection, patience: &Patience) {
        if flock(&self.checkpointer, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let _ = Self::restart_log(conn, patience);
            let _ = flock(&self.checkpointer, FlockOperation::Unlock);
        }
    }

    /// Says whether it was done; not when a reader is in the way.
    fn restart_log(conn: &Connection, patience: &Patience) -> rusqlite::Result<bool> {
        let busy = patience.limited(CHECKPOINT_PATIENCE, || {
            conn.query_row("PRAGMA wal_checkpoint(RESTART)", [], |row| row.get::<_, i64>(0))
        });
        Ok(busy? == 0)
    }
}

impl Driver {
    /// Carries a command out, making room where that is what is missing.
    pub(super) fn attempt<R>(
        &mut self,
        need: Need,
        mut run: impl FnMut(&mut Self) -> Result<R, Fault>,
    ) -> Result<R, StoreError> {
        let (mut step, mut round) = (0, 1);
        loop {
            let outcome = self.begin().map_err(Fault::from).and_then(|()| run(self));
            match self.end_what_was_begun(outcome) {
                Err(Fault::Sql(error)) if is_full(&error) => {
                    if self.make_room(need, &mut step) {
                        continue;
                    }
                    if need != Need::Less || round == ROUNDS {
                        return Err(refused(&self.path, &error));
                    }
                    (step, round) = (0, round + 1);
                    thread::sleep(TRY_EVERY);
                }
                outcome => return outcome.map_err(|fault| self.refuse(fault)),
            }
        }
    }

    /// Commits what the command wrote, unless it has done that itself.
    fn end_what_was_begun<R>(&self, outcome: Result<R, Fault>) -> Result<R, Fault> {
        if self.conn.is_autocommit() {
            return outcome;
        }
        let outcome = outcome.and_then(|done| {
            self.keep_the_rest()?;
            self.conn.prepare_cached("COMMIT")?.execute([])?;
            Ok(done)
        });
        roll_back(&self.conn);
        outcome
    }

    /// A command that spent the reserve has what it needed: what is left is kept back again in the same transaction,
    /// or the next acquire takes it and the next release has nothing to spend.
    pub(super) fn keep_the_rest(&self) -> rusqlite::Result<()> {
        if !self.room.reserve_spent {
            return Ok(());
        }
        let number = |sql: &str| self.conn.prepare_cached(sql)?.query_row([], |row| row.get::<_, i64>(0));
        let free = number("PRAGMA freelist_count")?;
        if free > 0 && number("SELECT count(*) FROM reserve")? == 0 {
            self.conn.execute(KEEP, params![RESERVE_ROW, RESERVE_BYTES.min(free * SAFE_FILL_BYTES)])?;
        }
        Ok(())
    }

    /// Begins a transaction with nobody else writing, or goes on with the one that was begun.
    pub(super) fn begin(&self) -> rusqlite::Result<()> {
        if self.conn.is_autocommit() { begin(&self.conn) } else { Ok(()) }
    }

    /// The next thing that may help; `false` when there is none left.
    fn make_room(&mut self, need: Need, step: &mut u32) -> bool {
        loop {
            *step += 1;
            let (step, conn, patience) = (*step, &self.conn, &self.patience);
            let helped = self.room.alone(|room| match (step, need) {
                (1, _) => Some(room.bound(conn)),
                (2, _) => Some(room.start_log_anew(conn, patience).map(|()| true).or_else(|_| {
                    room.undo_growth(conn);
                    room.start_log_anew(conn, patience).map(|()| true)
                })),
                (3, Need::More | Need::Bytes(_)) | (4, Need::Less) => {
                    Some(room.grow(conn, patience, need).map(|()| true))
                }
                (3, Need::Less) => {
                    room.reserve_spent = true;
                    // One transaction with what it is spent for, or somebody else takes it.
                    let spent = begin(conn).and_then(|()| conn.execute("DELETE FROM reserve", [])).map(|_| true);
                    if spent.is_err() {
                        roll_back(conn);
                    }
                    Some(spent)
                }
                _ => None,
            });
            let Some(helped) = helped else { return false };
            if helped.unwrap_or(false) {
                return true;
            }
        }
    }

    /// Something was written.
    pub(super) fn committed(&mut self) {
        self.room.commits += 1;
        self.room.since_clearing += 1;
    }

    /// What can wait until everybody has their answer. Errors are met again by whoever writes next.
    pub(super) fn tidy(&mut self) {
        if self.room.commits < LOOK_EVERY {
            return;
        }
        self.room.commits = 0;
        self.shorten_log(LOG_FRAMES);
        if self.room.since_clearing >= CLEAR_EVERY {
            self.room.since_clearing = 0;
            let _ = self.clear_away();
            let _ = self.clear_bindings();
            if self.room.reserve_spent {
                let (conn, patience) = (&self.conn, &self.patience);
                let _ = self.room.alone(|room| room.grow(conn, patience, Need::More));
            }
        }
    }

    /// The last thing a process does here.
    pub(super) fn tidy_on_leaving(&mut self) {
        self.shorten_log(LEAVE_FRAMES);
    }

    fn shorten_log(&self, frames_allowed: i64) {
        let frames = self.conn.prepare_cached("PRAGMA wal_checkpoint(NOOP)");
        let frames = frames.and_then(|mut s| s.query_row([], |row| row.get::<_, i64>(1)));
        if frames.is_ok_and(|frames| frames > frames_allowed) {
            self.room.checkpoint(&self.conn, &self.patience);
        }
    }

    /// Removes rows that have been free for a while, some at a time. Their highest number becomes
    /// the floor, so that no later fence of the same name can be below it.
    fn clear_away(&mut self) -> rusqlite::Result<()> {
        let tx = self.conn.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        let (now, old) = (sql(now_ms()), sql(clock::wall_us().saturating_sub(KEEP_FREE_US)));
        let page: Vec<(String, i64, bool)> = tx
            .prepare_cached(
                "SELECT name, counter, counter < ?2 AND (boot <> ?3 OR (ends <= ?1 AND queue_ends <= ?1)) \
                 FROM locks WHERE name > ?4 ORDER BY name LIMIT ?5",
            )?
            .query_map(params![now, old, self.boot, self.room.cleared_up_to, CLEAR_ROWS], |row| {
                Ok((row.get(0)?, row.get(1)?, row.get(2)?))
            })?
            .collect::<rusqlite::Result<_>>()?;
        let free = || page.iter().filter(|(_, _, free)| *free);
        if let Some(highest) = free().map(|(_, counter, _)| *counter).max() {
            tx.execute("UPDATE meta SET floor = ?1 WHERE floor < ?1", [highest])?;
            for (name, ..) in free() {
                tx.prepare_cached("DELETE FROM locks WHERE name = ?1")?.execute([name])?;
                tx.prepare_cached("DELETE FROM waiting WHERE name = ?1")?.execute([name])?;
            }
        }
        tx.commit()?;
        let whole = page.len() == CLEAR_ROWS as usize;
        self.room.cleared_up_to = page.into_iter().next_back().filter(|_| whole).map_or_else(String::new, |r| r.0);
        Ok(())
    }
}

/// Begins a transaction with nobody else writing, and with no more pages than the file has.
///
/// SQLite raises the bound by itself for whoever sees a longer file, and what another process adds is in the log,
/// and seen, before it is known whether the disk has room for it.
fn begin(conn: &Connection) -> rusqlite::Result<()> {
    let number = |sql: &str| conn.prepare_cached(sql)?.query_row([], |row| row.get::<_, i64>(0));
    conn.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
    let bounded = number("PRAGMA page_count").and_then(|pages| {
        if number("PRAGMA max_page_count")? > pages {
            number(&format!("PRAGMA max_page_count = {pages}"))?;
        }
        Ok(())
    });
    if bounded.is_err() {
        roll_back(conn);
    }
    bounded
}

/// Takes back what was not committed, if anything.
pub(super) fn roll_back(conn: &Connection) {
    if !conn.is_autocommit() {
        let _ = conn.execute_batch("ROLLBACK");
    }
}

fn page_count(conn: &Connection) -> rusqlite::Result<i64> {
    conn.query_row("PRAGMA page_count", [], |row| row.get(0))
}

#[cfg(test)]
mod tests {
    use super::super::schema;
    use super::*;

    fn size_of(log: &Path) -> u64 {
        std::fs::metadata(log).map_or(0, |m| m.len())
    }

    fn reserved(conn: &Connection) -> i64 {
        let size = "SELECT ifnull(sum(length(filler)), 0) FROM reserve";
        conn.query_row(size, [], |row| row.get(0)).expect("read")
    }

    #[test]
    fn the_log_is_as_long_as_growing_needs_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("locks.db");
        let (conn, patience, _) = schema::open(&path).expect("opens");
        let room = Room::prepare(&conn, &patience, &path).expect("room");
        room.start_log_anew(&conn, &patience).expect("no reader");
        let longer = i64::try_from(size_of(&room.log) / FRAME_BYTES).expect("small") + 300;
        room.lengthen_log(&conn, longer).expect("there is room");
        let frames = size_of(&room.log) / FRAME_BYTES;
        assert!(frames >= u64::try_from(longer).expect("positive"), "{frames} of {longer} frames are on the disk");
    }

    #[test]
    fn a_reserve_that_was_spent_is_made_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("locks.db");
        let (conn, patience, _) = schema::open(&path).expect("opens");
        let mut room = Room::prepare(&conn, &patience, &path).expect("room");
        assert_eq!(reserved(&conn), RESERVE_BYTES);
        conn.execute("DELETE FROM reserve", []).expect("spent");
        room.reserve_spent = true;
        room.grow(&conn, &patience, Need::More).expect("there is room");
        assert_eq!((reserved(&conn), room.reserve_spent), (RESERVE_BYTES, false));
        // And for whoever opens the file after the one who spent it is gone.
        conn.execute("DELETE FROM reserve", []).expect("spent");
        drop((conn, room));
        let (conn, patience, _) = schema::open(&path).expect("opens");
        let room = Room::prepare(&conn, &patience, &path).expect("room");
        assert_eq!((reserved(&conn), room.reserve_spent), (RESERVE_BYTES, false));
    }
}
