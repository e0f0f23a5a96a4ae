//! The command `leasehold`, for cron jobs, shell scripts and operators.
//!
//! | file | what it is about |
//! |---|---|
//! | `cli`, `usage_error` | commands and options; the message of a usage error |
//! | `exit` | exit codes and failures |
//! | `store` | the choice of the store, and the connection to it |
//! | `output` | data on stdout, messages on stderr, escaped for the terminal |
//! | `duration` | durations and times in text |
//! | `signals` | signals that are forwarded or waited for, and ending by one |
//! | `run` | `leasehold run` and `once` |
//! | `acquire`, `claim` | `acquire`, `renew`, `release`; `claim` and `once --forget` |
//! | `evict` | `evict` |
//! | `inspect` | `ls` and `why` |
//! | `gpu` | `gpus`, and the GPUs of `run --gpu` |
//! | `journal`, `doctor` | `journal`; `doctor` |
//! | `serve`, `keys` | the HTTP server, and its API keys |
//! | `config` | the effective configuration; `config check` and `config show` |
//! | `demo` | `demo`: a server, a dozen workers, and failures |
//! | `pages` | completions and manual pages |
//! | `confirm` | the prompt before an action |

// `leasehold run` starts before every cron job: it must do nothing slow and create no runtime and no thread before the
// command is known.

mod acquire;
mod claim;
mod cli;
mod config;
mod confirm;
mod demo;
mod doctor;
mod duration;
mod evict;
mod exit;
mod gpu;
mod inspect;
mod journal;
mod keys;
mod output;
mod pages;
mod run;
mod serve;
mod signals;
mod store;
mod usage_error;

use std::process::ExitCode;

use cli::Command;
use exit::{Exit, Failure};
use store::Choice;

fn main() -> ExitCode {
    let parsed = || cli::parse().and_then(|cli| cli.map_or(Ok(Exit::Done), dispatch));
    let result = run::dispatch_early().unwrap_or_else(parsed);
    let exit = result.unwrap_or_else(|failure| {
        output::failure(&failure);
        failure.exit
    });
    output::flush();
    exit.into()
}

fn dispatch(cli: cli::Cli) -> Result<Exit, Failure> {
    let json = cli.global.json;
    let store = || Choice::from_flags(&cli.global);
    match cli.command {
        Command::Run(_) => run::run(),
        Command::Once(args) if !args.forget => run::run(),
        Command::Completions { shell } => pages::completions(shell),
        Command::Man { out } => pages::man(out.as_deref()),
        Command::Keys(args) => keys::keys(args, &cli.global),
        Command::Config(args) => config::config(args.command, &cli.global),
        Command::Serve(args) => serve::serve(args, &cli.global),
        Command::Demo(args) => demo::demo(&args, json),
        command => block_on(run_with_store(command, &store()?, json)),
    }
}

async fn run_with_store(command: Command, store: &Choice, json: bool) -> Result<Exit, Failure> {
    match command {
        Command::Once(args) => claim::forget(&args, store, json).await,
        Command::Claim(args) => claim::claim(args, store, json).await,
        Command::Acquire(args) => acquire::acquire(args, store, json).await,
        Command::Renew(args) => acquire::renew(args, store, json).await,
        Command::Release(args) => acquire::release(args, store, json).await,
        Command::Evict(args) => evict::evict(args, store, json).await,
        Command::Gpus(args) => gpu::gpus(args, store, json).await,
        Command::Ls(args) => inspect::ls(args, store, json).await,
        Command::Why(args) => inspect::why(args, store, json).await,
        Command::Journal(args) => journal::journal(args, store, json).await,
        Command::Doctor(args) => doctor::doctor(store, args.adopt, json).await,
        Command::DemoWorker(args) => demo::work(args, store).await,
        Command::Run(_)
        | Command::Serve(_)
        | Command::Demo(_)
        | Command::Keys(_)
        | Command::Config(_)
        | Command::Completions { .. }
        | Command::Man { .. } => unreachable!("these commands are dispatched before"),
    }
}

/// Runs a command on the current thread, which is enough for a few requests.
fn block_on(work: impl Future<Output = Result<Exit, Failure>>) -> Result<Exit, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime =
        runtime.map_err(|error| Failure::new(Exit::Unreachable, format!("cannot start the runtime: {error}")))?;
    runtime.block_on(work)
}
