//! A client: which store, and this process's connection to it.

use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use leasehold::bindings::Retention;
use leasehold::config::{Setting, StoreUrl};
use leasehold::inspect::{EvictMode, Evicted, EvictedView, HolderId, LockInfo, LockView};
use leasehold::lease::{Terms, Token, Ttl};
use leasehold::store::sqlite::Forking;
use leasehold::store::{KeySpace, Namespace};
use leasehold::{Fence, LockManager, LockName, OnUnavailable, Options, Owner};
use pyo3::prelude::*;
use tokio::sync::OnceCell;

use crate::answer::Answer;
use crate::call::{Call, Outcome};
use crate::config::Config;
use crate::engine::{Process, forked};
use crate::failure::{Failure, json};
use crate::guard::Guard;

/// What a client was told, from which each process makes its own options: the owner names the process.
#[derive(Clone)]
struct Place {
    url: String,
    /// As configured; the rest is what was said beside that.
    configured: Options,
    keys: KeySpace,
    owner: String,
    ttl: Option<Duration>,
    on_unavailable: Option<OnUnavailable>,
    answer_within: Option<Duration>,
    patience: Option<Duration>,
}

impl Place {
    /// The store, without its secrets.
    fn shown(&self) -> String {
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

/// The connection of one process. A child that finds its parent's makes one of its own.
pub(crate) struct Connection {
    process: Process,
    place: Place,
    /// There until it is dropped; empty until it is used.
    locks: Option<OnceCell<LockManager>>,
}

impl Connection {
    fn new(place: Place) -> Arc<Self> {
        let new = Arc::new(Self { process: Process::this(), place, locks: Some(OnceCell::new()) });
        let mut all = lock(&CONNECTIONS);
        all.retain(|connection| connection.strong_count() > 0);
        all.push(Arc::downgrade(&new));
        new
    }

    fn cell(&self) -> &OnceCell<LockManager> {
        self.locks.as_ref().expect("there until it is dropped")
    }

    /// Connects where nobody has yet. A server that is not there is one that was lost, unless `now` was said.
    async fn locks(&self, now: bool) -> Result<LockManager, Failure> {
        if let Some(locks) = self.cell().get() {
            return Ok(locks.clone());
        }
        let connect = async || {
            let mut options = self.place.options()?;
            options.lazy_connect = !now;
            Ok(LockManager::connect_with(&self.place.url, options).await?)
        };
        self.cell().get_or_try_init(connect).await.cloned()
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if !self.process.is_this() {
            // Nothing of the parent's is touched: what its thread had locked at the fork is locked for ever.
            std::mem::forget(self.locks.take());
        }
    }
}

/// Every connection of this process. Only taken under the interpreter's lock, so never held at a fork.
static CONNECTIONS: Mutex<Vec<Weak<Connection>>> = Mutex::new(Vec::new());

thread_local! {
    /// The fork this thread is in the midst of.
    static FORKING: RefCell<Option<Forking>> = const { RefCell::new(None) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Closes what must not be open while this process forks.
#[pyfunction]
pub(crate) fn before_fork() {
    FORKING.set(Some(Forking::begin()));
}

/// Opens it again.
#[pyfunction]
pub(crate) fn after_fork_in_parent() {
    FORKING.set(None);
}

/// Begins anew, without anything of the parent's.
#[pyfunction]
pub(crate) fn after_fork_in_child() {
    forked();
    lock(&CONNECTIONS).clear();
    if let Some(forking) = FORKING.take() {
        forking.in_child();
    }
}

/// Releases these guards together and closes every connection of this process, which is about to end. All of it takes
/// at most `within` seconds. Returns, in JSON, the locks whose release was not confirmed.
#[pyfunction]
pub(crate) fn close_all(py: Python<'_>, guards: Vec<Py<Guard>>, within: f64) -> PyResult<Call> {
    let within = span("within", within).map_err(|failure| failure.raise(py))?;
    let held: Vec<_> = guards.iter().filter_map(|guard| guard.get().take_ours()).collect();
    let all: Vec<_> = lock(&CONNECTIONS).iter().filter_map(Weak::upgrade).collect();
    Call::new(async move {
        let end = tokio::time::Instant::now() + within;
        let releases = held.into_iter().map(async |held| {
            let name = held.guard().name().to_string();
            let released = tokio::time::timeout_at(end, async { held.alone().await.release().await }).await;
            (!matches!(released, Ok(Ok(_)))).then_some(name)
        });
        let left: Vec<_> = join_all(releases).await.into_iter().flatten().collect();
        let closing = all.iter().filter_map(|connection| connection.cell().get().map(LockManager::shutdown));
        // What is late ends with its lease.
        let _ = tokio::time::timeout_at(end, join_all(closing)).await;
        Ok(Answer::json(&left))
    })
}

/// The way to locks in one store.
#[pyclass(frozen, weakref, module = "leasehold._native")]
pub(crate) struct Client {
    place: Place,
    /// `None` once it was closed. Only taken under the interpreter's lock.
    connection: Mutex<Option<Arc<Connection>>>,
}

impl Client {
    /// The connection of this process.
    pub(crate) fn connection(&self) -> Result<Arc<Connection>, Failure> {
        let mut connection = lock(&self.connection);
        let Some(current) = &*connection else { return Err(Failure::Closed { store: self.place.shown() }) };
        if current.process.is_this() {
            return Ok(current.clone());
        }
        let new = Connection::new(self.place.clone());
        // The parent's is left as it is.
        std::mem::forget(connection.replace(new.clone()));
        Ok(new)
    }

    /// A call on this process's connection.
    pub(crate) fn call<F>(&self, py: Python<'_>, ask: impl FnOnce(LockManager) -> F + Send + 'static) -> PyResult<Call>
    where
        F: Future<Output = Outcome> + Send,
    {
        let connection = self.connection().map_err(|failure| failure.raise(py))?;
        Call::new(async move { ask(connection.locks(false).await?).await })
    }

    /// The same of a release.
    fn release<F>(&self, py: Python<'_>, ask: impl FnOnce(LockManager) -> F + Send + 'static) -> PyResult<Call>
    where
        F: Future<Output = Outcome> + Send,
    {
        let connection = self.connection().map_err(|failure| failure.raise(py))?;
        Call::to_the_end(async move { ask(connection.locks(false).await?).await })
    }
}

#[pymethods]
impl Client {
    #[new]
    #[pyo3(signature = (config, gpu, url, namespace, owner, ttl, on_unavailable, answer_within, patience))]
    #[expect(clippy::too_many_arguments, reason = "Python gives them names")]
    fn new(
        py: Python<'_>,
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
        let read = || -> Result<Place, Failure> {
            let config = &config.read;
            Ok(Place {
                url: url.unwrap_or_else(|| config.store.reveal().to_owned()),
                configured: if gpu { config.gpu_options() } else { config.options() },
                keys: namespace.map_or_else(|| Ok(config.keys.clone()), |namespace| keys(namespace, &config.keys))?,
                owner,
                ttl: ttl.map(|ttl| lease("ttl", ttl)).transpose()?,
                on_unavailable: on_unavailable.map(policy).transpose()?,
                answer_within: answer_within.map(|s| span("answer_within", s)).transpose()?,
                patience: patience.map(|s| span("patience", s)).transpose()?,
            })
        };
        let place = read().and_then(|place| place.options().map(|_| place)).map_err(|failure| failure.raise(py))?;
        let connection = Mutex::new(Some(Connection::new(place.clone())));
        Ok(Self { place, connection })
    }

    /// A call that makes the connection, where it is not there yet.
    fn connect(&self, py: Python<'_>) -> PyResult<Call> {
        let connection = self.connection().map_err(|failure| failure.raise(py))?;
        Call::new(async move { connection.locks(true).await.map(|_| Answer::Nothing) })
    }

    /// Which store this is, without its secrets; `None` before it is connected.
    #[getter]
    fn store(&self) -> Option<String> {
        let connection = lock(&self.connection);
        let connection = connection.as_ref().filter(|connection| connection.process.is_this())?;
        connection.cell().get().map(LockManager::store)
    }

    /// A call that takes a lock.
    #[pyo3(signature = (name, ttl, wait, renew, max_hold, fenced, owner, on_unavailable))]
    #[expect(clippy::too_many_arguments, reason = "Python gives them names")]
    fn acquire(
        &self,
        py: Python<'_>,
        name: String,
        ttl: Option<f64>,
        wait: Option<f64>,
        renew: bool,
        max_hold: Option<f64>,
        fenced: bool,
        owner: Option<String>,
        on_unavailable: Option<&str>,
    ) -> PyResult<Call> {
        let terms = terms(ttl, wait, renew, max_hold, owner).map_err(|failure| failure.raise(py))?;
        let policy = on_unavailable.map(policy).transpose().map_err(|failure| failure.raise(py))?;
        self.call(py, async move |locks| {
            let mut request = locks.lock(name).terms(&terms);
            if !fenced {
                request = request.unfenced();
            }
            if let Some(policy) = policy {
                request = request.on_unavailable(policy);
            }
            Ok(Answer::Guard(request.await?.into()))
        })
    }

    /// A call that takes a lock under a token of the caller's choice, without a guard: its fence.
    #[pyo3(signature = (name, token, ttl, wait, fenced, owner))]
    #[expect(clippy::too_many_arguments, reason = "Python gives them names")]
    fn acquire_token(
        &self,
        py: Python<'_>,
        name: String,
        token: &str,
        ttl: Option<f64>,
        wait: Option<f64>,
        fenced: bool,
        owner: Option<String>,
    ) -> PyResult<Call> {
        let terms = terms(ttl, wait, false, None, owner).map_err(|failure| failure.raise(py))?;
        let token = Token::parse(token).map_err(|invalid| Failure::from(invalid).raise(py))?;
        self.call(py, async move |locks| {
            let mut request = locks.lock(name).terms(&terms);
            if !fenced {
                request = request.unfenced();
            }
            Ok(Answer::Number(request.under_token(&token).await?.try_fence().map(Fence::get)))
        })
    }

    /// A call that renews a lease by its token; without a ttl to the one it was taken with.
    fn renew_token(&self, py: Python<'_>, name: String, token: &str, ttl: Option<f64>) -> PyResult<Call> {
        let ttl = ttl.map(|ttl| lease("ttl", ttl)).transpose().map_err(|failure| failure.raise(py))?;
        let token = Token::parse(token).map_err(|invalid| Failure::from(invalid).raise(py))?;
        self.call(py, async move |locks| {
            let ttl = ttl.map(Ttl::new).transpose()?;
            locks.lease(name, &token)?.renew(ttl).await?;
            Ok(Answer::Nothing)
        })
    }

    /// A call that releases a lock by its token: whether it was that token's.
    fn release_token(&self, py: Python<'_>, name: String, token: &str) -> PyResult<Call> {
        let token = Token::parse(token).map_err(|invalid| Failure::from(invalid).raise(py))?;
        self.release(py, async move |locks| Ok(Answer::Bool(locks.lease(name, &token)?.release().await?)))
    }

    /// A call that gives back what another kind of client wrote as a plain value: whether it was that value's.
    fn release_value(&self, py: Python<'_>, name: String, value: String, reason: String) -> PyResult<Call> {
        self.release(py, async move |locks| Ok(Answer::Bool(locks.release_value(name, &value, &reason).await?)))
    }

    /// A call that says who holds a lock and who waits for it: a view, in JSON.
    fn info(&self, py: Python<'_>, name: String) -> PyResult<Call> {
        self.call(py, async move |locks| Ok(Answer::json(&locks.info(name).await?.view())))
    }

    /// The same of whoever holds it; `None` when it is free.
    fn holder(&self, py: Python<'_>, name: String) -> PyResult<Call> {
        self.call(py, async move |locks| {
            let name = LockName::new(name)?;
            let Some(holder) = locks.holder(&name).await? else { return Ok(Answer::Text(None)) };
            Ok(Answer::Text(Some(json(&LockInfo { name, holder: Some(holder), waiters: Vec::new() }))))
        })
    }

    /// A call that lists the locks whose names begin with a prefix: views, in JSON.
    fn locks(&self, py: Python<'_>, prefix: String) -> PyResult<Call> {
        self.call(py, async move |locks| {
            let views: Vec<LockView> = locks.overview(&prefix).await?.iter().map(LockInfo::view).collect();
            Ok(Answer::json(&views))
        })
    }

    /// A call that takes a lock away from the holder that was looked at: a view, in JSON.
    fn evict(&self, py: Python<'_>, name: String, holder_id: &str, force: bool, reason: String) -> PyResult<Call> {
        let holder = HolderId::parse(holder_id).map_err(|invalid| Failure::from(invalid).raise(py))?;
        let mode = if force { EvictMode::Force } else { EvictMode::Revoke };
        self.call(py, async move |locks| {
            let name = LockName::new(name)?;
            let refused = |message: String, holder| {
                let info = LockInfo { name: name.clone(), holder: Some(holder), waiters: Vec::new() };
                Failure::NotEvicted { message, name: name.to_string(), holder: json(&info) }
            };
            match locks.evict(&name, holder, mode, &reason).await? {
                Evicted::Done(old) => Ok(Answer::json(&EvictedView::done(&name, mode, old))),
                Evicted::Free => Ok(Answer::json(&EvictedView::free(&name))),
                Evicted::ChangedHands(now) => {
                    let message = format!("{name:?} has changed hands: it is held by {} ({})", now.owner, now.id);
                    Err(refused(message, now))
                }
                Evicted::Foreign(now) => {
                    let message = format!(
                        "{name:?} is held by another kind of client ({}), which cannot be asked to stop: use force",
                        now.owner
                    );
                    Err(refused(message, now))
                }
            }
        })
    }

    /// A call that asks the holder that was looked at to come to an end: whether it was told.
    fn ask_to_finish(&self, py: Python<'_>, name: String, holder_id: &str, reason: String) -> PyResult<Call> {
        let holder = HolderId::parse(holder_id).map_err(|invalid| Failure::from(invalid).raise(py))?;
        self.call(py, async move |locks| {
            let asked = locks.ask_to_finish(name, holder, &reason).await?;
            Ok(Answer::Bool(matches!(asked, leasehold::inspect::FinishRequest::Delivered(_))))
        })
    }

    /// What this process counted, in JSON.
    fn statistics(&self) -> Option<String> {
        let connection = lock(&self.connection);
        let connection = connection.as_ref().filter(|connection| connection.process.is_this())?;
        let counted = connection.cell().get()?.statistics();
        Some(serde_json::to_string(&counted).expect("numbers are JSON"))
    }

    /// A call that lets nothing new begin, tells every holder, and gives everything back, at most so many
    /// seconds.
    fn close(&self, py: Python<'_>, within: f64) -> PyResult<Call> {
        let within = span("within", within).map_err(|failure| failure.raise(py))?;
        let connection = lock(&self.connection).take();
        Call::new(async move {
            if let Some(connection) = connection.filter(|connection| connection.process.is_this())
                && let Some(locks) = connection.cell().get()
            {
                // Whoever is late is taken care of by the end of its lease.
                let _ = tokio::time::timeout(within, locks.shutdown()).await;
            }
            Ok(Answer::Nothing)
        })
    }
}

/// The terms of a request, as Python gives them.
pub(crate) fn terms(
    ttl: Option<f64>,
    wait: Option<f64>,
    renew: bool,
    max_hold: Option<f64>,
    owner: Option<String>,
) -> Result<Terms, Failure> {
    let mut terms = Terms::new().renew(renew);
    if let Some(ttl) = ttl {
        terms = terms.ttl(lease("ttl", ttl)?);
    }
    if let Some(wait) = wait {
        terms = terms.wait_up_to(span("wait", wait)?);
    }
    if let Some(hold) = max_hold {
        terms = terms.max_hold(span("max_hold", hold)?);
    }
    if let Some(owner) = owner {
        terms = terms.owner(owner);
    }
    Ok(terms)
}

/// Seconds as Python counts them.
pub(crate) fn span(what: &str, seconds: f64) -> Result<Duration, Failure> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(span) => Ok(span),
        // Longer than anybody counts.
        Err(_) if seconds > 0.0 => Ok(Duration::MAX),
        Err(_) => Err(Failure::Argument(format!("{what}: {seconds} is not a number of seconds, 0 or more"))),
    }
}

/// The same of a lease.
pub(crate) fn lease(what: &str, seconds: f64) -> Result<Duration, Failure> {
    whole_millis(what, seconds, Ttl::MIN..=Ttl::MAX)
}

/// The same of how long something is kept.
pub(crate) fn kept(what: &str, seconds: f64) -> Result<Duration, Failure> {
    whole_millis(what, seconds, Retention::MIN..=Retention::MAX)
}

/// As stores count.
fn whole_millis(what: &str, seconds: f64, bounds: RangeInclusive<Duration>) -> Result<Duration, Failure> {
    let exact = span(what, seconds)?.saturating_add(Duration::from_micros(500));
    let given = Duration::from_millis(u64::try_from(exact.as_millis()).unwrap_or(u64::MAX));
    if bounds.contains(&given) {
        return Ok(given);
    }
    let (least, most) = (bounds.start().as_secs_f64(), bounds.end().as_secs());
    Err(Failure::Argument(format!("{what}: {seconds:?} is not between {least} and {most} seconds")))
}

/// Refuses what is no lease, by the name that it has where it was said.
#[pyfunction]
pub(crate) fn check_lease(py: Python<'_>, what: &str, seconds: f64) -> PyResult<()> {
    lease(what, seconds).map(drop).map_err(|failure| failure.raise(py))
}

/// The same of how long something is kept.
#[pyfunction]
pub(crate) fn check_kept(py: Python<'_>, what: &str, seconds: f64) -> PyResult<()> {
    kept(what, seconds).map(drop).map_err(|failure| failure.raise(py))
}

fn policy(text: &str) -> Result<OnUnavailable, Failure> {
    match text {
        "closed" => Ok(OnUnavailable::FailClosed),
        "open" => Ok(OnUnavailable::FailOpen),
        _ => Err(Failure::Argument(format!("on_unavailable: {text:?} is neither \"closed\" nor \"open\""))),
    }
}

/// Raw names are raw in every namespace; without one all are.
fn keys(namespace: String, configured: &KeySpace) -> Result<KeySpace, Failure> {
    let raw = if namespace.is_empty() { Vec::new() } else { configured.raw().to_vec() };
    Ok(KeySpace::new(Namespace::new(namespace)?, raw)?)
}

/// A fresh token, for a lease that is taken without a guard.
#[pyfunction]
pub(crate) fn new_token() -> String {
    Token::random().reveal().to_owned()
}
