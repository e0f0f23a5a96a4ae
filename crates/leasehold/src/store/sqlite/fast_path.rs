//! The fast path, for a lock without waiters: one prepared statement per operation, one page written.
//!
//! Each function returns whether it applied; if not, the slow path decides. The slow path also handles a lease of
//! another process whose token was handed to this one, because that lease ends with its process.

use rusqlite::{Connection, params};

use super::boot::now_ms;
use super::row::{Key, REVOKED, sql, unsql};
use crate::clock;
use crate::facts::{Fence, Token};
use crate::machine::{Contender, InboxId};
use crate::store::Renewal;

// Parameters: 1 name, 2 token, 3 wall µs, 4 inbox, 5 since, 6 ttl, 7 owner, 8 ends, 9 boot, 10 now,
// 11 the highest fence. `max(…)` keeps fences rising when the wall clock steps back. `row::lock_row` explains leases of
// another boot id.
const TAKE: &str = "
    INSERT INTO locks (name, flag, token, fence, counter, inbox, since_ms, ttl_ms, owner, ends, boot, queue_ends, written)
    SELECT ?1, 0, ?2, max(?3, floor + 1), max(?3, floor + 1), ?4, ?5, ?6, ?7, ?8, ?9, 0, ?10 FROM meta WHERE floor < ?11
    ON CONFLICT (name) DO UPDATE SET
        flag = 0, token = excluded.token, fence = max(excluded.fence, counter + 1),
        counter = max(excluded.fence, counter + 1), inbox = excluded.inbox, since_ms = excluded.since_ms,
        ttl_ms = excluded.ttl_ms, owner = excluded.owner, ends = excluded.ends, boot = excluded.boot, queue_ends = 0,
        written = excluded.written
    WHERE ((ends <= ?10 AND queue_ends = 0) OR (boot <> ?9 AND written > ?10)) AND counter < ?11
    RETURNING fence";

// `~` makes a number negative and keeps its length in bytes. A row of the same length is overwritten in place, which
// works on a full disk too.
const RELEASE: &str = "UPDATE locks SET ends = ~ends \
    WHERE name = ?1 AND token = ?2 AND ends > ?3 AND queue_ends = 0 AND (inbox = ?4 OR inbox IS NULL)";

const FREE: &str = "UPDATE locks SET ends = ~ends WHERE name = ?1 AND token = ?2 AND ends > ?3";

const RENEW: &str = "UPDATE locks SET ends = max(ends, ?3 + ?4), written = ?3 \
    WHERE name = ?1 AND token = ?2 AND ends > ?3 AND flag <> ?5 AND (?6 IS NULL OR fence = ?6) \
    AND (inbox = ?7 OR inbox IS NULL)";

const CONFIRM: &str = "UPDATE locks SET ends = max(ends, ?3 + ?4), written = ?3, ttl_ms = ?4, owner = ?8 \
    WHERE name = ?1 AND token = ?2 AND ends > ?3 AND flag <> ?5 AND (?6 IS NULL OR fence = ?6) \
    AND (inbox = ?7 OR inbox IS NULL)";

const TICKET: &str = "UPDATE meta SET floor = max(?1, floor + 1) WHERE max(?1, floor) < ?2 RETURNING floor";

/// Takes a lock that is free and has no waiters. Always draws a fence.
pub(super) fn take(conn: &Connection, boot: i64, name: &Key, asking: &Contender) -> rusqlite::Result<Option<u64>> {
    let (now, wall_us) = (now_ms(), clock::wall_us());
    if wall_us >= Fence::MAX {
        return Ok(None);
    }
    let mut statement = conn.prepare_cached(TAKE)?;
    let mut rows = statement.query(params![
        name.as_str(),
        asking.token.reveal(),
        sql(wall_us),
        asking.inbox.as_ref().map(|i| &*i.0),
        sql(wall_us / 1_000),
        sql(asking.ttl_ms),
        asking.owner.wire(),
        sql(now + asking.ttl_ms),
        boot,
        sql(now),
        sql(Fence::MAX)
    ])?;
    let fence: Option<i64> = rows.next()?.map(|row| row.get(0)).transpose()?;
    // The row comes before the commit. Only the next step shows whether the commit worked.
    while rows.next()?.is_some() {}
    Ok(fence.map(unsql))
}

/// Frees a lock without waiters.
pub(super) fn release(conn: &Connection, me: &InboxId, name: &Key, token: &Token) -> rusqlite::Result<bool> {
    let done = conn.prepare_cached(RELEASE)?.execute(params![name.as_str(), token.reveal(), sql(now_ms()), &*me.0])?;
    Ok(done == 1)
}

