//! Locks on a Redis or Valkey server: plain commands while nobody waits, scripts when somebody does.
//!
//! One connection carries commands and messages. Each script states its contract in its own file
//! under `lua/`; what they mean is `machine`, in Lua.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{mpsc, watch};

use crate::facts::{HolderId, KeySpace, LockName, Token, Ttl};
use crate::machine::Limits;
use crate::store::{
    Acquire, Asked, Claim, EvictMode, Evicted, Left, Note, Push, Release, Renewal, Renewed, Store, StoreError, Ticket,
    Try,
};

mod address;
mod bindings;
mod checkup;
mod conn;
mod ear;
mod echo;
mod emergency;
mod errors;
mod follow;
mod keys;
mod link;
mod look;
mod notes;
mod resp;
mod scripts;
mod socket;
#[cfg(feature = "tls")]
mod tls;
mod tries;
mod value;
mod verbs;
mod wire;

use address::Address;
use echo::Waiting;
use keys::LockKeys;
use link::Link;

/// How to talk to the server.
#[derive(Debug, Clone)]
pub struct RedisOptions {
    connect_timeout: Duration,
    response_timeout: Duration,
    connect_later: bool,
    events: bool,
    limits: Limits,
}

impl Default for RedisOptions {
    /// 2 s to connect, 2 s for an answer: longer than a server is usually busy, and short enough for
    /// a 30 s lease to be renewed by another attempt. Events are published.
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(2),
            response_timeout: Duration::from_secs(2),
            connect_later: false,
            events: true,
            limits: Limits::DEFAULT,
        }
    }
}

impl RedisOptions {
    /// How long one attempt to connect may take.
    pub fn connect_timeout(mut self, limit: Duration) -> Self {
        self.connect_timeout = limit;
        self
    }

    /// How long an answer may take; also how long a request waits for a connection that is down.
    pub fn response_timeout(mut self, limit: Duration) -> Self {
        self.response_timeout = limit;
        self
    }

    /// Whether a server that cannot be reached yet is one that was lost: it is tried again until it is there,
    /// and requests fail meanwhile. What does not pass by itself, such as a wrong password, is an error all the
    /// same.
    pub fn connect_later(mut self, later: bool) -> Self {
        self.connect_later = later;
        self
    }

    /// Whether to publish what happens to locks, for those who follow.
    pub fn events(mut self, publish: bool) -> Self {
        self.events = publish;
        self
    }

    /// What a waiter that does not confirm costs, and how long a queue outlives its last waiter.
    #[doc(hidden)]
    pub fn limits(mut self, provisional: Duration, queue_ttl: Duration) -> Self {
        let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap_or(u64::MAX);
        self.limits.provisional_ms = ms(provisional);
        self.limits.queue_ttl_ms = ms(queue_ttl);
        self
    }
}

/// A store on one Redis or Valkey server.
///
/// It belongs to the runtime it was connected in, and to the process: after a fork every verb says
/// so. Dropping it ends its tasks and its connection.
pub struct RedisStore {
    link: Arc<Link>,
    keys: KeySpace,
    shared: keys::Shared,
    described: String,
    waiting: watch::Sender<Waiting>,
    pushes: Mutex<Option<mpsc::UnboundedReceiver<Push>>>,
}

/// What is wrong with an address, as far as can be told without a connection.
#[cfg(feature = "config")]
pub(crate) fn check_url(url: &str) -> Result<(), StoreError> {
    Address::parse(url).map(drop)
}

impl RedisStore {
    /// Connects to `redis://[user:password@]host[:port][/database]`.
    ///
    /// # Errors
    /// `Refused` for a URL that cannot be used; otherwise why the server could not be reached or did
    /// not let us in. Nothing is retried: a store that stands is reconnected, one that never stood is
    /// not, unless [`connect_later`](RedisOptions::connect_later) was said.
    pub async fn connect(url: &str, keys: KeySpace, options: RedisOptions) -> Result<Self, StoreError> {
        let address = Address::parse(url)?;
        let described = address.to_string();
        let (tell, pushes) = mpsc::unbounded_channel();
        let link = Link::connect(address, options, keys::random_inbox(), tell).await?;
        let (waiting, watched) = watch::channel(Waiting::default());
        tokio::spawn(echo::run(link.clone(), watched));
        let shared = keys::Shared::new(&keys);
        Ok(Self { link, keys, shared, described, waiting, pushes: Mutex::new(Some(pushes)) })
    }

