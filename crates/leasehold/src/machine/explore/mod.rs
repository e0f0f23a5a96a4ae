//! Every state of small worlds.
//!
//! Two clients, the server (the production state machine, one command at a time), and between them streams of requests
//! and answers that take any time, are cut, or lose a message. Clients die, an operator evicts, leases and provisional
//! grants run out. The clients are the production code: the waiting rooms, tries and their steps on Redis, leases,
//! renewals, leaves, and the stamp of pushed grants (`crate::client`, `crate::store::redis::try_steps`). `driver` runs
//! them as the engine does. Their timers may fire at any time, in any order.
//!
//! Every state that can be reached is visited, and in each of them:
//! - at most one client believes that it holds the lock;
//! - a grant that begins to be believed has a higher fence than any before;
//! - a belief that has ended is never believed again;
//! - a lease that was revoked, or whose release could not finish, is never prolonged;
//! - an attempt that was given up is unknown to the lock once the client has finished with it;
//! - while nothing fails, a try overtakes no waiter that queued before it;
//! - if nothing fails any more, every waiting client gets the lock, and confirms it if it came by message.
//!
//! Then each rule is removed once (`crate::rules::Rule`, in the production code, and `rule::EngineRule`, in what takes the
//! engine's place), and the shortest way to a violation is found.
//!
//! Some properties need no rule because the code has no other way to go:
//! - An attempt never renews a grant that it read too late: it has only its acquire, which hands a lock on that is no
//!   longer its own.
//! - A token is not used again after a release, a leave or a lost yield, because a room and a try draw a new one
//!   (`EngineRule::FreshTokens` shows what for).
//! - A second copy of a grant changes nothing, because the token left the table when the lock was given to a task.
//! - [`Rule::RenewalComparesFence`] is for tokens that callers choose and may use in two calls at once
//!   (`crate::client::by_token`). A token of a room or a try is granted once. So that rule has a unit test.
//!
//! Not here: polling waiters, foreign values, a lost fence counter, `LookAgain` and a revocation that comes before its
//! grant (each makes a client act sooner, which it may do at any time), several tasks in one room, tickets of a pool,
//! an acquire that waits for a connection when its attempt is given up (the engine cancels it before it sends the leave),
//! and what a rule only speeds up: a grant to a token that is leaving is passed on at once, a retry is hurried.

mod client;
mod driver;
mod message;
mod reading;
mod rule;
mod search;
mod server;
mod step;
mod world;

use super::Rule;
use rule::{EngineRule, Violation};
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
    without: None,
    without_engine: None,
    in_order: false,
    kills: true,
    liveness: false,
    force_counts: false,
    hands_on: false,
    renews: true,
    any_beginning: false,
    most_requests: 2,
    most_answers: 3,
    most_states: usize::MAX,
    probes: false,
    checks: false,
};
/// The largest worlds: any client begins in any way, and more is on its way at once.
const LARGE: Setup = Setup { any_beginning: true, most_requests: 3, most_answers: 4, ..WORLD };
/// One client makes a second attempt.
const TWICE: Setup = Setup { attempts: [2, 1, 0], ..WORLD };
const REVOKES: Setup = Setup { operator: Operates::Revokes, ..WORLD };
const FORCES: Setup = Setup { operator: Operates::Forces, ..WORLD };

