//! Alerts: what is the matter, from when until when, and who is told.
//!
//! | file | what it is about |
//! |---|---|
//! | `condition` | what those who look report |
//! | `board` | which alerts fire, since when, which have resolved; pure |
//! | `rules` | what the fleet's counters say; pure |
//! | `watch` | looking: counters, store, journal, settings of the store |
//! | `settings` | the section `alerts` of the configuration |
//! | `sinks`, `webhook`, `target`, `command` | who is told, and how |

mod board;
mod command;
mod condition;
mod rules;
mod settings;
mod sinks;
mod target;
mod watch;
mod webhook;

use std::sync::{Arc, Mutex, PoisonError};

use axum::Json;
use axum::extract::State as Shared;
use leasehold::{LockEvent, LockName};
use serde::Serialize;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub(crate) use board::{Alert, Notice, State};
pub(crate) use condition::{Condition, Level};
pub(crate) use rules::EMERGENCY_RATE;
pub use settings::{AlertCommand, AlertLevel, AlertSettings, CommandLine, Secret, Webhook, WebhookUrl};
pub(crate) use watch::watch;

use board::Board;
use sinks::Sinks;

use crate::App;
use crate::events::Events;
use crate::metrics::Notified;
use crate::tls::TlsError;
use crate::wall_ms;

/// All alerts of this server, and those who are told of them.
pub(crate) struct Alerts {
    state: Mutex<Told>,
    events: Arc<Events>,
    sinks: Sinks,
    /// Of the sinks.
    tasks: Mutex<Vec<JoinHandle<()>>>,
}

struct Told {
    board: Board,
    /// Of several servers of one store one tells, or everybody would be told several times.
    leads: bool,
}

impl Alerts {
    /// Starts the sinks, whose tasks end with the server. `leads`: nobody is elected, so this one tells.
    pub(crate) fn start(
        settings: &AlertSettings,
        leads: bool,
        events: Arc<Events>,
        notified: Notified,
        stopping: &CancellationToken,
    ) -> Result<Self, TlsError> {
        let (sinks, tasks) = Sinks::start(settings, notified, stopping)?;
        let state = Mutex::new(Told { board: Board::default(), leads });
        Ok(Self { state, events, sinks, tasks: Mutex::new(tasks) })
    }

    /// The server ends: waits until those who are told have been told, or took too long.
    pub(crate) async fn ended(&self) {
        let tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        for task in tasks {
            let _ = task.await;
        }
    }

    /// Everything that one source finds to hold at this moment: what it named before and names no longer is over.
    pub(crate) fn holding(&self, source: &'static str, conditions: Vec<Condition>) {
        self.change(|board| board.holding(source, conditions, wall_ms()));
    }

    /// Something that happened once, and does not last.
    pub(crate) fn happened(&self, condition: Condition) {
        self.change(|board| board.happened(condition, wall_ms()).into_iter().collect());
    }

    /// What a client told of itself.
    pub(crate) fn told_by_a_client(&self, event: &LockEvent) {
        let Some((kind, detail)) = event.alert() else { return };
        let (name, owner) = (&event.name, &event.owner);
        let (kind, text) = match kind {
            "lua_script_error" => {
                ("lua_script_error", format!("the script that releases {name} (held by {owner}) failed: {detail}"))
            }
            "gpu_lock_emergency_release" => {
                let text = format!(
                    "{name} (held by {owner}) was released by emergency, because the usual ways failed: {detail}"
                );
                ("gpu_lock_emergency_release", text)
            }
            "release_journalled" => {
                let text = format!(
                    "{name} (held by {owner}) could not be released by any means, and stands in a journal: {detail}"
                );
                ("release_journalled", text)
            }
            // Of a newer version, which this one cannot put into words.
            _ => return,
        };
        let about = Condition {
            name: LockName::new(name).ok(),
            owner: Some(owner.clone()),
            holder_id: Some(event.holder_id.clone()),
            ..Condition::new(kind, Level::Critical, text)
        };
        self.happened(about);
    }

    /// Whether this server is the one that tells. One that takes over tells what fires: whoever told before may not
    /// have come to it.
    pub(crate) fn lead(&self, leads: bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut state.leads, leads) != leads && leads {
            for alert in state.board.firing() {
                self.sinks.tell(&Arc::new(Notice::new(State::Firing, &alert)));
            }
        }
    }

    pub(crate) fn leads(&self) -> bool {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).leads
    }

    /// How many fire.
    pub(crate) fn count(&self, level: Level) -> usize {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).board.count(level)
    }

    /// Time has passed.
    fn tick(&self) {
        self.change(|board| board.tick(wall_ms()));
    }

    fn change(&self, change: impl FnOnce(&mut Board) -> Vec<Notice>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // Told inside the lock, so that nobody hears of an end before its beginning; telling never waits.
        for notice in change(&mut state.board) {
            let notice = Arc::new(notice);
            self.events.alert(notice.clone());
            if state.leads {
                self.sinks.tell(&notice);
            }
        }
    }
}

/// A line in the log.
fn log(notice: &Notice) {
    let Notice { state, alert, .. } = notice;
    let (state, kind, level) = (sinks::word(*state), alert.kind, alert.level.as_str());
    let (name, owner, holder_id, value) =
        (alert.name.as_deref(), alert.owner.as_deref(), alert.holder_id.as_deref(), alert.value);
    let message = &alert.message;
    match (notice.state, alert.level) {
        (State::Resolved, _) => {
            tracing::info!(target: "leasehold_server::alerts", alert = kind, state, level, name, owner, holder_id, value, "{message}");
        }
        (State::Firing, Level::Warning) => {
            tracing::warn!(target: "leasehold_server::alerts", alert = kind, state, level, name, owner, holder_id, value, "{message}");
        }
        (State::Firing, Level::Critical) => {
            tracing::error!(target: "leasehold_server::alerts", alert = kind, state, level, name, owner, holder_id, value, "{message}");
        }
    }
}

/// Alerts.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct AlertsPage {
    /// Those that fire, the worst and newest first; then those that resolved in the last six hours, newest first.
    alerts: Vec<Alert>,
}

/// What is the matter, and what was
#[utoipa::path(get, path = "/api/v1/alerts", tag = "alerts", responses((status = 200, body = AlertsPage)))]
pub(crate) async fn list(Shared(app): Shared<App>) -> Json<AlertsPage> {
    let state = app.alerts.state.lock().unwrap_or_else(PoisonError::into_inner);
    let alerts = state.board.firing().into_iter().chain(state.board.resolved().cloned()).collect();
    Json(AlertsPage { alerts })
}
