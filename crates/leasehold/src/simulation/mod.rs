//! Deterministic simulation in virtual time.
//!
//! The processes run the production engine (`engine/`) with all that is below it: the decisions of the client
//! (`client/`), the arithmetic of a lease, the inbox of a connection (`store/redis/inbox.rs`) and the state machine of a
//! lock (`machine/`). The engine takes time from `clock/simulated.rs`, and tasks and random numbers from
//! `engine/environment.rs`. The simulation adds tasks that use locks, connections that delay and lose messages, and a
//! server that restarts, loses data, hangs or is demoted. One event happens at a time, and a seed determines everything,
//! so a failure replays exactly.
//!
//! `cargo xtask simulate` runs many seeds. The invariants are in [`checks`], the situations that must occur in
//! [`coverage`].
//!
//! | file | what it does |
//! |---|---|
//! | `plan`, `faults` | what happens in a world: setup, tasks, faults |
//! | `world`, `executor`, `watched`, `random` | virtual time, one task at a time |
//! | `network`, `server` | connections, and the server's commands |
//! | `session`, `link`, `verbs`, `trying` | the connection of a process to the server, as in the Redis store |
//! | `process`, `store` | the engine of a process, and its store: requests become tasks of the process |
//! | `work` | what tasks do with locks |
//! | `leases` | what a step has changed about the leases of an engine |
//! | `checks`, `coverage`, `story` | invariants, situations that occurred, what happened in words |
//! | `runner` | runs many seeds on all cores; shrinks a failing one and prints its story |

mod checks;
mod coverage;
mod executor;
mod faults;
mod leases;
mod link;
mod network;
mod plan;
mod process;
mod random;
mod runner;
mod server;
mod session;
mod store;
mod story;
mod trying;
mod verbs;
mod watched;
mod work;
mod world;

use std::rc::Rc;
use std::str::FromStr;

use plan::Plan;
use world::World;

/// A setting that `cargo xtask simulate` passes in the environment.
fn setting<T: FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// Number of seeds in a normal test run.
const A_FEW: u64 = 300;

#[test]
fn simulate_a_few_seeds() {
    let report = runner::run(0, A_FEW);
    report.assert_no_violation();
}

/// Many seeds, for `cargo xtask simulate`.
#[test]
fn simulate_many_seeds() {
    let Some(seeds) = setting::<u64>("LEASEHOLD_SIMULATE_SEEDS") else { return };
    let first = setting("LEASEHOLD_SIMULATE_FIRST").unwrap_or(0);
    let report = runner::run(first, seeds);
    println!("{}", report.table());
    report.assert_no_violation();
    if seeds >= runner::BIG {
        report.assert_covered();
    }
}

/// One seed with its story, for `cargo xtask simulate --seed`.
#[test]
fn simulate_one_seed() {
    let Some(seed) = setting::<u64>("LEASEHOLD_SIMULATE_SEED") else { return };
    let told = runner::tell(&Plan::of(seed));
    println!("{}", told.text);
    assert!(told.violation.is_none(), "seed {seed}: {}", told.violation.unwrap_or_default());
}

/// Checks that a seed determines a world to the last step.
#[test]
fn a_seed_replays_exactly() {
    for seed in 0..20 {
        let live = || World::live(&Rc::new(Plan::of(seed)), true);
        let (one, other) = (live(), live());
        assert_eq!(one.steps, other.steps, "seed {seed}");
        assert_eq!(one.story, other.story, "seed {seed}");
    }
}
