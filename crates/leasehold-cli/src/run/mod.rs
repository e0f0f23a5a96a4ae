//! `leasehold run NAME -- CMD` runs a job under a lock.
//!
//! Four processes:
//!
//! ```text
//!  shell ── front ── keeper ── guardian ── CMD ── what CMD starts
//!            │  ▲      │  ▲       │
//!   signals ─┘  └──────┘  └───────┘ sockets; each side notices at once that the other one died
//! ```
//!
//! - The **front** is the process that the user started, sees, stops and signals. It forwards signals and ends as CMD
//!   ended.
//! - The **keeper** (the same program again) takes the lease, renews and releases it, and writes messages. First it starts
//!   the guardian (`launch`), which loads meanwhile.
//! - The **guardian** (the same program once more) starts CMD and ends it. It has no store, writes nothing and waits for
//!   nothing but its descriptors, so nothing can keep it from killing in time: not a reader of stderr that does not
//!   read, not a keeper that was stopped, not a program on a file system that hangs while it is started (a thread
//!   starts it, see `starter`).
//!
//! Any one of the three can be killed or stopped, and front and keeper together. All three are subreapers, one below
//! the other, so each of those left finds by ancestry everything that CMD started, wherever it moved (`tree`). That is
//! why the guardian is CMD's parent and not a fourth process beside it, which would have to search for orphans by what
//! they happened to keep: a descriptor, a variable. Front, keeper and CMD are in the process group that the shell made for
//! the job; the guardian is in a group of its own, and in a session of its own once CMD runs. So `kill -9` of the job's
//! group does not reach the guardian, and it kills what left that group. CMD's death signal (`PR_SET_PDEATHSIG`) would do
//! none of that: grandchildren do not inherit it.
//!
//! With every renewal the keeper sends the guardian the time until which the lease is proven. When no such order arrives,
//! the guardian terminates and kills by itself, by an alarm on the boot clock, which goes on in suspend.
//!
//! The front can be stopped (Ctrl-Z) while the keeper goes on renewing: a suspended job keeps its lock.
//!
//! CMD stays in the job's own process group: with a group of its own the rest of a pipeline would get no
//! Ctrl-C, and `run … | less` could not read the terminal. CMD receives signals to the group directly; signals to the
//! front alone are forwarded (`signal_target`).
//!
//! A thread writes messages (`output`), and threads copy output (`capture`): renewals, signals and the release never wait
//! for a reader.
//!
//! # Guarantees and limits
//!
//! - When CMD ends, the lock is released at once, and `run` ends after that. What CMD left running in the
//!   background does not hold the lock, and lives on.
//! - A lost lease (`--on-lost kill`): SIGTERM to everything that CMD started, SIGKILL after `--grace` (a quarter
//!   of the ttl, at most 10 s), all of it finished before the lock can pass to another holder; exit code 76.
//!   A lease that is not renewed is given up early enough for that. `--on-lost warn` only reports the loss.
//! - Killing the front, the keeper or the guardian with SIGKILL kills everything that CMD started; so does killing front
//!   and keeper at the same moment, or the whole group. When all three are killed at the same moment CMD lives on: on
//!   SQLite it keeps the lock while it has the descriptor it inherited open, at most for the ttl; on Redis the ttl alone
//!   counts.
//! - SIGSTOP of the keeper, or of the whole group: CMD is killed before the lease is over. When everything on the
//!   machine stands still (suspend, a paused virtual machine, a frozen cgroup) the guardian kills as soon as it runs
//!   again; until then, for a moment, CMD may run, too. Only a fence excludes what it does in that moment.
//! - What runs as another user (a `sudo` inside CMD) cannot be killed; `run` reports it and ends with 76.
//! - What another service starts for CMD (`docker run`, `systemd-run`, `at`) is not a descendant of CMD and is not ended.
//! - CMD sees `LEASEHOLD_NAME` and `LEASEHOLD_FENCE`; with `--gpu` also `CUDA_VISIBLE_DEVICES`, and of several
//!   GPUs the names and fences with commas between them.
//!
//! `leasehold once ID -- CMD` does two things more: CMD's output goes through pipes and is captured (`capture`), and its
//! result is stored before the lock is released (`stored_result`). A CMD that was ended by a signal has no result, and
//! the next `once` runs it.