    /// Makes the store believe that another process connected it, as it would after a fork.
    #[doc(hidden)]
    pub fn pretend_forked(&self, forked: bool) {
        self.link.pretend_forked(forked);
    }

    fn lock_keys(&self, name: &LockName) -> Result<LockKeys, StoreError> {
        LockKeys::new(&self.keys, name)
    }

    fn limits(&self) -> Limits {
        self.link.options.limits
    }

    /// Where this claim's process can be told something.
    fn inbox(&self, claim: &Claim) -> &str {
        if claim.listens { &self.link.inbox } else { value::NO_INBOX }
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("server", &self.described).finish_non_exhaustive()
    }
}

impl Drop for RedisStore {
    fn drop(&mut self) {
        // A fork's copy ends nothing: the tasks are the parent's.
        if !self.link.is_forked() {
            self.link.close();
        }
    }
}

#[async_trait]
impl Store for RedisStore {
    async fn try_acquire(&self, claim: &Claim) -> Result<Try, StoreError> {
        self.ask_try(claim).await
    }

    async fn acquire(&self, claim: &Claim, ticket: Option<Ticket>) -> Result<Acquire, StoreError> {
        self.ask_acquire(claim, ticket).await
    }

    async fn ticket(&self) -> Result<Ticket, StoreError> {
        self.ask_ticket().await
    }

    async fn release(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        self.ask_release(name, token).await
    }

    async fn let_go(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        self.ask_let_go(name, token).await
    }

    async fn release_emergency(&self, name: &LockName, token: &Token) -> Result<Release, StoreError> {
        self.release_without_scripts(name, token).await
    }

    async fn release_value(&self, name: &LockName, value: &str) -> Result<Release, StoreError> {
        self.ask_let_go_value(name, value).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Renewed> {
        match self.ask_renew(renewals).await {
            Ok(answers) => answers,
            Err(error) => renewals.iter().map(|_| Renewed::Unknown(error.clone())).collect(),
        }
    }

    async fn leave(&self, claim: &Claim) -> Result<Left, StoreError> {
        self.ask_leave(claim).await
    }

    async fn evict(&self, name: &LockName, holder: HolderId, mode: EvictMode) -> Result<Evicted, StoreError> {
        self.ask_evict(name, holder, mode).await
    }

    async fn ask_to_finish(&self, name: &LockName, holder: HolderId, reason: &str) -> Result<Asked, StoreError> {
        self.ask_finish(name, holder, reason).await
    }

    fn writes_fence_later(&self) -> bool {
        true
    }

    fn may_resend_try(&self) -> bool {
        self.link.may_kill()
    }

    fn pushes(&self) -> mpsc::UnboundedReceiver<Push> {
        let taken = self.pushes.lock().unwrap_or_else(PoisonError::into_inner).take();
        taken.unwrap_or_else(|| mpsc::unbounded_channel().1)
    }

    fn waiting(&self, claims: usize, nearest: usize, shortest: Option<Ttl>) {
        self.waiting.send_replace(Waiting { claims, nearest, shortest });
    }

    async fn note(&self, notes: Vec<Note>) -> Result<(), StoreError> {
        self.write_notes(&notes).await
    }

    async fn count(&self, deltas: &[(&'static str, u64)]) -> Result<(), StoreError> {
        self.add_counts(deltas).await
    }

    async fn close(&self) {
        if self.link.is_forked() {
            return;
        }
        let conn = self.link.up();
        // Stopped first: the end of our subscription must not make it reconnect.
        self.link.close();
        if let Some(conn) = conn {
            conn.unsubscribe(&self.link.inbox).await;
        }
    }
}
