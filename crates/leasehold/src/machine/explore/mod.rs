//! Every state of small worlds.

mod client;
mod search;
mod server;
mod step;
mod world;

use super::{Rule, Rules};
use client::{ClientRule, ClientRules, Violation};
use search::explore;
use world::{Operates, Setup};

const WORLD: Setup = Setup {
    clients: 2,
    attempts: 1,
    faults: 1,
    operator: Operates::Never,
    ttl: 2,
    provisional: 1,
    sweep: 200,
    queue_ttl: 8,
    rules: Rules::ALL,
    client_rules: ClientRules::ALL,
    in_order: false,
    liveness: false,
    force_counts: false,
};

/// Explores, and fails with the way to a violation.
fn holds(setup: &Setup) {
    let began = std::time::Instant::now();
    let found = explore(setup);
    let Setup { clients, attempts, faults, operator, .. } = setup;
    let world = format!("{clients} clients, {attempts} attempts, {faults} faults{}", operator.words());
    if let Some((violation, trace)) = found.violation {
        panic!("{world}: {} at depth {}:\n{}", violation.words(), found.depth, trace.join("\n"));
    }
    println!("explored {world}: {} states, depth {}, no violation {:?}", found.states, found.depth, began.elapsed());
}

#[test]
fn explore_small() {
    holds(&Setup { attempts: 1, faults: 0, ..WORLD });
    holds(&Setup { attempts: 1, faults: 1, ..WORLD });
}
#[test]
fn explore_mid() {
    holds(&Setup { attempts: 2, faults: 0, ..WORLD });
    holds(&Setup { attempts: 2, faults: 1, ..WORLD });
}
