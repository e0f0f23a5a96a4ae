//! Removing the FIFOs of processes that are gone.
//!
//! A FIFO is the proof that its owner is dead, so it is removed only after a transaction that found no row that names
//! it: neither a lease nor a waiter. No row can name it after that, because a process writes its own id only.

use std::collections::HashSet;

use rusqlite::{Connection, ToSql, TransactionBehavior};

use super::alive::Alive;
use super::boot::now_ms;
use super::row::sql;
use crate::machine::InboxId;

/// A directory with this many files or fewer is left as it is: looking at each costs more than they do.
const FILES_KEPT: usize = 32;
/// The dead that are worth a transaction.
const DEAD_AT_LEAST: usize = 16;
/// Messages for a process whose FIFO is missing are kept this long.
const MESSAGES_KEPT_MS: u64 = 24 * 3_600 * 1_000;

/// Removes the FIFOs of dead processes that no row names, where enough of them have gathered. What fails is done by the
/// next process that opens or leaves the file.
pub(super) fn sweep(conn: &mut Connection, alive: &Alive) {
    let names: Vec<String> = alive.names().collect();
    if names.len() <= FILES_KEPT {
        return;
    }
    // Dead before the transaction begins.
    let dead: HashSet<String> = names.into_iter().filter(|name| alive.is_deserted(name)).collect();
    if dead.len() >= DEAD_AT_LEAST
        && let Ok(unnamed) = unnamed(conn, dead)
    {
        unnamed.iter().for_each(|name| alive.remove(name));
    }
}

/// Those of the dead that neither a lease nor a waiter names; their messages are removed.
fn unnamed(conn: &mut Connection, mut dead: HashSet<String>) -> rusqlite::Result<HashSet<String>> {
    const NAMED: &str = "SELECT inbox FROM locks WHERE ends > ?1 AND inbox IS NOT NULL \
                         UNION SELECT inbox FROM waiting WHERE inbox IS NOT NULL";
    const MESSAGES: &str = "SELECT DISTINCT inbox FROM messages";
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let read = |text: &str, with: &[&dyn ToSql]| -> rusqlite::Result<Vec<String>> {
        tx.prepare(text)?.query_map(with, |row| row.get(0))?.collect()
    };
    for named in read(NAMED, &[&sql(now_ms())])? {
        dead.remove(&named);
    }
    for inbox in read(MESSAGES, &[])?.iter().filter(|inbox| dead.contains(*inbox)) {
        tx.execute("DELETE FROM messages WHERE inbox = ?1", [inbox])?;
    }
    tx.commit()?;
    Ok(dead)
}

/// Removes messages that will not be read.
pub(super) fn forget_messages(conn: &Connection, alive: &Alive) {
    let inboxes = || -> rusqlite::Result<Vec<(String, i64)>> {
        let mut statement = conn.prepare("SELECT inbox, max(at) FROM messages GROUP BY inbox")?;
        statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
    };
    let now = now_ms();
    let is_old = |at: i64| at > sql(now) || at < sql(now.saturating_sub(MESSAGES_KEPT_MS));
    for (inbox, at) in inboxes().unwrap_or_default() {
        let id = InboxId(inbox.as_str().into());
        if alive.is_gone(&id) || (is_old(at) && alive.is_missing(&id)) {
            // What cannot be removed now is removed by the next process that opens the file.
            let _ = conn.execute("DELETE FROM messages WHERE inbox = ?1", [&inbox]);
        }
    }
}
