//! A try in the steps of the Redis store, as [`TrySteps`] decides. Replaces `store/redis/try_acquire.rs`.

use super::coverage::Situation;
use super::process::Process;
use super::server::{Command, Reply, fence_of};
use super::session::Session;
use super::verbs::unexpected;
use crate::facts::Fence;
use crate::machine::{RenewReply, Slot, YieldReply};
use crate::store::redis::try_steps::{StepReply, TryStep, TrySteps};
use crate::store::{AcquireRequest, Grant, Renewal, StoreError, Try};

impl Process {
    pub(super) async fn ask_try(&self, claim: &AcquireRequest) -> Result<Try, StoreError> {
        let session = self.session().await?;
        let mut commands = vec![Command::Set { claim: claim.clone(), inbox: self.inbox_of(claim) }];
        if claim.fenced {
            commands.extend([Command::Increment, Command::QueueExists(claim.name.clone())]);
        }
        let asked = session.send(commands);
        let asked_at = asked.asked_at;
        let replies = asked.all().await?;
        let counted = match replies.get(1) {
            Some(Reply::Number(number)) => Some(Fence::new(*number)),
            _ => None,
        };
        let queue = matches!(replies.get(2), Some(Reply::Exists(true)));
        let mut steps = TrySteps::new(claim.fenced, claim.ttl.duration());
        let mut step = steps.answered(StepReply::Set { asked_at, written: was_written(&replies[0])?, counted, queue });
        loop {
            let reply = match &step {
                TryStep::Done(answer) => {
                    if let Try::Granted(Grant { fence: Some(fence), .. }) = answer {
                        self.link.observe_fence(*fence);
                    }
                    return Ok(answer.clone());
                }
                rare => self.take_rare_step(&session, claim, rare).await,
            };
            match reply {
                Ok(reply) => step = steps.answered(reply),
                Err(error) => {
                    if TrySteps::releases_after(&step, &error) {
                        let _ = self.ask_release(&claim.name, &claim.token, true).await;
                    }
                    return Err(error);
                }
            }
        }
    }

    async fn take_rare_step(
        &self,
        session: &Session,
        claim: &AcquireRequest,
        step: &TryStep,
    ) -> Result<StepReply, StoreError> {
        let (name, token) = (claim.name.clone(), claim.token.clone());
        let command = match step {
            TryStep::Read => Command::Read(name),
            TryStep::Renew(fence) => Command::Renew(Renewal {
                name,
                token,
                fence: *fence,
                ttl: claim.ttl,
                prolong: true,
                rewrite: None,
                hand_to: None,
            }),
            TryStep::RepairFence => {
                self.world.saw(Situation::FenceRepaired);
                Command::RepairFence { name, token, seen: self.link.highest_fence() }
            }
            TryStep::Yield(fence) => {
                self.link.observe_fence(*fence);
                Command::Yield { name, token, fence: fence.get() }
            }
            TryStep::Done(_) => return Err(unexpected()),
        };
        let asked = session.send_one(command);
        let asked_at = asked.asked_at;
        Ok(match asked.one().await? {
            Reply::Found(Slot::Free, _) => StepReply::Gone,
            Reply::Found(Slot::Held(held), _) if held.token == claim.token => {
                self.world.saw(Situation::ResentFoundItself);
                StepReply::Ours { written_fence: fence_of(&held) }
            }
            Reply::Found(_, holder) => StepReply::Others(holder),
            Reply::Renewed(RenewReply::Renewed) => StepReply::Renewed { asked_at },
            Reply::Renewed(RenewReply::Lost) | Reply::NotOurs => StepReply::Lost(None),
            Reply::Renewed(RenewReply::Revoked) | Reply::Yielded(YieldReply::Revoked, _) => StepReply::Revoked,
            Reply::Number(fence) => StepReply::Repaired(Fence::new(fence)),
            Reply::Yielded(YieldReply::Ours, _) => {
                self.world.saw(Situation::TryKept);
                StepReply::Kept
            }
            Reply::Yielded(YieldReply::Again, _) => {
                self.world.saw(Situation::SweepAgain);
                StepReply::YieldAgain
            }
            Reply::Yielded(YieldReply::NotOurs, holder) => {
                self.world.saw(Situation::TryYielded);
                StepReply::Lost(holder)
            }
            _ => return Err(unexpected()),
        })
    }
}

/// Interprets the reply to SET NX: whether the value was written.
fn was_written(set: &Reply) -> Result<bool, StoreError> {
    match set {
        Reply::Done => Ok(true),
        Reply::NotSet => Ok(false),
        Reply::Error(kind) => Err((*kind).into()),
        _ => Err(unexpected()),
    }
}
