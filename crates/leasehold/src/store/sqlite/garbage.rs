//! Garbage collection: removes the rows of locks that have been free for a while, expired bindings and the FIFOs of
//! dead processes, and decides when the log is checkpointed.

use rusqlite::params;

use super::boot::now_ms;
use super::driver::SqliteDriver;
use super::row::sql;
use super::sweep;
use crate::clock;

/// Own commits between two checks of the length of the log.
const CHECK_EVERY: u32 = 64;
/// Frames in the log before a checkpoint.
const LOG_FRAMES: i64 = 4_000;
/// Frames in the log before a checkpoint by a process that closes the store. The next process to open the file alone
/// reads the whole log, and short-lived processes make too few commits to look at its length.
const LOG_FRAMES_ON_CLOSE: i64 = 64;
/// Own commits between two collections.
const COLLECT_EVERY: u32 = 256;
/// Rows of locks that one collection examines.
const COLLECT_ROWS: u32 = 512;
/// A free row is kept this long, because the next holder of the same name can reuse it.
const KEEP_FREE_US: u64 = 1_000_000;
/// Writes one page, which SQLite does only if a value changes. A higher floor only skips a fence.
const RESTART_LOG: &str = "UPDATE meta SET floor = floor + 1";

impl SqliteDriver {
    /// Counts a commit of this process.
    pub(super) fn committed(&mut self) {
        self.garbage.commits_since_check += 1;
        self.garbage.commits_since_collection += 1;
    }

    /// Does the maintenance that is due, after all replies are sent. Errors are ignored: the next writer meets them
    /// again.
    pub(super) fn maintain(&mut self) {
        if self.garbage.commits_since_check < CHECK_EVERY {
            return;
        }
        self.garbage.commits_since_check = 0;
        self.reserve.shorten_log(&self.conn, &self.busy_timeout, LOG_FRAMES);
        if self.garbage.commits_since_collection >= COLLECT_EVERY {
            self.garbage.commits_since_collection = 0;
            self.collect();
        }
    }

    /// Does maintenance before the store is closed. Of many short-lived processes that each write little, one in some
    /// dozens finds the log long and collects the garbage of all of them.
    pub(super) fn maintain_on_close(&mut self) {
        if self.reserve.shorten_log(&self.conn, &self.busy_timeout, LOG_FRAMES_ON_CLOSE) {
            self.collect();
            // Only processes that have the file open know that the log was checkpointed. A write restarts it for all.
            let _ = self.conn.execute(RESTART_LOG, []);
        }
        sweep::sweep(&mut self.conn, &self.liveness);
    }

    fn collect(&mut self) {
        let _ = self.collect_locks();
        let _ = self.clear_bindings();
    }

    /// Removes some rows that have been free for a while. Their highest number becomes the floor, so that no later
    /// fence of the same name can be below it.
    fn collect_locks(&mut self) -> rusqlite::Result<()> {
        let tx = self.conn.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        let (now, old) = (sql(now_ms()), sql(clock::wall_us().saturating_sub(KEEP_FREE_US)));
        let page: Vec<(String, i64, bool)> = tx
            .prepare_cached(
                "SELECT name, counter, counter < ?2 AND ((boot <> ?3 AND written > ?1) \
                 OR (ends <= ?1 AND queue_ends <= ?1)) \
                 FROM locks WHERE name > ?4 ORDER BY name LIMIT ?5",
            )?
            .query_map(params![now, old, self.boot, self.garbage.examined_up_to, COLLECT_ROWS], |row| {
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
        let more = page.len() == COLLECT_ROWS as usize;
        self.garbage.examined_up_to = page.into_iter().next_back().filter(|_| more).map_or_else(String::new, |r| r.0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rusqlite::Connection;

    use super::super::checkpoint::frames;
    use super::super::disk_reserve::DiskReserve;
    use super::super::permissions::Sharing;
    use super::super::{SqliteStore, schema};
    use super::*;
    use crate::facts::{LockName, Owner, Token, Ttl};
    use crate::store::{AcquireRequest, Release, Store, Try};

    /// Opens the store, takes and releases a lock, and closes the store.
    async fn come_and_go(path: &Path, name: &str) {
        let store = SqliteStore::open(path).expect("opens");
        let request = AcquireRequest {
            name: LockName::new(name).expect("a name"),
            token: Token::random(),
            ttl: Ttl::default(),
            owner: Owner::default(),
            fenced: true,
            listens: true,
            since_ms: 1,
        };
        assert!(matches!(store.try_acquire(&request).await, Ok(Try::Granted(_))));
        assert_eq!(store.release(&request.name, &request.token).await, Ok(Release::Released));
        store.close().await;
    }

    #[tokio::test]
    async fn short_lived_processes_remove_old_rows() {
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
    async fn short_lived_processes_leave_a_short_log() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("locks.db");
        for round in 0..100 {
            // One name, freed a moment ago: there is no garbage.
            come_and_go(&path, "the-same").await;
            let sharing = Sharing::of(dir.path()).expect("a directory");
            let (conn, busy_timeout, _) = schema::open(&path, sharing).expect("opens");
            let _reserve = DiskReserve::prepare(&conn, &busy_timeout, &path, sharing).expect("room");
            let found = frames(&conn).expect("read");
            assert!(found <= LOG_FRAMES_ON_CLOSE, "{found} frames after round {round}");
        }
    }
}
