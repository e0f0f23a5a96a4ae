//! What a connection hears without having asked, and when it was known to hear.
//!
//! Called by the connection's carrier: replies and pushes share one ordered stream, so a
//! push was written after every command whose reply was read before it. The send time of the newest
//! such command is a moment before the pushed lease began.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};

use super::resp::Value;
use super::wire::Hear;
use crate::clock::Moment;
use crate::facts::{Fence, Token};
use crate::store::{Grant, Push, StoreError, StoreErrorKind};

/// One connection's ear. A new connection has a new one: no stamp of an old stream is ever used for
/// a push of another.
pub(super) struct Ear {
    /// Send time of the newest command whose reply was read, in ns of the boot clock.
    newest_ns: AtomicU64,
    /// The echo that is under way, by number and send time.
    echo: Mutex<(u64, u64)>,
    /// The newest echo that came back.
    heard: AtomicU64,
    heard_one: Notify,
    seen: Arc<AtomicU64>,
    tell: mpsc::UnboundedSender<Push>,
}

impl Ear {
    pub(super) fn new(seen: Arc<AtomicU64>, tell: mpsc::UnboundedSender<Push>) -> Self {
        Self {
            newest_ns: AtomicU64::new(0),
            echo: Mutex::new((0, 0)),
            heard: AtomicU64::new(0),
            heard_one: Notify::new(),
            seen,
            tell,
        }
    }

    /// An echo is about to be sent.
    pub(super) fn expect_echo(&self, number: u64, sent_at: Moment) {
        *self.echo.lock().unwrap_or_else(PoisonError::into_inner) = (number, nanos(sent_at));
    }

    /// Whether any echo has come back on this connection.
    pub(super) fn has_heard(&self) -> bool {
        self.heard.load(Ordering::Acquire) > 0
    }

    /// Waits until an echo has come back.
    pub(super) async fn heard(&self, number: u64) {
        loop {
            let next = self.heard_one.notified();
            if self.heard.load(Ordering::Acquire) >= number {
                return;
            }
            next.await;
        }
    }

    fn message(&self, text: &str) {
        if let Some(number) = text.strip_prefix("E ").and_then(|n| n.parse().ok()) {
            // Number and send time belong together: the time of a later echo would prove too much.
            let (expected, sent_ns) = *self.echo.lock().unwrap_or_else(PoisonError::into_inner);
            if number == expected {
                self.newest_ns.fetch_max(sent_ns, Ordering::AcqRel);
            }
            self.heard.fetch_max(number, Ordering::AcqRel);
            self.heard_one.notify_waiters();
            return;
        }
        let asked_at = Moment::from_boot(Duration::from_nanos(self.newest_ns.load(Ordering::Acquire)));
        // Whatever else is published to the inbox is not for us.
        let Some(push) = parse(text, asked_at) else { return };
        if let Push::Granted { grant: Grant { fence: Some(fence), .. }, .. } = &push {
            self.seen.fetch_max(fence.get(), Ordering::AcqRel);
        }
        // Nobody takes the messages: then nobody waits.
        let _ = self.tell.send(push);
    }
}

impl Hear for Ear {
    fn answered(&self, asked_at: Moment) {
        self.newest_ns.fetch_max(nanos(asked_at), Ordering::AcqRel);
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

fn nanos(moment: Moment) -> u64 {
    u64::try_from(moment.since_boot().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ear() -> (Ear, mpsc::UnboundedReceiver<Push>) {
        let (tell, told) = mpsc::unbounded_channel();
        (Ear::new(Arc::default(), tell), told)
    }

    fn at(ms: u64) -> Moment {
        Moment::from_boot(Duration::from_millis(ms))
    }

    fn says(ear: &Ear, text: &str) {
        let push = ["smessage", "inbox", text].map(|part| Value::Bulk(part.into()));
        ear.push(&push).expect("heard");
    }

    #[test]
    fn a_grant_counts_from_the_newest_answered_command() {
        let (ear, mut told) = ear();
        let token = Token::random();
        ear.answered(at(500));
        ear.answered(at(300));
        says(&ear, &format!("G {} 0001700000000000 2000", token.reveal()));
        let grant =
            Grant { fence: Some(Fence::new(1_700_000_000_000)), asked_at: at(500), lasts: Duration::from_secs(2) };
        assert_eq!(told.try_recv(), Ok(Push::Granted { token, grant }));
        assert_eq!(ear.seen.load(Ordering::Acquire), 1_700_000_000_000);
    }

    #[test]
    fn an_echo_counts_from_its_own_sending_and_an_old_one_not_at_all() {
        let (ear, mut told) = ear();
        ear.answered(at(100));
        ear.expect_echo(7, at(900));
        says(&ear, "E 6");
        assert_eq!(ear.newest_ns.load(Ordering::Acquire), 100_000_000);
        says(&ear, "E 7");
        assert_eq!(ear.newest_ns.load(Ordering::Acquire), 900_000_000);
        assert!(told.try_recv().is_err());
    }

    #[test]
    fn other_messages_are_read_and_nonsense_is_not() {
        let (ear, mut told) = ear();
        let token = Token::random();
        let t = token.reveal();
        for nonsense in ["", "G", "G x 1 1", &format!("G {t} x 1"), &format!("X {t}"), "E x", &format!("N {t} -1")] {
            says(&ear, nonsense);
        }
        says(&ear, &format!("N {t} 1500"));
        says(&ear, &format!("R {t}"));
        says(&ear, &format!("F {t} a new release goes out"));
        let after = Duration::from_millis(1500);
        assert_eq!(told.try_recv(), Ok(Push::LookAgain { token: token.clone(), after }));
        assert_eq!(told.try_recv(), Ok(Push::Revoked { token: token.clone() }));
        assert_eq!(told.try_recv(), Ok(Push::Finish { token, reason: "a new release goes out".into() }));
        assert!(told.try_recv().is_err());
    }

    #[test]
    fn a_lost_subscription_ends_the_connection() {
        let (ear, _told) = ear();
        let push = [Value::Bulk("sunsubscribe".into()), Value::Bulk("inbox".into()), Value::Int(0)];
        assert_eq!(ear.push(&push).expect_err("ended").kind(), StoreErrorKind::Unreachable);
    }
}
