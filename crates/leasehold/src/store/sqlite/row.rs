//! Reads and writes rows.

use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::facts::{Owner, Token};
use crate::machine::{Flag, Held, InboxId, Message, QueueEntry, Slot};

/// The primary key of a lock's row, made by [`KeySpace`](crate::store::KeySpace).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key(std::sync::Arc<str>);

impl Key {
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for Key {
    fn from(key: String) -> Self {
        Self(key.into())
    }
}

/// Converts to SQLite's signed integers. Times and counters are far below the limit.
pub(super) fn sql(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn unsql(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

/// A lock's row.
pub(super) struct LockRow {
    pub(super) slot: Slot,
    pub(super) counter: u64,
    pub(super) queue_ends_ms: u64,
}

const LOCK: &str = "SELECT flag, token, fence, counter, inbox, since_ms, ttl_ms, owner, ends, boot, queue_ends, \
                    written FROM locks WHERE name = ?1";

/// Reads one lock.
pub(super) fn lock(conn: &Connection, name: &Key, boot: i64, now_ms: u64) -> rusqlite::Result<Option<LockRow>> {
    conn.prepare_cached(LOCK)?.query_row([name.as_str()], |row| lock_row(row, boot, now_ms)).optional()
}

/// Reads the columns of [`LOCK`] from the first one on.
///
/// Another boot id alone proves nothing: each container of one kernel can have its own. They share the kernel's boot
/// clock, so a lease of another boot id ends by that clock. It has ended if the clock is behind the moment at which the
/// lease was granted or last renewed: the machine has restarted since, and every holder and waiter is gone. That moment
/// has its own column, because `ends - ttl_ms` is later if a lease was renewed for a shorter time than was left.
pub(super) fn lock_row(row: &Row<'_>, boot: i64, now_ms: u64) -> rusqlite::Result<LockRow> {
    let ends = unsql(row.get(8)?);
    let ours = row.get::<_, i64>(9)? == boot || unsql(row.get(11)?) <= now_ms;
    let slot = match token(row, 1)? {
        Some(token) if ours && ends > 0 => Slot::Held(Held {
            flag: flag(row.get(0)?),
            token,
            fence: unsql(row.get(2)?),
            inbox: inbox(row, 4)?,
            since_ms: unsql(row.get(5)?),
            ttl_ms: unsql(row.get(6)?),
            owner: Owner::from_wire(row.get_ref(7)?.as_str()?),
            ends_ms: Some(ends),
        }),
        _ => Slot::Free,
    };
    let queue_ends_ms = if ours { unsql(row.get(10)?) } else { 0 };
    Ok(LockRow { slot, counter: unsql(row.get(3)?), queue_ends_ms })
}

/// Reads the columns `ticket, token, inbox, ttl_ms, since_ms, owner, polled`.
pub(super) fn waiting_row(row: &Row<'_>, now_ms: u64) -> rusqlite::Result<Option<QueueEntry>> {
    let Some(token) = token(row, 1)? else { return Ok(None) };
    Ok(Some(QueueEntry {
        ticket: unsql(row.get(0)?),
        token,
        inbox: inbox(row, 2)?,
        ttl_ms: unsql(row.get(3)?),
        since_ms: unsql(row.get(4)?),
        owner: Owner::from_wire(row.get_ref(5)?.as_str()?),
        // A time in the future is from an earlier boot, so the waiter last polled long ago.
        polled_ms: Some(unsql(row.get(6)?)).filter(|polled| *polled <= now_ms).unwrap_or(0),
    }))
}

/// Reads a token; `None` if the text is not one.
pub(super) fn token(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Token>> {
    Ok(Token::parse(row.get_ref(column)?.as_str()?).ok())
}

fn inbox(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<InboxId>> {
    Ok(row.get_ref(column)?.as_str_or_null()?.map(|id| InboxId(id.into())))
}

pub(super) const REVOKED: i64 = 2;

fn flag(number: i64) -> Flag {
    match number {
        0 => Flag::Uncontended,
        REVOKED => Flag::Revoked,
        _ => Flag::Contended,
    }
}

pub(super) fn flag_number(flag: Flag) -> i64 {
    match flag {
        Flag::Uncontended => 0,
        Flag::Contended => 1,
        Flag::Revoked => REVOKED,
    }
}

const POST: &str = "INSERT INTO messages (inbox, id, kind, token, fence, lasts_ms, at, reason) \
                    SELECT ?1, ifnull(max(id), 0) + 1, ?2, ?3, ?4, ?5, ?6, ?7 FROM messages WHERE inbox = ?1";

/// Writes a message for another process.
pub(super) fn post(conn: &Connection, to: &InboxId, message: &Message, at_ms: u64) -> rusqlite::Result<()> {
    let (kind, token, fence, ms, reason) = match message {
        Message::Granted { token, fence, lasts_ms } => (0, token, *fence, *lasts_ms, ""),
        Message::LookAgain { token, after_ms } => (1, token, 0, *after_ms, ""),
        Message::Revoked { token } => (2, token, 0, 0, ""),
        Message::Finish { token, reason } => (3, token, 0, 0, reason.as_str()),
    };
    conn.prepare_cached(POST)?.execute(params![
        &*to.0,
        kind,
        token.reveal(),
        sql(fence),
        sql(ms),
        sql(at_ms),
        reason
    ])?;
    Ok(())
}

/// Reads the columns `id, kind, token, fence, lasts_ms, at, reason` as the id, the message and its time.
pub(super) fn message_row(row: &Row<'_>) -> rusqlite::Result<(i64, Option<Message>, u64)> {
    let (id, at_ms) = (row.get(0)?, unsql(row.get(5)?));
    let Some(token) = token(row, 2)? else { return Ok((id, None, at_ms)) };
    let ms = unsql(row.get(4)?);
    let message = match row.get(1)? {
        0 => Message::Granted { token, fence: unsql(row.get(3)?), lasts_ms: ms },
        1 => Message::LookAgain { token, after_ms: ms },
        2 => Message::Revoked { token },
        _ => Message::Finish { token, reason: row.get(6)? },
    };
    Ok((id, Some(message), at_ms))
}
