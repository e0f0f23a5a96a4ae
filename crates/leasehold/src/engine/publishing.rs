//! What a process publishes: notes for the index and the subscribers, counters, metrics and the calls of its observer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::clock::{Moment, sleep_until};
use crate::events::{EventKind, LockEvent, Observer, Transition};
use crate::facts::{Fence, LockName, Token, Ttl};
use crate::metrics::Metrics;
use crate::stats::Stats;
use crate::store::{Note, SharedStore};

/// Notes are written this long after the first of them: a lock that is acquired and released thousands of times a second
/// must not cost two more requests each time.
const WRITTEN_AFTER: Duration = Duration::from_millis(20);

/// The store's counters are at most this old.
const COUNTED_EVERY: Duration = Duration::from_secs(5);

/// Alerts that are kept while the store does not answer.
const ALERTS_KEPT: usize = 64;

/// Collects what has to be published. [`run`] writes it to the store.
pub(crate) struct Publisher {
    store: SharedStore,
    observer: Option<Arc<dyn Observer>>,
    pub(crate) stats: Stats,
    pub(crate) metrics: Metrics,
    notes: Mutex<Notes>,
    /// Wakes the publishing task: the first note since the last write was made.
    noted: Notify,
}

#[derive(Default)]
struct Notes {
    new: Vec<Note>,
    /// When they are to be written; `None` while there are none.
    write_at: Option<Moment>,
    /// Alerts that could not be written, for the next time.
    later: Vec<Note>,
}

impl Publisher {
    pub(super) fn new(store: SharedStore, observer: Option<Arc<dyn Observer>>) -> Self {
        Self {
            store,
            observer,
            stats: Stats::default(),
            metrics: Metrics::default(),
            notes: Mutex::default(),
            noted: Notify::new(),
        }
    }

    /// Counts a transition and passes it to the observer. Not to be called under a lock or on a thread of the store: the
    /// observer is the user's code.
    pub(crate) fn observe(&self, transition: &Transition<'_>) {
        self.metrics.count(transition);
        let Some(observer) = &self.observer else { return };
        // An observer's panic must not end the task that renews every lease.
        if catch_unwind(AssertUnwindSafe(|| observer.observe(transition))).is_err() {
            tracing::error!("an observer panicked");
        }
    }

    /// Adds a note, which is written together with others.
    pub(crate) fn note(&self, note: Note) {
        let mut notes = self.notes();
        notes.new.push(note);
        if notes.write_at.is_none() {
            notes.write_at = Some(Moment::now() + WRITTEN_AFTER);
            drop(notes);
            self.noted.notify_one();
        }
    }

    /// Publishes a lease that no guard renews, and enters it in the index.
    pub(crate) fn granted(&self, name: &LockName, token: &Token, owner: &str, fence: Option<Fence>, ttl: Ttl) {
        let event = LockEvent::new(EventKind::Granted, name, token.holder_id(), owner, fence, "");
        self.note(Note::Tell(event));
        self.note(Note::Enter { name: name.clone(), holder: token.holder_id(), lasts: ttl.duration() });
    }

    /// Writes the notes and the counters. `metrics`: also the histograms, which are many fields.
    pub(super) async fn flush(&self, metrics: bool) {
        let notes = {
            let mut waiting = self.notes();
            waiting.write_at = None;
            let mut notes = std::mem::take(&mut waiting.later);
            notes.append(&mut waiting.new);
            notes
        };
        if !notes.is_empty() {
            // An alert is often about the very failure of the store that keeps it from being written.
            let alerts: Vec<Note> = notes.iter().filter(|note| note.is_alert()).take(ALERTS_KEPT).cloned().collect();
            if let Err(error) = self.store.note(notes).await {
                tracing::debug!(%error, "notes were not written");
                // Without a time to write them: a store that does not answer is not asked without pause.
                self.notes().later.extend(alerts);
            }
        }
        let mut deltas = self.stats.take_deltas();
        if metrics {
            deltas.extend(self.metrics.take_deltas());
        }
        if !deltas.is_empty()
            && let Err(error) = self.store.count(&deltas).await
        {
            tracing::debug!(%error, "counters were not written");
            self.stats.put_back(&deltas);
            self.metrics.put_back(&deltas);
        }
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The publishing task.
pub(super) async fn run(publisher: Arc<Publisher>, ended: CancellationToken) {
    let mut count_at = Moment::now() + COUNTED_EVERY;
    loop {
        let write_at = publisher.notes().write_at;
        let next = write_at.map_or(count_at, |at| at.min(count_at));
        tokio::select! {
            biased;
            () = ended.cancelled() => {
                publisher.flush(true).await;
                return;
            }
            () = sleep_until(Some(next)) => {
                let counting = Moment::now() >= count_at;
                publisher.flush(counting).await;
                if counting {
                    count_at = Moment::now() + COUNTED_EVERY;
                }
            }
            () = publisher.noted.notified() => {}
        }
    }
}
