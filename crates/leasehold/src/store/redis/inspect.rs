//! Inspection with plain commands, and never with KEYS.

use std::collections::{HashMap, HashSet};

use async_trait::async_trait;
use tokio::sync::mpsc;

use super::client::{Pipeline, Session, Value, cmd, from_server, items, number, text, unexpected_reply};
use super::{RedisStore, value};
use crate::events::lock_event::LockEvent;
use crate::facts::{LockName, Owner};
use crate::store::{Cursor, Finding, Holder, Inspect, Page, StoreError, StoreErrorKind, Ticket, Waiter};

/// Keys that the server examines in one SCAN call.
const SCAN_COUNT: usize = 200;
/// Most SCAN calls for one page. It bounds the time for a page, which may be empty.
const SCANS_PER_PAGE: usize = 50;
/// Locks that are read in one write.
const CHUNK: usize = 500;
/// Index entries that are read at once: each costs the server some microseconds, in which it serves no other client.
const INDEX_COUNT: usize = 100;

#[async_trait]
impl Inspect for RedisStore {
    fn describe(&self) -> String {
        self.described.clone()
    }

    async fn holder(&self, name: &LockName) -> Result<Option<Holder>, StoreError> {
        let keys = self.lock_keys(name)?;
        let session = self.client.session().await?;
        let mut found = read_holders(&session, &[keys.lock()]).await?;
        let Some(seen) = found.pop().ok_or_else(|| unexpected_reply("GET"))?? else { return Ok(None) };
        let listening = subscribed(&session, seen.inbox.iter()).await?;
        Ok(Some(seen.holder(&listening, session.wall_ahead_ms())))
    }

    async fn list(&self, prefix: &str, after: Option<Cursor>, limit: usize) -> Result<Page, StoreError> {
        let prefixes = self.keys.key_prefixes(prefix);
        let (mut which, mut cursor) = match &after {
            None => (0, 0),
            Some(after) => read_cursor(after.as_str(), prefixes.len()).ok_or_else(unknown_cursor)?,
        };
        let session = self.client.session().await?;
        let mut seen = HashSet::new();
        let mut locks = Vec::new();
        let mut next = None;
        let mut count = limit.clamp(10, SCAN_COUNT);
        for _ in 0..SCANS_PER_PAGE {
            let (cursor_after, mut found) = scan(&session, &prefixes[which], cursor, count).await?;
            found.retain(|key| seen.insert(key.clone()));
            let found = self.names(found).filter(|(name, _)| name.as_str().starts_with(prefix)).collect();
            locks.extend(self.held_locks(&session, found).await?);
            if locks.is_empty() {
                count = SCAN_COUNT;
            }
            cursor = cursor_after;
            if cursor == 0 {
                which += 1;
            }
            next = (which < prefixes.len()).then(|| Cursor(format!("{which}.{cursor}")));
            if next.is_none() || locks.len() >= limit {
                break;
            }
        }
        Ok(Page { locks, next })
    }

    async fn queue(&self, name: &LockName) -> Result<Vec<Waiter>, StoreError> {
        let keys = self.lock_keys(name)?;
        let session = self.client.session().await?;
        let mut cmd = cmd("ZRANGE");
        cmd.arg(keys.queue()).arg(["0", "-1", "WITHSCORES"]);
        let entries = items(session.send(&cmd).await?.reply, "ZRANGE")?;
        Ok(entries.iter().filter_map(waiter).collect())
    }

    async fn long_held(&self, after: Option<Cursor>, limit: usize) -> Result<Page, StoreError> {
        let indices = [self.namespace.index.as_str(), self.namespace.raw_index];
        let (mut which, cursor) = match &after {
            None => (0, 0),
            Some(after) => read_cursor(after.as_str(), indices.len()).ok_or_else(unknown_cursor)?,
        };
        let session = self.client.session().await?;
        if cursor == 0 {
            self.forget(&session, indices[which], session.server_ms()).await?;
        }
        let indexed = self.indexed(&session, indices[which], cursor, limit.clamp(10, INDEX_COUNT)).await?;
        let mut seen = HashSet::new();
        let keyed = indexed.entries.iter().filter(|(name, _)| seen.insert(name)).filter_map(|(name, _)| {
            // A name that is raw in another key space need not be raw in this one.
            let here = which == 0 || self.keys.is_raw(name);
            Some((name.clone(), self.keys.key(name).ok().filter(|_| here)?))
        });
        let found = self.held_locks(&session, keyed.collect()).await?;
        // The index is only a hint. If a lock has changed hands, its new holder enters it.
        let entered: HashSet<_> = indexed.entries.into_iter().collect();
        let locks = found.into_iter().filter(|(name, holder)| entered.contains(&(name.clone(), holder.id))).collect();
        if indexed.next == 0 {
            which += 1;
        }
        let next = (which < indices.len()).then(|| Cursor(format!("{which}.{}", indexed.next)));
        Ok(Page { locks, next })
    }

