//! What goes on in the background of a process: connections, renewals, waiting. One thread is there for it.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;

use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use crate::driving::Driving;
use crate::log::Log;

/// Forks that Python told us of. A child can get the number of a process that is long gone, but not
/// without a fork.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// A process, told from those it was forked from.
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

/// To be called in the child.
pub(crate) fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// The thread of this process, and where those stand that came before it.
///
/// An engine is never dropped and never behind a mutex: a child finds the one of its parent, whose thread
/// does not exist there and whose locks may be held for ever, and leaves it alone.
pub(crate) struct Engine {
    process: Process,
    runtime: &'static Runtime,
    driving: &'static Driving,
    log: Log,
    next: OnceLock<Box<Engine>>,
}

static FIRST: OnceLock<Box<Engine>> = OnceLock::new();

impl Engine {
    /// The engine of this process, started if it is not there yet. Called by threads that have the
    /// interpreter's lock: so no other one is half-way through it when one forks.
    pub(crate) fn this() -> io::Result<&'static Self> {
        let mut place = &FIRST;
        loop {
            let engine = match place.get() {
                Some(engine) => engine,
                None => {
                    let new = Box::new(Self::start()?);
                    place.get_or_init(|| new)
                }
            };
            if engine.process.is_this() {
                return Ok(engine);
            }
            place = &engine.next;
        }
    }

    /// The engine of this process, if it was started.
    pub(crate) fn running() -> Option<&'static Self> {
        let mut engine = FIRST.get()?;
        while !engine.process.is_this() {
            engine = engine.next.get()?;
        }
        Some(engine)
    }

    fn start() -> io::Result<Self> {
        // For ever, as the engine.
        let runtime: &Runtime =
            Box::leak(Box::new(tokio::runtime::Builder::new_current_thread().enable_all().build()?));
        let driving: &Driving = Box::leak(Box::default());
        std::thread::Builder::new().name("leasehold".into()).spawn(|| driving.run(runtime))?;
        Ok(Self { process: Process::this(), runtime, driving, log: Log::default(), next: OnceLock::new() })
    }

    pub(crate) fn process(&self) -> Process {
        self.process
    }

    pub(crate) fn log(&self) -> &Log {
        &self.log
    }

    /// Waits in this thread until it is done, or time to look for signals. Not to be called with the interpreter's
    /// lock.
    pub(crate) fn wait_for<T>(&self, work: impl Future<Output = T> + Unpin) -> Poll<T> {
        self.driving.wait_for(self.runtime, work)
    }

    /// Does it in the background, for somebody who is told when it is done.
    pub(crate) fn start_for_loop(&self, work: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        let started = self.driving.started();
        self.runtime.spawn(async move {
            work.await;
            drop(started);
        })
    }

    /// Something was left to the background, which is to be done now.
    pub(crate) fn is_needed(&self) {
        self.driving.is_needed();
    }
}
