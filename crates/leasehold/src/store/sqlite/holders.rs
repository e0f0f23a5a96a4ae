//! The holders that attempts of this process wait for: watched for their death, and replaced when they are gone.

use std::collections::HashSet;

use super::boot::{floor_now, now_ms};
use super::disk_reserve::Need;
use super::driver::{Fault, SqliteDriver};
use super::row::{self, Key};
use super::waiters::AcquireCall;
use crate::machine::{InboxId, Slot};
use crate::store::{Acquire, Push, StoreErrorKind, Ticket};

/// This many waiters at the head of a queue watch the holder. The others get a message when they move up.
const WATCHERS: usize = 2;

impl SqliteDriver {
    /// Watches the holders that attempts of this process have begun to wait for.
    pub(super) fn watch_holders(&mut self) {
        self.watch.set_waiting(self.waiters.places.len(), &self.liveness);
        let mut missed = false;
        for key in std::mem::take(&mut self.waiters.unchecked) {
            let Some((_, ticket)) = self.waiters.places.get(&key) else { continue };
            missed |= match self.check_holder(&key.1, *ticket) {
                Ok(HolderState::Held(Some(inbox))) => {
                    !self.watch.add(inbox.clone(), &self.liveness) && self.is_dead(Some(&inbox))
                }
                Ok(HolderState::Held(None)) | Err(_) => false,
                // The holder died, or its lease ended, since the attempt's request.
                Ok(HolderState::Gone) => true,
            };
        }
        if missed && self.checks_holders {
            self.check_holders();
        }
    }

    /// Checks every lock that attempts of this process wait for. Acquires those whose holder died or whose lease ended,
    /// and watches the other holders.
    pub(super) fn check_holders(&mut self) {
        // A holder that dies between the check and the watch is found by the next check.
        const CHECKS: usize = 3;
        for _ in 0..CHECKS {
            let holders = self.take_over_where_possible();
            if self.watch.keep(&holders, &self.liveness) || !holders.iter().any(|holder| self.is_dead(Some(holder))) {
                return;
            }
        }
    }

    /// Acquires the locks that can be taken now, and returns the holders of the others.
    fn take_over_where_possible(&mut self) -> HashSet<InboxId> {
        let places: Vec<(AcquireCall, u64)> = self.waiters.places.values().cloned().collect();
        let (mut watched, mut full) = (HashSet::new(), false);
        for (mut call, ticket) in places {
            match self.check_holder(&call.name, ticket) {
                Ok(HolderState::Held(inbox)) => watched.extend(inbox),
                Ok(HolderState::Gone) if !full => {
                    call.asking.asked_at = floor_now();
                    call.asking.contender.fenced = true;
                    // The waiter meets the same error with its next request, and reports it.
                    match self.attempt(Need::More, |driver| driver.acquire_slow(&call, Some(Ticket(ticket)))) {
                        Ok(Acquire::Granted(grant)) => {
                            self.pushes.send(Push::Granted { token: call.asking.contender.token.clone(), grant });
                        }
                        // A full disk stays full for the others, and each would take as long to find out.
                        Err(error) => full = error.kind() == StoreErrorKind::DiskFull,
                        Ok(_) => {}
                    }
                }
                Ok(HolderState::Gone) | Err(_) => {}
            }
        }
        watched
    }

    fn check_holder(&self, name: &Key, ticket: u64) -> Result<HolderState, Fault> {
        let now = now_ms();
        let Some(found) = row::lock(&self.conn, name, self.boot, now)? else { return Ok(HolderState::Gone) };
        let Slot::Held(held) = found.slot else { return Ok(HolderState::Gone) };
        if held.ends_ms.is_some_and(|end| end <= now) || self.is_dead(held.inbox.as_ref()) {
            return Ok(HolderState::Gone);
        }
        let near = self.position(name, ticket)? < WATCHERS;
        Ok(HolderState::Held(held.inbox.filter(|inbox| near && inbox != self.liveness.id())))
    }
}

/// The holder of a lock that an attempt waits for.
enum HolderState {
    /// The lock is held, with the inbox to watch if the attempt is near the head of the queue.
    Held(Option<InboxId>),
    /// The lock is free, its holder is dead, or its lease has ended.
    Gone,
}
