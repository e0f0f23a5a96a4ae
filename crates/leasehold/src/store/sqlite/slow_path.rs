//! The slow path, for a lock with waiters: the state machine in a transaction.

use rusqlite::{Connection, params};

use super::boot::now_ms;
use super::driver::{Fault, SqliteDriver};
use super::row::{self, Key, flag_number, sql};
use crate::clock;
use crate::facts::Token;
use crate::machine::{CallContext, InboxId, Limits, Lock, Message, QueueEntry, Slot};
use crate::store::on_machine::{MachineReply, RunMachine, view};

/// Waiters that are read at first: enough unless most of them are dead.
const FIRST_WAITERS: usize = 16;
/// A request of a waiter extends the queue's end. The new end is written only if it moved by this much.
const QUEUE_END_STEP_MS: u64 = 10_000;

const WAITERS: &str = "SELECT ticket, token, inbox, ttl_ms, since_ms, owner, polled FROM waiting WHERE name = ?1";
const JOIN: &str = "INSERT INTO waiting (name, ticket, token, inbox, ttl_ms, since_ms, owner, polled) \
                    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
const SAVE: &str = "INSERT OR REPLACE INTO locks \
    (name, flag, token, fence, counter, inbox, since_ms, ttl_ms, owner, ends, boot, queue_ends, written) \
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)";
const FREE: &str = "UPDATE locks SET ends = 0, flag = 0, counter = ?2, boot = ?3, queue_ends = ?4 WHERE name = ?1";
const BEFORE: &str = "SELECT count(*) FROM waiting WHERE name = ?1 AND ticket < ?2";

/// The state machine of one lock in the file.
pub(super) struct SqliteMachine<'a> {
    pub(super) driver: &'a mut SqliteDriver,
    pub(super) name: &'a Key,
}

impl RunMachine for SqliteMachine<'_> {
    type Error = Fault;

    /// Runs the operation in one transaction.
    fn run<R>(
        &mut self,
        me: Option<&Token>,
        verb: &mut dyn FnMut(&mut Lock, &mut CallContext<'_>) -> R,
    ) -> Result<MachineReply<R>, Fault> {
        let name = self.name;
        let run = |driver: &mut SqliteDriver| driver.run_machine(name, me, verb);
        let (called, messages, now_ms) = self.driver.in_transaction(run)?;
        self.driver.deliver(messages, now_ms);
        Ok(called)
    }
}

type Messages = Vec<(InboxId, Message)>;

/// A lock as it was read, to find out later what changed.
struct Loaded {
    lock: Lock,
    counter: u64,
    queue_was_over: bool,
}

impl SqliteDriver {
    pub(super) fn machine<'a>(&'a mut self, name: &'a Key) -> SqliteMachine<'a> {
        SqliteMachine { driver: self, name }
    }

