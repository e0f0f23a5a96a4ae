//! The sections `gpu_lock` and `gpu_lock_monitor`. Numbers are seconds.

use std::time::Duration;

use super::settings::Settings;
use super::value::{Setting, Written};
use crate::facts::{LockName, Owner, RawPattern, Ttl};

/// `gpu_scope`: whose the number of a GPU is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GpuScope {
    /// The lock of GPU 0 is `gpu_lock:0`, for whoever uses this store: one machine, or one set of GPUs that
    /// several machines reach.
    #[default]
    Shared,
    /// It is `gpu_lock:<host>:0`: for a fleet in which every machine has a GPU 0 of its own.
    Host,
}

impl GpuScope {
    /// What the locks of all GPUs begin with, but for the last colon: the name of their pool.
    pub fn pool(self) -> String {
        match self {
            Self::Shared => "gpu_lock".to_owned(),
            Self::Host => format!("gpu_lock:{}", Owner::default().host()),
        }
    }

    /// The lock of one GPU.
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

/// `gpu_lock`: how locks on GPUs are taken, kept and given back.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuLock {
    /// The first pause of a waiter that has to poll. Nobody pauses for longer than a second: a
    /// waiter that is not heard of for three is passed over.
    pub poll_interval: Duration,
    /// How long a request waits; a long task asks for more by
    /// [`wait_up_to`](crate::LockRequest::wait_up_to).
    pub max_wait_time: Duration,
    /// The lease of a holder without a heartbeat; with one, the heartbeat's timeout if that is
    /// shorter.
    pub lock_timeout: Ttl,
    /// Whether each pause is twice the last, up to `max_poll_interval`.
    pub exponential_backoff: bool,
    /// The longest pause of a waiter that polls.
    pub max_poll_interval: Duration,
    /// Whether the store tells waiters when it is their turn.
    pub use_event_driven: bool,
    /// A waiter that was told nothing asks by itself after this at the latest.
    pub fallback_timeout: Duration,
    /// What happens when a release fails.
    pub exception_handling: ExceptionHandling,
    /// Whether a holder is known to be alive, and how.
    pub heartbeat: Heartbeat,
}

/// `gpu_lock.exception_handling`
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExceptionHandling {
    /// Whether a release is done by other means when the usual ones fail. Always compared with the
    /// holder's token.
    pub enable_emergency_release: bool,
    /// How long to wait before that.
    pub emergency_release_delay: Duration,
    /// How often the usual release is tried again before.
    pub max_release_retries: u32,
}

/// `gpu_lock.heartbeat`
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Heartbeat {
    /// Off: a lease is not renewed and lasts `lock_timeout`, whatever its holder does.
    pub enabled: bool,
    /// A holder renews its lease at least this often.
    pub interval: Duration,
    /// A holder that has not done so for this long counts as dead: its lease has ended.
    pub timeout: Ttl,
}

/// `gpu_lock_monitor`: when somebody is warned about a lock that is held for long, and when it is
/// taken away.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuLockMonitor {
    /// How often every lock is looked at.
    pub monitor_interval: Duration,
    /// By the time a lock has been held.
    pub timeout_levels: TimeoutLevels,
    /// What the monitor expects of a living holder.
    pub heartbeat: MonitorHeartbeat,
    /// How an eviction that failed is repeated.
    pub cleanup: Cleanup,
    /// Whether there is a monitor at all.
    pub enabled: bool,
    /// Whether it takes locks away, or only tells.
    pub auto_recovery: bool,
    /// Whether also a holder that is alive is evicted when it is over the hard timeout.
    pub evict_living: bool,
    /// The locks that the levels are for, and that may be taken away. Every other one is looked at as well.
    pub names: LockNames,
}

/// Locks by their names: a list of texts, each with `*` at its end or not at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockNames(Vec<RawPattern>);

impl LockNames {
    /// Whether a lock is meant.
    pub fn contains(&self, name: &LockName) -> bool {
        self.0.iter().any(|pattern| pattern.matches(name.as_str()))
    }
}

impl Setting for LockNames {
    fn parse(text: &str) -> Result<Self, String> {
        Vec::parse(text).map(Self).map_err(in_plain_words)
    }

    fn show(&self) -> String {
        self.0.show()
    }

    fn read(written: &Written) -> Result<Self, String> {
        Vec::read(written).map(Self).map_err(in_plain_words)
    }
}

/// These names are not about keys.
fn in_plain_words(problem: String) -> String {
    problem.replacen("raw pattern", "name", 1)
}

/// `gpu_lock_monitor.timeout_levels`
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TimeoutLevels {
    /// Held for so long, it is warned about.
    pub warning: Duration,
    /// The holder is asked to finish.
    pub soft_timeout: Duration,
    /// A holder that gives no sign of life is evicted.
    pub hard_timeout: Duration,
}

/// `gpu_lock_monitor.heartbeat`
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MonitorHeartbeat {
    /// A sign of life is expected this often.
    pub interval: Duration,
    /// Without one for so long, a holder counts as dead.
    pub timeout: Ttl,
}

/// `gpu_lock_monitor.cleanup`
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cleanup {
    /// How often an eviction is tried again.
    pub max_retry: u32,
    /// The pause between two tries.
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
        beats(settings, "gpu_lock.heartbeat", read.heartbeat.interval, read.heartbeat.timeout);
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
        beats(settings, "gpu_lock_monitor.heartbeat", read.heartbeat.interval, read.heartbeat.timeout);
        read
    }
}

fn positive(settings: &mut Settings, key: &str, value: Duration) {
    if value.is_zero() {
        settings.refuse(key, "must be longer than zero");
    }
}

/// At least two beats fit into a timeout: one may be late without anybody being declared dead.
fn beats(settings: &mut Settings, section: &str, interval: Duration, timeout: Ttl) {
    positive(settings, &format!("{section}.interval"), interval);
    if interval.saturating_mul(2) > timeout.duration() {
        settings.refuse_with(
            &format!("{section}.timeout"),
            &format!("{section}.interval"),
            "must be at least twice the `interval`: one heartbeat may be late without its holder being dead",
        );
    }
}
