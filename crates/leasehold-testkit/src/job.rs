//! What a worker process is told to do.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The worker's one argument.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// Which store.
    pub url: String,
    /// Which lock.
    pub name: String,
    /// How long a lease lasts without renewal.
    pub ttl_ms: u64,
    /// How long to wait for the lock, each time.
    pub wait_ms: u64,
    /// Managers (each its own connection and place in the queue).
    pub managers: usize,
    /// Tasks on each manager.
    pub tasks: usize,
    /// Grants each task is after.
    pub cycles: usize,
    /// Time inside, in microseconds.
    pub inside_us: u64,
    /// The directory the history is kept in.
    pub history: PathBuf,
    /// Whether to wait for the line `go` before the first request.
    pub on_go: bool,
    /// Whether to keep its managers open when all is done, until told `end` (or killed).
    pub linger: bool,
    /// Whether to stay inside after a grant, and do as told: `release`, `renew`, `write`, `abort`.
    pub hold: bool,
    /// Not 0: the lock is any of a pool of so many members.
    pub members: u32,
    /// How many members of the pool to ask for at once.
    pub count: usize,
    /// Whether to go on although told that the lease is lost, as work does that does not look.
    pub stubborn: bool,
}

impl Job {
    /// One task that takes the lock once.
    pub fn new(url: impl Into<String>, name: &str, history: PathBuf) -> Self {
        Self {
            url: url.into(),
            name: name.to_owned(),
            ttl_ms: 2_000,
            wait_ms: 60_000,
            managers: 1,
            tasks: 1,
            cycles: 1,
            inside_us: 0,
            history,
            on_go: false,
            linger: false,
            hold: false,
            members: 0,
            count: 1,
            stubborn: false,
        }
    }
}

/// What a claimer process is told to do, once it is told `go`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClaimJob {
    /// Which store.
    pub url: String,
    /// Which request id.
    pub id: String,
    /// How long the claim lasts; of `once`, the lease of whoever works.
    pub lease_ms: u64,
    /// Not a claim: work that is done once.
    pub once: Option<OnceJob>,
}

/// Work that is done once, and can be seen.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct OnceJob {
    /// The file to which whoever works adds a line.
    pub log: PathBuf,
    /// How long it takes.
    pub work_ms: u64,
}
