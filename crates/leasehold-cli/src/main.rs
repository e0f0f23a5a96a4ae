//! The command `leasehold`: what a cron job, a shell script and an operator use.
//!
//! | file | what it is about |
//! |---|---|
//! | `cli`, `refusal` | every command and option, and what is said of those that make no sense |
//! | `exit` | exit codes, and the failure that carries one with its line |
//! | `store` | which store is meant, and opening it |
//! | `say` | stdout is data, stderr is talk; nothing from strangers drives the terminal |
//! | `duration` | durations as people write and read them |
//! | `signals` | which are passed on or waited for, and dying of one |
//! | `run` | `leasehold run` and `once` |
//! | `take`, `claim` | `acquire`, `renew`, `release`; `claim` |
//! | `evict` | taking a lock away |
//! | `look` | `ls` and `why` |
//! | `gpu` | `gpus`, and which GPUs `run --gpu` wants |
//! | `journal`, `doctor` | what could not be done; can this store keep a promise |
//! | `serve`, `keys` | the locks over HTTP, and who may use that |
//! | `config` | what a file, the environment and flags say together; `config check` and `config show` |
//! | `demo` | a server, a dozen workers, and what goes wrong with them |
//! | `pages` | completions and manual pages |
//! | `ask` | asking a person first |

// `leasehold run` starts before every cron job: nothing slow, no runtime and no thread may come
// before the command is known.

mod ask;
mod claim;
mod cli;
mod config;
mod demo;
mod doctor;
mod duration;
mod evict;
mod exit;
mod gpu;
mod journal;
mod keys;
mod look;
mod pages;
mod refusal;
mod run;
mod say;
mod serve;
mod signals;
mod store;
mod take;

use std::process::ExitCode;

use cli::Command;
use exit::{Exit, Failure};
use store::Choice;

fn main() -> ExitCode {
    let read = || cli::parse().and_then(|cli| cli.map_or(Ok(Exit::Done), dispatch));
    let done = run::at_a_glance().unwrap_or_else(read);
    let exit = done.unwrap_or_else(|failure| {
        say::failure(&failure);
        failure.exit
    });
    say::flush();
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
        command => block_on(talk_to_a_store(command, &store()?, json)),
    }
}

async fn talk_to_a_store(command: Command, store: &Choice, json: bool) -> Result<Exit, Failure> {
    match command {
        Command::Once(args) => claim::forget(&args, store, json).await,
        Command::Claim(args) => claim::claim(args, store, json).await,
        Command::Acquire(args) => take::acquire(args, store, json).await,
        Command::Renew(args) => take::renew(args, store, json).await,
        Command::Release(args) => take::release(args, store, json).await,
        Command::Evict(args) => evict::evict(args, store, json).await,
        Command::Gpus(args) => gpu::gpus(args, store, json).await,
        Command::Ls(args) => look::ls(args, store, json).await,
        Command::Why(args) => look::why(args, store, json).await,
        Command::Journal(args) => journal::journal(args, store, json).await,
        Command::Doctor(args) => doctor::doctor(store, args.adopt, json).await,
        Command::DemoWorker(args) => demo::work(args, store).await,
        Command::Run(_)
        | Command::Serve(_)
        | Command::Demo(_)
        | Command::Keys(_)
        | Command::Config(_)
        | Command::Completions { .. }
        | Command::Man { .. } => unreachable!("they are done before"),
    }
}

/// One thread is enough for a command that asks one thing.
fn block_on(work: impl Future<Output = Result<Exit, Failure>>) -> Result<Exit, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::new(Exit::Unreachable, format!("no runtime: {error}")))?;
    runtime.block_on(work)
}
