//! Supervises the session: detects that it broke, opens another one, and reports that pushes may have been missed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::super::RedisOptions;
use super::super::inbox::Inbox;
use super::address::Address;
use super::session::{Identity, Session};
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::facts::Fence;
use crate::store::{Push, PushSender, StoreError, StoreErrorKind};

/// The first and the longest delay between two attempts to connect. With these, a lease of two seconds survives an
/// outage of more than half its ttl, whenever the outage begins.
const RETRY_MIN: Duration = Duration::from_millis(10);
const RETRY_MAX: Duration = Duration::from_millis(200);
/// The delay after the server refused the connection.
const RETRY_REFUSED: Duration = Duration::from_secs(1);
/// A session that broke sooner than this is not replaced at once.
const SHORT_LIFE: Duration = Duration::from_secs(1);

/// A client that keeps one session with the server open.
pub(crate) struct RedisClient {
    pub(crate) address: Address,
    pub(crate) options: RedisOptions,
    pub(crate) inbox_channel: String,
    state: watch::Sender<ConnectionState>,
    pub(crate) pushes: PushSender,
    /// The highest fence that this process has seen.
    highest_fence: Arc<AtomicU64>,
    /// Whether every session so far could kill its predecessor.
    can_kill: AtomicBool,
    pub(crate) stop: CancellationToken,
    /// The id of the process that connected.
    pid: AtomicU32,
}

/// The state of the supervised session.
#[derive(Clone)]
pub(crate) enum ConnectionState {
    Up(Arc<Session>),
    /// No session, with the error of the last attempt.
    Down(StoreError),
    Closed,
}

impl RedisClient {
    /// Opens the first session, and keeps one open from then on.
    pub(crate) async fn connect(
        address: Address,
        options: RedisOptions,
        inbox_channel: String,
        pushes: PushSender,
    ) -> Result<Arc<Self>, StoreError> {
        let client = Arc::new(Self {
            address,
            options,
            inbox_channel,
            state: watch::Sender::new(ConnectionState::Down(StoreErrorKind::Unreachable.into())),
            pushes,
            highest_fence: Arc::default(),
            can_kill: AtomicBool::new(true),
            stop: CancellationToken::new(),
            pid: AtomicU32::new(std::process::id()),
        });
        let first = match client.open(None).await {
            Ok(session) => {
                client.state.send_replace(ConnectionState::Up(session.clone()));
                Some(session)
            }
            Err(error) if client.options.lazy_connect && error.is_passing() => {
                tracing::warn!(inbox = %client.inbox_channel, %error, "cannot connect yet; retrying");
                client.state.send_replace(ConnectionState::Down(error));
                None
            }
            Err(error) => return Err(error),
        };
        tokio::spawn(client.clone().supervise(first));
        Ok(client)
    }

    /// Returns the session. While there is none, waits for at most the response timeout.
    pub(crate) async fn session(&self) -> Result<Arc<Session>, StoreError> {
        // Checked first: a mutex that the parent held at the fork stays locked in the child.
        if self.is_forked() {
            return Err(StoreErrorKind::Forked.into());
        }
        if let Some(session) = self.current() {
            return Ok(session);
        }
        // Boxed because it is rare: otherwise the future of every request would have to hold it.
        Box::pin(self.wait_for_session()).await.map_err(StoreError::unsent)
    }

    async fn wait_for_session(&self) -> Result<Arc<Session>, StoreError> {
        let mut state = self.state.subscribe();
        let settled = state.wait_for(|state| match state {
            ConnectionState::Up(session) => !session.is_broken(),
            ConnectionState::Down(_) => false,
            ConnectionState::Closed => true,
        });
        match timeout(self.options.response_timeout, settled).await.map(|state| state.map(|s| s.clone())) {
            Ok(Ok(ConnectionState::Up(session))) => Ok(session),
            Ok(_) => Err(StoreErrorKind::Closed.into()),
            Err(_) => match &*self.state.borrow() {
                ConnectionState::Down(error) => Err(error.clone()),
                ConnectionState::Up(_) => Err(StoreErrorKind::Unreachable.into()),
                ConnectionState::Closed => Err(StoreErrorKind::Closed.into()),
            },
        }
    }

    /// Returns the session if there is one.
    pub(crate) fn current(&self) -> Option<Arc<Session>> {
        match &*self.state.borrow() {
            ConnectionState::Up(session) if !session.is_broken() => Some(session.clone()),
            _ => None,
        }
    }

