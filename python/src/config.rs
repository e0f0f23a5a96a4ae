//! The configuration: a file, the environment, and keys that the program sets.

use std::path::PathBuf;

use leasehold::config::{self, GpuScope, Origin, Settings, Shown};
use pyo3::prelude::*;

use crate::failure::Failure;

/// A configuration that was read and checked.
#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Config {
    pub(crate) read: config::Config,
    /// Every key with its value and the origin of that value.
    shown: Vec<Shown>,
}

#[pymethods]
impl Config {
    /// Reads a file, or the one that `LEASEHOLD_CONFIG` names, or none; then the environment; then the keys that the
    /// program sets.
    #[new]
    fn new(file: Option<PathBuf>, keys: Vec<(String, String)>) -> PyResult<Self> {
        let mut settings = Settings::of_this_process(file.as_deref());
        for (key, value) in keys {
            settings = settings.set(&key, value);
        }
        let read = config::Config::with_origins(settings);
        let (read, shown) = read.map_err(|wrong| Failure::Argument(wrong.to_string()))?;
        Ok(Self { read, shown })
    }

    /// The URL of the store, with its password.
    #[getter]
    fn store(&self) -> &str {
        self.read.store.reveal()
    }

    /// The value of a key, without secrets; `None` if it has its default.
    fn value_set(&self, key: &str) -> Option<&str> {
        let shown = self.shown.iter().rev().find(|shown| shown.key == key);
        shown.filter(|shown| shown.origin != Origin::Default).map(|shown| shown.value.as_str())
    }

    #[getter]
    fn gpu_max_wait_time(&self) -> f64 {
        self.read.gpu_lock.max_wait_time.as_secs_f64()
    }

    #[getter]
    fn gpu_lock_timeout(&self) -> f64 {
        self.read.gpu_lock.lock_timeout.duration().as_secs_f64()
    }

    #[getter]
    fn gpu_heartbeat_enabled(&self) -> bool {
        self.read.gpu_lock.heartbeat.enabled
    }

    #[getter]
    fn gpu_heartbeat_interval(&self) -> f64 {
        self.read.gpu_options().heartbeat.as_secs_f64()
    }

    /// At most the monitor's timeout, so that a holder that counts as dead has no lease any more.
    #[getter]
    fn gpu_heartbeat_timeout(&self) -> f64 {
        let timeout = self.read.gpu_lock.heartbeat.timeout.min(self.read.gpu_lock_monitor.heartbeat.timeout);
        timeout.duration().as_secs_f64()
    }

    #[getter]
    fn gpu_scope(&self) -> &'static str {
        match self.read.gpu_scope {
            GpuScope::Shared => "shared",
            GpuScope::Host => "host",
        }
    }
}
