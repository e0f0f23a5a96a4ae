//! What happens in a world: its setup, its tasks and its faults. A seed determines all of it.

use std::time::Duration;

use super::random::Random;
use crate::engine::wish::Wait;
use crate::facts::{LockName, Owner, Ttl};
use crate::options::Options;

#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) seed: u64,
    pub(super) setup: Setup,
    pub(super) tasks: Vec<TaskPlan>,
    pub(super) faults: Vec<FaultPlan>,
    /// From here on nothing fails.
    pub(super) quiet_from: Duration,
}

#[derive(Debug, Clone)]
pub(super) struct Setup {
    pub(super) seed: u64,
    pub(super) processes: usize,
    /// Whether each process relies on pushes.
    events: Vec<bool>,
    /// Whether a client may kill the connection that it has lost.
    pub(super) can_kill: bool,
    pub(super) faster_ppm: i64,
    pub(super) latency: Latency,
    pub(super) lags: bool,
    pub(super) sweep: usize,
    patience: Duration,
    /// Nothing fails in this world.
    pub(super) is_calm: bool,
}

/// How long messages take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Latency {
    pub(super) usual_ms: u64,
    /// One message in this many takes longer; 0: none does.
    pub(super) spike_one_in: u64,
    pub(super) spike_ms: u64,
}

#[derive(Debug, Clone)]
pub(super) struct TaskPlan {
    pub(super) process: usize,
    pub(super) at: Duration,
    pub(super) what: What,
    /// The task's future is dropped after this.
    pub(super) dropped_after: Option<Duration>,
}

