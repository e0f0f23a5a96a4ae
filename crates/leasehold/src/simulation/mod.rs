//! Deterministic simulation in virtual time.
//!
//! The decisions of the client (`client/`), the arithmetic of a lease (`lease.rs`), the inbox of a connection
//! (`store/redis/inbox.rs`) and the state machine of a lock (`machine/`) are production code. Everything around them is
//! simulated, one event at a time: processes with several tasks each, connections that delay and lose messages, a
//! server that restarts, loses data, hangs or is demoted. A seed determines everything, so a failure replays exactly.
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
//! | `process`, `acquiring`, `pooling`, `by_token`, `leaving`, `lease`, `leases` | carry out the decisions of `client`, in place of `engine` |
//! | `work` | what tasks do with locks |
//! | `checks`, `coverage`, `story` | invariants, situations that occurred, what happened in words |
//! | `runner` | runs many seeds on all cores; shrinks a failing one and prints its story |

mod acquiring;
mod by_token;
mod checks;
mod coverage;
mod executor;
mod faults;
mod lease;
mod leases;
mod leaving;
mod link;
mod network;
mod plan;
mod pooling;
mod process;
mod random;
mod runner;
mod server;
mod session;
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
