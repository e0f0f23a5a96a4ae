//! What is done with a GPU before its lock is given back: free its memory, end what still runs on it.

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

/// How long a clean-up may take unless somebody says otherwise: others wait for the device.
const WITHIN: Duration = Duration::from_secs(30);
/// How often a command is looked after.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Work, or a command, that runs before the lock of a GPU is given back: after the work is done, has
/// failed, has panicked, was dropped or has lost its lease.
///
/// Whatever becomes of it, the lock is given back after it: a failure, a panic and a clean-up that takes
/// too long are told in the log.
///
/// ```
/// use std::time::Duration;
/// use leasehold::gpu::CleanUp;
///
/// let by_hand = CleanUp::new(async |gpus| println!("freeing {:?}", gpus.devices));
/// // Sees CUDA_VISIBLE_DEVICES, and LEASEHOLD_LOST=true when the lease was lost.
/// let command = CleanUp::command(["nvidia-smi", "--gpu-reset"]).within(Duration::from_secs(5));
/// # drop((by_hand, command));
/// ```
#[must_use = "a clean-up runs when it is given to a request"]
pub struct CleanUp {
    /// Nobody locks it: it lets what is held be looked at from several threads.
    work: Mutex<Work>,
    within: Duration,
}

type CleanUpOutcome = Result<(), String>;

enum Work {
    Async(Box<dyn FnOnce(Leaving) -> BoxFuture<'static, CleanUpOutcome> + Send>),
    Command(Vec<OsString>),
}

/// What a clean-up is told.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Leaving {
    /// The devices that are about to be given back.
    pub devices: Vec<Device>,
    /// The lease was lost: somebody else may be on the device already. Nothing that would hurt them may
    /// be done.
    pub lost: bool,
}

/// What a clean-up may give back: nothing, or whether it worked.
pub trait Cleaned {
    /// What went wrong, for the log.
    ///
    /// # Errors
    /// When something did.
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
    /// Runs work, which may fail.
    pub fn new<F, R>(work: impl FnOnce(Leaving) -> F + Send + 'static) -> Self
    where
        F: Future<Output = R> + Send + 'static,
        R: Cleaned,
    {
        // Called inside the future: a panic before its first await is one like any other.
        let work = |leaving: Leaving| async move { work(leaving).await.outcome() }.boxed();
        Self { work: Mutex::new(Work::Async(Box::new(work))), within: WITHIN }
    }

    /// Runs a command, without a shell. It sees the devices in `CUDA_VISIBLE_DEVICES`, and in
    /// `LEASEHOLD_LOST` whether the lease was lost (`true` or `false`).
    pub fn command<W: Into<OsString>>(words: impl IntoIterator<Item = W>) -> Self {
        let words = words.into_iter().map(Into::into).collect();
        Self { work: Mutex::new(Work::Command(words)), within: WITHIN }
    }

    /// How long it may take, 30 s unless said. A command that takes longer is killed, with all it
    /// started; other work is dropped.
    pub fn within(self, within: Duration) -> Self {
        Self { within, ..self }
    }

    /// Begins at once, and gives the lock back afterwards; whoever waits for it may stop waiting.
    pub(super) fn run_before<T: Send + 'static>(
        self,
        core: &Core,
        leaving: Leaving,
        give_back: impl Future<Output = T> + Send + 'static,
    ) -> impl Future<Output = Option<T>> {
        let (done, told) = oneshot::channel();
        core.spawn(async move {
            self.run(leaving).await;
            // Nobody waits any more: it is given back all the same.
            let _ = done.send(give_back.await);
        });
        // None when the runtime is gone, and everything with it.
        async move { told.await.ok() }
    }

    /// Runs it to its end, or to the end of its time. Never fails.
    async fn run(self, leaving: Leaving) {
        let Self { work, within } = self;
        let devices = visible(&leaving.devices);
        let (work, at_most) = match work.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Work::Async(work) => (async move { work(leaving).await }.boxed(), within),
            Work::Command(words) => {
                let run = tokio::task::spawn_blocking(move || run_command(&words, &leaving, within));
                let run = run.map(|ran| ran.unwrap_or_else(|error| Err(error.to_string())));
                // It is ended when its time is over; should even that fail, it is left alone.
                (run.boxed(), within.saturating_add(Duration::from_secs(1)))
            }
        };
        let at_most = at_most.min(Ttl::MAX);
        match tokio::time::timeout(at_most, AssertUnwindSafe(work).catch_unwind()).await {
            Ok(Ok(Ok(()))) => tracing::debug!(%devices, "cleaned up"),
            Ok(Ok(Err(error))) => tracing::warn!(%devices, %error, "the clean-up failed; the lock is given back"),
            Ok(Err(panic)) => {
                tracing::warn!(%devices, error = message(&*panic), "the clean-up panicked; the lock is given back");
            }
            Err(_) => tracing::warn!(%devices, ?within, "the clean-up took too long; the lock is given back"),
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
    let said = |error: std::io::Error| format!("{}: {error}", program.display());
    let mut child = Command::new(program)
        .args(arguments)
        .env(VISIBLE, visible(&leaving.devices))
        .env(ORDER.0, ORDER.1)
        .env("LEASEHOLD_LOST", leaving.lost.to_string())
        .stdin(Stdio::null())
        // So that all it starts can be ended with it.
        .process_group(0)
        .spawn()
        .map_err(said)?;
    let end_at = Moment::now() + within;
    loop {
        match child.try_wait().map_err(said)? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => return Err(format!("{}: {status}", program.display())),
            None if Moment::now() < end_at => std::thread::sleep(LOOK_EVERY),
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
