//! One question to the store, and the ways to wait for its answer.

use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::Pin;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use tokio::task::AbortHandle;

use crate::answer::Answer;
use crate::engine::{Engine, Process};
use crate::failure::Failure;

pub(crate) type Outcome = Result<Answer, Failure>;
type Work = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// A question that has not been asked yet, is being asked, or was answered.
///
/// A thread asks with `wait`. An event loop asks with `start`, is told by its mailbox, and then takes the
/// `result`. Dropped or cancelled before that, nothing is kept: a lock that was granted is given back.
#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Call {
    process: Process,
    engine: &'static Engine,
    state: Arc<Mutex<State>>,
    /// A release: once begun it goes on without its caller. One that is broken off has to begin anew, and counts as
    /// one that failed.
    to_the_end: bool,
}

enum State {
    New(Work),
    UnderWay(Option<AbortHandle>),
    Done(Outcome),
    Over,
}

impl Call {
    pub(crate) fn new(work: impl Future<Output = Outcome> + Send + 'static) -> PyResult<Self> {
        let engine = Engine::this()?;
        let state = Arc::new(Mutex::new(State::New(Box::pin(work))));
        Ok(Self { process: engine.process(), engine, state, to_the_end: false })
    }

    /// A call that is done to its end, also when its caller is interrupted or cancelled.
    pub(crate) fn to_the_end(work: impl Future<Output = Outcome> + Send + 'static) -> PyResult<Self> {
        Ok(Self { to_the_end: true, ..Self::new(work)? })
    }

    fn take(&self) -> PyResult<State> {
        if !self.process.is_this() {
            return Err(PyRuntimeError::new_err("this was begun before a fork, by another process"));
        }
        Ok(std::mem::replace(&mut *lock(&self.state), State::Over))
    }
}

#[pymethods]
impl Call {
    /// Asks, and waits in this thread, without the interpreter's lock. Signals get through.
    fn wait(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let State::New(mut work) = self.take()? else { return Err(asked_before()) };
        loop {
            if let Poll::Ready(outcome) = py.detach(|| self.engine.wait_for(&mut work)) {
                return outcome.map_err(|failure| failure.raise(py))?.into_python(py);
            }
            if let Err(interrupted) = py.check_signals() {
                if self.to_the_end {
                    drop(self.engine.start_for_loop(async { drop(work.await) }));
                } else {
                    // Whatever it asked for is taken back, in the background.
                    drop(work);
                    self.engine.is_needed();
                }
                return Err(interrupted);
            }
        }
    }

    /// Asks, and has the mailbox told `ticket` when the answer is there.
    fn start(&self, mailbox: &Mailbox, ticket: u64) -> PyResult<()> {
        let State::New(work) = self.take()? else { return Err(asked_before()) };
        *lock(&self.state) = State::UnderWay(None);
        let (state, tell) = (self.state.clone(), mailbox.tell.clone());
        let task = self.engine.start_for_loop(async move {
            let outcome = work.await;
            let mut state = lock(&state);
            if matches!(*state, State::UnderWay(_)) {
                *state = State::Done(outcome);
            }
            drop(state);
            tell.done(ticket);
        });
        if let State::UnderWay(abort) = &mut *lock(&self.state) {
            *abort = Some(task.abort_handle());
        }
        Ok(())
    }

    /// The answer, once.
    fn result(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self.take()? {
            State::Done(outcome) => outcome.map_err(|failure| failure.raise(py))?.into_python(py),
            other => {
                *lock(&self.state) = other;
                Err(PyRuntimeError::new_err("there is no answer (yet, or any more)"))
            }
        }
    }

    /// Wants no answer any more. Whatever was granted is given back; a release goes on.
    fn cancel(&self) -> PyResult<()> {
        if let State::UnderWay(Some(task)) = self.take()?
            && !self.to_the_end
        {
            task.abort();
        }
        Ok(())
    }
}

fn asked_before() -> PyErr {
    PyRuntimeError::new_err("a call is made once")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells an event loop which of its calls were answered: its descriptor becomes readable.
#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Mailbox {
    /// Its queue is without locks, so a fork in the midst of it does no harm. This mutex is only taken under
    /// the interpreter's lock.
    done: Mutex<Receiver<u64>>,
    tell: Tell,
}

#[derive(Clone)]
struct Tell {
    queue: Sender<u64>,
    fd: Arc<OwnedFd>,
}

impl Tell {
    /// Never waits, and needs nothing of Python.
    fn done(&self, ticket: u64) {
        // Nobody listens any more: then nobody needs to know.
        let _ = self.queue.send(ticket);
        let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
    }
}

#[pymethods]
impl Mailbox {
    #[new]
    fn new() -> PyResult<Self> {
        let fd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(std::io::Error::from)?;
        let (queue, done) = channel();
        Ok(Self { done: Mutex::new(done), tell: Tell { queue, fd: Arc::new(fd) } })
    }

    /// The descriptor to watch for reading.
    fn fileno(&self) -> i32 {
        self.tell.fd.as_raw_fd()
    }

    /// The tickets of the calls that were answered since the last time.
    fn collect(&self) -> Vec<u64> {
        // Emptied first: what is told from here on makes it readable again.
        let _ = rustix::io::read(&self.tell.fd, &mut [0_u8; 8]);
        lock(&self.done).try_iter().collect()
    }
}
