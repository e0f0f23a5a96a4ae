//! Bindings: one row each. A slot on a node is a row that names the node, so it exists as long as its binding.
//!
//! A lease ends with the boot that it was granted in. A binding outlives a reboot: in its own boot it expires by the
//! boot clock, after a reboot by the wall clock.

use std::time::Duration;

use rusqlite::{OptionalExtension, Row, params};

use super::boot::now_ms;
use super::disk_reserve::Need;
use super::driver::{Fault, SqliteDriver};
use super::row::{sql, unsql};
use crate::clock::wall_ms;
use crate::facts::{ClaimId, LockName, Retention};
use crate::store::record::{self, RecordVerdict};
use crate::store::{Bound, Change, Changed, Create, Expected, NewBinding, Step, StoreError, StoreErrorKind};

/// Expired bindings that one garbage collection removes.
const CLEAR_ROWS: u32 = 128;

// Whether a binding has not expired. Parameters: 2 boot, 3 boot clock, 4 wall clock.
const LIVES: &str = "CASE boot WHEN ?2 THEN ends > ?3 ELSE ends_wall > ?4 END";

/// A creation of a binding, with the keys it needs.
pub(super) struct Creating {
    pub(super) key: String,
    pub(super) slots: Option<(String, u32)>,
    pub(super) new: NewBinding,
}

/// A change or removal of a binding.
pub(super) struct Changing {
    pub(super) key: String,
    pub(super) how: How,
}

/// The kinds of change.
pub(super) enum How {
    Change(Expected, Change),
    Remove(ClaimId),
    Advance(Step),
    Withdraw(ClaimId),
}

impl How {
    /// The size of the value that is written, in bytes; 0 for a removal.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Change(_, change) => change.value.len(),
            Self::Advance(step) => step.value.len(),
            Self::Remove(_) | Self::Withdraw(_) => 0,
        }
    }
}

impl SqliteDriver {
    pub(super) fn create_binding(&mut self, creating: &Creating) -> Result<Create, StoreError> {
        // Usually the binding exists already, which a read shows without the write lock.
        if let Some((bound, _)) = self.read_binding(&creating.key)? {
            return Ok(existing(bound, &creating.new.claim));
        }
        let need = Need::Bytes(creating.new.value.len());
        self.durably(|driver| {
            driver.attempt(need, |driver| driver.in_transaction(|driver| driver.create_inside(creating)))
        })
    }

    pub(super) fn create_inside(&mut self, Creating { key, slots, new }: &Creating) -> Result<Create, Fault> {
        if let Some((bound, _)) = self.binding_inside(key)? {
            return Ok(existing(bound, &new.claim));
        }
        if let Some((slots, of)) = slots {
            let count = format!("SELECT count(*) FROM bindings WHERE slots = ?1 AND {LIVES}");
            let taken: i64 = self
                .conn
                .prepare_cached(&count)?
                .query_row(params![slots, self.boot, sql(now_ms()), sql(wall_ms())], |row| row.get(0))?;
            if taken >= i64::from(*of) {
                return Ok(Create::NoSlot);
            }
        }
        let slots = slots.as_ref().map(|(slots, _)| slots.as_str());
        self.insert_inside(key, &new.claim, 0, new.keep, slots, &new.value)?;
        Ok(Create::Created)
    }

    fn insert_inside(
        &mut self,
        key: &str,
        claim: &ClaimId,
        revision: u64,
        keep: Retention,
        slots: Option<&str>,
        value: &[u8],
    ) -> Result<(), Fault> {
        const WRITE: &str = "INSERT OR REPLACE INTO bindings (key, claim, revision, keep_ms, slots, ends, boot, ends_wall, value) \
            VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";
        let keep = keep.as_millis();
        let (ends, ends_wall) = (sql(now_ms() + keep), sql(wall_ms() + keep));
        let row = params![key, claim.as_str(), sql(revision), sql(keep), slots, ends, self.boot, ends_wall, value];
        self.conn.prepare_cached(WRITE)?.execute(row)?;
        Ok(())
    }

