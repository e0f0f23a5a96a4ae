//! Inspection, events and counters, on the driver thread. Every read is one short statement, because a long reader
//! makes the log grow.

use std::collections::HashMap;

use rusqlite::params;

use super::boot::now_ms;
use super::disk_reserve::Need;
use super::driver::{Fault, SqliteDriver};
use super::row::{self, Key, sql, unsql};
use crate::events::lock_event::LockEvent;
use crate::machine::{InboxId, Slot};
use crate::store::on_machine::view;
use crate::store::*;

/// Rows that one statement of a list reads.
const CHUNK: u32 = 256;
/// Events that are kept for followers.
const EVENTS_KEPT: i64 = 10_000;

impl SqliteDriver {
    pub(super) fn holder(&mut self, name: &Key) -> Result<Option<Holder>, StoreError> {
        let now = now_ms();
        let found = row::lock(&self.conn, name, self.boot, now).map_err(|e| self.store_error(e.into()))?;
        Ok(found.and_then(|row| self.living(&row.slot, now, &mut HashMap::new())))
    }

    pub(super) fn list(&mut self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Page, StoreError> {
        self.list_inside(prefix, after, limit).map_err(|fault| self.store_error(fault))
    }

    fn list_inside(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Page, Fault> {
        const ROWS: &str = "SELECT flag, token, fence, counter, inbox, since_ms, ttl_ms, owner, ends, boot, queue_ends, \
                            written, name FROM locks WHERE name > ?1 AND name >= ?2 ORDER BY name LIMIT ?3";
        let mut known = HashMap::new();
        let mut locks = Vec::new();
        let mut listed_up_to = String::new();
        // Sorted and disjoint, so that the last key tells which keys were listed before.
        let mut beginnings = self.keys.key_prefixes(prefix);
        beginnings.sort();
        beginnings.dedup_by(|next, kept| next.starts_with(kept.as_str()));
        for beginning in beginnings {
            let mut from = after.unwrap_or("").to_owned();
            'rows: loop {
                let now = now_ms();
                let mut statement = self.conn.prepare_cached(ROWS)?;
                let rows = statement.query_map(params![from, beginning, CHUNK], |row| {
                    Ok((row.get::<_, String>(12)?, row::lock_row(row, self.boot, now)?))
                })?;
                let rows = rows.collect::<rusqlite::Result<Vec<_>>>()?;
                let last = rows.len() < CHUNK as usize;
                for (key, found) in rows {
                    if !key.starts_with(&beginning) {
                        break 'rows;
                    }
                    // Some of these keys have no name in this namespace.
                    if let Some(name) = self.keys.name(&key).filter(|name| name.as_str().starts_with(prefix))
                        && let Some(holder) = self.living(&found.slot, now, &mut known)
                    {
                        if locks.len() == limit {
                            return Ok(Page { locks, next: Some(Cursor(listed_up_to)) });
                        }
                        locks.push((name, holder));
                        listed_up_to.clone_from(&key);
                    }
                    from = key;
                }
                if last {
                    break;
                }
            }
        }
        Ok(Page { locks, next: None })
    }

    pub(super) fn queue(&mut self, name: &Key) -> Result<Vec<Waiter>, StoreError> {
        const ROWS: &str = "SELECT ticket, token, inbox, ttl_ms, since_ms, owner, polled FROM waiting \
                            WHERE name = ?1 ORDER BY ticket";
        let read = || -> Result<Vec<Waiter>, Fault> {
            let now = now_ms();
            let found = row::lock(&self.conn, name, self.boot, now)?;
            if found.is_none_or(|row| row.queue_ends_ms <= now) {
                return Ok(Vec::new());
            }
            let mut statement = self.conn.prepare_cached(ROWS)?;
            let rows = statement.query_map([name.as_str()], |row| row::waiting_row(row, now))?;
            let waiter = |w: crate::machine::QueueEntry| Waiter {
                ticket: Ticket(w.ticket),
                owner: w.owner,
                since_ms: w.since_ms,
                listens: w.inbox.is_some(),
            };
            Ok(rows.filter_map(Result::transpose).map(|w| w.map(waiter)).collect::<rusqlite::Result<_>>()?)
        };
        read().map_err(|fault| self.store_error(fault))
    }

    pub(super) fn publish(&mut self, events: &[LockEvent]) -> Result<(), StoreError> {
        let ns = self.namespace();
        self.attempt(Need::More, |driver| {
            let conn = &driver.conn;
            for event in events {
                if let Ok(json) = serde_json::to_string(event) {
                    conn.prepare_cached("INSERT INTO events (ns, json) VALUES (?1, ?2)")?.execute([&ns, &json])?;
                }
            }
            let old = conn.last_insert_rowid() - EVENTS_KEPT;
            conn.prepare_cached("DELETE FROM events WHERE id <= ?1")?.execute([old])?;
            driver.committed();
            Ok(())
        })
    }

    /// Returns the events after an id, and the last id. Without an id, returns only the last id.
    pub(super) fn events(&mut self, after: Option<i64>) -> Result<(i64, Vec<LockEvent>), StoreError> {
        let ns = self.namespace();
        let read = || -> Result<(i64, Vec<LockEvent>), Fault> {
            let Some(after) = after else {
                let last = self.conn.query_row("SELECT ifnull(max(id), 0) FROM events", [], |row| row.get(0))?;
                return Ok((last, Vec::new()));
            };
            // Events of other namespaces are skipped here, so that the next call does not read them again.
            const ROWS: &str = "SELECT id, CASE WHEN ns = ?2 THEN json ELSE '' END FROM events \
                                WHERE id > ?1 ORDER BY id LIMIT 500";
            let mut statement = self.conn.prepare_cached(ROWS)?;
            let rows = statement.query_map(params![after, ns], |row| Ok((row.get(0)?, row.get::<_, String>(1)?)))?;
            let rows = rows.collect::<rusqlite::Result<Vec<(i64, String)>>>()?;
            let last = rows.last().map_or(after, |(id, _)| *id);
            // Events of a newer version are skipped.
            Ok((last, rows.iter().filter_map(|(_, json)| serde_json::from_str(json).ok()).collect()))
        };
        read().map_err(|fault| self.store_error(fault))
    }

    pub(super) fn count(&mut self, deltas: &[(&'static str, u64)]) -> Result<(), StoreError> {
        const ADD: &str = "INSERT INTO counters (ns, name, n) VALUES (?1, ?2, ?3) \
                           ON CONFLICT (ns, name) DO UPDATE SET n = n + excluded.n";
        let ns = self.namespace();
        self.attempt(Need::More, |driver| {
            let conn = &driver.conn;
            for (name, delta) in deltas {
                conn.prepare_cached(ADD)?.execute(params![ns, name, sql(*delta)])?;
            }
            driver.committed();
            Ok(())
        })
    }

    pub(super) fn counters(&mut self) -> Result<Vec<(String, u64)>, StoreError> {
        let read = || {
            let mut statement = self.conn.prepare_cached("SELECT name, n FROM counters WHERE ns = ?1 ORDER BY name")?;
            let rows = statement.query_map([self.namespace()], |row| Ok((row.get(0)?, unsql(row.get(1)?))))?;
            rows.collect::<rusqlite::Result<Vec<_>>>()
        };
        read().map_err(|e| self.store_error(e.into()))
    }

    fn namespace(&self) -> String {
        self.keys.namespace().as_str().to_owned()
    }

    /// Runs SQLite's integrity check: `ok`, or what is wrong with the file.
    pub(super) fn check(&mut self) -> Result<String, StoreError> {
        let found = self.conn.query_row("PRAGMA integrity_check", [], |row| row.get(0));
        found.map_err(|e| self.store_error(e.into()))
    }

    /// Returns the holder of a lock; `None` if the lease has ended or the holder is dead.
    fn living(&self, slot: &Slot, now: u64, known: &mut HashMap<InboxId, Option<bool>>) -> Option<Holder> {
        let Slot::Held(held) = slot else { return None };
        let connected = match &held.inbox {
            Some(inbox) => *known.entry(inbox.clone()).or_insert_with(|| self.liveness.is_there(inbox)),
            None => None,
        };
        if connected == Some(false) || held.ends_ms.is_some_and(|end| end <= now) {
            return None;
        }
        Some(Holder { connected, ..view(slot, now)? })
    }
}
