//! leasehold over HTTP, for people and for programs that cannot link the library.
//!
//! [`Server::run`] serves one store on one listener until it is shut down. The command `leasehold serve` parses its
//! arguments and calls it. `docs/server.md` lists every route.
//!
//! | module | topic |
//! |---|---|
//! | `connection`, `tls` | accept loop, timeouts, graceful shutdown; certificates |
//! | `connection_limits`, `timed_stream` | connection limits and which connections are closed first; clients that stop reading |
//! | `auth`, `caller`, `failed_logins` | the checks before every route; who sent a request; rate limit for wrong keys |
//! | `keys` | the file of API keys and their roles |
//! | `file_permissions` | warnings about users who could replace the key file or the audit file |
//! | `log_throttle` | rate limit for log lines that any client can cause |
//! | `routes`, `openapi` | the list of all routes; the OpenAPI document made from it |
//! | `extract`, `problem` | path, query and body of a request; errors as a stable code and a sentence |
//! | `locks`, `tasks`, `gpus` | inspecting locks, task locks by task id, and GPUs with their holders |
//! | `leases`, `idempotency` | acquire, renew and release; the same request sent twice |
//! | `evict`, `audit`, `journal` | evictions; who changed what; work that could not be finished on this machine |
//! | `events` | lock events of the whole fleet as a stream |
//! | `snapshot` | a cached view of all locks and of the last hour, for the dashboard |
//! | `page` | the dashboard at `/` |
//! | `monitor` | one elected server inspects every lock: it reports, asks holders to finish, and evicts |
//! | `alerts` | which alerts fire, and who is notified |
//! | `metrics`, `fleet` | Prometheus metrics of this server and of the whole fleet |
//! | `probes`, `health` | liveness and readiness; health of the GPU locks |
//! | `config`, `clock`, `peer` | the `server` section of the configuration file; the wall clock; client addresses |

mod alerts;
mod audit;
mod auth;
mod caller;
mod clock;
mod config;
mod connection;
mod connection_limits;
mod events;
mod evict;
mod extract;
mod failed_logins;
mod file_permissions;
mod fleet;
mod gpus;
mod health;
mod idempotency;
mod journal;
mod keys;
mod leases;
mod locks;
mod log_throttle;
mod metrics;
mod monitor;
mod openapi;
mod page;
mod peer;
mod probes;
mod problem;
mod routes;
mod snapshot;
mod tasks;
mod timed_stream;
mod tls;

use std::fmt::{self, Formatter};
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use leasehold::LockManager;
use leasehold::config::GpuLockMonitor;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use alerts::Alerts;
pub use alerts::{AlertCommand, AlertLevel, AlertSettings, CommandLine, Secret, Webhook, WebhookUrl};
use audit::Audit;
use caller::Keys;
pub use config::{Listen, ServerConfig};
use connection_limits::ConnectionLimits;
use events::Events;
use failed_logins::FailedLogins;
use idempotency::WaitingRequests;
pub use keys::{KeyEntry, KeyError, KeyFile, Role};
use metrics::Metrics;
use monitor::Monitor;
use snapshot::Snapshot;
use tls::Tls;
pub use tls::{TlsError, TlsFiles};

/// An HTTP server for the locks of one store.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use leasehold::LockManager;
/// use leasehold_server::{Server, Settings};
/// use tokio::net::TcpListener;
///
/// let locks = LockManager::connect("memory:").await?;
/// let listener = TcpListener::bind("127.0.0.1:0").await?;
/// println!("http://{}", listener.local_addr()?);
/// let shutdown = async { /* wait for a signal */ };
/// Server::new(locks, Settings::default()).run(listener, shutdown).await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Server {
    locks: LockManager,
    settings: Settings,
}

/// The settings of a server.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Settings {
    /// Host names that requests may be addressed to, besides `localhost` and plain IP addresses. Other names are
    /// rejected, which prevents DNS rebinding.
    pub hosts: Vec<String>,
    /// The file of API keys. Without keys, every client that can reach the server may do everything, so the server
    /// listens on loopback only.
    pub keys: Option<KeyFile>,
    /// The most connections one address may have open; by default a quarter of all connections. Behind a proxy, all
    /// clients share one address.
    pub connections_per_address: Option<usize>,
    /// The file of audit lines. Without it, evictions are only logged.
    pub audit: Option<PathBuf>,
    /// The certificate to serve HTTPS with. Without it, the server speaks plain HTTP.
    pub tls: Option<TlsFiles>,
    /// Where alerts are sent.
    pub alerts: AlertSettings,
    /// When long-held locks are reported and evicted. Disabled by default: a server embedded in another program
    /// should not evict.
    pub monitor: GpuLockMonitor,
}

impl Default for Settings {
    fn default() -> Self {
        let mut monitor = GpuLockMonitor::default();
        monitor.enabled = false;
        Self {
            hosts: Vec::new(),
            keys: None,
            connections_per_address: None,
            audit: None,
            tls: None,
            alerts: AlertSettings::default(),
            monitor,
        }
    }
}

