//! A log of requests, grants and releases of many processes, and the checkers that read it.
//!
//! Times are nanoseconds of the boot clock, which all processes of a machine share and which also counts while it is
//! suspended.

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

/// Returns nanoseconds since the machine started, including time in suspend.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let whole = u64::try_from(now.tv_sec).expect("no machine started in the future");
    whole * 1_000_000_000 + u64::try_from(now.tv_nsec).expect("a fraction of a second")
}

/// The kinds of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// The lock is requested. Recorded before the call.
    Asked,
    /// The lock is held. Recorded after the call.
    Granted,
    /// The lease was renewed. The event has the new `valid_until_ns`.
    Renewed,
    /// The holder releases the lock. Recorded before the call.
    ReleaseCalled,
    /// The holder was notified that it lost the lock.
    Lost,
    /// The request ended without the lock.
    GaveUp,
    /// The release ended.
    Released,
}

/// One line of the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// The time, in nanoseconds of the boot clock.
    pub at_ns: u64,
    /// The process.
    pub pid: u32,
    /// The task within the process. A task has at most one call per name at a time.
    pub task: u64,
    /// The lock.
    pub name: String,
    /// The kind.
    pub kind: EventKind,
    /// The fence of the grant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<u64>,
    /// Until when the lease is valid, as the holder knows at this moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub valid_until_ns: Option<u64>,
}

impl Event {
    /// Creates an event that happens now in this process.
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

    /// Sets the fence.
    #[must_use]
    pub fn fence(mut self, fence: u64) -> Self {
        self.fence = Some(fence);
        self
    }

    /// Sets the end of validity.
    #[must_use]
    pub fn valid_until_ns(mut self, valid_until_ns: u64) -> Self {
        self.valid_until_ns = Some(valid_until_ns);
        self
    }
}

/// Appends events to a file of its own. Written events survive the death of the process.
#[derive(Debug)]
pub struct HistoryWriter {
    file: File,
}

impl HistoryWriter {
    /// Creates a file in `dir` for [`History::read`].
    pub fn open(dir: &Path) -> io::Result<Self> {
        static FILES: AtomicU64 = AtomicU64::new(0);
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        // The name has the time because process ids are reused.
        let name = format!("{}-{}-{number}.{EXTENSION}", std::process::id(), now_ns());
        let file = OpenOptions::new().append(true).create_new(true).open(dir.join(name))?;
        Ok(Self { file })
    }

    /// Appends one event.
    ///
    /// # Panics
    /// If the event cannot be written, because an incomplete history proves nothing.
    pub fn record(&self, event: &Event) {
        let mut line = serde_json::to_vec(event).expect("an event is plain data");
        line.push(b'\n');
        // One write per line, so that lines of threads do not mix and a kill leaves no partial line.
        let written = (&self.file).write(&line).expect("the history can be written");
        assert_eq!(written, line.len(), "the history was cut short");
    }
}

/// All events, in order of time.
#[derive(Clone, Debug, Default)]
pub struct History {
    events: Vec<Event>,
}

impl History {
    /// Merges the files of all [`HistoryWriter`]s in `dir`.
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

    /// Creates a history from events.
    pub fn from_events(mut events: Vec<Event>) -> Self {
        events.sort_by_key(|event| event.at_ns);
        Self { events }
    }

    /// Returns all events, in order of time.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Returns the number of grants. A check of a history without grants proves nothing.
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
