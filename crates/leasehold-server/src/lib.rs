//! leasehold over HTTP: who holds what, for people and programs that cannot link the library.
//!
//! [`Server::run`] serves one store on one listener until it is told to stop; the command
//! `leasehold serve` only parses and calls it. `docs/server.md` has every route.
//!
//! | file | what it is about |
//! |---|---|
//! | `seats`, `watched` | how many connections there may be, and which are closed first; clients that do not read |
//! | `trust` | who besides this user could replace the keys or the audit |
//! | `throttle` | log lines that a stranger can cause |
//! | `connection`, `tls` | accepting, limits, timeouts, going down without cutting anybody off; certificates |
//! | `doors` | who may come in: the checks before any route |
//! | `keys`, `failures` | keys and what they allow; whoever tries too many is told to wait |
//! | `audit` | who took which lock away, and why |
//! | `routes` | every route in one list, which is also the OpenAPI document |
//! | `locks` | looking at locks |
//! | `taking`, `repeated` | a lock service: acquire, renew, release; the same request twice |
//! | `evict` | taking a lock away from the holder that was looked at |
//! | `tasks` | task locks by the id of their task |
//! | `alerts` | what is the matter, and who is told |
//! | `journal`, `gpus` | what could not be done on this machine; GPUs and who holds them |
//! | `events` | what happens to all locks, as a stream |
//! | `monitor` | one server among all looks at every lock: told about, asked to finish, taken away |
//! | `config` | the section of the configuration file that is the server's |
//! | `picture` | what is known of all locks without asking the store each time, and of the last hour |
//! | `page` | the page at `/`, for people |
//! | `alive`, `health` | whether the server lives, how the GPU locks are |
//! | `metrics`, `fleet` | figures for Prometheus: of this server, and of the whole fleet |
//! | `document` | the OpenAPI document, and a page of it for people |
//! | `asked` | names, queries and bodies as they were sent, or what is wrong with them |
//! | `answer` | errors: a stable code and a sentence |

mod alerts;
mod alive;
mod answer;
mod asked;
mod audit;
mod config;
mod connection;
mod document;
mod doors;
mod events;
mod evict;
mod failures;
mod fleet;
mod gpus;
mod health;
mod journal;
mod keys;
mod locks;
mod metrics;
mod monitor;
mod page;
mod picture;
mod repeated;
mod routes;
mod seats;
mod taking;
mod tasks;
mod throttle;
mod tls;
mod trust;
mod watched;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use leasehold::LockManager;
use leasehold::config::GpuLockMonitor;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use alerts::Alerts;
pub use alerts::{AlertCommand, AlertLevel, AlertSettings, CommandLine, Secret, Webhook, WebhookUrl};
use audit::Audit;
pub use config::{Listen, ServerConfig, TlsFiles};
use events::Events;
use failures::Failures;
use keys::Keys;
pub use keys::{KeyEntry, KeyError, KeyFile, Role};
use metrics::Metrics;
use monitor::Monitor;
use picture::Picture;
use repeated::Repeated;
use seats::Seats;
use tls::Tls;
pub use tls::TlsError;

/// A server of one store's locks.
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
/// let shutdown = async { /* until a signal comes */ };
/// Server::new(locks, Settings::default()).run(listener, shutdown).await?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Server {
    locks: LockManager,
    settings: Settings,
}

/// How a server behaves.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Settings {
    /// Host names that requests may be addressed to, besides `localhost` and plain addresses. A page of
    /// somebody else's whose name leads here (DNS rebinding) is refused.
    pub hosts: Vec<String>,
    /// The keys that are needed to come in. Without them everybody who can reach the server may do everything,
    /// so it listens on loopback only.
    pub keys: Option<KeyFile>,
    /// Connections that one address may have at once; a quarter of all when not set. Behind a proxy all clients have one
    /// address.
    pub connections_per_address: Option<usize>,
    /// Where it is written down who took which lock away; only in the log when not set.
    pub audit: Option<PathBuf>,
    /// The certificate to serve with; plain HTTP without one.
    pub tls: Option<TlsFiles>,
    /// Who is told of alerts.
    pub alerts: AlertSettings,
    /// When somebody is told of a lock that is held for long, and when it is taken away. Not enabled unless said so:
    /// a server that a program runs by the way does not take locks away.
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

