//! One lease of this process: what its guard, the renewal task and its release share.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::wish::Wish;
use crate::client::renewal::{LeaseState, Record, Sent};
use crate::clock::Moment;
use crate::events::{EventKind, LockEvent};
use crate::facts::{Fence, LockName, Token};
use crate::loss::LossReason;
use crate::store::{Grant, Renewal};

pub(crate) struct LeaseCell {
    pub(crate) name: LockName,
    pub(crate) token: Token,
    /// As the store knows it, also where the caller asked for none.
    pub(crate) fence: Option<Fence>,
    /// Whether the caller asked for a fence.
    pub(crate) fenced: bool,
    /// It came by the queue, so others are likely to wait.
    pub(crate) waited: bool,
    /// Its last holder handed it over.
    pub(crate) handed_over: bool,
    pub(crate) granted_at: Moment,
    /// False when the store could not be asked and the policy is to go on all the same.
    pub(crate) protected: bool,
    state: Mutex<LeaseState>,
    /// Wakes the tasks that wait for `lost` or `finish_reason` of the state.
    notified: Notify,
    /// Is cancelled when the lease is lost; made at its first use.
    cancellation: OnceLock<CancellationToken>,
    /// Its place in the schedule of the renewal task.
    pub(crate) due: Mutex<Option<Due>>,
}

/// When a lease needs attention next, and its number among those due at that moment.
pub(crate) type Due = (Moment, u64);

impl LeaseCell {
    /// `granted_at`: when this process learned of the grant. `waited`: it came by the queue.
    pub(super) fn new(
        granted_at: Moment,
        wish: Wish,
        token: Token,
        waited: bool,
        grant: &Grant,
        record: Record,
    ) -> Self {
        let terms = (wish.ttl, wish.owner);
        Self {
            name: wish.name,
            token,
            fence: grant.fence,
            fenced: wish.fenced,
            waited,
            handed_over: record == Record::Provisional,
            granted_at,
            protected: true,
            state: Mutex::new(LeaseState::new(granted_at, terms, wish.renew_every, wish.max_hold, grant, record)),
            notified: Notify::new(),
            cancellation: OnceLock::new(),
            due: Mutex::new(None),
        }
    }

    /// Represents a lease that could not be requested.
    pub(super) fn unprotected(wish: Wish, token: Token) -> Self {
        let now = Moment::now();
        let grant = Grant { fence: None, asked_at: now, lasts: wish.ttl.duration() };
        Self { protected: false, ..Self::new(now, wish, token, false, &grant, Record::Complete) }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, LeaseState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_valid(&self, now: Moment) -> bool {
        self.state().belief.is_valid(now)
    }

    /// Marks the lease as lost. `false`: it was lost before.
    pub(crate) fn lose(&self, why: LossReason) -> bool {
        if !self.state().lose(why) {
            return false;
        }
        self.notified.notify_waiters();
        if let Some(token) = self.cancellation.get() {
            token.cancel();
        }
        true
    }

    /// Passes on a request to finish soon.
    pub(crate) fn ask_to_finish(&self, reason: String) {
        tracing::info!(name = %self.name, reason, "asked to finish");
        self.state().finish_reason = Some(reason);
        self.notified.notify_waiters();
    }

    /// Waits until the state has what `look` looks for.
    pub(crate) async fn wait_for<T>(&self, look: impl Fn(&LeaseState) -> Option<T>) -> T {
        loop {
            // Before looking, so that a change in between is not missed.
            let changed = self.notified.notified();
            if let Some(found) = look(&self.state()) {
                return found;
            }
            changed.await;
        }
    }

    /// Returns a token that is cancelled when the lease is lost.
    pub(crate) fn cancellation(&self) -> CancellationToken {
        let token = self.cancellation.get_or_init(CancellationToken::new).clone();
        // Lost before the token was made, or while it was.
        if self.state().lost.is_some() {
            token.cancel();
        }
        token
    }

    /// An event of this lease.
    pub(super) fn event(&self, kind: EventKind, owner: &str, reason: &str) -> LockEvent {
        LockEvent::new(kind, &self.name, self.token.holder_id(), owner, self.fence, reason)
    }

    /// Returns the request for the store.
    pub(crate) fn renewal(&self, sent: &Sent) -> Renewal {
        Renewal {
            name: self.name.clone(),
            token: self.token.clone(),
            fence: self.fence,
            ttl: sent.ttl,
            prolong: sent.prolong,
            rewrite: sent.rewrote.clone(),
            hand_to: None,
        }
    }
}
