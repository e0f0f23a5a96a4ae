//! The command `leasehold`: what a cron job, a shell script and an operator use.
//!
//! | file | what it is about |
//! |---|---|
//! | `cli` | every command and option, and what clap's refusals look like here |
//! | `exit` | exit codes, and the failure that carries one with its line |
//! | `store` | which store is meant, and opening it |
//! | `say` | stdout is data, stderr is talk; nothing from strangers drives the terminal |
//! | `duration` | durations as people write and read them |
//! | `run` | `leasehold run` |

// `leasehold run` starts before every cron job: nothing slow, no runtime and no thread may come
// before the command is known.

#![allow(dead_code, reason = "used by the commands that are being added")]

mod cli;
mod duration;
mod exit;
mod run;
mod say;
mod store;

use std::process::ExitCode;

use cli::Command;
use exit::{Exit, Failure};
use store::Choice;

fn main() -> ExitCode {
    let done = cli::parse().and_then(|cli| cli.map_or(Ok(Exit::Done), dispatch));
    let exit = done.unwrap_or_else(|failure| {
        say::failure(&failure);
        failure.exit
    });
    exit.into()
}

fn dispatch(cli: cli::Cli) -> Result<Exit, Failure> {
    let store = || Choice::from_flags(&cli.global);
    match cli.command {
        Command::Run(args) => run::run(args, &store()?),
        _ => Err(Failure::new(Exit::Usage, "this command is not built yet")),
    }
}
