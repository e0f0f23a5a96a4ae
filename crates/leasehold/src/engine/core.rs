//! What all parts of the engine share: the store, the options, what is published, and the background tasks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::environment::Environment;
use super::publishing::Publisher;
use crate::client::{Context, Policy, RandomSource, jittered};
use crate::clock::{Moment, timeout, wall_ms};
use crate::error::Error;
use crate::events::Transition;
use crate::facts::{LockName, Token};
use crate::options::Options;
use crate::store::{Operation, Renewal, Renewed, SharedStore, StoreError, StoreErrorKind};

/// What all parts of the engine share.
pub(crate) struct Core {
    pub(crate) store: SharedStore,
    pub(crate) options: Options,
    /// The part of the options that decisions depend on.
    policy: Policy,
    pub(crate) publisher: Arc<Publisher>,
    pub(super) environment: Environment,
    /// Work in the background that ends by itself.
    pub(super) tasks: TaskTracker,
    /// Acquires and releases that callers are awaiting.
    pub(super) calls: TaskTracker,
    /// Set when no new call may begin.
    pub(crate) closing: CancellationToken,
    /// Set when the tasks that run until the end have to return.
    pub(super) ended: CancellationToken,
}

impl Core {
    pub(super) fn new(environment: Environment, store: SharedStore, options: Options) -> Arc<Self> {
        Arc::new(Self {
            policy: Policy::from(&options),
            publisher: Arc::new(Publisher::new(store.clone(), options.observer.clone())),
            store,
            options,
            environment,
            tasks: TaskTracker::new(),
            calls: TaskTracker::new(),
            closing: CancellationToken::new(),
            ended: CancellationToken::new(),
        })
    }

    /// Runs work in the background, which a shutdown waits for. Does nothing when the runtime is gone: leases then end by
    /// their ttl.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.environment.spawn(self.tasks.track_future(work));
    }

    /// Runs a task that returns when [`ended`](Self::ended) is set.
    pub(super) fn spawn_until_end(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.environment.spawn(task);
    }

    /// Registers a call. The store is not closed before the returned token is dropped.
    pub(crate) fn call(&self) -> TaskTrackerToken {
        self.calls.token()
    }

    /// Ends the tasks that run until the end, after the background work that is still under way.
    pub(super) fn end(&self) {
        self.closing.cancel();
        if self.ended.is_cancelled() {
            return;
        }
        if self.tasks.is_empty() {
            self.ended.cancel();
            return;
        }
        // Releases are still on their way.
        self.tasks.close();
        let (tasks, ended) = (self.tasks.clone(), self.ended.clone());
        self.spawn_until_end(async move {
            tasks.wait().await;
            ended.cancel();
        });
    }

    /// Asks the store, for at most [`request_timeout`](Options::request_timeout).
    pub(crate) async fn within<T>(&self, ask: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        timeout(self.options.request_timeout, ask).await.unwrap_or_else(|| Err(StoreErrorKind::NoAnswer.into()))
    }

    /// Renews one lease. Returns when the request was sent, and the answer.
    pub(crate) async fn renew(&self, renewal: Renewal) -> (Moment, Renewed) {
        let asked_at = Moment::now();
        let answer = self.within(async { Ok(self.store.renew(&[renewal]).await.pop()) }).await;
        let answer = answer.unwrap_or_else(|error| Some(Renewed::Unknown(error)));
        (asked_at, answer.unwrap_or(Renewed::Unknown(StoreErrorKind::Other.into())))
    }

    /// Counts how long the store took to answer.
    pub(crate) fn answered(&self, operation: Operation, asked_at: Moment, now: Moment) {
        self.publisher.observe(&Transition::Answered { operation, took: asked_at.until(now) });
    }

    /// Counts a failure of the store, and returns the error for the caller.
    pub(crate) fn store_error(&self, operation: Operation, name: &LockName, source: StoreError) -> Error {
        self.publisher.observe(&Transition::StoreFailed { operation, kind: source.kind() });
        Error::Store { operation, name: name.clone(), store: self.store.describe(), source }
    }

    /// Shortens a pause by a random part of up to a quarter, so that many clients do not ask in step.
    pub(super) fn jittered(&self, pause: Duration) -> Duration {
        jittered(pause, self.environment.byte())
    }

    /// Makes a decision, with the time and the options as they are now.
    pub(super) fn decide<R>(&self, decide: impl FnOnce(&mut Context<'_>) -> R) -> R {
        let mut cx = Context {
            now: Moment::now(),
            policy: &self.policy,
            may_resend: self.store.may_resend_try(),
            source: &mut &self.environment,
        };
        decide(&mut cx)
    }
}

impl RandomSource for &Environment {
    fn token(&mut self) -> Token {
        Environment::token(self)
    }

    fn byte(&mut self) -> u32 {
        Environment::byte(self)
    }

    fn wall_ms(&mut self) -> u64 {
        wall_ms()
    }
}

/// Locks a mutex. One that a task held when it panicked is used all the same: no state here is left half-changed.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
