//! A store of any kind for one test, and managers that use it like separate processes.

use leasehold::store::memory::MemoryWorld;
use leasehold::store::redis::{RedisOptions, RedisStore};
use leasehold::store::sqlite::SqliteStore;
use leasehold::store::{KeySpace, SharedStore};
use leasehold::{LockManager, LockName, Options};
use std::sync::Arc;
use tempfile::TempDir;

use crate::RedisServer;

/// The kinds of stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Inside this process.
    Memory,
    /// A file in a temporary directory.
    Sqlite,
    /// A real redis-server (or Valkey) on loopback.
    Redis,
}

/// A store for one test.
pub struct Arena {
    kind: Kind,
    world: MemoryWorld,
    server: Option<RedisServer>,
    dir: TempDir,
}

impl Arena {
    /// Creates a store, and starts a server if the kind needs one.
    pub async fn new(kind: Kind) -> Self {
        let server = match kind {
            Kind::Redis => Some(RedisServer::start().await),
            Kind::Memory | Kind::Sqlite => None,
        };
        Self { kind, world: MemoryWorld::new(), server, dir: tempfile::tempdir().expect("a directory") }
    }

    /// Returns the kind of the store.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the server of the store.
    ///
    /// # Panics
    /// If the kind has no server.
    pub fn server(&self) -> &RedisServer {
        self.server.as_ref().expect("a store with a server")
    }

    /// Returns the URL for other processes; `None` for the memory store, which other processes cannot open.
    pub fn url(&self) -> Option<String> {
        match self.kind {
            Kind::Memory => None,
            Kind::Sqlite => Some(format!("sqlite:{}", self.path().display())),
            Kind::Redis => Some(self.server().url()),
        }
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("locks.db")
    }

    /// Returns the default options, with the journal in the directory of the arena.
    pub fn options(&self) -> Options {
        let mut options = Options::default();
        options.journal = Some(self.dir.path().join("journal"));
        options
    }

    /// Opens the store with a connection of its own, like another process.
    pub async fn store(&self) -> SharedStore {
        self.store_with(KeySpace::default()).await
    }

    async fn store_with(&self, keys: KeySpace) -> SharedStore {
        match self.kind {
            Kind::Memory => Arc::new(self.world.open_with(keys)),
            Kind::Sqlite => Arc::new(SqliteStore::open_with(&self.path(), keys).expect("a database")),
            Kind::Redis => {
                let options = RedisOptions::default();
                Arc::new(RedisStore::connect(&self.server().url(), keys, options).await.expect("a connection"))
            }
        }
    }

    /// Opens a manager with a connection of its own, like another process.
    pub async fn manager(&self) -> LockManager {
        self.manager_with(self.options()).await
    }

    /// Opens a manager with other options; see [`manager`](Self::manager).
    pub async fn manager_with(&self, options: Options) -> LockManager {
        match self.url() {
            Some(url) => LockManager::connect_with(&url, options).await.expect("a manager"),
            None => LockManager::with_store(self.store_with(options.keys.clone()).await, options),
        }
    }

    /// Makes a lease expire now.
    pub async fn expire(&self, name: &str) {
        let name = LockName::new(name).expect("a name");
        match self.kind {
            Kind::Memory => self.world.expire(&name),
            Kind::Sqlite => SqliteStore::open(&self.path()).expect("a database").expire(&name),
            Kind::Redis => {
                let key = KeySpace::default().key(&name).expect("a key");
                self.server().command(&["DEL", &key]).await;
            }
        }
    }
}

/// Runs async tests that take an [`Arena`] on every kind of store.
#[macro_export]
macro_rules! on_every_store {
    ($($test:ident),* $(,)?) => {
        mod memory { $( #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { super::$test($crate::Arena::new($crate::Kind::Memory).await).await } )* }
        mod sqlite { $( #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { super::$test($crate::Arena::new($crate::Kind::Sqlite).await).await } )* }
        mod redis { $( #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() { super::$test($crate::Arena::new($crate::Kind::Redis).await).await } )* }
    };
}
