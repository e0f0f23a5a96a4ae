//! Room on the disk: the log is kept short, free rows are cleared away, and a lock can be given up when the
//! disk is full.
//!
//! A release writes over a row in place and leaves it as long as it was. So it needs no page, only a frame or two
//! in the log, and those are there. The log is never cut short: after a checkpoint its frames are written over. A
//! checkpoint needs no room: the file has its pages on the disk before anybody can use them, and nobody goes
//! beyond them. Checkpoints and growth take turns, so that what one has made longer the other does not cut.
//!
//! To hand a lock on takes more: a message, and the row of the new holder. Whoever takes pages leaves some for
//! that. Should there be none, the lock is freed in place, and its waiters see it when they next look.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rusqlite::{Connection, FileControl, ffi, params};
use rustix::fs::{FlockOperation, flock};

use super::boot::now_ms;
use super::driver::{Driver, Fault};
use super::modes::Sharing;
use super::path::{beside, unusable};
use super::row::sql;
use super::schema::{Patience, is_failed_write, is_full, refused};
use super::sweep;
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
/// Tries to start the log anew, and to get the turn, when the disk is full.
const CHECKPOINT_TRIES: u32 = 20;
const TURN_TRIES: u32 = 500;
const TRY_EVERY: Duration = Duration::from_millis(2);
const PAGE_BYTES: i64 = 1_024;
/// A page and its header in the log.
const FRAME_BYTES: i64 = 1_024 + 24;
/// The least the log has on the disk.
const LOG_LEAST_BYTES: i64 = 128 * FRAME_BYTES;
/// Enough frames for nearly every command.
const LOG_FRAMES_AT_ONCE: i64 = 32;
/// The least and the most that the file grows by, unless more is asked for.
const GROW_PAGES: i64 = 128;
const GROW_PAGES_AT_MOST: i64 = 2_048;
/// Whoever takes a page leaves so many.
const LEAVE_PAGES: i64 = 16;
/// The file's length is a multiple of this. Without a chunk SQLite would not make it longer before it writes.
const CHUNK_BYTES: i32 = 4_096;
const FILL: &str = "INSERT OR REPLACE INTO reserve (id, filler) VALUES (1, zeroblob(?1))";
const EMPTY: &str = "DELETE FROM reserve";
/// Writes one page, which SQLite does only where something changes. A higher floor means no more than a skipped fence.
const START_LOG: &str = "UPDATE meta SET floor = floor + 1";

/// What a command needs when the disk is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// It takes room: it is refused.
    More,
    /// The same, and so many bytes of it.
    Bytes(usize),
    /// It gives room back, or keeps what there is, but may need a page on the way.
    Less,
    /// It writes over what is there: it must not fail.
    Nothing,
}

impl Need {
    fn takes_pages(self) -> bool {
        matches!(self, Self::More | Self::Bytes(_))
    }

    fn is_small(self) -> bool {
        !matches!(self, Self::Bytes(_))
    }

    /// How many things are tried to make room for it.
    fn steps(self) -> u32 {
        match self {
            Self::More | Self::Bytes(_) => 3,
            Self::Less => 6,
            // A reader in the way of the log is gone a moment later.
            Self::Nothing => 20,
        }
    }
}

/// The thread's bookkeeping.
pub(super) struct Room {
    /// Whoever has it locked runs a checkpoint, or makes the file longer. Not a file of SQLite's: those must
    /// never be opened or closed by anybody else in the process.
    turn: File,
    /// The names of the file and its log, to look at their sizes.
    file: PathBuf,
    log: PathBuf,
    commits: u32,
    since_clearing: u32,
    cleared_up_to: String,
    /// Nothing is committed that leaves fewer free pages.
    leave: i64,
}

impl Room {
    /// Makes sure that what is going to be locked can be given up.
    pub(super) fn prepare(
        conn: &Connection,
        patience: &Patience,
        path: &Path,
        sharing: Sharing,
    ) -> Result<Self, StoreError> {
        let lock = beside(path, ".ckpt");
        let mut open = OpenOptions::new();
        open.write(true).mode(0o600);
        let turn = match open.clone().create_new(true).open(&lock) {
            Ok(file) => sharing.apply(&file).map(|()| file),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => open.open(&lock),
            Err(error) => Err(error),
        };
        let turn = turn.map_err(|e| unusable(&lock, &e))?;
        let room = Self {
            turn,
            file: path.to_owned(),
            log: beside(path, "-wal"),
            commits: 0,
            since_clearing: 0,
            cleared_up_to: String::new(),
            leave: 0,
        };
        room.set_up(conn, patience).map_err(|e| refused(path, &e))?;
        Ok(room)
    }

