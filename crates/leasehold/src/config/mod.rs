//! The configuration: one YAML file, every key also as an environment variable.
//!
//! The file overrides the defaults, the environment (`LEASEHOLD_…`) overrides the file, and explicit values of the program
//! override the environment. Unknown keys, duplicate keys and invalid values are errors with file, line, column and the
//! line itself. The origin of every value is known. `docs/configuration.md` lists the keys.
//!
//! ```
//! use std::time::Duration;
//! use leasehold::config::{Config, Settings};
//!
//! let mut settings = Settings::new().yaml("locks.yaml", "
//! store: memory
//! namespace: billing
//! gpu_lock:
//!   max_wait_time: 1800
//! ");
//! let config = Config::read(&mut settings);
//! settings.finish()?;
//! assert_eq!(config.gpu_lock.max_wait_time, Duration::from_secs(1800));
//! # Ok::<(), leasehold::config::ConfigError>(())
//! ```

mod error;
mod gpu;
mod settings;
mod value;
mod yaml;

use std::path::Path;
use std::time::Duration;

pub use error::{ConfigError, Origin, Problem};
pub use gpu::{
    Cleanup, ExceptionHandling, GpuLock, GpuLockMonitor, GpuScope, Heartbeat, LockNames, MonitorHeartbeat,
    TimeoutLevels,
};
pub use settings::{Settings, Shown, file_of_the_environment, variable};
pub use value::{JournalDir, Setting, StoreUrl, Written, duration};

use crate::error::Error;
use crate::facts::{KeySpace, Namespace, Owner, Ttl};
use crate::manager::LockManager;
use crate::options::{OnUnavailable, Options};
use crate::request::LockRequest;

/// The environment variable that names the file.
pub const FILE_VARIABLE: &str = "LEASEHOLD_CONFIG";

/// Sections that only the server reads.
const SERVER_SECTIONS: [&str; 2] = ["server", "alerts"];

/// The library's configuration.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// `store`: the URL of the store; SQLite by default.
    pub store: StoreUrl,
    /// `namespace` and `raw_names`: how names become keys.
    pub keys: KeySpace,
    /// `ttl`: the default lease.
    pub ttl: Ttl,
    /// `owner`: the task name of this process, for people.
    pub owner: Owner,
    /// `on_unavailable`: what to do when the store is unreachable, `closed` or `open`.
    pub on_unavailable: OnUnavailable,
    /// `answer_within`: the timeout of one request to the store.
    pub answer_within: Duration,
    /// `patience`: how long a waiter keeps trying while the store is unreachable.
    pub patience: Duration,
    /// `journal`: the directory for releases that failed in every way.
    pub journal: JournalDir,
    /// `gpu_scope`: whether the number of a GPU is unique in the store or per host.
    pub gpu_scope: GpuScope,
    /// `gpu_lock`: GPU locks.
    pub gpu_lock: GpuLock,
    /// `gpu_lock_monitor`: warnings about and evictions of long-held locks.
    pub gpu_lock_monitor: GpuLockMonitor,
}

impl Config {
    /// Reads a file (by default the one that `LEASEHOLD_CONFIG` names, if any), then the environment. The sections `server` and
    /// `alerts` are ignored.
    ///
    /// # Errors
    /// All problems at once.
    pub fn load(file: Option<&Path>) -> Result<Self, ConfigError> {
        Self::from_layers(Settings::of_this_process(file))
    }

    /// Reads the configuration from the given layers.
    ///
    /// # Errors
    /// All problems at once.
    pub fn from_layers(settings: Settings) -> Result<Self, ConfigError> {
        Self::with_origins(settings).map(|(config, _)| config)
    }

    /// Reads the configuration, and also returns every key with its effective value and its origin.
    ///
    /// # Errors
    /// All problems at once.
    pub fn with_origins(mut settings: Settings) -> Result<(Self, Vec<Shown>), ConfigError> {
        let config = Self::read(&mut settings);
        for section in SERVER_SECTIONS {
            settings.leave(section);
        }
        Ok((config, settings.finish()?))
    }

