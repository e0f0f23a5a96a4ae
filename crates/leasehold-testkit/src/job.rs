//! The arguments of worker processes.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The argument of a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    /// The URL of the store.
    pub url: String,
    /// The name of the lock.
    pub name: String,
    /// The ttl of a lease.
    pub ttl_ms: u64,
    /// The wait limit of each request.
    pub wait_ms: u64,
    /// The number of managers, each with a connection and a place in the queue of its own.
    pub managers: usize,
    /// The number of tasks per manager.
    pub tasks: usize,
    /// The number of requests per task.
    pub cycles: usize,
    /// How long each lock is held, in microseconds.
    pub inside_us: u64,
    /// The directory of the history.
    pub history: PathBuf,
    /// Whether to wait for the line `go` before the first request.
    pub on_go: bool,
    /// Whether to keep the managers open after the last request, until the line `end`.
    pub linger: bool,
    /// Whether to hold each lock and obey the lines `release`, `renew`, `write` and `abort`.
    pub hold: bool,
    /// The size of the pool to use instead of a single lock; 0 for a lock.
    pub members: u32,
    /// The number of members per request to the pool.
    pub count: usize,
    /// Whether to continue after the lease was lost, like work that does not check.
    pub stubborn: bool,
}

impl Job {
    /// Creates a job with one task that acquires the lock once.
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

/// The argument of a claimer, which starts at the line `go`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ClaimJob {
    /// The URL of the store.
    pub url: String,
    /// The request id.
    pub id: String,
    /// The lease of the claim; for `once`, the ttl of the lock.
    pub lease_ms: u64,
    /// Work to do once, instead of a claim.
    pub once: Option<OnceJob>,
}

/// Work that is done once and leaves a trace.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct OnceJob {
    /// The file to which each run of the work appends a line.
    pub log: PathBuf,
    /// How long the work takes.
    pub work_ms: u64,
}
