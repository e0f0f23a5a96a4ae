//! A try: plain commands in one write, and a script only where somebody waits or a fence is missing.

use super::conn::{Answer, Conn, fence, items, said};
use super::errors::{from_server, strange};
use super::keys::{self, LockKeys};
use super::resp::{Cmd, Pipeline, Value};
use super::value::{self, Record};
use super::{RedisStore, scripts};
use crate::clock::Moment;
use crate::facts::Fence;
use crate::store::{Claim, Grant, Holder, StoreError, StoreErrorKind, Try};

/// What a try found.
enum Found {
    Free,
    /// A re-sent try, with the fence the value has.
    Ours(Option<Fence>),
    Other(Try),
}

/// What is rare is boxed: otherwise every try would carry the room for it around.
impl RedisStore {
    pub(super) async fn ask_try(&self, claim: &Claim) -> Result<Try, StoreError> {
        let keys = self.lock_keys(&claim.name)?;
        let conn = self.link.conn().await?;
        // An inbox without a subscription would make a living holder look like one whose process is gone.
        let inbox = if conn.subscribed { self.inbox(claim) } else { value::NO_INBOX };
        let set = set_command(claim, &keys, &value::written(claim, inbox, conn.server_ms()));
        if !claim.fenced {
            let Answer { asked_at, reply } = conn.ask_raw(&set).await?;
            return match self.found(&conn, &keys, claim, reply).await? {
                Found::Free => Ok(granted(claim, None, asked_at)),
                Found::Other(answer) => Ok(answer),
                Found::Ours(fence) => Ok(match Box::pin(self.renew_first(&conn, &keys, claim, fence)).await? {
                    Ok(asked_at) => granted(claim, None, asked_at),
                    Err(answer) => answer,
                }),
            };
        }
        let mut pipe = Pipeline::with_capacity(3);
        pipe.add(set);
        pipe.cmd("INCR").arg(keys::FENCE);
        pipe.cmd("EXISTS").arg(keys.queue());
        let Answer { mut asked_at, reply } = conn.ask_all(&pipe).await?;
        let Ok([set, incr, exists]) = <[Value; 3]>::try_from(reply) else { return Err(strange("a try")) };
        // A counter that was lost counts from 1; grants must not.
        let counted = fence(&incr).filter(|f| f.get() >= Fence::SANE_MIN);
        let fence = match self.found(&conn, &keys, claim, set).await? {
            Found::Other(answer) => return Ok(answer),
            Found::Free => counted,
            Found::Ours(known) => {
                let fence = known.or(counted);
                match Box::pin(self.renew_first(&conn, &keys, claim, fence)).await? {
                    Ok(renewed_at) => asked_at = renewed_at,
                    Err(answer) => return Ok(answer),
                }
                // With a fence in it, the value was handed on, confirmed or renewed: somebody may
                // believe in it, so it is nobody else's, whoever waits.
                if let Some(known) = known {
                    self.link.saw(known);
                    return Ok(granted(claim, Some(known), asked_at));
                }
                fence
            }
        };
        let fence = match fence {
            Some(fence) => fence,
            None => match Box::pin(self.repair_fence(&conn, &keys, claim)).await? {
                Some(fence) => fence,
                None => return Ok(Try::Held(None)),
            },
        };
        self.link.saw(fence);
        if exists != Value::Int(0) {
            return Box::pin(self.yield_to_queue(&conn, &keys, claim, fence, asked_at)).await;
        }
        Ok(granted(claim, Some(fence), asked_at))
    }

    /// What the SET found. A value that is in its way is read by a second request, and only its beginning: SET's own
    /// GET would send all of it, and the server closes a subscribed connection that is sent too much at once.
    async fn found(&self, conn: &Conn, keys: &LockKeys, claim: &Claim, set: Value) -> Result<Found, StoreError> {
        match set {
            Value::Simple(_) => Ok(Found::Free),
            Value::Nil => Box::pin(self.in_the_way(conn, keys, claim)).await,
            Value::Error(error) => Err(from_server(&error)),
            _ => Err(strange("a try")),
        }
    }

