//! Clean-up of a GPU before its lock is released: free its memory, end processes that still use it.

use std::any::Any;
use std::ffi::OsString;
use std::fmt::Display;
use std::os::unix::process::CommandExt;
use std::panic::AssertUnwindSafe;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::sync::oneshot;

use super::devices::{Device, ORDER, VISIBLE, visible};
use crate::clock::Moment;
use crate::engine::Core;
use crate::facts::Ttl;

/// The default time limit of a clean-up.
const DEFAULT_LIMIT: Duration = Duration::from_secs(30);
/// How often it is checked whether a command has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A function or command that runs before the lock of a GPU is released: after the work has ended, failed, panicked, was
/// dropped or lost its lease.
///
/// The lock is released afterwards in any case. If the clean-up fails, panics or takes too long, a warning is logged.
///
/// ```
/// use std::time::Duration;
/// use leasehold::gpu::CleanUp;
///
/// let function = CleanUp::new(async |gpus| println!("freeing {:?}", gpus.devices));
/// // The command gets CUDA_VISIBLE_DEVICES, and LEASEHOLD_LOST=true if the lease was lost.
/// let command = CleanUp::command(["nvidia-smi", "--gpu-reset"]).within(Duration::from_secs(5));
/// # drop((function, command));
/// ```
#[must_use = "a clean-up runs when it is given to a request"]
pub struct CleanUp {
    /// The mutex is never locked. It makes the type `Sync`.
    work: Mutex<Work>,
    within: Duration,
}

type CleanUpOutcome = Result<(), String>;

enum Work {
    Async(Box<dyn FnOnce(Leaving) -> BoxFuture<'static, CleanUpOutcome> + Send>),
    Command(Vec<OsString>),
}

/// The argument of a clean-up.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Leaving {
    /// The devices that are about to be released.
    pub devices: Vec<Device>,
    /// Whether the lease was lost. Then another holder may already use the device, and the clean-up must not affect its work.
    pub lost: bool,
}

/// The return type of a clean-up function: nothing, or a `Result`.
pub trait Cleaned {
    /// Returns what went wrong, for the log.
    ///
    /// # Errors
    /// When the clean-up failed.
    fn outcome(self) -> Result<(), String>;
}

impl Cleaned for () {
    fn outcome(self) -> Result<(), String> {
        Ok(())
    }
}

impl<E: Display> Cleaned for Result<(), E> {
    fn outcome(self) -> Result<(), String> {
        // With its causes, where it writes them.
        self.map_err(|error| format!("{error:#}"))
    }
}

impl CleanUp {
    /// Creates a clean-up from an async function, which may fail.
    pub fn new<F, R>(work: impl FnOnce(Leaving) -> F + Send + 'static) -> Self
    where
        F: Future<Output = R> + Send + 'static,
        R: Cleaned,
    {
        // Called inside the future, so that a panic before the first await is caught too.
        let work = |leaving: Leaving| async move { work(leaving).await.outcome() }.boxed();
        Self { work: Mutex::new(Work::Async(Box::new(work))), within: DEFAULT_LIMIT }
    }

    /// Creates a clean-up from a command, which runs without a shell. Its variable `CUDA_VISIBLE_DEVICES` has the devices, and
    /// `LEASEHOLD_LOST` says whether the lease was lost (`true` or `false`).
    pub fn command<W: Into<OsString>>(words: impl IntoIterator<Item = W>) -> Self {
        let words = words.into_iter().map(Into::into).collect();
        Self { work: Mutex::new(Work::Command(words)), within: DEFAULT_LIMIT }
    }

    /// Sets the time limit, by default 30 s. After it a command is killed together with all processes it started; a function is
    /// dropped.
    pub fn within(self, within: Duration) -> Self {
        Self { within, ..self }
    }

    /// Starts the clean-up in the background, and releases the lock after it. The returned future only waits for that, and can
    /// be dropped.
    pub(super) fn run_before<T: Send + 'static>(
        self,
        core: &Core,
        leaving: Leaving,
        release: impl Future<Output = T> + Send + 'static,
    ) -> impl Future<Output = Option<T>> {
        let (sender, released) = oneshot::channel();
        core.spawn(async move {
            self.run(leaving).await;
            // The receiver may be gone. The lock is released anyway.
            let _ = sender.send(release.await);
        });
        // `None` when the runtime has shut down.
        async move { released.await.ok() }
    }

    /// Runs the clean-up to its end or its time limit. Never fails.
    async fn run(self, leaving: Leaving) {
        let Self { work, within } = self;
        let devices = visible(&leaving.devices);
        let (work, at_most) = match work.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Work::Async(work) => (async move { work(leaving).await }.boxed(), within),
            Work::Command(words) => {
                let run = tokio::task::spawn_blocking(move || run_command(&words, &leaving, within));
                let run = run.map(|ran| ran.unwrap_or_else(|error| Err(error.to_string())));
                // `run_command` kills the command at the limit. If even that hangs, waiting ends a second later.
                (run.boxed(), within.saturating_add(Duration::from_secs(1)))
            }
        };
        let at_most = at_most.min(Ttl::MAX);
        match tokio::time::timeout(at_most, AssertUnwindSafe(work).catch_unwind()).await {
            Ok(Ok(Ok(()))) => tracing::debug!(%devices, "clean-up done"),
            Ok(Ok(Err(error))) => tracing::warn!(%devices, %error, "the clean-up failed; releasing the lock"),
            Ok(Err(panic)) => {
                tracing::warn!(%devices, error = message(&*panic), "the clean-up panicked; releasing the lock");
            }
            Err(_) => tracing::warn!(%devices, ?within, "the clean-up took too long; releasing the lock"),
        }
    }
}

/// The message of a panic.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

fn run_command(words: &[OsString], leaving: &Leaving, within: Duration) -> CleanUpOutcome {
    let Some((program, arguments)) = words.split_first() else { return Err("the command is empty".into()) };
    let failed = |error: std::io::Error| format!("{}: {error}", program.display());
    let mut child = Command::new(program)
        .args(arguments)
        .env(VISIBLE, visible(&leaving.devices))
        .env(ORDER.0, ORDER.1)
        .env("LEASEHOLD_LOST", leaving.lost.to_string())
        .stdin(Stdio::null())
        // All processes that it starts can be killed with it.
        .process_group(0)
        .spawn()
        .map_err(failed)?;
    let end_at = Moment::now() + within;
    loop {
        match child.try_wait().map_err(failed)? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(format!("{}: {status}", program.display())),
            None if Moment::now() < end_at => std::thread::sleep(POLL_INTERVAL),
            None => {
                let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
                let _ = group.map(|group| kill_process_group(group, Signal::KILL));
                let _ = child.wait();
                return Err(format!("{}: killed after {within:?}", program.display()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::store::{Operation, StoreError, StoreErrorKind};

    #[test]
    fn a_failure_is_logged_with_its_cause() {
        let source = StoreError::new(StoreErrorKind::Unreachable, "connection refused");
        let name = crate::facts::LockName::new("gpu_lock:0").expect("a name");
        let error = Error::Store { operation: Operation::Release, name, store: "redis://gpu".into(), source };
        let logged = Err::<(), _>(error).outcome().expect_err("it failed");
        assert!(logged.contains("connection refused"), "{logged}");
        let panic: Box<dyn Any + Send> = Box::new("out of memory");
        assert_eq!(message(&*panic), "out of memory");
        assert_eq!(message(&*(Box::new(String::from("on 3")) as Box<dyn Any + Send>)), "on 3");
    }
}
