//! What a client must do, and what must never be seen.

/// The rules a client keeps, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum ClientRule {
    /// A lease counts from when it was asked for, not from when the answer was read.
    BeliefCountsFromAsking,
    /// A re-sent try that finds its own value did not restart the countdown.
    ResentTryRenewsFirst,
    /// Whoever sends a release has stopped believing before.
    BeliefGivenUpBeforeRelease,
    /// A token named in a sent release or leave is dead: the next attempt has another one.
    TokenDeadAfterReleaseOrLeave,
    /// A token named in a sent yield is dead: cut off, it is released, and the try not sent again.
    TokenDeadAfterYield,
    /// A grant that was read too late is asked for again, not renewed.
    LateGrantAskedAgainNotRenewed,
    /// A belief that was given up stays so, whatever a late answer says. (One that only lapsed could
    /// be revived by a renewal without harm to anybody else: the store says yes only to its holder.)
    GivenUpBeliefNeverRevived,
    /// After a reconnect nothing that was sent before can run any more.
    OldConnectionKilledBeforeReAsking,
    /// Where the old connection cannot be killed, a try is left, and not sent again under its
    /// token: the old one may still plant it.
    TryNotResentBesideAnOldConnection,
    /// A pushed grant counts from the newest command answered before it, not from its arrival.
    PushNotStampedByArrival,
    /// A pushed grant counts from the newest command answered before it, not from the newest sent.
    PushNotStampedByNewestSent,
    /// A try that finds a queue asks those who came before it.
    TryYieldsToQueue,
    /// A holder whose question is still on its way may stand in line again: it leaves, too.
    HolderThatStillAsksLeaves,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ClientRules {
    removed: u32,
}

impl ClientRules {
    pub(super) const ALL: Self = Self { removed: 0 };

    pub(super) fn without(rule: ClientRule) -> Self {
        Self { removed: 1 << rule as u32 }
    }

    pub(super) fn keep(self, rule: ClientRule) -> bool {
        self.removed & (1 << rule as u32) == 0
    }
}

/// What must never be seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Violation {
    TwoHolders,
    FenceFell,
    OutOfOrder,
    TakenAwayAndProlonged,
    Leaked,
    WaitsForEver,
    TurnedAway,
}

impl Violation {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::TwoHolders => "two clients believe at once",
            Self::FenceFell => "a grant is believed whose fence is not above all before",
            Self::OutOfOrder => "a try overtakes a waiter that came first",
            Self::TakenAwayAndProlonged => "a lease that was taken away is prolonged",
            Self::Leaked => "an attempt that was given up, and answered, is still known to the lock",
            Self::TurnedAway => "a waiter that was only slow is turned away",
            Self::WaitsForEver => "a live client waits for ever",
        }
    }
}
