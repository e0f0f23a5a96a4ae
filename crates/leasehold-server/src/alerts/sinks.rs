//! Those who are told, each by a task and a queue of its own: one that is slow keeps nobody else waiting, and one that
//! is stuck costs a bounded number of messages.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::board::{Notice, State};
use super::condition::Level;
use super::settings::{AlertCommand, AlertSettings};
use super::webhook::{self, Sender};
use super::{command, log};
use crate::metrics::Notified;
use crate::tls::TlsError;

/// Messages that wait for one sink. Beyond it they are not sent, which is logged and counted.
const QUEUE: usize = 256;
/// When the server ends, how long what waits may still take.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// All of them.
pub(super) struct Sinks {
    log: bool,
    level: Level,
    queues: Vec<(&'static str, mpsc::Sender<Arc<Notice>>)>,
    notified: Notified,
}

/// What carries it out.
enum Sink {
    Webhook(Sender),
    Command(AlertCommand),
}

impl Sinks {
    /// Starts a task for each.
    ///
    /// # Errors
    /// When the authorities a webhook is to be trusted by cannot be read.
    pub(super) fn start(
        settings: &AlertSettings,
        notified: Notified,
        stopping: &CancellationToken,
    ) -> Result<(Self, Vec<JoinHandle<()>>), TlsError> {
        let webhook = settings.webhook.as_ref().map(Sender::new).transpose()?.map(Sink::Webhook);
        let command = settings.command.clone().map(Sink::Command);
        let (mut queues, mut tasks) = (Vec::new(), Vec::new());
        for sink in webhook.into_iter().chain(command) {
            let (send, receive) = mpsc::channel(QUEUE);
            queues.push((sink.name(), send));
            tasks.push(tokio::spawn(work(sink, receive, notified.clone(), stopping.clone())));
        }
        Ok((Self { log: settings.log, level: settings.level.0, queues, notified }, tasks))
    }

    /// Tells everybody. Never waits.
    pub(super) fn tell(&self, notice: &Arc<Notice>) {
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
                    "an alert is not sent: too many wait, or the server ends"
                );
                self.notified.count(sink, "dropped");
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

/// Carries out one after the other, so that "resolved" never comes before "firing".
async fn work(sink: Sink, mut queue: mpsc::Receiver<Arc<Notice>>, notified: Notified, stopping: CancellationToken) {
    loop {
        let notice = tokio::select! {
            biased;
            notice = queue.recv() => notice,
            () = stopping.cancelled() => break,
        };
        let Some(notice) = notice else { return };
        let sent = stopping.run_until_cancelled(send(&sink, &notice, &notified)).await;
        if sent.is_none() {
            // Cut off in the middle: once more, below.
            let _ = tokio::time::timeout(LAST_WORDS, try_once(&sink, &notice, &notified)).await;
            break;
        }
    }
    queue.close();
    let rest = async {
        while let Some(notice) = queue.recv().await {
            try_once(&sink, &notice, &notified).await;
        }
    };
    let _ = tokio::time::timeout(LAST_WORDS, rest).await;
}

/// Until it is sent, or there is no sense in trying on.
async fn send(sink: &Sink, notice: &Notice, notified: &Notified) {
    let retries = match sink {
        Sink::Webhook(webhook) => webhook.retries(),
        Sink::Command(_) => 0,
    };
    for tries in 0..=retries {
        if try_once(sink, notice, notified).await {
            return;
        }
        if tries < retries {
            tokio::time::sleep(webhook::pause(tries)).await;
        }
    }
    let state = notice.state;
    tracing::error!(sink = sink.name(), alert = &*notice.alert.kind, ?state, "an alert was given up");
    notified.count(sink.name(), "given_up");
}

/// Whether nothing is left to be done.
async fn try_once(sink: &Sink, notice: &Notice, notified: &Notified) -> bool {
    let (name, alert) = (sink.name(), &*notice.alert.kind);
    let passing = match sink {
        Sink::Webhook(webhook) => match webhook.send(notice).await {
            Ok(()) => None,
            Err(error) => {
                let passing = error.is_passing();
                let to = webhook.shown();
                tracing::warn!(sink = name, to, alert, %error, again = passing, "an alert was not delivered");
                Some(passing)
            }
        },
        Sink::Command(settings) => match command::run(settings, notice).await {
            Ok(()) => None,
            Err(error) => {
                tracing::error!(sink = name, alert, %error, "an alert's command failed");
                Some(false)
            }
        },
    };
    match passing {
        None => notified.count(name, "sent"),
        Some(_) => notified.count(name, "failed"),
    }
    passing != Some(true)
}

/// For a name in the log.
pub(super) fn word(state: State) -> &'static str {
    match state {
        State::Firing => "firing",
        State::Resolved => "resolved",
    }
}
