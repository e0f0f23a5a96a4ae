//! A try: plain commands in one write. A script runs only if a claim waits or a fence is missing.

use super::client::{Cmd, Pipeline, Session, SessionReply, Value, fence, from_server, items, unexpected_reply, word};
use super::keys::{self, LockKeys};
use super::value::{self, HolderRecord};
use super::{RedisStore, scripts};
use crate::clock::Moment;
use crate::facts::Fence;
use crate::store::{Claim, Grant, Holder, StoreError, StoreErrorKind, Try};

/// What a try found at the lock's key.
enum KeyState {
    Free,
    /// Our own value, written by an earlier send of this try, with the fence in it.
    Ours(Option<Fence>),
    Other(Try),
}

// Rare steps are boxed: otherwise the future of every try would have to hold them.
impl RedisStore {
    pub(super) async fn ask_try(&self, claim: &Claim) -> Result<Try, StoreError> {
        let keys = self.lock_keys(&claim.name)?;
        let session = self.client.session().await?;
        // A holder with an inbox but without a subscription would look like one whose process is gone.
        let inbox = if session.subscribed { self.inbox(claim) } else { value::NO_INBOX };
        let set = set_command(claim, &keys, &value::written(claim, inbox, session.server_ms()));
        if !claim.fenced {
            let SessionReply { asked_at, reply } = session.send_raw(&set).await?;
            return match self.found(&session, &keys, claim, reply).await? {
                KeyState::Free => Ok(granted(claim, None, asked_at)),
                KeyState::Other(answer) => Ok(answer),
                KeyState::Ours(fence) => Ok(match Box::pin(self.renew_first(&session, &keys, claim, fence)).await? {
                    Ok(asked_at) => granted(claim, None, asked_at),
                    Err(answer) => answer,
                }),
            };
        }
        let mut pipe = Pipeline::with_capacity(3);
        pipe.add(set);
        pipe.cmd("INCR").arg(keys::FENCE);
        pipe.cmd("EXISTS").arg(keys.queue());
        let SessionReply { mut asked_at, reply } = session.send_all(&pipe).await?;
        let Ok([set, incr, exists]) = <[Value; 3]>::try_from(reply) else { return Err(unexpected_reply("a try")) };
        // A counter that was lost restarts at 1; fences must not.
        let counted = fence(&incr).filter(|f| f.get() >= Fence::SANE_MIN);
        let fence = match self.found(&session, &keys, claim, set).await? {
            KeyState::Other(answer) => return Ok(answer),
            KeyState::Free => counted,
            KeyState::Ours(known) => {
                let fence = known.or(counted);
                match Box::pin(self.renew_first(&session, &keys, claim, fence)).await? {
                    Ok(renewed_at) => asked_at = renewed_at,
                    Err(answer) => return Ok(answer),
                }
                // A value with a fence was handed off, confirmed or renewed. Its holder may rely on it, so it does not
                // yield to the queue.
                if let Some(known) = known {
                    self.client.observe_fence(known);
                    return Ok(granted(claim, Some(known), asked_at));
                }
                fence
            }
        };
        let fence = match fence {
            Some(fence) => fence,
            None => match Box::pin(self.repair_fence(&session, &keys, claim)).await? {
                Some(fence) => fence,
                None => return Ok(Try::Held(None)),
            },
        };
        self.client.observe_fence(fence);
        if exists != Value::Int(0) {
            return Box::pin(self.yield_to_queue(&session, &keys, claim, fence, asked_at)).await;
        }
        Ok(granted(claim, Some(fence), asked_at))
    }

    /// Interprets the reply to SET. A second request reads an existing value, and only its beginning: the GET option of
    /// SET would send all of it, and the server closes a subscribed connection that is sent too much at once.
    async fn found(
        &self,
        session: &Session,
        keys: &LockKeys,
        claim: &Claim,
        set: Value,
    ) -> Result<KeyState, StoreError> {
        match set {
            Value::Simple(_) => Ok(KeyState::Free),
            Value::Nil => Box::pin(self.in_the_way(session, keys, claim)).await,
            Value::Error(error) => Err(from_server(&error)),
            _ => Err(unexpected_reply("a try")),
        }
    }

