//! What must never be seen, and the rules that the client's machines rely on others to keep.

/// A rule of what runs the client's machines: the engine, or the connection to the server. This test takes their place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EngineRule {
    /// Each attempt has a new token.
    FreshTokens,
    /// After a reconnect no command of the old connection runs any more.
    OldConnectionIsKilled,
    /// A pushed grant counts from the newest command answered before it, not from its arrival.
    PushNotStampedByArrival,
    /// A pushed grant counts from the newest command answered before it, not from the newest one sent.
    PushNotStampedByNewestSent,
    /// A try that is dropped or not answered is undone.
    DroppedTryIsUndone,
}

/// What must never be seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Violation {
    TwoHolders,
    FenceFell,
    Revived,
    OutOfOrder,
    TakenAwayAndProlonged,
    Leaked,
    WaitsForever,
    TurnedAway,
    Unconfirmed,
}

impl Violation {
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::TwoHolders => "two clients believe at once",
            Self::FenceFell => "a grant is believed whose fence is not above all before",
            Self::Revived => "a belief that had ended is believed again",
            Self::OutOfOrder => "a try overtakes a waiter that came first",
            Self::TakenAwayAndProlonged => "a lease that was taken away is prolonged",
            Self::Leaked => "an attempt that was given up, and confirmed, is still known to the lock",
            Self::WaitsForever => "a live client waits forever",
            Self::TurnedAway => "a waiter that was only slow is turned away",
            Self::Unconfirmed => "a grant by message is never confirmed",
        }
    }
}
