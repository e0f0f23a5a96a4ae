//! Situations that a simulation has to reach. A situation that never occurs is not tested.

macro_rules! situations {
    ($($name:ident = $words:literal,)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Situation { $($name),* }
        impl Situation {
            pub(super) const ALL: &[(Self, &'static str)] = &[$((Self::$name, $words)),*];
        }
    };
}

situations! {
    GrantByTry = "grants: to a try",
    GrantByMessage = "grants: by message",
    GrantByReply = "grants: by the reply to an acquire",
    GrantOfPool = "grants: of a set of pool members",
    GrantToToken = "grants: to a token",
    Renewed = "renewals",
    Checked = "checks",
    Released = "releases",
    Revoked = "evictions: revoked",
    Forced = "evictions: forced",
    ChangedHands = "evictions: refused, because the lock had changed hands",
    AskedToFinish = "holders asked to finish",
    FaultCut = "faults: connection cut",
    FaultStall = "faults: messages held up",
    FaultMute = "faults: messages lost",
    FaultDuplicate = "faults: message delivered twice",
    FaultPause = "faults: process stopped",
    FaultCrash = "faults: process crashed",
    FaultRestart = "faults: server restarted with its data",
    FaultDataLoss = "faults: server restarted without data",
    FaultFlush = "faults: all keys deleted",
    FaultDelete = "faults: one key deleted",
    FaultDemotion = "faults: primary demoted",
    FaultLossyDemotion = "faults: primary demoted, and writes lost",
    FaultHang = "faults: server hung",
    FaultForeign = "a foreign client took a lock",
    LateGrant = "a grant was read too late",
    GrantToLeaving = "a grant crossed a leave",
    SecondPush = "a second copy of a grant arrived",
    PushedWhileAsking = "a grant overtook the answer to an acquire",
    ResentFoundItself = "a try that was sent again found its own value",
    TryYielded = "a try yielded to the queue",
    TryKept = "a try found a queue, and nobody in it was older",
    FenceRepaired = "a fence was drawn again, because the counter was lost",
    ProvisionalLapsed = "a provisional grant lapsed",
    DeadWaiterPassedOver = "a dead waiter was passed over",
    SweepAgain = "a hand-off was cut short by too many dead waiters",
    OldConnectionRan = "a lost connection carried out a request later",
    OldConnectionKilled = "a lost connection was killed with requests on it",
    ReplicaRefused = "a replica refused a write",
    LeftBehind = "a waiter was left behind at the old primary",
    PushesMissing = "a process noticed that messages do not arrive",
    LapsedBelief = "a lease lapsed before its renewal was answered",
    LostGone = "a holder learned that its lease was gone",
    LostRevoked = "a holder learned that its lease was revoked",
    LapsedInReply = "a lease was over before its task got it",
    WaiterGaveUp = "a waiter gave up in time",
    CallCancelled = "a call was cancelled",
    CallFailed = "a call failed, because the store did not answer",
    CollectorLockLost = "a collector lost the collector lock",
    MemberLost = "a member was lost while others were collected",
    PoolGaveBack = "members were given back before their set was complete",
    HandedOn = "a lease was handed on to a token",
    SameCallAgain = "the same call by token was answered twice",
    OverlapExcused = "overlaps excused after lost data or force",
    StaleFence = "a call by token confirmed an older fence than the name has seen",
    TryUndone = "a try was not answered, and its token was given up",
    LeaveRepeated = "a leave was sent again",
    EarlyRevocation = "a revocation came before its lease",
    TwoTasksInRoom = "two tasks of a process waited for one name",
}

/// How often each situation occurred.
#[derive(Debug, Clone)]
pub(super) struct Coverage([u64; Situation::ALL.len()]);

impl Default for Coverage {
    fn default() -> Self {
        Self([0; Situation::ALL.len()])
    }
}

impl Coverage {
    pub(super) fn count(&mut self, situation: Situation) {
        self.0[situation as usize] += 1;
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(mine, theirs)| *mine += theirs);
    }

    pub(super) fn of(&self, situation: Situation) -> u64 {
        self.0[situation as usize]
    }

    /// Situations that never occurred. A stale fence is optional: it is the exception to promise 3.
    pub(super) fn missing(&self) -> Vec<&'static str> {
        let is_missing = |situation| self.of(situation) == 0 && situation != Situation::StaleFence;
        Situation::ALL.iter().filter(|(situation, _)| is_missing(*situation)).map(|(_, words)| *words).collect()
    }

    pub(super) fn table(&self) -> String {
        let line = |(situation, words): &(Situation, &str)| format!("  {:>12}  {words}\n", self.of(*situation));
        Situation::ALL.iter().map(line).collect()
    }
}
