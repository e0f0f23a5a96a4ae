//! A client: the store it uses, and the connection of this process.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use leasehold::config::{Setting, StoreUrl};
use leasehold::inspect::{EvictMode, Evicted, EvictedView, FinishRequest, Holder, HolderId, LockInfo, LockView};
use leasehold::lease::{Token, Ttl};
use leasehold::store::sqlite::Forking;
use leasehold::store::{KeySpace, Namespace};
use leasehold::{Fence, LockManager, LockName, OnUnavailable, Options, Owner};
use pyo3::prelude::*;
use tokio::sync::OnceCell;

use crate::call::{Answer, Call, NOTHING};
use crate::config::Config;
use crate::engine::{Process, count_fork};
use crate::failure::Failure;
use crate::guard::{Guard, Held};
use crate::terms::{Terms, duration, policy, ttl};
use crate::{json, lock};

/// The arguments of a client. Each process makes its own [`Options`] of them, because the owner names the process.
#[derive(Clone)]
struct ClientOptions {
    url: String,
    /// The options of the configuration; the fields below override them.
    configured: Options,
    keys: KeySpace,
    owner: String,
    ttl: Option<Duration>,
    on_unavailable: Option<OnUnavailable>,
    answer_within: Option<Duration>,
    patience: Option<Duration>,
}

impl ClientOptions {
    /// The URL of the store, without its password.
    fn store(&self) -> String {
        StoreUrl::parse(&self.url).map_or_else(|_| String::from("a store"), |url| url.show())
    }

    fn options(&self) -> Result<Options, Failure> {
        let mut options = self.configured.clone();
        options.keys = self.keys.clone();
        options.owner = Owner::named(&self.owner)?;
        options.on_unavailable = self.on_unavailable.unwrap_or(options.on_unavailable);
        if let Some(ttl) = self.ttl {
            options.ttl = Ttl::new(ttl)?;
        }
        options.request_timeout = self.answer_within.unwrap_or(options.request_timeout);
        options.outage_timeout = self.patience.unwrap_or(options.outage_timeout);
        Ok(options)
    }
}

/// The connection of one process. A child replaces its parent's by one of its own.
pub(crate) struct Connection {
    process: Process,
    options: ClientOptions,
    /// Empty until the first use. `None` only while the connection is dropped.
    locks: Option<OnceCell<LockManager>>,
}

impl Connection {
    fn new(options: ClientOptions) -> Arc<Self> {
        let new = Arc::new(Self { process: Process::this(), options, locks: Some(OnceCell::new()) });
        let mut all = lock(&CONNECTIONS);
        all.retain(|connection| connection.strong_count() > 0);
        all.push(Arc::downgrade(&new));
        new
    }

    fn cell(&self) -> &OnceCell<LockManager> {
        self.locks.as_ref().expect("taken only when it is dropped")
    }

    /// Connects with the first call. An unreachable server is an error if `eager`; otherwise it is like a server that was
    /// lost.
    async fn locks(&self, eager: bool) -> Result<LockManager, Failure> {
        if let Some(locks) = self.cell().get() {
            return Ok(locks.clone());
        }
        let connect = async || {
            let mut options = self.options.options()?;
            options.lazy_connect = !eager;
            Ok(LockManager::connect_with(&self.options.url, options).await?)
        };
        self.cell().get_or_try_init(connect).await.cloned()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // A mutex that a thread of the parent had locked at the fork stays locked for ever in the child.
            std::mem::forget(self.locks.take());
        }
    }
}

/// Every connection of this process. The mutex is taken only under the GIL, so no thread holds it at a fork.
static CONNECTIONS: Mutex<Vec<Weak<Connection>>> = Mutex::new(Vec::new());

thread_local! {
    /// The fork that this thread is doing.
    static FORKING: RefCell<Option<Forking>> = const { RefCell::new(None) };
}

/// Closes the SQLite files, which must not be open while this process forks.
#[pyfunction]
pub(crate) fn before_fork() {
    FORKING.set(Some(Forking::begin()));
}

/// Opens the SQLite files again after a fork.
#[pyfunction]
pub(crate) fn after_fork_in_parent() {
    FORKING.set(None);
}

/// Leaves everything of the parent's alone, in the child after a fork.
#[pyfunction]
pub(crate) fn after_fork_in_child() {
    count_fork();
    lock(&CONNECTIONS).clear();
    if let Some(forking) = FORKING.take() {
        forking.in_child();
    }
}

/// Makes a call that releases these guards together and closes every connection, within `within` seconds: for a process
/// that is about to end. It returns, in JSON, the locks whose release was not confirmed.
#[pyfunction]
pub(crate) fn close_all(guards: Vec<Py<Guard>>, within: f64) -> PyResult<Call> {
    let within = duration("within", within)?;
    let held: Vec<_> = guards.iter().filter_map(|guard| guard.get().take_ours()).collect();
    let all: Vec<_> = lock(&CONNECTIONS).iter().filter_map(Weak::upgrade).collect();
    Call::new(async move {
        let end = tokio::time::Instant::now() + within;
        let releases = held.into_iter().map(async |held| {
            let name = held.guard().name().to_string();
            let released = tokio::time::timeout_at(end, async { held.into_guard().await.release().await }).await;
            (!matches!(released, Ok(Ok(_)))).then_some(name)
        });
        let left: Vec<_> = join_all(releases).await.into_iter().flatten().collect();
        let closing = all.iter().filter_map(|connection| connection.cell().get().map(LockManager::shutdown));
        // A lock whose release is late ends with its lease.
        let _ = tokio::time::timeout_at(end, join_all(closing)).await;
        Ok(json(&left))
    })
}

