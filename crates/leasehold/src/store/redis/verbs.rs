//! The operations on a lock other than a try: one script each.

use super::client::{
    Cmd, Pipeline, Session, SessionReply, Value, cmd, fence, from_server, is_replica, items, number, replica,
    unexpected_reply, word,
};
use super::scripts::{self, Script};
use super::{RedisStore, keys, value};
use crate::facts::{Fence, HolderId, LockName, Owner, Token};
use crate::store::{
    Acquire, AcquireRequest, EvictMode, Evicted, FinishRequest, Grant, Holder, Left, Place, Release, Renewal, Renewed,
    StoreError, StoreErrorKind, Ticket,
};

impl RedisStore {
    pub(super) async fn ask_acquire(
        &self,
        request: &AcquireRequest,
        ticket: Option<Ticket>,
    ) -> Result<Acquire, StoreError> {
        let keys = self.lock_keys(&request.name)?;
        let session = self.client.session().await?;
        let limits = self.limits();
        let mut ticket = ticket.map_or(0, |t| t.0);
        loop {
            let args = |cmd: &mut Cmd| {
                self.entry(cmd, request);
                cmd.arg(ticket).arg(limits.provisional_ms).arg(limits.queue_ttl_ms).arg(self.client.highest_fence());
            };
            let SessionReply { asked_at, reply } = session.run(&scripts::ACQUIRE, &keys.all(), args).await?;
            let reply = items(reply, "acquire")?;
            let given = reply.get(1).and_then(number);
            match (first_word(&reply), given) {
                (Some("granted"), Some(_)) => {
                    let fence = fence(&reply[1]).ok_or_else(|| unexpected_reply("acquire"))?;
                    self.client.observe_fence(fence);
                    let fence = request.fenced.then_some(fence);
                    return Ok(Acquire::Granted(Grant { fence, asked_at, lasts: request.ttl.duration() }));
                }
                (Some("queued"), Some(ticket)) => {
                    let position = reply.get(2).and_then(number).unwrap_or(0);
                    let position = usize::try_from(position).unwrap_or(usize::MAX);
                    let holder = holder_at(&reply, 4, 3);
                    return Ok(Acquire::Queued(Place { ticket: Ticket(ticket), position, holder }));
                }
                (Some("again"), Some(mine)) => ticket = mine,
                (Some("revoked"), None) => return Ok(Acquire::Revoked),
                _ => return Err(unexpected_reply("acquire")),
            }
        }
    }

    /// Draws a ticket from the counter that fences and tickets share. If the counter was lost, the raise script runs
    /// first, as in the handshake of a session.
    pub(super) async fn ask_ticket(&self) -> Result<Ticket, StoreError> {
        let session = self.client.session().await?;
        let mut incr = cmd("INCR");
        incr.arg(keys::FENCE);
        let drawn = session.send(&incr).await?.reply;
        let mut drawn = fence(&drawn);
        if drawn.is_some_and(|number| number.get() < Fence::SANE_MIN) {
            let seen = |cmd: &mut Cmd| {
                cmd.arg(self.client.highest_fence()).arg(&self.client.inbox_channel);
            };
            session.run(&scripts::RAISE, &[keys::FENCE], seen).await?;
            drawn = fence(&session.send(&incr).await?.reply);
        }
        let ticket = drawn.ok_or(StoreErrorKind::FenceUnusable)?;
        self.client.observe_fence(ticket);
        Ok(Ticket(ticket.get()))
    }

    pub(super) async fn send_release_uncontended(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        let key = self.keys.key(name)?;
        let session = self.client.session().await?;
        let unwaited = ["0 ", token.reveal()].concat();
        let args = |cmd: &mut Cmd| {
            cmd.arg(&unwaited);
        };
        let reply = match session.run(&scripts::RELEASE_UNCONTENDED, &[&key], args).await {
            Err(error) if error.kind() == StoreErrorKind::WrongType => return Ok(Release::NotOwner),
            answer => answer?.reply,
        };
        match word(&reply) {
            Some("released") => Ok(Release::Released),
            Some("not ours") => Ok(Release::NotOwner),
            // Boxed because it is rare: otherwise the future of every release without waiters would have to hold it.
            Some("waited for") => Box::pin(self.ask_release(name, token)).await,
            _ => Err(unexpected_reply("the release")),
        }
    }

