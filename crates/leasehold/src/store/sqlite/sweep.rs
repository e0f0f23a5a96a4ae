//! Removes the FIFOs and messages of dead processes.
//!
//! A FIFO is the proof that its owner is dead. So it is removed only after a transaction has found no lease and no
//! waiter that names it. No row can name it after that, because a process writes only its own id.

use std::collections::HashSet;

use rusqlite::{Connection, ToSql, TransactionBehavior};

use super::boot::now_ms;
use super::liveness::Liveness;
use super::row::sql;
use crate::machine::InboxId;

/// A directory with at most this many files is not swept: checking each file costs more than keeping it.
const FILES_KEPT: usize = 32;
/// Fewest dead owners that are worth a transaction.
const DEAD_AT_LEAST: usize = 16;
/// Messages for a process whose FIFO is missing are kept this long.
const MESSAGES_KEPT_MS: u64 = 24 * 3_600 * 1_000;

/// Removes the FIFOs of dead processes that no row names, if there are enough of them. If that fails, the next process
/// that opens or closes the file does it.
pub(super) fn sweep(conn: &mut Connection, liveness: &Liveness) {
    let names: Vec<String> = liveness.names().collect();
    if names.len() <= FILES_KEPT {
        return;
    }
    // These are dead before the transaction begins.
    let dead: HashSet<String> = names.into_iter().filter(|name| liveness.is_orphaned(name)).collect();
    if dead.len() >= DEAD_AT_LEAST
        && let Ok(unnamed) = unnamed(conn, dead)
    {
        unnamed.iter().for_each(|name| liveness.remove(name));
    }
}

/// Returns the dead owners that neither a lease nor a waiter names, and deletes their messages.
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

/// Deletes messages that will not be read.
pub(super) fn forget_messages(conn: &Connection, liveness: &Liveness) {
    let inboxes = || -> rusqlite::Result<Vec<(String, i64)>> {
        let mut statement = conn.prepare("SELECT inbox, max(at) FROM messages GROUP BY inbox")?;
        statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
    };
    let now = now_ms();
    let is_old = |at: i64| at > sql(now) || at < sql(now.saturating_sub(MESSAGES_KEPT_MS));
    for (inbox, at) in inboxes().unwrap_or_default() {
        let id = InboxId(inbox.as_str().into());
        if liveness.is_gone(&id) || (is_old(at) && liveness.is_missing(&id)) {
            // If that fails, the next process that opens the file does it.
            let _ = conn.execute("DELETE FROM messages WHERE inbox = ?1", [&inbox]);
        }
    }
}
