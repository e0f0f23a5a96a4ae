//! Releasing, in layers: the script, retries of it, other means, and at last the journal. Each layer compares the token:
//! an unconditional delete would free another holder's lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::core::Core;
use super::lease_cell::LeaseCell;
use super::leases::Leases;
use crate::backoff::Backoff;
use crate::clock::{Moment, sleep};
use crate::error::Error;
use crate::events::lock_event::alert_kind;
use crate::events::{EventKind, ReleaseLayer, Transition};
use crate::facts::{Fence, LockName};
use crate::journal::{Journal, JournalEntry, JournalKind};
use crate::store::{Note, Operation, Release, StoreError, StoreErrorKind};

/// Pauses between two tries.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(1));

/// Releases locks, and repeats the releases that failed.
pub(crate) struct Releases {
    core: Arc<Core>,
    pub(super) leases: Arc<Leases>,
    journal: Option<Journal>,
    replaying: AtomicBool,
}

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

impl Releases {
    pub(super) fn new(core: Arc<Core>, leases: Arc<Leases>) -> Arc<Self> {
        let journal = core.options.journal.clone().map(Journal::new);
        Arc::new(Self { core, leases, journal, replaying: AtomicBool::new(false) })
    }

    pub(crate) fn journal(&self) -> Option<&Journal> {
        self.journal.as_ref()
    }

    /// Releases a lock. `Ok(false)`: this process did not hold it any more.
    pub(super) async fn release(self: &Arc<Self>, cell: Arc<LeaseCell>) -> Result<bool, Error> {
        let _call = self.core.call();
        self.give_up(&cell);
        if !cell.protected {
            return Ok(true);
        }
        let release = Box::pin(self.clone().release_once(cell.clone()));
        let under_way = UnderWay { core: self.core.clone(), release: Some(release) };
        under_way.answer().await.map_err(|error| self.core.store_error(Operation::Release, &cell.name, error))
    }

    /// Releases a lock whose guard is dropped: `drop` cannot await, and blocking here could stall the very runtime that
    /// has to answer.
    pub(super) fn release_in_background(self: &Arc<Self>, cell: Arc<LeaseCell>) {
        // Until it is spawned: a shutdown must not find neither a lease nor the task that releases it.
        let _call = self.core.call();
        self.give_up(&cell);
        if !cell.protected {
            return;
        }
        let releases = self.clone();
        self.core.spawn(async move { drop(releases.release_once(cell).await) });
    }

    fn give_up(&self, cell: &LeaseCell) {
        // First of all it is no longer renewed: a lease without belief would be reported as lost.
        self.leases.remove(cell);
        cell.state().give_up();
    }

    /// The first layer; where it fails, the others follow in the background.
    async fn release_once(self: Arc<Self>, cell: Arc<LeaseCell>) -> Result<bool, StoreError> {
        match self.try_release(&cell).await {
            Ok(answer) => Ok(self.released(&cell, answer, ReleaseLayer::Normal)),
            Err(error) => {
                let (releases, why) = (self.clone(), error.clone());
                self.core.spawn(async move { releases.release_by_other_layers(&cell, why).await });
                Err(error)
            }
        }
    }

    async fn try_release(&self, cell: &LeaseCell) -> Result<Release, StoreError> {
        let asked_at = Moment::now();
        let released = if cell.waited {
            self.core.within(self.core.store.release(&cell.name, &cell.token)).await
        } else {
            self.core.within(self.core.store.release_uncontended(&cell.name, &cell.token)).await
        };
        if released.is_ok() {
            self.core.answered(Operation::Release, asked_at, Moment::now());
        }
        released
    }

