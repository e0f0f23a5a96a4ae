//! Pauses between tries of the same thing.

use std::time::Duration;

/// Pauses that double, from a first to a longest one.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    first: Duration,
    longest: Duration,
    doublings: u32,
}

impl Backoff {
    pub(crate) const fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, doublings: 0 }
    }

    /// Skips this many pauses.
    pub(crate) const fn after(self, doublings: u32) -> Self {
        Self { doublings, ..self }
    }

    /// The next pause.
    pub(crate) fn pause(&mut self) -> Duration {
        let pause = self.first.saturating_mul(1 << self.doublings.min(20)).min(self.longest);
        self.doublings = self.doublings.saturating_add(1);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(100), ms(500));
        assert_eq!([(); 4].map(|()| backoff.pause()), [100, 200, 400, 500].map(ms));
        assert_eq!(backoff.clone().after(1).pause(), ms(200));
        assert_eq!(backoff.after(u32::MAX).pause(), ms(500));
        assert_eq!(Backoff::new(Duration::MAX, Duration::MAX).after(3).pause(), Duration::MAX);
    }
}
