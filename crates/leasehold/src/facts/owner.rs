use std::fmt;
use std::sync::{Arc, OnceLock};

use super::{Invalid, beginning};

/// Who holds or waits, for people: a task name, the host and the process id.
///
/// It proves nothing (the [`Token`](crate::lease::Token) does); it answers "who has it?".
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

    /// This process, under a task name of your choice.
    ///
    /// # Errors
    /// [`Invalid::Owner`] when the name is empty, longer than 256 bytes or has control characters.
    pub fn named(task: impl AsRef<str>) -> Result<Self, Invalid> {
        let task = task.as_ref();
        let problem = if task.is_empty() {
            "is empty"
        } else if task.len() > Self::MAX_BYTES {
            "is longer than 256 bytes"
        } else if task.chars().any(char::is_control) {
            "has control characters"
        } else {
            return Ok(Self { task: task.into(), host: this_host(), pid: std::process::id() });
        };
        Err(Invalid::Owner { owner: beginning(task), problem })
    }

    /// Creates an owner whose host and process are not known here: a client of a server.
    ///
    /// # Errors
    /// As [`Owner::named`].
    pub fn elsewhere(task: impl AsRef<str>) -> Result<Self, Invalid> {
        Ok(Self { host: "".into(), pid: 0, ..Self::named(task)? })
    }

    /// Replaces the process id, where the process that people know is not the one that talks to the store.
    #[must_use]
    pub fn with_pid(self, pid: u32) -> Self {
        Self { pid, ..self }
    }

    /// The task name.
    pub fn task(&self) -> &str {
        &self.task
    }

    /// The host the holder runs on; empty when it is not known.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The holder's process id on that host; 0 when it is not known.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// How the stores write it: `task@host:pid`.
    pub(crate) fn wire(&self) -> String {
        format!("{}@{}:{}", self.task, self.host, self.pid)
    }

    /// Reads what [`Owner::wire`] wrote; anything else becomes a task name without host and pid.
    pub(crate) fn from_wire(text: &str) -> Self {
        let parts = text.rsplit_once(':').and_then(|(who, pid)| {
            let (task, host) = who.rsplit_once('@')?;
            Some(Self { task: task.into(), host: host.into(), pid: pid.parse().ok()? })
        });
        parts.unwrap_or_else(|| Self { task: text.into(), host: "".into(), pid: 0 })
    }
}

impl Default for Owner {
    /// The program's file name on this host.
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

/// Without control characters and the separators of the wire form, and not too long.
fn printable(text: &str) -> Arc<str> {
    let kept: String = text.chars().filter(|c| !c.is_control() && *c != '@').take(64).collect();
    kept.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_back_what_it_wrote() {
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
    fn refuses_what_would_drive_a_terminal() {
        assert!(Owner::named("\u{1b}[2J").is_err());
        assert!(Owner::named("").is_err());
        assert!(Owner::named("x".repeat(257)).is_err());
    }
}
