//! Exit codes, and the failure that combines one with an error message.

use std::process::ExitCode;
use std::time::Duration;

use leasehold::inspect::{Holder, LockInfo};
use leasehold::store::{StoreError, StoreErrorKind};
use leasehold::{Error, LockName};

use crate::duration::{shown, shown_ms};

/// The result of a command, as an exit code. The codes follow `sysexits.h` and env(1); scripts can distinguish "held" from
/// "unknown".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// 0: success.
    Done,
    /// 1: a check of `doctor` is bad, or the user answered no.
    No,
    /// 64: usage error.
    Usage,
    /// 69: the store cannot be reached or does not answer; a retry may succeed.
    Unreachable,
    /// 74: the output could not be written.
    Output,
    /// 75: the lock has another holder.
    NotAcquired,
    /// 76: the lease was lost, or is not held by the given token or holder.
    Lost,
    /// 78: the configuration or the store has to be changed first.
    Config,
    /// 126: the command of `run` exists and cannot be started.
    CannotStart,
    /// 127: the command of `run` does not exist.
    NotFound,
    /// The exit code of the command of `run`, or the value of `-E`.
    Code(u8),
}

impl Exit {
    /// Returns the exit code.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::No => 1,
            Self::Usage => 64,
            Self::Unreachable => 69,
            Self::Output => 74,
            Self::NotAcquired => 75,
            Self::Lost => 76,
            Self::Config => 78,
            Self::CannotStart => 126,
            Self::NotFound => 127,
            Self::Code(code) => code,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        exit.code().into()
    }
}

/// Why a command failed: the exit code and the message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The exit code.
    pub(crate) exit: Exit,
    /// What happened, to which lock, and what to do next. Escaped when printed.
    pub(crate) line: String,
    /// Further lines, printed indented.
    pub(crate) details: Vec<String>,
}

impl Failure {
    pub(crate) fn new(exit: Exit, line: impl Into<String>) -> Self {
        Self { exit, line: line.into(), details: Vec::new() }
    }

    /// Adds a line to the details.
    pub(crate) fn detail(mut self, line: impl Into<String>) -> Self {
        self.details.push(line.into());
        self
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let exit = match error {
            Error::NotAcquired { name, waited, holder, store } => {
                return not_acquired(&name, waited, holder.map(|holder| *holder), &store);
            }
            Error::PoolBusy { .. } => Exit::NotAcquired,
            Error::Lost { .. } => Exit::Lost,
            Error::Store { ref source, .. } | Error::Connect { ref source, .. } => store_exit(source),
            Error::Invalid(_) => Exit::Usage,
            Error::ResultNotStored { .. } => Exit::Config,
            _ => Exit::Unreachable,
        };
        Self::new(exit, format!("{error:#}"))
    }
}

/// Describes a lock that is held: by whom, for how long, when the lease ends, and which command shows more.
fn not_acquired(name: &LockName, waited: Duration, holder: Option<Holder>, store: &str) -> Failure {
    let view = LockInfo { name: name.clone(), holder, waiters: Vec::new() }.view();
    let mut line = match (&view.owner, view.foreign) {
        (Some(owner), true) => format!("{name} is held by another kind of client ({owner})"),
        (Some(owner), false) => format!("{name} is held by {owner}"),
        (None, _) => format!("{name} is held"),
    };
    if let Some(held_ms) = view.held_ms {
        line += &format!(" for {}", shown_ms(held_ms));
    }
    if let Some(left_ms) = view.ttl_left_ms {
        line += &format!(", lease ends in {}", shown_ms(left_ms));
    }
    if !waited.is_zero() {
        line += &format!("; waited {}", shown(waited));
    }
    Failure::new(Exit::NotAcquired, line).detail(format!("store: {store} · see who waits: leasehold why {name}"))
}

/// Returns the exit code of a store error: `Config` if something has to be changed, `Unreachable` if a retry may succeed.
pub(crate) fn store_exit(error: &StoreError) -> Exit {
    use StoreErrorKind as K;
    match error.kind() {
        K::Refused | K::File | K::NotAuthenticated | K::NotPermitted | K::WrongType | K::NewerVersion => Exit::Config,
        _ => Exit::Unreachable,
    }
}