    /// Subscribes to changes of the state.
    pub(crate) fn watch(&self) -> watch::Receiver<ConnectionState> {
        self.state.subscribe()
    }

    /// Whether no command sent on a broken connection can run after the next session is open.
    pub(crate) fn can_kill(&self) -> bool {
        self.can_kill.load(Ordering::Acquire)
    }

    /// The highest fence that this process has seen.
    pub(crate) fn highest_fence(&self) -> u64 {
        self.highest_fence.load(Ordering::Acquire)
    }

    pub(crate) fn observe_fence(&self, fence: Fence) {
        self.highest_fence.fetch_max(fence.get(), Ordering::AcqRel);
    }

    /// Whether this process was forked off the one that connected.
    pub(crate) fn is_forked(&self) -> bool {
        std::process::id() != self.pid.load(Ordering::Relaxed)
    }

    /// Makes the client believe that another process connected it.
    #[cfg(any(test, feature = "test-hooks"))]
    pub(crate) fn pretend_forked(&self, forked: bool) {
        let pid = std::process::id();
        self.pid.store(if forked { pid.wrapping_add(1) } else { pid }, Ordering::Relaxed);
    }

    /// Stops every task. The connection closes when its last request drops the session.
    pub(crate) fn close(&self) {
        self.stop.cancel();
        self.state.send_replace(ConnectionState::Closed);
    }

    async fn open(&self, previous: Option<&Identity>) -> Result<Arc<Session>, StoreError> {
        let inbox = Inbox::new(self.highest_fence.clone(), self.pushes.clone());
        let session =
            Session::open(&self.address, &self.options, inbox, &self.inbox_channel, self.highest_fence(), previous)
                .await?;
        self.can_kill.fetch_and(session.can_kill, Ordering::AcqRel);
        if !session.subscribed {
            // Sent before any task can wait for a push.
            self.pushes.send(Push::Hearing(false));
        }
        Ok(Arc::new(session))
    }

    /// Opens a new session whenever the current one breaks. `session` is the first one, if it is open already.
    async fn supervise(self: Arc<Self>, mut session: Option<Arc<Session>>) {
        loop {
            let mut previous = None;
            let mut short = true;
            if let Some(session) = session.take() {
                let opened_at = Moment::now();
                tokio::select! {
                    () = self.stop.cancelled() => return,
                    () = session.broken() => {}
                }
                previous = session.identity.clone();
                tracing::warn!(inbox = %self.inbox_channel, "the connection broke; reconnecting");
                if !self.set(ConnectionState::Down(StoreErrorKind::Unreachable.into())) {
                    return;
                }
                self.pushes.send(Push::Disconnected);
                short = opened_at.until(Moment::now()) < SHORT_LIFE;
            }
            let next = tokio::select! {
                () = self.stop.cancelled() => return,
                next = self.reopen(previous.as_ref(), short) => next,
            };
            if !self.set(ConnectionState::Up(next.clone())) {
                return;
            }
            session = Some(next);
            self.pushes.send(Push::Resync);
        }
    }

    /// Retries until a session is open.
    async fn reopen(&self, previous: Option<&Identity>, pause_first: bool) -> Arc<Session> {
        let mut backoff = Backoff::new(RETRY_MIN, RETRY_MAX);
        if pause_first {
            sleep(RETRY_MIN).await;
        }
        loop {
            match self.open(previous).await {
                Ok(session) => return session,
                Err(error) => {
                    let wait = retry_delay(error.kind(), backoff.pause());
                    self.set(ConnectionState::Down(error));
                    sleep(wait + wait.mul_f64(jitter())).await;
                }
            }
        }
    }

    /// Changes the state unless the client was closed. Returns whether it did.
    fn set(&self, new: ConnectionState) -> bool {
        self.state.send_if_modified(|state| {
            let open = !matches!(state, ConnectionState::Closed);
            if open {
                *state = new;
            }
            open
        })
    }
}

/// The delay before the next attempt: about a second if the server refused this one.
fn retry_delay(kind: StoreErrorKind, pause: Duration) -> Duration {
    use StoreErrorKind as K;
    match kind {
        K::NotAuthenticated | K::NotPermitted | K::TooManyClients | K::Refused => RETRY_REFUSED,
        _ => pause,
    }
}

/// A random number from 0 to 0.25, so that a fleet does not reconnect in lockstep.
fn jitter() -> f64 {
    let mut byte = [0_u8];
    // Without a source of randomness there is no jitter.
    let _ = getrandom::fill(&mut byte);
    f64::from(byte[0]) / 1_024.0
}
