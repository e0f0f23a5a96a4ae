//! What a request for a GPU is like when it says nothing else.

use std::sync::OnceLock;
use std::time::Duration;

use crate::config::{Config, GpuScope};
use crate::facts::{Invalid, Ttl};

static CONFIGURED: OnceLock<Defaults> = OnceLock::new();

/// Makes the section `gpu_lock` of a configuration that of `#[gpu_lock]` in this process. Once, at the
/// start; without it, the defaults of the configuration hold.
///
/// How waiters wait and releases are tried again is a matter of the manager: connect it with
/// [`gpu_options`](Config::gpu_options).
///
/// # Errors
/// [`Invalid::Setting`] when another one was said before.
pub fn configure(config: &Config) -> Result<(), Invalid> {
    let defaults = Defaults::from(config);
    if *CONFIGURED.get_or_init(|| defaults.clone()) == defaults {
        return Ok(());
    }
    Err(Invalid::Setting {
        setting: "configuration of GPU locks",
        given: format!("{defaults:?}"),
        problem: "cannot replace the one that is in use: say it once, at the start of the program".to_owned(),
    })
}

/// As the configuration has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Defaults {
    pub(super) max_wait: Duration,
    lock_timeout: Ttl,
    /// No renewing lease is longer; `None`: leases are not renewed.
    heartbeat: Option<Ttl>,
    pub(super) scope: GpuScope,
}

impl Defaults {
    /// What was said for this process.
    pub(super) fn configured() -> Self {
        CONFIGURED.get().cloned().unwrap_or_else(|| Self::from(&Config::default()))
    }

    /// The lease, if a task asks for this one.
    pub(super) fn ttl(&self, lock_timeout: Option<Ttl>) -> Ttl {
        let asked = lock_timeout.unwrap_or(self.lock_timeout);
        self.heartbeat.map_or(asked, |heartbeat| asked.min(heartbeat))
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
