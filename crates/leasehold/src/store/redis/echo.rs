//! Proves that messages arrive, and from a primary: while a process waits it sends itself a message now and then,
//! and near the head of a queue asks the server for its role. Further back the next question for the lock is soon
//! enough: it is a write, which a replica refuses.
//!
//! The role comes from HELLO without arguments, which every user may send that was let in, and which a writable
//! replica answers like any other. The message alone proves nothing about it: a replica passes it on as well.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::conn::{Conn, is_replica};
use super::link::{Link, State};
use super::resp::{Pipeline, Value};
use crate::clock::Moment;
use crate::facts::Ttl;
use crate::store::Push;

/// An echo that is not back after this is missing. With the pause before it, a waiter at the head of
/// its queue knows after a second that it may have missed its grant.
const PATIENCE: Duration = Duration::from_millis(500);
/// Waiters before this position are near the head of their queue.
const NEAR: usize = 8;
const EVERY_NEAR: Duration = Duration::from_millis(500);
const EVERY_FAR: Duration = Duration::from_secs(5);

/// Who of this process waits.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Waiting {
    pub(super) claims: usize,
    /// The best position among them.
    pub(super) nearest: usize,
    /// The shortest ttl among them.
    pub(super) shortest: Option<Ttl>,
}

/// How often to prove it: a thousand processes far back in a queue must not be a load.
pub(super) fn echo_every(shortest: Option<Ttl>, nearest: usize) -> Duration {
    if nearest >= NEAR {
        return EVERY_FAR;
    }
    shortest.map_or(EVERY_NEAR, |ttl| EVERY_NEAR.min(ttl.duration() / 4))
}

enum Heard {
    Yes,
    No,
    Broken,
}

/// Runs until the store is closed.
pub(super) async fn run(link: Arc<Link>, mut waiting: watch::Receiver<Waiting>) {
    let mut state = link.watch();
    let mut hearing = true;
    let mut number = 0;
    loop {
        let conn = match state.wait_for(|state| !matches!(state, State::Down(_))).await.as_deref() {
            Ok(State::Up(conn)) => conn.clone(),
            _ => return,
        };
        // At once on a new connection; then as long as somebody waits, or until it works again.
        loop {
            number += 1;
            let sent = Instant::now();
            let now = *waiting.borrow_and_update();
            let every = echo_every(now.shortest, now.nearest);
            match echo(&link, &conn, number, now.nearest < NEAR, every.max(PATIENCE)).await {
                Heard::Yes if !hearing => say(&link, &mut hearing, true),
                Heard::No if hearing => say(&link, &mut hearing, false),
                Heard::Yes | Heard::No => {}
                Heard::Broken => break,
            }
            if !next_is_due(&conn, &mut waiting, sent, hearing).await {
                break;
            }
        }
        // The link replaces it; until then this one is not to be found again.
        tokio::select! {
            () = link.stop.cancelled() => return,
            _ = state.changed() => {}
        }
    }
}

fn say(link: &Link, hearing: &mut bool, now: bool) {
    *hearing = now;
    // Nobody takes the messages: then nobody waits.
    let _ = link.tell.send(Push::Hearing(now));
    if !now {
        tracing::warn!("messages from the server do not arrive: waiters have to poll");
        let _ = link.tell.send(Push::Resync);
    }
}

async fn echo(link: &Link, conn: &Conn, number: u64, ask_role: bool, patience: Duration) -> Heard {
    if !conn.subscribed {
        return Heard::No;
    }
    let mut probe = Pipeline::with_capacity(2);
    probe.cmd("SPUBLISH").arg(&link.inbox).arg(format!("E {number}"));
    if ask_role {
        probe.cmd("HELLO");
    }
    conn.ear.expect_echo(number, Moment::now());
    let back = async {
        let replies = conn.ask_all(&probe).await.map(|answer| answer.reply);
        match replies.as_deref() {
            Ok([_, hello]) if is_replica(hello) => conn.leave_replica(),
            // Nobody hears us, not even we: the subscription is gone.
            Ok([Value::Int(0), ..]) if conn.ear.has_heard() => conn.break_off(),
            Ok([Value::Int(_), ..]) => conn.ear.heard(number).await,
            other => {
                tracing::debug!(answer = ?other, "no echo");
                std::future::pending::<()>().await;
            }
        }
    };
    tokio::select! {
        () = conn.broken() => Heard::Broken,
        back = timeout(patience, back) => match back {
            Ok(()) if conn.is_broken() => Heard::Broken,
            Ok(()) => Heard::Yes,
            Err(_) => Heard::No,
        },
    }
}

/// Waits until the next echo is due; `false` when the connection broke or the store is gone.
async fn next_is_due(conn: &Conn, waiting: &mut watch::Receiver<Waiting>, sent: Instant, hearing: bool) -> bool {
    loop {
        let now = *waiting.borrow_and_update();
        let due = match (now.claims > 0, hearing) {
            (true, _) => Some(sent + echo_every(now.shortest, now.nearest)),
            (false, false) => Some(sent + EVERY_FAR),
            (false, true) => None,
        };
        tokio::select! {
            () = conn.broken() => return false,
            () = async { sleep_until(due.unwrap_or(sent)).await }, if due.is_some() => return true,
            changed = waiting.changed() => if changed.is_err() { return false },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_head_of_a_queue_proves_it_more_often() {
        let ttl = |ms| Some(Ttl::new(Duration::from_millis(ms)).expect("valid"));
        assert_eq!(echo_every(None, 0), Duration::from_millis(500));
        assert_eq!(echo_every(ttl(30_000), 0), Duration::from_millis(500));
        assert_eq!(echo_every(ttl(1_000), 7), Duration::from_millis(250));
        assert_eq!(echo_every(ttl(1_000), 8), Duration::from_secs(5));
    }
}
