//! For people who look: the index of long-held locks, the events channel, the fleet's counters.

use super::RedisStore;
use super::conn::{Conn, items, text};
use super::errors::from_server;
use super::resp::{Pipeline, Value};
use crate::facts::{HolderId, LockName};
use crate::store::{Note, StoreError};

/// An entry nobody took out goes this long after it was worth something.
const FORGET_AFTER_MS: u64 = 60_000;

impl RedisStore {
    pub(super) async fn write_notes(&self, notes: &[Note]) -> Result<(), StoreError> {
        let conn = self.link.conn().await?;
        let now_ms = conn.server_ms();
        let mut pipe = Pipeline::with_capacity(notes.len() + 1);
        let mut entered = false;
        for note in notes {
            match note {
                Note::Enter { name, holder, lasts } => {
                    let ends = now_ms.saturating_add(u64::try_from(lasts.as_millis()).unwrap_or(u64::MAX));
                    pipe.cmd("ZADD").arg(&self.shared.index).arg(ends).arg(member(name, *holder));
                    entered = true;
                }
                Note::Remove { name, holder } => {
                    pipe.cmd("ZREM").arg(&self.shared.index).arg(member(name, *holder));
                }
                Note::Tell(event) if self.link.options.events => {
                    if let Ok(json) = serde_json::to_vec(event) {
                        pipe.cmd("PUBLISH").arg(&self.shared.events).arg(json);
                    }
                }
                Note::Tell(_) => {}
            }
        }
        if entered {
            // Holders that died left entries behind.
            let over = now_ms.saturating_sub(FORGET_AFTER_MS);
            pipe.cmd("ZREMRANGEBYSCORE").arg(&self.shared.index).arg("-inf").arg(over);
        }
        all_well(&conn, &pipe).await
    }

    pub(super) async fn add_counts(&self, deltas: &[(&'static str, u64)]) -> Result<(), StoreError> {
        let conn = self.link.conn().await?;
        let mut pipe = Pipeline::with_capacity(deltas.len());
        for (name, delta) in deltas {
            pipe.cmd("HINCRBY").arg(&self.shared.stats).arg(name).arg(delta);
        }
        all_well(&conn, &pipe).await
    }

    /// What the index says, without what has ended.
    pub(super) async fn indexed(&self, conn: &Conn) -> Result<Vec<(LockName, HolderId)>, StoreError> {
        let mut pipe = Pipeline::with_capacity(2);
        pipe.cmd("ZREMRANGEBYSCORE").arg(&self.shared.index).arg("-inf").arg(conn.server_ms());
        pipe.cmd("ZRANGE").arg(&self.shared.index).arg(["0", "-1"]);
        let mut replies = conn.ask_all(&pipe).await?.reply;
        let members = match replies.pop() {
            Some(Value::Error(error)) => return Err(from_server(&error)),
            members => items(members.unwrap_or(Value::Nil), "ZRANGE")?,
        };
        Ok(members.iter().filter_map(text).filter_map(|m| read_member(&m)).collect())
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
