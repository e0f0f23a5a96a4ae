//! Every state of small worlds.
//!
//! Two clients, the server (the production state machine, one command at a time), and between them
//! streams of requests and answers that take any time, are cut, or lose a message; clients die, an
//! operator evicts, leases and provisional grants run out. Every state that can be reached is
//! visited, and in each of them:
//! - at most one client believes that it holds the lock;
//! - a grant that begins to be believed has a higher fence than any before;
//! - a lease that was revoked, or whose release could not finish, is never prolonged;
//! - an attempt that was given up, and whose end was answered, is unknown to the lock;
//! - while nothing fails, a try overtakes nobody who stood in line before it;
//! - if nothing fails any more, whoever waits gets the lock.
//!
//! Then each rule is left out once, and the shortest way to a violation is found.
//!
//! Not here: polling waiters, foreign values, a lost fence counter, `LookAgain` (a waiter may ask
//! again at any time), and the flag by which the Redis scripts save a step.

mod client;
mod message;
mod rule;
mod search;
mod server;
mod step;
mod world;

use super::{Rule, Rules};
use rule::{ClientRule, ClientRules, Violation};
use search::explore;
use world::{NEVER, Operates, Setup};

/// Leases of two ticks, provisional ones of one.
const WORLD: Setup = Setup {
    clients: 2,
    attempts: [1, 1, 0],
    faults: 1,
    operator: Operates::Never,
    ttl: 2,
    provisional: 1,
    sweep: 200,
    queue_ttl: NEVER,
    rules: Rules::ALL,
    client_rules: ClientRules::ALL,
    in_order: false,
    kills: true,
    liveness: false,
    force_counts: false,
    hands_on: false,
};
/// One client makes a second attempt.
const TWICE: Setup = Setup { attempts: [2, 1, 0], ..WORLD };
const REVOKES: Setup = Setup { operator: Operates::Revokes, ..WORLD };
const FORCES: Setup = Setup { operator: Operates::Forces, ..WORLD };

/// Explores, and fails with the way to a violation.
fn holds(what: &str, setup: &Setup) {
    let found = explore(setup);
    let Setup { clients, faults, operator, .. } = setup;
    let world = format!("{clients} clients, {faults} faults{}{what}", operator.words());
    if let Some((violation, trace)) = found.violation {
        panic!("{world}: {} at depth {}:\n{}", violation.words(), found.depth, trace.join("\n"));
    }
    println!("explored {world}: {} states, depth {}, no violation", found.states, found.depth);
}

/// Explores a world without one rule, and fails unless that shows.
fn fails(rule: &str, setup: &Setup, expected: Violation) {
    let found = explore(setup);
    let Some((violation, trace)) = found.violation else {
        panic!("without {rule}: no violation in {} states", found.states);
    };
    println!("without {rule}: violation at depth {}: {}", found.depth, violation.words());
    assert_eq!(violation, expected, "without {rule}, after\n{}", trace.join("\n"));
}

/// The largest worlds take minutes: `cargo xtask explore` walks through them, the usual test run
/// through smaller ones of the same kind.
fn full() -> bool {
    std::env::var("LEASEHOLD_BOARD").is_ok_and(|how| how == "full")
}

#[test]
fn explore_a_few_faults() {
    holds("", &Setup { faults: 0, liveness: true, in_order: true, ..WORLD });
    holds("", &Setup { faults: 2, liveness: full(), ..WORLD });
    if !full() {
        return;
    }
    holds(", dead waiters passed over one by one", &Setup { faults: 2, liveness: true, sweep: 1, ..WORLD });
    holds(", a queue that vanishes", &Setup { liveness: true, queue_ttl: 3, ..WORLD });
}

#[test]
fn explore_a_second_attempt() {
    holds(", one tries twice", &Setup { faults: 0, ..TWICE });
    if full() {
        holds(", one tries twice", &Setup { faults: 1, ..TWICE });
    }
}

#[test]
fn explore_an_operator() {
    let faults = u8::from(full());
    holds("", &Setup { faults, ..REVOKES });
    holds("", &Setup { faults, ..FORCES });
}

