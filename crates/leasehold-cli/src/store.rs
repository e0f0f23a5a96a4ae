//! Which store is meant, and opening it.

use leasehold::config::{Config, GpuScope, Setting, Settings, file_of_the_environment};
use leasehold::store::{KeySpace, Namespace};
use leasehold::{LockManager, Options};

use crate::cli::Global;
use crate::exit::{Exit, Failure};

/// The store and namespace a command works on.
#[derive(Clone)]
pub(crate) struct Choice {
    url: String,
    namespace: Namespace,
    /// What the configuration file says, where there is one.
    config: Option<Config>,
}

impl Choice {
    /// `--store`, else `LEASEHOLD_STORE`, else what the configuration file says, else the default SQLite file; the
    /// namespace likewise. Two processes on different stores do not exclude each other, so a file is read only
    /// where one is named.
    pub(crate) fn from_flags(global: &Global) -> Result<Self, Failure> {
        let file = global.config.clone().or_else(file_of_the_environment);
        let config = file.map(|file| Config::from_layers(Settings::of_this_process(Some(&file)))).transpose()?;
        Self::with(global, config)
    }

    /// The same with a configuration that was read already.
    pub(crate) fn with(global: &Global, config: Option<Config>) -> Result<Self, Failure> {
        let url = match (&global.store, &config) {
            (Some(url), _) => url.clone(),
            // The environment has been looked at there.
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

    /// The URL as it was given, secrets and all: never to be printed.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The library's defaults in this namespace, and what the file says of the store. How a lock is asked for is the
    /// command's to say.
    pub(crate) fn options(&self) -> Result<Options, Failure> {
        let mut options = Options::default();
        if let Some(config) = &self.config {
            let Options { keys, request_timeout, outage_timeout, journal, .. } = config.options();
            (options.keys, options.request_timeout) = (keys, request_timeout);
            (options.outage_timeout, options.journal) = (outage_timeout, journal);
        }
        // An empty namespace makes every name raw, so no pattern is needed, nor possible.
        let raw = match self.namespace.as_str() {
            "" => Vec::new(),
            _ => options.keys.raw().to_vec(),
        };
        let keys = KeySpace::new(self.namespace.clone(), raw);
        options.keys = keys.map_err(|e| Failure::new(Exit::Config, e.to_string()))?;
        Ok(options)
    }

    /// `gpu_scope` of the file, or `LEASEHOLD_GPU_SCOPE`.
    pub(crate) fn gpu_scope(&self) -> Result<GpuScope, Failure> {
        if let Some(config) = &self.config {
            return Ok(config.gpu_scope);
        }
        let Some(text) = from_env("LEASEHOLD_GPU_SCOPE")? else { return Ok(GpuScope::Shared) };
        GpuScope::parse(&text).map_err(|error| Failure::new(Exit::Config, format!("LEASEHOLD_GPU_SCOPE: {error}")))
    }

    /// Opens it. A bad URL ends with 78, a server that is not there with 69.
    pub(crate) async fn connect(&self) -> Result<LockManager, Failure> {
        self.connect_with(self.options()?).await
    }

    /// Opens it, with options made from [`Choice::options`].
    pub(crate) async fn connect_with(&self, options: Options) -> Result<LockManager, Failure> {
        Ok(LockManager::connect_with(&self.url, options).await?)
    }
}

/// An environment variable that is set, not empty and text.
pub(crate) fn from_env(name: &str) -> Result<Option<String>, Failure> {
    match std::env::var(name) {
        Ok(text) if text.is_empty() => Ok(None),
        Ok(text) => Ok(Some(text)),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => Err(Failure::new(Exit::Config, format!("{name} is not text"))),
    }
}
