//! The store of a simulated process: every request of its engine becomes a task of the process, which sends it to the
//! simulated server.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::LocalBoxFuture;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;

use super::coverage::Situation;
use super::process::Process;
use crate::client::rooms::Standing;
use crate::clock::Moment;
use crate::events::LockEvent;
use crate::facts::{ClaimId, HolderId, LockName, Token, Ttl};
use crate::lease::belief::Belief;
use crate::store::sealed::Sealed;
use crate::store::{
    Acquire, AcquireRequest, Bind, BindingId, Bound, Change, Changed, Create, Cursor, EvictMode, Evicted, Expected,
    Finding, FinishRequest, Grant, Holder, Inspect, Left, NewBinding, Page, Push, PushReceiver, PushSender, Release,
    Renewal, Renewed, Step, Store, StoreError, StoreErrorKind, Ticket, Try, Waiter,
};

/// A request of the engine. The process runs it in order, up to its first pause.
pub(super) type Request = Box<dyn FnOnce(Rc<Process>) -> LocalBoxFuture<'static, ()> + Send>;

pub(super) struct SimulatedStore {
    requests: UnboundedSender<Request>,
    shared: Arc<Shared>,
}

/// What the connection of the process tells its engine.
pub(super) struct Shared {
    pub(super) may_resend: AtomicBool,
    pub(super) pushes: PushSender,
}

impl SimulatedStore {
    pub(super) fn new() -> (Self, UnboundedReceiver<Request>, Arc<Shared>) {
        let (requests, received) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared { may_resend: AtomicBool::new(true), pushes: PushSender::new() });
        (Self { requests, shared: shared.clone() }, received, shared)
    }

    /// Runs a request in the process. Dropped, it is dropped there too, before anything else of it happens.
    async fn ask<T: Send + 'static>(&self, ask: impl AsyncFnOnce(&Rc<Process>) -> T + Send + 'static) -> T {
        let (mut reply, answer) = oneshot::channel();
        let request: Request = Box::new(move |process| {
            Box::pin(async move {
                let answer = tokio::select! {
                    biased;
                    () = reply.closed() => return,
                    answer = ask(&process) => answer,
                };
                drop(reply.send(answer));
            })
        });
        drop(self.requests.send(request));
        match answer.await {
            Ok(answer) => answer,
            // The process has crashed.
            Err(_) => std::future::pending().await,
        }
    }
}

/// Counts a token among those that are asking for a lock.
struct Asking<'a>(&'a Process, &'a Token);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.asking.borrow_mut().remove(self.1);
    }
}

impl Process {
    /// Passes a push to the engine.
    pub(super) fn receive(&self, push: Push) {
        self.life.has_run.set(true);
        match &push {
            Push::Granted { token, grant } => {
                let (token, grant) = (token.clone(), *grant);
                let leaves = self.leaving.borrow().contains(&token);
                self.shared.pushes.send(push);
                return self.note_grant(&token, &grant, leaves);
            }
            Push::Finish { .. } => self.world.saw(Situation::AskedToFinish),
            _ => {}
        }
        self.shared.pushes.send(push);
    }

    fn note_grant(&self, token: &Token, grant: &Grant, leaves: bool) {
        let now = Moment::now();
        let late = !Belief::new(now, grant.asked_at, grant.lasts).is_valid(now + grant.lasts / 4);
        let asks = self.asking.borrow().contains(token);
        let is_held = self.engine.leases.all().iter().any(|lease| lease.token == *token);
        if leaves {
            self.world.saw(Situation::GrantToLeaving);
        } else if late {
            self.world.saw(Situation::LateGrant);
        } else if asks {
            self.world.saw(Situation::PushedWhileAsking);
        } else if !is_held || self.known.borrow().contains_key(token) {
            self.world.saw(Situation::SecondPush);
        }
        self.world.tell(|| {
            let how = if late { ", too late" } else { "" };
            format!("{} reads that the lock was granted to {}{how}", self.name(), token.holder_id())
        });
    }

    async fn acquire(&self, claim: &AcquireRequest, ticket: Option<Ticket>) -> Result<Acquire, StoreError> {
        self.asking.borrow_mut().insert(claim.token.clone());
        let _asking = Asking(self, &claim.token);
        self.ask_acquire(claim, ticket).await
    }

    async fn leave(&self, claim: &AcquireRequest) -> Result<Left, StoreError> {
        let again = !self.leaving.borrow_mut().insert(claim.token.clone());
        if again {
            self.world.saw(Situation::LeaveRepeated);
        } else if self.tried.borrow_mut().remove(&claim.token) {
            self.world.saw(Situation::TryUndone);
        }
        self.ask_leave(claim).await?;
        self.leaving.borrow_mut().remove(&claim.token);
        self.world.has_left(&claim.name, &claim.token);
        Ok(Left::WasWaiting)
    }