    fn set_up(&self, conn: &Connection, patience: &Patience) -> rusqlite::Result<()> {
        let mut chunk = CHUNK_BYTES;
        conn.file_control(Some("main"), FileControl::ChunkSize(&mut chunk))?;
        stay_within(conn)?;
        if self.is_roomy(conn)? {
            return Ok(());
        }
        // Somebody else may have been first.
        let grown = self.alone(|| if self.is_roomy(conn)? { Ok(()) } else { grow(conn, patience, Need::More) });
        // Where the disk is full already, what is held can still be given up.
        if self.is_whole(conn)? { Ok(()) } else { grown }
    }

    fn is_roomy(&self, conn: &Connection) -> rusqlite::Result<bool> {
        Ok(size_of(&self.log) >= LOG_LEAST_BYTES && self.is_whole(conn)? && free_pages(conn)? >= LEAVE_PAGES)
    }

    /// Whether the disk has every page of the file. Not when somebody died, or had no room, over making it.
    fn is_whole(&self, conn: &Connection) -> rusqlite::Result<bool> {
        Ok(size_of(&self.file) >= page_count(conn)? * PAGE_BYTES)
    }

    /// Whether the log can take what a command on one lock writes, without growing.
    fn log_has_room(&self, conn: &Connection) -> bool {
        frames(conn).is_ok_and(|frames| (frames + LOG_FRAMES_AT_ONCE) * FRAME_BYTES <= size_of(&self.log))
    }

    /// What the transaction that was begun has to leave: whoever takes none may leave as few as there are.
    pub(super) fn demand(&mut self, conn: &Connection, need: Need) -> rusqlite::Result<()> {
        self.leave = if need.takes_pages() { LEAVE_PAGES.min(free_pages(conn)?) } else { 0 };
        Ok(())
    }

    /// Waits to be the only process that makes room. One that is stopped over it is not waited for for ever.
    fn alone<R>(&self, run: impl FnOnce() -> rusqlite::Result<R>) -> rusqlite::Result<R> {
        for _ in 0..TURN_TRIES {
            if let Some(_turn) = self.turn_now() {
                return run();
            }
            thread::sleep(TRY_EVERY);
        }
        Err(failure(ffi::SQLITE_BUSY))
    }

    /// Whether there is no room for another block. A quota that is used up comes from SQLite as any failed write.
    fn is_refused(&self) -> bool {
        let written = self.turn.write_all_at(&[0; CHUNK_BYTES.cast_unsigned() as usize], 0);
        let _ = self.turn.set_len(0);
        written.is_err_and(|e| matches!(e.kind(), ErrorKind::QuotaExceeded | ErrorKind::StorageFull))
    }

    fn turn_now(&self) -> Option<MyTurn<'_>> {
        let locked = flock(&self.turn, FlockOperation::NonBlockingLockExclusive);
        locked.is_ok().then_some(MyTurn(&self.turn))
    }
}

struct MyTurn<'a>(&'a File);

impl Drop for MyTurn<'_> {
    fn drop(&mut self) {
        let _ = flock(self.0, FlockOperation::Unlock);
    }
}

impl Driver {
    /// Carries a command out, making room where that is what is missing.
    pub(super) fn attempt<R>(
        &mut self,
        need: Need,
        mut run: impl FnMut(&mut Self) -> Result<R, Fault>,
    ) -> Result<R, StoreError> {
        let mut step = 0;
        loop {
            match self.attempt_once(need, &mut run) {
                Err(Fault::Sql(error)) if is_full(&error) && self.make_room(need, &mut step) => {}
                outcome => return outcome.map_err(|fault| self.refuse(fault)),
            }
        }
    }

    fn attempt_once<R>(&mut self, need: Need, run: &mut impl FnMut(&mut Self) -> Result<R, Fault>) -> Result<R, Fault> {
        let begun = self.begin().and_then(|()| self.room.demand(&self.conn, need));
        let outcome = begun.map_err(Fault::from).and_then(|()| run(self));
        let outcome = match outcome {
            Ok(done) if !self.conn.is_autocommit() => self.commit().map(|()| done).map_err(Fault::from),
            outcome => outcome,
        };
        roll_back(&self.conn);
        outcome.map_err(|fault| match fault {
            Fault::Sql(error) if is_failed_write(&error) && self.room.is_refused() => failure(ffi::SQLITE_FULL).into(),
            fault => fault,
        })
    }

