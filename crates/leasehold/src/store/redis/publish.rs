//! Data for people: the index of long-held locks, published events and the fleet's counters.

use super::RedisStore;
use super::client::{Pipeline, Session, Value, cmd, from_server, items, number, text, unexpected_reply};
use crate::facts::{HolderId, LockName};
use crate::store::{Note, StoreError};

/// An index entry is removed this long after its lease ended, if its holder did not remove it.
const FORGET_AFTER_MS: u64 = 60_000;
/// Ended entries that are removed at once: thousands in one command would block other clients.
const FORGET_AT_ONCE: usize = 500;

/// One batch of index entries.
pub(super) struct Indexed {
    pub(super) entries: Vec<(LockName, HolderId)>,
    /// The cursor of the next batch; 0 after the last one.
    pub(super) next: u64,
}

impl RedisStore {
    pub(super) async fn write_notes(&self, notes: &[Note]) -> Result<(), StoreError> {
        let session = self.client.session().await?;
        let now_ms = session.server_ms();
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
                Note::Tell(event) if self.client.options.events => {
                    if let Ok(json) = serde_json::to_vec(event) {
                        pipe.cmd("PUBLISH").arg(&self.namespace.events).arg(json);
                    }
                }
                Note::Tell(_) => {}
            }
        }
        send_checked(&session, &pipe).await?;
        for index in entered {
            // Removes entries of holders that died.
            self.forget(&session, index, now_ms.saturating_sub(FORGET_AFTER_MS)).await?;
        }
        Ok(())
    }

    /// The index for a lock. Raw names are the same lock in every namespace, so they share one.
    fn index_of(&self, name: &LockName) -> &str {
        if self.keys.is_raw(name) { self.namespace.raw_index } else { &self.namespace.index }
    }

    /// Removes some of the entries that ended before `before_ms`. If a lease is renewed in between, its next renewal
    /// enters it again.
    pub(super) async fn forget(&self, session: &Session, index: &str, before_ms: u64) -> Result<(), StoreError> {
        let mut ended = cmd("ZRANGE");
        ended.arg(index).arg("-inf").arg(before_ms).arg(["BYSCORE", "LIMIT", "0"]).arg(FORGET_AT_ONCE);
        let members = items(session.send(&ended).await?.reply, "ZRANGE")?;
        if members.is_empty() {
            return Ok(());
        }
        let mut remove = cmd("ZREM");
        remove.arg(index);
        for member in members.iter().filter_map(text) {
            remove.arg(member);
        }
        session.send(&remove).await.map(|_| ())
    }

    pub(super) async fn add_counts(&self, deltas: &[(&'static str, u64)]) -> Result<(), StoreError> {
        let session = self.client.session().await?;
        let mut pipe = Pipeline::with_capacity(deltas.len());
        for (name, delta) in deltas {
            pipe.cmd("HINCRBY").arg(&self.namespace.stats).arg(name).arg(delta);
        }
        send_checked(&session, &pipe).await
    }

    /// Reads a batch of about `count` entries of an index, without those that have ended.
    pub(super) async fn indexed(
        &self,
        session: &Session,
        index: &str,
        cursor: u64,
        count: usize,
    ) -> Result<Indexed, StoreError> {
        let mut scan = cmd("ZSCAN");
        scan.arg(index).arg(cursor).arg("COUNT").arg(count);
        let reply = items(session.send(&scan).await?.reply, "ZSCAN")?;
        let Ok([next, Value::Array(pairs)]) = <[Value; 2]>::try_from(reply) else {
            return Err(unexpected_reply("ZSCAN"));
        };
        let next = number(&next).ok_or_else(|| unexpected_reply("ZSCAN"))?;
        let now_ms = session.server_ms();
        let entry = |pair: &[Value]| {
            let ends_ms: u64 = text(&pair[1])?.parse().ok()?;
            if ends_ms > now_ms { read_member(&text(&pair[0])?) } else { None }
        };
        Ok(Indexed { entries: pairs.chunks_exact(2).filter_map(entry).collect(), next })
    }
}

/// Sends a pipeline and returns the first error among the replies.
async fn send_checked(session: &Session, pipe: &Pipeline) -> Result<(), StoreError> {
    if pipe.is_empty() {
        return Ok(());
    }
    let replies = session.send_all(pipe).await?.reply;
    let error = replies.iter().find_map(|reply| match reply {
        Value::Error(error) => Some(from_server(error)),
        _ => None,
    });
    error.map_or(Ok(()), Err)
}

/// An index member: `<holder id> <name>`.
fn member(name: &LockName, holder: HolderId) -> String {
    format!("{holder} {name}")
}

fn read_member(member: &str) -> Option<(LockName, HolderId)> {
    let (holder, name) = member.split_once(' ')?;
    Some((LockName::new(name).ok()?, HolderId::parse(holder).ok()?))
}
