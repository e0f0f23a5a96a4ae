//! Passes the library's warnings and errors to Python's `logging`.
//!
//! The thread that logs must not wait for the GIL, so another thread passes the messages on. It starts with the first
//! warning and ends before the interpreter does. It calls `leasehold._log`, which decides whether this thread may call the
//! program's handlers.

use std::fmt::{self, Write};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::engine::Engine;

/// How long a program that ends waits for slow Python handlers.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Levels of Python's `logging`.
const WARNING: u8 = 30;
const ERROR: u8 = 40;

/// Sends messages to the log thread of one process.
#[derive(Default)]
pub(crate) struct Log(OnceLock<Sender<LogMessage>>);

enum LogMessage {
    Event(u8, String),
    /// The last message. The thread replies when it has passed on all messages before it.
    End(Sender<()>),
}

impl Log {
    fn send(&self, level: u8, text: String) {
        let thread = self.0.get_or_init(|| {
            let (sender, messages) = channel();
            // If no thread can be started, messages are lost.
            let _ = std::thread::Builder::new().name("leasehold-log".into()).spawn(move || pass_on(&messages));
            sender
        });
        let _ = thread.send(LogMessage::Event(level, text));
    }

    /// Waits until all messages are passed on. Later messages are lost.
    fn end(&self) {
        let (done, ended) = channel();
        if self.0.get().is_some_and(|thread| thread.send(LogMessage::End(done)).is_ok()) {
            let _ = ended.recv_timeout(FLUSH_TIMEOUT);
        }
    }
}

fn pass_on(messages: &Receiver<LogMessage>) {
    while let Ok(message) = messages.recv() {
        match message {
            LogMessage::Event(level, text) => {
                let Some(function) = PYTHON_LOG.get() else { continue };
                // Fails if the interpreter is about to end, and then the message is lost.
                let _ = Python::try_attach(|py| function.call1(py, (level, text)).map(drop));
            }
            LogMessage::End(done) => {
                let _ = done.send(());
                return;
            }
        }
    }
}

/// The Python function that takes a level and a text. It is set at the start, because a thread that imports it could hold
/// the import lock at a fork.
static PYTHON_LOG: OnceLock<Py<PyAny>> = OnceLock::new();

/// Sets the function that takes the library's log messages, once per process.
#[pyfunction]
pub(crate) fn begin_log(function: Py<PyAny>) {
    let _ = PYTHON_LOG.set(function);
}

/// Subscribes to the library's events, once, when the module is loaded.
pub(crate) fn subscribe() {
    // Fails only if there is a subscriber already, and this shared library has no other.
    let _ = tracing::subscriber::set_global_default(ToPython);
}

/// Passes on the remaining messages and ends the log thread: the interpreter is about to end.
#[pyfunction]
pub(crate) fn end_log(py: Python<'_>) {
    if let Some(engine) = Engine::running() {
        py.detach(|| engine.log().end());
    }
}

/// Subscribes to warnings and errors, and ignores spans.
struct ToPython;

impl Subscriber for ToPython {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN && metadata.target().starts_with("leasehold")
    }

    fn max_level_hint(&self) -> Option<tracing::level_filters::LevelFilter> {
        Some(tracing::level_filters::LevelFilter::WARN)
    }

    fn event(&self, event: &Event<'_>) {
        let Some(engine) = Engine::running() else { return };
        let mut text = EventText::default();
        event.record(&mut text);
        let level = if *event.metadata().level() == Level::ERROR { ERROR } else { WARNING };
        engine.log().send(level, format!("{}{}", text.message, text.fields));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The message of an event, followed by `name=value` for each field.
#[derive(Default)]
struct EventText {
    message: String,
    fields: String,
}

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a `String` cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let _ = match field.name() {
            "message" => write!(self.message, "{value}"),
            name => write!(self.fields, " {name}={value}"),
        };
    }
}