mod acquire;
mod capture;
mod channel;
mod command;
mod deadlines;
mod front;
mod front_messages;
mod guardian;
mod guardian_messages;
mod keeper;
mod launch;
mod lease;
mod not_acquired;
mod once;
mod progress;
mod signal_target;
mod starter;
mod stored_result;
mod supervise;
mod terminate;
mod tree;

use std::ffi::{OsStr, OsString};

use rustix::fs::{Mode, OFlags, open};

use crate::cli::{self, JobCli, JobCommand};
use crate::exit::{Exit, Failure};
use crate::store::Choice;

/// The keeper's name: process lists show it, and the program sees by it that it is a keeper.
const KEEPER: &str = "leasehold-keeper";

/// The guardian's name: process lists show it, and the program sees by it that it is a guardian.
const GUARDIAN: &str = "leasehold-guardian";

/// Runs a command while holding a lock, and returns the command's exit code.
pub(crate) fn run() -> Result<Exit, Failure> {
    front::run()
}

/// Runs this process as a guardian, a keeper or a front if its name or the first words of the command line say so.
///
/// The keeper parses the whole command line and reports what is wrong with it. Parsing it in the front, too, would only
/// delay the job.
pub(crate) fn dispatch_early() -> Option<Result<Exit, Failure>> {
    if is_named(GUARDIAN) {
        return Some(guardian::run());
    }
    if is_named(KEEPER) {
        return Some(keep());
    }
    is_run_command(std::env::args_os().skip(1)).then(front::run)
}

/// Runs the keeper: starts the guardian, and parses the command line while the guardian loads.
fn keep() -> Result<Exit, Failure> {
    let launch = launch::Launch::begin()?;
    let Some(cli) = cli::parse::<JobCli>()? else { return Ok(Exit::Done) };
    let args = match cli.command {
        JobCommand::Run(args) => args,
        JobCommand::Once(args) if !args.forget => args.into(),
        JobCommand::Once(_) => return Err(keeper::misused()),
    };
    // clap's `requires` does not report this, because NAME conflicts with --gpu.
    if args.gpus.is_some() && args.gpu.is_none() {
        return Err(Failure::new(
            Exit::Usage,
            "--gpus says how many GPUs there are: it goes with --gpu any, or --gpu ID",
        ));
    }
    keeper::run(args, cli.global.json, &Choice::from_flags(&cli.global)?, launch)
}

/// Returns whether the command is `run`, after nothing but global options.
fn is_run_command(mut words: impl Iterator<Item = OsString>) -> bool {
    while let Some(word) = words.next() {
        match word.to_str() {
            Some("run") => return true,
            Some("--json") => {}
            Some("--store" | "--namespace" | "--config") => drop(words.next()),
            _ => return false,
        }
    }
    false
}

fn is_named(name: &str) -> bool {
    std::env::args_os().next().is_some_and(|program| program == OsStr::new(name))
}

/// Replaces stdin and stdout by `/dev/null`: they belong to CMD, and a pipe's other end must see when CMD closes them.
fn detach_stdio() {
    if let Ok(null) = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        let _ = rustix::stdio::dup2_stdin(&null);
        let _ = rustix::stdio::dup2_stdout(&null);
    }
}

/// The system refused something no run can do without.
fn system_error(what: &str, error: &dyn std::fmt::Display) -> Failure {
    /// `EX_OSERR`: out of processes, descriptors or memory.
    const OS_ERROR: u8 = 71;
    Failure::new(Exit::Code(OS_ERROR), format!("cannot {what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_run_after_global_options_is_a_run_command() {
        let is_run = |line: &str| is_run_command(line.split_whitespace().map(OsString::from));
        for line in ["run x -- true", "--json run", "--store run run x", "--namespace a --config b run --help"] {
            assert!(is_run(line), "{line}");
        }
        for line in ["", "ls run", "--store run", "--stor a run x", "-- run x", "once x -- run", "--store=a ls"] {
            assert!(!is_run(line), "{line}");
        }
    }
}