/// Frees a lock in place, even if it has waiters. They see that with their next request.
pub(super) fn free(conn: &Connection, name: &Key, token: &Token) -> rusqlite::Result<bool> {
    let done = conn.prepare_cached(FREE)?.execute(params![name.as_str(), token.reveal(), sql(now_ms())])?;
    Ok(done == 1)
}

/// Draws a ticket and raises the floor to it, so that every later fence and ticket of any lock is above it. `None` if
/// no numbers are left.
pub(super) fn ticket(conn: &Connection) -> rusqlite::Result<Option<u64>> {
    let mut statement = conn.prepare_cached(TICKET)?;
    let mut rows = statement.query(params![sql(clock::wall_us()), sql(Fence::MAX)])?;
    let ticket: Option<i64> = rows.next()?.map(|row| row.get(0)).transpose()?;
    // The row comes before the commit. Only the next step shows whether the commit worked.
    while rows.next()?.is_some() {}
    Ok(ticket.map(unsql))
}

/// Restarts the countdown of a lease that is still the holder's.
pub(super) fn renew(conn: &Connection, me: &InboxId, name: &Key, renewal: &Renewal) -> rusqlite::Result<bool> {
    let Renewal { name: _, token, fence, ttl, prolong, rewrite, hand_to } = renewal;
    // A check writes nothing, and handing a lease to another token is rare: this path does neither.
    if hand_to.is_some() || !prolong {
        return Ok(false);
    }
    let (name, token, now, ttl) = (name.as_str(), token.reveal(), sql(now_ms()), sql(ttl.as_millis()));
    let (fence, me) = (fence.map(|f| sql(f.get())), &*me.0);
    let done = match rewrite {
        None => conn.prepare_cached(RENEW)?.execute(params![name, token, now, ttl, REVOKED, fence, me])?,
        Some(owner) => {
            let owner = owner.wire();
            conn.prepare_cached(CONFIRM)?.execute(params![name, token, now, ttl, REVOKED, fence, me, owner])?
        }
    };
    Ok(done == 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::SqliteStore;
    use crate::facts::{LockName, Owner, Token, Ttl};
    use crate::store::{Acquire, AcquireRequest, Renewal, Renewed, Store, Try};

    fn request(name: &str, seconds: u64) -> AcquireRequest {
        AcquireRequest {
            name: LockName::new(name).expect("a name"),
            token: Token::random(),
            ttl: Ttl::new(Duration::from_secs(seconds)).expect("a ttl"),
            owner: Owner::default(),
            fenced: true,
            listens: false,
            since_ms: 1,
        }
    }

    /// Containers of one kernel can each have a boot id of their own.
    #[tokio::test]
    async fn a_lease_that_is_renewed_for_less_than_is_left_is_held_for_another_boot_id_too() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("locks.db");
        let store = SqliteStore::open(&path).expect("opens");
        for (name, waited_for, rewrites) in
            [("a", false, true), ("b", false, false), ("c", true, true), ("d", true, false)]
        {
            for (first, then) in [(3_600, 10), (10, 3_600)] {
                let held = request(&format!("{name}{first}"), first);
                let Ok(Try::Granted(grant)) = store.try_acquire(&held).await else { panic!("not granted") };
                if waited_for {
                    let waiter = AcquireRequest { token: Token::random(), ..held.clone() };
                    assert!(matches!(store.acquire(&waiter, None).await, Ok(Acquire::Queued(_))));
                }
                let renewal = Renewal {
                    name: held.name.clone(),
                    token: held.token.clone(),
                    fence: grant.fence,
                    ttl: request("ttl", then).ttl,
                    prolong: true,
                    rewrite: rewrites.then(Owner::default),
                    hand_to: None,
                };
                assert_eq!(store.renew(&[renewal]).await, [Renewed::Renewed]);
                let file = rusqlite::Connection::open(&path).expect("opens");
                file.execute("UPDATE locks SET boot = boot + 1", []).expect("written");
                let other = AcquireRequest { token: Token::random(), ..held.clone() };
                let tried = store.try_acquire(&other).await;
                assert!(matches!(tried, Ok(Try::Held(Some(_)))), "{name}: {first} s, then {then} s: {tried:?}");
                assert!(!matches!(store.acquire(&other, None).await, Ok(Acquire::Granted(_))), "{name}");
            }
        }
    }
}
