//! Releasing, in layers: the script, retries of it, other means, and at last the journal. Each layer
//! compares the token: an unconditional delete would free somebody else's lock.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::Core;
use super::lease_cell::LeaseCell;
use super::renewal::lock_event;
use crate::client::jittered;
use crate::clock::{Moment, sleep, timeout};
use crate::error::Error;
use crate::events::lock_event::alert_kind;
use crate::events::{EventKind, ReleaseLayer, Transition};
use crate::facts::LockName;
use crate::journal::{JournalEntry, JournalKind};
use crate::store::{Note, Operation, Release, StoreError, StoreErrorKind};

/// The first pause between two tries; each one is twice the last.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A release under way. Dropped before its answer, the very same request goes on in the background.
struct UnderWay {
    core: Arc<Core>,
    release: Option<BoxFuture<'static, Result<bool, StoreError>>>,
}

impl UnderWay {
    async fn answer(mut self) -> Result<bool, StoreError> {
        let release = self.release.as_mut().expect("there until it has answered");
        let answer = release.await;
        self.release = None;
        answer
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Some(release) = self.release.take() {
            self.core.spawn(async move { drop(release.await) });
        }
    }
}

impl Core {
    /// Gives a lock back. `Ok(false)`: it was not ours any more.
    pub(crate) async fn release(self: &Arc<Self>, cell: Arc<LeaseCell>) -> Result<bool, Error> {
        let _call = self.call();
        self.give_up(&cell);
        if !cell.protected {
            return Ok(true);
        }
        let release = Box::pin(self.clone().release_once(cell.clone()));
        let under_way = UnderWay { core: self.clone(), release: Some(release) };
        under_way.answer().await.map_err(|error| self.store_error(Operation::Release, &cell.name, error))
    }

    /// The first layer; where it fails, the others follow in the background.
    async fn release_once(self: Arc<Self>, cell: Arc<LeaseCell>) -> Result<bool, StoreError> {
        match self.try_release(&cell).await {
            Ok(answer) => Ok(self.released(&cell, answer, ReleaseLayer::Normal)),
            Err(error) => {
                let (core, why) = (self.clone(), error.clone());
                self.spawn(async move { core.release_by_other_layers(&cell, why).await });
                Err(error)
            }
        }
    }

    /// For a guard that is dropped: `drop` cannot await.
    pub(crate) fn release_in_background(self: &Arc<Self>, cell: Arc<LeaseCell>) {
        // Until it is spawned: a shutdown must not find neither a lease nor the task that gives it back.
        let _call = self.call();
        self.give_up(&cell);
        if !cell.protected {
            return;
        }
        let core = self.clone();
        self.spawn(async move { drop(core.release_once(cell).await) });
    }

    fn give_up(&self, cell: &LeaseCell) {
        // First of all nobody tends it any more: whoever found it without belief, but tended, would tell of a loss.
        self.leases.remove(cell);
        cell.state().give_up();
        if cell.handed_over {
            self.waiting.handed_on(&cell.name);
        }
    }

    async fn try_release(&self, cell: &LeaseCell) -> Result<Release, StoreError> {
        let asked_at = Moment::now();
        let released = if cell.waited {
            self.within(self.store.release(&cell.name, &cell.token)).await
        } else {
            self.within(self.store.release_uncontended(&cell.name, &cell.token)).await
        };
        if released.is_ok() {
            self.answered(Operation::Release, asked_at);
        }
        released
    }

    async fn release_by_other_layers(self: &Arc<Self>, cell: &LeaseCell, mut error: StoreError) {
        self.count_failed_release(&error);
        self.release_failed(cell, &error);
        let mut pause = FIRST_PAUSE;
        for _ in 0..self.options.max_release_retries {
            sleep(jittered(pause, self.environment.byte())).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            match self.try_release(cell).await {
                Ok(answer) => {
                    self.released(cell, answer, ReleaseLayer::Retried);
                    return;
                }
                Err(again) => error = again,
            }
        }
        if self.options.emergency_release {
            sleep(self.options.emergency_release_delay).await;
            match self.within(self.store.release_emergency(&cell.name, &cell.token)).await {
                Ok(answer) => {
                    if answer == Release::Released {
                        self.stats.emergency_releases.add_one();
                        self.alert(alert_kind::EMERGENCY_RELEASE, cell, &error.to_string());
                    }
                    self.released(cell, answer, ReleaseLayer::Emergency);
                    return;
                }
                Err(again) => error = again,
            }
        }
        self.journal_release(cell, &error).await;
    }

    fn release_failed(&self, cell: &LeaseCell, error: &StoreError) {
        tracing::error!(name = %cell.name, holder = %cell.token.holder_id(), %error, "a release failed; trying again");
        self.observe(&Transition::StoreFailed { operation: Operation::Release, kind: error.kind() });
        if is_script_error(error) {
            self.alert(alert_kind::SCRIPT_ERROR, cell, &error.to_string());
        }
    }

    /// Counts a release that the store did not carry out.
    pub(crate) fn count_failed_release(&self, error: &StoreError) {
        self.stats.normal_release_failures.add_one();
        if is_script_error(error) {
            self.stats.release_script_errors.add_one();
        }
    }