    /// The next thing that may help; `false` when there is none left.
    fn make_room(&self, need: Need, step: &mut u32) -> bool {
        let (conn, patience) = (&self.conn, &self.patience);
        while *step < need.steps() {
            *step += 1;
            let grows = *step % 2 == 1 && need != Need::Nothing;
            // Whoever copies the log keeps all others from writing, releases too: not where it would help nobody.
            let make = || match grows {
                true => grow(conn, patience, need),
                false if self.room.log_has_room(conn) && need.is_small() => Ok(()),
                false => start_log_anew(conn, patience),
            };
            if self.room.alone(make).is_ok() {
                return true;
            }
        }
        false
    }

    /// Begins a transaction with nobody else writing, or goes on with the one that was begun.
    pub(super) fn begin(&self) -> rusqlite::Result<()> {
        if self.conn.is_autocommit() {
            self.conn.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        }
        Ok(())
    }

    /// Commits what was begun, if it leaves enough to others.
    pub(super) fn commit(&self) -> rusqlite::Result<()> {
        if self.room.leave > 0 && free_pages(&self.conn)? < self.room.leave {
            return Err(failure(ffi::SQLITE_FULL));
        }
        self.conn.prepare_cached("COMMIT")?.execute([])?;
        Ok(())
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
            self.clear();
        }
    }

    /// The last thing a process does here. Of many that come and go, and write little each, one in some dozens finds
    /// the log long, and clears away for all.
    pub(super) fn tidy_on_leaving(&mut self) {
        if self.shorten_log(LEAVE_FRAMES) {
            self.clear();
            // Only processes that have the file open know that the log was copied. A write restarts it for all.
            let _ = self.conn.execute(START_LOG, []);
        }
        sweep::sweep(&mut self.conn, &self.alive);
    }

    fn clear(&mut self) {
        let _ = self.clear_away();
        let _ = self.clear_bindings();
    }

    /// Keeps the log short, unless another process is at it. Whether it was long.
    fn shorten_log(&self, frames_allowed: i64) -> bool {
        let is_long = frames(&self.conn).is_ok_and(|frames| frames > frames_allowed);
        let turn = if is_long { self.room.turn_now() } else { None };
        if turn.is_some() {
            let _ = checkpoint(&self.conn, &self.patience);
        }
        turn.is_some()
    }

    /// Removes rows that have been free for a while, some at a time. Their highest number becomes
    /// the floor, so that no later fence of the same name can be below it.
    fn clear_away(&mut self) -> rusqlite::Result<()> {
        let tx = self.conn.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        let (now, old) = (sql(now_ms()), sql(clock::wall_us().saturating_sub(KEEP_FREE_US)));
        let page: Vec<(String, i64, bool)> = tx
            .prepare_cached(
                "SELECT name, counter, counter < ?2 AND ((boot <> ?3 AND written > ?1) \
                 OR (ends <= ?1 AND queue_ends <= ?1)) \
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

/// Takes back what was not committed, if anything.
pub(super) fn roll_back(conn: &Connection) {
    if !conn.is_autocommit() {
        let _ = conn.execute_batch("ROLLBACK");
    }
}

/// Makes the file longer; for who has the turn.
fn grow(conn: &Connection, patience: &Patience, need: Need) -> rusqlite::Result<()> {
    // Left by somebody who died over it.
    let left = conn.execute(EMPTY, [])?;
    let grown = lengthen(conn, patience, need);
    stay_within(conn)?;
    if left > 0 { Ok(()) } else { grown }
}

/// First on the disk, where it can be refused and nobody has seen anything. Then in the file: as filler, which is
/// written to the log and makes that long enough as well, and is taken out again.
fn lengthen(conn: &Connection, patience: &Patience, need: Need) -> rusqlite::Result<()> {
    let pages = page_count(conn)?;
    let asked =
        if let Need::Bytes(bytes) = need { i64::try_from(bytes).unwrap_or(i64::MAX) / PAGE_BYTES * 2 } else { 0 };
    let step = (pages / 4).clamp(GROW_PAGES, GROW_PAGES_AT_MOST).max(asked);
    // Some of the new pages hold the tables of the file itself.
    let bound = pages + step + step / 16 + 16;
    allocate(conn, bound)?;
    // What is in the log would make it as long again. To copy it may cut the file.
    checkpoint(conn, patience)?;
    allocate(conn, bound)?;
    conn.query_row(&format!("PRAGMA max_page_count = {bound}"), [], |_| Ok(()))?;
    conn.execute(FILL, params![step * PAGE_BYTES])?;
    conn.execute(EMPTY, [])?;
    Ok(())
}

/// SQLite writes into every block, and calls it a failed write when there is none.
fn allocate(conn: &Connection, pages: i64) -> rusqlite::Result<()> {
    let mut bytes = pages * PAGE_BYTES;
    let allocated = conn.file_control(Some("main"), FileControl::SizeHint(&mut bytes));
    allocated.map_err(|_| failure(ffi::SQLITE_FULL))
}

/// Nothing may go beyond the pages there are.
fn stay_within(conn: &Connection) -> rusqlite::Result<()> {
    let pages = page_count(conn)?;
    conn.query_row(&format!("PRAGMA max_page_count = {pages}"), [], |_| Ok(()))
}

/// Copies the log into the file, so that the next writer starts it anew; insists.
fn start_log_anew(conn: &Connection, patience: &Patience) -> rusqlite::Result<()> {
    for _ in 0..CHECKPOINT_TRIES {
        if checkpoint(conn, patience)? {
            return Ok(());
        }
        thread::sleep(TRY_EVERY);
    }
    Err(failure(ffi::SQLITE_BUSY))
}

/// Says whether all of it was done; not when a reader is in the way.
fn checkpoint(conn: &Connection, patience: &Patience) -> rusqlite::Result<bool> {
    let busy = patience.limited(CHECKPOINT_PATIENCE, || {
        conn.query_row("PRAGMA wal_checkpoint(RESTART)", [], |row| row.get::<_, i64>(0))
    });
    Ok(busy? == 0)
}

/// How many are in the log.
fn frames(conn: &Connection) -> rusqlite::Result<i64> {
    conn.prepare_cached("PRAGMA wal_checkpoint(NOOP)")?.query_row([], |row| row.get(1))
}

fn page_count(conn: &Connection) -> rusqlite::Result<i64> {
    conn.query_row("PRAGMA page_count", [], |row| row.get(0))
}

fn free_pages(conn: &Connection) -> rusqlite::Result<i64> {
    conn.prepare_cached("PRAGMA freelist_count")?.query_row([], |row| row.get(0))
}

/// Looking at its size opens nothing.
fn size_of(file: &Path) -> i64 {
    std::fs::metadata(file).map_or(0, |m| i64::try_from(m.len()).unwrap_or(i64::MAX))
}

fn failure(code: i32) -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)
}

