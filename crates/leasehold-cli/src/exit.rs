//! Exit codes, and the failure that carries one with its line.

use std::process::ExitCode;
use std::time::Duration;

use leasehold::inspect::{Holder, LockInfo};
use leasehold::store::{StoreError, StoreErrorKind};
use leasehold::{Error, LockName};

use crate::duration::{shown, shown_ms};

/// How the command ends. The codes are those of `sysexits.h` and of env(1), so that scripts can distinguish "held" from
/// "unknown".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// 0: success.
    Done,
    /// 1: `doctor` found something bad, or the user answered no.
    No,
    /// 64: the command line is wrong.
    Usage,
    /// 69: the store cannot be reached or does not answer; a retry may succeed.
    Unreachable,
    /// 74: the output could not be written.
    Output,
    /// 75: the lock has another holder.
    NotAcquired,
    /// 76: the lease was lost, or is not held by the named token or holder.
    Lost,
    /// 78: a setting or the store itself has to be changed before this can work.
    Config,
    /// 126: the command of `run` exists and cannot be started.
    CannotStart,
    /// 127: the command of `run` does not exist.
    NotFound,
    /// The code of the command that `run` ran, or the one asked for with `-E`.
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

/// Why a command failed: one line for people, more lines where they help, and the exit code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The exit code.
    pub(crate) exit: Exit,
    /// What happened, to which lock, and what to do next. It is escaped when printed.
    pub(crate) line: String,
    /// Further lines.
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

/// Returns the failure of a lock that is held: by which holder, for how long, until when, and where to look next.
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

/// Returns the exit code of a store error: whether something has to be changed, or a retry may succeed.
pub(crate) fn store_exit(error: &StoreError) -> Exit {
    use StoreErrorKind as K;
    match error.kind() {
        K::Refused | K::File | K::NotAuthenticated | K::NotPermitted | K::WrongType | K::NewerVersion => Exit::Config,
        _ => Exit::Unreachable,
    }
}
