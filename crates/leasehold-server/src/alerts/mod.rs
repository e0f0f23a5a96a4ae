//! Alerts: what is the matter, from when until when, and who is told.
//!
//! | file | what it is about |
//! |---|---|
//! | `condition` | what those who look report |
//! | `board` | which alerts fire, since when, which have resolved; pure |
//! | `rules` | what the fleet's counters say; pure |
//! | `watch` | looking: counters, store, journal, settings of the store |
//! | `shared` | what the servers of one store leave to each other |
//! | `settings` | the section `alerts` of the configuration |
//! | `sinks`, `webhook`, `target`, `command` | who is told, and how |

mod board;
mod command;
mod condition;
mod rules;
mod settings;
mod shared;
mod sinks;
mod target;
mod watch;
mod webhook;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Json;
use axum::extract::State as Shared;
use leasehold::{LockEvent, LockName};
use serde::Serialize;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub(crate) use board::{Alert, Notice, State};
pub(crate) use condition::{Condition, Level, Source};
pub(crate) use rules::EMERGENCY_RATE;
pub use settings::{AlertCommand, AlertLevel, AlertSettings, CommandLine, Secret, Webhook, WebhookUrl};
pub(crate) use shared::{share, take_over};
pub(crate) use watch::watch;

use board::{Board, Left};
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
    /// Something has begun or is over, or another server leads.
    changed: Notify,
}

struct Told {
    board: Board,
    /// Of several servers of one store one tells what is the same for all, or everybody would be told several times.
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
        Ok(Self { state, events, sinks, tasks: Mutex::new(tasks), changed: Notify::new() })
    }

    /// The server ends: waits until those who are told have been told, or took too long.
    pub(crate) async fn ended(&self) {
        let tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        for task in tasks {
            let _ = task.await;
        }
    }

    /// Everything that one source finds to hold at this moment: what it named before and names no longer is over.
    /// Of what is the same for all servers only the one that leads says what holds: the others show what it says.
    pub(crate) fn holding(&self, source: Source, conditions: Vec<Condition>) {
        let mut state = self.state();
        if state.leads || source.is_local() {
            let notices = state.board.holding(source, conditions, wall_ms());
            self.tell(&mut state, notices);
        }
    }

    /// Something that happened once, and does not last.
    pub(crate) fn happened(&self, condition: Condition) {
        let mut state = self.state();
        let notices = state.board.happened(condition, wall_ms()).into_iter().collect();
        self.tell(&mut state, notices);
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

    /// From now on this server is the one that tells, and goes on where another one stopped: what that one told is not
    /// told again, and what nobody came to tell is.
    fn begin_to_lead(&self, left: Vec<Left>) {
        let mut state = self.state();
        let (begun, untold) = state.board.take_over(left);
        state.leads = true;
        for notice in begun {
            self.events.alert(Arc::new(notice));
        }
        for alert in untold {
            self.sinks.tell(&Arc::new(Notice::new(State::Firing, &alert)));
        }
        state.board.told(|_| true);
        self.changed.notify_one();
    }

    /// Another one leads, or nobody. What fires goes on firing, until whoever leads says otherwise.
    pub(crate) fn end_to_lead(&self) {
        self.state().leads = false;
    }

    pub(crate) fn leads(&self) -> bool {
        self.state().leads
    }

    /// What the next one that leads has to know; `None` when this one does not lead.
    fn to_leave(&self) -> Option<Vec<Left>> {
        let state = self.state();
        state.leads.then(|| state.board.left())
    }

    /// Shows what another one told, while this one does not lead.
    fn show(&self, left: Vec<Left>) {
        let mut state = self.state();
        if !state.leads {
            let notices = state.board.mirror(left, wall_ms());
            for notice in notices {
                self.events.alert(Arc::new(notice));
            }
        }
    }

    /// What one source says to hold.
    pub(crate) fn of(&self, source: Source) -> Vec<Alert> {
        self.state().board.of(source)
    }

    /// How many fire.
    pub(crate) fn count(&self, level: Level) -> usize {
        self.state().board.count(level)
    }

    /// Time has passed.
    fn tick(&self) {
        let mut state = self.state();
        let notices = state.board.tick(wall_ms());
        self.tell(&mut state, notices);
    }

    /// Told inside the lock, so that nobody hears of an end before its beginning; telling never waits.
    fn tell(&self, state: &mut Told, notices: Vec<Notice>) {
        if notices.is_empty() {
            return;
        }
        let leads = state.leads;
        for notice in notices {
            let notice = Arc::new(notice);
            self.events.alert(notice.clone());
            if leads || notice.is_local {
                self.sinks.tell(&notice);
            }
        }
        state.board.told(|source| leads || source.is_some_and(Source::is_local));
        self.changed.notify_one();
    }

    fn state(&self) -> MutexGuard<'_, Told> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A line in the log.
fn log(notice: &Notice) {
    let Notice { state, alert, .. } = notice;
    let (state, kind, level) = (sinks::word(*state), &*alert.kind, alert.level.as_str());
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
    let state = app.alerts.state();
    let alerts = state.board.firing().into_iter().chain(state.board.resolved().cloned()).collect();
    Json(AlertsPage { alerts })
}
