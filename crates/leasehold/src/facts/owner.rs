use std::fmt;
use std::sync::{Arc, OnceLock};

use super::invalid::{Invalid, beginning, text_problem};

/// Describes a holder or waiter for people: a task name, the host and the process id.
///
/// It is information only; the [`Token`](crate::lease::Token) is the proof.
///
/// ```
/// use leasehold::Owner;
///
/// let owner = Owner::named("nightly-report")?;
/// assert_eq!(owner.task(), "nightly-report");
/// assert_eq!(owner.pid(), std::process::id());
/// assert!(owner.to_string().starts_with("nightly-report@"));
/// # Ok::<(), leasehold::lease::Invalid>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Owner {
    task: Arc<str>,
    host: Arc<str>,
    pid: u32,
}

impl Owner {
    /// The longest task or host name, in bytes.
    pub const MAX_BYTES: usize = 256;

    /// Creates an owner with this task name, this host and this process.
    ///
    /// # Errors
    /// [`Invalid::Owner`] when the name is empty, longer than 256 bytes or has control characters.
    pub fn named(task: impl AsRef<str>) -> Result<Self, Invalid> {
        let task = task.as_ref();
        match text_problem(task, Self::MAX_BYTES, "is longer than 256 bytes") {
            Some(problem) => Err(Invalid::Owner { owner: beginning(task), problem }),
            None => Ok(Self { task: task.into(), host: this_host(), pid: std::process::id() }),
        }
    }

    /// Creates an owner whose host and process are unknown, such as a client of a server.
    ///
    /// # Errors
    /// As [`Owner::named`].
    pub fn elsewhere(task: impl AsRef<str>) -> Result<Self, Invalid> {
        Ok(Self { host: "".into(), pid: 0, ..Self::named(task)? })
    }

    /// Sets the process id, for a process that holds locks on behalf of another.
    #[must_use]
    pub fn with_pid(self, pid: u32) -> Self {
        Self { pid, ..self }
    }

    /// Returns the task name.
    pub fn task(&self) -> &str {
        &self.task
    }

    /// Returns the host; empty when it is unknown.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the process id on that host; 0 when it is unknown.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the form that stores keep: `task@host:pid`.
    pub(crate) fn wire(&self) -> String {
        format!("{}@{}:{}", self.task, self.host, self.pid)
    }

    /// Parses the form that stores keep. Other text becomes a task name without host and pid.
    pub(crate) fn from_wire(text: &str) -> Self {
        let parts = text.rsplit_once(':').and_then(|(who, pid)| {
            let (task, host) = who.rsplit_once('@')?;
            Some(Self { task: task.into(), host: host.into(), pid: pid.parse().ok()? })
        });
        parts.unwrap_or_else(|| Self { task: text.into(), host: "".into(), pid: 0 })
    }
}

impl Default for Owner {
    /// Uses the program's file name as the task name.
    fn default() -> Self {
        Self { task: this_program(), host: this_host(), pid: std::process::id() }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.is_empty() {
            return f.write_str(&self.task);
        }
        write!(f, "{}@{} (pid {})", self.task, self.host, self.pid)
    }
}

fn this_program() -> Arc<str> {
    static NAME: OnceLock<Arc<str>> = OnceLock::new();
    let find = || {
        let path = std::env::args_os().next().map(std::path::PathBuf::from);
        let name = path.as_deref().and_then(|p| p.file_name()).map(|n| printable(&n.to_string_lossy()));
        name.filter(|n| !n.is_empty()).unwrap_or_else(|| "unnamed".into())
    };
    NAME.get_or_init(find).clone()
}

fn this_host() -> Arc<str> {
    static HOST: OnceLock<Arc<str>> = OnceLock::new();
    HOST.get_or_init(|| printable(&rustix::system::uname().nodename().to_string_lossy())).clone()
}

/// Removes control characters and the separator of the stored form, and cuts the text to 64 characters.
fn printable(text: &str) -> Arc<str> {
    let kept: String = text.chars().filter(|c| !c.is_control() && *c != '@').take(64).collect();
    kept.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_parsed_from_its_stored_form() {
        for task in ["a", "with space", "mail@example:80", "ünïcode"] {
            let owner = Owner::named(task).expect("valid");
            assert_eq!(Owner::from_wire(&owner.wire()), owner);
        }
        let elsewhere = Owner::elsewhere("ruby@worker").expect("valid");
        assert_eq!((Owner::from_wire(&elsewhere.wire()), elsewhere.to_string()), (elsewhere, "ruby@worker".into()));
        let plain = Owner::from_wire("locked_by_tts");
        assert_eq!((plain.task(), plain.host(), plain.pid()), ("locked_by_tts", "", 0));
    }

    #[test]
    fn escape_sequences_and_bad_lengths_are_rejected() {
        assert!(Owner::named("\u{1b}[2J").is_err());
        assert!(Owner::named("").is_err());
        assert!(Owner::named("x".repeat(257)).is_err());
    }
}
