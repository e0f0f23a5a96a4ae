//! The commands and their options. A usage error prints one line and exits with 64.

mod admin;
mod job;
mod locks;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueHint};
use leasehold::LockName;
use leasehold::inspect::HolderId;

pub(crate) use self::admin::{
    ConfigArgs, ConfigCommand, DemoArgs, DemoWorkerArgs, DoctorArgs, JournalArgs, JournalCommand, KeysArgs,
    KeysCommand, ServeArgs,
};
pub(crate) use self::job::{OnLost, OnceArgs, RunArgs};
pub(crate) use self::locks::{
    AcquireArgs, ClaimArgs, EvictArgs, GpusArgs, LsArgs, ReleaseArgs, RenewArgs, TokenArgs, WhyArgs,
};
use crate::exit::{Exit, Failure};
use crate::{output, usage_error};

/// Locks that people can hold, see and trust.
///
/// On one machine no server is needed: all processes share a SQLite file. For several machines, set
/// --store or LEASEHOLD_STORE to a Redis or Valkey server.
#[derive(Debug, Parser)]
#[command(name = "leasehold", bin_name = "leasehold", version, max_term_width = 100, after_help = EXAMPLES, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
Examples:
  leasehold run nightly-report -- ./report.sh       one copy at a time; others wait
  leasehold run --no-wait backup -- ./backup.sh     ... or exit with 75 at once
  leasehold once migrate-7 -- ./migrate.sh          one machine runs it, all get its output
  leasehold why nightly-report                      who holds it, who waits
  leasehold ls                                      the locks that are held
  leasehold doctor                                  check the store
  leasehold serve                                   HTTP API and dashboard
  leasehold demo                                    a server and workers to watch

Exit codes: 64 usage, 69 store unreachable, 75 held by another, 76 lease lost or not held by the
given token or holder, 78 configuration; run exits with its command's own.";

/// The options of every command.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// sqlite:PATH, redis://HOST:PORT (rediss:// for TLS) or memory: [default: $LEASEHOLD_STORE, else `store` of the configuration file, else a SQLite file]
    #[arg(long, global = true, value_name = "URL", display_order = 900)]
    pub(crate) store: Option<String>,
    /// Keeps the locks of different applications apart [default: $LEASEHOLD_NAMESPACE, else `namespace` of the configuration file, else leasehold]
    #[arg(long, global = true, value_name = "NS", display_order = 901)]
    pub(crate) namespace: Option<String>,
    /// The configuration file [default: $LEASEHOLD_CONFIG, else none]
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath, display_order = 902)]
    pub(crate) config: Option<PathBuf>,
    /// Print JSON
    #[arg(long, global = true, display_order = 903)]
    pub(crate) json: bool,
}

/// The command line of a keeper, which accepts only `run` and `once`: defining all commands would take longer than parsing
/// these.
#[derive(Debug, Parser)]
#[command(name = "leasehold", bin_name = "leasehold", version, max_term_width = 100, disable_help_subcommand = true)]
pub(crate) struct JobCli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: JobCommand,
}

/// The commands of a keeper, a subset of [`Command`].
#[derive(Debug, Subcommand)]
pub(crate) enum JobCommand {
    Run(RunArgs),
    Once(OnceArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(RunArgs),
    Once(OnceArgs),
    Claim(ClaimArgs),
    Acquire(AcquireArgs),
    Renew(RenewArgs),
    Release(ReleaseArgs),
    Evict(EvictArgs),
    Ls(LsArgs),
    Why(WhyArgs),
    Gpus(GpusArgs),
    Journal(JournalArgs),
    Serve(ServeArgs),
    Demo(DemoArgs),
    #[command(hide = true)]
    DemoWorker(DemoWorkerArgs),
    Keys(KeysArgs),
    Config(ConfigArgs),
    /// Check the store: one line per check, ok, warn or bad, with what to do
    ///
    /// Exits with 1 if a check is bad, else with 0.
    Doctor(DoctorArgs),
    /// Print shell completions
    ///
    /// For bash: leasehold completions bash > ~/.local/share/bash-completion/completions/leasehold
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write one per command into a directory
    Man {
        /// The directory for leasehold.1, leasehold-run.1, …
        #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
        out: Option<PathBuf>,
    },
}

fn parse_name(text: &str) -> Result<LockName, String> {
    LockName::new(text).map_err(|error| error.to_string())
}

fn parse_request_id(text: &str) -> Result<LockName, String> {
    LockName::new(text).map_err(|error| error.to_string().replacen("lock name", "id", 1))
}

/// Parses an id of `once`. The name of its lock is `once:ID`.
fn parse_once_id(text: &str) -> Result<LockName, String> {
    let id = parse_request_id(text)?;
    match LockName::new(format!("once:{id}")) {
        Ok(_) => Ok(id),
        Err(_) => Err("the id is longer than 507 bytes".into()),
    }
}

fn parse_holder_id(text: &str) -> Result<HolderId, String> {
    HolderId::parse(text).map_err(|error| error.to_string())
}

/// Parses the command line. Prints help or version itself and returns `None`. An error is one line.
pub(crate) fn parse<C: Parser>() -> Result<Option<C>, Failure> {
    match C::try_parse() {
        Ok(cli) => Ok(Some(cli)),
        Err(error) if !error.use_stderr() => {
            output::data(&error.render().to_string())?;
            Ok(None)
        }
        Err(error) => Err(Failure::new(Exit::Usage, usage_error::one_line_message(&error))),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
        JobCli::command().debug_assert();
    }
}
