//! Every command and option. A wrong command line ends with one line and exit code 64.

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
/// On one machine no server is needed: all processes share a SQLite file. On many machines, name a
/// Redis or Valkey server with --store or LEASEHOLD_STORE.
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
  leasehold run --no-wait backup -- ./backup.sh     ... or end with 75 at once
  leasehold once migrate-7 -- ./migrate.sh          one of many runs it, all get its output
  leasehold why nightly-report                      who holds it, who waits
  leasehold ls                                      every lock that is held
  leasehold doctor                                  can this store keep a promise?
  leasehold serve                                   the same over HTTP, and a web page
  leasehold demo                                    a server and workers to watch

Exit codes: 64 usage, 69 store unreachable, 75 held by another, 76 lease lost or not held by the
token or holder named, 78 configuration; run ends with its command's own.";

/// The options of every command.
#[derive(Debug, Args)]
pub(crate) struct Global {
    /// sqlite:PATH, redis://HOST:PORT (rediss:// for TLS) or memory: [default: $LEASEHOLD_STORE, else `store` of the configuration file, else a SQLite file]
    #[arg(long, global = true, value_name = "URL", display_order = 900)]
    pub(crate) store: Option<String>,
    /// Separates the locks of one application from another's [default: $LEASEHOLD_NAMESPACE, else `namespace` of the configuration file, else leasehold]
    #[arg(long, global = true, value_name = "NS", display_order = 901)]
    pub(crate) namespace: Option<String>,
    /// The configuration file [default: $LEASEHOLD_CONFIG, else none]
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath, display_order = 902)]
    pub(crate) config: Option<PathBuf>,
    /// Answer in JSON, for programs
    #[arg(long, global = true, display_order = 903)]
    pub(crate) json: bool,
}

/// The command line of a keeper, which knows only the commands that run another one: to define all the others would take
/// longer than to parse these.
#[derive(Debug, Parser)]
#[command(name = "leasehold", bin_name = "leasehold", version, max_term_width = 100, disable_help_subcommand = true)]
pub(crate) struct JobCli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: JobCommand,
}

/// The commands of a keeper, as in [`Command`].
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
    /// Can this store keep a promise? One line per check: ok, warn or bad, and what to do
    ///
    /// Ends with 0 when nothing is bad, else with 1.
    Doctor(DoctorArgs),
    /// Print the completions of a shell
    ///
    /// For bash: leasehold completions bash > ~/.local/share/bash-completion/completions/leasehold
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write one per command into a directory
    Man {
        /// Write leasehold.1, leasehold-run.1, … there
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

/// Parses an id of `once`, whose lock is called `once:ID`.
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

/// Parses the command line. Fails with one line that says what is wrong. Prints help and version itself, and returns `None`
/// then.
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
