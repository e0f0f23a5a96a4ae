//! The parts of this store that a simulation runs without a server: the inbox of a connection, and how often messages
//! are probed.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::client::{PushHandler, Value};
use super::inbox::Inbox;
use super::push_probe;
use crate::clock::Moment;
use crate::facts::Ttl;
use crate::machine::Message;
use crate::store::pushes::Channel;
use crate::store::{Push, PushSender};

/// The real [`Inbox`] of one connection.
pub(crate) struct SimulatedInbox {
    inbox: Inbox,
    received: RefCell<UnboundedReceiver<Push>>,
}

impl SimulatedInbox {
    pub(crate) fn new(highest_fence: Arc<AtomicU64>) -> Self {
        let (sender, received) = unbounded_channel();
        let pushes = PushSender::new();
        pushes.attach(Arc::new(Channel(sender)));
        Self { inbox: Inbox::new(highest_fence, pushes), received: RefCell::new(received) }
    }

    /// Records that the reply to a request sent at `asked_at` has been read.
    pub(crate) fn answered(&self, asked_at: Moment) {
        self.inbox.answered(asked_at);
    }

    pub(crate) fn expect_probe(&self, number: u64, sent_at: Moment) {
        self.inbox.expect_probe(number, sent_at);
    }

    pub(crate) fn has_received_probe(&self) -> bool {
        self.inbox.has_received_probe()
    }

    pub(crate) async fn probe_received(&self, number: u64) {
        self.inbox.probe_received(number).await;
    }

    /// Handles a message that has been read.
    pub(crate) fn message(&self, message: &Message) {
        self.read(&match message {
            Message::Granted { token, fence, lasts_ms } => format!("G {} {fence:016} {lasts_ms}", token.reveal()),
            Message::LookAgain { token, after_ms } => format!("N {} {after_ms}", token.reveal()),
            Message::Revoked { token } => format!("R {}", token.reveal()),
            Message::Finish { token, reason } => format!("F {} {reason}", token.reveal()),
        });
    }

    /// Handles a probe that has been read.
    pub(crate) fn probe(&self, number: u64) {
        self.read(&format!("E {number}"));
    }

    fn read(&self, text: &str) {
        let push = ["smessage", "inbox", text].map(|part| Value::Bulk(part.into()));
        self.inbox.push(&push).expect("a message");
    }

    /// Takes the messages after everything available has been read.
    pub(crate) fn delivered(&self) -> Vec<Push> {
        self.inbox.delivered();
        std::iter::from_fn(|| self.received.borrow_mut().try_recv().ok()).collect()
    }
}

/// Returns the interval between two probes.
pub(crate) fn probe_every(shortest: Option<Ttl>, nearest: usize) -> Duration {
    push_probe::probe_every(shortest, nearest)
}
