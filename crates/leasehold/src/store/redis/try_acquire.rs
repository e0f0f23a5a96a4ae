//! A try: plain commands in one write. A script runs only if an attempt waits or a fence is missing. `try_steps` decides
//! which command comes next.

use super::client::{Cmd, Pipeline, Session, SessionReply, Value, fence, from_server, items, unexpected_reply, word};
use super::keys::{self, LockKeys};
use super::try_steps::{StepReply, TryStep, TrySteps};
use super::value::{self, HolderRecord};
use super::{RedisStore, scripts};
use crate::facts::Fence;
use crate::store::{AcquireRequest, Grant, Holder, StoreError, StoreErrorKind, Try};

// Rare steps are boxed: otherwise the future of every try would have to hold them.
impl RedisStore {
    pub(super) async fn ask_try(&self, request: &AcquireRequest) -> Result<Try, StoreError> {
        let keys = self.lock_keys(&request.name)?;
        let session = self.client.session().await?;
        // A holder with an inbox but without a subscription would look like one whose process is gone.
        let inbox = if session.subscribed { self.inbox(request) } else { value::NO_INBOX };
        let set = set_command(request, &keys, &value::written(request, inbox, session.server_ms()));
        let mut steps = TrySteps::new(request.fenced, request.ttl.duration());
        let reply = if request.fenced {
            let mut pipe = Pipeline::with_capacity(3);
            pipe.add(set);
            pipe.cmd("INCR").arg(keys::FENCE);
            pipe.cmd("EXISTS").arg(keys.queue());
            let SessionReply { asked_at, reply } = session.send_all(&pipe).await?;
            let Ok([set, incr, exists]) = <[Value; 3]>::try_from(reply) else { return Err(unexpected_reply("a try")) };
            let (written, counted) = (was_written(&set)?, fence(&incr));
            StepReply::Set { asked_at, written, counted, queue: exists != Value::Int(0) }
        } else {
            let SessionReply { asked_at, reply } = session.send_raw(&set).await?;
            StepReply::Set { asked_at, written: was_written(&reply)?, counted: None, queue: false }
        };
        let answer = match steps.answered(reply) {
            TryStep::Done(answer) => answer,
            step => Box::pin(self.take_rare_steps(&session, &keys, request, steps, step)).await?,
        };
        if let Try::Granted(Grant { fence: Some(fence), .. }) = &answer {
            self.client.observe_fence(*fence);
        }
        Ok(answer)
    }