/// Why a server could not start, or stopped. `{:#}` appends the cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address is reachable by others and no keys are configured: any client could evict every lock.
    #[error(
        "{address} is reachable from other machines, and there are no keys: create one with `leasehold keys create`, or listen on 127.0.0.1"
    )]
    NeedsKeys {
        /// The address to listen on.
        address: SocketAddr,
    },
    /// The keys cannot be used.
    #[error(transparent)]
    Keys(#[from] KeyError),
    /// The audit cannot be written.
    #[error(fmt = cannot_audit)]
    Audit {
        /// The path of the audit file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The certificate, or the certificate authorities of a webhook, cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The listener cannot be used.
    #[error(fmt = cannot_listen)]
    Listener(#[from] io::Error),
}

fn cannot_audit(path: &Path, source: &io::Error, f: &mut Formatter<'_>) -> fmt::Result {
    write!(f, "the audit {} cannot be written", path.display())?;
    append_cause(source, f)
}

fn cannot_listen(source: &io::Error, f: &mut Formatter<'_>) -> fmt::Result {
    write!(f, "the listener cannot be used")?;
    append_cause(source, f)
}

/// Appends the cause in the alternate form.
fn append_cause(source: &io::Error, f: &mut Formatter<'_>) -> fmt::Result {
    if f.alternate() { write!(f, ": {source}") } else { Ok(()) }
}

/// The state that every route can use.
#[derive(Clone)]
struct App(Arc<Shared>);

struct Shared {
    locks: LockManager,
    settings: Settings,
    /// `None` when the server requires no keys.
    keys: Option<Keys>,
    failed_logins: FailedLogins,
    audit: Option<Audit>,
    events: Arc<Events>,
    alerts: Alerts,
    monitor: Monitor,
    metrics: Metrics,
    snapshot: Snapshot,
    waiting_requests: WaitingRequests,
    /// Cancelled when the server shuts down; waiting requests then return.
    stopping: CancellationToken,
}

impl App {
    fn new(locks: LockManager, settings: Settings) -> Result<Self, ServeError> {
        let (events, metrics, stopping) = (Arc::new(Events::new()), Metrics::new(), CancellationToken::new());
        // With an elected monitor, only the leader sends notifications.
        let leads = !settings.monitor.enabled;
        let notifications = metrics.notifications.clone();
        let alerts = Alerts::start(&settings.alerts, leads, events.clone(), notifications, &stopping)?;
        Ok(Self(Arc::new(Shared {
            keys: settings.keys.clone().map(Keys::open).transpose()?,
            failed_logins: FailedLogins::default(),
            events,
            alerts,
            monitor: Monitor::default(),
            snapshot: Snapshot::new(),
            waiting_requests: WaitingRequests::default(),
            metrics,
            audit: settings.audit.as_deref().map(open_audit).transpose()?,
            locks,
            settings,
            stopping,
        })))
    }
}

impl std::ops::Deref for App {
    type Target = Shared;
    fn deref(&self) -> &Shared {
        &self.0
    }
}

impl Server {
    /// Creates a server for the locks of one manager. The caller shuts the manager down after the server has stopped.
    pub fn new(locks: LockManager, settings: Settings) -> Self {
        Self { locks, settings }
    }

    /// Checks whether the server can serve on `address`, as far as that is known before it listens.
    ///
    /// # Errors
    /// Returns [`ServeError::NeedsKeys`] for an address that others can reach when there are no keys, or the reason
    /// why the keys, the audit file or the certificate cannot be used.
    pub fn may_listen_on(&self, address: SocketAddr) -> Result<(), ServeError> {
        if !address.ip().is_loopback() && self.settings.keys.is_none() {
            return Err(ServeError::NeedsKeys { address });
        }
        self.settings.keys.clone().map(Keys::open).transpose()?;
        self.settings.audit.as_deref().map(open_audit).transpose()?;
        self.settings.tls.as_ref().map(Tls::open).transpose()?;
        Ok(())
    }

    /// Serves until `shutdown` completes, then answers pending requests and returns within ten seconds.
    ///
    /// # Errors
    /// Returns a [`ServeError`] if the server cannot start.
    pub async fn run(self, listener: TcpListener, shutdown: impl Future<Output = ()>) -> Result<(), ServeError> {
        self.may_listen_on(listener.local_addr()?)?;
        let tls = self.settings.tls.as_ref().map(Tls::open).transpose()?.map(Arc::new);
        let app = App::new(self.locks, self.settings)?;
        if let Some(keys) = &app.settings.keys {
            file_permissions::warn_if_others_can_change(keys.path(), "the key file");
        }
        if let Some(audit) = &app.settings.audit {
            file_permissions::warn_if_others_can_change(audit, "the audit");
        }
        let stopping = app.stopping.clone();
        let following = Events::follow(app.clone()).await;
        let watching = alerts::start_checks(app.clone());
        let sharing = alerts::start_sharing(app.clone());
        let monitoring = Monitor::start(app.clone());
        let scanning = Snapshot::start(app.clone());
        let ending = app.clone();
        let limits = ConnectionLimits::new(app.settings.connections_per_address, app.metrics.connections.clone());
        let routes = routes::routes(app);
        let serving = connection::serve(&listener, routes, tls, limits, stopping.clone());
        tokio::pin!(serving);
        tokio::select! {
            () = &mut serving => {}
            () = shutdown => {
                tracing::info!("stopping");
                stopping.cancel();
                serving.await;
            }
        }
        stopping.cancel();
        // These tasks end when the server stops. Nothing they could still publish has a reader.
        let _ = tokio::join!(following, watching, sharing, monitoring, scanning);
        ending.alerts.join().await;
        Ok(())
    }
}

fn open_audit(path: &Path) -> Result<Audit, ServeError> {
    Audit::open(path).map_err(|source| ServeError::Audit { path: path.to_owned(), source })
}
