//! Which store is meant, and opening it.

use leasehold::{KeySpace, LockManager, Namespace, Options, RawPattern};

use crate::cli::Global;
use crate::exit::{Exit, Failure};

/// The store and namespace a command works on.
#[derive(Clone)]
pub(crate) struct Choice {
    url: String,
    namespace: Namespace,
}

impl Choice {
    /// `--store`, else `LEASEHOLD_STORE`, else the default SQLite file; the namespace likewise.
    /// Nothing else is read: two processes on different stores do not exclude each other.
    pub(crate) fn from_flags(global: &Global) -> Result<Self, Failure> {
        let url = match &global.store {
            Some(url) => url.clone(),
            None => from_env("LEASEHOLD_STORE")?.unwrap_or_else(|| "sqlite:".into()),
        };
        let (text, exit) = match &global.namespace {
            Some(text) => (Some(text.clone()), Exit::Usage),
            None => (from_env("LEASEHOLD_NAMESPACE")?, Exit::Config),
        };
        let namespace = match text {
            Some(text) => Namespace::new(text).map_err(|e| Failure::new(exit, e.to_string()))?,
            None => Namespace::default(),
        };
        Ok(Self { url, namespace })
    }

    /// The URL as it was given, secrets and all: never to be printed.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The library's defaults in this namespace.
    pub(crate) fn options(&self) -> Result<Options, Failure> {
        // An empty namespace makes every name raw, so no pattern is needed, nor possible.
        let raw = match self.namespace.as_str() {
            "" => Vec::new(),
            _ => ["gpu_lock:*", "task_lock:*"].map(|p| RawPattern::new(p).expect("a pattern")).into(),
        };
        let keys = KeySpace::new(self.namespace.clone(), raw).map_err(|e| Failure::new(Exit::Config, e.to_string()))?;
        let mut options = Options::default();
        options.keys = keys;
        Ok(options)
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
