//! Tells a signal that was sent to the whole process group from one that was sent to the front alone. No clock, no I/O.
//!
//! Front, keeper and command are in the same group. A signal that front and keeper received from the same sender was
//! sent to the group, so the command has it. One that only the front received is meant for the command as well, and
//! somebody has to pass it on. That holds for a terminal, a shell and kill(1) alike.

use std::time::Duration;

use leasehold::lease::Moment;

use crate::signals::Came;

/// The kernel signals the members of a group one after the other, the youngest first: the keeper has a signal before
/// the front does. This is for a kernel that does it otherwise.
const SETTLED_AFTER: Duration = Duration::from_millis(10);
/// A front that is not stopped tells of a signal sooner. After that the signal was the keeper's alone.
const REMEMBERED_FOR: Duration = Duration::from_secs(10);

/// Whom a signal was sent to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum To {
    /// The front alone.
    Front,
    /// Every process that was in the group at that moment.
    Group(Moment),
}

/// Signals that were not told apart yet.
#[derive(Default)]
pub(super) struct Group {
    /// What the keeper itself received, and when.
    own: Vec<(Came, Moment)>,
    /// What the front received and the keeper did not, and when it is settled that it will not.
    fronts: Vec<(Came, Moment)>,
}

impl Group {
    /// The keeper received a signal.
    pub(super) fn own(&mut self, came: Came, now: Moment) -> Option<(Came, To)> {
        if let Some(at) = self.fronts.iter().position(|(theirs, _)| *theirs == came) {
            self.fronts.remove(at);
            return Some((came, To::Group(now)));
        }
        self.own.push((came, now));
        None
    }

    /// The front told of a signal. One whose `front_was_stopped` tells late.
    pub(super) fn fronts(&mut self, came: Came, now: Moment, front_was_stopped: bool) -> Option<(Came, To)> {
        if !front_was_stopped {
            self.own.retain(|(_, at)| now < *at + REMEMBERED_FOR);
        }
        if let Some(at) = self.own.iter().position(|(ours, _)| *ours == came) {
            let (_, at) = self.own.remove(at);
            return Some((came, To::Group(at)));
        }
        self.fronts.push((came, now + SETTLED_AFTER));
        None
    }

    /// When the next one is settled.
    pub(super) fn settles_at(&self) -> Option<Moment> {
        self.fronts.first().map(|(_, at)| *at)
    }

    /// What the front alone received, once that is settled.
    pub(super) fn settled(&mut self, now: Moment) -> Option<(Came, To)> {
        let settled = self.settles_at().is_some_and(|at| now >= at);
        settled.then(|| (self.fronts.remove(0).0, To::Front))
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::Signal;

    use super::*;

    const fn at(ms: u64) -> Moment {
        Moment::from_boot(Duration::from_millis(ms))
    }

    const fn from(sender: u32) -> Came {
        Came { signal: Signal::SIGUSR1, code: 0, sender }
    }

    #[test]
    fn what_both_received_was_sent_to_the_group() {
        let mut group = Group::default();
        assert_eq!(group.own(from(7), at(5)), None);
        assert_eq!(group.fronts(from(7), at(6), false), Some((from(7), To::Group(at(5)))));
        // The other way round, and only once.
        assert_eq!(group.fronts(from(7), at(20), false), None);
        assert_eq!(group.own(from(7), at(21)), Some((from(7), To::Group(at(21)))));
        assert_eq!((group.settles_at(), group.settled(at(1_000))), (None, None));
    }

    #[test]
    fn what_only_the_front_received_was_sent_to_it_alone() {
        let mut group = Group::default();
        assert_eq!(group.fronts(from(7), at(0), false), None);
        assert_eq!(group.settled(at(9)), None);
        assert_eq!(group.settles_at(), Some(at(10)));
        assert_eq!(group.settled(at(10)), Some((from(7), To::Front)));
        assert_eq!(group.settled(at(10)), None);
        // Of another sender, it is another signal.
        assert_eq!(group.own(from(8), at(20)), None);
        assert_eq!(group.fronts(from(7), at(21), false), None);
        assert_eq!(group.settled(at(31)), Some((from(7), To::Front)));
    }

    #[test]
    fn what_only_the_keeper_received_is_forgotten() {
        let mut group = Group::default();
        assert_eq!(group.own(from(7), at(0)), None);
        assert_eq!(group.fronts(from(7), at(10_000), false), None, "another one, to the front");
        assert_eq!(group.own(from(8), at(0)), None);
        let told = group.fronts(from(8), at(60_000), true);
        assert_eq!(told, Some((from(8), To::Group(at(0)))), "a stopped front tells late");
    }
}
