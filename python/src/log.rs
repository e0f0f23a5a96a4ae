//! What the library has to say, for Python's `logging`.
//!
//! Whoever says it must not wait for the interpreter's lock: a thread of its own passes it on, which begins
//! with the first warning and ends before the interpreter does. It hands each line to `leasehold._log`, which knows
//! whether this thread may call the program's handlers.

use std::fmt::{self, Write};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use crate::engine::Engine;

/// Handlers of Python's may be slow; a program that ends does not wait for them any longer.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Python's numbers for levels.
const WARNING: u8 = 30;
const ERROR: u8 = 40;

/// The way to the thread of one process.
#[derive(Default)]
pub(crate) struct Log(OnceLock<Sender<Said>>);

enum Said {
    Line(u8, String),
    /// The last one: to be answered when everything is passed on.
    End(Sender<()>),
}

impl Log {
    fn say(&self, level: u8, text: String) {
        let thread = self.0.get_or_init(|| {
            let (tell, said) = channel();
            // Without a thread nobody takes it, and nothing is said.
            let _ = std::thread::Builder::new().name("leasehold-log".into()).spawn(move || pass_on(&said));
            tell
        });
        let _ = thread.send(Said::Line(level, text));
    }

    /// Waits until everything is passed on; what is said after that is lost.
    fn end(&self) {
        let (done, ended) = channel();
        if self.0.get().is_some_and(|thread| thread.send(Said::End(done)).is_ok()) {
            let _ = ended.recv_timeout(LAST_WORDS);
        }
    }
}

fn pass_on(said: &Receiver<Said>) {
    while let Ok(said) = said.recv() {
        match said {
            Said::Line(level, text) => {
                let Some(say) = SAY.get() else { continue };
                // Where the interpreter is about to end nobody reads it.
                let _ = Python::try_attach(|py| say.call1(py, (level, text)).map(drop));
            }
            Said::End(done) => {
                let _ = done.send(());
                return;
            }
        }
    }
}

/// Takes a line: its level and text. Nothing is imported for it: another thread may be at it when a process forks.
static SAY: OnceLock<Py<PyAny>> = OnceLock::new();

/// Names the function that takes what the library has to say. Once.
#[pyfunction]
pub(crate) fn begin_log(say: Py<PyAny>) {
    let _ = SAY.set(say);
}

/// To be called once, when the module is loaded.
pub(crate) fn begin() {
    // Somebody else's in this very library: there is none.
    let _ = tracing::subscriber::set_global_default(Forward);
}

/// Passes on what was said, and ends the thread: the interpreter is about to end.
#[pyfunction]
pub(crate) fn end_log(py: Python<'_>) {
    if let Some(engine) = Engine::running() {
        py.detach(|| engine.log().end());
    }
}

/// Warnings and errors, no spans.
struct Forward;

impl Subscriber for Forward {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN && metadata.target().starts_with("leasehold")
    }

    fn max_level_hint(&self) -> Option<tracing::level_filters::LevelFilter> {
        Some(tracing::level_filters::LevelFilter::WARN)
    }

    fn event(&self, event: &Event<'_>) {
        let Some(engine) = Engine::running() else { return };
        let mut line = Line::default();
        event.record(&mut line);
        let level = if *event.metadata().level() == Level::ERROR { ERROR } else { WARNING };
        engine.log().say(level, format!("{}{}", line.message, line.fields));
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// The message, then `name=value` for the rest.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
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
