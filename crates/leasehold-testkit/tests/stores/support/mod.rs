//! The stores of the battery, and helpers of its cases.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::sync::Arc;
use std::time::Duration;

use leasehold::inspect::Holder;
use leasehold::lease::{Token, Ttl};
use leasehold::store::memory::MemoryWorld;
use leasehold::store::redis::{RedisOptions, RedisStore};
use leasehold::store::sqlite::SqliteStore;
use leasehold::store::{Acquire, AcquireRequest, Grant, KeySpace, Place, Push, Renewal, Store, Try};
use leasehold::{Fence, LockName, Owner};
use leasehold_testkit::RedisServer;
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::time::timeout;

pub(crate) mod holding;
pub(crate) mod looking;
pub(crate) mod queueing;
pub(crate) mod taking;

/// A store that several processes share.
pub(crate) trait World {
    /// Opens the store like another process.
    async fn open(&self) -> Arc<dyn Store>;

    /// Ends a process like a crash, and returns when the store counts it as dead.
    async fn crash(&self, store: Arc<dyn Store>);

    /// Whether the lock of a dead holder is free at once, not only when its lease ends.
    fn sees_death(&self) -> bool {
        false
    }

    /// Makes a lease expire now.
    async fn expire(&self, name: &LockName);
}

#[derive(Default)]
pub(crate) struct MemoryHere(MemoryWorld);

impl World for MemoryHere {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.0.open())
    }

    async fn crash(&self, store: Arc<dyn Store>) {
        drop(store);
    }

    async fn expire(&self, name: &LockName) {
        self.0.expire(name);
    }
}

pub(crate) struct SqliteHere(TempDir);

impl SqliteHere {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    fn store(&self) -> SqliteStore {
        SqliteStore::open(&self.0.path().join("locks.db")).expect("a database")
    }
}

impl SqliteHere {
    /// Returns how many processes the store counts as alive.
    fn alive(&self) -> usize {
        open_fifos(&self.0.path().join("locks.db.alive"))
    }
}

/// Returns the number of FIFOs in a directory that a process has open. Others are removed later.
pub(crate) fn open_fifos(dir: &std::path::Path) -> usize {
    use rustix::fs::{Mode, OFlags, open};
    let is_open = |path: std::path::PathBuf| open(path, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty()).is_ok();
    let files = std::fs::read_dir(dir).expect("the directory of those alive").flatten();
    files.filter(|file| !file.file_name().as_encoded_bytes().starts_with(b".") && is_open(file.path())).count()
}

impl World for SqliteHere {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.store())
    }

    async fn crash(&self, store: Arc<dyn Store>) {
        let before = self.alive();
        drop(store);
        eventually("its FIFO is gone", async || self.alive() < before).await;
    }

    fn sees_death(&self) -> bool {
        true
    }

    async fn expire(&self, name: &LockName) {
        self.store().expire(name);
    }
}

pub(crate) struct RedisHere(pub(crate) RedisServer);

impl RedisHere {
    pub(crate) async fn start() -> Self {
        Self(RedisServer::start().await)
    }

    pub(crate) async fn store(&self) -> RedisStore {
        let connected = RedisStore::connect(&self.0.url(), KeySpace::default(), RedisOptions::default()).await;
        connected.expect("the server of this test is up")
    }

    /// Returns how many processes the server counts as subscribers.
    pub(crate) async fn listeners(&self) -> usize {
        match self.0.command(&["PUBSUB", "SHARDCHANNELS", "lh1:inbox:*"]).await {
            redis::Value::Array(channels) => channels.len(),
            other => panic!("PUBSUB answered {other:?}"),
        }
    }
}

impl World for RedisHere {
    async fn open(&self) -> Arc<dyn Store> {
        Arc::new(self.store().await)
    }

    async fn crash(&self, store: Arc<dyn Store>) {
        let before = self.listeners().await;
        drop(store);
        eventually("the server noticed", async || self.listeners().await < before).await;
    }

    async fn expire(&self, name: &LockName) {
        let key = KeySpace::default().key(name).expect("a key");
        self.0.command(&["DEL", &key]).await;
    }
}

pub(crate) const LONG: Duration = Duration::from_secs(30);

pub(crate) fn name(text: &str) -> LockName {
    LockName::new(text).expect("a name")
}

pub(crate) fn ttl(lasts: Duration) -> Ttl {
    Ttl::new(lasts).expect("a ttl")
}

/// Creates an attempt with a ttl of 30 s, fenced and listening.
pub(crate) fn claim(lock: &str) -> AcquireRequest {
    AcquireRequest {
        name: name(lock),
        token: Token::random(),
        ttl: ttl(LONG),
        owner: Owner::named("battery").expect("an owner"),
        fenced: true,
        listens: true,
        since_ms: 1_700_000_000_000,
    }
}

pub(crate) async fn takes(store: &dyn Store, claim: &AcquireRequest) -> Grant {
    match store.try_acquire(claim).await {
        Ok(Try::Granted(grant)) => grant,
        other => panic!("not granted: {other:?}"),
    }
}

pub(crate) async fn is_held(store: &dyn Store, claim: &AcquireRequest) -> Option<Holder> {
    match store.try_acquire(claim).await {
        Ok(Try::Held(holder)) => holder,
        other => panic!("not held: {other:?}"),
    }
}

pub(crate) async fn queues(store: &dyn Store, claim: &AcquireRequest) -> Place {
    match store.acquire(claim, None).await {
        Ok(Acquire::Queued(place)) => place,
        other => panic!("not queued: {other:?}"),
    }
}

pub(crate) async fn acquires(store: &dyn Store, claim: &AcquireRequest) -> Grant {
    match store.acquire(claim, None).await {
        Ok(Acquire::Granted(grant)) => grant,
        other => panic!("not granted: {other:?}"),
    }
}

pub(crate) fn renewal(claim: &AcquireRequest, fence: Option<Fence>) -> Renewal {
    Renewal {
        name: claim.name.clone(),
        token: claim.token.clone(),
        fence,
        ttl: claim.ttl,
        prolong: true,
        rewrite: None,
        hand_to: None,
    }
}

/// Waits for the next message about a lock and skips messages about the connection.
pub(crate) async fn next(pushes: &mut mpsc::UnboundedReceiver<Push>) -> Push {
    let about_a_lock = async {
        loop {
            match pushes.recv().await {
                Some(Push::Disconnected | Push::Resync | Push::Hearing(_)) => {}
                Some(push) => return push,
                None => panic!("the store is gone"),
            }
        }
    };
    timeout(Duration::from_secs(5), about_a_lock).await.expect("a message")
}

pub(crate) async fn is_granted(pushes: &mut mpsc::UnboundedReceiver<Push>, claim: &AcquireRequest) -> Grant {
    match next(pushes).await {
        Push::Granted { token, grant } if token == claim.token => grant,
        other => panic!("not granted: {other:?}"),
    }
}

/// Checks that no message about a lock arrives for a moment.
pub(crate) async fn silence(pushes: &mut mpsc::UnboundedReceiver<Push>) {
    let said = timeout(Duration::from_millis(100), next(pushes)).await;
    assert!(said.is_err(), "unexpected: {said:?}");
}

/// Waits until a condition is true.
pub(crate) async fn eventually(what: &str, is_so: impl AsyncFn() -> bool) {
    let wait = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(10), wait).await.unwrap_or_else(|_| panic!("never: {what}"));
}
