//! A client's end of a connection: requests, replies in order, and pushes.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;

use super::coverage::Situation;
use super::network::{ConnectionId, Down};
use super::process::Process;
use super::server::{Command, Reply};
use crate::clock::{Moment, sleep_until};
use crate::store::redis::simulated::SimulatedInbox;
use crate::store::{Push, StoreError, StoreErrorKind};

/// The connection is closed if its oldest request is not answered within this time.
pub(super) const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) struct Session {
    process: Rc<Process>,
    pub(super) connection: ConnectionId,
    pub(super) inbox: SimulatedInbox,
    pending: RefCell<VecDeque<Pending>>,
    closed_with: RefCell<Option<StoreError>>,
    pub(super) broken: CancellationToken,
    /// Wakes the timer of the oldest request.
    sent: Notify,
}

struct Pending {
    asked_at: Moment,
    missing: usize,
    replies: Vec<Reply>,
    is_read_only: bool,
    answer: oneshot::Sender<Result<Vec<Reply>, StoreError>>,
}

/// A request that was sent.
pub(super) struct Asked {
    pub(super) asked_at: Moment,
    answer: oneshot::Receiver<Result<Vec<Reply>, StoreError>>,
}

impl Asked {
    pub(super) async fn all(self) -> Result<Vec<Reply>, StoreError> {
        self.answer.await.unwrap_or_else(|_| Err(StoreErrorKind::Unreachable.into()))
    }

    pub(super) async fn one(self) -> Result<Reply, StoreError> {
        match self.all().await?.pop() {
            Some(Reply::Error(kind)) => Err(kind.into()),
            Some(reply) => Ok(reply),
            None => Err(StoreErrorKind::Other.into()),
        }
    }
}

impl Session {
    pub(super) fn new(process: &Rc<Process>, connection: ConnectionId, highest_fence: &Arc<AtomicU64>) -> Rc<Self> {
        let session = Rc::new(Self {
            process: process.clone(),
            connection,
            inbox: SimulatedInbox::new(highest_fence.clone()),
            pending: RefCell::default(),
            closed_with: RefCell::default(),
            broken: CancellationToken::new(),
            sent: Notify::new(),
        });
        process.world.attach(connection, &session);
        process.spawn(session.clone().watch());
        session
    }

    /// Sends commands in one write.
    pub(super) fn send(&self, commands: Vec<Command>) -> Asked {
        let world = &self.process.world;
        let asked_at = Moment::now();
        let (answer, answered) = oneshot::channel();
        let asked = Asked { asked_at, answer: answered };
        if let Some(error) = &*self.closed_with.borrow() {
            let _ = answer.send(Err(error.clone()));
            return asked;
        }
        let pending = Pending { asked_at, missing: commands.len(), replies: Vec::new(), is_read_only: false, answer };
        self.pending.borrow_mut().push_back(pending);
        self.sent.notify_one();
        world.send(self.connection, commands);
        asked
    }

    pub(super) fn send_one(&self, command: Command) -> Asked {
        self.send(vec![command])
    }

    pub(super) fn is_broken(&self) -> bool {
        self.closed_with.borrow().is_some()
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.process.life.is_paused.get()
    }

    /// Closes the connection: every request on it fails.
    pub(super) fn close(&self, error: StoreError, noticed_after: Duration) {
        if self.is_broken() {
            return;
        }
        *self.closed_with.borrow_mut() = Some(error.clone());
        let world = &self.process.world;
        world.tell(|| format!("{} loses its connection: {error}", self.process.name()));
        world.close_by_client(self.connection, noticed_after);
        let pending = std::mem::take(&mut *self.pending.borrow_mut());
        for request in pending {
            let _ = request.answer.send(Err(error.clone()));
        }
        self.broken.cancel();
    }

    /// Reads what has arrived, in order, then delivers the pushes.
    pub(super) fn read(&self, arrived: Vec<Down>) {
        for down in arrived {
            if self.is_broken() {
                break;
            }
            match down {
                Down::Reply(reply) => self.reply(reply),
                Down::Push(message) => self.inbox.message(&message),
                Down::Probe(number) => self.inbox.probe(number),
                Down::Closed => {
                    self.close(StoreErrorKind::Unreachable.into(), Duration::ZERO);
                }
            }
        }
        for push in self.inbox.delivered() {
            if matches!(push, Push::Granted { .. }) && !self.process.world.is_on_primary(self.connection) {
                // Published before the demotion and read after it: the lease is in the data that was replicated.
                self.process.world.saw(Situation::LeftBehind);
            }
            self.process.receive(push);
        }
    }

    fn reply(&self, reply: Reply) {
        let mut pending = self.pending.borrow_mut();
        let Some(first) = pending.front_mut() else { return };
        first.missing -= 1;
        first.is_read_only |= matches!(reply, Reply::Error(StoreErrorKind::ReadOnly));
        first.replies.push(reply);
        if first.missing > 0 {
            return;
        }
        let Some(request) = pending.pop_front() else { return };
        drop(pending);
        self.inbox.answered(request.asked_at);
        let _ = request.answer.send(Ok(request.replies));
        if request.is_read_only {
            self.close(StoreErrorKind::Unreachable.into(), Duration::ZERO);
        }
    }

    /// Closes the connection when its oldest request has waited for too long.
    async fn watch(self: Rc<Self>) {
        loop {
            let oldest = self.pending.borrow().front().map(|request| request.asked_at + RESPONSE_TIMEOUT);
            tokio::select! {
                biased;
                () = self.broken.cancelled() => return,
                () = self.sent.notified(), if oldest.is_none() => {}
                () = sleep_until(oldest) => {
                    let oldest = self.pending.borrow().front().map(|request| request.asked_at + RESPONSE_TIMEOUT);
                    if oldest.is_some_and(|end| Moment::now() >= end) {
                        // The server may notice late.
                        self.close(StoreErrorKind::NoAnswer.into(), Duration::from_millis(500));
                    }
                }
            }
        }
    }
}
