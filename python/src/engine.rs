//! The thread that does what goes on in the background, one per process.

use std::future::pending;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::runtime::Handle;

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
    runtime: Handle,
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
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        // Its tasks run, its sockets and timers are looked at, for as long as this waits: until the process
        // ends.
        let work = move || runtime.block_on(pending::<()>());
        std::thread::Builder::new().name("leasehold".into()).spawn(work)?;
        Ok(Self { process: Process::this(), runtime: handle, log: Log::default(), next: OnceLock::new() })
    }

    pub(crate) fn process(&self) -> Process {
        self.process
    }

    pub(crate) fn log(&self) -> &Log {
        &self.log
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }
}
