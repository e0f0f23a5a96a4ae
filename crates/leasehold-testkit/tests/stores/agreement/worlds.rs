//! The three stores, each with the same clients.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use leasehold::inspect::FinishRequest;
use leasehold::lease::{Token, Ttl};
use leasehold::store::memory::MemoryWorld;
use leasehold::store::redis::{RedisOptions, RedisStore};
use leasehold::store::sqlite::SqliteStore;
use leasehold::store::{AcquireRequest, KeySpace, Push, SharedStore, Try};
use leasehold::{LockName, Owner};
use leasehold_testkit::{Kind, RedisServer};
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::case::PROVISIONAL;

/// A limit that is reached only by a hang.
const PATIENCE: Duration = Duration::from_secs(30);

/// One store and its clients.
pub(crate) struct World {
    backend: Backend,
    /// Inspects locks, and sends the message after every step.
    pub(crate) onlooker: SharedStore,
    /// `None` for dead clients.
    pub(crate) clients: Vec<Option<Client>>,
}

enum Backend {
    Memory(MemoryWorld),
    Sqlite { db: PathBuf, onlooker: Arc<SqliteStore>, _dir: TempDir },
    Redis(RedisServer),
}

/// A process, from the store's point of view.
pub(crate) struct Client {
    pub(crate) store: SharedStore,
    pushes: mpsc::UnboundedReceiver<Push>,
    /// A lock of its own. A request to finish it arrives after all earlier messages.
    letter_box: AcquireRequest,
}

impl World {
    pub(crate) async fn new(kind: Kind) -> Self {
        let (backend, onlooker): (_, SharedStore) = match kind {
            Kind::Memory => {
                let world = MemoryWorld::new();
                world.set_provisional_ms(millis(PROVISIONAL));
                let onlooker = Arc::new(world.open());
                (Backend::Memory(world), onlooker)
            }
            Kind::Sqlite => {
                let dir = tempfile::tempdir().expect("a directory");
                let db = dir.path().join("locks.db");
                let onlooker = Arc::new(SqliteStore::open(&db).expect("a database"));
                (Backend::Sqlite { db, onlooker: onlooker.clone(), _dir: dir }, onlooker)
            }
            Kind::Redis => {
                let server = RedisServer::start().await;
                let onlooker = Arc::new(connect(&server).await);
                (Backend::Redis(server), onlooker)
            }
        };
        Self { backend, onlooker, clients: Vec::new() }
    }

    pub(crate) fn kind(&self) -> Kind {
        match self.backend {
            Backend::Memory(_) => Kind::Memory,
            Backend::Sqlite { .. } => Kind::Sqlite,
            Backend::Redis(_) => Kind::Redis,
        }
    }

    /// Resets everything and starts this many clients.
    pub(crate) async fn begin(&mut self, clients: usize) {
        if let Backend::Redis(server) = &self.backend {
            server.command(&["FLUSHALL"]).await;
            for client in self.clients.iter().flatten() {
                client.take_letter_box().await;
            }
        }
        for client in 0..clients {
            self.revive(client).await;
        }
    }

    /// Starts a client if it is dead, with a new address.
    pub(crate) async fn revive(&mut self, client: usize) {
        while self.clients.len() <= client {
            self.clients.push(None);
        }
        if self.clients[client].is_none() {
            self.clients[client] = Some(self.open().await);
        }
    }

    async fn open(&self) -> Client {
        let store: SharedStore = match &self.backend {
            Backend::Memory(world) => Arc::new(world.open()),
            Backend::Sqlite { db, .. } => {
                let store = SqliteStore::open(db).expect("the file of this test");
                store.set_provisional_ms(millis(PROVISIONAL));
                store.set_looks_around(false);
                Arc::new(store)
            }
            Backend::Redis(server) => Arc::new(connect(server).await),
        };
        let client = Client { pushes: store.pushes(), store, letter_box: letter_box() };
        client.take_letter_box().await;
        client
    }