    pub(super) fn read_binding(&mut self, key: &str) -> Result<Option<(Bound, Duration)>, StoreError> {
        self.binding_inside(key).map_err(|fault| self.store_error(fault))
    }

    fn binding_inside(&self, key: &str) -> Result<Option<(Bound, Duration)>, Fault> {
        let read = format!(
            "SELECT claim, revision, keep_ms, slots, CASE boot WHEN ?2 THEN ends - ?3 ELSE ends_wall - ?4 END, value \
             FROM bindings WHERE key = ?1 AND {LIVES}"
        );
        let mut statement = self.conn.prepare_cached(&read)?;
        let now = params![key, self.boot, sql(now_ms()), sql(wall_ms())];
        let found = statement.query_row(now, |row| self.bound(row)).optional()?;
        found.transpose().map_err(Fault::Store)
    }

    fn bound(&self, row: &Row<'_>) -> rusqlite::Result<Result<(Bound, Duration), StoreError>> {
        let claim: String = row.get(0)?;
        let slots: Option<String> = row.get(3)?;
        let prefix = self.keys.slots_prefix();
        let node = slots.map(|slots| slots.strip_prefix(&prefix).and_then(|node| LockName::new(node).ok()));
        let (Ok(claim), Some(node)) = (ClaimId::parse(&claim), node.map_or(Some(None), |node| node.map(Some))) else {
            let text = "a row of the table `bindings` has an unknown format";
            return Ok(Err(StoreError::new(StoreErrorKind::WrongType, text)));
        };
        let bound = Bound {
            claim,
            revision: unsql(row.get(1)?),
            keep: Duration::from_millis(unsql(row.get(2)?)),
            node,
            value: row.get(5)?,
        };
        Ok(Ok((bound, Duration::from_millis(unsql(row.get(4)?)))))
    }

    pub(super) fn change_binding(&mut self, changing: &Changing) -> Result<Changed, StoreError> {
        let need = match changing.how.bytes() {
            0 => Need::Less,
            bytes => Need::Bytes(bytes),
        };
        self.durably(|driver| {
            driver.attempt(need, |driver| driver.in_transaction(|driver| driver.change_inside(changing)))
        })
    }

    pub(super) fn change_inside(&mut self, Changing { key, how }: &Changing) -> Result<Changed, Fault> {
        let found = self.binding_inside(key)?.map(|(found, _)| found);
        if let How::Advance(step) = how {
            return self.advance_inside(key, step, found);
        }
        let Some(found) = found else { return Ok(Changed::Gone) };
        let as_expected = match how {
            How::Change(expected, _) => expected.matches(&found.claim, found.revision),
            How::Withdraw(claim) => record::may_withdraw(claim, &found),
            How::Remove(claim) => found.claim == *claim,
            How::Advance(_) => false,
        };
        if !as_expected {
            return Ok(Changed::Other(found));
        }
        match how {
            How::Change(_, change) => self.update_inside(key, change)?,
            _ => drop(self.conn.prepare_cached("DELETE FROM bindings WHERE key = ?1")?.execute([key])?),
        }
        Ok(Changed::Done)
    }

    fn advance_inside(&mut self, key: &str, step: &Step, found: Option<Bound>) -> Result<Changed, Fault> {
        match (record::judge(step, found.as_ref()), found) {
            (RecordVerdict::Write { revision }, _) => {
                self.insert_inside(key, &step.claim, revision, step.keep, None, &step.value)?;
                Ok(Changed::Done)
            }
            (RecordVerdict::Refuse, Some(found)) => Ok(Changed::Other(found)),
            (RecordVerdict::Already | RecordVerdict::Refuse, _) => Ok(Changed::Done),
        }
    }

