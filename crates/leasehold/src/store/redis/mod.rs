//! Locks on a Redis or Valkey server: plain commands while no attempt waits, scripts when one does.
//!
//! | file | contents |
//! |---|---|
//! | `client/` | the RESP3 client: connection, handshake, reconnects |
//! | `try_acquire`, `try_steps` | a try, mostly without a script, and the decisions between its steps |
//! | `verbs` | the other operations on a lock, one script each |
//! | `emergency` | a release on a connection of its own, without scripts |
//! | `bindings` | bindings and results of `once` |
//! | `inbox`, `push_stamp` | messages that are pushed to this process, and the moment that a pushed grant counts from |
//! | `push_probe` | checks that pushes arrive, and from a primary |
//! | `publish` | the index of long-held locks, published events, counters |
//! | `follow` | a subscription to published events |
//! | `inspect`, `checkup` | what people see: holders, queues, lists, findings |
//! | `options` | time limits, and whether events are published |
//! | `keys`, `value`, `scripts` | names of keys, the value of a held lock, the Lua scripts |
//!
//! One connection carries commands and pushes. Each script in `lua/` states its contract in its own file; together they
//! implement `machine`.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::facts::{HolderId, KeySpace, LockName, Token, Ttl};
use crate::machine::Limits;
use crate::store::{
    Acquire, AcquireRequest, EvictMode, Evicted, FinishRequest, Left, Note, PushReceiver, PushSender, Release, Renewal,
    Renewed, Store, StoreError, Ticket, Try,
};

mod bindings;
mod checkup;
mod client;
mod emergency;
mod follow;
mod inbox;
mod inspect;
mod keys;
mod options;
mod publish;
mod push_probe;
pub(crate) mod push_stamp;
mod scripts;
#[cfg(test)]
pub(crate) mod simulated;
mod try_acquire;
pub(crate) mod try_steps;
mod value;
mod verbs;

#[cfg(feature = "test-hooks")]
#[doc(hidden)]
pub use client::BareClient;
use client::{Address, RedisClient};
use keys::{LockKeys, NamespaceKeys};
pub use options::RedisOptions;
use push_probe::WaitingAttempts;

/// A store on one Redis or Valkey server.
///
/// It belongs to the runtime and the process that connected it: in a forked child every operation fails with
/// [`Forked`](crate::store::StoreErrorKind::Forked). Dropping it stops its tasks and closes its connection.
pub struct RedisStore {
    client: Arc<RedisClient>,
    keys: KeySpace,
    namespace: NamespaceKeys,
    described: String,
    waiting: watch::Sender<WaitingAttempts>,
    pushes: PushSender,
}

/// Checks an address without connecting.
#[cfg(feature = "config")]
pub(crate) fn check_url(url: &str) -> Result<(), StoreError> {
    Address::parse(url).map(drop)
}

impl RedisStore {
    /// Connects to `redis://[user:password@]host[:port][/database]`.
    ///
    /// # Errors
    /// `Refused` for a URL that cannot be used; otherwise the reason why the server could not be reached or rejected
    /// the login. The first connection is not retried unless [`lazy_connect`](RedisOptions::lazy_connect) is set; a
    /// connection that breaks later is replaced.
    pub async fn connect(url: &str, keys: KeySpace, options: RedisOptions) -> Result<Self, StoreError> {
        let address = Address::parse(url)?;
        let described = address.to_string();
        let pushes = PushSender::new();
        let client = RedisClient::connect(address, options, keys::random_inbox(), pushes.clone()).await?;
        let (waiting, watched) = watch::channel(WaitingAttempts::default());
        tokio::spawn(push_probe::run(client.clone(), watched));
        let namespace = NamespaceKeys::new(&keys);
        Ok(Self { client, keys, namespace, described, waiting, pushes })
    }

    /// Makes the store behave as in a forked child.
    #[cfg(any(test, feature = "test-hooks"))]
    #[doc(hidden)]
    pub fn pretend_forked(&self, forked: bool) {
        self.client.pretend_forked(forked);
    }

    fn lock_keys(&self, name: &LockName) -> Result<LockKeys, StoreError> {
        LockKeys::new(&self.keys, name)
    }

    fn limits(&self) -> Limits {
        self.client.options.limits
    }

    /// The inbox channel for messages about this attempt.
    fn inbox(&self, request: &AcquireRequest) -> &str {
        if request.listens { &self.client.inbox_channel } else { value::NO_INBOX }
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("server", &self.described).finish_non_exhaustive()
    }
}

impl Drop for RedisStore {
    fn drop(&mut self) {
        // The tasks belong to the parent, so a forked child stops nothing.
        if !self.client.is_forked() {
            self.client.close();
        }
    }
}

#[async_trait]
impl Store for RedisStore {
    async fn try_acquire(&self, request: &AcquireRequest) -> Result<Try, StoreError> {
        self.ask_try(request).await
    }

    async fn acquire(&self, request: &AcquireRequest, ticket: Option<Ticket>) -> Result<Acquire, StoreError> {
        self.ask_acquire(request, ticket).await
    }

    async fn ticket(&self) -> Result<Ticket, StoreError> {
        self.ask_ticket().await
    }

    async fn release(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        self.ask_release(name, token).await
    }

    async fn release_uncontended(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        self.send_release_uncontended(name, token).await
    }

    async fn release_emergency(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        self.release_without_scripts(name, token).await
    }

    async fn release_value(&self, name: &LockName, value: &str) -> Result<Release, StoreError> {
        self.send_release_value(name, value).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Renewed> {
        match self.ask_renew(renewals).await {
            Ok(answers) => answers,
            Err(error) => renewals.iter().map(|_| Renewed::Unknown(error.clone())).collect(),
        }
    }

    async fn leave(&self, request: &AcquireRequest) -> Result<Left, StoreError> {
        self.ask_leave(request).await
    }

    async fn evict(&self, name: &LockName, holder: HolderId, mode: EvictMode) -> Result<Evicted, StoreError> {
        self.ask_evict(name, holder, mode).await
    }

    async fn ask_to_finish(
        &self,
        name: &LockName,
        holder: HolderId,
        reason: &str,
    ) -> Result<FinishRequest, StoreError> {
        self.ask_finish(name, holder, reason).await
    }

    fn writes_fence_later(&self) -> bool {
        true
    }

    fn may_resend_try(&self) -> bool {
        self.client.can_kill()
    }

    fn deliver_to(&self, receiver: Arc<dyn PushReceiver>) {
        self.pushes.attach(receiver);
    }

    fn waiting(&self, attempts: usize, nearest: usize, shortest: Option<Ttl>) {
        self.waiting.send_replace(WaitingAttempts { count: attempts, nearest, shortest });
    }

    async fn note(&self, notes: Vec<Note>) -> Result<(), StoreError> {
        self.write_notes(&notes).await
    }

    async fn count(&self, deltas: &[(&'static str, u64)]) -> Result<(), StoreError> {
        self.add_counts(deltas).await
    }

    async fn close(&self) {
        if self.client.is_forked() {
            return;
        }
        let session = self.client.current();
        // Stopped first, so that the end of the subscription does not cause a reconnect.
        self.client.close();
        if let Some(session) = session {
            session.unsubscribe(&self.client.inbox_channel).await;
        }
    }
}