    /// Reads the library's keys from settings that other parts read too. Use the result only after [`Settings::finish`] has
    /// returned no error.
    pub fn read(settings: &mut Settings) -> Self {
        let options = Options::default();
        let namespace = settings.get("namespace", Namespace::default());
        let raw = settings.get("raw_names", options.keys.raw().to_vec());
        let keys = KeySpace::new(namespace, raw).unwrap_or_else(|invalid| {
            settings.refuse("raw_names", &invalid.to_string());
            KeySpace::default()
        });
        Self {
            store: settings.get("store", StoreUrl::embedded()),
            keys,
            ttl: settings.get("ttl", options.ttl),
            owner: settings.get("owner", options.owner),
            on_unavailable: settings.get("on_unavailable", options.on_unavailable),
            answer_within: settings.get("answer_within", options.request_timeout),
            patience: settings.get("patience", options.outage_timeout),
            journal: settings.get("journal", JournalDir(options.journal)),
            gpu_scope: settings.get("gpu_scope", GpuScope::Shared),
            gpu_lock: GpuLock::read(settings),
            gpu_lock_monitor: GpuLockMonitor::read(settings),
        }
    }

    /// Returns the options of a manager.
    pub fn options(&self) -> Options {
        Options {
            keys: self.keys.clone(),
            ttl: self.ttl,
            owner: self.owner.clone(),
            on_unavailable: self.on_unavailable,
            request_timeout: self.answer_within,
            outage_timeout: self.patience,
            journal: self.journal.0.clone(),
            ..Options::default()
        }
    }

    /// Returns the options of a manager for GPU locks, with the section `gpu_lock`.
    pub fn gpu_options(&self) -> Options {
        let GpuLock { exception_handling: release, heartbeat, .. } = &self.gpu_lock;
        let max_poll = if self.gpu_lock.exponential_backoff {
            self.gpu_lock.max_poll_interval
        } else {
            self.gpu_lock.poll_interval
        };
        Options {
            ttl: self.gpu_ttl(),
            heartbeat: heartbeat.interval.min(self.gpu_lock_monitor.heartbeat.interval),
            notifications: self.gpu_lock.use_event_driven,
            poll_interval: self.gpu_lock.poll_interval,
            max_poll_interval: max_poll,
            recheck_interval: self.gpu_lock.fallback_timeout,
            emergency_release: release.enable_emergency_release,
            emergency_release_delay: release.emergency_release_delay,
            max_release_retries: release.max_release_retries,
            ..self.options()
        }
    }

    /// Returns the lease of a GPU lock. While leases are renewed, it is at most the timeout of both heartbeats, so that the lease
    /// of a holder that counts as dead has ended.
    pub fn gpu_ttl(&self) -> Ttl {
        let GpuLock { lock_timeout, heartbeat, .. } = &self.gpu_lock;
        if !heartbeat.enabled {
            return *lock_timeout;
        }
        (*lock_timeout).min(heartbeat.timeout).min(self.gpu_lock_monitor.heartbeat.timeout)
    }

    /// Creates a request for the lock of one GPU (`gpu_lock:<id>`), with the sections `gpu_scope` and `gpu_lock`. The manager
    /// should have [`gpu_options`](Self::gpu_options). Terms can be replaced:
    /// `config.gpu_request(&locks, 0).wait_up_to(half_an_hour)`.
    pub fn gpu_request(&self, locks: &LockManager, gpu_id: u32) -> LockRequest {
        locks
            .lock(self.gpu_scope.lock(gpu_id))
            .ttl(self.gpu_ttl().duration())
            .wait_up_to(self.gpu_lock.max_wait_time)
            .renew(self.gpu_lock.heartbeat.enabled)
    }

    /// Connects a manager with [`options`](Self::options).
    ///
    /// # Errors
    /// [`Error::Connect`] when the store cannot be used.
    pub async fn connect(&self) -> Result<LockManager, Error> {
        LockManager::connect_with(self.store.reveal(), self.options()).await
    }
}

impl Default for Config {
    fn default() -> Self {
        Self::read(&mut Settings::new())
    }
}

#[cfg(test)]
mod tests;