    async fn counters(&self) -> Result<Vec<(String, u64)>, StoreError> {
        let session = self.client.session().await?;
        let mut cmd = cmd("HGETALL");
        cmd.arg(&self.namespace.stats);
        let Value::Map(fields) = session.send(&cmd).await?.reply else { return Err(unexpected_reply("HGETALL")) };
        let mut counters: Vec<_> =
            fields.iter().filter_map(|(name, count)| Some((text(name)?, number(count)?))).collect();
        counters.sort();
        Ok(counters)
    }

    async fn checkup(&self) -> Vec<Finding> {
        self.run_checkup().await
    }

    async fn follow(&self) -> Result<mpsc::Receiver<LockEvent>, StoreError> {
        self.follow_events().await
    }
}

impl RedisStore {
    /// Returns the holder of the lock at a key.
    pub(super) async fn holder_at_key(&self, session: &Session, key: &str) -> Result<Option<Holder>, StoreError> {
        let replies = read_holders(session, &[key]).await?;
        let seen = replies.into_iter().next().ok_or_else(|| unexpected_reply("GET"))??;
        Ok(seen.map(|seen| seen.holder))
    }

    /// Reads each lock and leaves out those that are free by now.
    async fn held_locks(
        &self,
        session: &Session,
        locks: Vec<(LockName, String)>,
    ) -> Result<Vec<(LockName, Holder)>, StoreError> {
        let mut held = Vec::with_capacity(locks.len());
        for chunk in locks.chunks(CHUNK) {
            let keys: Vec<&str> = chunk.iter().map(|(_, key)| key.as_str()).collect();
            let found = read_holders(session, &keys).await?.into_iter().collect::<Result<Vec<_>, _>>()?;
            let listening = subscribed(session, found.iter().flatten().filter_map(|seen| seen.inbox.as_ref())).await?;
            let found = chunk.iter().zip(found).filter_map(|((name, _), seen)| Some((name, seen?)));
            held.extend(found.map(|(name, seen)| (name.clone(), seen.holder(&listening, session.wall_ahead_ms()))));
        }
        Ok(held)
    }

    /// Keeps the keys that are locks of this key space, with their names.
    fn names(&self, keys: Vec<String>) -> impl Iterator<Item = (LockName, String)> {
        keys.into_iter().filter_map(|key| Some((self.keys.name(&key)?, key)))
    }
}

/// Reads the value, PTTL and TYPE of each key in one write.
async fn read_holders(
    session: &Session,
    keys: &[&str],
) -> Result<Vec<Result<Option<SeenHolder>, StoreError>>, StoreError> {
    let mut pipe = Pipeline::with_capacity(keys.len() * 3);
    for key in keys {
        pipe.add(value::read_command(key));
        pipe.cmd("PTTL").arg(key);
        pipe.cmd("TYPE").arg(key);
    }
    let replies = session.send_all(&pipe).await?.reply;
    Ok(replies.chunks_exact(3).map(|found| parse_seen(&found[0], &found[1], &found[2])).collect())
}

/// A holder and its inbox channel.
struct SeenHolder {
    holder: Holder,
    inbox: Option<String>,
}

impl SeenHolder {
    /// Adds whether the holder is connected. Converts `since_ms` from the server's clock to ours, so that the holder's
    /// age is right even if our clock is wrong.
    fn holder(self, listening: &HashMap<String, bool>, wall_ahead_ms: i64) -> Holder {
        let connected = self.inbox.and_then(|inbox| listening.get(&inbox).copied());
        let since_ms = match self.holder.since_ms {
            0 => 0,
            since_ms => since_ms.saturating_add_signed(wall_ahead_ms).max(1),
        };
        Holder { connected, since_ms, ..self.holder }
    }
}