    async fn release_by_other_layers(&self, cell: &LeaseCell, mut error: StoreError) {
        count_failed_release(&self.core, &error);
        self.release_failed(cell, &error);
        let mut backoff = BACKOFF;
        for _ in 0..self.core.options.max_release_retries {
            sleep(self.core.jittered(backoff.pause())).await;
            match self.try_release(cell).await {
                Ok(answer) => {
                    self.released(cell, answer, ReleaseLayer::Retried);
                    return;
                }
                Err(again) => error = again,
            }
        }
        if self.core.options.emergency_release {
            sleep(self.core.options.emergency_release_delay).await;
            match self.core.within(self.core.store.release_emergency(&cell.name, &cell.token)).await {
                Ok(answer) => {
                    if answer == Release::Released {
                        self.core.publisher.stats.emergency_releases.add_one();
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
        let (operation, kind) = (Operation::Release, error.kind());
        self.core.publisher.observe(&Transition::StoreFailed { operation, kind });
        if is_script_error(error) {
            self.alert(alert_kind::SCRIPT_ERROR, cell, &error.to_string());
        }
    }

    fn alert(&self, kind: &'static str, cell: &LeaseCell, detail: &str) {
        let owner = cell.state().owner.to_string();
        tracing::error!(alert = kind, name = %cell.name, owner, detail, "alert");
        let publisher = &self.core.publisher;
        publisher.observe(&Transition::Alert { kind, name: cell.name.as_str(), owner: &owner, detail });
        publisher.note(Note::Tell(cell.event(EventKind::Alert, &owner, &format!("{kind}: {detail}"))));
    }

    /// The store has answered: counts and publishes it. Returns whether this process still held the lock.
    fn released(&self, cell: &LeaseCell, answer: Release, layer: ReleaseLayer) -> bool {
        let publisher = &self.core.publisher;
        let held = cell.granted_at.until(Moment::now());
        let ours = answer == Release::Released;
        // After an unanswered release "not ours" means released before, or expired.
        let violation = !ours && layer == ReleaseLayer::Normal;
        if violation {
            publisher.stats.ownership_violations.add_one();
            tracing::warn!(name = %cell.name, holder = %cell.token.holder_id(), "released a lock that was not ours any more; nothing was touched");
        } else {
            tracing::debug!(name = %cell.name, ?held, ?layer, "released");
        }
        let layer = if violation { ReleaseLayer::NotOwner } else { layer };
        publisher.observe(&Transition::Released { name: cell.name.as_str(), held, layer });
        let state = cell.state();
        let (published, owner) = (state.published, &state.owner);
        if ours && (published || self.core.options.keys.is_raw(&cell.name)) {
            let reason = if layer == ReleaseLayer::Emergency { "emergency" } else { "normal" };
            publisher.note(Note::Tell(cell.event(EventKind::Released, &owner.to_string(), reason)));
        }
        if published {
            publisher.note(Note::Remove { name: cell.name.clone(), holder: cell.token.holder_id() });
        }
        ours
    }

    async fn journal_release(&self, cell: &LeaseCell, error: &StoreError) {
        self.core.publisher.stats.journalled_releases.add_one();
        self.alert(alert_kind::RELEASE_JOURNALLED, cell, &error.to_string());
        let held = cell.granted_at.until(Moment::now());
        let layer = ReleaseLayer::Journalled;
        self.core.publisher.observe(&Transition::Released { name: cell.name.as_str(), held, layer });
        self.write_journal(JournalKind::Unreleased, cell, error).await;
    }

    /// Writes a journal entry. An error is only logged: nothing better can be done about it.
    pub(super) async fn write_journal(&self, kind: JournalKind, cell: &LeaseCell, error: &StoreError) {
        let Some(journal) = self.journal.clone() else { return };
        let mut entry = JournalEntry::new(kind, &cell.token);
        entry.name = cell.name.to_string();
        entry.store = self.core.store.describe();
        self.core.options.keys.namespace().as_str().clone_into(&mut entry.namespace);
        entry.owner = cell.state().owner.to_string();
        entry.fence = cell.fence.map(Fence::get);
        entry.ttl_ms = cell.state().ttl.as_millis();
        entry.why = error.to_string();
        let written = self.core.environment.run_blocking(move || journal.write(&entry).map_err(|e| (journal, e))).await;
        if let Some(Err((journal, error))) = written {
            tracing::error!(dir = %journal.dir().display(), %error, "the journal cannot be written");
        }
    }

    /// Repeats the releases that are in the journal, after a pause in which the process may end.
    pub(super) fn replay_journal_in_background(self: &Arc<Self>, pause: Duration) {
        if self.journal.is_some() && !self.replaying.swap(true, Ordering::AcqRel) {
            let releases = self.clone();
            self.core.spawn(async move {
                if releases.core.closing.run_until_cancelled(sleep(pause)).await.is_some() {
                    releases.replay_journal().await;
                }
                releases.replaying.store(false, Ordering::Release);
            });
        }
    }

    /// Repeats the releases that are in the journal, until the store does not answer one. Returns how many were settled.
    pub(crate) async fn replay_journal(&self) -> usize {
        let Some(journal) = self.journal.clone() else { return 0 };
        let core = &self.core;
        let reader = journal.clone();
        let Some(Ok(entries)) = core.environment.run_blocking(move || reader.entries()).await else { return 0 };
        let (store, namespace) = (core.store.describe(), core.options.keys.namespace().as_str());
        let mut settled = 0;
        for entry in entries {
            let (Some(token), Ok(name)) = (entry.token(), LockName::new(&entry.name)) else { continue };
            if entry.store != store || entry.namespace != namespace {
                continue;
            }
            if let Err(error) = core.within(core.store.release(&name, &token)).await {
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
}

/// Counts a release that the store did not carry out.
pub(crate) fn count_failed_release(core: &Core, error: &StoreError) {
    core.publisher.stats.normal_release_failures.add_one();
    if is_script_error(error) {
        core.publisher.stats.release_script_errors.add_one();
    }
}

/// Whether a script failed, or may not run.
pub(super) fn is_script_error(error: &StoreError) -> bool {
    matches!(error.kind(), StoreErrorKind::Script | StoreErrorKind::NotPermitted)
}
