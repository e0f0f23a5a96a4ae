//! What a client decides: when it asks, believes, renews, gives up and leaves. No clock, no I/O, no async.
//!
//! Time and events come in as arguments (a reply, a push, a timer, a task that joined or left, a reconnect). Requests,
//! grants and timers come out. `engine` carries them out. A unit test, the exploration and the simulation drive the
//! same code.
//!
//! | file | what it decides |
//! |---|---|
//! | [`rooms`] | the waiting rooms of a process: one place in the store's queue per name, whatever the number of tasks |
//! | [`room`] | the waiting room of one name |
//! | [`attempt`] | one token in a queue: when to ask, what a reply or a push means |
//! | [`trying`] | one try, and its retries |
//! | [`by_token`] | a call that takes a lock under a token of its caller's |
//! | [`pool`] | a request for one or more members of a pool |
//! | [`leaving`] | giving up a token until the store has confirmed it |
//! | [`retry`] | how long a call goes on while the store does not answer |
//! | [`renewal`] | one lease: when to renew or check it, and what the answer means |

use std::time::Duration;

use crate::clock::Moment;
use crate::facts::Token;
use crate::options::Options;
use crate::store::{Holder, StoreError, StoreErrorKind};

pub(crate) mod attempt;
pub(crate) mod by_token;
pub(crate) mod leaving;
pub(crate) mod pool;
pub(crate) mod renewal;
pub(crate) mod retry;
mod room;
pub(crate) mod rooms;
pub(crate) mod trying;
#[cfg(test)]
pub(crate) mod visit;

/// What a decision may know of the world at the moment it is made.
pub(crate) struct Context<'a> {
    pub(crate) now: Moment,
    pub(crate) policy: &'a Policy,
    /// Whether an unanswered request may be sent again under its own token, as the store says at the moment.
    pub(crate) may_resend: bool,
    pub(crate) source: &'a mut dyn RandomSource,
}

/// Where new tokens, jitter and the time of day come from.
pub(crate) trait RandomSource {
    /// A token that no attempt has had before.
    fn token(&mut self) -> Token;
    /// A random number below 256.
    fn byte(&mut self) -> u32;
    /// Wall-clock milliseconds, for people. No decision depends on it.
    fn wall_ms(&mut self) -> u64;
}

/// The options that decisions depend on.
#[derive(Debug, Clone)]
pub(crate) struct Policy {
    /// Whether waiters rely on messages.
    pub(crate) events: bool,
    pub(crate) poll_interval: Duration,
    pub(crate) max_poll_interval: Duration,
    pub(crate) ask_again_within: Duration,
    /// How long a store may fail before a call gives up.
    pub(crate) patience: Duration,
}

impl From<&Options> for Policy {
    fn from(options: &Options) -> Self {
        Self {
            events: options.notifications,
            poll_interval: options.poll_interval,
            max_poll_interval: options.max_poll_interval,
            ask_again_within: options.recheck_interval,
            patience: options.outage_timeout,
        }
    }
}

impl Context<'_> {
    /// Shortens a pause by a random part of up to a quarter, so that many waiters do not ask in step.
    pub(crate) fn jittered(&mut self, pause: Duration) -> Duration {
        jittered(pause, self.source.byte())
    }
}

/// Shortens a pause by `byte` 1024ths of it.
pub(crate) fn jittered(pause: Duration, byte: u32) -> Duration {
    pause - pause / 1_024 * (byte % 256)
}

/// Whether a failure is worth another request: it passes by itself within a moment. The caller learns of any other at
/// once.
pub(crate) fn worth_asking_again(error: &StoreError) -> bool {
    error.is_passing() && !matches!(error.kind(), StoreErrorKind::OutOfMemory | StoreErrorKind::DiskFull)
}

/// Whether a request that failed like this may still be carried out by the store.
pub(crate) fn may_still_run(error: &StoreError) -> bool {
    error.may_have_happened() && !error.was_refused()
}

/// A store that has not answered for this long may be gone, and its last answer no longer counts.
const SILENT_AFTER: Duration = Duration::from_millis(500);

/// What is known of a lock while a task waits for it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    pub(crate) holder: Option<Holder>,
    /// Whether the store has answered at all.
    pub(crate) answered: bool,
    /// The last failure, if the store failed last.
    pub(crate) failed: Option<StoreError>,
    /// When the oldest unanswered request was sent.
    pub(crate) asking_since: Option<Moment>,
}

impl Seen {
    /// What the store has just answered.
    pub(crate) fn held_by(holder: Option<Holder>) -> Self {
        Self { holder, answered: true, failed: None, asking_since: None }
    }

    /// Why the holder is unknown; `None` where it is known.
    pub(crate) fn unknown(&self, now: Moment) -> Option<StoreError> {
        let no_answer = || (self.is_silent(now) || !self.answered).then(|| StoreErrorKind::NoAnswer.into());
        self.failed.clone().or_else(no_answer)
    }

    /// Whether the store failed last, or owes an answer.
    pub(crate) fn is_failing(&self, now: Moment) -> bool {
        self.failed.is_some() || self.is_silent(now)
    }

    fn is_silent(&self, now: Moment) -> bool {
        self.asking_since.is_some_and(|since| since.until(now) >= SILENT_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_shortens_a_pause_by_a_quarter_at_most() {
        for pause in [Duration::ZERO, Duration::from_nanos(5), Duration::from_secs(30), Duration::MAX] {
            for byte in 0..256 {
                let some = jittered(pause, byte);
                assert!(some <= pause && some >= pause / 4 * 3, "{some:?} of {pause:?}");
            }
        }
    }

    #[test]
    fn an_old_answer_does_not_count_while_the_store_is_silent() {
        let at = |ms| Moment::from_boot(Duration::from_millis(ms));
        let seen = Seen { asking_since: Some(at(1_000)), ..Seen::held_by(None) };
        assert_eq!(seen.unknown(at(1_499)), None);
        assert_eq!(seen.unknown(at(1_500)), Some(StoreErrorKind::NoAnswer.into()));
        assert!(!Seen::default().is_failing(at(0)) && Seen::default().unknown(at(0)).is_some());
    }
}
