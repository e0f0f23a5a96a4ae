//! The sections `gpu_lock` and `gpu_lock_monitor`. Numbers are in seconds.

use std::time::Duration;

use super::settings::Settings;
use super::value::{Setting, Written};
use crate::facts::{LockName, Owner, RawPattern, Ttl};

/// `gpu_scope`: whether the number of a GPU is unique in the store or per host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GpuScope {
    /// The lock of GPU 0 is `gpu_lock:0`: for one machine, or one set of GPUs that several machines use.
    #[default]
    Shared,
    /// The lock of GPU 0 is `gpu_lock:<host>:0`: for a fleet in which every machine has a GPU 0 of its own.
    Host,
}

impl GpuScope {
    /// Returns the name of the pool of all GPUs. The names of their locks begin with it and a colon.
    pub fn pool(self) -> String {
        match self {
            Self::Shared => "gpu_lock".to_owned(),
            Self::Host => format!("gpu_lock:{}", Owner::default().host()),
        }
    }

    /// Returns the name of the lock of one GPU.
    pub fn lock(self, gpu_id: u32) -> String {
        format!("{}:{gpu_id}", self.pool())
    }
}

impl Setting for GpuScope {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "shared" => Ok(Self::Shared),
            "host" => Ok(Self::Host),
            _ => Err(format!("`{text}` is neither `shared` nor `host`")),
        }
    }

    fn show(&self) -> String {
        match self {
            Self::Shared => "shared",
            Self::Host => "host",
        }
        .to_owned()
    }
}

/// `gpu_lock`: how GPU locks are acquired, renewed and released.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuLock {
    /// The first pause of a polling waiter. Pauses are at most 1 s, because a waiter that sends nothing for 3 s loses its turn.
    pub poll_interval: Duration,
    /// How long a request waits by default; see [`wait_up_to`](crate::LockRequest::wait_up_to).
    pub max_wait_time: Duration,
    /// The lease of a holder. While the heartbeat is enabled, it is at most the heartbeat's timeout.
    pub lock_timeout: Ttl,
    /// Whether pauses double, up to `max_poll_interval`.
    pub exponential_backoff: bool,
    /// The longest pause of a polling waiter.
    pub max_poll_interval: Duration,
    /// Whether the store notifies waiters when they get the lock.
    pub use_event_driven: bool,
    /// The longest time after which a waiter without a notification asks the store.
    pub fallback_timeout: Duration,
    /// What happens when a release fails.
    pub exception_handling: ExceptionHandling,
    /// How holders show that they are alive.
    pub heartbeat: Heartbeat,
}

/// `gpu_lock.exception_handling`: what happens when a release fails.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExceptionHandling {
    /// Whether fallbacks are used when a release fails. They too compare the holder's token.
    pub enable_emergency_release: bool,
    /// How long to wait before the fallbacks.
    pub emergency_release_delay: Duration,
    /// How often the release is retried before the fallbacks.
    pub max_release_retries: u32,
}

/// `gpu_lock.heartbeat`: renewal of leases.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Heartbeat {
    /// Whether leases are renewed. Otherwise a lease lasts for `lock_timeout`.
    pub enabled: bool,
    /// The longest time between two renewals.
    pub interval: Duration,
    /// The time without a renewal after which a holder counts as dead. Its lease has ended by then.
    pub timeout: Ttl,
}

/// `gpu_lock_monitor`: when a long-held lock causes a warning, and when it is evicted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuLockMonitor {
    /// The time between two checks of all locks.
    pub monitor_interval: Duration,
    /// What happens to a lock that is held for long.
    pub timeout_levels: TimeoutLevels,
    /// When a holder counts as dead.
    pub heartbeat: MonitorHeartbeat,
    /// How a failed eviction is retried.
    pub cleanup: Cleanup,
    /// Whether the monitor runs.
    pub enabled: bool,
    /// Whether the monitor evicts holders, or only reports them.
    pub auto_recovery: bool,
    /// Whether a holder that is alive is evicted too after the hard timeout.
    pub evict_living: bool,
    /// The locks to which the levels apply and that may be evicted. All other locks are only watched.
    pub names: LockNames,
}

/// A list of lock names and prefixes; a prefix ends with `*`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockNames(Vec<RawPattern>);

impl LockNames {
    /// Returns whether a lock matches.
    pub fn contains(&self, name: &LockName) -> bool {
        self.0.iter().any(|pattern| pattern.matches(name.as_str()))
    }
}

impl Setting for LockNames {
    fn parse(text: &str) -> Result<Self, String> {
        Vec::parse(text).map(Self).map_err(about_names)
    }

    fn show(&self) -> String {
        self.0.show()
    }

    fn read(written: &Written) -> Result<Self, String> {
        Vec::read(written).map(Self).map_err(about_names)
    }
}

/// Adapts the error text of a raw pattern, because these names do not select keys.
fn about_names(problem: String) -> String {
    problem.replacen("raw pattern", "name", 1)
}

/// `gpu_lock_monitor.timeout_levels`: times since the lock was granted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TimeoutLevels {
    /// When a warning is sent.
    pub warning: Duration,
    /// When the holder is asked to finish.
    pub soft_timeout: Duration,
    /// When a holder that does not renew is evicted.
    pub hard_timeout: Duration,
}

