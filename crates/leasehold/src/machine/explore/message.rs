//! Requests, answers and pushes between a client and the server.

use super::super::{AcquireReply, PassReply, RenewReply, YieldReply};
use crate::client::visit::Visit;
use crate::clock::Moment;
use crate::facts::Token;

#[derive(Debug, Clone)]
pub(super) struct Request {
    pub(super) verb: Verb,
    pub(super) token: Token,
    pub(super) asked_at: Moment,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verb {
    /// The three commands of a try, one after the other: SET NX, INCR, EXISTS.
    TrySet,
    TryCount {
        written: bool,
    },
    TryExists {
        written: bool,
        counted: u64,
    },
    TryRead,
    TryRenew {
        fence: u64,
    },
    Yield {
        fence: u64,
    },
    /// 0: without a ticket.
    Acquire {
        ticket: u64,
    },
    Renew {
        fence: u64,
    },
    Check {
        fence: u64,
    },
    HandOn {
        fence: u64,
        to: Token,
    },
    Release,
    Leave,
    Probe,
}

#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) says: Says,
    pub(super) token: Token,
    /// When the command was sent; meaningless for a push.
    pub(super) asked_at: Moment,
}

#[derive(Debug, Clone)]
pub(super) enum Says {
    TrySet {
        written: bool,
        counted: u64,
        queue: bool,
    },
    TryRead(Saw),
    TryRenewed(RenewReply),
    Yielded(YieldReply),
    /// With the fence of the holder at that time.
    Acquired(AcquireReply, u64),
    Renewed(RenewReply),
    HandedOn(RenewReply),
    Closed(PassReply),
    PushGranted {
        fence: u64,
        lasts_ms: u64,
    },
    PushRevoked,
    Probed,
}

/// What a try reads at the key.
#[derive(Debug, Clone, Copy)]
pub(super) enum Saw {
    Nothing,
    Own { fence: u64 },
    Another,
}

impl Says {
    pub(super) fn is_push(&self) -> bool {
        matches!(self, Self::PushGranted { .. } | Self::PushRevoked)
    }
}

impl Verb {
    /// Whether this is a step of a try.
    pub(super) fn is_try(&self) -> bool {
        matches!(
            self,
            Self::TrySet
                | Self::TryCount { .. }
                | Self::TryExists { .. }
                | Self::TryRead
                | Self::TryRenew { .. }
                | Self::Yield { .. }
        )
    }
}

impl Request {
    pub(super) fn visit(&mut self, visit: &mut dyn Visit) {
        visit.token(&mut self.token);
        visit.start(&mut self.asked_at);
        match &mut self.verb {
            Verb::TrySet => visit.count(0),
            Verb::TryCount { written } => {
                visit.count(1);
                visit.flag(*written);
            }
            Verb::TryExists { written, counted } => {
                visit.count(2);
                visit.flag(*written);
                visit.number(counted);
            }
            Verb::TryRead => visit.count(3),
            Verb::TryRenew { fence } => numbered(visit, 4, fence),
            Verb::Yield { fence } => numbered(visit, 5, fence),
            Verb::Acquire { ticket } => numbered(visit, 6, ticket),
            Verb::Renew { fence } => numbered(visit, 7, fence),
            Verb::Check { fence } => numbered(visit, 8, fence),
            Verb::HandOn { fence, to } => {
                numbered(visit, 9, fence);
                visit.token(to);
            }
            Verb::Release => visit.count(10),
            Verb::Leave => visit.count(11),
            Verb::Probe => visit.count(12),
        }
    }
}

impl Answer {
    pub(super) fn visit(&mut self, visit: &mut dyn Visit) {
        visit.token(&mut self.token);
        visit.start(&mut self.asked_at);
        match &mut self.says {
            Says::TrySet { written, counted, queue } => {
                numbered(visit, 0, counted);
                visit.flag(*written);
                visit.flag(*queue);
            }
            Says::TryRead(Saw::Nothing) => visit.count(1),
            Says::TryRead(Saw::Own { fence }) => numbered(visit, 2, fence),
            Says::TryRead(Saw::Another) => visit.count(3),
            Says::TryRenewed(reply) => visit.count(4 + *reply as usize),
            Says::Yielded(reply) => visit.count(8 + *reply as usize),
            Says::Acquired(AcquireReply::Granted { fence }, _) => numbered(visit, 12, fence),
            Says::Acquired(AcquireReply::Queued { ticket, .. }, holder) => {
                numbered(visit, 13, ticket);
                visit.number(holder);
            }
            Says::Acquired(AcquireReply::Revoked, _) => visit.count(14),
            Says::Acquired(AcquireReply::Again { ticket }, _) => numbered(visit, 15, ticket),
            Says::Renewed(reply) => visit.count(16 + *reply as usize),
            Says::HandedOn(reply) => visit.count(20 + *reply as usize),
            Says::Closed(reply) => visit.count(24 + *reply as usize),
            Says::PushGranted { fence, lasts_ms } => {
                numbered(visit, 28, fence);
                visit.count(usize::try_from(*lasts_ms).expect("short"));
            }
            Says::PushRevoked => visit.count(29),
            Says::Probed => visit.count(30),
        }
    }
}

fn numbered(visit: &mut dyn Visit, kind: usize, number: &mut u64) {
    visit.count(kind);
    visit.number(number);
}
