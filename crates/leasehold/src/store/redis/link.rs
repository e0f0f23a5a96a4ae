//! Keeps one connection up: notices that it broke, makes another, says that messages may have been
//! missed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;

use super::RedisOptions;
use super::address::Address;
use super::conn::{Conn, Identity};
use super::ear::Ear;
use crate::facts::Fence;
use crate::store::{Push, StoreError, StoreErrorKind};

/// The first pause between two attempts, and the longest: a lease of two seconds survives an outage of
/// more than half its time, whenever it begins.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(200);
/// The pause after a refusal.
const PAUSE_REFUSED: Duration = Duration::from_secs(1);
/// A connection that broke sooner than this is not replaced at once.
const SHORT_LIFE: Duration = Duration::from_secs(1);

/// The way to the server.
pub(super) struct Link {
    pub(super) address: Address,
    pub(super) options: RedisOptions,
    pub(super) inbox: String,
    state: watch::Sender<State>,
    pub(super) tell: mpsc::UnboundedSender<Push>,
    /// The highest fence this process saw.
    seen: Arc<AtomicU64>,
    may_kill: AtomicBool,
    pub(super) stop: CancellationToken,
    /// The process that connected.
    pid: AtomicU32,
}

#[derive(Clone)]
pub(super) enum State {
    Up(Arc<Conn>),
    /// With what the last attempt came to.
    Down(StoreError),
    Closed,
}

impl Link {
    /// Makes the first connection, and keeps one up from then on.
    pub(super) async fn connect(
        address: Address,
        options: RedisOptions,
        inbox: String,
        tell: mpsc::UnboundedSender<Push>,
    ) -> Result<Arc<Self>, StoreError> {
        let link = Arc::new(Self {
            address,
            options,
            inbox,
            state: watch::Sender::new(State::Down(StoreErrorKind::Unreachable.into())),
            tell,
            seen: Arc::default(),
            may_kill: AtomicBool::new(true),
            stop: CancellationToken::new(),
            pid: AtomicU32::new(std::process::id()),
        });
        let first = match link.open(None).await {
            Ok(conn) => {
                link.state.send_replace(State::Up(conn.clone()));
                Some(conn)
            }
            Err(error) if link.options.connect_later && error.is_passing() => {
                tracing::warn!(inbox = %link.inbox, %error, "there is no connection yet");
                link.state.send_replace(State::Down(error));
                None
            }
            Err(error) => return Err(error),
        };
        tokio::spawn(link.clone().keep_up(first));
        Ok(link)
    }

    /// The connection; while there is none, waits for one as long as for an answer.
    pub(super) async fn conn(&self) -> Result<Arc<Conn>, StoreError> {
        // Before anything else: a lock held by the parent at the fork is held for ever here.
        if self.is_forked() {
            return Err(StoreErrorKind::Forked.into());
        }
        if let Some(conn) = self.up() {
            return Ok(conn);
        }
        // Rare, so boxed: otherwise every request would carry the room for it around.
        Box::pin(self.wait_for_conn()).await.map_err(StoreError::unsent)
    }

    async fn wait_for_conn(&self) -> Result<Arc<Conn>, StoreError> {
        let deadline = Instant::now() + self.options.response_timeout;
        let mut state = self.state.subscribe();
        let settled = state.wait_for(|state| match state {
            State::Up(conn) => !conn.is_broken(),
            State::Down(_) => false,
            State::Closed => true,
        });
        match timeout_at(deadline, settled).await.map(|state| state.map(|s| s.clone())) {
            Ok(Ok(State::Up(conn))) => Ok(conn),
            Ok(_) => Err(StoreErrorKind::Closed.into()),
            Err(_) => match &*self.state.borrow() {
                State::Down(error) => Err(error.clone()),
                State::Up(_) => Err(StoreErrorKind::Unreachable.into()),
                State::Closed => Err(StoreErrorKind::Closed.into()),
            },
        }
    }

    /// The connection, if there is one.
    pub(super) fn up(&self) -> Option<Arc<Conn>> {
        match &*self.state.borrow() {
            State::Up(conn) if !conn.is_broken() => Some(conn.clone()),
            _ => None,
        }
    }