/// Why a server did not begin, or ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Whoever can reach it could take every lock away.
    #[error(
        "{address} can be reached by others, and there are no keys: make one with leasehold keys create, or listen on 127.0.0.1"
    )]
    NeedsKeys {
        /// Where it was to listen.
        address: SocketAddr,
    },
    /// The keys cannot be used.
    #[error(transparent)]
    Keys(#[from] KeyError),
    /// The audit cannot be written.
    #[error("the audit {} cannot be written: {source}", path.display())]
    Audit {
        /// Where.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The certificate, or the authorities of a webhook, cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The listener cannot be used.
    #[error("the listener cannot be used: {0}")]
    Listener(#[from] std::io::Error),
}

/// What every route may need.
#[derive(Clone)]
struct App(Arc<Shared>);

struct Shared {
    locks: LockManager,
    settings: Settings,
    /// `None`: nobody needs one.
    keys: Option<Keys>,
    failures: Failures,
    audit: Option<Audit>,
    events: Arc<Events>,
    alerts: Alerts,
    monitor: Monitor,
    metrics: Metrics,
    picture: Picture,
    repeated: Repeated,
    /// Set when the server is to end: whoever waits is told.
    stopping: CancellationToken,
}

impl App {
    fn new(locks: LockManager, settings: Settings) -> Result<Self, ServeError> {
        let (events, metrics, stopping) = (Arc::new(Events::new()), Metrics::new(), CancellationToken::new());
        // Where a monitor is elected, whoever leads tells.
        let leads = !settings.monitor.enabled;
        let notified = metrics.notified.clone();
        let alerts = Alerts::start(&settings.alerts, leads, events.clone(), notified, &stopping)?;
        Ok(Self(Arc::new(Shared {
            keys: settings.keys.clone().map(Keys::open).transpose()?,
            failures: Failures::default(),
            events,
            alerts,
            monitor: Monitor::default(),
            picture: Picture::new(),
            repeated: Repeated::default(),
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
    /// For the locks of one manager. Whoever made the manager shuts it down, after the server has ended.
    pub fn new(locks: LockManager, settings: Settings) -> Self {
        Self { locks, settings }
    }

    /// Whether it can serve there, as far as can be told before it listens.
    ///
    /// # Errors
    /// [`ServeError::NeedsKeys`] for an address that others can reach, when there are no keys; or why the keys,
    /// the audit or the certificate cannot be used.
    pub fn may_listen_on(&self, address: SocketAddr) -> Result<(), ServeError> {
        if !address.ip().is_loopback() && self.settings.keys.is_none() {
            return Err(ServeError::NeedsKeys { address });
        }
        self.settings.keys.clone().map(Keys::open).transpose()?;
        self.settings.audit.as_deref().map(open_audit).transpose()?;
        self.settings.tls.as_ref().map(Tls::open).transpose()?;
        Ok(())
    }

    /// Serves until `shutdown` is done; then answers what was asked before and ends, at most ten seconds
    /// later.
    ///
    /// # Errors
    /// [`ServeError`] before anything is served.
    pub async fn run(self, listener: TcpListener, shutdown: impl Future<Output = ()>) -> Result<(), ServeError> {
        self.may_listen_on(listener.local_addr()?)?;
        let tls = self.settings.tls.as_ref().map(Tls::open).transpose()?.map(Arc::new);
        let app = App::new(self.locks, self.settings)?;
        if let Some(keys) = &app.settings.keys {
            trust::warn(keys.path(), "the key file");
        }
        if let Some(audit) = &app.settings.audit {
            trust::warn(audit, "the audit");
        }
        let stopping = app.stopping.clone();
        let following = Events::follow(app.clone()).await;
        let watching = alerts::watch(app.clone());
        let sharing = alerts::share(app.clone());
        let monitoring = Monitor::start(app.clone());
        let looking = Picture::keep(app.clone());
        let ending = app.clone();
        let seats = Seats::new(app.settings.connections_per_address, app.metrics.connections.clone());
        let routes = routes::routes(app);
        let serving = connection::serve(&listener, routes, tls, seats, stopping.clone());
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
        // They end when the server stops; what they were about to tell has no readers any more.
        let _ = tokio::join!(following, watching, sharing, monitoring, looking);
        ending.alerts.ended().await;
        Ok(())
    }
}

/// Now, in wall-clock milliseconds.
fn wall_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn open_audit(path: &std::path::Path) -> Result<Audit, ServeError> {
    Audit::open(path).map_err(|source| ServeError::Audit { path: path.to_owned(), source })
}
