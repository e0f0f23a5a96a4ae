//! Asking a person before something that cannot be taken back.

use std::io::{self, IsTerminal, Write};

use crate::exit::{Exit, Failure};
use crate::say;

/// Whether there is somebody to ask.
pub(crate) fn can_ask() -> bool {
    io::stdin().is_terminal() && io::stderr().is_terminal()
}

/// Asks on the terminal; anything but yes is no.
pub(crate) fn ask(question: &str) -> Result<bool, Failure> {
    let failed = |error: io::Error| Failure::new(Exit::Usage, format!("cannot ask: {error}; say --yes"));
    let mut err = io::stderr().lock();
    write!(err, "{} [y/N] ", say::shown(question)).and_then(|()| err.flush()).map_err(failed)?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer).map_err(failed)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes" | "Yes"))
}