    async fn in_the_way(&self, session: &Session, keys: &LockKeys, claim: &Claim) -> Result<KeyState, StoreError> {
        let mut look = Pipeline::with_capacity(2);
        look.add(value::read_command(keys.lock()));
        look.cmd("EXISTS").arg(keys.lock());
        let reply = session.send_all(&look).await?.reply;
        let Ok([value, exists]) = <[Value; 2]>::try_from(reply) else { return Err(unexpected_reply("a try")) };
        match value {
            // The key is gone by now. An empty value whose key exists belongs to a foreign holder.
            Value::Bulk(value) if value.is_empty() && exists == Value::Int(0) => Ok(KeyState::Other(Try::Held(None))),
            Value::Bulk(value) => Ok(match HolderRecord::parse(&value) {
                Some(record) if record.token == claim.token => KeyState::Ours(record.fence),
                _ => KeyState::Other(Try::Held(Some(seen_in_passing(&value)))),
            }),
            Value::Error(error) if from_server(&error).kind() == StoreErrorKind::WrongType => {
                Ok(KeyState::Other(Try::Held(self.holder_at_key(session, keys.lock()).await?)))
            }
            Value::Error(error) => Err(from_server(&error)),
            _ => Err(unexpected_reply("a try")),
        }
    }

    /// Renews a lease that an earlier send of this try took, because the later send did not restart its countdown.
    /// Returns the moment that the lease counts from, or the answer to the try if the lease is over.
    async fn renew_first(
        &self,
        session: &Session,
        keys: &LockKeys,
        claim: &Claim,
        fence: Option<Fence>,
    ) -> Result<Result<Moment, Try>, StoreError> {
        let digits = fence.map_or(String::new(), |f| format!("{:016}", f.get()));
        let args = |cmd: &mut Cmd| {
            cmd.arg(claim.token.reveal()).arg(claim.ttl.as_millis()).arg(&digits);
        };
        let SessionReply { asked_at, reply } = session.run(&scripts::RENEW, &[keys.lock()], args).await?;
        match word(&reply) {
            Some("renewed") => Ok(Ok(asked_at)),
            Some("lost") => Ok(Err(Try::Held(None))),
            Some("revoked") => Ok(Err(Try::Revoked)),
            _ => Err(unexpected_reply("renew")),
        }
    }

    /// Draws a fence for a lock that is ours after the counter was lost or became unusable. `None` if the lock is no
    /// longer ours.
    async fn repair_fence(
        &self,
        session: &Session,
        keys: &LockKeys,
        claim: &Claim,
    ) -> Result<Option<Fence>, StoreError> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(claim.token.reveal()).arg(self.client.highest_fence());
        };
        match session.run(&scripts::FENCE, &keys.all(), args).await {
            Ok(answer) if word(&answer.reply) == Some("not ours") => Ok(None),
            Ok(answer) => fence(&answer.reply).map(Some).ok_or_else(|| unexpected_reply("fence")),
            Err(error) => {
                // Without a fence nothing is granted, so nothing may stay held. Not released after a temporary error:
                // the caller tries again with this token, and a released token is dead.
                if !error.is_passing() {
                    // The outcome does not change the answer: the caller gives the token up.
                    let _ = self.ask_release(&claim.name, &claim.token).await;
                }
                Err(error)
            }
        }
    }

    /// Yields the lock to the waiters that came before. The token is dead from here on unless the script gives the lock
    /// back.
    async fn yield_to_queue(
        &self,
        session: &Session,
        keys: &LockKeys,
        claim: &Claim,
        fence: Fence,
        asked_at: Moment,
    ) -> Result<Try, StoreError> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(claim.token.reveal()).arg(fence.get()).arg(self.limits().provisional_ms);
        };
        loop {
            let reply = items(session.run(&scripts::YIELD, &keys.all(), args).await?.reply, "yield")?;
            return match reply.first().and_then(word) {
                Some("ours") => Ok(granted(claim, Some(fence), asked_at)),
                Some("revoked") => Ok(Try::Revoked),
                Some("again") => continue,
                Some("held") => Ok(Try::Held(match reply.get(1) {
                    Some(Value::Bulk(value)) if !value.is_empty() => Some(seen_in_passing(value)),
                    _ => None,
                })),
                _ => Err(unexpected_reply("yield")),
            };
        }
    }
}

fn set_command(claim: &Claim, keys: &LockKeys, value: &str) -> Cmd {
    let mut cmd = Cmd::with_capacity("SET", 160 + value.len() + keys.lock().len());
    cmd.arg(keys.lock()).arg(value).arg("NX").arg("PX").arg(claim.ttl.as_millis());
    cmd
}

fn granted(claim: &Claim, fence: Option<Fence>, asked_at: Moment) -> Try {
    Try::Granted(Grant { fence, asked_at, lasts: claim.ttl.duration() })
}

/// Reads a holder from its value alone. The remaining lease is not requested; the whole ttl is its upper bound.
fn seen_in_passing(value: &[u8]) -> Holder {
    let mut holder = value::holder(value, -1);
    holder.ttl_left = holder.ttl;
    holder
}