    /// Follows the connection as it breaks and comes back.
    pub(super) fn watch(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    /// Whether nothing sent on a connection that broke can be carried out after the next one stands.
    pub(super) fn may_kill(&self) -> bool {
        self.may_kill.load(Ordering::Acquire)
    }

    /// The highest fence this process saw.
    pub(super) fn seen(&self) -> u64 {
        self.seen.load(Ordering::Acquire)
    }

    pub(super) fn saw(&self, fence: Fence) {
        self.seen.fetch_max(fence.get(), Ordering::AcqRel);
    }

    /// Whether this is still the process that connected.
    pub(super) fn is_forked(&self) -> bool {
        std::process::id() != self.pid.load(Ordering::Relaxed)
    }

    /// As it would look after a fork.
    pub(super) fn pretend_forked(&self, forked: bool) {
        let pid = std::process::id();
        self.pid.store(if forked { pid.wrapping_add(1) } else { pid }, Ordering::Relaxed);
    }

    /// Ends every task, and the connection with its last request.
    pub(super) fn close(&self) {
        self.stop.cancel();
        self.state.send_replace(State::Closed);
    }

    async fn open(&self, previous: Option<&Identity>) -> Result<Arc<Conn>, StoreError> {
        let ear = Ear::new(self.seen.clone(), self.tell.clone());
        let conn = Conn::open(&self.address, &self.options, &self.inbox, ear, self.seen(), previous).await?;
        self.may_kill.fetch_and(conn.may_kill, Ordering::AcqRel);
        if !conn.subscribed {
            // Before anybody can wait in vain. Nobody takes the messages: then nobody waits.
            let _ = self.tell.send(Push::Hearing(false));
        }
        Ok(Arc::new(conn))
    }

    /// `conn`: the first one, if it stands already.
    async fn keep_up(self: Arc<Self>, mut conn: Option<Arc<Conn>>) {
        loop {
            let mut previous = None;
            let mut short = true;
            if let Some(conn) = conn.take() {
                let born = Instant::now();
                tokio::select! {
                    () = self.stop.cancelled() => return,
                    () = conn.broken() => {}
                }
                previous = conn.identity.clone();
                tracing::warn!(inbox = %self.inbox, "the connection broke");
                if !self.set(State::Down(StoreErrorKind::Unreachable.into())) {
                    return;
                }
                // The receiver was dropped: then nobody waits.
                let _ = self.tell.send(Push::Disconnected);
                short = born.elapsed() < SHORT_LIFE;
            }
            let next = tokio::select! {
                () = self.stop.cancelled() => return,
                next = self.reopen(previous.as_ref(), short) => next,
            };
            if !self.set(State::Up(next.clone())) {
                return;
            }
            conn = Some(next);
            // Nobody takes the messages: then nobody waits.
            let _ = self.tell.send(Push::Resync);
        }
    }

    /// Tries until a connection stands.
    async fn reopen(&self, previous: Option<&Identity>, pause_first: bool) -> Arc<Conn> {
        let mut pause = PAUSE_MIN;
        if pause_first {
            sleep(pause).await;
        }
        loop {
            match self.open(previous).await {
                Ok(conn) => return conn,
                Err(error) => {
                    let wait = pause_after(error.kind(), pause);
                    self.set(State::Down(error));
                    sleep(wait + wait.mul_f64(random_part())).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
    }

    /// Changes the state, unless the store was closed meanwhile.
    fn set(&self, new: State) -> bool {
        self.state.send_if_modified(|state| {
            let open = !matches!(state, State::Closed);
            if open {
                *state = new;
            }
            open
        })
    }
}

/// A server that answers with a refusal is not asked more than about once a second.
fn pause_after(kind: StoreErrorKind, pause: Duration) -> Duration {
    use StoreErrorKind as K;
    match kind {
        K::NotAuthenticated | K::NotPermitted | K::TooManyClients | K::Refused => PAUSE_REFUSED,
        _ => pause,
    }
}

/// 0 to 0.25, so that a fleet does not come back in step.
fn random_part() -> f64 {
    let mut byte = [0_u8];
    // Without randomness, without jitter.
    let _ = getrandom::fill(&mut byte);
    f64::from(byte[0]) / 1_024.0
}
