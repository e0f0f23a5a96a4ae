use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::events::Observer;
use crate::facts::{Invalid, KeySpace, Namespace, Owner, RawPattern, Ttl};
use crate::lease::belief::drift;

/// How a manager behaves. The defaults are argued beside each field, which can also be set by the method of its name.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// use std::time::Duration;
/// use leasehold::{LockManager, OnUnavailable, Options};
///
/// let options = Options::new()
///     .namespace("billing")?
///     .owner("checkout")?
///     .ttl(Duration::from_secs(20))?
///     .request_timeout(Duration::from_millis(500))
///     .on_unavailable(OnUnavailable::FailClosed)
///     .without_journal();
/// let locks = LockManager::connect_with("memory:", options).await?;
/// assert_eq!(locks.namespace(), "billing");
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct Options {
    /// How names become keys in the store: the namespace, and the names that are their own key.
    pub keys: KeySpace,
    /// The lease of a request that sets none. 30 s.
    pub ttl: Ttl,
    /// Who this process is, for people.
    pub owner: Owner,
    /// Whether the store notifies waiters when they are granted a lock. Off: they poll.
    pub notifications: bool,
    /// The first pause of a waiter that polls. 50 ms: neither a person nor a server notices it.
    pub poll_interval: Duration,
    /// The longest pause of a waiter that polls; each pause is twice the last one until here. At most a second, because a
    /// waiter that has not asked for three seconds is passed over.
    pub max_poll_interval: Duration,
    /// A waiter that received no notification asks again after this at the latest. 30 s is the longest that it ever
    /// pauses, so only a shorter time changes anything.
    pub recheck_interval: Duration,
    /// How long one request to the store may take. 2 s: a healthy store answers in milliseconds, and one that needs
    /// seconds is as good as down. `answer_within` in the configuration.
    pub request_timeout: Duration,
    /// Whether `connect` succeeds while the server cannot be reached: it is tried again until it is there, and requests
    /// meanwhile end as [`on_unavailable`](Self::on_unavailable) says. For programs that start before their server.
    pub lazy_connect: bool,
    /// How long a waiter goes on while the store cannot be reached. 10 s: a restart or failover is over by then.
    /// `patience` in the configuration.
    pub outage_timeout: Duration,
    /// The longest interval between two renewals of a lease, however long its ttl. 60 s.
    pub heartbeat: Duration,
    /// How often a failed release is tried again before the emergency release.
    pub max_release_retries: u32,
    /// How long to wait before an emergency release.
    pub emergency_release_delay: Duration,
    /// Whether a lock is released by other means when the usual ones fail.
    pub emergency_release: bool,
    /// What happens to work when the store cannot be reached.
    pub on_unavailable: OnUnavailable,
    /// The directory of the journal, which keeps the releases that failed by all means; `None` keeps no journal.
    pub journal: Option<PathBuf>,
    /// Receives every transition of this process.
    pub observer: Option<Arc<dyn Observer>>,
}