#[cfg(test)]
mod tests {
    use super::super::row::Key;
    use super::super::{SqliteStore, fast, schema};
    use super::*;
    use crate::facts::{LockName, Owner, Token, Ttl};
    use crate::machine::{Asking, InboxId};
    use crate::store::{Claim, Release, Store, Try};

    const BOOT: i64 = 1;

    fn opened(dir: &Path) -> (Connection, Patience, Room) {
        let path = dir.join("locks.db");
        let sharing = Sharing::of(dir).expect("a directory");
        let (conn, patience, _) = schema::open(&path, sharing).expect("opens");
        let room = Room::prepare(&conn, &patience, &path, sharing).expect("room");
        (conn, patience, room)
    }

    /// Takes every free page there is. A row keeps some hundred bytes to itself, and each page takes 1,020 of the rest.
    fn use_up(conn: &Connection) {
        let free = free_pages(conn).expect("read");
        conn.execute("INSERT INTO reserve (filler) VALUES (zeroblob(?1))", [free * 1_020 + 480]).expect("room");
        assert_eq!(free_pages(conn), Ok(0));
    }

    /// Opens the store, takes a lock of this name, gives it back and leaves.
    async fn come_and_go(path: &Path, name: &str) {
        let store = SqliteStore::open(path).expect("opens");
        let claim = Claim {
            name: LockName::new(name).expect("a name"),
            token: Token::random(),
            ttl: Ttl::default(),
            owner: Owner::default(),
            fenced: true,
            listens: true,
            since_ms: 1,
        };
        assert!(matches!(store.try_acquire(&claim).await, Ok(Try::Granted(_))));
        assert_eq!(store.release(&claim.name, &claim.token).await, Ok(Release::Released));
        store.close().await;
    }

