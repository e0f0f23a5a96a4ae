//! Deterministic simulation in virtual time.
//!
//! The decisions of the client (`client/`), the arithmetic of a lease (`lease.rs`), the inbox of a connection
//! (`store/redis/inbox.rs`) and the state machine of a lock (`machine/`) are the real ones. Everything around them is
//! simulated, one event at a time: processes with several tasks each, connections that delay, hold up and lose what is on
//! them, a server that restarts, forgets, hangs or is demoted. A seed determines all of it, so a failure replays exactly.
//!
//! `cargo xtask simulate` runs many seeds. What must hold stands in [`checks`], what must occur in [`coverage`].
//!
//! | file | what it does |
//! |---|---|
//! | `plan`, `faults` | what happens in a world: setup, tasks, faults |
//! | `world`, `executor`, `watched`, `random` | virtual time, one task at a time |
//! | `network`, `server` | connections, and the server's commands |
//! | `session`, `link`, `verbs`, `trying` | a process's way to the server, as the Redis store has it |
//! | `process`, `acquiring`, `pooling`, `by_token`, `leaving`, `lease`, `leases` | carry out what `client` decides, as `engine` does |
//! | `work` | what tasks do with locks |
//! | `checks`, `coverage`, `story` | what must hold, what occurred, what happened |
//! | `runner` | many seeds on all cores; a failing one is made smaller and told |

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

/// What `cargo xtask simulate` sets.
fn setting<T: FromStr>(name: &str) -> Option<T> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// Seeds of the usual test run.
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

/// A seed determines a world to the last step.
#[test]
fn a_seed_replays_exactly() {
    for seed in 0..20 {
        let live = || World::live(&Rc::new(Plan::of(seed)), true);
        let (one, other) = (live(), live());
        assert_eq!(one.steps, other.steps, "seed {seed}");
        assert_eq!(one.story, other.story, "seed {seed}");
    }
}
