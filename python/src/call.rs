//! A call: one request to the store, and the ways to wait for its answer.

use std::os::fd::{AsRawFd, OwnedFd};
use std::pin::Pin;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::Poll;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::{IntoPyObject, IntoPyObjectExt};
use rustix::event::{EventfdFlags, eventfd};
use tokio::task::AbortHandle;

use crate::engine::{Engine, Process};
use crate::failure::Failure;
use crate::lock;

/// An answer that becomes `None` in Python.
pub(crate) const NOTHING: Option<()> = None;

/// A value that becomes a Python object once a thread with the GIL takes it.
pub(crate) trait Answer: Send {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>>;
}

impl<T: for<'py> IntoPyObject<'py> + Send> Answer for T {
    fn into_python(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        (*self).into_py_any(py)
    }
}

type Outcome = Result<Box<dyn Answer>, Failure>;
type Work = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// A request that is new, in flight, or answered.
///
/// A thread sends it with `wait`. An event loop sends it with `start`, is notified by its mailbox, and then takes the
/// `result`. A call that is dropped or cancelled before that keeps nothing: a granted lock is released.
#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Call {
    process: Process,
    engine: &'static Engine,
    state: Arc<Mutex<CallState>>,
    /// The work goes on without its caller. A release is like that: one that is interrupted would have to start again, and
    /// would count as failed.
    uncancellable: bool,
}

enum CallState {
    New(Work),
    InFlight(Option<AbortHandle>),
    Answered(Outcome),
    Taken,
}

impl Call {
    pub(crate) fn new<A: Answer + 'static>(
        work: impl Future<Output = Result<A, Failure>> + Send + 'static,
    ) -> PyResult<Self> {
        let engine = Engine::this()?;
        let work = async move { work.await.map(|answer| Box::new(answer) as Box<dyn Answer>) };
        let state = Arc::new(Mutex::new(CallState::New(Box::pin(work))));
        Ok(Self { process: engine.process(), engine, state, uncancellable: false })
    }

    /// Makes a call that runs to its end, even if its caller is interrupted or cancelled.
    pub(crate) fn uncancellable<A: Answer + 'static>(
        work: impl Future<Output = Result<A, Failure>> + Send + 'static,
    ) -> PyResult<Self> {
        Ok(Self { uncancellable: true, ..Self::new(work)? })
    }

    fn take(&self) -> PyResult<CallState> {
        if !self.process.is_this() {
            return Err(PyRuntimeError::new_err("this call was started by another process, before a fork"));
        }
        Ok(std::mem::replace(&mut *lock(&self.state), CallState::Taken))
    }
}

#[pymethods]
impl Call {
    /// Sends the request and waits in this thread, without the GIL. Signals are handled while it waits.
    fn wait(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let CallState::New(mut work) = self.take()? else { return Err(sent_before()) };
        loop {
            if let Poll::Ready(outcome) = py.detach(|| self.engine.wait_for(&mut work)) {
                return outcome?.into_python(py);
            }
            if let Err(interrupted) = py.check_signals() {
                if self.uncancellable {
                    drop(self.engine.spawn(async { drop(work.await) }));
                } else {
                    // The undo of the request runs in the background.
                    drop(work);
                    self.engine.wake();
                }
                return Err(interrupted);
            }
        }
    }

    /// Sends the request. The mailbox receives `call_id` when the answer is there.
    fn start(&self, mailbox: &Mailbox, call_id: u64) -> PyResult<()> {
        let CallState::New(work) = self.take()? else { return Err(sent_before()) };
        *lock(&self.state) = CallState::InFlight(None);
        let (state, sender) = (self.state.clone(), mailbox.sender.clone());
        let task = self.engine.spawn(async move {
            let outcome = work.await;
            let mut state = lock(&state);
            if matches!(*state, CallState::InFlight(_)) {
                *state = CallState::Answered(outcome);
            }
            drop(state);
            sender.send(call_id);
        });
        if let CallState::InFlight(abort) = &mut *lock(&self.state) {
            *abort = Some(task.abort_handle());
        }
        Ok(())
    }

    /// Returns the answer, once.
    fn result(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self.take()? {
            CallState::Answered(outcome) => outcome?.into_python(py),
            other => {
                *lock(&self.state) = other;
                Err(PyRuntimeError::new_err("this call has no answer: none has arrived yet, or it was taken before"))
            }
        }
    }

    /// Gives the answer up. What was granted is released; an uncancellable call goes on.
    fn cancel(&self) -> PyResult<()> {
        if let CallState::InFlight(Some(task)) = self.take()?
            && !self.uncancellable
        {
            task.abort();
        }
        Ok(())
    }
}

fn sent_before() -> PyErr {
    PyRuntimeError::new_err("this call was sent before: a call is sent once")
}

/// Notifies an event loop of the calls that were answered: its descriptor becomes readable.
#[pyclass(frozen, module = "leasehold._native")]
pub(crate) struct Mailbox {
    /// A lock-free queue, so a fork in the middle of an operation does no harm. The mutex is taken only under the GIL.
    answered: Mutex<Receiver<u64>>,
    sender: MailboxSender,
}

#[derive(Clone)]
struct MailboxSender {
    queue: Sender<u64>,
    fd: Arc<OwnedFd>,
}

impl MailboxSender {
    /// Never waits, and needs neither the GIL nor a Python object.
    fn send(&self, call_id: u64) {
        // Fails only if the mailbox was dropped, and then no loop waits for the call.
        let _ = self.queue.send(call_id);
        let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
    }
}

#[pymethods]
impl Mailbox {
    #[new]
    fn new() -> PyResult<Self> {
        let fd = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).map_err(std::io::Error::from)?;
        let (queue, answered) = channel();
        Ok(Self { answered: Mutex::new(answered), sender: MailboxSender { queue, fd: Arc::new(fd) } })
    }

    /// Returns the descriptor to watch for reading.
    fn fileno(&self) -> i32 {
        self.sender.fd.as_raw_fd()
    }

    /// Returns the ids of the calls that were answered since the last time.
    fn collect(&self) -> Vec<u64> {
        // The descriptor is reset before the queue is read, so an answer that arrives in between makes it readable again.
        let _ = rustix::io::read(&self.sender.fd, &mut [0_u8; 8]);
        lock(&self.answered).try_iter().collect()
    }
}