#[derive(Debug, Clone)]
pub(super) enum What {
    Lock {
        terms: Terms,
        holds: Vec<Hold>,
    },
    Pool {
        terms: Terms,
        members: Vec<LockName>,
        count: usize,
        holds: Vec<Hold>,
    },
    /// `calls`: how many times the same call is made concurrently.
    Token {
        terms: Terms,
        calls: usize,
        renewals: usize,
        hold: Duration,
    },
    /// An operator inspects the lock, waits, and acts on the holder that it saw.
    Operator {
        name: LockName,
        acts: Acts,
        thinks: Duration,
        times: usize,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Acts {
    Revoke,
    Force,
    AskToFinish,
}

/// What a task asks for.
#[derive(Debug, Clone)]
pub(super) struct Terms {
    pub(super) name: LockName,
    pub(super) ttl: Ttl,
    pub(super) wait: Wait,
    pub(super) renews: bool,
    pub(super) fenced: bool,
    pub(super) max_hold: Option<Duration>,
    pub(super) retry_every: Option<Duration>,
    pub(super) owner: Owner,
}

/// What a task does with a lock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hold {
    pub(super) works: Duration,
    pub(super) ends: Ends,
    /// The pause before the next lock.
    pub(super) rests: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ends {
    Release,
    Drop,
    /// Extends the lease, continues, and releases.
    Extend,
    /// Hands the lease to a token, which releases it.
    HandOn,
}

#[derive(Debug, Clone)]
pub(super) struct FaultPlan {
    pub(super) at: Duration,
    pub(super) fault: Fault,
}

#[derive(Debug, Clone)]
pub(super) enum Fault {
    /// `forwards`: what was sent before still runs; the server notices after `noticed_after`.
    Cut {
        process: usize,
        forwards: bool,
        noticed_after: Duration,
    },
    Stall {
        process: usize,
        lasts: Duration,
    },
    Mute {
        process: usize,
        lasts: Duration,
    },
    Duplicate {
        process: usize,
    },
    Pause {
        process: usize,
        lasts: Duration,
    },
    Crash {
        process: usize,
        restarts_after: Duration,
    },
    Restart {
        down: Duration,
        keeps_data: bool,
    },
    Flush,
    Delete {
        name: LockName,
    },
    /// `loses`: how much of the last acknowledged data the new primary lacks.
    Demote {
        loses: Duration,
        resolves_after: Duration,
    },
    Hang {
        lasts: Duration,
    },
    Foreign {
        name: LockName,
        lasts: Duration,
    },
}

impl Setup {
    /// The options of a process: the defaults but for these.
    pub(super) fn options(&self, process: usize) -> Options {
        Options::new().without_journal().notifications(self.events[process]).outage_timeout(self.patience)
    }
}

const NAMES: [&str; 3] = ["a", "b", "c"];
const MEMBERS: [&str; 3] = ["p:0", "p:1", "p:2"];
pub(super) const COLLECTOR: &str = "p:collecting";
/// Tasks and faults begin within this.
const BUSY_MS: u64 = 20_000;

impl Plan {
    pub(super) fn of(seed: u64) -> Self {
        let mut random = Random::new(seed, 0);
        let random = &mut random;
        // One world in four has no faults, so anything it leaves behind is a bug.
        let is_calm = random.one_in(4);
        let processes = random.index(4) + 2;
        let setup = Setup {
            seed,
            processes,
            events: (0..processes).map(|_| !random.one_in(6)).collect(),
            can_kill: !random.one_in(4),
            faster_ppm: random.pick(&[0, 0, 10_000, -10_000, 5_000]),
            latency: latency(random, is_calm),
            lags: !random.one_in(3),
            sweep: random.pick(&[200, 200, 1, 2]),
            patience: Duration::from_secs(random.pick(&[10, 10, 3])),
            is_calm,
        };
        // Few names, so that tasks meet.
        let names = random.index(NAMES.len()) + 1;
        let mut tasks: Vec<TaskPlan> = (0..random.between(4, 14)).map(|_| task(random, processes, names)).collect();
        if is_calm {
            // A lease that a cancelled call by token has acquired ends only by its ttl.
            let by_token = tasks.iter_mut().filter(|task| matches!(task.what, What::Token { .. }));
            by_token.for_each(|task| task.dropped_after = None);
        }
        if !is_calm || random.one_in(3) {
            tasks.extend((0..random.below(3)).map(|_| operator(random, processes, names)));
        }
        tasks.sort_by_key(|task| task.at);
        let mut faults = Vec::new();
        if !is_calm {
            // A world with one kind of fault explores it further than one with all kinds.
            let count = random.pick(&[1, 2, 3, 5, 8]);
            let kinds: Vec<u64> = (0..random.between(1, 4)).map(|_| random.below(14)).collect();
            let mut demotions = 0;
            for _ in 0..count {
                let kind = random.pick(&kinds);
                faults.push(fault(random, kind, processes, names));
                if matches!(faults.last(), Some(FaultPlan { fault: Fault::Demote { .. }, .. })) {
                    demotions += 1;
                    if demotions > 2 {
                        faults.pop();
                    }
                }
            }
            faults.sort_by_key(|fault: &FaultPlan| fault.at);
        }
        Self { seed, setup, tasks, faults, quiet_from: Duration::from_millis(BUSY_MS + 20_000) }
    }
}

fn latency(random: &mut Random, is_calm: bool) -> Latency {
    let usual_ms = random.pick(&[1, 1, 2, 5, 40]);
    if is_calm {
        return Latency { usual_ms, spike_one_in: 0, spike_ms: 0 };
    }
    Latency { usual_ms, spike_one_in: random.pick(&[0, 400, 60, 15]), spike_ms: random.pick(&[50, 300, 1_500, 4_000]) }
}

fn name(text: &str) -> LockName {
    LockName::new(text).expect("a name")
}

fn terms(random: &mut Random, names: usize) -> Terms {
    let ttl = random.pick(&[100, 300, 1_000, 1_000, 2_500, 5_000, 30_000]);
    let wait = match random.below(8) {
        0 => Wait::Not,
        1..=2 => Wait::Forever,
        3 => Wait::UpTo(random.ms(10, 300)),
        _ => Wait::UpTo(random.ms(200, 9_000)),
    };
    Terms {
        name: name(NAMES[random.index(names)]),
        ttl: Ttl::new(Duration::from_millis(ttl)).expect("a ttl"),
        wait,
        renews: !random.one_in(4),
        fenced: !random.one_in(10),
        max_hold: random.one_in(12).then(|| random.ms(50, 2_000)),
        retry_every: random.one_in(10).then(|| random.ms(20, 500)),
        owner: Owner::default(),
    }
}

fn holds(random: &mut Random) -> Vec<Hold> {
    let most = random.pick(&[1, 2, 4, 8]);
    let hold = |random: &mut Random| Hold {
        works: match random.below(6) {
            0 => Duration::ZERO,
            1..=3 => random.ms(1, 60),
            4 => random.ms(100, 900),
            _ if random.one_in(5) => random.ms(9_000, 16_000),
            _ => random.ms(500, 4_000),
        },
        ends: random.pick(&[Ends::Release, Ends::Release, Ends::Release, Ends::Drop, Ends::Extend, Ends::HandOn]),
        rests: if random.one_in(2) { Duration::ZERO } else { random.ms(0, 400) },
    };
    (0..random.between(1, most)).map(|_| hold(random)).collect()
}

fn task(random: &mut Random, processes: usize, names: usize) -> TaskPlan {
    let what = match random.below(10) {
        0..=6 => What::Lock { terms: terms(random, names), holds: holds(random) },
        7..=8 => {
            let members = random.index(MEMBERS.len() - 1) + 2;
            let count = random.index(members) + 1;
            let members = MEMBERS[..members].iter().map(|member| name(member)).collect();
            let mut terms = terms(random, names);
            terms.fenced = true;
            What::Pool { terms, members, count, holds: holds(random) }
        }
        _ => What::Token {
            terms: terms(random, names),
            calls: random.pick(&[1, 2, 2]),
            renewals: random.index(3),
            hold: random.ms(0, 1_500),
        },
    };
    TaskPlan {
        process: random.index(processes),
        // Many at once, so that they meet.
        at: if random.one_in(3) { random.ms(0, BUSY_MS) } else { random.ms(0, 1_500) },
        dropped_after: random.one_in(8).then(|| random.ms(0, 3_000)),
        what,
    }
}

fn operator(random: &mut Random, processes: usize, names: usize) -> TaskPlan {
    let what = What::Operator {
        name: name(if random.one_in(5) { MEMBERS[0] } else { NAMES[random.index(names)] }),
        acts: random.pick(&[Acts::Revoke, Acts::Revoke, Acts::Force, Acts::AskToFinish]),
        thinks: if random.one_in(2) { Duration::ZERO } else { random.ms(0, 500) },
        times: random.index(6) + 1,
    };
    TaskPlan { process: random.index(processes), at: random.ms(0, BUSY_MS / 4), what, dropped_after: None }
}

fn fault(random: &mut Random, kind: u64, processes: usize, names: usize) -> FaultPlan {
    let process = random.index(processes);
    let lasts = if random.one_in(3) { random.ms(1_000, 12_000) } else { random.ms(20, 2_500) };
    let fault = match kind {
        0..=2 => Fault::Cut { process, forwards: random.one_in(2), noticed_after: random.ms(0, 2_500) },
        3 => Fault::Stall { process, lasts },
        4 => Fault::Mute { process, lasts },
        5 => Fault::Duplicate { process },
        6..=7 => Fault::Pause { process, lasts },
        8 => Fault::Crash { process, restarts_after: lasts },
        9 => Fault::Restart { down: lasts, keeps_data: random.one_in(2) },
        10 => Fault::Flush,
        11 if random.one_in(2) => Fault::Delete { name: name(NAMES[random.index(names)]) },
        11 => Fault::Delete { name: name(if random.one_in(2) { COLLECTOR } else { MEMBERS[0] }) },
        12 => {
            let loses = if random.one_in(2) { Duration::ZERO } else { random.ms(1, 1_500) };
            Fault::Demote { loses, resolves_after: random.ms(0, 1_500) }
        }
        _ if random.one_in(2) => Fault::Hang { lasts: lasts.min(Duration::from_secs(5)) },
        _ => Fault::Foreign { name: name(NAMES[random.index(names)]), lasts },
    };
    let at = if random.one_in(2) { random.ms(0, 4_000) } else { random.ms(0, BUSY_MS) };
    FaultPlan { at, fault }
}
