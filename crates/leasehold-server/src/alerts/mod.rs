//! Alerts: which problems exist, when they begin and end, and who is notified.
//!
//! | module | topic |
//! |---|---|
//! | `condition` | what the checks and the monitor report |
//! | `alert` | alerts and notices |
//! | `board` | which alerts fire, since when, and which have resolved; pure |
//! | `rules` | rules over the fleet's counters; pure |
//! | `checks` | periodic checks: counters, store, journal, settings of the store |
//! | `shared` | alerts that the servers of one store share |
//! | `settings` | the section `alerts` of the configuration |
//! | `sinks`, `webhook`, `target`, `command`, `notifications` | log, webhook and command; their metric |

mod alert;
mod board;
mod checks;
mod command;
mod condition;
mod notifications;
mod rules;
mod settings;
mod shared;
mod sinks;
mod target;
mod webhook;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Json;
use axum::extract::State;
use leasehold::LockName;
use leasehold::events::LockEvent;
use serde::Serialize;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub(crate) use alert::Alert;
pub(crate) use checks::start_checks;
pub(crate) use condition::{Condition, Level, Source};
pub(crate) use notifications::NotificationCounter;
pub(crate) use rules::EMERGENCY_RATE;
pub use settings::{AlertCommand, AlertLevel, AlertSettings, CommandLine, Secret, Webhook, WebhookUrl};
pub(crate) use shared::{start_sharing, take_over};

use alert::{AlertState, Notice, SharedAlert};
use board::Board;
use sinks::Sinks;

use crate::App;
use crate::clock::unix_ms;
use crate::events::Events;
use crate::tls::TlsError;

/// The alerts of this server and the sinks that are notified.
pub(crate) struct Alerts {
    state: Mutex<Inner>,
    events: Arc<Events>,
    sinks: Sinks,
    /// The tasks of the sinks.
    tasks: Mutex<Vec<JoinHandle<()>>>,
    /// Notified when an alert fires or resolves, or when this server begins to lead.
    changed: Notify,
}

struct Inner {
    board: Board,
    /// Whether this server notifies the sinks of shared alerts. Only one server of a store does, so that each
    /// notification is sent once.
    leads: bool,
}

impl Alerts {
    /// Starts the sinks, whose tasks end with the server. `leads` is true if no leader is elected.
    pub(crate) fn start(
        settings: &AlertSettings,
        leads: bool,
        events: Arc<Events>,
        notifications: NotificationCounter,
        stopping: &CancellationToken,
    ) -> Result<Self, TlsError> {
        let (sinks, tasks) = Sinks::start(settings, notifications, stopping)?;
        let state = Mutex::new(Inner { board: Board::default(), leads });
        Ok(Self { state, events, sinks, tasks: Mutex::new(tasks), changed: Notify::new() })
    }

    /// Waits until the sinks have sent their pending notifications or timed out. Called when the server stops.
    pub(crate) async fn join(&self) {
        let tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        for task in tasks {
            let _ = task.await;
        }
    }

    /// Takes the current conditions of one source. Alerts of this source that are not among them resolve. Conditions
    /// that are the same for all servers are ignored unless this server leads; followers mirror the leader's alerts.
    pub(crate) fn report(&self, source: Source, conditions: Vec<Condition>) {
        let mut state = self.state();
        if state.leads || source.is_local() {
            let notices = state.board.report(source, conditions, unix_ms());
            self.publish(&mut state, notices);
        }
    }

    /// Records a one-time occurrence.
    pub(crate) fn record_occurrence(&self, condition: Condition) {
        let mut state = self.state();
        let notices = state.board.record_occurrence(condition, unix_ms()).into_iter().collect();
        self.publish(&mut state, notices);
    }

