//! The messages that the server pushes to this process, each stamped with a moment before it was written.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use super::client::{PushHandler, Value};
use super::push_stamp::PushStamp;
use crate::clock::Moment;
use crate::facts::{Fence, Token};
use crate::store::{Grant, Push, PushSender, StoreError, StoreErrorKind};

/// The inbox of one connection. A new connection gets a new one, so that a stamp never comes from another stream.
pub(super) struct Inbox {
    stamp: PushStamp,
    /// Number of the newest probe that was received.
    newest_received: AtomicU64,
    probe_notify: Notify,
    highest_fence: Arc<AtomicU64>,
    pushes: PushSender,
    /// Pushes that were read. They are delivered when the connection can be used again.
    undelivered: Mutex<Vec<Push>>,
}

impl Inbox {
    pub(super) fn new(highest_fence: Arc<AtomicU64>, pushes: PushSender) -> Self {
        Self {
            stamp: PushStamp::default(),
            newest_received: AtomicU64::new(0),
            probe_notify: Notify::new(),
            highest_fence,
            pushes,
            undelivered: Mutex::default(),
        }
    }

    /// Registers a probe that is about to be sent.
    pub(super) fn expect_probe(&self, number: u64, sent_at: Moment) {
        self.stamp.probe_sent(number, sent_at);
    }

    /// Whether any probe has been received on this connection.
    pub(super) fn has_received_probe(&self) -> bool {
        self.newest_received.load(Ordering::Acquire) > 0
    }

    /// Waits until the probe with this number, or a later one, has been received.
    pub(super) async fn probe_received(&self, number: u64) {
        loop {
            let next = self.probe_notify.notified();
            if self.newest_received.load(Ordering::Acquire) >= number {
                return;
            }
            next.await;
        }
    }

    fn message(&self, text: &str) {
        if let Some(number) = text.strip_prefix("E ").and_then(|n| n.parse().ok()) {
            self.stamp.probe_received(number);
            self.newest_received.fetch_max(number, Ordering::AcqRel);
            self.probe_notify.notify_waiters();
            return;
        }
        // Any client may publish to the channel; what is not a message of ours is ignored.
        let Some(push) = parse(text, self.stamp.moment()) else { return };
        if let Push::Granted { grant: Grant { fence: Some(fence), .. }, .. } = &push {
            self.highest_fence.fetch_max(fence.get(), Ordering::AcqRel);
        }
        self.undelivered.lock().unwrap_or_else(PoisonError::into_inner).push(push);
    }
}

impl PushHandler for Inbox {
    fn answered(&self, asked_at: Moment) {
        self.stamp.answered(asked_at);
    }

    fn delivered(&self) {
        let pushes = std::mem::take(&mut *self.undelivered.lock().unwrap_or_else(PoisonError::into_inner));
        pushes.into_iter().for_each(|push| self.pushes.send(push));
    }

    fn push(&self, push: &[Value]) -> Result<(), StoreError> {
        match push {
            [Value::Bulk(kind), _, Value::Bulk(text)] if kind == b"smessage" => {
                self.message(&String::from_utf8_lossy(text));
                Ok(())
            }
            [Value::Bulk(kind), ..] if kind == b"sunsubscribe" => {
                Err(StoreError::new(StoreErrorKind::Unreachable, "the server ended our subscription"))
            }
            _ => Ok(()),
        }
    }
}

fn parse(text: &str, asked_at: Moment) -> Option<Push> {
    let (kind, rest) = text.split_once(' ')?;
    let (token, rest) = rest.split_once(' ').unwrap_or((rest, ""));
    let token = Token::parse(token).ok()?;
    let millis = |digits: &str| digits.parse().ok().map(Duration::from_millis);
    Some(match kind {
        "G" => {
            let (fence, lasts) = rest.split_once(' ')?;
            let fence = Some(Fence::new(fence.parse().ok()?));
            Push::Granted { token, grant: Grant { fence, asked_at, lasts: millis(lasts)? } }
        }
        "N" => Push::LookAgain { token, after: millis(rest)? },
        "R" => Push::Revoked { token },
        "F" => Push::Finish { token, reason: rest.to_owned() },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;
    use crate::store::pushes::Channel;

    fn inbox() -> (Inbox, UnboundedReceiver<Push>) {
        let (sender, received) = unbounded_channel();
        let pushes = PushSender::new();
        pushes.attach(Arc::new(Channel(sender)));
        (Inbox::new(Arc::default(), pushes), received)
    }

    fn at(ms: u64) -> Moment {
        Moment::from_boot(Duration::from_millis(ms))
    }

    fn says(inbox: &Inbox, text: &str) {
        let push = ["smessage", "inbox", text].map(|part| Value::Bulk(part.into()));
        inbox.push(&push).expect("heard");
        inbox.delivered();
    }

    #[test]
    fn a_grant_counts_from_the_newest_answered_command() {
        let (inbox, mut received) = inbox();
        let token = Token::random();
        inbox.answered(at(500));
        inbox.answered(at(300));
        says(&inbox, &format!("G {} 0001700000000000 2000", token.reveal()));
        let grant =
            Grant { fence: Some(Fence::new(1_700_000_000_000)), asked_at: at(500), lasts: Duration::from_secs(2) };
        assert_eq!(received.try_recv(), Ok(Push::Granted { token, grant }));
        assert_eq!(inbox.highest_fence.load(Ordering::Acquire), 1_700_000_000_000);
    }

    #[test]
    fn a_probe_counts_from_its_own_sending_and_an_old_one_not_at_all() {
        let (inbox, mut received) = inbox();
        inbox.answered(at(100));
        inbox.expect_probe(7, at(900));
        says(&inbox, "E 6");
        assert_eq!(inbox.stamp.moment(), at(100));
        says(&inbox, "E 7");
        assert_eq!(inbox.stamp.moment(), at(900));
        assert!(received.try_recv().is_err());
    }

    #[test]
    fn other_messages_are_read_and_invalid_ones_are_ignored() {
        let (inbox, mut received) = inbox();
        let token = Token::random();
        let t = token.reveal();
        for nonsense in ["", "G", "G x 1 1", &format!("G {t} x 1"), &format!("X {t}"), "E x", &format!("N {t} -1")] {
            says(&inbox, nonsense);
        }
        says(&inbox, &format!("N {t} 1500"));
        says(&inbox, &format!("R {t}"));
        says(&inbox, &format!("F {t} a new release goes out"));
        let after = Duration::from_millis(1500);
        assert_eq!(received.try_recv(), Ok(Push::LookAgain { token: token.clone(), after }));
        assert_eq!(received.try_recv(), Ok(Push::Revoked { token: token.clone() }));
        assert_eq!(received.try_recv(), Ok(Push::Finish { token, reason: "a new release goes out".into() }));
        assert!(received.try_recv().is_err());
    }

    #[test]
    fn a_lost_subscription_ends_the_connection() {
        let (inbox, _received) = inbox();
        let push = [Value::Bulk("sunsubscribe".into()), Value::Bulk("inbox".into()), Value::Int(0)];
        assert_eq!(inbox.push(&push).expect_err("ended").kind(), StoreErrorKind::Unreachable);
    }
}
