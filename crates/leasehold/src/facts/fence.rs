use std::fmt;

/// A number that strictly increases with every grant of a name.
///
/// Give it to the resource the lock protects, and let the resource refuse a write whose fence is
/// lower than the highest it has seen: then even a holder that was paused for an hour cannot do
/// harm when it wakes up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(u64);

impl Fence {
    /// The fence of a guard that has none: lower than every fence that a store grants.
    ///
    /// A resource that checks fences refuses a write with it. A guard has none when its request was
    /// [`unfenced`](crate::LockRequest::unfenced), or when it is unprotected
    /// ([`OnUnavailable::FailOpen`](crate::OnUnavailable::FailOpen)).
    pub const NONE: Self = Self(0);

    /// Below this no counter that was ever raised to the server's time in µs can be: a smaller
    /// number means that the counter was lost.
    pub(crate) const SANE_MIN: u64 = 1_000_000_000_000_000;
    /// Above this nothing is granted: Lua's numbers end at 2⁵³.
    pub(crate) const MAX: u64 = 1 << 52;

    pub(crate) const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number itself, for the resource that checks it.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
