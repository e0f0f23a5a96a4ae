//! The connection of a process to the server: one session at a time, replaced when it breaks, and push probes. Replaces
//! `store/redis/client/reconnect.rs` and `store/redis/push_probe.rs`.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::coverage::Situation;
use super::network::ConnectionId;
use super::process::Process;
use super::random::Random;
use super::server::{Command, Reply};
use super::session::{RESPONSE_TIMEOUT, Session};
use super::watched::Watched;
use crate::client::rooms::Standing;
use crate::clock::{Moment, sleep, sleep_until, timeout};
use crate::facts::Fence;
use crate::machine::InboxId;
use crate::store::redis::simulated::probe_every;
use crate::store::{Push, StoreError, StoreErrorKind};

const RETRY_MIN: Duration = Duration::from_millis(10);
const RETRY_MAX: Duration = Duration::from_millis(200);
const SHORT_LIFE: Duration = Duration::from_secs(1);
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);
const NEAR: usize = 8;
const PROBE_WHILE_MISSING: Duration = Duration::from_secs(5);

#[derive(Clone)]
enum State {
    Up(Rc<Session>),
    Down(StoreError),
}

pub(super) struct Link {
    pub(super) inbox: InboxId,
    state: Watched<State>,
    highest_fence: Arc<AtomicU64>,
    waiting: Watched<Standing>,
    random: RefCell<Random>,
}

impl Link {
    pub(super) fn new(inbox: InboxId, random: Random) -> Self {
        Self {
            inbox,
            state: Watched::new(State::Down(StoreErrorKind::Unreachable.into())),
            highest_fence: Arc::default(),
            waiting: Watched::new(Standing::default()),
            random: RefCell::new(random),
        }
    }

    pub(super) fn highest_fence(&self) -> u64 {
        self.highest_fence.load(Ordering::Relaxed)
    }

    pub(super) fn observe_fence(&self, fence: Fence) {
        self.highest_fence.fetch_max(fence.get(), Ordering::Relaxed);
    }

    pub(super) fn tell(&self, standing: Standing) {
        self.waiting.set(standing);
    }

    fn current(&self) -> Option<Rc<Session>> {
        match &*self.state.get() {
            State::Up(session) if !session.is_broken() => Some(session.clone()),
            _ => None,
        }
    }
}

impl Process {
    /// The session. Waits for one for at most the response timeout.
    pub(super) async fn session(&self) -> Result<Rc<Session>, StoreError> {
        if let Some(session) = self.link.current() {
            return Ok(session);
        }
        let settled = self.link.state.wait_for(|state| matches!(state, State::Up(session) if !session.is_broken()));
        if timeout(RESPONSE_TIMEOUT, settled).await.is_some()
            && let Some(session) = self.link.current()
        {
            return Ok(session);
        }
        let error = match &*self.link.state.get() {
            State::Down(error) => error.clone(),
            State::Up(_) => StoreErrorKind::Unreachable.into(),
        };
        Err(error.unsent())
    }

    async fn open(self: &Rc<Self>, previous: Option<ConnectionId>) -> Result<Rc<Session>, StoreError> {
        let connecting = self.link.random.borrow_mut().ms(0, 2);
        sleep(connecting).await;
        let opened = self.world.open_connection(self.which, self.link.inbox.clone());
        let connection = opened.ok_or(StoreErrorKind::Unreachable)?;
        let session = Session::new(self, connection, &self.link.highest_fence);
        let hand_shake = self.shake_hands(&session, previous).await;
        if let Err(error) = &hand_shake {
            session.close(error.clone(), Duration::ZERO);
        }
        hand_shake.map(|()| session)
    }

    async fn shake_hands(&self, session: &Rc<Session>, previous: Option<ConnectionId>) -> Result<(), StoreError> {
        if let Reply::Role { is_replica: true } = session.send_one(Command::Hello).one().await? {
            return Err(StoreErrorKind::ReadOnly.into());
        }
        let kill = session.send_one(Command::Kill(previous));
        let subscribe = session.send_one(Command::Subscribe);
        let raise = session.send_one(Command::Raise { seen: self.link.highest_fence() });
        let can_kill = match kill.one().await {
            Ok(_) => true,
            Err(error) if error.kind() == StoreErrorKind::NotPermitted => false,
            Err(error) => return Err(error),
        };
        subscribe.one().await?;
        raise.one().await?;
        self.shared.may_resend.fetch_and(can_kill, Ordering::Relaxed);
        Ok(())
    }

