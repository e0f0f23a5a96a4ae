//! `leasehold run NAME -- CMD`: a job under a lock.

use crate::cli::RunArgs;
use crate::exit::{Exit, Failure};
use crate::store::Choice;

/// Runs a command while holding a lock; the exit code is the command's own.
pub(crate) fn run(_args: RunArgs, _store: &Choice) -> Result<Exit, Failure> {
    Err(Failure::new(Exit::Usage, "run is not built yet"))
}
