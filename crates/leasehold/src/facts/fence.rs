use std::fmt;

/// A number that strictly increases with every grant of a name.
///
/// Send it with every write to the resource that the lock protects, and let the resource reject a write whose fence is
/// lower than the highest it has seen. Then a holder that was paused for longer than its lease can do no harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(u64);

impl Fence {
    /// Stands for "no fence": lower than every fence that a store grants.
    ///
    /// A resource that checks fences rejects a write with it. A guard has no fence when its request was
    /// [`unfenced`](crate::LockRequest::unfenced), or when it is unprotected
    /// ([`OnUnavailable::FailOpen`](crate::OnUnavailable::FailOpen)).
    pub const NONE: Self = Self(0);

    /// The lowest plausible value of a counter. A counter is raised to the server's time in µs, so a smaller value means that
    /// it was lost.
    pub(crate) const SANE_MIN: u64 = 1_000_000_000_000_000;
    /// The highest fence that is granted. Lua's numbers are exact only up to 2⁵³.
    pub(crate) const MAX: u64 = 1 << 52;

    pub(crate) const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the number.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