    async fn try_acquire(&self, claim: &AcquireRequest) -> Result<Try, StoreError> {
        self.tried.borrow_mut().insert(claim.token.clone());
        let answer = self.ask_try(claim).await;
        if answer.is_ok() {
            self.tried.borrow_mut().remove(&claim.token);
        }
        answer
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Renewed> {
        let asked_at = Moment::now();
        let answers = self.ask_renew(renewals).await;
        for (renewal, answer) in renewals.iter().zip(&answers) {
            if *answer != Renewed::Renewed {
                continue;
            }
            if renewal.prolong {
                let owner = renewal.hand_to.as_ref().unwrap_or(&renewal.token);
                self.proven.borrow_mut().insert(owner.clone(), asked_at);
            } else {
                self.world.saw(Situation::Checked);
            }
        }
        answers
    }

    async fn release(&self, name: &LockName, token: &Token, contended: bool) -> Result<Release, StoreError> {
        let answer = self.ask_release(name, token, contended).await;
        if answer == Ok(Release::Released) {
            self.world.saw(Situation::Released);
        }
        answer
    }
}

impl Sealed for SimulatedStore {}

#[async_trait]
impl Store for SimulatedStore {
    async fn try_acquire(&self, claim: &AcquireRequest) -> Result<Try, StoreError> {
        let claim = claim.clone();
        self.ask(async move |process| process.try_acquire(&claim).await).await
    }

    async fn acquire(&self, claim: &AcquireRequest, ticket: Option<Ticket>) -> Result<Acquire, StoreError> {
        let claim = claim.clone();
        self.ask(async move |process| process.acquire(&claim, ticket).await).await
    }

    async fn ticket(&self) -> Result<Ticket, StoreError> {
        self.ask(async |process| process.ask_ticket().await).await
    }

    async fn release(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        let (name, token) = (name.clone(), token.clone());
        self.ask(async move |process| process.release(&name, &token, true).await).await
    }

    async fn release_uncontended(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        let (name, token) = (name.clone(), token.clone());
        self.ask(async move |process| process.release(&name, &token, false).await).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Renewed> {
        let renewals = renewals.to_vec();
        self.ask(async move |process| process.renew(&renewals).await).await
    }

    async fn leave(&self, claim: &AcquireRequest) -> Result<Left, StoreError> {
        let claim = claim.clone();
        self.ask(async move |process| process.leave(&claim).await).await
    }

    async fn evict(&self, _: &LockName, _: HolderId, _: EvictMode) -> Result<Evicted, StoreError> {
        Err(not_simulated())
    }

    async fn ask_to_finish(&self, _: &LockName, _: HolderId, _: &str) -> Result<FinishRequest, StoreError> {
        Err(not_simulated())
    }

    fn may_resend_try(&self) -> bool {
        self.shared.may_resend.load(Ordering::Relaxed)
    }

    fn writes_fence_later(&self) -> bool {
        true
    }

    fn deliver_to(&self, receiver: Arc<dyn PushReceiver>) {
        self.shared.pushes.attach(receiver);
    }

    fn waiting(&self, rooms: usize, nearest: usize, shortest: Option<Ttl>) {
        let standing = Standing { rooms, nearest, shortest };
        drop(self.requests.send(Box::new(move |process| {
            process.link.tell(standing);
            Box::pin(std::future::ready(()))
        })));
    }
}

#[async_trait]
impl Inspect for SimulatedStore {
    fn describe(&self) -> String {
        "simulated".into()
    }

    async fn holder(&self, name: &LockName) -> Result<Option<Holder>, StoreError> {
        let name = name.clone();
        self.ask(async move |process| process.ask_holder(&name).await).await
    }

    async fn list(&self, _: &str, _: Option<Cursor>, _: usize) -> Result<Page, StoreError> {
        Err(not_simulated())
    }

    async fn queue(&self, name: &LockName) -> Result<Vec<Waiter>, StoreError> {
        let name = name.clone();
        self.ask(async move |process| process.ask_queue(&name).await).await
    }

    async fn long_held(&self, _: Option<Cursor>, _: usize) -> Result<Page, StoreError> {
        Err(not_simulated())
    }

    async fn counters(&self) -> Result<Vec<(String, u64)>, StoreError> {
        Err(not_simulated())
    }

    async fn checkup(&self) -> Vec<Finding> {
        Vec::new()
    }

    async fn follow(&self) -> Result<mpsc::Receiver<LockEvent>, StoreError> {
        Err(not_simulated())
    }
}

#[async_trait]
impl Bind for SimulatedStore {
    async fn create(&self, _: &NewBinding) -> Result<Create, StoreError> {
        Err(not_simulated())
    }

    async fn read(&self, _: &BindingId) -> Result<Option<(Bound, Duration)>, StoreError> {
        Err(not_simulated())
    }

    async fn change(&self, _: &BindingId, _: &Expected, _: &Change) -> Result<Changed, StoreError> {
        Err(not_simulated())
    }

    async fn remove(&self, _: &BindingId, _: &ClaimId) -> Result<Changed, StoreError> {
        Err(not_simulated())
    }

    async fn advance(&self, _: &Step) -> Result<Changed, StoreError> {
        Err(not_simulated())
    }

    async fn withdraw(&self, _: &BindingId, _: &ClaimId) -> Result<Changed, StoreError> {
        Err(not_simulated())
    }
}

fn not_simulated() -> StoreError {
    StoreErrorKind::Other.into()
}