    fn alert(&self, kind: &'static str, cell: &LeaseCell, detail: &str) {
        let owner = cell.state().owner.to_string();
        tracing::error!(alert = kind, name = %cell.name, owner, detail, "alert");
        self.observe(&Transition::Alert { kind, name: cell.name.as_str(), owner: &owner, detail });
        self.note(Note::Tell(lock_event(cell, &owner, EventKind::Alert, &format!("{kind}: {detail}"))));
    }

    /// The store has answered: says so to whoever watches.
    fn released(&self, cell: &LeaseCell, answer: Release, layer: ReleaseLayer) -> bool {
        let held = cell.granted_at.until(Moment::now());
        let ours = answer == Release::Released;
        // After an unanswered release "not ours" means released before, or expired.
        let violation = !ours && layer == ReleaseLayer::Normal;
        if violation {
            self.stats.ownership_violations.add_one();
            tracing::warn!(name = %cell.name, holder = %cell.token.holder_id(), "released a lock that was not ours any more; nothing was touched");
        } else {
            tracing::debug!(name = %cell.name, ?held, ?layer, "released");
        }
        let layer = if violation { ReleaseLayer::NotOwner } else { layer };
        self.observe(&Transition::Released { name: cell.name.as_str(), held, layer });
        let state = cell.state();
        let (published, owner) = (state.published, &state.owner);
        if ours && (published || self.options.keys.is_raw(&cell.name)) {
            let reason = if layer == ReleaseLayer::Emergency { "emergency" } else { "normal" };
            self.note(Note::Tell(lock_event(cell, &owner.to_string(), EventKind::Released, reason)));
        }
        if published {
            self.note(Note::Remove { name: cell.name.clone(), holder: cell.token.holder_id() });
        }
        ours
    }

    async fn journal_release(&self, cell: &LeaseCell, error: &StoreError) {
        self.stats.journalled_releases.add_one();
        self.alert(alert_kind::RELEASE_JOURNALLED, cell, &error.to_string());
        let held = cell.granted_at.until(Moment::now());
        self.observe(&Transition::Released { name: cell.name.as_str(), held, layer: ReleaseLayer::Journalled });
        self.write_journal(JournalKind::Unreleased, cell, error).await;
    }

    /// Writes down what a person may have to look at. Never fails the caller: there is nobody left
    /// who could do better.
    pub(crate) async fn write_journal(&self, kind: JournalKind, cell: &LeaseCell, error: &StoreError) {
        let Some(journal) = self.journal.clone() else { return };
        let mut entry = JournalEntry::new(kind, &cell.token);
        entry.name = cell.name.to_string();
        entry.store = self.store.describe();
        self.options.keys.namespace().as_str().clone_into(&mut entry.namespace);
        entry.owner = cell.state().owner.to_string();
        entry.fence = cell.fence.map(crate::facts::Fence::get);
        entry.ttl_ms = cell.state().ttl.as_millis();
        entry.why = error.to_string();
        let written = self.environment.run_blocking(move || journal.write(&entry).map_err(|e| (journal, e))).await;
        if let Some(Err((journal, error))) = written {
            tracing::error!(dir = %journal.dir().display(), %error, "the journal cannot be written");
        }
    }

    /// The store is (back) there: does what the journal says is still to be done, after a pause in
    /// which the process may end.
    pub(crate) fn replay_journal_in_background(self: &Arc<Self>, pause: Duration) {
        if self.journal.is_some() && !self.replaying.swap(true, Ordering::AcqRel) {
            let core = self.clone();
            self.spawn(async move {
                if core.closing.run_until_cancelled(sleep(pause)).await.is_some() {
                    core.replay_journal().await;
                }
                core.replaying.store(false, Ordering::Release);
            });
        }
    }

    /// How many entries were settled. Stops at the first that the store does not answer.
    pub(crate) async fn replay_journal(&self) -> usize {
        let Some(journal) = self.journal.clone() else { return 0 };
        let reader = journal.clone();
        let Some(Ok(entries)) = self.environment.run_blocking(move || reader.entries()).await else { return 0 };
        let (store, namespace) = (self.store.describe(), self.options.keys.namespace().as_str());
        let mut settled = 0;
        for entry in entries {
            let (Some(token), Ok(name)) = (entry.token(), LockName::new(&entry.name)) else { continue };
            if entry.store != store || entry.namespace != namespace {
                continue;
            }
            if let Err(error) = self.within(self.store.release(&name, &token)).await {
                tracing::warn!(%name, %error, "a journal entry could not be replayed");
                return settled;
            }
            tracing::info!(%name, id = entry.id, "a journal entry was replayed");
            if let Err(error) = journal.settle(&entry.id) {
                tracing::error!(id = entry.id, %error, "a journal entry cannot be settled");
            }
            settled += 1;
        }
        settled
    }

    /// No question to the store goes unanswered for longer than the options allow.
    pub(crate) async fn within<T>(&self, ask: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        timeout(self.options.request_timeout, ask).await.unwrap_or_else(|| Err(StoreErrorKind::NoAnswer.into()))
    }
}

/// Whether a script failed, or may not run.
pub(super) fn is_script_error(error: &StoreError) -> bool {
    matches!(error.kind(), StoreErrorKind::Script | StoreErrorKind::NotPermitted)
}