    async fn in_the_way(&self, conn: &Conn, keys: &LockKeys, claim: &Claim) -> Result<Found, StoreError> {
        let mut look = Pipeline::with_capacity(2);
        look.add(value::read_command(keys.lock()));
        look.cmd("EXISTS").arg(keys.lock());
        let reply = conn.ask_all(&look).await?.reply;
        let Ok([value, exists]) = <[Value; 2]>::try_from(reply) else { return Err(strange("a try")) };
        match value {
            // Gone meanwhile. A value can also be empty, and is a foreign holder then.
            Value::Bulk(value) if value.is_empty() && exists == Value::Int(0) => Ok(Found::Other(Try::Held(None))),
            Value::Bulk(value) => Ok(match Record::parse(&value) {
                Some(record) if record.token == claim.token => Found::Ours(record.fence),
                _ => Found::Other(Try::Held(Some(seen_in_passing(&value)))),
            }),
            Value::Error(error) if from_server(&error).kind() == StoreErrorKind::WrongType => {
                Ok(Found::Other(Try::Held(self.look_at(conn, keys.lock()).await?)))
            }
            Value::Error(error) => Err(from_server(&error)),
            _ => Err(strange("a try")),
        }
    }

    /// A re-sent try did not restart the countdown: renews before it is believed. `Ok` with the moment
    /// that lease counts from.
    async fn renew_first(
        &self,
        conn: &Conn,
        keys: &LockKeys,
        claim: &Claim,
        fence: Option<Fence>,
    ) -> Result<Result<Moment, Try>, StoreError> {
        let digits = fence.map_or(String::new(), |f| format!("{:016}", f.get()));
        let args = |cmd: &mut Cmd| {
            cmd.arg(claim.token.reveal()).arg(claim.ttl.as_millis()).arg(&digits);
        };
        let Answer { asked_at, reply } = conn.run(&scripts::RENEW, &[keys.lock()], args).await?;
        match said(&reply) {
            Some("renewed") => Ok(Ok(asked_at)),
            Some("lost") => Ok(Err(Try::Held(None))),
            Some("revoked") => Ok(Err(Try::Revoked)),
            _ => Err(strange("renew")),
        }
    }

    /// The counter was lost or is unusable, and the lock is ours. `None`: it is not any more.
    async fn repair_fence(&self, conn: &Conn, keys: &LockKeys, claim: &Claim) -> Result<Option<Fence>, StoreError> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(claim.token.reveal()).arg(self.link.seen());
        };
        match conn.run(&scripts::FENCE, &keys.all(), args).await {
            Ok(answer) if said(&answer.reply) == Some("not ours") => Ok(None),
            Ok(answer) => fence(&answer.reply).map(Some).ok_or_else(|| strange("fence")),
            Err(error) => {
                // Without a fence nothing is granted, so nothing may stay held. Not after an error that passes:
                // the caller asks again with this token, and a token named in a release is dead.
                if !error.is_passing() {
                    // Whether this helps or not, the answer is the same, and the caller gives the token up.
                    let _ = self.ask_release(&claim.name, &claim.token).await;
                }
                Err(error)
            }
        }
    }

    /// Whoever waited before us goes first. From here on the token is dead unless we get it back.
    async fn yield_to_queue(
        &self,
        conn: &Conn,
        keys: &LockKeys,
        claim: &Claim,
        fence: Fence,
        asked_at: Moment,
    ) -> Result<Try, StoreError> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(claim.token.reveal()).arg(fence.get()).arg(self.limits().provisional_ms);
        };
        loop {
            let reply = items(conn.run(&scripts::YIELD, &keys.all(), args).await?.reply, "yield")?;
            return match reply.first().and_then(said) {
                Some("ours") => Ok(granted(claim, Some(fence), asked_at)),
                Some("revoked") => Ok(Try::Revoked),
                Some("again") => continue,
                Some("held") => Ok(Try::Held(match reply.get(1) {
                    Some(Value::Bulk(value)) if !value.is_empty() => Some(seen_in_passing(value)),
                    _ => None,
                })),
                _ => Err(strange("yield")),
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

/// A holder by its value alone. The rest of its lease is not asked for: it is at most the whole.
fn seen_in_passing(value: &[u8]) -> Holder {
    let mut holder = value::holder(value, -1);
    holder.ttl_left = holder.ttl;
    holder
}
