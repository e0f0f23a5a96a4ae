//! `leasehold run NAME -- CMD`: a job under a lock.
//!
//! Four processes:
//!
//! ```text
//!  shell ── front ── keeper ── guardian ── CMD ── what CMD starts
//!            │  ▲      │  ▲       │
//!   signals ─┘  └──────┘  └───────┘ sockets; each side sees at once that the other one died
//! ```
//!
//! - The **front** is what was started and what people see, stop and signal. It passes signals on and
//!   ends as CMD ended.
//! - The **keeper** (the same program again) takes the lease, renews and releases it, and talks to people. First of all
//!   it starts the guardian (`launch`), which loads meanwhile.
//! - The **guardian** (the same program once more) starts CMD and ends it. It has no store, writes nothing and waits for
//!   nothing but its descriptors, so nothing can keep it from killing in time: not a reader of stderr that does not
//!   read, not a keeper that was stopped, not a program on a file system that hangs while it is started (a thread of
//!   its own does that).
//!
//! Any one of the three can be killed or stopped, and front and keeper together. All three are subreapers, one below
//! the other, so everything CMD started is found by ancestry, wherever it moved (`tree`), by each that is left. That is
//! why the guardian is CMD's parent and not a fourth process beside it, which would have to search for orphans by what
//! they happened to keep: a descriptor, a variable. Front, keeper and CMD are in the process group the shell made for
//! the job; the guardian is in a group of its own, and in a session of its own once CMD runs. So `kill -9` of the job's
//! group does not reach it, and it kills what left that group. CMD's death signal (`PR_SET_PDEATHSIG`) would do none of that: grandchildren do not have it.
//!
//! The keeper tells the guardian with every renewal how long the lease is proven. When it says nothing more, the
//! guardian asks and kills by itself, by an alarm on the boot clock, which goes on in suspend.
//!
//! The front can be stopped (Ctrl-Z) while the keeper goes on renewing: a suspended job keeps its lock.
//!
//! CMD stays in the job's own process group: with a group of its own the rest of a pipeline would get no
//! Ctrl-C, and `run … | less` could not read the terminal. What is sent to the group reaches CMD by itself; what is
//! sent to the front alone is passed on (`group`).
//!
//! Messages are written by a thread of their own (`say`), and passing on output is one's as well (`tee`): renewals,
//! signals and the release never wait for a reader.
//!
//! # What a user must know
//!
//! - When CMD ends the lock is released at once, and `run` ends after that. What CMD left running in the
//!   background does not hold the lock, and lives on.
//! - A lost lease (`--on-lost kill`): SIGTERM to everything CMD started, SIGKILL after `--grace` (a quarter
//!   of the ttl, at most 10 s), all of it finished before the lock can be somebody else's; exit code 76.
//!   A lease that is not renewed is given up early enough for that. `--on-lost warn` only says so.
//! - Killing the front, the keeper or the guardian with SIGKILL kills everything CMD started; so does killing front and
//!   keeper at the same moment, or the whole group. When all three are killed at the same moment CMD lives on: on SQLite
//!   it keeps the lock while it has the descriptor it inherited open, at most for the ttl; on Redis the ttl alone counts.
//! - SIGSTOP of the keeper, or of the whole group: CMD is killed before the lease is over. When everything on the
//!   machine stands still (suspend, a paused virtual machine, a frozen cgroup) the guardian kills as soon as it runs
//!   again; until then, for a moment, CMD may run, too. Only a fence excludes what it does in that moment.
//! - What runs as another user (a `sudo` inside CMD) cannot be killed; `run` says so and ends with 76.
//! - What another service starts for CMD (`docker run`, `systemd-run`, `at`) is not CMD's own and is not ended.
//! - CMD sees `LEASEHOLD_NAME` and `LEASEHOLD_FENCE`; with `--gpu` also `CUDA_VISIBLE_DEVICES`, and of several
//!   GPUs the names and fences with commas between them.
//!
//! `leasehold once ID -- CMD` is the same with two things more: what CMD writes goes through pipes and is kept
//! (`tee`), and its result is stored before the lock is released (`result`). A CMD that was ended by a signal has
//! no result, and the next one runs it.

mod asking;
mod command;
mod deadline;
mod ending;
mod front;
mod group;
mod guardian;
mod held;
mod keeper;
mod launch;
mod lease;
mod link;
mod orders;
mod result;
mod tee;
mod tree;
mod waiting;
mod watching;

use std::ffi::{OsStr, OsString};

use rustix::fs::{Mode, OFlags, open};

use crate::cli::{self, JobCli, JobCommand};
use crate::exit::{Exit, Failure};
use crate::store::Choice;

/// What the keeper is called in a list of processes, and how it knows that it is one.
const KEEPER: &str = "leasehold-keeper";

/// The guardian's name, likewise.
const GUARDIAN: &str = "leasehold-guardian";

/// Runs a command while holding a lock; the exit code is the command's own.
pub(crate) fn run() -> Result<Exit, Failure> {
    front::run()
}

/// Runs if a glance at the command line says that this is what is wanted. The keeper reads it in full and says what is
/// wrong with it; reading it here, too, would only keep the job waiting.
pub(crate) fn at_a_glance() -> Option<Result<Exit, Failure>> {
    if is_named(GUARDIAN) {
        return Some(guardian::run());
    }
    if is_named(KEEPER) {
        return Some(keep());
    }
    says_run(std::env::args_os().skip(1)).then(front::run)
}

/// The keeper, from its first moment: the guardian starts while the command line is read.
fn keep() -> Result<Exit, Failure> {
    let launch = launch::Launch::begin()?;
    let Some(cli) = cli::parse::<JobCli>()? else { return Ok(Exit::Done) };
    let args = match cli.command {
        JobCommand::Run(args) => args,
        JobCommand::Once(args) if !args.forget => args.into(),
        JobCommand::Once(_) => return Err(keeper::misused()),
    };
    // clap says so only where nothing conflicts with --gpu, and NAME does.
    if args.gpus.is_some() && args.gpu.is_none() {
        return Err(Failure::new(
            Exit::Usage,
            "--gpus says how many GPUs there are: it goes with --gpu any, or --gpu ID",
        ));
    }
    keeper::run(args, cli.global.json, &Choice::from_flags(&cli.global)?, launch)
}

/// Whether it says `run`, with nothing before that but what every command takes.
fn says_run(mut words: impl Iterator<Item = OsString>) -> bool {
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

/// Lets go of stdin and stdout: they are CMD's, and whoever is at their other ends must see when CMD
/// closes them.
fn let_go_of_stdio() {
    if let Ok(nothing) = open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        let _ = rustix::stdio::dup2_stdin(&nothing);
        let _ = rustix::stdio::dup2_stdout(&nothing);
    }
}

/// The system refused something no run can do without.
fn refused(what: &str, error: &dyn std::fmt::Display) -> Failure {
    /// `EX_OSERR`: out of processes, descriptors or memory.
    const OS_ERROR: u8 = 71;
    Failure::new(Exit::Code(OS_ERROR), format!("cannot {what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_glance_finds_run_and_nothing_else() {
        let says = |line: &str| says_run(line.split_whitespace().map(OsString::from));
        for line in ["run x -- true", "--json run", "--store run run x", "--namespace a --config b run --help"] {
            assert!(says(line), "{line}");
        }
        for line in ["", "ls run", "--store run", "--stor a run x", "-- run x", "once x -- run", "--store=a ls"] {
            assert!(!says(line), "{line}");
        }
    }
}