    pub(super) async fn send_release_value(&self, name: &LockName, value: &str) -> Result<Release, StoreError> {
        // A value of a leasehold client is released by its token only.
        if value::HolderRecord::parse(value.as_bytes()).is_some() {
            return Ok(Release::NotOwner);
        }
        let keys = self.lock_keys(name)?;
        let session = self.client.session().await?;
        let args = |cmd: &mut Cmd| {
            cmd.arg(value);
        };
        let reply = match session.run(&scripts::RELEASE_VALUE, &[keys.lock(), keys.queue()], args).await {
            Err(error) if error.kind() == StoreErrorKind::WrongType => return Ok(Release::NotOwner),
            answer => answer?.reply,
        };
        match word(&reply) {
            Some("released") => Ok(Release::Released),
            Some("not ours") => Ok(Release::NotOwner),
            Some("waited for") => {
                let holder = HolderId::of(value.as_bytes());
                match Box::pin(self.ask_evict(name, holder, EvictMode::Force)).await? {
                    Evicted::Done(_) => Ok(Release::Released),
                    _ => Ok(Release::NotOwner),
                }
            }
            _ => Err(unexpected_reply("the release of a value")),
        }
    }

    pub(super) async fn ask_release(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        let keys = self.lock_keys(name)?;
        let session = self.client.session().await?;
        let args = |cmd: &mut Cmd| {
            cmd.arg(token.reveal()).arg(self.limits().provisional_ms);
        };
        loop {
            return match word(&session.run(&scripts::RELEASE, &keys.all(), args).await?.reply) {
                Some("released") => Ok(Release::Released),
                Some("not ours") => Ok(Release::NotOwner),
                Some("again") => continue,
                _ => Err(unexpected_reply("release")),
            };
        }
    }

    pub(super) async fn ask_leave(&self, request: &AcquireRequest) -> Result<Left, StoreError> {
        let keys = self.lock_keys(&request.name)?;
        let session = self.client.session().await?;
        let args = |cmd: &mut Cmd| {
            self.entry(cmd, request);
            cmd.arg(self.limits().provisional_ms);
        };
        loop {
            return match word(&session.run(&scripts::LEAVE, &keys.all(), args).await?.reply) {
                Some("waiting") => Ok(Left::WasWaiting),
                Some("granted") => Ok(Left::WasGranted),
                Some("again") => continue,
                _ => Err(unexpected_reply("leave")),
            };
        }
    }

    /// Renews all leases in one write. Those that fail with `NOSCRIPT` are sent again with the whole script.
    pub(super) async fn ask_renew(&self, renewals: &[Renewal]) -> Result<Vec<Renewed>, StoreError> {
        if renewals.is_empty() {
            return Ok(Vec::new());
        }
        let session = self.client.session().await?;
        let all: Vec<usize> = (0..renewals.len()).collect();
        let mut answers = vec![Renewed::Lost; renewals.len()];
        let again = self.renew_pass(&session, renewals, &all, &mut answers, Script::evalsha).await?;
        if !again.is_empty() {
            let _ = self.renew_pass(&session, renewals, &again, &mut answers, Script::eval).await?;
        }
        Ok(answers)
    }

    /// Sends the renewals in `which`, stores their answers, and returns those that failed with `NOSCRIPT`.
    async fn renew_pass(
        &self,
        session: &Session,
        renewals: &[Renewal],
        which: &[usize],
        answers: &mut [Renewed],
        command: fn(&Script) -> Cmd,
    ) -> Result<Vec<usize>, StoreError> {
        let mut pipe = Pipeline::with_capacity(which.len());
        let mut sent = Vec::with_capacity(which.len());
        for &i in which {
            match self.renew_command(&renewals[i], command(&scripts::RENEW)) {
                Ok(cmd) => {
                    pipe.add(cmd);
                    sent.push(i);
                }
                Err(error) => answers[i] = Renewed::Unknown(error),
            }
        }
        if sent.is_empty() {
            return Ok(Vec::new());
        }
        // A check writes nothing, so a replica would answer it from old data.
        let ask_role = sent.iter().any(|&i| !renewals[i].prolong);
        if ask_role {
            pipe.cmd("HELLO");
        }
        let mut replies = session.send_all(&pipe).await?.reply;
        if ask_role && replies.pop().is_some_and(|hello| is_replica(&hello)) {
            session.abandon_replica();
            return Err(replica());
        }
        let mut again = Vec::new();
        for (i, reply) in sent.into_iter().zip(replies) {
            answers[i] = match &reply {
                Value::Error(error) => {
                    if error.is_no_script() {
                        again.push(i);
                    }
                    Renewed::Unknown(from_server(error))
                }
                reply => match word(reply) {
                    Some("renewed") => Renewed::Renewed,
                    Some("lost") => Renewed::Lost,
                    Some("revoked") => Renewed::Revoked,
                    _ => Renewed::Unknown(unexpected_reply("renew")),
                },
            };
        }
        Ok(again)
    }

