//! The verbs of the lock path, on the thread: the fast path first, else the state machine.

use super::boot::now_ms;
use super::driver::{Ask, Driver, Fault};
use super::fast;
use super::room::Need;
use super::row::{self, Key};
use crate::facts::{HolderId, Token};
use crate::machine::{
    AcquireReply, AskReply, EvictReply, FenceUnusable, Lock, PassReply, RenewReply, Slot, TryReply, Turn,
};
use crate::store::seen::view;
use crate::store::*;

impl Driver {
    pub(super) fn try_acquire(&mut self, ask: &Ask) -> Result<Try, StoreError> {
        self.attempt(Need::More, |driver| {
            if ask.asking.fenced
                && let Some(fence) = fast::take(&driver.conn, driver.boot, &ask.name, &ask.asking)?
            {
                driver.committed();
                return Ok(Try::Granted(ask.grant(fence)));
            }
            if let Some(holder) = driver.plainly_held(&ask.name, &ask.asking.token)? {
                return Ok(Try::Held(Some(holder)));
            }
            let turned = driver
                .turn(&ask.name, Some(&ask.asking.token), &mut |lock, turn| lock.try_acquire(turn, &ask.asking))?;
            Ok(match turned.reply? {
                TryReply::Granted { fence } => Try::Granted(ask.grant(fence)),
                TryReply::Held => Try::Held(view(&turned.slot, turned.now_ms)),
                TryReply::Revoked => Try::Revoked,
            })
        })
    }

    pub(super) fn acquire(&mut self, ask: &Ask, mut ticket: Option<u64>) -> Result<Acquire, StoreError> {
        self.attempt(Need::More, |driver| {
            if let Some(fence) = fast::take(&driver.conn, driver.boot, &ask.name, &ask.asking)? {
                driver.committed();
                driver.waits.remove(&ask.name, &ask.asking.token);
                return Ok(Acquire::Granted(ask.grant(fence)));
            }
            driver.acquire_slowly(ask, &mut ticket)
        })
    }

    /// Also how a waiter of ours helps itself when the holder died.
    pub(super) fn acquire_slowly(&mut self, ask: &Ask, ticket: &mut Option<u64>) -> Result<Acquire, Fault> {
        let token = &ask.asking.token;
        loop {
            let asked = *ticket;
            let turned = self.turn(&ask.name, Some(token), &mut |lock, turn| lock.acquire(turn, &ask.asking, asked))?;
            let answer = match turned.reply? {
                AcquireReply::Again { ticket: mine } => {
                    *ticket = Some(mine);
                    continue;
                }
                AcquireReply::Granted { fence } => Acquire::Granted(ask.grant(fence)),
                AcquireReply::Revoked => Acquire::Revoked,
                AcquireReply::Queued { ticket, .. } => {
                    let position = self.position(&ask.name, ticket)?;
                    if ask.asking.inbox.is_some() {
                        self.waits.insert(ask, ticket);
                    }
                    let holder = view(&turned.slot, turned.now_ms);
                    return Ok(Acquire::Queued(Place { ticket: Ticket(ticket), position, holder }));
                }
            };
            self.waits.remove(&ask.name, token);
            return Ok(answer);
        }
    }

    pub(super) fn ticket(&mut self) -> Result<Ticket, StoreError> {
        self.attempt(Need::More, |driver| {
            let ticket = fast::ticket(&driver.conn)?.ok_or(FenceUnusable)?;
            driver.committed();
            Ok(Ticket(ticket))
        })
    }

    pub(super) fn release(&mut self, name: &Key, token: &Token) -> Result<Release, StoreError> {
        self.waits.remove(name, token);
        let handed_on = self.attempt(Need::Less, |driver| {
            if fast::release(&driver.conn, driver.alive.id(), name, token)? {
                driver.committed();
                return Ok(Release::Released);
            }
            loop {
                match driver.turn(name, None, &mut |lock, turn| lock.release(turn, token))?.reply {
                    PassReply::Done => return Ok(Release::Released),
                    PassReply::NotOurs => return Ok(Release::NotOwner),
                    PassReply::Again => {}
                }
            }
        });
        match handed_on {
            Err(error) if error.kind() == StoreErrorKind::DiskFull => self.attempt(Need::Nothing, |driver| {
                let freed = fast::free(&driver.conn, name, token)?;
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
            if fast::renew(&driver.conn, driver.alive.id(), name, r)? {
                driver.committed();
                return Ok(Renewed::Renewed);
            }
            let turned = driver.turn(name, None, &mut |lock, turn| {
                lock.renew(turn, &r.token, r.ttl.as_millis(), r.fence, r.rewrite.as_ref(), r.hand_to.as_ref())
            })?;
            Ok(match turned.reply {
                RenewReply::Renewed => Renewed::Renewed,
                RenewReply::Lost => Renewed::Lost,
                RenewReply::Revoked => Renewed::Revoked,
            })
        })
    }

    /// One read, no transaction.
    fn check_lease(&self, name: &Key, r: &Renewal) -> Result<Renewed, Fault> {
        let now = now_ms();
        let Some(found) = row::lock(&self.conn, name, self.boot, now)? else { return Ok(Renewed::Lost) };
        let mut lock = Lock { slot: found.slot, ..Lock::default() };
        if let Some(inbox) = lock.slot.inbox().cloned()
            && self.alive.is_gone(&inbox)
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
        self.waits.remove(name, token);
        self.attempt(Need::Less, |driver| {
            loop {
                match driver.turn(name, Some(token), &mut |lock, turn| lock.leave(turn, token))?.reply {
                    PassReply::Done => return Ok(Left::WasGranted),
                    PassReply::NotOurs => return Ok(Left::WasWaiting),
                    PassReply::Again => {}
                }
            }
        })
    }

    pub(super) fn evict(&mut self, name: &Key, holder: HolderId, force: bool) -> Result<Evicted, StoreError> {
        self.attempt(Need::Less, |driver| {
            loop {
                let mut verb = |lock: &mut Lock, turn: &mut Turn<'_>| {
                    let before = view(&lock.slot, turn.now_ms);
                    (lock.evict(turn, holder, force), before)
                };
                let (reply, before) = driver.turn(name, None, &mut verb)?.reply;
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

    pub(super) fn ask_to_finish(&mut self, name: &Key, holder: HolderId, reason: &str) -> Result<Asked, StoreError> {
        self.attempt(Need::Less, |driver| {
            let turned = driver.turn(name, None, &mut |lock, turn| lock.ask_to_finish(turn, holder, reason))?;
            Ok(match (turned.reply, view(&turned.slot, turned.now_ms)) {
                (AskReply::Free, _) | (_, None) => Asked::Free,
                (AskReply::Told, Some(found)) => Asked::Told(found),
                (AskReply::Deaf, Some(found)) => Asked::Deaf(found),
                (AskReply::ChangedHands, Some(found)) => Asked::ChangedHands(found),
            })
        })
    }

    /// A living holder that is not us: no turn of the machine is needed to see that.
    fn plainly_held(&self, name: &Key, token: &Token) -> Result<Option<Holder>, Fault> {
        let now = now_ms();
        let Some(found) = row::lock(&self.conn, name, self.boot, now)? else { return Ok(None) };
        let held = match &found.slot {
            Slot::Held(held) if held.token != *token && held.ends_ms.is_none_or(|end| end > now) => held,
            _ => return Ok(None),
        };
        Ok(if self.is_dead(held.inbox.as_ref()) { None } else { view(&found.slot, now) })
    }
}
