//! The prompt before an action that cannot be undone.

use std::io::{self, IsTerminal, Write};

use crate::exit::{Exit, Failure};
use crate::output;

/// Returns whether stdin and stderr are a terminal.
pub(crate) fn is_interactive() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Asks on the terminal, and returns whether the answer is yes.
pub(crate) fn confirm(question: &str) -> Result<bool, Failure> {
    let failed =
        |error: io::Error| Failure::new(Exit::Usage, format!("cannot ask for confirmation: {error}; use --yes"));
    let mut err = io::stderr().lock();
    write!(err, "{} [y/N] ", output::escaped(question)).and_then(|()| err.flush()).map_err(failed)?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer).map_err(failed)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes" | "Yes"))
}
