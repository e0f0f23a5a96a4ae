//! The operations of a store, as requests to the simulated server. Replaces `store/redis/verbs.rs`.

use super::coverage::Situation;
use super::process::Process;
use super::server::{Command, Reply};
use crate::facts::{Fence, HolderId, LockName, Token};
use crate::machine::{AcquireReply, EvictReply, InboxId, PassReply, RenewReply};
use crate::store::{
    Acquire, AcquireRequest, Grant, Holder, Place, Release, Renewal, Renewed, StoreError, StoreErrorKind, Ticket,
    Waiter,
};

/// A reply that does not belong to its request.
pub(super) fn unexpected() -> StoreError {
    StoreErrorKind::Other.into()
}

impl Process {
    pub(super) fn inbox_of(&self, claim: &AcquireRequest) -> Option<InboxId> {
        claim.listens.then(|| self.link.inbox.clone())
    }

    pub(super) async fn ask_acquire(
        &self,
        claim: &AcquireRequest,
        ticket: Option<Ticket>,
    ) -> Result<Acquire, StoreError> {
        let session = self.session().await?;
        let mut ticket = ticket.map(|t| t.0);
        loop {
            let inbox = self.inbox_of(claim);
            let asked = session.send_one(Command::Acquire { claim: claim.clone(), inbox, ticket });
            let asked_at = asked.asked_at;
            let Reply::Acquired(reply, holder) = asked.one().await? else { return Err(unexpected()) };
            match reply {
                AcquireReply::Granted { fence } => {
                    let fence = Fence::new(fence);
                    self.link.observe_fence(fence);
                    let grant = Grant { fence: Some(fence), asked_at, lasts: claim.ttl.duration() };
                    return Ok(Acquire::Granted(grant));
                }
                AcquireReply::Queued { ticket, position } => {
                    return Ok(Acquire::Queued(Place { ticket: Ticket(ticket), position, holder }));
                }
                AcquireReply::Revoked => return Ok(Acquire::Revoked),
                AcquireReply::Again { ticket: mine } => {
                    self.world.saw(Situation::SweepAgain);
                    ticket = Some(mine);
                }
            }
        }
    }

    pub(super) async fn ask_ticket(&self) -> Result<Ticket, StoreError> {
        let session = self.session().await?;
        let mut drawn = number(session.send_one(Command::Increment).one().await?)?;
        if drawn < Fence::SANE_MIN {
            session.send_one(Command::Raise { seen: self.link.highest_fence() }).one().await?;
            drawn = number(session.send_one(Command::Increment).one().await?)?;
        }
        self.link.observe_fence(Fence::new(drawn));
        Ok(Ticket(drawn))
    }

    pub(super) async fn ask_release(
        &self,
        name: &LockName,
        token: &Token,
        contended: bool,
    ) -> Result<Release, StoreError> {
        let session = self.session().await?;
        let (name, token) = (name.clone(), token.clone());
        if !contended {
            let command = Command::ReleaseUncontended { name: name.clone(), token: token.clone() };
            match session.send_one(command).one().await? {
                Reply::Passed(PassReply::Done) => return Ok(Release::Released),
                Reply::Passed(PassReply::NotOurs) => return Ok(Release::NotOwner),
                _ => {}
            }
        }
        let session = self.session().await?;
        loop {
            let command = Command::Release { name: name.clone(), token: token.clone() };
            match session.send_one(command).one().await? {
                Reply::Passed(PassReply::Done) => return Ok(Release::Released),
                Reply::Passed(PassReply::NotOurs) => return Ok(Release::NotOwner),
                Reply::Passed(PassReply::Again) => self.world.saw(Situation::SweepAgain),
                _ => return Err(unexpected()),
            }
        }
    }

    pub(super) async fn ask_leave(&self, claim: &AcquireRequest) -> Result<(), StoreError> {
        let session = self.session().await?;
        loop {
            let command = Command::Leave { name: claim.name.clone(), token: claim.token.clone() };
            match session.send_one(command).one().await? {
                Reply::Passed(PassReply::Again) => self.world.saw(Situation::SweepAgain),
                Reply::Passed(_) => return Ok(()),
                _ => return Err(unexpected()),
            }
        }
    }

    /// Renews or checks leases in one write. A check also asks for the server's role.
    pub(super) async fn ask_renew(&self, renewals: &[Renewal]) -> Vec<Renewed> {
        let failed = |error: StoreError| vec![Renewed::Unknown(error); renewals.len()];
        let session = match self.session().await {
            Ok(session) => session,
            Err(error) => return failed(error),
        };
        let mut commands: Vec<Command> = renewals.iter().cloned().map(Command::Renew).collect();
        let asks_role = renewals.iter().any(|renewal| !renewal.prolong);
        if asks_role {
            commands.push(Command::Hello);
        }
        let mut replies = match session.send(commands).all().await {
            Ok(replies) => replies,
            Err(error) => return failed(error),
        };
        if asks_role && matches!(replies.pop(), Some(Reply::Role { is_replica: true })) {
            session.close(StoreErrorKind::Unreachable.into(), std::time::Duration::ZERO);
            return failed(StoreErrorKind::ReadOnly.into());
        }
        let answer = |reply| match reply {
            Reply::Renewed(RenewReply::Renewed) => Renewed::Renewed,
            Reply::Renewed(RenewReply::Lost) => Renewed::Lost,
            Reply::Renewed(RenewReply::Revoked) => Renewed::Revoked,
            Reply::Error(kind) => Renewed::Unknown(kind.into()),
            _ => Renewed::Unknown(unexpected()),
        };
        replies.into_iter().map(answer).collect()
    }

    pub(super) async fn ask_holder(&self, name: &LockName) -> Result<Option<Holder>, StoreError> {
        match self.session().await?.send_one(Command::Holder(name.clone())).one().await? {
            Reply::Found(_, holder) => Ok(holder),
            _ => Err(unexpected()),
        }
    }

    pub(super) async fn ask_queue(&self, name: &LockName) -> Result<Vec<Waiter>, StoreError> {
        match self.session().await?.send_one(Command::Queue(name.clone())).one().await? {
            Reply::Queue(waiters) => Ok(waiters),
            _ => Err(unexpected()),
        }
    }

    pub(super) async fn ask_evict(
        &self,
        name: &LockName,
        holder: HolderId,
        force: bool,
    ) -> Result<EvictReply, StoreError> {
        let session = self.session().await?;
        loop {
            let command = Command::Evict { name: name.clone(), holder, force };
            match session.send_one(command).one().await? {
                Reply::Evicted(EvictReply::Again, _) => self.world.saw(Situation::SweepAgain),
                Reply::Evicted(reply, _) => return Ok(reply),
                _ => return Err(unexpected()),
            }
        }
    }

    pub(super) async fn ask_to_finish(&self, name: &LockName, holder: HolderId) -> Result<(), StoreError> {
        let command = Command::AskToFinish { name: name.clone(), holder };
        self.session().await?.send_one(command).one().await.map(drop)
    }
}

fn number(reply: Reply) -> Result<u64, StoreError> {
    match reply {
        Reply::Number(number) => Ok(number),
        Reply::Error(kind) => Err(kind.into()),
        _ => Err(unexpected()),
    }
}