    #[tokio::test]
    async fn those_who_come_and_go_clear_away_what_was_left() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("locks.db");
        let count = |sql: &str| {
            let file = Connection::open(&path).expect("opens");
            file.query_row(sql, [], |row| row.get::<_, u32>(0)).expect("read")
        };
        for number in 0..100 {
            come_and_go(&path, &format!("order:{number}")).await;
        }
        // As if that had been a while ago.
        Connection::open(&path)
            .expect("opens")
            .execute("UPDATE locks SET counter = counter - 2000000", [])
            .expect("set");
        for number in 100..200 {
            come_and_go(&path, &format!("order:{number}")).await;
        }
        let left = count("SELECT count(*) FROM locks");
        assert!(left <= 100, "{left} rows of 200 names");
        assert_eq!(count("SELECT count(*) FROM locks WHERE name LIKE '%:order:5_'"), 0, "nothing of the first");
    }

    /// Every process that opens the database alone reads the whole log.
    #[tokio::test]
    async fn those_who_come_and_go_leave_a_short_log() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("locks.db");
        for round in 0..100 {
            // One name, freed a moment ago: there is nothing to clear away.
            come_and_go(&path, "the-same").await;
            let found = frames(&opened(dir.path()).0).expect("read");
            assert!(found <= LEAVE_FRAMES, "{found} frames after round {round}");
        }
    }

    #[test]
    fn a_release_needs_no_page_and_hardly_any_log() {
        let dir = tempfile::tempdir().expect("a directory");
        let (conn, _, _room) = opened(dir.path());
        let me = InboxId("me".into());
        let mut held = Vec::new();
        for i in 0..60_usize {
            let (name, token) = (Key::from(format!("{i:03}{}", "x".repeat(i * 8))), Token::random());
            let asking = Asking {
                token: token.clone(),
                inbox: Some(me.clone()),
                ttl_ms: 60_000,
                since_ms: 1,
                owner: Owner::named("o".repeat(i * 4 + 1)).expect("valid"),
                fenced: true,
            };
            assert!(fast::take(&conn, BOOT, &name, &asking).expect("room").is_some());
            held.push((name, token));
        }
        use_up(&conn);
        for (i, (name, token)) in held.iter().enumerate() {
            let before = frames(&conn).expect("read");
            let freed =
                if i % 2 == 0 { fast::release(&conn, &me, name, token) } else { fast::free(&conn, name, token) };
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
        let (conn, patience, room) = opened(dir.path());
        assert!(room.is_roomy(&conn).expect("read"));
        for n in 1..5 {
            let (before, free) = (page_count(&conn).expect("read"), free_pages(&conn).expect("read"));
            conn.execute("INSERT INTO events (ns, json) VALUES ('', zeroblob(?1))", [free * 1_000]).expect("room");
            grow(&conn, &patience, Need::More).expect("there is room");
            assert!(page_count(&conn).expect("read") > before && room.is_whole(&conn).expect("read"));
            // All of it, and not a hole that takes room later.
            let blocks = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&room.file).expect("there"));
            assert!(
                blocks * 512 >= u64::try_from(page_count(&conn).expect("read") * PAGE_BYTES).expect("small"),
                "{n}"
            );
            let beyond: i64 = conn.query_row("PRAGMA max_page_count", [], |row| row.get(0)).expect("read");
            assert_eq!(beyond, page_count(&conn).expect("read"));
        }
        assert!(conn.query_row("PRAGMA wal_checkpoint(RESTART)", [], |row| row.get::<_, i64>(0)).expect("done") == 0);
        assert!(room.is_whole(&conn).expect("read"), "a checkpoint cuts nothing off");
    }

    #[test]
    fn a_log_that_is_gone_is_made_long_enough_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let (conn, _, room) = opened(dir.path());
        let log = room.log.clone();
        drop((conn, room));
        // As another program leaves it that was the last to close the file.
        let other = Connection::open(dir.path().join("locks.db")).expect("opens");
        other.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).expect("done");
        drop(other);
        assert_eq!(size_of(&log), 0);
        let (_conn, _, _room) = opened(dir.path());
        assert!(size_of(&log) >= LOG_LEAST_BYTES);
    }

    #[test]
    fn what_somebody_left_who_died_while_the_file_grew_is_room() {
        let dir = tempfile::tempdir().expect("a directory");
        let (conn, _, room) = opened(dir.path());
        use_up(&conn);
        assert!(!room.is_roomy(&conn).expect("read"));
        drop((conn, room));
        let (conn, _, room) = opened(dir.path());
        assert!(room.is_roomy(&conn).expect("read"));
        let left: i64 = conn.query_row("SELECT count(*) FROM reserve", [], |row| row.get(0)).expect("read");
        assert_eq!(left, 0);
    }
}
