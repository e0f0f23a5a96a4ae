//! Transactions on the driver thread: begin, commit, roll back, and retries when the disk is full.

use rusqlite::{Connection, ffi};

use super::disk_reserve::Need;
use super::driver::{Fault, SqliteDriver};
use super::schema::{failure, is_failed_write, is_full};
use crate::store::StoreError;

impl SqliteDriver {
    /// Runs a command in a transaction. If the disk is full, makes space and runs it again, for as long as that helps.
    pub(super) fn attempt<R>(
        &mut self,
        need: Need,
        mut run: impl FnMut(&mut Self) -> Result<R, Fault>,
    ) -> Result<R, StoreError> {
        let mut step = 0;
        loop {
            match self.attempt_once(need, &mut run) {
                Err(Fault::Sql(error)) if is_full(&error) && self.make_space(need, &mut step) => {}
                outcome => return outcome.map_err(|fault| self.store_error(fault)),
            }
        }
    }

    fn make_space(&self, need: Need, step: &mut u32) -> bool {
        self.reserve.make_space(&self.conn, &self.busy_timeout, need, step)
    }

    fn attempt_once<R>(&mut self, need: Need, run: &mut impl FnMut(&mut Self) -> Result<R, Fault>) -> Result<R, Fault> {
        let begun = self.begin().and_then(|()| self.reserve.require(&self.conn, need));
        let outcome = begun.map_err(Fault::from).and_then(|()| run(self));
        let outcome = match outcome {
            Ok(done) if !self.conn.is_autocommit() => self.commit().map(|()| done).map_err(Fault::from),
            outcome => outcome,
        };
        roll_back(&self.conn);
        outcome.map_err(|fault| match fault {
            Fault::Sql(error) if is_failed_write(&error) && self.reserve.lock.disk_is_full() => {
                failure(ffi::SQLITE_FULL).into()
            }
            fault => fault,
        })
    }

    /// Runs `run` in one transaction and commits it. No other process writes meanwhile.
    pub(super) fn in_transaction<R>(&mut self, run: impl FnOnce(&mut Self) -> Result<R, Fault>) -> Result<R, Fault> {
        self.begin()?;
        let outcome = run(self).and_then(|done| {
            self.commit()?;
            Ok(done)
        });
        roll_back(&self.conn);
        let done = outcome?;
        self.committed();
        Ok(done)
    }

    /// Begins a transaction with the write lock, unless one is open already.
    pub(super) fn begin(&self) -> rusqlite::Result<()> {
        if self.conn.is_autocommit() {
            self.conn.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        }
        Ok(())
    }

    /// Commits the open transaction if it leaves enough free pages in the reserve.
    pub(super) fn commit(&self) -> rusqlite::Result<()> {
        if !self.reserve.is_left(&self.conn)? {
            return Err(failure(ffi::SQLITE_FULL));
        }
        self.conn.prepare_cached("COMMIT")?.execute([])?;
        Ok(())
    }
}

/// Rolls the open transaction back, if there is one.
pub(super) fn roll_back(conn: &Connection) {
    if !conn.is_autocommit() {
        let _ = conn.execute_batch("ROLLBACK");
    }
}