    /// Opens a new session whenever the current one breaks.
    pub(super) async fn supervise(self: Rc<Self>) {
        let mut session: Option<Rc<Session>> = None;
        let mut previous = None;
        let mut is_first = true;
        loop {
            let mut is_short = !is_first;
            if let Some(session) = session.take() {
                let born = Moment::now();
                session.broken.cancelled().await;
                previous = Some(session.connection);
                self.link.state.set(State::Down(StoreErrorKind::Unreachable.into()));
                self.world.disturb(Some(self.which));
                self.receive(Push::Disconnected);
                is_short = born.until(Moment::now()) < SHORT_LIFE;
            }
            let next = self.reopen(previous, is_short).await;
            self.world.tell(|| format!("{} is connected", self.name()));
            self.world.disturb(Some(self.which));
            self.link.state.set(State::Up(next.clone()));
            session = Some(next);
            self.receive(Push::Resync);
            is_first = false;
        }
    }

    async fn reopen(self: &Rc<Self>, previous: Option<ConnectionId>, pauses_first: bool) -> Rc<Session> {
        let mut pause = RETRY_MIN;
        if pauses_first {
            sleep(pause).await;
        }
        loop {
            match self.open(previous).await {
                Ok(session) => return session,
                Err(error) => {
                    self.link.state.set(State::Down(error));
                    let jitter = self.link.random.borrow_mut().below(256);
                    let jitter = pause.mul_f64(f64::from(u32::try_from(jitter).unwrap_or(0)) / 1_024.0);
                    sleep(pause + jitter).await;
                    pause = (pause * 2).min(RETRY_MAX);
                }
            }
        }
    }

    /// Probes pushes for as long as an attempt waits.
    pub(super) async fn probe(self: Rc<Self>) {
        let (state, waiting) = (&self.link.state, &self.link.waiting);
        let mut arriving = true;
        let mut number = 0;
        loop {
            state.wait_for(|state| matches!(state, State::Up(_))).await;
            let seen = state.version();
            let State::Up(session) = state.get().clone() else { continue };
            loop {
                number += 1;
                let sent = Moment::now();
                let now = *waiting.get();
                let limit = probe_every(now.shortest, now.nearest).max(PROBE_TIMEOUT);
                let received = tokio::select! {
                    biased;
                    () = session.broken.cancelled() => break,
                    received = timeout(limit, self.probe_once(&session, number, now.nearest < NEAR)) => received,
                };
                if session.is_broken() {
                    break;
                }
                if received.is_some() != arriving {
                    arriving = received.is_some();
                    self.report(arriving);
                }
                // Waits until the next probe is due.
                loop {
                    let (now, version) = (*waiting.get(), waiting.version());
                    let due = match (now.rooms > 0, arriving) {
                        (true, _) => Some(sent + probe_every(now.shortest, now.nearest)),
                        (false, false) => Some(sent + PROBE_WHILE_MISSING),
                        (false, true) => None,
                    };
                    tokio::select! {
                        biased;
                        () = session.broken.cancelled() => break,
                        () = sleep_until(due) => break,
                        () = waiting.newer_than(version) => {}
                    }
                }
                if session.is_broken() {
                    break;
                }
            }
            state.newer_than(seen).await;
        }
    }

    fn report(self: &Rc<Self>, arriving: bool) {
        self.receive(Push::Hearing(arriving));
        if !arriving {
            self.world.saw(Situation::PushesMissing);
            self.world.tell(|| format!("{} notices that messages do not arrive", self.name()));
            self.receive(Push::Resync);
        }
    }

    async fn probe_once(&self, session: &Session, number: u64, asks_role: bool) {
        session.inbox.expect_probe(number, Moment::now());
        let mut commands = vec![Command::Probe(number)];
        if asks_role {
            commands.push(Command::Hello);
        }
        let replies = session.send(commands).all().await;
        match replies.as_deref() {
            Ok([_, Reply::Role { is_replica: true }]) => {
                session.close(StoreErrorKind::Unreachable.into(), Duration::ZERO);
            }
            Ok([Reply::Exists(false), ..]) if session.inbox.has_received_probe() => {
                session.close(StoreErrorKind::Unreachable.into(), Duration::ZERO);
            }
            Ok([Reply::Exists(_), ..]) => session.inbox.probe_received(number).await,
            _ => std::future::pending().await,
        }
    }
}
