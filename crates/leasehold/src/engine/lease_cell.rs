//! One lease of this process: what the guard, the renewal task and the releaser share.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::client::renewal::{LeaseState, Record, Sent};
use crate::clock::Moment;
use crate::facts::{Fence, LockName, Owner, Token, Ttl};
use crate::loss::LossReason;
use crate::store::{Grant, Renewal};

pub(crate) struct LeaseCell {
    pub(crate) name: LockName,
    pub(crate) token: Token,
    /// As the store knows it, also where the caller asked for none.
    pub(crate) fence: Option<Fence>,
    /// Whether the caller asked for a fence.
    pub(crate) fenced: bool,
    /// It came by the queue, where others are likely to stand.
    pub(crate) waited: bool,
    /// Its last holder handed it over.
    pub(crate) handed_over: bool,
    pub(crate) granted_at: Moment,
    /// False when the store could not be asked and the policy is to go on all the same.
    pub(crate) protected: bool,
    state: Mutex<LeaseState>,
    /// Wakes whoever waits for `lost` or `finish_reason` of the state.
    pub(crate) told: Notify,
    /// For work that listens to such a token; made when somebody wants it.
    cancellation: OnceLock<CancellationToken>,
    /// Where the tending task finds it.
    pub(crate) due: Mutex<Option<Due>>,
}

/// When a lease is looked at next, and which one it is among those due at that moment.
pub(crate) type Due = (Moment, u64);

/// What a lease begins with.
pub(crate) struct NewLease {
    pub(crate) name: LockName,
    pub(crate) token: Token,
    pub(crate) ttl: Ttl,
    pub(crate) owner: Owner,
    pub(crate) fenced: bool,
    /// `None`: never renewed.
    pub(crate) renew_every: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    /// It came by the queue.
    pub(crate) waited: bool,
}

impl LeaseCell {
    pub(crate) fn new(new: NewLease, grant: &Grant, record: Record) -> Self {
        let granted_at = Moment::now();
        let terms = (new.ttl, new.owner);
        Self {
            name: new.name,
            token: new.token,
            fence: grant.fence,
            fenced: new.fenced,
            waited: new.waited,
            handed_over: record == Record::Provisional,
            granted_at,
            protected: true,
            state: Mutex::new(LeaseState::new(granted_at, terms, new.renew_every, new.max_hold, grant, record)),
            told: Notify::new(),
            cancellation: OnceLock::new(),
            due: Mutex::new(None),
        }
    }

    /// Stands for a lease that could not be asked for.
    pub(crate) fn unprotected(new: NewLease) -> Self {
        let grant = Grant { fence: None, asked_at: Moment::now(), lasts: new.ttl.duration() };
        Self { protected: false, ..Self::new(new, &grant, Record::Complete) }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, LeaseState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_valid(&self, now: Moment) -> bool {
        self.state().belief.is_valid(now)
    }

    /// Marks the lease as lost. `false`: it was before.
    pub(crate) fn lose(&self, why: LossReason) -> bool {
        if !self.state().lose(why) {
            return false;
        }
        self.told.notify_waiters();
        if let Some(token) = self.cancellation.get() {
            token.cancel();
        }
        true
    }

    /// Passes on that somebody wants it to come to an end.
    pub(crate) fn ask_to_finish(&self, reason: String) {
        tracing::info!(name = %self.name, reason, "asked to finish");
        self.state().finish_reason = Some(reason);
        self.told.notify_waiters();
    }

    /// Waits until something that was told is there.
    pub(crate) async fn wait_for<T>(&self, look: impl Fn(&LeaseState) -> Option<T>) -> T {
        loop {
            // Listening before looking: what is told in between is not missed.
            let told = self.told.notified();
            if let Some(found) = look(&self.state()) {
                return found;
            }
            told.await;
        }
    }

    /// Is cancelled when the lease is lost.
    pub(crate) fn cancellation(&self) -> CancellationToken {
        let token = self.cancellation.get_or_init(CancellationToken::new).clone();
        // Lost before the token was made, or while it was.
        if self.state().lost.is_some() {
            token.cancel();
        }
        token
    }

    /// The request that carries this out.
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