#[test]
fn explore_handing_on() {
    let hands_on = Setup { hands_on: true, ..WORLD };
    holds(", leases are handed on to other tokens", &Setup { liveness: true, ..hands_on });
    if full() {
        let what = ", leases are handed on to other tokens";
        holds(what, &Setup { faults: 2, ..hands_on });
        holds(what, &Setup { operator: Operates::Revokes, ..hands_on });
        holds(what, &Setup { operator: Operates::Forces, ..hands_on });
        holds(", leases are handed on, old connections cannot be killed", &Setup { kills: false, ..hands_on });
    }
}

#[test]
fn explore_old_connections() {
    holds(", old connections cannot be killed", &Setup { kills: false, ..WORLD });
    if full() {
        holds(", old connections cannot be killed", &Setup { kills: false, faults: 2, ..WORLD });
    }
}

/// The documented exception: handing a lock over while its holder believes makes two holders.
#[test]
fn explore_force() {
    fails("excusing whom force has put out", &Setup { force_counts: true, faults: 0, ..FORCES }, Violation::TwoHolders);
}

#[test]
fn explore_without_each_rule_of_the_server() {
    use Violation::{FenceFell, TakenAwayAndProlonged, TwoHolders};
    let quiet = Setup { faults: 0, ..TWICE };
    let cases = [
        (Rule::ReleaseComparesTheToken, quiet, FenceFell),
        (Rule::RenewalComparesTheToken, WORLD, TwoHolders),
        (Rule::RenewalRespectsARevocation, REVOKES, TakenAwayAndProlonged),
        (Rule::RenewalComparesTheFence, quiet, FenceFell),
        (Rule::AskingKeepsARevocation, REVOKES, TakenAwayAndProlonged),
        (Rule::EvictComparesTheHolder, Setup { operator: Operates::Forces, ..quiet }, TwoHolders),
        (Rule::AnUnfinishedReleaseRevokes, Setup { sweep: 1, ..FORCES }, TakenAwayAndProlonged),
    ];
    for (rule, setup, expected) in cases {
        fails(&format!("{rule:?}"), &Setup { rules: Rules::without(rule), ..setup }, expected);
    }
}

#[test]
fn explore_without_each_rule_of_the_client() {
    use Violation::{FenceFell, Leaked, OutOfOrder, TurnedAway, TwoHolders};
    let quiet = Setup { faults: 0, ..WORLD };
    let cases = [
        (ClientRule::BeliefCountsFromAsking, quiet, TwoHolders),
        (ClientRule::ResentTryRenewsFirst, WORLD, TwoHolders),
        (ClientRule::BeliefGivenUpBeforeRelease, quiet, TwoHolders),
        (ClientRule::TokenDeadAfterReleaseOrLeave, Setup { faults: 0, ..TWICE }, TwoHolders),
        (ClientRule::LateGrantAskedAgainNotRenewed, Setup { liveness: true, ..quiet }, TurnedAway),
        (ClientRule::GivenUpBeliefNeverRevived, quiet, TwoHolders),
        (ClientRule::OldConnectionKilledBeforeReAsking, WORLD, Leaked),
        (ClientRule::PushNotStampedByArrival, quiet, FenceFell),
        (ClientRule::PushNotStampedByNewestSent, quiet, FenceFell),
        (ClientRule::TryYieldsToQueue, Setup { in_order: true, ..quiet }, OutOfOrder),
        (ClientRule::HolderThatStillAsksLeaves, Setup { faults: 0, ..TWICE }, Leaked),
    ];
    for (rule, setup, expected) in cases {
        fails(&format!("{rule:?}"), &Setup { client_rules: ClientRules::without(rule), ..setup }, expected);
    }
}

/// Rules for a server on which a client may not kill the connection it has lost.
#[test]
fn explore_without_each_rule_beside_old_connections() {
    let unkilled = Setup { kills: false, ..WORLD };
    let cases = [
        (ClientRule::TokenDeadAfterYield, unkilled),
        (ClientRule::TryNotResentBesideAnOldConnection, Setup { faults: 2, ..unkilled }),
    ];
    for (rule, setup) in cases.into_iter().filter(|(_, setup)| full() || setup.faults < 2) {
        let setup = Setup { client_rules: ClientRules::without(rule), ..setup };
        fails(&format!("{rule:?}"), &setup, Violation::FenceFell);
    }
}