    /// Records an alert that a client published.
    pub(crate) fn client_alert(&self, event: &LockEvent) {
        let Some((kind, detail)) = event.alert() else { return };
        let (name, owner) = (&event.name, &event.owner);
        let (kind, text) = match kind {
            "lua_script_error" => {
                ("lua_script_error", format!("the script that releases {name} (held by {owner}) failed: {detail}"))
            }
            "gpu_lock_emergency_release" => {
                let text = format!(
                    "{name} (held by {owner}) was released in an emergency, because the usual ways failed: {detail}"
                );
                ("gpu_lock_emergency_release", text)
            }
            "release_journalled" => {
                let text = format!(
                    "{name} (held by {owner}) could not be released; the release was written to a journal: {detail}"
                );
                ("release_journalled", text)
            }
            // From a newer version, whose alerts this one cannot describe.
            _ => return,
        };
        let about = Condition {
            name: LockName::new(name).ok(),
            owner: Some(owner.clone()),
            holder_id: Some(event.holder_id.clone()),
            ..Condition::new(kind, Level::Critical, text)
        };
        self.record_occurrence(about);
    }

    /// Makes this server the leader. Alerts that the previous leader sent are not sent again; those that were not sent
    /// are sent now.
    fn start_leading(&self, shared: Vec<SharedAlert>) {
        let mut state = self.state();
        let (started, unsent) = state.board.take_over(shared);
        state.leads = true;
        for notice in started {
            self.events.publish_alert(notice.to_json());
        }
        for alert in unsent {
            self.sinks.notify(&Arc::new(Notice::new(AlertState::Firing, &alert)));
        }
        state.board.mark_notified(|_| true);
        self.changed.notify_one();
    }

    /// Ends the leadership. Firing alerts go on firing until the next leader resolves them.
    pub(crate) fn stop_leading(&self) {
        self.state().leads = false;
    }

    pub(crate) fn leads(&self) -> bool {
        self.state().leads
    }

    /// Returns the alerts to store for other servers; `None` if this server does not lead.
    fn alerts_to_share(&self) -> Option<Vec<SharedAlert>> {
        let state = self.state();
        state.leads.then(|| state.board.shared_alerts())
    }

    /// Shows the leader's alerts, unless this server leads.
    fn mirror(&self, shared: Vec<SharedAlert>) {
        let mut state = self.state();
        if !state.leads {
            let notices = state.board.mirror(shared, unix_ms());
            for notice in notices {
                self.events.publish_alert(notice.to_json());
            }
        }
    }

    /// Returns the firing alerts of one source.
    pub(crate) fn firing_from(&self, source: Source) -> Vec<Alert> {
        self.state().board.firing_from(source)
    }

    /// Counts the firing alerts of a level.
    pub(crate) fn count(&self, level: Level) -> usize {
        self.state().board.count(level)
    }

    /// Resolves quiet alerts and forgets old ones.
    fn tick(&self) {
        let mut state = self.state();
        let notices = state.board.tick(unix_ms());
        self.publish(&mut state, notices);
    }

    /// Publishes notices, inside the lock so that "resolved" never precedes "firing". Publishing never waits.
    fn publish(&self, state: &mut Inner, notices: Vec<Notice>) {
        if notices.is_empty() {
            return;
        }
        let leads = state.leads;
        for notice in notices {
            let notice = Arc::new(notice);
            self.events.publish_alert(notice.to_json());
            if leads || notice.is_local {
                self.sinks.notify(&notice);
            }
        }
        state.board.mark_notified(|source| leads || source.is_some_and(Source::is_local));
        self.changed.notify_one();
    }

    fn state(&self) -> MutexGuard<'_, Inner> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The alerts of this server.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct AlertsPage {
    /// Firing alerts, the worst and newest first; then alerts resolved in the last six hours, newest first.
    alerts: Vec<Alert>,
}

/// List firing and recently resolved alerts
#[utoipa::path(get, path = "/api/v1/alerts", tag = "alerts", responses((status = 200, body = AlertsPage)))]
pub(crate) async fn list(State(app): State<App>) -> Json<AlertsPage> {
    let state = app.alerts.state();
    let alerts = state.board.firing().into_iter().chain(state.board.resolved().cloned()).collect();
    Json(AlertsPage { alerts })
}