    /// Ends a client, and returns when the store counts it as dead.
    pub(crate) async fn kill(&mut self, client: usize, politely: bool) {
        let Some(Client { store, pushes, letter_box }) = self.clients[client].take() else { return };
        let before = self.listeners().await;
        if politely {
            store.close().await;
        }
        drop((store, pushes));
        if let Some(before) = before {
            let gone = async {
                while self.listeners().await >= Some(before) {
                    tokio::task::yield_now().await;
                }
            };
            timeout(PATIENCE, gone).await.expect("a store notices that its client is gone");
        }
        // In stores where a lease outlives its process, this lock is not needed any more.
        self.onlooker.release(&letter_box.name, &letter_box.token).await.expect("an answer");
    }

    /// Returns how many processes the store counts as alive; `None` if it knows at once.
    async fn listeners(&self) -> Option<usize> {
        match &self.backend {
            Backend::Memory(_) => None,
            Backend::Sqlite { db, .. } => {
                let mut dir = db.as_os_str().to_owned();
                dir.push(".alive");
                Some(crate::support::open_fifos(dir.as_ref()))
            }
            Backend::Redis(server) => match server.command(&["PUBSUB", "SHARDCHANNELS", "lh1:inbox:*"]).await {
                redis::Value::Array(channels) => Some(channels.len()),
                other => panic!("PUBSUB answered {other:?}"),
            },
        }
    }

    /// Makes a lease expire now.
    pub(crate) async fn expire(&self, name: &LockName) {
        match &self.backend {
            Backend::Memory(world) => world.expire(name),
            Backend::Sqlite { onlooker, .. } => onlooker.expire(name),
            Backend::Redis(server) => drop(server.command(&["DEL", &key(name)]).await),
        }
    }

    /// Makes another kind of client overwrite the key.
    pub(crate) async fn put_foreign(&self, name: &LockName, value: &str, ttl: Duration) {
        match &self.backend {
            Backend::Memory(world) => world.put_foreign(name, value, ttl),
            Backend::Sqlite { .. } => panic!("nobody but us writes into the file"),
            Backend::Redis(server) => {
                server.command(&["SET", &key(name), value, "PX", &millis(ttl).to_string()]).await;
            }
        }
    }

    /// Returns the messages to each client since the last call.
    pub(crate) async fn told(&mut self) -> Vec<Vec<Push>> {
        let mut told = Vec::new();
        for client in &mut self.clients {
            told.push(match client {
                Some(client) => client.told(&self.onlooker).await,
                None => Vec::new(),
            });
        }
        told
    }

    /// Returns the state for the failure report.
    pub(crate) fn log(&self) -> String {
        match &self.backend {
            Backend::Redis(server) => format!("\nthe server's log ends:\n{}", server.log_tail()),
            Backend::Memory(_) | Backend::Sqlite { .. } => String::new(),
        }
    }
}

impl Client {
    async fn take_letter_box(&self) {
        let taken = self.store.try_acquire(&self.letter_box).await;
        assert!(matches!(taken, Ok(Try::Granted(_))), "{taken:?}");
    }

    async fn told(&mut self, onlooker: &SharedStore) -> Vec<Push> {
        let AcquireRequest { name, token, .. } = &self.letter_box;
        let sent = onlooker.ask_to_finish(name, token.holder_id(), "that is all").await;
        assert!(matches!(sent, Ok(FinishRequest::Delivered(_))), "{sent:?}");
        let mut told = Vec::new();
        let all = async {
            loop {
                match self.pushes.recv().await.expect("a living store") {
                    Push::Finish { token, .. } if token == self.letter_box.token => return,
                    // These are about the connection.
                    Push::Disconnected | Push::Resync | Push::Hearing(_) => {}
                    push => told.push(push),
                }
            }
        };
        timeout(PATIENCE, all).await.expect("a letter arrives");
        told
    }
}

async fn connect(server: &RedisServer) -> RedisStore {
    let options = RedisOptions::default().limits(PROVISIONAL, Duration::from_secs(60));
    RedisStore::connect(&server.url(), KeySpace::default(), options).await.expect("the server of this test")
}

fn letter_box() -> AcquireRequest {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    AcquireRequest {
        name: LockName::new(format!("letters-{number}")).expect("a name"),
        token: Token::random(),
        ttl: Ttl::new(Ttl::MAX).expect("a ttl"),
        owner: Owner::named("letters").expect("an owner"),
        fenced: true,
        listens: true,
        since_ms: 1,
    }
}

fn key(name: &LockName) -> String {
    KeySpace::default().key(name).expect("a key")
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).expect("a short time")
}
