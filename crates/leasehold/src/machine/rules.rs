/// The safety rules, by name. Each is there because the exploration finds a violation without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Rule {
    /// A release takes effect only under the token that holds the lock.
    ReleaseComparesTheToken,
    /// A renewal takes effect only under the token that holds the lock.
    RenewalComparesTheToken,
    /// A revoked lease is never prolonged.
    RenewalRespectsARevocation,
    /// A lease whose token was granted anew since is over.
    RenewalComparesTheFence,
    /// A waiter's request never turns a revoked holder into an ordinary one.
    AskingKeepsARevocation,
    /// An eviction touches only the holder that was looked at.
    EvictComparesTheHolder,
    /// A release that could not finish leaves a lease nobody can prolong.
    AnUnfinishedReleaseRevokes,
}

/// Which rules are in force: all of them, but in a test that shows what each is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rules {
    removed: u32,
}

impl Rules {
    pub(crate) const ALL: Self = Self { removed: 0 };

    #[cfg(test)]
    pub(crate) fn without(rule: Rule) -> Self {
        Self { removed: 1 << rule as u32 }
    }

    pub(crate) fn keep(self, rule: Rule) -> bool {
        self.removed & (1 << rule as u32) == 0
    }
}
