//! The rules that keep a lock safe, by name.
//!
//! All of them are in force in production. The exploration (`machine/explore/`) removes one at a time and finds the
//! violation that the rule prevents.

/// A rule of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rule {
    // The server.
    /// A release takes effect only under the token that holds the lock.
    ReleaseComparesToken,
    /// A renewal takes effect only under the token that holds the lock.
    RenewalComparesToken,
    /// A revoked lease is never prolonged.
    RenewalRespectsRevocation,
    /// A lease ends when its token is granted the lock again.
    RenewalComparesFence,
    /// A waiter's request never turns a revoked holder into an ordinary one.
    AcquireKeepsRevocation,
    /// An eviction affects only the holder that was inspected.
    EvictionComparesHolder,
    /// A release that could not finish leaves a lease that cannot be prolonged.
    UnfinishedReleaseRevokes,

    // The client.
    /// A lease counts from the moment before its request was sent, not from the reply.
    LeaseCountsFromRequest,
    /// An ended belief stays ended, even if a late reply confirms the lease.
    EndedBeliefStaysEnded,
    /// A holder stops believing before it sends the release.
    BeliefEndsBeforeRelease,
    /// A grant by message is confirmed, even if its lease is not renewed.
    ProvisionalGrantIsConfirmed,
    /// A try that finds its own value renews the lease, because the second send did not restart the countdown.
    ResentTryRenewsFirst,
    /// A try that finds a queue yields to earlier waiters.
    TryYieldsToQueue,
    /// An unanswered try is not sent again under its token while the old connection may still carry it out.
    LostTryGetsNewToken,
    /// An unanswered acquire is not sent again under its token while the old connection may still carry it out.
    LostAcquireGetsNewToken,
    /// A grant by message waits for the answer to the acquire in flight.
    PushWaitsForAnswer,
    /// A grant by message outweighs the answer that the token is queued only if that answer is older.
    QueuedGrantIsProven,
    /// A grant by message is released if the acquire in flight is never answered.
    PushWithLostAnswerIsGivenBack,
    /// An attempt that is given up leaves the store, unless no request of it was sent.
    GivenUpTokenLeaves,
    /// A token with an unanswered request leaves repeatedly while the old connection may still carry that request out.
    LeaveIsRepeated,
}

impl Rule {
    /// Whether the rule is in force: always.
    #[cfg(not(test))]
    pub(crate) const fn applies(self) -> bool {
        true
    }

    /// Whether the rule is in force on this thread.
    #[cfg(test)]
    pub(crate) fn applies(self) -> bool {
        REMOVED.get() != Some(self)
    }
}

#[cfg(test)]
thread_local! {
    static REMOVED: std::cell::Cell<Option<Rule>> = const { std::cell::Cell::new(None) };
}

/// Removes a rule on this thread until it is dropped.
#[cfg(test)]
#[must_use]
pub(crate) struct Without(Option<Rule>);

#[cfg(test)]
impl Without {
    pub(crate) fn new(rule: Option<Rule>) -> Self {
        Self(REMOVED.replace(rule))
    }
}

#[cfg(test)]
impl Drop for Without {
    fn drop(&mut self) {
        REMOVED.set(self.0);
    }
}
