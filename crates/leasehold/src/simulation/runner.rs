//! Runs many seeds on all cores. A failing seed is shrunk, and its story is printed.

use std::fmt::Write;
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::coverage::Coverage;
use super::plan::Plan;
use super::world::World;

/// From this number of seeds on, every situation has to occur.
pub(super) const BIG: u64 = 20_000;
/// Worlds that are tried to shrink a failing one.
const SHRINK_TRIES: usize = 400;

pub(super) struct Report {
    seeds: u64,
    steps: u64,
    took: Duration,
    coverage: Coverage,
    /// The lowest failing seed found, and its violation.
    failed: Option<(u64, String)>,
}

/// Runs seeds from `first` until one fails.
pub(super) fn run(first: u64, seeds: u64) -> Report {
    let began = Instant::now();
    let next = AtomicU64::new(first);
    let stop = AtomicBool::new(false);
    let total =
        Mutex::new(Report { seeds: 0, steps: 0, took: Duration::ZERO, coverage: Coverage::default(), failed: None });
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let (mut lived, mut steps, mut coverage) = (0, 0, Coverage::default());
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + seeds {
                        break;
                    }
                    let ended = World::live(&Rc::new(Plan::of(seed)), false);
                    lived += 1;
                    steps += ended.steps;
                    coverage.add(&ended.coverage);
                    if let Some(violation) = ended.violation {
                        stop.store(true, Ordering::Relaxed);
                        let mut total = total.lock().expect("no thread panicked");
                        if total.failed.as_ref().is_none_or(|(failed, _)| seed < *failed) {
                            total.failed = Some((seed, violation));
                        }
                    }
                }
                let mut total = total.lock().expect("no thread panicked");
                total.seeds += lived;
                total.steps += steps;
                total.coverage.add(&coverage);
            });
        }
    });
    let report = total.into_inner().expect("no thread panicked");
    Report { took: began.elapsed(), ..report }
}

impl Report {
    pub(super) fn table(&self) -> String {
        let Self { seeds, steps, took, coverage, .. } = self;
        format!("{seeds} seeds, {steps} steps in {:.1} s\n{}", took.as_secs_f64(), coverage.table())
    }

    /// Fails with the story of the failing seed.
    pub(super) fn assert_no_violation(&self) {
        let Some((seed, violation)) = &self.failed else { return };
        let told = tell(&smaller(Plan::of(*seed), kind(violation)));
        panic!("seed {seed}: {violation}\nafter {} seeds\n\n{}", self.seeds, told.text);
    }

    /// Fails if a situation never occurred.
    pub(super) fn assert_covered(&self) {
        let missing = self.coverage.missing();
        assert!(missing.is_empty(), "never occurred in {} seeds: {}", self.seeds, missing.join("; "));
    }
}

/// A story and its violation, if any.
pub(super) struct Told {
    pub(super) violation: Option<String>,
    pub(super) text: String,
}

pub(super) fn tell(plan: &Plan) -> Told {
    let ended = World::live(&Rc::new(plan.clone()), true);
    let mut text = String::new();
    let setup = &plan.setup;
    let _ = writeln!(text, "seed {}: {}", plan.seed, ended.violation.as_deref().unwrap_or("no violation"));
    let kills = if setup.can_kill { "may" } else { "may not" };
    let _ = writeln!(
        text,
        "{} processes; a client {kills} kill a connection that it has lost; the server's clock is {} ppm faster; {:?}",
        setup.processes, setup.faster_ppm, setup.latency
    );
    let _ = writeln!(text, "{} tasks, {} faults", plan.tasks.len(), plan.faults.len());
    for (number, task) in plan.tasks.iter().enumerate() {
        let _ = writeln!(text, "  task {number}: {task:?}");
    }
    let _ = writeln!(text);
    for line in &ended.story {
        let _ = writeln!(text, "{line}");
    }
    Told { violation: ended.violation, text }
}

/// A violation without the numbers that differ between worlds.
fn kind(violation: &str) -> String {
    violation.split(" at ").next().unwrap_or_default().chars().filter(|c| !c.is_ascii_digit()).collect()
}

/// Removes tasks and faults as long as the world still fails in the same way.
fn smaller(mut plan: Plan, expected: String) -> Plan {
    let mut tries = 0;
    let mut fails = |plan: &Plan| {
        tries += 1;
        let ended = (tries <= SHRINK_TRIES).then(|| World::live(&Rc::new(plan.clone()), false));
        ended.and_then(|ended| ended.violation).is_some_and(|violation| kind(&violation) == expected)
    };
    loop {
        let size = plan.tasks.len() + plan.faults.len();
        for which in (0..plan.faults.len()).rev() {
            let mut without = plan.clone();
            without.faults.remove(which);
            if fails(&without) {
                plan = without;
            }
        }
        for which in (0..plan.tasks.len()).rev() {
            let mut without = plan.clone();
            without.tasks.remove(which);
            if fails(&without) {
                plan = without;
            }
        }
        if plan.tasks.len() + plan.faults.len() == size {
            return plan;
        }
    }
}