    fn renew_command(&self, renewal: &Renewal, mut cmd: Cmd) -> Result<Cmd, StoreError> {
        let key = self.keys.key(&renewal.name)?;
        let fence = renewal.fence.map_or(String::new(), |f| format!("{:016}", f.get()));
        cmd.arg(1_usize).arg(key).arg(renewal.token.reveal());
        if !renewal.prolong {
            cmd.arg("").arg(fence);
            return Ok(cmd);
        }
        cmd.arg(renewal.ttl.as_millis()).arg(fence);
        if renewal.rewrite.is_some() || renewal.hand_to.is_some() {
            cmd.arg(renewal.rewrite.as_ref().map_or(String::new(), Owner::wire));
        }
        if let Some(to) = &renewal.hand_to {
            cmd.arg(to.reveal());
        }
        Ok(cmd)
    }

    pub(super) async fn ask_evict(
        &self,
        name: &LockName,
        holder: HolderId,
        mode: EvictMode,
    ) -> Result<Evicted, StoreError> {
        let keys = self.lock_keys(name)?;
        let session = self.client.session().await?;
        let mode = match mode {
            EvictMode::Revoke => "revoke",
            EvictMode::Force => "force",
        };
        let args = |cmd: &mut Cmd| {
            cmd.arg(holder.as_str()).arg(self.limits().provisional_ms).arg(mode);
        };
        loop {
            let reply = items(session.run(&scripts::EVICT, &keys.all(), args).await?.reply, "evict")?;
            return Ok(match (first_word(&reply), holder_at(&reply, 1, 2)) {
                (Some("free"), _) => Evicted::Free,
                (Some("again"), _) => continue,
                (Some("done"), Some(found)) => Evicted::Done(found),
                (Some("changed hands"), Some(found)) => Evicted::ChangedHands(found),
                (Some("foreign"), Some(found)) => Evicted::Foreign(found),
                _ => return Err(unexpected_reply("evict")),
            });
        }
    }

    pub(super) async fn ask_finish(
        &self,
        name: &LockName,
        holder: HolderId,
        reason: &str,
    ) -> Result<FinishRequest, StoreError> {
        let keys = self.lock_keys(name)?;
        let session = self.client.session().await?;
        let args = |cmd: &mut Cmd| {
            cmd.arg(holder.as_str()).arg(reason);
        };
        let reply = items(session.run(&scripts::FINISH, &[keys.lock()], args).await?.reply, "finish")?;
        Ok(match (first_word(&reply), holder_at(&reply, 1, 2)) {
            (Some("free"), _) => FinishRequest::Free,
            (Some("told"), Some(found)) => FinishRequest::Delivered(found),
            (Some("deaf"), Some(found)) => FinishRequest::Undeliverable(found),
            (Some("changed hands"), Some(found)) => FinishRequest::ChangedHands(found),
            _ => return Err(unexpected_reply("finish")),
        })
    }

    /// Appends the arguments that form a waiter's queue entry. They are the same in every call of one attempt.
    fn entry(&self, cmd: &mut Cmd, request: &AcquireRequest) {
        cmd.arg(request.token.reveal()).arg(self.inbox(request)).arg(request.ttl.as_millis());
        cmd.arg(request.since_ms).arg(request.owner.wire());
    }
}

/// The first word of a script's reply.
fn first_word(reply: &[Value]) -> Option<&str> {
    reply.first().and_then(word)
}

/// Reads a holder from the value and the remaining milliseconds at these positions of a reply.
fn holder_at(reply: &[Value], value_at: usize, left_at: usize) -> Option<Holder> {
    let left = match reply.get(left_at) {
        Some(Value::Int(ms)) => *ms,
        _ => -1,
    };
    match reply.get(value_at)? {
        Value::Bulk(value) => Some(value::holder(value, left)),
        // The name of the type, if the value is not a string.
        Value::Simple(name) => Some(value::holder(name.as_bytes(), left)),
        _ => None,
    }
}
