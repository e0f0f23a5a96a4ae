//! Tenures, waits and observed locks.

use leasehold::events::LockEvent;
use leasehold::inspect::LockView;
use serde::Serialize;

/// How far apart two readings of the same heartbeat may be.
const HEARTBEAT_TOLERANCE_MS: u64 = 300;

/// How a tenure ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    /// The holder released the lock.
    Released,
    /// The holder could not keep its lease.
    Lost,
    /// The lease was revoked.
    Revoked,
    /// The lock was taken by force.
    Forced,
    /// The lease expired, or its holder died.
    Expired,
}

impl End {
    /// Whether the end needs attention.
    pub(crate) fn is_bad(self) -> bool {
        self != Self::Released
    }
}

/// The time one holder held a lock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub(crate) struct Tenure {
    /// The name of the lock.
    pub(crate) name: String,
    /// The holder, for people.
    pub(crate) owner: String,
    /// The id of the holder, which does not reveal its token.
    pub(crate) holder_id: String,
    /// The fence of the lease.
    pub(crate) fence: Option<u64>,
    /// When the tenure began, in wall-clock milliseconds.
    pub(crate) since_ms: u64,
    /// When the tenure ended; `null` while it lasts.
    pub(crate) ended_ms: Option<u64>,
    /// How the tenure ended.
    pub(crate) end: Option<End>,
    /// How long the holder had waited, if that was observed.
    pub(crate) waited_ms: Option<u64>,
    /// The id of the previous holder, if the lock was handed to a waiter.
    pub(crate) after: Option<String>,
    #[serde(skip)]
    pub(super) details: TenureDetails,
}

/// The internal details of a tenure.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TenureDetails {
    pub(super) changed: u64,
    /// Whether a scan has reported when the tenure began.
    pub(super) start_is_exact: bool,
    /// Whether an event has reported how the tenure ended.
    pub(super) end_reported: bool,
    pub(super) revoked: bool,
    /// Whether it was counted as a bad end.
    pub(super) counted: bool,
    pub(super) disconnected: bool,
    pub(super) lease_ends_ms: Option<u64>,
}

/// The time one waiter waited for a lock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub(crate) struct Wait {
    /// The name of the lock.
    pub(crate) name: String,
    /// The waiter, for people.
    pub(crate) owner: String,
    /// The queue position: lower is earlier.
    pub(crate) ticket: u64,
    /// When the wait began, in wall-clock milliseconds.
    pub(crate) since_ms: u64,
    /// When the wait ended; `null` while it lasts.
    pub(crate) ended_ms: Option<u64>,
    #[serde(skip)]
    pub(super) changed: u64,
}

/// A lock as last scanned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[schema(as = Seen)]
pub(crate) struct ObservedLock {
    #[serde(flatten)]
    pub(crate) lock: LockView,
    /// When the lock was scanned, in wall-clock milliseconds.
    pub(crate) at_ms: u64,
}

/// Something that the trends count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Count {
    HandOff,
    BadEnd,
}

/// A lock as one scan found it, and whether the scan read its queue.
#[derive(Debug, Clone)]
pub(crate) struct ScannedLock {
    pub(crate) lock: LockView,
    pub(crate) with_queue: bool,
}

impl Tenure {
    pub(super) fn from_event(event: &LockEvent) -> Self {
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
            details: TenureDetails::default(),
        }
    }

    pub(super) fn from_scan(lock: &LockView, at_ms: u64) -> Self {
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
            details: TenureDetails::default(),
        }
    }
}

impl Tenure {
    /// Counts a bad end, once per tenure.
    pub(super) fn count_bad_end(&mut self, counted: &mut Vec<Count>) {
        if !std::mem::replace(&mut self.details.counted, true) {
            counted.push(Count::BadEnd);
        }
    }

    /// The fields that a viewer can see.
    pub(super) fn visible_fields(&self) -> (u64, Option<u64>, Option<End>, Option<u64>, &str) {
        (self.since_ms, self.ended_ms, self.end, self.fence, &self.owner)
    }
}

impl ObservedLock {
    /// Whether a viewer would see no difference. Values that only pass with time are no difference.
    pub(super) fn looks_like(&self, other: &Self) -> bool {
        let (a, b) = (&self.lock, &other.lock);
        let near = |a: Option<u64>, b: Option<u64>| match (a, b) {
            (Some(a), Some(b)) => a.abs_diff(b) <= HEARTBEAT_TOLERANCE_MS,
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
