//! `doctor`: checks whether a store can keep the guarantees.

use std::io::{self, IsTerminal};
use std::path::PathBuf;

use leasehold::inspect::{Finding, Level};
use leasehold::store::sqlite::{SqliteStore, default_path};
use leasehold::store::{StoreError, StoreErrorKind};
use leasehold::{Error, LockManager};

use crate::exit::{Exit, Failure, store_exit};
use crate::output;
use crate::store::Choice;

/// Prints a line per check, and exits with 1 if one is bad. With `adopt` it first pairs a database with its directory.
pub(crate) async fn doctor(store: &Choice, adopt: bool, json: bool) -> Result<Exit, Failure> {
    if adopt {
        pair(store.url())?;
    }
    let findings = match LockManager::connect_with(store.url(), store.options()?).await {
        Ok(locks) => {
            let findings = locks.checkup().await;
            locks.shutdown().await;
            findings
        }
        // A wrong URL is not a finding about a store.
        Err(error @ Error::Connect { .. }) if kind(&error) != Some(StoreErrorKind::Refused) => {
            vec![Finding { level: Level::Bad, check: "reachable", text: format!("{error:#}") }]
        }
        Err(error) => return Err(error.into()),
    };
    if json {
        output::json(&findings)?;
    } else {
        let colour = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
        let line =
            |f: &Finding| format!("{}  {:<12}  {}\n", painted(f.level, colour), f.check, output::escaped(&f.text));
        output::data(&findings.iter().map(line).collect::<String>())?;
    }
    Ok(if findings.iter().any(|f| f.level == Level::Bad) { Exit::No } else { Exit::Done })
}

/// Pairs a SQLite database with the `.alive` directory beside it.
fn pair(url: &str) -> Result<(), Failure> {
    let Some(rest) = url.strip_prefix("sqlite:").or_else(|| (url == "sqlite").then_some("")) else {
        return Err(Failure::new(Exit::Usage, "--adopt is for SQLite databases only"));
    };
    let store_failure = |error: StoreError| match error.kind() {
        StoreErrorKind::Busy => Failure::new(Exit::NotAcquired, error.to_string()),
        _ => Failure::new(store_exit(&error), error.to_string()),
    };
    let path = if rest.is_empty() { default_path().map_err(store_failure)? } else { PathBuf::from(rest) };
    SqliteStore::adopt(&path).map_err(store_failure)
}

fn kind(error: &Error) -> Option<StoreErrorKind> {
    match error {
        Error::Connect { source, .. } => Some(source.kind()),
        _ => None,
    }
}

/// Formats a level. The colour adds nothing to the word.
fn painted(level: Level, colour: bool) -> String {
    let code = match level {
        Level::Ok => 32,
        Level::Warn => 33,
        Level::Bad => 31,
    };
    if colour { format!("\u{1b}[{code}m{level:<4}\u{1b}[0m") } else { format!("{level:<4}") }
}
