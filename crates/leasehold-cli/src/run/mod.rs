//! `leasehold run NAME -- CMD`: a job under a lock.
//!
//! Three processes, all in the process group the shell made for the job:
//!
//! ```text
//!  shell ── front ── keeper ── CMD ── whatever CMD starts
//!            │  ▲      │
//!   signals ─┘  └──────┘ a socket; each side sees at once that the other one died
//! ```
//!
//! - The **front** is what was started and what people see, stop and signal. It passes signals on and
//!   ends as CMD ended.
//! - The **keeper** (the same program again) takes the lease, starts CMD, renews, releases.
//!
//! Whichever of the two is killed with SIGKILL, the other one kills everything CMD has started and, if it
//! is the keeper, gives the lock back. Both are subreapers, so nothing gets out of their sight (`tree`).
//! The front can be stopped (Ctrl-Z) while the keeper goes on renewing: a suspended job keeps its lock.
//!
//! CMD stays in the job's own process group: with a group of its own the rest of a pipeline would get no
//! Ctrl-C, and `run … | less` could not read the terminal. What the terminal sends reaches CMD by itself;
//! what somebody sends to the front is passed on.
//!
//! # What a user must know
//!
//! - When CMD ends the lock is released at once, and `run` ends after that. What CMD left running in the
//!   background does not hold the lock, and lives on.
//! - A lost lease (`--on-lost kill`): SIGTERM to everything CMD started, SIGKILL after `--grace` (a quarter
//!   of the ttl, at most 10 s), all of it finished before the lock can be somebody else's; exit code 76.
//!   A lease that is not renewed is given up early enough for that. `--on-lost warn` only says so.
//! - Killing the front or the keeper with SIGKILL kills everything CMD started. When both are killed at the
//!   same moment (`kill -9` of the whole group) what has left the group lives on: on SQLite it keeps the lock
//!   while it has the descriptor it inherited open, at most for the ttl; on Redis the ttl alone counts.
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
mod held;
mod keeper;
mod lease;
mod link;
mod result;
mod tee;
mod tree;
mod waiting;

use std::ffi::{OsStr, OsString};

use rustix::fs::{Mode, OFlags, open};

use crate::cli::RunArgs;
use crate::exit::{Exit, Failure};
use crate::store::Choice;

/// What the keeper is called in a list of processes, and how it knows that it is one.
const KEEPER: &str = "leasehold-keeper";

/// Runs a command while holding a lock; the exit code is the command's own.
pub(crate) fn run(args: RunArgs, json: bool, store: &Choice) -> Result<Exit, Failure> {
    // clap says so only where nothing conflicts with --gpu, and NAME does.
    if args.gpus.is_some() && args.gpu.is_none() {
        return Err(Failure::new(
            Exit::Usage,
            "--gpus says how many GPUs there are: it goes with --gpu any, or --gpu ID",
        ));
    }
    if is_keeper() { keeper::run(args, json, store) } else { front::run() }
}

/// Runs if a glance at the command line says that this is what is wanted. The keeper reads it in full and says what is
/// wrong with it; reading it here, too, would only keep the job waiting.
pub(crate) fn at_a_glance() -> Option<Result<Exit, Failure>> {
    (!is_keeper() && says_run(std::env::args_os().skip(1))).then(front::run)
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

fn is_keeper() -> bool {
    std::env::args_os().next().is_some_and(|program| program == OsStr::new(KEEPER))
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
