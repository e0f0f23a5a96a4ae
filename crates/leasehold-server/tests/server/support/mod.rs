//! A server in the test, on each kind of store.
#![allow(dead_code, reason = "each test file uses a part")]

use std::net::SocketAddr;
use std::sync::Arc;

use leasehold::store::KeySpace;
use leasehold::store::memory::MemoryWorld;
use leasehold::{LockManager, Options};
use leasehold_server::{ServeError, Server, Settings};
use leasehold_testkit::RedisServer;
use leasehold_testkit::http::{Answer, receive, send};
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// A store, a manager of the test on it, and a server.
pub(crate) struct Place {
    pub(crate) locks: LockManager,
    pub(crate) at: SocketAddr,
    pub(crate) kind: &'static str,
    pub(crate) redis: Option<RedisServer>,
    stop: CancellationToken,
    served: Option<JoinHandle<Result<(), ServeError>>>,
    /// Sent with every request.
    pub(crate) headers: String,
    dir: tempfile::TempDir,
}

impl Place {
    pub(crate) async fn memory() -> Self {
        Self::memory_with(Settings::default()).await
    }

    pub(crate) async fn memory_with(settings: Settings) -> Self {
        let world = MemoryWorld::new();
        let open = || LockManager::with_store(Arc::new(world.open_with(KeySpace::default())), quiet());
        Self::start("memory", open(), open(), None, settings).await
    }

    pub(crate) async fn sqlite() -> Self {
        Self::sqlite_with(Settings::default()).await
    }

    pub(crate) async fn sqlite_with(settings: Settings) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let url = format!("sqlite:{}", dir.path().join("locks.db").display());
        let mut place = Self::start("sqlite", open(&url).await, open(&url).await, None, settings).await;
        place.dir = dir;
        place
    }

    pub(crate) async fn redis() -> Self {
        Self::redis_with(Settings::default()).await
    }

    pub(crate) async fn redis_with(settings: Settings) -> Self {
        let redis = RedisServer::start().await;
        let (ours, theirs) = (open(&redis.url()).await, open(&redis.url()).await);
        Self::start("redis", ours, theirs, Some(redis), settings).await
    }

    /// A place with options for the manager of the test.
    pub(crate) async fn redis_between(options: Options, settings: Settings) -> Self {
        let redis = RedisServer::start().await;
        let ours = LockManager::connect_with(&redis.url(), options).await.expect("a store");
        let theirs = open(&redis.url()).await;
        Self::start("redis", ours, theirs, Some(redis), settings).await
    }

    /// A place whose server has its journal in a directory.
    pub(crate) async fn memory_with_journal(journal: std::path::PathBuf, settings: Settings) -> Self {
        let world = MemoryWorld::new();
        let open = |options| LockManager::with_store(Arc::new(world.open_with(KeySpace::default())), options);
        let mut options = quiet();
        options.journal = Some(journal);
        Self::start("memory", open(quiet()), open(options), None, settings).await
    }

    pub(crate) async fn each() -> [Self; 3] {
        [Self::memory().await, Self::sqlite().await, Self::redis().await]
    }

    /// A place over two managers of one store, the test's and the server's.
    pub(crate) async fn over(kind: &'static str, ours: LockManager, theirs: LockManager, settings: Settings) -> Self {
        Self::start(kind, ours, theirs, None, settings).await
    }

    async fn start(
        kind: &'static str,
        locks: LockManager,
        served: LockManager,
        redis: Option<RedisServer>,
        settings: Settings,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let at = listener.local_addr().expect("bound");
        let stop = CancellationToken::new();
        let shutdown = stop.clone().cancelled_owned();
        let served = tokio::spawn(async move {
            let ended = Server::new(served.clone(), settings).run(listener, shutdown).await;
            served.shutdown().await;
            ended
        });
        let dir = tempfile::tempdir().expect("a directory");
        Self { locks, at, kind, redis, stop, served: Some(served), headers: String::new(), dir }
    }

    /// Stops the server and waits until it has ended.
    pub(crate) async fn end(mut self) {
        self.stop.cancel();
        self.ended().await;
        self.locks.shutdown().await;
    }

    /// Waits until a stopped server has ended.
    pub(crate) async fn ended(&mut self) {
        let served = self.served.take().expect("it runs");
        served.await.expect("no panic").expect("served");
    }

    /// Stops the server.
    pub(crate) fn stop(&self) {
        self.stop.cancel();
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, "", "").await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.ask("POST", path, "Content-Type: application/json\r\n", &body.to_string()).await
    }

    pub(crate) async fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        let headers = format!("Host: {}\r\n{}{headers}", self.at, self.headers);
        let stream = send(self.at, &format!("{method} {path}"), &headers, body).await;
        receive(stream).await.unwrap_or_else(|| panic!("{}: no answer to {method} {path}", self.kind))
    }

    /// Sends a request without waiting for the response.
    pub(crate) async fn begin(&self, path: &str, body: &Value) -> TcpStream {
        let headers = format!("Host: {}\r\n{}Content-Type: application/json\r\n", self.at, self.headers);
        send(self.at, &format!("POST {path}"), &headers, &body.to_string()).await
    }
}

pub(crate) fn quiet() -> Options {
    let mut options = Options::default();
    options.journal = None;
    options
}

async fn open(url: &str) -> LockManager {
    LockManager::connect_with(url, quiet()).await.expect("a store")
}

/// Encodes a name as one path segment.
pub(crate) fn encoded(name: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_~".contains(&b);
    name.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}
