//! The engine of a process: the runtime for connections, renewals and waiting, and its native thread.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;

use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use crate::driver::Driver;
use crate::log::Log;

/// How many forks lead from the first process to this one. A child can have the process id of an ancestor that has ended,
/// but not with the same number of forks.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Identifies a process among its ancestors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process {
    pid: u32,
    forks: u64,
}

impl Process {
    pub(crate) fn this() -> Self {
        Self { pid: std::process::id(), forks: FORKS.load(Ordering::Relaxed) }
    }

    pub(crate) fn is_this(self) -> bool {
        self == Self::this()
    }

    pub(crate) fn pid(self) -> u32 {
        self.pid
    }
}

/// Counts a fork, in the child.
pub(crate) fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// The engine of one process, and a link to those of its descendants.
///
/// An engine is never dropped and never behind a mutex. A child finds its parent's, whose thread does not exist there and
/// whose mutexes may be locked for ever, and goes on to its own.
pub(crate) struct Engine {
    process: Process,
    runtime: &'static Runtime,
    driver: &'static Driver,
    log: Log,
    next: OnceLock<Box<Engine>>,
}

static FIRST: OnceLock<Box<Engine>> = OnceLock::new();

impl Engine {
    /// Returns the engine of this process and starts it if necessary. Callers have the GIL, so no other thread is in the
    /// middle of it at a fork.
    pub(crate) fn this() -> io::Result<&'static Self> {
        let mut slot = &FIRST;
        loop {
            let engine = match slot.get() {
                Some(engine) => engine,
                None => {
                    let new = Box::new(Self::start()?);
                    slot.get_or_init(|| new)
                }
            };
            if engine.process.is_this() {
                return Ok(engine);
            }
            slot = &engine.next;
        }
    }

    /// Returns the engine of this process, if it was started.
    pub(crate) fn running() -> Option<&'static Self> {
        let mut engine = FIRST.get()?;
        while !engine.process.is_this() {
            engine = engine.next.get()?;
        }
        Some(engine)
    }

    fn start() -> io::Result<Self> {
        // Never dropped, like the engine.
        let runtime: &Runtime =
            Box::leak(Box::new(tokio::runtime::Builder::new_current_thread().enable_all().build()?));
        let driver: &Driver = Box::leak(Box::default());
        std::thread::Builder::new().name("leasehold".into()).spawn(|| driver.run(runtime))?;
        Ok(Self { process: Process::this(), runtime, driver, log: Log::default(), next: OnceLock::new() })
    }

    pub(crate) fn process(&self) -> Process {
        self.process
    }

    pub(crate) fn log(&self) -> &Log {
        &self.log
    }

    /// Drives the runtime in this thread until the work is done or it is time to check for signals. The caller must not
    /// have the GIL.
    pub(crate) fn wait_for<T>(&self, work: impl Future<Output = T> + Unpin) -> Poll<T> {
        self.driver.wait_for(self.runtime, work)
    }

    /// Runs the work in the background, where the native thread drives until it is done.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        let in_background = self.driver.in_background();
        self.runtime.spawn(async move {
            work.await;
            drop(in_background);
        })
    }

    /// Makes the native thread run background work that was just left to it, such as the release of a dropped guard.
    pub(crate) fn wake(&self) {
        self.driver.wake();
    }
}
