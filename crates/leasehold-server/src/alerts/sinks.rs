//! The sinks that are notified. Each has its own task and queue: a slow sink does not delay the others, and a stuck one
//! loses a bounded number of notifications.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::alert::{AlertState, Notice};
use super::command;
use super::condition::Level;
use super::notifications::NotificationCounter;
use super::settings::{AlertCommand, AlertSettings};
use super::webhook::{self, WebhookSender};
use crate::tls::TlsError;

/// The most notifications that wait for one sink. Further ones are dropped, logged and counted.
const QUEUE_LEN: usize = 256;
/// How long pending notifications may take when the server stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// All configured sinks.
pub(super) struct Sinks {
    log: bool,
    level: Level,
    queues: Vec<(&'static str, mpsc::Sender<Arc<Notice>>)>,
    notifications: NotificationCounter,
}

/// A sink with a task of its own.
enum Sink {
    Webhook(WebhookSender),
    Command(AlertCommand),
}

impl Sinks {
    /// Starts a task for each sink.
    ///
    /// # Errors
    /// Fails if the certificate authorities for a webhook cannot be read.
    pub(super) fn start(
        settings: &AlertSettings,
        notifications: NotificationCounter,
        stopping: &CancellationToken,
    ) -> Result<(Self, Vec<JoinHandle<()>>), TlsError> {
        let webhook = settings.webhook.as_ref().map(WebhookSender::new).transpose()?.map(Sink::Webhook);
        let command = settings.command.clone().map(Sink::Command);
        let (mut queues, mut tasks) = (Vec::new(), Vec::new());
        for sink in webhook.into_iter().chain(command) {
            let (send, receive) = mpsc::channel(QUEUE_LEN);
            queues.push((sink.name(), send));
            tasks.push(tokio::spawn(run(sink, receive, notifications.clone(), stopping.clone())));
        }
        Ok((Self { log: settings.log, level: settings.level.0, queues, notifications }, tasks))
    }

    /// Notifies all sinks. Never waits.
    pub(super) fn notify(&self, notice: &Arc<Notice>) {
        if self.log {
            log(notice);
        }
        if notice.alert.level < self.level {
            return;
        }
        for (sink, queue) in &self.queues {
            if queue.try_send(notice.clone()).is_err() {
                tracing::error!(
                    sink,
                    alert = &*notice.alert.kind,
                    "an alert was dropped: its queue is full, or the server is stopping"
                );
                self.notifications.count(sink, "dropped");
            }
        }
    }
}

impl Sink {
    fn name(&self) -> &'static str {
        match self {
            Self::Webhook(_) => "webhook",
            Self::Command(_) => "command",
        }
    }
}

/// Sends one notification after the other, so that "resolved" never precedes "firing".
async fn run(
    sink: Sink,
    mut queue: mpsc::Receiver<Arc<Notice>>,
    notifications: NotificationCounter,
    stopping: CancellationToken,
) {
    loop {
        let notice = tokio::select! {
            biased;
            notice = queue.recv() => notice,
            () = stopping.cancelled() => break,
        };
        let Some(notice) = notice else { return };
        let sent = stopping.run_until_cancelled(send(&sink, &notice, &notifications)).await;
        if sent.is_none() {
            // The attempt was interrupted by the shutdown: make one more.
            let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, try_send_once(&sink, &notice, &notifications)).await;
            break;
        }
    }
    queue.close();
    let rest = async {
        while let Some(notice) = queue.recv().await {
            try_send_once(&sink, &notice, &notifications).await;
        }
    };
    let _ = tokio::time::timeout(SHUTDOWN_TIMEOUT, rest).await;
}

/// Sends a notification, with retries while they make sense.
async fn send(sink: &Sink, notice: &Notice, notifications: &NotificationCounter) {
    let retries = match sink {
        Sink::Webhook(webhook) => webhook.retries(),
        Sink::Command(_) => 0,
    };
    for tries in 0..=retries {
        if try_send_once(sink, notice, notifications).await {
            return;
        }
        if tries < retries {
            tokio::time::sleep(webhook::backoff(tries)).await;
        }
    }
    let state = notice.state;
    tracing::error!(sink = sink.name(), alert = &*notice.alert.kind, ?state, "all attempts to deliver an alert failed");
    notifications.count(sink.name(), "given_up");
}

/// Makes one attempt. Returns whether nothing is left to do.
async fn try_send_once(sink: &Sink, notice: &Notice, notifications: &NotificationCounter) -> bool {
    let (name, alert) = (sink.name(), &*notice.alert.kind);
    let retryable = match sink {
        Sink::Webhook(webhook) => match webhook.send(notice).await {
            Ok(()) => None,
            Err(error) => {
                let retryable = error.is_retryable();
                let to = webhook.display_url();
                tracing::warn!(sink = name, to, alert, %error, again = retryable, "an alert was not delivered");
                Some(retryable)
            }
        },
        Sink::Command(settings) => match command::run(settings, notice).await {
            Ok(()) => None,
            Err(error) => {
                tracing::error!(sink = name, alert, %error, "the command of an alert failed");
                Some(false)
            }
        },
    };
    match retryable {
        None => notifications.count(name, "sent"),
        Some(_) => notifications.count(name, "failed"),
    }
    retryable != Some(true)
}

/// Logs an alert.
fn log(notice: &Notice) {
    let Notice { state, alert, .. } = notice;
    let (state, kind, level) = (state.as_str(), &*alert.kind, alert.level.as_str());
    let (name, owner, holder_id, value) =
        (alert.name.as_deref(), alert.owner.as_deref(), alert.holder_id.as_deref(), alert.value);
    let message = &alert.message;
    match (notice.state, alert.level) {
        (AlertState::Resolved, _) => {
            tracing::info!(target: "leasehold_server::alerts", alert = kind, state, level, name, owner, holder_id, value, "{message}");
        }
        (AlertState::Firing, Level::Warning) => {
            tracing::warn!(target: "leasehold_server::alerts", alert = kind, state, level, name, owner, holder_id, value, "{message}");
        }
        (AlertState::Firing, Level::Critical) => {
            tracing::error!(target: "leasehold_server::alerts", alert = kind, state, level, name, owner, holder_id, value, "{message}");
        }
    }
}
