//! The defaults of requests for GPUs.

use std::sync::OnceLock;
use std::time::Duration;

use crate::config::{Config, GpuScope};
use crate::facts::{Invalid, Ttl};

static CONFIGURED: OnceLock<Defaults> = OnceLock::new();

/// Sets the configuration of `#[gpu_lock]` for this process. Call it once, at the start of the program. Without it the
/// defaults of [`Config`] apply.
///
/// Polling and retries of releases are options of the manager: connect it with [`gpu_options`](Config::gpu_options).
///
/// # Errors
/// [`Invalid::Setting`] when another configuration was set before.
pub fn configure(config: &Config) -> Result<(), Invalid> {
    let defaults = Defaults::from(config);
    if *CONFIGURED.get_or_init(|| defaults.clone()) == defaults {
        return Ok(());
    }
    Err(Invalid::Setting {
        setting: "configuration of GPU locks",
        given: format!("{defaults:?}"),
        problem: "cannot replace the one that is in use: set it once, at the start of the program".to_owned(),
    })
}

/// Values from the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Defaults {
    pub(super) max_wait: Duration,
    lock_timeout: Ttl,
    /// The longest lease that is renewed; `None` when leases are not renewed.
    heartbeat: Option<Ttl>,
    pub(super) scope: GpuScope,
}

impl Defaults {
    /// Returns the defaults of this process.
    pub(super) fn configured() -> Self {
        CONFIGURED.get().cloned().unwrap_or_else(|| Self::from(&Config::default()))
    }

    /// Returns the ttl for a request, which may have a `lock_timeout` of its own.
    pub(super) fn ttl(&self, lock_timeout: Option<Ttl>) -> Ttl {
        let ttl = lock_timeout.unwrap_or(self.lock_timeout);
        self.heartbeat.map_or(ttl, |heartbeat| ttl.min(heartbeat))
    }

    pub(super) fn renews(&self) -> bool {
        self.heartbeat.is_some()
    }
}

impl From<&Config> for Defaults {
    fn from(config: &Config) -> Self {
        let gpu = &config.gpu_lock;
        let heartbeat = gpu.heartbeat.timeout.min(config.gpu_lock_monitor.heartbeat.timeout);
        Self {
            max_wait: gpu.max_wait_time,
            lock_timeout: gpu.lock_timeout,
            heartbeat: gpu.heartbeat.enabled.then_some(heartbeat),
            scope: config.gpu_scope,
        }
    }
}