    /// Sends the steps of a try that follow its first one.
    async fn take_rare_steps(
        &self,
        session: &Session,
        keys: &LockKeys,
        request: &AcquireRequest,
        mut steps: TrySteps,
        mut step: TryStep,
    ) -> Result<Try, StoreError> {
        loop {
            let reply = match &step {
                TryStep::Read => self.in_the_way(session, keys, request).await,
                TryStep::Renew(fence) => renew(session, keys, request, *fence).await,
                TryStep::RepairFence => self.repair_fence(session, keys, request).await,
                TryStep::Yield(fence) => {
                    self.client.observe_fence(*fence);
                    self.yield_to_queue(session, keys, request, *fence).await
                }
                TryStep::Done(answer) => return Ok(answer.clone()),
            };
            match reply {
                Ok(reply) => step = steps.answered(reply),
                Err(error) => {
                    if TrySteps::releases_after(&step, &error) {
                        // The outcome does not change the answer: the caller gives the token up.
                        let _ = self.ask_release(&request.name, &request.token).await;
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Reads what is at the key, and only its beginning: the GET option of SET would send all of it, and the server
    /// closes a subscribed connection that is sent too much at once.
    async fn in_the_way(
        &self,
        session: &Session,
        keys: &LockKeys,
        request: &AcquireRequest,
    ) -> Result<StepReply, StoreError> {
        let mut look = Pipeline::with_capacity(2);
        look.add(value::read_command(keys.lock()));
        look.cmd("EXISTS").arg(keys.lock());
        let reply = session.send_all(&look).await?.reply;
        let Ok([value, exists]) = <[Value; 2]>::try_from(reply) else { return Err(unexpected_reply("a try")) };
        match value {
            // An empty value whose key exists belongs to a foreign holder.
            Value::Bulk(value) if value.is_empty() && exists == Value::Int(0) => Ok(StepReply::Gone),
            Value::Bulk(value) => Ok(match HolderRecord::parse(&value) {
                Some(record) if record.token == request.token => StepReply::Ours { written_fence: record.fence },
                _ => StepReply::Others(Some(seen_in_passing(&value))),
            }),
            Value::Error(error) if from_server(&error).kind() == StoreErrorKind::WrongType => {
                Ok(StepReply::Others(self.holder_at_key(session, keys.lock()).await?))
            }
            Value::Error(error) => Err(from_server(&error)),
            _ => Err(unexpected_reply("a try")),
        }
    }

    /// Draws a fence for a lock that is ours after the counter was lost or became unusable.
    async fn repair_fence(
        &self,
        session: &Session,
        keys: &LockKeys,
        request: &AcquireRequest,
    ) -> Result<StepReply, StoreError> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(request.token.reveal()).arg(self.client.highest_fence());
        };
        let reply = session.run(&scripts::FENCE, &keys.all(), args).await?.reply;
        if word(&reply) == Some("not ours") {
            return Ok(StepReply::Lost(None));
        }
        fence(&reply).map(StepReply::Repaired).ok_or_else(|| unexpected_reply("fence"))
    }

    /// Yields the lock to the waiters that came before. The token is dead from here on unless the script gives the lock
    /// back.
    async fn yield_to_queue(
        &self,
        session: &Session,
        keys: &LockKeys,
        request: &AcquireRequest,
        fence: Fence,
    ) -> Result<StepReply, StoreError> {
        let args = |cmd: &mut Cmd| {
            cmd.arg(request.token.reveal()).arg(fence.get()).arg(self.limits().provisional_ms);
        };
        let reply = items(session.run(&scripts::YIELD, &keys.all(), args).await?.reply, "yield")?;
        match reply.first().and_then(word) {
            Some("ours") => Ok(StepReply::Kept),
            Some("revoked") => Ok(StepReply::Revoked),
            Some("again") => Ok(StepReply::YieldAgain),
            Some("held") => Ok(StepReply::Lost(match reply.get(1) {
                Some(Value::Bulk(value)) if !value.is_empty() => Some(seen_in_passing(value)),
                _ => None,
            })),
            _ => Err(unexpected_reply("yield")),
        }
    }
}

/// Renews a lease that an earlier send of this try took.
async fn renew(
    session: &Session,
    keys: &LockKeys,
    request: &AcquireRequest,
    fence: Option<Fence>,
) -> Result<StepReply, StoreError> {
    let digits = fence.map_or(String::new(), |f| format!("{:016}", f.get()));
    let args = |cmd: &mut Cmd| {
        cmd.arg(request.token.reveal()).arg(request.ttl.as_millis()).arg(&digits);
    };
    let SessionReply { asked_at, reply } = session.run(&scripts::RENEW, &[keys.lock()], args).await?;
    match word(&reply) {
        Some("renewed") => Ok(StepReply::Renewed { asked_at }),
        Some("lost") => Ok(StepReply::Lost(None)),
        Some("revoked") => Ok(StepReply::Revoked),
        _ => Err(unexpected_reply("renew")),
    }
}

/// Interprets the reply to SET NX: whether the value was written.
fn was_written(set: &Value) -> Result<bool, StoreError> {
    match set {
        Value::Simple(_) => Ok(true),
        Value::Nil => Ok(false),
        Value::Error(error) => Err(from_server(error)),
        _ => Err(unexpected_reply("a try")),
    }
}

fn set_command(request: &AcquireRequest, keys: &LockKeys, value: &str) -> Cmd {
    let mut cmd = Cmd::with_capacity("SET", 160 + value.len() + keys.lock().len());
    cmd.arg(keys.lock()).arg(value).arg("NX").arg("PX").arg(request.ttl.as_millis());
    cmd
}

/// Reads a holder from its value alone. The remaining lease is not requested; the whole ttl is its upper bound.
fn seen_in_passing(value: &[u8]) -> Holder {
    let mut holder = value::holder(value, -1);
    holder.ttl_left = holder.ttl;
    holder
}
