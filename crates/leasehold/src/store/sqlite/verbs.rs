//! The operations on a lock, on the driver thread: the fast path first, then the slow path.

use super::boot::now_ms;
use super::disk_reserve::Need;
use super::driver::{AcquireCall, Fault, SqliteDriver};
use super::fast_path;
use super::row::{self, Key};
use crate::facts::{HolderId, Token};
use crate::machine::{
    AcquireReply, CallContext, EvictReply, FenceUnusable, FinishReply, Lock, PassReply, RenewReply, Slot, TryReply,
};
use crate::store::seen::view;
use crate::store::*;

impl SqliteDriver {
    pub(super) fn try_acquire(&mut self, call: &AcquireCall) -> Result<Try, StoreError> {
        self.attempt(Need::More, |driver| {
            if call.asking.fenced
                && let Some(fence) = fast_path::take(&driver.conn, driver.boot, &call.name, &call.asking)?
            {
                driver.committed();
                return Ok(Try::Granted(call.grant(fence)));
            }
            if let Some(holder) = driver.held_by_other(&call.name, &call.asking.token)? {
                return Ok(Try::Held(Some(holder)));
            }
            let called = driver.call_machine(&call.name, Some(&call.asking.token), &mut |lock, cx| {
                lock.try_acquire(cx, &call.asking)
            })?;
            Ok(match called.reply? {
                TryReply::Granted { fence } => Try::Granted(call.grant(fence)),
                TryReply::Held => Try::Held(view(&called.slot, called.now_ms)),
                TryReply::Revoked => Try::Revoked,
            })
        })
    }

    pub(super) fn acquire(&mut self, call: &AcquireCall, mut ticket: Option<u64>) -> Result<Acquire, StoreError> {
        let has_waited = ticket.is_some();
        let answer = self.attempt(Need::More, |driver| {
            if let Some(fence) = fast_path::take(&driver.conn, driver.boot, &call.name, &call.asking)? {
                driver.committed();
                driver.waiters.remove(&call.name, &call.asking.token);
                return Ok(Acquire::Granted(call.grant(fence)));
            }
            driver.acquire_slow(call, &mut ticket)
        });
        if has_waited {
            // A grant that was sent to this token before the answer must not be taken for newer than the answer.
            self.read_messages();
        }
        answer
    }

    /// Acquires on the slow path. A waiter of this process also takes over this way when the holder died.
    pub(super) fn acquire_slow(&mut self, call: &AcquireCall, ticket: &mut Option<u64>) -> Result<Acquire, Fault> {
        let token = &call.asking.token;
        loop {
            let asked = *ticket;
            let called =
                self.call_machine(&call.name, Some(token), &mut |lock, cx| lock.acquire(cx, &call.asking, asked))?;
            let answer = match called.reply? {
                AcquireReply::Again { ticket: mine } => {
                    *ticket = Some(mine);
                    continue;
                }
                AcquireReply::Granted { fence } => Acquire::Granted(call.grant(fence)),
                AcquireReply::Revoked => Acquire::Revoked,
                AcquireReply::Queued { ticket, .. } => {
                    let position = self.position(&call.name, ticket)?;
                    if call.asking.inbox.is_some() {
                        self.waiters.insert(call, ticket);
                    }
                    let holder = view(&called.slot, called.now_ms);
                    return Ok(Acquire::Queued(Place { ticket: Ticket(ticket), position, holder }));
                }
            };
            self.waiters.remove(&call.name, token);
            return Ok(answer);
        }
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
            loop {
                match driver.call_machine(name, None, &mut |lock, cx| lock.release(cx, token))?.reply {
                    PassReply::Done => return Ok(Release::Released),
                    PassReply::NotOurs => return Ok(Release::NotOwner),
                    PassReply::Again => {}
                }
            }
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
            let called = driver.call_machine(name, None, &mut |lock, cx| {
                lock.renew(cx, &r.token, r.ttl.as_millis(), r.fence, r.rewrite.as_ref(), r.hand_to.as_ref())
            })?;
            Ok(match called.reply {
                RenewReply::Renewed => Renewed::Renewed,
                RenewReply::Lost => Renewed::Lost,
                RenewReply::Revoked => Renewed::Revoked,
            })
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
        Ok(match lock.check(now, &r.token, r.fence) {
            RenewReply::Renewed => Renewed::Renewed,
            RenewReply::Lost => Renewed::Lost,
            RenewReply::Revoked => Renewed::Revoked,
        })
    }

    pub(super) fn leave(&mut self, name: &Key, token: &Token) -> Result<Left, StoreError> {
        let has_waited = self.waiters.remove(name, token);
        let answer = self.attempt(Need::Less, |driver| {
            loop {
                match driver.call_machine(name, Some(token), &mut |lock, cx| lock.leave(cx, token))?.reply {
                    PassReply::Done => return Ok(Left::WasGranted),
                    PassReply::NotOurs => return Ok(Left::WasWaiting),
                    PassReply::Again => {}
                }
            }
        });
        if has_waited {
            self.read_messages();
        }
        answer
    }

    pub(super) fn evict(&mut self, name: &Key, holder: HolderId, force: bool) -> Result<Evicted, StoreError> {
        self.attempt(Need::Less, |driver| {
            loop {
                let mut verb = |lock: &mut Lock, cx: &mut CallContext<'_>| {
                    let before = view(&lock.slot, cx.now_ms);
                    (lock.evict(cx, holder, force), before)
                };
                let (reply, before) = driver.call_machine(name, None, &mut verb)?.reply;
                let Some(found) = before else { return Ok(Evicted::Free) };
                return Ok(match reply {
                    EvictReply::Again => continue,
                    EvictReply::Done => Evicted::Done(found),
                    EvictReply::ChangedHands => Evicted::ChangedHands(found),
                    EvictReply::Free => Evicted::Free,
                    EvictReply::Foreign => Evicted::Foreign(found),
                });
            }
        })
    }

    pub(super) fn ask_to_finish(
        &mut self,
        name: &Key,
        holder: HolderId,
        reason: &str,
    ) -> Result<FinishRequest, StoreError> {
        self.attempt(Need::Less, |driver| {
            let called = driver.call_machine(name, None, &mut |lock, cx| lock.ask_to_finish(cx, holder, reason))?;
            Ok(match (called.reply, view(&called.slot, called.now_ms)) {
                (FinishReply::Free, _) | (_, None) => FinishRequest::Free,
                (FinishReply::Sent, Some(found)) => FinishRequest::Delivered(found),
                (FinishReply::NotListening, Some(found)) => FinishRequest::Undeliverable(found),
                (FinishReply::ChangedHands, Some(found)) => FinishRequest::ChangedHands(found),
            })
        })
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