/// Which of these inboxes have a subscriber. Empty if the server does not say.
async fn subscribed(
    session: &Session,
    inboxes: impl Iterator<Item = &String>,
) -> Result<HashMap<String, bool>, StoreError> {
    let inboxes: HashSet<&String> = inboxes.collect();
    if inboxes.is_empty() {
        return Ok(HashMap::new());
    }
    let mut cmd = cmd("PUBSUB");
    cmd.arg("SHARDNUMSUB");
    for inbox in &inboxes {
        cmd.arg(inbox.as_str());
    }
    let Value::Array(counts) = session.send_raw(&cmd).await?.reply else { return Ok(HashMap::new()) };
    let count = |pair: &[Value]| Some((text(&pair[0])?, number(&pair[1])? > 0));
    Ok(counts.chunks_exact(2).filter_map(count).collect())
}

fn parse_seen(value: &Value, left: &Value, kind: &Value) -> Result<Option<SeenHolder>, StoreError> {
    let left = match left {
        Value::Int(-2) => return Ok(None),
        Value::Int(ms) => *ms,
        Value::Error(error) => return Err(from_server(error)),
        _ => return Err(unexpected_reply("PTTL")),
    };
    match value {
        // The key expired between the commands.
        Value::Bulk(value) if value.is_empty() && text(kind).is_some_and(|kind| kind == "none") => Ok(None),
        Value::Bulk(value) => {
            let inbox = value::inbox(value).map(str::to_owned);
            Ok(Some(SeenHolder { holder: value::holder(value, left), inbox }))
        }
        // Not a string, so the holder is foreign. Only its type is known.
        Value::Error(error) if from_server(error).kind() == StoreErrorKind::WrongType => {
            Ok(text(kind).map(|kind| SeenHolder { holder: value::holder(kind.as_bytes(), left), inbox: None }))
        }
        Value::Error(error) => Err(from_server(error)),
        _ => Err(unexpected_reply("GETRANGE")),
    }
}

async fn scan(session: &Session, prefix: &str, cursor: u64, count: usize) -> Result<(u64, Vec<String>), StoreError> {
    let mut cmd = cmd("SCAN");
    cmd.arg(cursor).arg("MATCH").arg(escape(prefix) + "*").arg("COUNT").arg(count).arg("TYPE").arg("string");
    let reply = items(session.send(&cmd).await?.reply, "SCAN")?;
    match <[Value; 2]>::try_from(reply) {
        Ok([next, Value::Array(keys)]) => {
            let next = number(&next).ok_or_else(|| unexpected_reply("SCAN"))?;
            Ok((next, keys.iter().filter_map(text).collect()))
        }
        _ => Err(unexpected_reply("SCAN")),
    }
}

/// Escapes a text so that as a pattern it matches only itself.
fn escape(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\' | '^') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern
}

/// Parses `<index of the key prefix>.<the server's cursor>`.
fn read_cursor(text: &str, prefixes: usize) -> Option<(usize, u64)> {
    let (which, cursor) = text.split_once('.')?;
    Some((which.parse().ok().filter(|w| *w < prefixes)?, cursor.parse().ok()?))
}

fn unknown_cursor() -> StoreError {
    StoreError::new(StoreErrorKind::Refused, "the cursor is not one that a page returned")
}

/// Parses `[entry, ticket]`, where the entry is `token inbox ttl since owner…`.
fn waiter(pair: &Value) -> Option<Waiter> {
    let Value::Array(pair) = pair else { return None };
    let [entry, Value::Double(ticket)] = pair.as_slice() else { return None };
    let entry = text(entry)?;
    let mut fields = entry.splitn(5, ' ').skip(1);
    let inbox = fields.next()?;
    let since_ms = fields.nth(1)?.parse().ok()?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a whole number below 2^53")]
    let ticket = Ticket(*ticket as u64);
    Some(Waiter { ticket, owner: Owner::from_wire(fields.next()?), since_ms, listens: inbox != value::NO_INBOX })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_not_a_pattern() {
        assert_eq!(escape("a*b?[c]\\^"), "a\\*b\\?\\[c\\]\\\\\\^");
        assert_eq!(escape("order:42"), "order:42");
    }

    #[test]
    fn only_cursors_that_a_page_returned_are_read() {
        assert_eq!(read_cursor("1.77", 2), Some((1, 77)));
        for bad in ["", "1", "2.0", "x.1", "1.x", "1.-1"] {
            assert_eq!(read_cursor(bad, 2), None, "{bad}");
        }
    }
}
