//! For people who look: the index of long-held locks, the events channel, the fleet's counters.

use super::RedisStore;
use super::conn::{Conn, items, number, text};
use super::errors::{from_server, strange};
use super::resp::{Pipeline, Value, cmd};
use crate::facts::{HolderId, LockName};
use crate::store::{Note, StoreError};

/// An entry nobody took out goes this long after it was worth something.
const FORGET_AFTER_MS: u64 = 60_000;
/// Dead entries taken out at once: thousands in one command would keep everybody else waiting.
const FORGET_AT_ONCE: usize = 500;

/// A part of an index.
pub(super) struct Indexed {
    pub(super) entries: Vec<(LockName, HolderId)>,
    /// Where to go on; 0 at the end.
    pub(super) next: u64,
}

impl RedisStore {
    pub(super) async fn write_notes(&self, notes: &[Note]) -> Result<(), StoreError> {
        let conn = self.link.conn().await?;
        let now_ms = conn.server_ms();
        let mut pipe = Pipeline::with_capacity(notes.len());
        let mut entered = Vec::new();
        for note in notes {
            match note {
                Note::Enter { name, holder, lasts } => {
                    let ends = now_ms.saturating_add(u64::try_from(lasts.as_millis()).unwrap_or(u64::MAX));
                    let index = self.index_of(name);
                    pipe.cmd("ZADD").arg(index).arg(ends).arg(member(name, *holder));
                    if !entered.contains(&index) {
                        entered.push(index);
                    }
                }
                Note::Remove { name, holder } => {
                    pipe.cmd("ZREM").arg(self.index_of(name)).arg(member(name, *holder));
                }
                Note::Tell(event) if self.link.options.events => {
                    if let Ok(json) = serde_json::to_vec(event) {
                        pipe.cmd("PUBLISH").arg(&self.shared.events).arg(json);
                    }
                }
                Note::Tell(_) => {}
            }
        }
        all_well(&conn, &pipe).await?;
        for index in entered {
            // Holders that died left entries behind.
            self.forget(&conn, index, now_ms.saturating_sub(FORGET_AFTER_MS)).await?;
        }
        Ok(())
    }

    /// The index a lock is entered in: raw names are the same lock in every namespace.
    fn index_of(&self, name: &LockName) -> &str {
        if self.keys.is_raw(name) { self.shared.raw_index } else { &self.shared.index }
    }

    /// Takes some of the entries out that ended before then. One that is renewed in between is entered again by its
    /// next renewal.
    pub(super) async fn forget(&self, conn: &Conn, index: &str, before_ms: u64) -> Result<(), StoreError> {
        let mut ended = cmd("ZRANGE");
        ended.arg(index).arg("-inf").arg(before_ms).arg(["BYSCORE", "LIMIT", "0"]).arg(FORGET_AT_ONCE);
        let members = items(conn.ask(&ended).await?.reply, "ZRANGE")?;
        if members.is_empty() {
            return Ok(());
        }
        let mut remove = cmd("ZREM");
        remove.arg(index);
        for member in members.iter().filter_map(text) {
            remove.arg(member);
        }
        conn.ask(&remove).await.map(|_| ())
    }

    pub(super) async fn add_counts(&self, deltas: &[(&'static str, u64)]) -> Result<(), StoreError> {
        let conn = self.link.conn().await?;
        let mut pipe = Pipeline::with_capacity(deltas.len());
        for (name, delta) in deltas {
            pipe.cmd("HINCRBY").arg(&self.shared.stats).arg(name).arg(delta);
        }
        all_well(&conn, &pipe).await
    }

    /// A part of an index, about so many entries, without those that have ended.
    pub(super) async fn indexed(
        &self,
        conn: &Conn,
        index: &str,
        cursor: u64,
        count: usize,
    ) -> Result<Indexed, StoreError> {
        let mut scan = cmd("ZSCAN");
        scan.arg(index).arg(cursor).arg("COUNT").arg(count);
        let reply = items(conn.ask(&scan).await?.reply, "ZSCAN")?;
        let Ok([next, Value::Array(pairs)]) = <[Value; 2]>::try_from(reply) else { return Err(strange("ZSCAN")) };
        let next = number(&next).ok_or_else(|| strange("ZSCAN"))?;
        let now_ms = conn.server_ms();
        let entry = |pair: &[Value]| {
            let ends_ms: u64 = text(&pair[1])?.parse().ok()?;
            if ends_ms > now_ms { read_member(&text(&pair[0])?) } else { None }
        };
        Ok(Indexed { entries: pairs.chunks_exact(2).filter_map(entry).collect(), next })
    }
}

/// The first error of several replies.
async fn all_well(conn: &Conn, pipe: &Pipeline) -> Result<(), StoreError> {
    if pipe.is_empty() {
        return Ok(());
    }
    let replies = conn.ask_all(pipe).await?.reply;
    let error = replies.iter().find_map(|reply| match reply {
        Value::Error(error) => Some(from_server(error)),
        _ => None,
    });
    error.map_or(Ok(()), Err)
}

/// `<holder id> <name>`
fn member(name: &LockName, holder: HolderId) -> String {
    format!("{holder} {name}")
}

fn read_member(member: &str) -> Option<(LockName, HolderId)> {
    let (holder, name) = member.split_once(' ')?;
    Some((LockName::new(name).ok()?, HolderId::parse(holder).ok()?))
}
