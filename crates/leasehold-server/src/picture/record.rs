//! What is known of tenures, waits and locks.

use leasehold::{LockEvent, LockView};
use serde::Serialize;

/// What a look makes of a last sign of life is that inexact.
const SAME_SIGN_OF_LIFE_MS: u64 = 300;

/// How a tenure ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    /// Given back.
    Released,
    /// Its holder could not keep it.
    Lost,
    /// Its holder was told to stop.
    Revoked,
    /// Taken away at once.
    Forced,
    /// Nobody gave it back: its lease ran out, or its holder died.
    Expired,
}

impl End {
    /// Whether somebody should look into it.
    pub(crate) fn is_bad(self) -> bool {
        self != Self::Released
    }
}

/// One holder's time with a lock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub(crate) struct Tenure {
    /// The lock.
    pub(crate) name: String,
    /// Who.
    pub(crate) owner: String,
    /// Names the holder without its secret.
    pub(crate) holder_id: String,
    /// Its fence.
    pub(crate) fence: Option<u64>,
    /// Since when.
    pub(crate) since_ms: u64,
    /// Until when; `null` while it lasts.
    pub(crate) ended_ms: Option<u64>,
    /// How it ended.
    pub(crate) end: Option<End>,
    /// How long its holder had waited, where that was seen.
    pub(crate) waited_ms: Option<u64>,
    /// The holder it was handed over from, to one that waited.
    pub(crate) after: Option<String>,
    #[serde(skip)]
    pub(super) known: Known,
}

/// What is not shown of a tenure.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) changed: u64,
    /// A look has said since when.
    pub(super) exactly: bool,
    /// An event has said how it ended.
    pub(super) told: bool,
    pub(super) revoked: bool,
    /// As a bad end.
    pub(super) counted: bool,
    pub(super) gone: bool,
    pub(super) lease_ends_ms: Option<u64>,
}

/// Somebody's time in line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub(crate) struct Wait {
    /// The lock.
    pub(crate) name: String,
    /// Who.
    pub(crate) owner: String,
    /// The place in line: lower is earlier.
    pub(crate) ticket: u64,
    /// Since when.
    pub(crate) since_ms: u64,
    /// Until when; `null` while it lasts.
    pub(crate) ended_ms: Option<u64>,
    #[serde(skip)]
    pub(super) changed: u64,
}

/// A lock as it was last looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub(crate) struct Seen {
    #[serde(flatten)]
    pub(crate) lock: LockView,
    /// When that was.
    pub(crate) at_ms: u64,
}

/// What became of something, for the figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Count {
    HandOff,
    BadEnd,
}

/// A lock in a look, and whether its queue was looked at too.
#[derive(Debug, Clone)]
pub(crate) struct Found {
    pub(crate) lock: LockView,
    pub(crate) with_queue: bool,
}

impl Tenure {
    pub(super) fn told(event: &LockEvent) -> Self {
        Self {
            name: event.name.clone(),
            owner: event.owner.clone(),
            holder_id: event.holder_id.clone(),
            fence: event.fence,
            since_ms: event.at_ms,
            ended_ms: None,
            end: None,
            waited_ms: None,
            after: None,
            known: Known::default(),
        }
    }

    pub(super) fn seen(lock: &LockView, at_ms: u64) -> Self {
        Self {
            name: lock.name.clone(),
            owner: lock.owner.clone().unwrap_or_default(),
            holder_id: lock.holder_id.clone().unwrap_or_default(),
            fence: lock.fence,
            since_ms: lock.since_ms.unwrap_or(at_ms),
            ended_ms: None,
            end: None,
            waited_ms: None,
            after: None,
            known: Known::default(),
        }
    }
}

impl Tenure {
    /// It ends, or will end, badly: counted once.
    pub(super) fn ends_badly(&mut self, counted: &mut Vec<Count>) {
        if !std::mem::replace(&mut self.known.counted, true) {
            counted.push(Count::BadEnd);
        }
    }

    /// What somebody who looks can see of it.
    pub(super) fn shown(&self) -> (u64, Option<u64>, Option<End>, Option<u64>, &str) {
        (self.since_ms, self.ended_ms, self.end, self.fence, &self.owner)
    }
}

impl Seen {
    /// Whether somebody who looks would see no difference; what passes with time is no difference.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let (a, b) = (&self.lock, &other.lock);
        let near = |a: Option<u64>, b: Option<u64>| match (a, b) {
            (Some(a), Some(b)) => a.abs_diff(b) <= SAME_SIGN_OF_LIFE_MS,
            (a, b) => a == b,
        };
        let ends = |seen: &Self| seen.lock.ttl_left_ms.map(|left| seen.at_ms + left);
        let waiters = |lock: &LockView| lock.waiters.iter().map(|w| (w.ticket, w.owner.clone())).collect::<Vec<_>>();
        (a.held, &a.holder_id, &a.owner, a.fence, a.since_ms, a.ttl_ms)
            == (b.held, &b.holder_id, &b.owner, b.fence, b.since_ms, b.ttl_ms)
            && (a.connected, a.revoked, a.foreign) == (b.connected, b.revoked, b.foreign)
            && near(a.last_seen_ms, b.last_seen_ms)
            && near(ends(self), ends(other))
            && waiters(a) == waiters(b)
    }
}