/// Writes the methods that set a field.
macro_rules! setters {
    ($($(#[$doc:meta])* $field:ident: $type:ty),* $(,)?) => {$(
        $(#[$doc])*
        pub fn $field(mut self, $field: $type) -> Self {
            self.$field = $field;
            self
        }
    )*};
}

impl Options {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the namespace of the names. Managers with different namespaces share no lock.
    ///
    /// # Errors
    /// [`Invalid::Setting`] for text that cannot be a namespace, or that collides with the raw names.
    pub fn namespace(mut self, namespace: &str) -> Result<Self, Invalid> {
        self.keys = KeySpace::new(Namespace::new(namespace)?, self.keys.raw().to_vec())?;
        Ok(self)
    }

    /// Sets which names are their own key in the store, without the namespace: names, or beginnings with a `*`, such as
    /// `gpu_lock:*`. For stores that are shared with other kinds of clients.
    ///
    /// # Errors
    /// [`Invalid::Setting`] for a pattern that reaches into the keys of the namespace.
    pub fn raw_names(mut self, patterns: &[&str]) -> Result<Self, Invalid> {
        let raw = patterns.iter().map(RawPattern::new).collect::<Result<_, _>>()?;
        self.keys = KeySpace::new(self.keys.namespace().clone(), raw)?;
        Ok(self)
    }

    /// Sets the lease of a request that sets none.
    ///
    /// # Errors
    /// [`Invalid::Ttl`] outside of [`Ttl::MIN`] to [`Ttl::MAX`].
    pub fn ttl(mut self, ttl: Duration) -> Result<Self, Invalid> {
        self.ttl = Ttl::new(ttl)?;
        Ok(self)
    }

    /// Sets what people read who ask for a holder: the task of this process. Host and process id are added.
    ///
    /// # Errors
    /// [`Invalid::Owner`] for text that is empty, too long, or contains control characters.
    pub fn owner(mut self, task: &str) -> Result<Self, Invalid> {
        self.owner = Owner::named(task)?;
        Ok(self)
    }

    /// Sets the directory of the journal.
    pub fn journal(mut self, dir: impl Into<PathBuf>) -> Self {
        self.journal = Some(dir.into());
        self
    }

    /// Keeps no journal of the releases that failed.
    pub fn without_journal(mut self) -> Self {
        self.journal = None;
        self
    }

    /// Sets the observer that receives every transition of this process.
    pub fn observer(mut self, observer: impl Observer) -> Self {
        self.observer = Some(Arc::new(observer));
        self
    }

    /// The interval between two renewals: a third of the ttl, so that two can fail before the lease is in danger.
    pub(crate) fn renew_every(&self, ttl: Ttl) -> Duration {
        (ttl.duration() / 3).min(self.heartbeat).max(drift(ttl.duration()))
    }

    setters! {
        /// Sets whether the store notifies waiters when they are granted a lock.
        notifications: bool,
        /// Sets the first pause of a waiter that polls.
        poll_interval: Duration,
        /// Sets the longest pause of a waiter that polls.
        max_poll_interval: Duration,
        /// Sets after how long a waiter that received no notification asks again.
        recheck_interval: Duration,
        /// Sets how long one request to the store may take.
        request_timeout: Duration,
        /// Sets whether `connect` succeeds while the server cannot be reached.
        lazy_connect: bool,
        /// Sets how long a waiter goes on while the store cannot be reached.
        outage_timeout: Duration,
        /// Sets the longest interval between two renewals of a lease.
        heartbeat: Duration,
        /// Sets how often a failed release is tried again before the emergency release.
        max_release_retries: u32,
        /// Sets how long to wait before an emergency release.
        emergency_release_delay: Duration,
        /// Sets whether a lock is released by other means when the usual ones fail.
        emergency_release: bool,
        /// Sets what happens to work when the store cannot be reached.
        on_unavailable: OnUnavailable,
    }
}

/// What happens to a request when the store cannot be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum OnUnavailable {
    /// It fails: without a store it is unknown whether another process is at work.
    #[default]
    FailClosed,
    /// It goes on without protection. The guard reports it ([`Guard::is_protected`](crate::Guard::is_protected)) and has no
    /// fence; a warning and a journal entry are written.
    FailOpen,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            keys: KeySpace::default(),
            ttl: Ttl::default(),
            owner: Owner::default(),
            notifications: true,
            poll_interval: Duration::from_millis(50),
            max_poll_interval: Duration::from_secs(1),
            recheck_interval: Duration::from_secs(30),
            request_timeout: Duration::from_secs(2),
            lazy_connect: false,
            outage_timeout: Duration::from_secs(10),
            heartbeat: Duration::from_secs(60),
            max_release_retries: 3,
            emergency_release_delay: Duration::from_secs(5),
            emergency_release: true,
            on_unavailable: OnUnavailable::FailClosed,
            journal: crate::journal::default_dir(),
            observer: None,
        }
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("keys", &self.keys)
            .field("ttl", &self.ttl)
            .field("owner", &self.owner)
            .field("on_unavailable", &self.on_unavailable)
            .finish_non_exhaustive()
    }
}
