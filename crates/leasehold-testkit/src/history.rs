//! Who asked, who held, who let go: one log for many processes, and the checkers that read it.
//!
//! Times are boot-time nanoseconds, which all processes of a machine share and which go on counting
//! while it is suspended.

mod check;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

pub use check::{FenceInversion, FifoInversion, Hold, Overlap};

const EXTENSION: &str = "jsonl";

/// Nanoseconds since the machine started, suspension included.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let whole = u64::try_from(now.tv_sec).expect("no machine started in the future");
    whole * 1_000_000_000 + u64::try_from(now.tv_nsec).expect("a fraction of a second")
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// The lock is wanted from now on. Recorded before the call.
    Asked,
    /// The lock is held from now on. Recorded after the call.
    Granted,
    /// The lease was prolonged; carries the new `valid_until_ns`.
    Renewed,
    /// The holder stops relying on the lock. Recorded before the call.
    ReleaseCalled,
    /// The holder was told that it no longer has the lock.
    Lost,
    /// The wait for the lock ended without it.
    GaveUp,
    /// The release was answered.
    Released,
}

/// One line of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When, in boot-time nanoseconds.
    pub at_ns: u64,
    /// The process.
    pub pid: u32,
    /// The task within the process; one task does one thing at a time with one name.
    pub task: u64,
    /// The lock.
    pub name: String,
    /// What happened.
    pub kind: EventKind,
    /// The fence of the grant this is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<u64>,
    /// Until when the holder relies on the lock, as it knows at this moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub valid_until_ns: Option<u64>,
}

impl Event {
    /// Something that happens now, in this process.
    pub fn now(task: u64, name: &str, kind: EventKind) -> Self {
        Self {
            at_ns: now_ns(),
            pid: std::process::id(),
            task,
            name: name.to_string(),
            kind,
            fence: None,
            valid_until_ns: None,
        }
    }

    /// The same with a fence.
    #[must_use]
    pub fn fence(mut self, fence: u64) -> Self {
        self.fence = Some(fence);
        self
    }

    /// The same with the end of validity.
    #[must_use]
    pub fn valid_until_ns(mut self, valid_until_ns: u64) -> Self {
        self.valid_until_ns = Some(valid_until_ns);
        self
    }
}

/// Appends events to a file of its own. Lines survive the death of the process that wrote them.
#[derive(Debug)]
pub struct HistoryWriter {
    file: File,
}

impl HistoryWriter {
    /// Opens a new file in `dir`, where [`History::read`] finds it.
    pub fn open(dir: &Path) -> io::Result<Self> {
        static FILES: AtomicU64 = AtomicU64::new(0);
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        // The time too: process ids come round again.
        let name = format!("{}-{}-{number}.{EXTENSION}", std::process::id(), now_ns());
        let file = OpenOptions::new().append(true).create_new(true).open(dir.join(name))?;
        Ok(Self { file })
    }

    /// Appends one event.
    ///
    /// # Panics
    /// When it cannot be written: a history with holes proves nothing.
    pub fn record(&self, event: &Event) {
        let mut line = serde_json::to_vec(event).expect("an event is plain data");
        line.push(b'\n');
        // One write per line: threads never mix theirs, and a kill leaves no half of one.
        let written = (&self.file).write(&line).expect("the history can be written");
        assert_eq!(written, line.len(), "the history was cut short");
    }
}

/// Everything that happened, in order of time.
#[derive(Clone, Debug, Default)]
pub struct History {
    events: Vec<Event>,
}

impl History {
    /// Merges all files that [`HistoryWriter`]s left in `dir`.
    pub fn read(dir: &Path) -> io::Result<Self> {
        let mut events = Vec::new();
        for entry in std::fs::read_dir(dir)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == EXTENSION) {
                events.extend(read_file(&path)?);
            }
        }
        Ok(Self::from_events(events))
    }

    /// A history of these events.
    pub fn from_events(mut events: Vec<Event>) -> Self {
        events.sort_by_key(|event| event.at_ns);
        Self { events }
    }

    /// All events, in order of time.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// How many locks were granted: a check of a history without grants shows nothing.
    pub fn grants(&self) -> usize {
        self.events.iter().filter(|event| event.kind == EventKind::Granted).count()
    }

    fn by_name(&self) -> BTreeMap<&str, Vec<&Event>> {
        let mut names: BTreeMap<&str, Vec<&Event>> = BTreeMap::new();
        for event in &self.events {
            names.entry(&event.name).or_default().push(event);
        }
        names
    }
}

fn read_file(path: &PathBuf) -> io::Result<Vec<Event>> {
    let text = std::fs::read_to_string(path)?;
    let parse = |(index, line): (usize, &str)| {
        serde_json::from_str(line).map_err(|error| {
            let place = format!("{}, line {}: {error}", path.display(), index + 1);
            io::Error::new(io::ErrorKind::InvalidData, place)
        })
    };
    text.lines().enumerate().map(parse).collect()
}
