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
    attempts: [1, 1, 0],
    faults: 1,
    operator: Operates::Never,
    ttl: 2,
    provisional: 1,
    sweep: 200,
    queue_ttl: world::NEVER,
    rules: Rules::ALL,
    client_rules: ClientRules::ALL,
    in_order: false,
    kills: true,
    liveness: false,
    force_counts: false,
};

/// One client tries twice.
const TWICE: Setup = Setup { attempts: [2, 1, 0], ..WORLD };

/// Explores, and fails with the way to a violation.
fn holds(setup: &Setup) {
    let began = std::time::Instant::now();
    let found = explore(setup);
    let Setup { clients, attempts, faults, operator, .. } = setup;
    let world = format!("{clients} clients, {attempts:?} attempts, {faults} faults{}", operator.words());
    if let Some((violation, trace)) = found.violation {
        panic!("{world}: {} at depth {}:\n{}", violation.words(), found.depth, trace.join("\n"));
    }
    println!("explored {world}: {} states, depth {}, no violation {:?}", found.states, found.depth, began.elapsed());
}

#[test]
fn explore_orderly() {
    holds(&Setup { faults: 0, in_order: true, ..WORLD });
}

#[test]
fn explore_small() {
    holds(&Setup { faults: 1, liveness: true, ..WORLD });
    holds(&Setup { faults: 1, kills: false, ..WORLD });
    holds(&Setup { faults: 2, kills: false, ..WORLD });
}
#[test]
fn explore_mid() {
    holds(&Setup { attempts: [2, 1, 0], faults: 1, ..WORLD });
    holds(&Setup { attempts: [2, 1, 0], faults: 2, ..WORLD });
}

#[test]
fn explore_without() {
    let server = [
        (Rule::ReleaseComparesTheToken, TWICE),
        (Rule::RenewalComparesTheToken, WORLD),
        (Rule::RenewalRespectsARevocation, Setup { operator: Operates::Revokes, ..WORLD }),
        (Rule::RenewalComparesTheFence, WORLD),
        (Rule::AskingKeepsARevocation, Setup { operator: Operates::Revokes, ..WORLD }),
        (Rule::EvictComparesTheHolder, Setup { operator: Operates::Forces, faults: 0, ..TWICE }),
        (Rule::AnUnfinishedReleaseRevokes, Setup { operator: Operates::Forces, sweep: 1, ..WORLD }),
    ];
    for (rule, setup) in server {
        without(&format!("{rule:?}"), &Setup { rules: Rules::without(rule), ..setup });
    }
    let client = [
        (ClientRule::BeliefCountsFromAsking, WORLD),
        (ClientRule::ResentTryRenewsFirst, WORLD),
        (ClientRule::BeliefGivenUpBeforeRelease, WORLD),
        (ClientRule::TokenDeadAfterReleaseOrLeave, Setup { attempts: [2, 1, 0], ..WORLD }),
        (ClientRule::TokenDeadAfterYield, Setup { kills: false, ..WORLD }),
        (ClientRule::LateGrantAskedAgainNotRenewed, Setup { liveness: true, ..WORLD }),
        (ClientRule::LapsedBeliefNeverRevived, WORLD),
        (ClientRule::PushNotStampedByArrival, WORLD),
        (ClientRule::PushNotStampedByNewestSent, WORLD),
        (ClientRule::TryYieldsToQueue, Setup { in_order: true, faults: 0, ..WORLD }),
        (ClientRule::HolderThatStillAsksLeaves, WORLD),
    ];
    for (rule, setup) in client {
        without(&format!("{rule:?}"), &Setup { client_rules: ClientRules::without(rule), ..setup });
    }
    without("force excused", &Setup { force_counts: true, operator: Operates::Forces, ..WORLD });
}

fn without(rule: &str, setup: &Setup) {
    let found = explore(setup);
    match found.violation {
        Some((violation, trace)) => {
            println!("without {rule}: violation at depth {}: {}", found.depth, violation.words());
            if std::env::var_os("TRACE").is_some() {
                println!("{}", trace.join("\n"));
            }
        }
        None => println!("without {rule}: NOTHING in {} states", found.states),
    }
}
