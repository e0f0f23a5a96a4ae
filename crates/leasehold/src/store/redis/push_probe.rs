//! Checks that pushes arrive, and that they come from a primary. While a claim of this process waits, it publishes a
//! probe to its own inbox at intervals. Near the head of a queue it also asks the server for its role. Further back,
//! the waiter's next acquire is soon enough: it is a write, which a replica refuses.
//!
//! The role comes from HELLO without arguments, which every authenticated user may send, and which a writable replica
//! answers correctly too. The probe alone does not show the role, because a replica delivers it as well.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;

use super::client::{ConnectionState, Pipeline, RedisClient, Session, Value, is_replica};
use crate::clock::{Moment, sleep_until};
use crate::facts::Ttl;
use crate::store::Push;

/// A probe that has not arrived after this is missing. With the interval before it, a waiter at the head of its queue
/// knows after a second that it may have missed its grant.
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);
/// Waiters before this position count as near the head of their queue.
const NEAR: usize = 8;
const EVERY_NEAR: Duration = Duration::from_millis(500);
const EVERY_FAR: Duration = Duration::from_secs(5);

/// The claims of this process that wait in queues.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct WaitingClaims {
    pub(super) count: usize,
    /// The position of the claim that is closest to the head of its queue.
    pub(super) nearest: usize,
    /// The shortest ttl among the claims.
    pub(super) shortest: Option<Ttl>,
}

/// The interval between probes. It is long far back in a queue, where a thousand processes must not load the server.
pub(super) fn probe_every(shortest: Option<Ttl>, nearest: usize) -> Duration {
    if nearest >= NEAR {
        return EVERY_FAR;
    }
    shortest.map_or(EVERY_NEAR, |ttl| EVERY_NEAR.min(ttl.duration() / 4))
}

enum ProbeResult {
    Received,
    Missing,
    Broken,
}

/// Runs until the store is closed.
pub(super) async fn run(client: Arc<RedisClient>, mut waiting: watch::Receiver<WaitingClaims>) {
    let mut state = client.watch();
    let mut arriving = true;
    let mut number = 0;
    loop {
        let session = match state.wait_for(|state| !matches!(state, ConnectionState::Down(_))).await.as_deref() {
            Ok(ConnectionState::Up(session)) => session.clone(),
            _ => return,
        };
        // Probes at once on a new session, then for as long as a claim waits or pushes do not arrive.
        loop {
            number += 1;
            let sent_at = Moment::now();
            let now = *waiting.borrow_and_update();
            let every = probe_every(now.shortest, now.nearest);
            match probe(&client, &session, number, now.nearest < NEAR, every.max(PROBE_TIMEOUT)).await {
                ProbeResult::Received if !arriving => report(&client, &mut arriving, true),
                ProbeResult::Missing if arriving => report(&client, &mut arriving, false),
                ProbeResult::Received | ProbeResult::Missing => {}
                ProbeResult::Broken => break,
            }
            if !next_is_due(&session, &mut waiting, sent_at, arriving).await {
                break;
            }
        }
        // The client replaces the session. Until then, do not pick up the broken one again.
        tokio::select! {
            () = client.stop.cancelled() => return,
            _ = state.changed() => {}
        }
    }
}

fn report(client: &RedisClient, arriving: &mut bool, now: bool) {
    *arriving = now;
    client.pushes.send(Push::Hearing(now));
    if !now {
        tracing::warn!("pushes from the server do not arrive; waiters poll instead");
        client.pushes.send(Push::Resync);
    }
}

async fn probe(client: &RedisClient, session: &Session, number: u64, ask_role: bool, limit: Duration) -> ProbeResult {
    if !session.subscribed {
        return ProbeResult::Missing;
    }
    let mut commands = Pipeline::with_capacity(2);
    commands.cmd("SPUBLISH").arg(&client.inbox_channel).arg(format!("E {number}"));
    if ask_role {
        commands.cmd("HELLO");
    }
    session.inbox.expect_probe(number, Moment::now());
    let received = async {
        let replies = session.send_all(&commands).await.map(|answer| answer.reply);
        match replies.as_deref() {
            Ok([_, hello]) if is_replica(hello) => session.abandon_replica(),
            // No subscriber received the probe, not even this process: the subscription is gone.
            Ok([Value::Int(0), ..]) if session.inbox.has_received_probe() => session.abort(),
            Ok([Value::Int(_), ..]) => session.inbox.probe_received(number).await,
            other => {
                tracing::debug!(answer = ?other, "the push probe failed");
                std::future::pending::<()>().await;
            }
        }
    };
    tokio::select! {
        () = session.broken() => ProbeResult::Broken,
        received = timeout(limit, received) => match received {
            Ok(()) if session.is_broken() => ProbeResult::Broken,
            Ok(()) => ProbeResult::Received,
            Err(_) => ProbeResult::Missing,
        },
    }
}

/// Waits until the next probe is due; `false` when the session broke or the store was dropped.
async fn next_is_due(
    session: &Session,
    waiting: &mut watch::Receiver<WaitingClaims>,
    sent_at: Moment,
    arriving: bool,
) -> bool {
    loop {
        let now = *waiting.borrow_and_update();
        let due = match (now.count > 0, arriving) {
            (true, _) => Some(sent_at + probe_every(now.shortest, now.nearest)),
            (false, false) => Some(sent_at + EVERY_FAR),
            (false, true) => None,
        };
        tokio::select! {
            () = session.broken() => return false,
            () = sleep_until(due) => return true,
            changed = waiting.changed() => if changed.is_err() { return false },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_head_of_a_queue_probes_more_often() {
        let ttl = |ms| Some(Ttl::new(Duration::from_millis(ms)).expect("valid"));
        assert_eq!(probe_every(None, 0), Duration::from_millis(500));
        assert_eq!(probe_every(ttl(30_000), 0), Duration::from_millis(500));
        assert_eq!(probe_every(ttl(1_000), 7), Duration::from_millis(250));
        assert_eq!(probe_every(ttl(1_000), 8), Duration::from_secs(5));
    }
}
