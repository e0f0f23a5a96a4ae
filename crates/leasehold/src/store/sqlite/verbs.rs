//! The operations on a lock, on the driver thread: the fast path first, then the slow path.

use super::boot::now_ms;
use super::disk_reserve::Need;
use super::driver::{Fault, SqliteDriver};
use super::fast_path;
use super::row::{self, Key};
use super::waiters::AcquireCall;
use crate::facts::{HolderId, Token};
use crate::machine::{FenceUnusable, Lock, Slot};
use crate::store::on_machine::{self, view};
use crate::store::*;

impl SqliteDriver {
    pub(super) fn try_acquire(&mut self, call: &AcquireCall) -> Result<Try, StoreError> {
        self.attempt(Need::More, |driver| {
            if call.asking.contender.fenced
                && let Some(fence) = fast_path::take(&driver.conn, driver.boot, &call.name, &call.asking.contender)?
            {
                driver.committed();
                return Ok(Try::Granted(call.asking.grant(fence)));
            }
            if let Some(holder) = driver.held_by_other(&call.name, &call.asking.contender.token)? {
                return Ok(Try::Held(Some(holder)));
            }
            on_machine::try_acquire(driver.machine(&call.name), &call.asking)
        })
    }

    pub(super) fn acquire(&mut self, call: &AcquireCall, ticket: Option<Ticket>) -> Result<Acquire, StoreError> {
        let has_waited = ticket.is_some();
        let answer = self.attempt(Need::More, |driver| {
            if let Some(fence) = fast_path::take(&driver.conn, driver.boot, &call.name, &call.asking.contender)? {
                driver.committed();
                driver.waiters.remove(&call.name, &call.asking.contender.token);
                return Ok(Acquire::Granted(call.asking.grant(fence)));
            }
            driver.acquire_slow(call, ticket)
        });
        if has_waited {
            // A grant that was sent to this token before the answer must not be taken for newer than the answer.
            self.read_messages();
        }
        answer
    }

    /// Acquires on the slow path. A waiter of this process also takes over this way when the holder died.
    pub(super) fn acquire_slow(&mut self, call: &AcquireCall, ticket: Option<Ticket>) -> Result<Acquire, Fault> {
        let mut answer = on_machine::acquire(self.machine(&call.name), &call.asking, ticket)?;
        match &mut answer {
            Acquire::Queued(place) => {
                // The state machine may have read only the first waiters.
                place.position = self.position(&call.name, place.ticket.0)?;
                if call.asking.contender.inbox.is_some() {
                    self.waiters.insert(call, place.ticket.0);
                }
            }
            Acquire::Granted(_) | Acquire::Revoked => {
                self.waiters.remove(&call.name, &call.asking.contender.token);
            }
        }
        Ok(answer)
    }

    pub(super) fn ticket(&mut self) -> Result<Ticket, StoreError> {
        self.attempt(Need::More, |driver| {
            let ticket = fast_path::ticket(&driver.conn)?.ok_or(FenceUnusable)?;
            driver.committed();
            Ok(Ticket(ticket))
        })
    }

    pub(super) fn release(&mut self, name: &Key, token: &Token) -> Result<Release, StoreError> {
        self.waiters.remove(name, token);
        let handed_on = self.attempt(Need::Less, |driver| {
            if fast_path::release(&driver.conn, driver.liveness.id(), name, token)? {
                driver.committed();
                return Ok(Release::Released);
            }
            on_machine::release(driver.machine(name), token)
        });
        match handed_on {
            Err(error) if error.kind() == StoreErrorKind::DiskFull => self.attempt(Need::Nothing, |driver| {
                let freed = fast_path::free(&driver.conn, name, token)?;
                Ok(if freed { Release::Released } else { Release::NotOwner })
            }),
            answer => answer,
        }
    }

    pub(super) fn renew(&mut self, renewals: &[(Key, Renewal)]) -> Vec<Renewed> {
        renewals.iter().map(|(name, r)| self.renew_one(name, r).unwrap_or_else(Renewed::Unknown)).collect()
    }

    fn renew_one(&mut self, name: &Key, r: &Renewal) -> Result<Renewed, StoreError> {
        if !r.prolong {
            return self.attempt(Need::Nothing, |driver| driver.check_lease(name, r));
        }
        self.attempt(Need::Less, |driver| {
            if fast_path::renew(&driver.conn, driver.liveness.id(), name, r)? {
                driver.committed();
                return Ok(Renewed::Renewed);
            }
            on_machine::renew(driver.machine(name), r)
        })
    }

    /// Checks a lease with one read and without a transaction.
    fn check_lease(&self, name: &Key, r: &Renewal) -> Result<Renewed, Fault> {
        let now = now_ms();
        let Some(found) = row::lock(&self.conn, name, self.boot, now)? else { return Ok(Renewed::Lost) };
        let mut lock = Lock { slot: found.slot, ..Lock::default() };
        if let Some(inbox) = lock.slot.inbox().cloned()
            && self.liveness.is_gone(&inbox)
        {
            lock.holder_died(&inbox);
        }
        Ok(lock.check(now, &r.token, r.fence).into())
    }

    pub(super) fn leave(&mut self, name: &Key, token: &Token) -> Result<Left, StoreError> {
        let has_waited = self.waiters.remove(name, token);
        let answer = self.attempt(Need::Less, |driver| on_machine::leave(driver.machine(name), token));
        if has_waited {
            self.read_messages();
        }
        answer
    }

    pub(super) fn evict(&mut self, name: &Key, holder: HolderId, force: bool) -> Result<Evicted, StoreError> {
        self.attempt(Need::Less, |driver| on_machine::evict(driver.machine(name), holder, force))
    }

    pub(super) fn ask_to_finish(
        &mut self,
        name: &Key,
        holder: HolderId,
        reason: &str,
    ) -> Result<FinishRequest, StoreError> {
        self.attempt(Need::Less, |driver| on_machine::ask_to_finish(driver.machine(name), holder, reason))
    }

    /// Returns a living holder with another token. One read is enough, without the state machine.
    fn held_by_other(&self, name: &Key, token: &Token) -> Result<Option<Holder>, Fault> {
        let now = now_ms();
        let Some(found) = row::lock(&self.conn, name, self.boot, now)? else { return Ok(None) };
        let held = match &found.slot {
            Slot::Held(held) if held.token != *token && held.ends_ms.is_none_or(|end| end > now) => held,
            _ => return Ok(None),
        };
        Ok(if self.is_dead(held.inbox.as_ref()) { None } else { view(&found.slot, now) })
    }
}