/// A client of one store.
#[pyclass(frozen, weakref, module = "leasehold._native")]
pub(crate) struct Client {
    options: ClientOptions,
    /// `None` after `close`. The mutex is taken only under the GIL.
    connection: Mutex<Option<Arc<Connection>>>,
}

impl Client {
    /// The connection of this process.
    pub(crate) fn connection(&self) -> Result<Arc<Connection>, Failure> {
        let mut connection = lock(&self.connection);
        let Some(current) = &*connection else { return Err(Failure::Closed { store: self.options.store() }) };
        if current.process.is_this() {
            return Ok(current.clone());
        }
        let new = Connection::new(self.options.clone());
        // The parent's connection is not dropped.
        std::mem::forget(connection.replace(new.clone()));
        Ok(new)
    }

    /// Makes a call on the connection of this process.
    pub(crate) fn call<F, A>(&self, request: impl FnOnce(LockManager) -> F + Send + 'static) -> PyResult<Call>
    where
        F: Future<Output = Result<A, Failure>> + Send,
        A: Answer + 'static,
    {
        let connection = self.connection()?;
        Call::new(async move { request(connection.locks(false).await?).await })
    }

    /// Makes a call that releases a lock on the connection of this process.
    fn release<F>(&self, request: impl FnOnce(LockManager) -> F + Send + 'static) -> PyResult<Call>
    where
        F: Future<Output = Result<bool, Failure>> + Send,
    {
        let connection = self.connection()?;
        Call::uncancellable(async move { request(connection.locks(false).await?).await })
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (config, gpu, url, namespace, owner, ttl, on_unavailable, answer_within, patience))]
    #[expect(clippy::too_many_arguments, reason = "Python gives them names")]
    fn new(
        config: &Config,
        gpu: bool,
        url: Option<String>,
        namespace: Option<String>,
        owner: String,
        ttl: Option<f64>,
        on_unavailable: Option<&str>,
        answer_within: Option<f64>,
        patience: Option<f64>,
    ) -> PyResult<Self> {
        let config = &config.read;
        let options = ClientOptions {
            url: url.unwrap_or_else(|| config.store.reveal().to_owned()),
            configured: if gpu { config.gpu_options() } else { config.options() },
            keys: namespace.map_or_else(|| Ok(config.keys.clone()), |namespace| keys(namespace, &config.keys))?,
            owner,
            ttl: ttl.map(|seconds| self::ttl("ttl", seconds)).transpose()?,
            on_unavailable: on_unavailable.map(policy).transpose()?,
            answer_within: answer_within.map(|seconds| duration("answer_within", seconds)).transpose()?,
            patience: patience.map(|seconds| duration("patience", seconds)).transpose()?,
        };
        // Invalid arguments are refused here, not with the first call.
        options.options()?;
        let connection = Mutex::new(Some(Connection::new(options.clone())));
        Ok(Self { options, connection })
    }

    /// Makes a call that connects, unless there is a connection already.
    fn connect(&self) -> PyResult<Call> {
        let connection = self.connection()?;
        Call::new(async move { connection.locks(true).await.map(|_| NOTHING) })
    }

    /// The URL of the store, without its password; `None` before the first connection.
    #[getter]
    fn store(&self) -> Option<String> {
        let connection = lock(&self.connection);
        let connection = connection.as_ref().filter(|connection| connection.process.is_this())?;
        connection.cell().get().map(LockManager::store)
    }

    /// Makes a call that acquires a lock and returns its guard.
    fn acquire(&self, name: String, terms: &Terms) -> PyResult<Call> {
        let terms = terms.of_this_process();
        self.call(async move |locks| Ok(Held::from(locks.lock(name).terms(&terms).await?)))
    }

    /// Makes a call that acquires a lock under a token of the caller's choice, without a guard, and returns its fence.
    fn acquire_token(&self, name: String, token: &str, terms: &Terms) -> PyResult<Call> {
        let terms = terms.of_this_process();
        let token = Token::parse(token).map_err(Failure::from)?;
        self.call(async move |locks| {
            Ok(locks.lock(name).terms(&terms).under_token(&token).await?.try_fence().map(Fence::get))
        })
    }

    /// Makes a call that renews a lease by its token, to `ttl` or to the ttl that it has.
    fn renew_token(&self, name: String, token: &str, ttl: Option<f64>) -> PyResult<Call> {
        let ttl = ttl.map(|seconds| self::ttl("ttl", seconds)).transpose()?;
        let token = Token::parse(token).map_err(Failure::from)?;
        self.call(async move |locks| {
            let ttl = ttl.map(Ttl::new).transpose()?;
            locks.lease(name, &token)?.renew(ttl).await?;
            Ok(NOTHING)
        })
    }

    /// Makes a call that releases a lock by its token and returns whether the token held it.
    fn release_token(&self, name: String, token: &str) -> PyResult<Call> {
        let token = Token::parse(token).map_err(Failure::from)?;
        self.release(async move |locks| Ok(locks.lease(name, &token)?.release().await?))
    }

    /// Makes a call that releases a lock which another kind of client wrote as a plain value, and returns whether that
    /// value held it.
    fn release_value(&self, name: String, value: String, reason: String) -> PyResult<Call> {
        self.release(async move |locks| Ok(locks.release_value(name, &value, &reason).await?))
    }

    /// Makes a call that returns, in JSON, a view of a lock: its holder and its waiters.
    fn info(&self, name: String) -> PyResult<Call> {
        self.call(async move |locks| Ok(json(&locks.info(name).await?.view())))
    }

    /// Makes a call that returns, in JSON, a view of a lock with its holder alone; `None` if the lock is free.
    fn holder(&self, name: String) -> PyResult<Call> {
        self.call(async move |locks| {
            let name = LockName::new(name)?;
            Ok(locks.holder(&name).await?.map(|holder| held_by(name, holder)))
        })
    }

    /// Makes a call that returns, in JSON, views of the locks whose names begin with a prefix.
    fn locks(&self, prefix: String) -> PyResult<Call> {
        self.call(async move |locks| {
            let views: Vec<LockView> = locks.overview(&prefix).await?.iter().map(LockInfo::view).collect();
            Ok(json(&views))
        })
    }

    /// Makes a call that evicts a holder which was inspected before, and returns, in JSON, what was done.
    fn evict(&self, name: String, holder_id: &str, force: bool, reason: String) -> PyResult<Call> {
        let holder = HolderId::parse(holder_id).map_err(Failure::from)?;
        let mode = if force { EvictMode::Force } else { EvictMode::Revoke };
        self.call(async move |locks| {
            let name = LockName::new(name)?;
            let (message, now) = match locks.evict(&name, holder, mode, &reason).await? {
                Evicted::Done(old) => return Ok(json(&EvictedView::done(&name, mode, old))),
                Evicted::Free => return Ok(json(&EvictedView::free(&name))),
                Evicted::ChangedHands(now) => {
                    (format!("{name:?} has changed hands: it is held by {} ({})", now.owner, now.id), now)
                }
                Evicted::Foreign(now) => {
                    let message = format!(
                        "{name:?} is held by another kind of client ({}), which cannot be asked to stop: use force",
                        now.owner
                    );
                    (message, now)
                }
            };
            Err(Failure::NotEvicted { message, name: name.to_string(), holder: held_by(name, now) })
        })
    }

    /// Makes a call that asks a holder which was inspected before to finish soon, and returns whether it was notified.
    fn ask_to_finish(&self, name: String, holder_id: &str, reason: String) -> PyResult<Call> {
        let holder = HolderId::parse(holder_id).map_err(Failure::from)?;
        self.call(async move |locks| {
            let asked = locks.ask_to_finish(name, holder, &reason).await?;
            Ok(matches!(asked, FinishRequest::Delivered(_)))
        })
    }

    /// The counters of this process, in JSON; `None` before the first connection.
    fn statistics(&self) -> Option<String> {
        let connection = lock(&self.connection);
        let connection = connection.as_ref().filter(|connection| connection.process.is_this())?;
        Some(json(&connection.cell().get()?.statistics()))
    }

    /// Makes a call that ends the client within `within` seconds: new calls fail, holders are notified, and all locks are
    /// released.
    fn close(&self, within: f64) -> PyResult<Call> {
        let within = duration("within", within)?;
        let connection = lock(&self.connection).take();
        Call::new(async move {
            if let Some(connection) = connection.filter(|connection| connection.process.is_this())
                && let Some(locks) = connection.cell().get()
            {
                // A lock whose release is late ends with its lease.
                let _ = tokio::time::timeout(within, locks.shutdown()).await;
            }
            Ok(NOTHING)
        })
    }
}

/// Writes, in JSON, the view of a lock of which only the holder was read.
fn held_by(name: LockName, holder: Holder) -> String {
    json(&LockInfo { name, holder: Some(holder), waiters: Vec::new() }.view())
}

/// The namespace of a client. Names that are raw in the configured namespace are raw in this one, too; without a namespace
/// all names are.
fn keys(namespace: String, configured: &KeySpace) -> Result<KeySpace, Failure> {
    let raw = if namespace.is_empty() { Vec::new() } else { configured.raw().to_vec() };
    Ok(KeySpace::new(Namespace::new(namespace)?, raw)?)
}

/// Returns a new token, for a lease without a guard.
#[pyfunction]
pub(crate) fn new_token() -> String {
    Token::random().reveal().to_owned()
}
