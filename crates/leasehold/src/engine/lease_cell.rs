//! One lease of this process: what the guard, the tending task and the releaser share.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::clock::Moment;
use crate::event::LossReason;
use crate::facts::{Fence, LockName, Owner, Token, Ttl};
use crate::lease::{self, Belief, Plan};
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
    lost_token: OnceLock<CancellationToken>,
    /// Where the tending task finds it.
    pub(crate) due: Mutex<Option<Due>>,
}

/// A lease held for longer than this is entered in the index and its grant is told: shorter ones
/// cost nothing.
pub(super) const NOTED_AFTER: Duration = Duration::from_millis(500);
/// A grant by message is confirmed this long after it came, or sooner where it lasts less: whoever is done by then,
/// as most are where many want the same lock, needs no confirmation. It is a small part of what the grant lasts.
const CONFIRM_AFTER: Duration = Duration::from_millis(20);

/// What the store's record of a new lease lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Record {
    /// Nothing.
    Whole,
    /// The fence: to be written when it has been held long enough to be looked at.
    Fence,
    /// It is provisional: to be confirmed.
    Provisional,
    /// It carries another's ttl and owner: to be written at once.
    Anothers,
}

/// When a lease is looked at next, and which one it is among those due at that moment.
pub(crate) type Due = (Moment, u64);

pub(crate) struct LeaseState {
    pub(crate) belief: Belief,
    pub(crate) plan: Plan,
    pub(crate) ttl: Ttl,
    pub(crate) owner: Owner,
    /// When to renew next.
    pub(crate) renew_at: Option<Moment>,
    /// When to ask the store next whether it is still ours, unless a renewal says so before.
    pub(crate) check_at: Moment,
    /// A renewal or check was sent and has not been answered.
    pub(crate) renewing: bool,
    /// The record in the store does not carry our ttl and owner yet.
    pub(crate) rewrite: bool,
    /// Entered in the index.
    pub(crate) noted: bool,
    pub(crate) lost: Option<LossReason>,
    pub(crate) finish_reason: Option<String>,
}

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
        let plan = Plan { every: new.renew_every, at_most_until: new.max_hold.map(|hold| granted_at + hold) };
        let renew_at = match record {
            Record::Whole => plan.every.map(|every| grant.asked_at + every),
            Record::Fence => plan.every.map(|every| grant.asked_at + every.min(NOTED_AFTER)),
            Record::Provisional => Some(granted_at + CONFIRM_AFTER.min(grant.lasts / 16)),
            Record::Anothers => Some(granted_at),
        };
        Self {
            name: new.name,
            token: new.token,
            fence: grant.fence,
            fenced: new.fenced,
            waited: new.waited,
            handed_over: record == Record::Provisional,
            granted_at,
            protected: true,
            state: Mutex::new(LeaseState {
                belief: Belief::new(grant.asked_at, grant.lasts),
                plan,
                ttl: new.ttl,
                owner: new.owner,
                renew_at,
                check_at: grant.asked_at + lease::check_every(new.ttl.duration()),
                renewing: false,
                rewrite: matches!(record, Record::Provisional | Record::Anothers),
                noted: false,
                lost: None,
                finish_reason: None,
            }),
            told: Notify::new(),
            lost_token: OnceLock::new(),
            due: Mutex::new(None),
        }
    }

    /// Stands for a lease that could not be asked for.
    pub(crate) fn unprotected(new: NewLease) -> Self {
        let grant = Grant { fence: None, asked_at: Moment::now(), lasts: new.ttl.duration() };
        Self { protected: false, ..Self::new(new, &grant, Record::Whole) }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, LeaseState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_valid(&self, now: Moment) -> bool {
        self.state().belief.is_valid(now)
    }

    /// Marks the lease as lost. `false`: it was before.
    pub(crate) fn lose(&self, why: LossReason) -> bool {
        let mut state = self.state();
        state.belief.give_up();
        if state.lost.is_some() {
            return false;
        }
        state.lost = Some(why);
        drop(state);
        self.told.notify_waiters();
        if let Some(token) = self.lost_token.get() {
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
    pub(crate) fn lost_token(&self) -> CancellationToken {
        let token = self.lost_token.get_or_init(CancellationToken::new).clone();
        // Lost before the token was made, or while it was.
        if self.state().lost.is_some() {
            token.cancel();
        }
        token
    }

    pub(crate) fn renewal(&self, state: &LeaseState) -> Renewal {
        Renewal {
            name: self.name.clone(),
            token: self.token.clone(),
            fence: self.fence,
            ttl: state.ttl,
            prolong: true,
            rewrite: state.rewrite.then(|| state.owner.clone()),
            hand_to: None,
        }
    }

    /// Asks whether it is still ours, and changes nothing.
    pub(crate) fn check(&self, state: &LeaseState) -> Renewal {
        Renewal { prolong: false, rewrite: None, ..self.renewal(state) }
    }
}