/// Explores, and fails with the way to a violation. Of the largest worlds, only the states that the fewest steps lead to
/// are visited.
fn holds(what: &str, setup: &Setup) {
    let found = explore(&Setup { most_states: if full() { 3_000_000 } else { 120_000 }, ..*setup });
    let Setup { clients, faults, operator, .. } = setup;
    let world = format!("{clients} clients, {faults} faults{}{what}", operator.words());
    if let Some((violation, trace)) = found.violation {
        panic!("{world}: {} at depth {}:\n{}", violation.words(), found.depth, trace.join("\n"));
    }
    let all = if found.more { "the first" } else { "all" };
    println!("explored {world}: {all} {} states, depth {}, no violation", found.states, found.depth);
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

/// The largest worlds take minutes: `cargo xtask explore` visits them and removes every rule. The usual test run visits
/// smaller ones, and removes the rules whose violation is near.
fn full() -> bool {
    std::env::var("LEASEHOLD_BOARD").is_ok_and(|how| how == "full")
}

#[test]
fn explore_a_few_faults() {
    let quiet = Setup { faults: 0, liveness: true, in_order: true, ..LARGE };
    holds("", &quiet);
    holds("", &WORLD);
    if !full() {
        return;
    }
    holds("", &Setup { liveness: true, ..WORLD });
    holds("", &LARGE);
    holds("", &Setup { faults: 2, ..WORLD });
    holds(", probes are sent", &Setup { faults: 0, probes: true, ..WORLD });
    holds(", leases are checked", &Setup { checks: true, ..WORLD });
    holds(", dead waiters passed over one by one", &Setup { faults: 2, liveness: true, sweep: 1, ..WORLD });
    holds(", a queue that vanishes", &Setup { liveness: true, queue_ttl: 3, ..WORLD });
}

#[test]
fn explore_a_second_attempt() {
    if full() {
        holds(", one wants it twice", &Setup { faults: 0, any_beginning: true, ..TWICE });
        holds(", one wants it twice", &TWICE);
    }
}

#[test]
fn explore_an_operator() {
    for setup in [REVOKES, FORCES] {
        holds("", &Setup { faults: 0, ..setup });
        if full() {
            holds("", &Setup { faults: 0, any_beginning: true, ..setup });
            holds("", &setup);
        }
    }
}

#[test]
fn explore_handing_on() {
    let (what, hands_on) = (", leases are handed on to other tokens", Setup { hands_on: true, ..WORLD });
    holds(what, &Setup { faults: 0, liveness: true, ..hands_on });
    if full() {
        holds(what, &Setup { liveness: true, ..hands_on });
        holds(what, &Setup { faults: 0, operator: Operates::Revokes, ..hands_on });
        holds(what, &Setup { faults: 0, operator: Operates::Forces, ..hands_on });
        holds(", leases are handed on, old connections cannot be killed", &Setup { kills: false, ..hands_on });
    }
}

#[test]
fn explore_old_connections() {
    holds(", old connections cannot be killed", &Setup { kills: false, ..WORLD });
    if full() {
        holds(", old connections cannot be killed", &Setup { kills: false, ..LARGE });
    }
}

/// The documented exception: handing a lock over while its holder believes makes two holders.
#[test]
fn explore_force() {
    fails(
        "excusing the holder that force has put out",
        &Setup { force_counts: true, faults: 0, ..FORCES },
        Violation::TwoHolders,
    );
}

#[test]
fn explore_without_each_rule_of_the_server() {
    use Violation::{FenceFell, TakenAwayAndProlonged, TwoHolders};
    let quiet = Setup { faults: 0, ..TWICE };
    let cases = [
        (Rule::RenewalRespectsRevocation, REVOKES, TakenAwayAndProlonged),
        (Rule::AcquireKeepsRevocation, REVOKES, TakenAwayAndProlonged),
    ];
    all_fail(&cases);
    let far = [
        (Rule::ReleaseComparesToken, quiet, FenceFell),
        (Rule::RenewalComparesToken, WORLD, TwoHolders),
        (Rule::EvictionComparesHolder, Setup { operator: Operates::Forces, ..quiet }, TwoHolders),
        (Rule::UnfinishedReleaseRevokes, Setup { sweep: 1, ..FORCES }, TakenAwayAndProlonged),
    ];
    if full() {
        all_fail(&far);
    }
}

#[test]
fn explore_without_each_rule_of_the_client() {
    use Violation::{Leaked, OutOfOrder, Revived, TwoHolders, Unconfirmed};
    let quiet = Setup { faults: 0, ..WORLD };
    let cases = [
        (Rule::LeaseCountsFromRequest, quiet, TwoHolders),
        (Rule::EndedBeliefStaysEnded, quiet, Revived),
        (Rule::BeliefEndsBeforeRelease, quiet, TwoHolders),
        (Rule::ProvisionalGrantIsConfirmed, Setup { liveness: true, renews: false, ..quiet }, Unconfirmed),
        (Rule::ResentTryRenewsFirst, WORLD, TwoHolders),
        (Rule::TryYieldsToQueue, Setup { in_order: true, ..quiet }, OutOfOrder),
        (Rule::GivenUpTokenLeaves, quiet, Leaked),
    ];
    all_fail(&cases);
    let far = [
        (Rule::PushWaitsForAnswer, Setup { faults: 0, ..TWICE }, Leaked),
        (Rule::QueuedGrantIsProven, Setup { faults: 0, ..FORCES }, Leaked),
        (Rule::PushWithLostAnswerIsGivenBack, WORLD, Leaked),
    ];
    if full() {
        all_fail(&far);
    }
}

/// Rules for a server on which a client may not kill the connection it has lost.
#[test]
fn explore_without_each_rule_beside_old_connections() {
    use Violation::Leaked;
    let unkilled = Setup { kills: false, ..WORLD };
    let cases = [
        (Rule::LostTryGetsNewToken, unkilled, Leaked),
        (Rule::LostAcquireGetsNewToken, unkilled, Leaked),
        (Rule::LeaveIsRepeated, unkilled, Leaked),
    ];
    all_fail(&cases);
}

/// Rules that the engine and the connection keep.
#[test]
fn explore_without_each_rule_of_the_engine() {
    use Violation::{FenceFell, Leaked, TwoHolders};
    let quiet = Setup { faults: 0, ..WORLD };
    let cases = [
        (EngineRule::FreshTokens, Setup { faults: 0, most_requests: 3, ..TWICE }, TwoHolders),
        (EngineRule::OldConnectionIsKilled, WORLD, Leaked),
        (EngineRule::PushNotStampedByArrival, quiet, FenceFell),
        (EngineRule::PushNotStampedByNewestSent, Setup { probes: true, ..quiet }, FenceFell),
        (EngineRule::DroppedTryIsUndone, quiet, Leaked),
    ];
    for (rule, setup, expected) in cases {
        fails(&format!("{rule:?}"), &Setup { without_engine: Some(rule), ..setup }, expected);
    }
}

fn all_fail(cases: &[(Rule, Setup, Violation)]) {
    for (rule, setup, expected) in cases {
        fails(&format!("{rule:?}"), &Setup { without: Some(*rule), ..*setup }, *expected);
    }
}