    fn run_machine<R>(
        &mut self,
        name: &Key,
        me: Option<&Token>,
        verb: &mut dyn FnMut(&mut Lock, &mut CallContext<'_>) -> R,
    ) -> Result<(MachineReply<R>, Messages, u64), Fault> {
        let now_ms = now_ms();
        for few in [true, false] {
            let before = self.load(name, me, few.then_some(FIRST_WAITERS), now_ms)?;
            let mut lock = before.lock.clone();
            lock.lapse(now_ms);
            if let Slot::Held(held) = &lock.slot
                && let Some(inbox) = held.inbox.clone()
                && self.liveness.is_gone(&inbox)
            {
                lock.holder_died(&inbox);
            }
            let mut counter = before.counter;
            let mut messages = Messages::new();
            let liveness = self.liveness.clone();
            let mut cx = CallContext {
                now_ms,
                wall_us: clock::wall_us(),
                counter: &mut counter,
                listening: &mut |inbox| !liveness.is_gone(inbox),
                outbox: &mut messages,
                limits: if few { Limits { sweep: FIRST_WAITERS - 1, ..self.limits } } else { self.limits },
            };
            let reply = verb(&mut lock, &mut cx);
            let popped = || before.lock.queue.iter().filter(|w| !lock.queue.contains(w)).count();
            if few && popped() >= FIRST_WAITERS - 1 {
                // Nearly all of them were dead: run again with every waiter.
                continue;
            }
            self.save(name, &before, &lock, counter, now_ms)?;
            for (inbox, message) in messages.iter().filter(|(inbox, _)| inbox != self.liveness.id()) {
                row::post(&self.conn, inbox, message, now_ms)?;
            }
            return Ok((MachineReply { reply, holder: view(&lock.slot, now_ms) }, messages, now_ms));
        }
        unreachable!("the second run has read every waiter")
    }

    /// Number of waiters before a ticket.
    pub(super) fn position(&self, name: &Key, ticket: u64) -> rusqlite::Result<usize> {
        let mut statement = self.conn.prepare_cached(BEFORE)?;
        statement.query_row(params![name.as_str(), sql(ticket)], |row| Ok(row.get::<_, u32>(0)? as usize))
    }

    fn load(&self, name: &Key, me: Option<&Token>, few: Option<usize>, now_ms: u64) -> Result<Loaded, Fault> {
        let floor: i64 = self.conn.prepare_cached("SELECT floor FROM meta")?.query_row([], |row| row.get(0))?;
        let floor = row::unsql(floor);
        let Some(found) = row::lock(&self.conn, name, self.boot, now_ms)? else {
            return Ok(Loaded { lock: Lock::default(), counter: floor, queue_was_over: false });
        };
        let queue_was_over = found.queue_ends_ms <= now_ms;
        let queue = if queue_was_over { Vec::new() } else { waiters(&self.conn, name, me, few, now_ms)? };
        let lock = Lock { slot: found.slot, queue, queue_ends_ms: found.queue_ends_ms };
        Ok(Loaded { lock, counter: floor.max(found.counter), queue_was_over })
    }

    /// Writes only what changed.
    fn save(&self, name: &Key, before: &Loaded, lock: &Lock, counter: u64, now_ms: u64) -> Result<(), Fault> {
        let (name, conn) = (name.as_str(), &self.conn);
        if before.queue_was_over {
            conn.prepare_cached("DELETE FROM waiting WHERE name = ?1")?.execute([name])?;
        }
        for old in &before.lock.queue {
            match lock.queue.iter().find(|w| w.token == old.token) {
                None => {
                    let sql_text = "DELETE FROM waiting WHERE name = ?1 AND ticket = ?2 AND token = ?3";
                    conn.prepare_cached(sql_text)?.execute(params![name, sql(old.ticket), old.token.reveal()])?;
                }
                // The time of the last request matters only for a waiter that polls.
                Some(new) if new != old && new.inbox.is_none() => {
                    let sql_text = "UPDATE waiting SET polled = ?4 WHERE name = ?1 AND ticket = ?2 AND token = ?3";
                    let key = params![name, sql(old.ticket), old.token.reveal(), sql(new.polled_ms)];
                    conn.prepare_cached(sql_text)?.execute(key)?;
                }
                Some(_) => {}
            }
        }
        for new in lock.queue.iter().filter(|w| !before.lock.queue.iter().any(|old| old.token == w.token)) {
            join(conn, name, new)?;
        }
        let queue_ends = if lock.queue.is_empty() { 0 } else { lock.queue_ends_ms };
        let old_ends = before.lock.queue_ends_ms;
        let queue_moved = (queue_ends == 0) != (old_ends == 0) || queue_ends > old_ends + QUEUE_END_STEP_MS;
        if lock.slot == before.lock.slot && !queue_moved && counter == before.counter {
            return Ok(());
        }
        match &lock.slot {
            Slot::Held(held) => {
                let inbox = held.inbox.as_ref().map(|i| &*i.0);
                conn.prepare_cached(SAVE)?.execute(params![
                    name,
                    flag_number(held.flag),
                    held.token.reveal(),
                    sql(held.fence),
                    sql(counter),
                    inbox,
                    sql(held.since_ms),
                    sql(held.ttl_ms),
                    held.owner.wire(),
                    held.ends_ms.map_or(i64::MAX, sql),
                    self.boot,
                    sql(queue_ends),
                    sql(now_ms)
                ])?;
            }
            // Other kinds of clients do not write into this file, so there is no foreign holder.
            Slot::Free | Slot::Foreign { .. } => {
                let free = params![name, sql(counter), self.boot, sql(queue_ends)];
                let known = conn.prepare_cached(FREE)?.execute(free)? == 1;
                if !known && !lock.queue.is_empty() {
                    let nobody = Token::random();
                    let row = params![
                        name,
                        0,
                        nobody.reveal(),
                        0,
                        sql(counter),
                        None::<&str>,
                        0,
                        0,
                        "",
                        0,
                        self.boot,
                        sql(queue_ends),
                        sql(now_ms)
                    ];
                    conn.prepare_cached(SAVE)?.execute(row)?;
                }
            }
        }
        Ok(())
    }

    /// Delivers messages to waiters of this process, and wakes up the other processes.
    fn deliver(&mut self, messages: Messages, now_ms: u64) {
        let mut woken: Vec<InboxId> = Vec::new();
        for (inbox, message) in messages {
            if inbox == *self.liveness.id() {
                self.receive(message, now_ms);
            } else if !woken.contains(&inbox) {
                self.liveness.wake(&inbox);
                woken.push(inbox);
            }
        }
    }
}

fn waiters(
    conn: &Connection,
    name: &Key,
    me: Option<&Token>,
    few: Option<usize>,
    now_ms: u64,
) -> rusqlite::Result<Vec<QueueEntry>> {
    let select = |text: &str, with: &[&dyn rusqlite::ToSql]| select(conn, text, with, now_ms);
    let limit = few.map_or(-1, |n| i64::try_from(n).unwrap_or(-1));
    let mut found = select(&format!("{WAITERS} ORDER BY ticket LIMIT ?2"), params![name.as_str(), limit])?;
    if Some(found.len()) == few {
        // Of the others, only the last one and the calling one matter.
        found.extend(select(&format!("{WAITERS} ORDER BY ticket DESC LIMIT 1"), params![name.as_str()])?);
        if let Some(me) = me {
            found.extend(select(&format!("{WAITERS} AND token = ?2"), params![name.as_str(), me.reveal()])?);
        }
        found.sort_by(|a, b| (a.ticket, &a.token).cmp(&(b.ticket, &b.token)));
        found.dedup_by(|a, b| a.token == b.token);
    }
    Ok(found)
}

fn select(
    conn: &Connection,
    text: &str,
    with: &[&dyn rusqlite::ToSql],
    now_ms: u64,
) -> rusqlite::Result<Vec<QueueEntry>> {
    let mut statement = conn.prepare_cached(text)?;
    let rows = statement.query_map(with, |row| row::waiting_row(row, now_ms))?;
    rows.filter_map(Result::transpose).collect()
}

fn join(conn: &Connection, name: &str, new: &QueueEntry) -> rusqlite::Result<()> {
    let inbox = new.inbox.as_ref().map(|i| &*i.0);
    conn.prepare_cached(JOIN)?.execute(params![
        name,
        sql(new.ticket),
        new.token.reveal(),
        inbox,
        sql(new.ttl_ms),
        sql(new.since_ms),
        new.owner.wire(),
        sql(new.polled_ms)
    ])?;
    Ok(())
}
