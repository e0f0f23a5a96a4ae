//! Distinguishes signals to the whole process group from signals to the front alone. No clock, no I/O.
//!
//! Front, keeper and CMD are in the same group. A signal that front and keeper received from the same sender was sent to
//! the group, so CMD received it, too. A signal that only the front received is meant for CMD as well and has to be
//! forwarded. That holds for a terminal, a shell and kill(1) alike.

use std::time::Duration;

use leasehold::lease::Moment;

use crate::signals::ReceivedSignal;

/// How long a signal that only the front has received may still arrive at the keeper. The kernel signals the youngest
/// member of a group first, so the keeper receives a signal before the front does; this is for a kernel that does not.
const SETTLED_AFTER: Duration = Duration::from_millis(10);
/// How long a signal to the keeper is remembered. A front that is not stopped forwards its own copy sooner; after that the
/// signal was sent to the keeper alone.
const REMEMBERED_FOR: Duration = Duration::from_secs(10);

/// The target of a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SentTo {
    /// The front alone.
    Front,
    /// Every process that was in the group at that moment.
    Group(Moment),
}

/// The signals whose target is not known yet.
#[derive(Default)]
pub(super) struct SignalMatcher {
    /// The signals that the keeper received, and when.
    own: Vec<(ReceivedSignal, Moment)>,
    /// The signals that the front received and the keeper did not, and when it is settled that it will not.
    fronts: Vec<(ReceivedSignal, Moment)>,
}

impl SignalMatcher {
    /// Adds a signal that the keeper received. Returns it with its target if that is known now.
    pub(super) fn keeper_received(
        &mut self,
        received: ReceivedSignal,
        now: Moment,
    ) -> Option<(ReceivedSignal, SentTo)> {
        if let Some(at) = self.fronts.iter().position(|(theirs, _)| *theirs == received) {
            self.fronts.remove(at);
            return Some((received, SentTo::Group(now)));
        }
        self.own.push((received, now));
        None
    }

    /// Adds a signal that the front received. Returns it with its target if that is known now. A front that was stopped
    /// forwards a signal late.
    pub(super) fn front_received(
        &mut self,
        received: ReceivedSignal,
        now: Moment,
        front_was_stopped: bool,
    ) -> Option<(ReceivedSignal, SentTo)> {
        if !front_was_stopped {
            self.own.retain(|(_, at)| now < *at + REMEMBERED_FOR);
        }
        if let Some(at) = self.own.iter().position(|(ours, _)| *ours == received) {
            let (_, at) = self.own.remove(at);
            return Some((received, SentTo::Group(at)));
        }
        self.fronts.push((received, now + SETTLED_AFTER));
        None
    }

    /// Returns when the target of the next signal is settled.
    pub(super) fn settles_at(&self) -> Option<Moment> {
        self.fronts.first().map(|(_, at)| *at)
    }

    /// Returns the next signal that the front alone received, once that is settled.
    pub(super) fn settled(&mut self, now: Moment) -> Option<(ReceivedSignal, SentTo)> {
        let settled = self.settles_at().is_some_and(|at| now >= at);
        settled.then(|| (self.fronts.remove(0).0, SentTo::Front))
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::Signal;

    use super::*;

    const fn at(ms: u64) -> Moment {
        Moment::from_boot(Duration::from_millis(ms))
    }

    const fn from(sender: u32) -> ReceivedSignal {
        ReceivedSignal { signal: Signal::SIGUSR1, code: 0, sender }
    }

    #[test]
    fn a_signal_to_front_and_keeper_was_sent_to_the_group() {
        let mut matcher = SignalMatcher::default();
        assert_eq!(matcher.keeper_received(from(7), at(5)), None);
        assert_eq!(matcher.front_received(from(7), at(6), false), Some((from(7), SentTo::Group(at(5)))));
        // The other way round, and only once.
        assert_eq!(matcher.front_received(from(7), at(20), false), None);
        assert_eq!(matcher.keeper_received(from(7), at(21)), Some((from(7), SentTo::Group(at(21)))));
        assert_eq!((matcher.settles_at(), matcher.settled(at(1_000))), (None, None));
    }

    #[test]
    fn a_signal_to_the_front_only_is_forwarded() {
        let mut matcher = SignalMatcher::default();
        assert_eq!(matcher.front_received(from(7), at(0), false), None);
        assert_eq!(matcher.settled(at(9)), None);
        assert_eq!(matcher.settles_at(), Some(at(10)));
        assert_eq!(matcher.settled(at(10)), Some((from(7), SentTo::Front)));
        assert_eq!(matcher.settled(at(10)), None);
        // A signal from another sender is another signal.
        assert_eq!(matcher.keeper_received(from(8), at(20)), None);
        assert_eq!(matcher.front_received(from(7), at(21), false), None);
        assert_eq!(matcher.settled(at(31)), Some((from(7), SentTo::Front)));
    }

    #[test]
    fn a_signal_to_the_keeper_only_is_forgotten() {
        let mut matcher = SignalMatcher::default();
        assert_eq!(matcher.keeper_received(from(7), at(0)), None);
        assert_eq!(matcher.front_received(from(7), at(10_000), false), None, "a later signal to the front");
        assert_eq!(matcher.keeper_received(from(8), at(0)), None);
        let late = matcher.front_received(from(8), at(60_000), true);
        assert_eq!(late, Some((from(8), SentTo::Group(at(0)))), "a stopped front forwards late");
    }
}
