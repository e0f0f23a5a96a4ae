//! What this process waits for, and whose death it watches for meanwhile.

use std::collections::{BTreeMap, HashSet};

use super::boot::{moment, now_ms};
use super::driver::{Ask, Driver, Fault};
use super::room::Need;
use super::row::{self, Key};
use crate::clock::Moment;
use crate::facts::Token;
use crate::machine::{InboxId, Slot};
use crate::store::{Acquire, Push, StoreErrorKind};

/// The first two in a queue watch the holder; the others are told when they come forward.
const WATCHERS: usize = 2;

/// Our places in queues.
#[derive(Default)]
pub(super) struct Waits {
    places: BTreeMap<(Token, Key), (Ask, u64)>,
    /// Whose holders are to be looked at again.
    fresh: HashSet<(Token, Key)>,
}

impl Waits {
    pub(super) fn insert(&mut self, ask: &Ask, ticket: u64) {
        let key = (ask.asking.token.clone(), ask.name.clone());
        self.fresh.insert(key.clone());
        self.places.insert(key, (ask.clone(), ticket));
    }

    pub(super) fn remove(&mut self, name: &Key, token: &Token) {
        if !self.places.is_empty() {
            let key = (token.clone(), name.clone());
            self.places.remove(&key);
            self.fresh.remove(&key);
        }
    }

    /// A message says so; it does not name the lock, and a waiter still in line asks again.
    pub(super) fn granted(&mut self, token: &Token) {
        self.places.retain(|(t, _), _| t != token);
        self.fresh.retain(|(t, _)| t != token);
    }

    /// The attempts that wait, which are forgotten: each asks again by itself.
    pub(super) fn take_tokens(&mut self) -> Vec<Token> {
        self.fresh.clear();
        let mut tokens: Vec<Token> = std::mem::take(&mut self.places).into_keys().map(|(token, _)| token).collect();
        tokens.dedup();
        tokens
    }

    /// The lock changed hands, and this attempt is next.
    pub(super) fn look_at(&mut self, token: &Token) {
        self.fresh.extend(self.places.keys().filter(|(t, _)| t == token).cloned());
    }
}

impl Driver {
    /// Watches the holders we have come to wait for.
    pub(super) fn watch_holders(&mut self) {
        self.watch.set_waiting(self.waits.places.len(), &self.alive);
        let mut missed = false;
        for key in std::mem::take(&mut self.waits.fresh) {
            let Some((_, ticket)) = self.waits.places.get(&key) else { continue };
            missed |= match self.look_at(&key.1, *ticket) {
                Ok(Looked::Watch(Some(inbox))) => {
                    !self.watch.add(inbox.clone(), &self.alive) && self.is_dead(Some(&inbox))
                }
                Ok(Looked::Watch(None)) | Err(_) => false,
                // It died, or its lease ended, since we asked.
                Ok(Looked::Help) => true,
            };
        }
        if missed && self.looks_around {
            self.look_around();
        }
    }

    /// Looks at everything we wait for: helps where a holder died or its lease ended, and watches
    /// the holders there are now.
    pub(super) fn look_around(&mut self) {
        // Who dies between the look and the watch is seen by the next look.
        const LOOKS: usize = 3;
        for _ in 0..LOOKS {
            let holders = self.help_where_needed();
            if self.watch.keep(&holders, &self.alive) || !holders.iter().any(|holder| self.is_dead(Some(holder))) {
                return;
            }
        }
    }

    /// The holders there are where nothing is to be done.
    fn help_where_needed(&mut self) -> HashSet<InboxId> {
        let places: Vec<(Ask, u64)> = self.waits.places.values().cloned().collect();
        let (mut watched, mut full) = (HashSet::new(), false);
        for (mut ask, ticket) in places {
            match self.look_at(&ask.name, ticket) {
                Ok(Looked::Watch(inbox)) => watched.extend(inbox),
                Ok(Looked::Help) if !full => {
                    ask.asked_at = floor_now();
                    ask.asking.fenced = true;
                    // An error here is met again, and told, when the waiter re-asks.
                    match self.attempt(Need::More, |driver| driver.acquire_slowly(&ask, &mut Some(ticket))) {
                        Ok(Acquire::Granted(grant)) => {
                            let _ = self.pushes.send(Push::Granted { token: ask.asking.token.clone(), grant });
                        }
                        // The others would take as long to find that out.
                        Err(error) => full = error.kind() == StoreErrorKind::DiskFull,
                        Ok(_) => {}
                    }
                }
                Ok(Looked::Help) | Err(_) => {}
            }
        }
        watched
    }

    fn look_at(&self, name: &Key, ticket: u64) -> Result<Looked, Fault> {
        let now = now_ms();
        let Some(found) = row::lock(&self.conn, name, self.boot, now)? else { return Ok(Looked::Help) };
        let Slot::Held(held) = found.slot else { return Ok(Looked::Help) };
        if held.ends_ms.is_some_and(|end| end <= now) || self.is_dead(held.inbox.as_ref()) {
            return Ok(Looked::Help);
        }
        let near = self.position(name, ticket)? < WATCHERS;
        Ok(Looked::Watch(held.inbox.filter(|inbox| near && inbox != self.alive.id())))
    }

    /// Reads what other processes left for us.
    pub(super) fn read_messages(&mut self) {
        const READ: &str = "SELECT id, kind, token, fence, lasts_ms, at, reason FROM messages \
                            WHERE inbox = ?1 AND id > ?2 ORDER BY id";
        const CLEAR: &str = "DELETE FROM messages WHERE inbox = ?1 AND id <= ?2";
        let me = self.alive.id().clone();
        let found = (|| {
            let mut statement = self.conn.prepare_cached(READ)?;
            let rows = statement.query_map((&*me.0, self.watch.read_up_to()), row::message_row)?;
            rows.collect::<rusqlite::Result<Vec<_>>>()
        })();
        let Ok(found) = found else { return };
        let Some((last, _, _)) = found.last() else { return };
        let last = *last;
        // Told first: the work begins while the rows are cleared away.
        for (_, message, at_ms) in found {
            if let Some(message) = message {
                self.hear(message, at_ms);
            }
        }
        let cleared = self.conn.prepare_cached(CLEAR).and_then(|mut s| s.execute((&*me.0, last)));
        // Numbers begin anew once all are gone; until then nothing is told twice.
        self.watch.set_read_up_to(if cleared.is_ok() { 0 } else { last });
        self.committed();
    }
}

enum Looked {
    Watch(Option<InboxId>),
    Help,
}

/// Now, not later than the millisecond the store will count from.
pub(super) fn floor_now() -> Moment {
    moment(now_ms())
}
