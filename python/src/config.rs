//! The configuration: a file, the environment, and what the program says.

use std::path::PathBuf;

use leasehold::config::{self, GpuScope, Origin, Settings, Shown};
use pyo3::prelude::*;

use crate::failure::Failure;

/// What was read, checked.
#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Config {
    pub(crate) read: config::Config,
    /// Every key, its value in force, and where that came from.
    shown: Vec<Shown>,
}

#[pymethods]
impl Config {
    /// Reads a file, or the one that `LEASEHOLD_CONFIG` names, or none; then the environment; then keys that are
    /// said outright.
    #[new]
    fn new(py: Python<'_>, file: Option<PathBuf>, said: Vec<(String, String)>) -> PyResult<Self> {
        let mut settings = Settings::of_this_process(file.as_deref());
        for (key, value) in said {
            settings = settings.set(&key, value);
        }
        let read = config::Config::with_origins(settings);
        let (read, shown) = read.map_err(|wrong| Failure::Argument(wrong.to_string()).raise(py))?;
        Ok(Self { read, shown })
    }

    /// Where the locks are, with whatever secrets that has.
    #[getter]
    fn store(&self) -> &str {
        self.read.store.reveal()
    }

    /// What somebody said of a key, without secrets; `None` where it is as by default.
    fn said(&self, key: &str) -> Option<&str> {
        let shown = self.shown.iter().rev().find(|shown| shown.key == key);
        shown.filter(|shown| shown.origin != Origin::Default).map(|shown| shown.value.as_str())
    }

    /// Every key, its value in force, and where that came from.
    fn shown(&self) -> Vec<(String, String, String)> {
        let all = self.shown.iter();
        all.map(|shown| (shown.key.clone(), shown.value.clone(), shown.origin.to_string())).collect()
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

    /// The monitor's included: a holder that counts as dead has no lease any more.
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
