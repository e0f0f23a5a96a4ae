//! Selects the store and connects to it.

use leasehold::config::{Config, GpuScope, Setting, Settings, file_of_the_environment};
use leasehold::store::{KeySpace, Namespace};
use leasehold::{LockManager, Options};

use crate::cli::Global;
use crate::exit::{Exit, Failure};

/// The store and namespace that a command uses.
#[derive(Clone)]
pub(crate) struct Choice {
    url: String,
    namespace: Namespace,
    /// The configuration file, if the user chose one.
    config: Option<Config>,
}

impl Choice {
    /// Selects `--store`, else `LEASEHOLD_STORE`, else `store` of the configuration file, else the default SQLite file; and
    /// the namespace in the same way. Never searches for a configuration file: processes on different stores do not exclude
    /// each other.
    pub(crate) fn from_flags(global: &Global) -> Result<Self, Failure> {
        let file = global.config.clone().or_else(file_of_the_environment);
        let config = file.map(|file| Config::from_layers(Settings::of_this_process(Some(&file)))).transpose()?;
        Self::with(global, config)
    }

    /// Selects store and namespace with a configuration that is already read.
    pub(crate) fn with(global: &Global, config: Option<Config>) -> Result<Self, Failure> {
        let url = match (&global.store, &config) {
            (Some(url), _) => url.clone(),
            // The configuration includes the environment.
            (None, Some(config)) => config.store.reveal().to_owned(),
            (None, None) => from_env("LEASEHOLD_STORE")?.unwrap_or_else(|| "sqlite:".into()),
        };
        let parse = |text: &str, exit| Namespace::new(text).map_err(|e| Failure::new(exit, e.to_string()));
        let namespace = match (&global.namespace, &config) {
            (Some(text), _) => parse(text, Exit::Usage)?,
            (None, Some(config)) => config.keys.namespace().clone(),
            (None, None) => match from_env("LEASEHOLD_NAMESPACE")? {
                Some(text) => parse(&text, Exit::Config)?,
                None => Namespace::default(),
            },
        };
        Ok(Self { url, namespace, config })
    }

    /// Returns the URL as given. It may contain secrets and must not be printed.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Returns the default options with this namespace and the store settings of the configuration file. The terms of a lock
    /// come from the command line only.
    pub(crate) fn options(&self) -> Result<Options, Failure> {
        let mut options = Options::default();
        if let Some(config) = &self.config {
            let Options { keys, request_timeout, outage_timeout, journal, .. } = config.options();
            (options.keys, options.request_timeout) = (keys, request_timeout);
            (options.outage_timeout, options.journal) = (outage_timeout, journal);
        }
        // In an empty namespace every name is raw, and patterns are not allowed.
        let raw = match self.namespace.as_str() {
            "" => Vec::new(),
            _ => options.keys.raw().to_vec(),
        };
        let keys = KeySpace::new(self.namespace.clone(), raw);
        options.keys = keys.map_err(|e| Failure::new(Exit::Config, e.to_string()))?;
        Ok(options)
    }

    /// Returns `gpu_scope` of the file, or `LEASEHOLD_GPU_SCOPE`.
    pub(crate) fn gpu_scope(&self) -> Result<GpuScope, Failure> {
        if let Some(config) = &self.config {
            return Ok(config.gpu_scope);
        }
        let Some(text) = from_env("LEASEHOLD_GPU_SCOPE")? else { return Ok(GpuScope::Shared) };
        GpuScope::parse(&text).map_err(|error| Failure::new(Exit::Config, format!("LEASEHOLD_GPU_SCOPE: {error}")))
    }

    /// Connects to the store. A wrong URL ends with 78, a server that cannot be reached with 69.
    pub(crate) async fn connect(&self) -> Result<LockManager, Failure> {
        self.connect_with(self.options()?).await
    }

    /// Connects to the store with options made from [`Choice::options`].
    pub(crate) async fn connect_with(&self, options: Options) -> Result<LockManager, Failure> {
        Ok(LockManager::connect_with(&self.url, options).await?)
    }
}

/// Returns an environment variable that is set and not empty, or an error if it is not UTF-8.
pub(crate) fn from_env(name: &str) -> Result<Option<String>, Failure> {
    match std::env::var(name) {
        Ok(text) if text.is_empty() => Ok(None),
        Ok(text) => Ok(Some(text)),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => Err(Failure::new(Exit::Config, format!("{name} is not valid UTF-8"))),
    }
}