    fn update_inside(&mut self, key: &str, change: &Change) -> Result<(), Fault> {
        const SET: &str = "UPDATE bindings SET value = ?2, revision = revision + 1, \
            slots = CASE WHEN ?3 THEN NULL ELSE slots END WHERE key = ?1";
        const RENEW: &str = "UPDATE bindings SET keep_ms = ?2, ends = ?3, boot = ?4, ends_wall = ?5 WHERE key = ?1";
        self.conn.prepare_cached(SET)?.execute(params![key, change.value, change.give_slot_back])?;
        if let Some(keep) = change.keep.map(Retention::as_millis) {
            let (ends, ends_wall) = (sql(now_ms() + keep), sql(wall_ms() + keep));
            self.conn.prepare_cached(RENEW)?.execute(params![key, sql(keep), ends, self.boot, ends_wall])?;
        }
        Ok(())
    }

    /// Removes some expired bindings.
    pub(super) fn clear_bindings(&mut self) -> rusqlite::Result<()> {
        let clear = format!(
            "DELETE FROM bindings WHERE rowid IN \
             (SELECT rowid FROM bindings WHERE ends_wall < ?4 AND NOT ({LIVES}) ORDER BY ends_wall LIMIT ?1)"
        );
        let now = params![CLEAR_ROWS, self.boot, sql(now_ms()), sql(wall_ms())];
        self.conn.prepare_cached(&clear)?.execute(now)?;
        Ok(())
    }

    /// Runs `run` with commits that are synced to the disk before they are acknowledged. Commits of locks are not
    /// synced, because a power failure ends every lease anyway.
    pub(super) fn durably<R>(&mut self, run: impl FnOnce(&mut Self) -> Result<R, StoreError>) -> Result<R, StoreError> {
        let full = self.conn.execute_batch("PRAGMA synchronous = FULL");
        let outcome = full.map_err(|e| self.store_error(e.into())).and_then(|()| run(self));
        // If that fails, the next commits are only slower.
        let _ = self.conn.execute_batch("PRAGMA synchronous = NORMAL");
        outcome
    }
}

fn existing(bound: Bound, ours: &ClaimId) -> Create {
    if bound.claim == *ours { Create::Created } else { Create::Exists(bound) }
}

#[cfg(test)]
mod tests {
    use super::super::SqliteStore;
    use super::*;
    use crate::facts::BindingKind;
    use crate::store::{Bind, BindingId};

    fn new(id: &str, keep: Duration) -> NewBinding {
        NewBinding {
            id: BindingId { kind: BindingKind::Bindings, id: LockName::new(id).expect("a name") },
            claim: ClaimId::random(),
            keep: Retention::new(keep).expect("a time"),
            slot: None,
            value: b"v".to_vec(),
        }
    }

    #[tokio::test]
    async fn a_binding_outlives_a_reboot_and_expired_ones_are_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("locks.db");
        let store = SqliteStore::open(&path).expect("opens");
        let (day, minute) = (new("day", Duration::from_secs(86_400)), new("minute", Duration::from_secs(60)));
        for new in [&day, &minute] {
            assert_eq!(store.create(new).await, Ok(Create::Created));
        }
        // As after a boot that took place an hour later: its clock begins anew.
        let file = rusqlite::Connection::open(&path).expect("opens");
        let rebooted = "UPDATE bindings SET boot = boot + 1, ends = 1, ends_wall = ends_wall - 3600000";
        assert_eq!(file.execute(rebooted, []).expect("written"), 2);
        let (found, left) = store.read(&day.id).await.expect("answered").expect("still there");
        assert!(found.claim == day.claim && left <= Duration::from_secs(23 * 3_600), "{left:?}");
        assert_eq!(store.read(&minute.id).await, Ok(None));
        // Many commits later only one row is left of them.
        for n in 0..600 {
            assert_eq!(store.create(&new(&format!("n{n}"), Duration::from_secs(60))).await, Ok(Create::Created));
        }
        let count = "SELECT count(*) FROM bindings WHERE key LIKE '%:minute' OR key LIKE '%:day'";
        let rows: i64 = file.query_row(count, [], |row| row.get(0)).expect("read");
        assert_eq!(rows, 1);
    }
}