/// `gpu_lock_monitor.heartbeat`: when a holder counts as dead.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MonitorHeartbeat {
    /// The expected time between two renewals.
    pub interval: Duration,
    /// The time without a renewal after which a holder counts as dead.
    pub timeout: Ttl,
}

/// `gpu_lock_monitor.cleanup`: retries of evictions.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cleanup {
    /// How often a failed eviction is retried.
    pub max_retry: u32,
    /// The pause between two attempts.
    pub retry_delay: Duration,
}

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn lease(seconds: u64) -> Ttl {
    Ttl::new(secs(seconds)).expect("in bounds")
}

impl GpuLock {
    pub(super) fn read(settings: &mut Settings) -> Self {
        let read = Self {
            poll_interval: settings.get("gpu_lock.poll_interval", secs(2)),
            max_wait_time: settings.get("gpu_lock.max_wait_time", secs(300)),
            lock_timeout: settings.get("gpu_lock.lock_timeout", lease(600)),
            exponential_backoff: settings.get("gpu_lock.exponential_backoff", true),
            max_poll_interval: settings.get("gpu_lock.max_poll_interval", secs(10)),
            use_event_driven: settings.get("gpu_lock.use_event_driven", true),
            fallback_timeout: settings.get("gpu_lock.fallback_timeout", secs(30)),
            exception_handling: ExceptionHandling {
                enable_emergency_release: settings.get("gpu_lock.exception_handling.enable_emergency_release", true),
                emergency_release_delay: settings.get("gpu_lock.exception_handling.emergency_release_delay", secs(5)),
                max_release_retries: settings.get("gpu_lock.exception_handling.max_release_retries", 3),
            },
            heartbeat: Heartbeat {
                enabled: settings.get("gpu_lock.heartbeat.enabled", true),
                interval: settings.get("gpu_lock.heartbeat.interval", secs(60)),
                timeout: settings.get("gpu_lock.heartbeat.timeout", lease(300)),
            },
        };
        positive(settings, "gpu_lock.poll_interval", read.poll_interval);
        positive(settings, "gpu_lock.fallback_timeout", read.fallback_timeout);
        if read.exponential_backoff && read.max_poll_interval < read.poll_interval {
            let (longest, first) = ("gpu_lock.max_poll_interval", "gpu_lock.poll_interval");
            settings.refuse_with(longest, first, "must not be shorter than gpu_lock.poll_interval");
        }
        check_heartbeat(settings, "gpu_lock.heartbeat", read.heartbeat.interval, read.heartbeat.timeout);
        read
    }
}

impl Default for GpuLockMonitor {
    fn default() -> Self {
        Self::read(&mut Settings::new())
    }
}

impl GpuLockMonitor {
    pub(super) fn read(settings: &mut Settings) -> Self {
        let read = Self {
            monitor_interval: settings.get("gpu_lock_monitor.monitor_interval", secs(30)),
            timeout_levels: TimeoutLevels {
                warning: settings.get("gpu_lock_monitor.timeout_levels.warning", secs(300)),
                soft_timeout: settings.get("gpu_lock_monitor.timeout_levels.soft_timeout", secs(600)),
                hard_timeout: settings.get("gpu_lock_monitor.timeout_levels.hard_timeout", secs(900)),
            },
            heartbeat: MonitorHeartbeat {
                interval: settings.get("gpu_lock_monitor.heartbeat.interval", secs(60)),
                timeout: settings.get("gpu_lock_monitor.heartbeat.timeout", lease(300)),
            },
            cleanup: Cleanup {
                max_retry: settings.get("gpu_lock_monitor.cleanup.max_retry", 3),
                retry_delay: settings.get("gpu_lock_monitor.cleanup.retry_delay", secs(60)),
            },
            enabled: settings.get("gpu_lock_monitor.enabled", true),
            auto_recovery: settings.get("gpu_lock_monitor.auto_recovery", true),
            evict_living: settings.get("gpu_lock_monitor.evict_living", false),
            names: settings.get("gpu_lock_monitor.names", LockNames::parse("gpu_lock:*").expect("a pattern")),
        };
        positive(settings, "gpu_lock_monitor.monitor_interval", read.monitor_interval);
        let levels = &read.timeout_levels;
        let [warning, soft, hard] =
            ["warning", "soft_timeout", "hard_timeout"].map(|level| format!("gpu_lock_monitor.timeout_levels.{level}"));
        if levels.soft_timeout < levels.warning {
            settings.refuse_with(&soft, &warning, "must not come before `warning`");
        }
        if levels.hard_timeout < levels.soft_timeout {
            settings.refuse_with(&hard, &soft, "must not come before `soft_timeout`");
        }
        check_heartbeat(settings, "gpu_lock_monitor.heartbeat", read.heartbeat.interval, read.heartbeat.timeout);
        read
    }
}

fn positive(settings: &mut Settings, key: &str, value: Duration) {
    if value.is_zero() {
        settings.refuse(key, "must be longer than zero");
    }
}

/// Checks that two renewals fit into a timeout, so that one may be late.
fn check_heartbeat(settings: &mut Settings, section: &str, interval: Duration, timeout: Ttl) {
    positive(settings, &format!("{section}.interval"), interval);
    if interval.saturating_mul(2) > timeout.duration() {
        settings.refuse_with(
            &format!("{section}.timeout"),
            &format!("{section}.interval"),
            "must be at least twice the `interval`, so that one late heartbeat does not count as a dead holder",
        );
    }
}
