//! The moment that a pushed grant counts from: a moment before the server wrote it. No I/O and no clock.
//!
//! Replies and pushes share one ordered stream, so a push was written after every command whose reply was read before
//! it. The send time of the newest such command is a moment before the pushed lease began.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::clock::Moment;

/// The stamp of one connection. Another connection has another one: its stream proves nothing about this stream.
#[derive(Debug, Default)]
pub(crate) struct PushStamp {
    /// Send time of the newest command whose reply was read, in nanoseconds of the boot clock.
    newest_ns: AtomicU64,
    /// Number and send time of the newest probe that was sent.
    pending_probe: Mutex<(u64, u64)>,
}

impl PushStamp {
    /// Records that the reply to a command sent at `asked_at` was read.
    pub(crate) fn answered(&self, asked_at: Moment) {
        self.newest_ns.fetch_max(nanos(asked_at), Ordering::AcqRel);
    }

    /// Records that a probe is about to be sent.
    pub(crate) fn probe_sent(&self, number: u64, sent_at: Moment) {
        *self.pending_probe.lock().unwrap_or_else(PoisonError::into_inner) = (number, nanos(sent_at));
    }

    /// Records that a probe was received. Only the send time of this very probe counts: that of a later one would prove
    /// too much.
    pub(crate) fn probe_received(&self, number: u64) {
        let (expected, sent_ns) = *self.pending_probe.lock().unwrap_or_else(PoisonError::into_inner);
        if number == expected {
            self.newest_ns.fetch_max(sent_ns, Ordering::AcqRel);
        }
    }

    /// Returns the moment that a push which is read now counts from.
    pub(crate) fn moment(&self) -> Moment {
        Moment::from_boot(Duration::from_nanos(self.newest_ns.load(Ordering::Acquire)))
    }
}

fn nanos(moment: Moment) -> u64 {
    u64::try_from(moment.since_boot().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Moment {
        Moment::from_boot(Duration::from_millis(ms))
    }

    #[test]
    fn a_push_counts_from_the_newest_answered_command() {
        let stamp = PushStamp::default();
        assert_eq!(stamp.moment(), at(0), "nothing was answered: the push counts from boot");
        stamp.answered(at(500));
        stamp.answered(at(300));
        assert_eq!(stamp.moment(), at(500));
    }

    #[test]
    fn a_probe_counts_from_its_own_sending_and_an_old_one_not_at_all() {
        let stamp = PushStamp::default();
        stamp.answered(at(100));
        stamp.probe_sent(7, at(900));
        assert_eq!(stamp.moment(), at(100), "it was sent, but not received");
        stamp.probe_received(6);
        assert_eq!(stamp.moment(), at(100));
        stamp.probe_received(7);
        assert_eq!(stamp.moment(), at(900));
    }
}
