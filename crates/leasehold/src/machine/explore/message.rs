//! What is on its way between a client and the server.

#[derive(Clone, Copy, Hash, PartialEq, Eq, Debug)]
pub(super) struct Request {
    pub(super) verb: Verb,
    pub(super) token: u8,
    /// Ticks since it was sent.
    pub(super) age: u8,
}

#[derive(Clone, Copy, Hash, PartialEq, Eq, Debug)]
pub(super) enum Verb {
    /// The three commands of a try.
    Plant,
    Count {
        saw: Saw,
    },
    Exists {
        saw: Saw,
        fence: u64,
    },
    Yield {
        fence: u64,
    },
    Acquire {
        ticket: u64,
    },
    Renew {
        fence: u64,
        /// To another token of the same client.
        hand_on: bool,
    },
    Release,
    Leave,
}

/// What the first command of a try found.
#[derive(Clone, Copy, Hash, PartialEq, Eq, Debug)]
pub(super) enum Saw {
    Nothing,
    Own { fence: u64, revoked: bool },
    Another,
}

#[derive(Clone, Copy, Hash, PartialEq, Eq, Debug)]
pub(super) struct Answer {
    pub(super) says: Says,
    pub(super) token: u8,
    /// Ticks since the command was sent; of no meaning for a push.
    pub(super) age: u8,
}

#[derive(Clone, Copy, Hash, PartialEq, Eq, Debug)]
pub(super) enum Says {
    Tried { saw: Saw, fence: u64, queue: bool },
    YieldedOurs,
    YieldedNot,
    YieldedRevoked,
    YieldedAgain,
    Acquired { fence: u64 },
    Queued { ticket: u64 },
    AcquiredRevoked,
    AcquireAgain { ticket: u64 },
    Renewed { fence: u64 },
    HandedOn,
    RenewLost,
    RenewRevoked,
    Closed,
    CloseAgain,
    PushGranted { fence: u64, lasts: u8 },
    PushRevoked,
}

impl Says {
    pub(super) fn is_push(self) -> bool {
        matches!(self, Self::PushGranted { .. } | Self::PushRevoked)
    }
}

impl Saw {
    pub(super) fn number(&mut self) -> Option<&mut u64> {
        match self {
            Self::Own { fence, .. } => Some(fence),
            Self::Nothing | Self::Another => None,
        }
    }
}
