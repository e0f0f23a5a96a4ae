//! A world: processes, a network and a server.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use super::checks::Checks;
use super::coverage::{Coverage, Situation};
use super::executor::Executor;
use super::network::Network;
use super::plan::Plan;
use super::process::Process;
use super::random::Random;
use super::story::Story;
use crate::clock::Moment;
use crate::clock::simulated::VirtualTime;

pub(super) struct World {
    pub(super) plan: Rc<Plan>,
    pub(super) executor: Executor,
    pub(super) network: RefCell<Network>,
    pub(super) checks: RefCell<Checks>,
    pub(super) story: Story,
    pub(super) coverage: RefCell<Coverage>,
    /// The latest incarnation of each process; `None` while it is dead.
    pub(super) processes: RefCell<Vec<Option<Rc<Process>>>>,
    pub(super) incarnations: Cell<u64>,
    /// Tasks of the plan that have not ended.
    pub(super) open_tasks: Cell<usize>,
    pub(super) began: Moment,
    /// The time of the last fault, for each process and for the server (the last entry).
    pub(super) disturbed: RefCell<Vec<Moment>>,
}

/// How a world ended.
pub(super) struct Ended {
    pub(super) violation: Option<String>,
    pub(super) steps: u64,
    pub(super) coverage: Coverage,
    pub(super) story: Vec<String>,
}

impl World {
    fn new(plan: &Rc<Plan>, tells: bool) -> Rc<Self> {
        let executor = Executor::new(Random::new(plan.seed, 1));
        executor.lags.set(plan.setup.lags);
        let began = Moment::now();
        Rc::new(Self {
            plan: plan.clone(),
            network: RefCell::new(Network::new(plan)),
            checks: RefCell::new(Checks::new(plan.setup.can_kill, plan.setup.is_calm)),
            story: Story::new(began, tells),
            coverage: RefCell::default(),
            processes: RefCell::new(vec![None; plan.setup.processes]),
            incarnations: Cell::new(0),
            open_tasks: Cell::new(0),
            disturbed: RefCell::new(vec![began; plan.setup.processes + 1]),
            began,
            executor,
        })
    }

    /// Runs a plan to its end or to the first violation.
    pub(super) fn live(plan: &Rc<Plan>, tells: bool) -> Ended {
        // Not at the boot of the machine: stamps of 0 mean that nothing was answered yet.
        let time = VirtualTime::start(Moment::from_boot(Duration::from_secs(1_000)));
        let world = Self::new(plan, tells);
        world.begin();
        let quiet = world.began + plan.quiet_from;
        let end = quiet + Duration::from_secs(900);
        let mut said_quiet = false;
        while world.checks.borrow().violation.is_none() && world.executor.step(&world, &time, end) {
            world.follow_step();
            if said_quiet && world.has_ended() {
                break;
            }
            if !said_quiet && Moment::now() >= quiet {
                said_quiet = true;
                world.executor.lags.set(false);
            }
        }
        if world.checks.borrow().violation.is_none() {
            world.check_the_end();
        }
        let ended = Ended {
            violation: world.checks.borrow_mut().violation.take(),
            steps: world.executor.steps.get(),
            coverage: world.coverage.take(),
            story: world.story.take(),
        };
        for process in world.processes.take().into_iter().flatten() {
            process.life.is_dead.set(true);
            process.discard_work();
        }
        world.executor.clear();
        world.network.borrow_mut().connections.clear();
        ended
    }

    /// Carries out what the engines have begun in a step, and checks their leases.
    fn follow_step(&self) {
        for which in 0..self.plan.setup.processes {
            let process = self.processes.borrow()[which].clone();
            if let Some(process) = process.filter(|process| process.life.has_run.take()) {
                self.compare_leases(&process);
                process.take_work();
            }
        }
    }

    /// Whether every task of the plan has ended, and the engines have nothing left to do.
    fn has_ended(&self) -> bool {
        self.open_tasks.get() == 0
            && self.processes.borrow().iter().flatten().all(|process| process.unfinished().is_none())
    }

    pub(super) fn saw(&self, situation: Situation) {
        self.coverage.borrow_mut().count(situation);
    }

    /// Adds a line to the story, if one is recorded.
    pub(super) fn tell(&self, line: impl FnOnce() -> String) {
        if self.story.tells() {
            self.story.add(Moment::now(), line());
        }
    }

    pub(super) fn fail(&self, what: impl FnOnce() -> String) {
        let mut checks = self.checks.borrow_mut();
        if checks.violation.is_none() {
            let at = self.began.until(Moment::now());
            let what = what();
            self.story.add(Moment::now(), format!("VIOLATION: {what}"));
            checks.violation = Some(format!("{what} at {:.3} s", at.as_secs_f64()));
        }
    }

    /// Records a fault: for a while, the bounds on response times do not hold.
    pub(super) fn disturb(&self, process: Option<usize>) {
        let mut disturbed = self.disturbed.borrow_mut();
        let which = process.unwrap_or(disturbed.len() - 1);
        disturbed[which] = Moment::now();
    }

    pub(super) fn undisturbed_since(&self, process: usize) -> Moment {
        let disturbed = self.disturbed.borrow();
        disturbed[process].max(disturbed[disturbed.len() - 1])
    }

    pub(super) fn is_quiet(&self) -> bool {
        Moment::now() >= self.began + self.plan.quiet_from
    }
}
