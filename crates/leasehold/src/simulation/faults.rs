//! Carries out the faults of a plan.

use std::rc::Rc;
use std::time::Duration;

use super::coverage::Situation;
use super::plan::Fault;
use super::process::Process;
use super::server::Node;
use super::story::process_name;
use super::world::World;
use crate::clock::Moment;
use crate::facts::LockName;
use crate::machine::Slot;

impl World {
    /// Starts the tasks and faults of the plan.
    pub(super) fn begin(self: &Rc<Self>) {
        for which in 0..self.plan.setup.processes {
            let process = Process::start(self, which, 0);
            self.processes.borrow_mut()[which] = Some(process);
        }
        for (number, task) in self.plan.tasks.iter().enumerate() {
            let task = task.clone();
            self.executor.at(self.began + task.at, move |world| world.start_task(number, task));
        }
        for planned in &self.plan.faults {
            let at = self.began + planned.at;
            if let Fault::Demote { loses, .. } = planned.fault
                && !loses.is_zero()
            {
                // The data of the new primary.
                let fault = planned.fault.clone();
                let copied_at = if at.since_boot() > self.began.since_boot() + loses { at - loses } else { self.began };
                self.executor.at(copied_at, move |world| {
                    let copy = world.network.borrow_mut().primary().clone();
                    world.executor.at(at, move |world| world.break_something(&fault, Some(copy)));
                });
                continue;
            }
            let fault = planned.fault.clone();
            self.executor.at(at, move |world| world.break_something(&fault, None));
        }
    }

    fn break_something(self: &Rc<Self>, fault: &Fault, copy: Option<Node>) {
        self.tell(|| format!("FAULT: {}", fault.words()));
        match fault {
            Fault::Cut { process, forwards, noticed_after } => {
                self.saw(Situation::FaultCut);
                self.disturb(Some(*process));
                let open = self.network.borrow().of_process(*process);
                for id in open {
                    self.cut(id, *forwards, *noticed_after);
                }
            }
            Fault::Stall { process, lasts } => {
                self.saw(Situation::FaultStall);
                self.disturb_until(Some(*process), Moment::now() + *lasts);
                let until = Moment::now() + *lasts;
                let mut network = self.network.borrow_mut();
                for id in network.of_process(*process) {
                    network.connections[id].held_until = until;
                }
            }
            Fault::Mute { process, lasts } => {
                self.saw(Situation::FaultMute);
                self.disturb_until(Some(*process), Moment::now() + *lasts);
                let until = Moment::now() + *lasts;
                let mut network = self.network.borrow_mut();
                for id in network.of_process(*process) {
                    network.connections[id].muted_until = until;
                }
            }
            Fault::Duplicate { process } => {
                let mut network = self.network.borrow_mut();
                for id in network.of_process(*process) {
                    network.connections[id].duplicate_next = true;
                }
            }
            Fault::Pause { process, lasts } => self.pause(*process, *lasts),
            Fault::Crash { process, restarts_after } => self.crash(*process, *restarts_after),
            Fault::Restart { down, keeps_data } => self.restart(*down, *keeps_data),
            Fault::Flush => {
                self.saw(Situation::FaultFlush);
                self.lose_data(&Node::new());
            }
            Fault::Delete { name } => {
                self.saw(Situation::FaultDelete);
                self.disown(name);
                if let Some(lock) = self.network.borrow_mut().primary().locks.get_mut(name) {
                    lock.slot = Slot::Free;
                }
            }
            Fault::Demote { resolves_after, .. } => self.demote(copy, *resolves_after),
            Fault::Hang { lasts } => {
                self.saw(Situation::FaultHang);
                let until = Moment::now() + *lasts;
                self.disturb_until(None, until);
                self.network.borrow_mut().hangs_until = until;
            }
            Fault::Foreign { name, lasts } => self.take_foreign(name, *lasts),
        }
    }

    /// Marks a fault that lasts from now until a moment.
    fn disturb_until(self: &Rc<Self>, process: Option<usize>, until: Moment) {
        self.disturb(process);
        let mut disturbed = self.disturbed.borrow_mut();
        let which = process.unwrap_or(disturbed.len() - 1);
        disturbed[which] = disturbed[which].max(until);
    }

    fn pause(self: &Rc<Self>, which: usize, lasts: Duration) {
        let Some(process) = self.processes.borrow()[which].clone() else { return };
        if process.life.is_paused.get() {
            return;
        }
        self.saw(Situation::FaultPause);
        self.disturb_until(Some(which), Moment::now() + lasts);
        process.life.is_paused.set(true);
        self.executor.at(Moment::now() + lasts, move |world| {
            world.tell(|| format!("{} goes on", process.name()));
            process.life.is_paused.set(false);
            world.executor.resume();
            let open = world.network.borrow().of_process(which);
            for id in open {
                // It may read what has arrived before or after its timers fire.
                let later = Duration::from_micros(world.executor.steps.get() % 1_000);
                world.executor.at(Moment::now() + later, move |world| world.arrive(id));
            }
        });
    }

    fn crash(self: &Rc<Self>, which: usize, restarts_after: Duration) {
        let Some(process) = self.processes.borrow_mut()[which].take() else { return };
        self.saw(Situation::FaultCrash);
        self.disturb(Some(which));
        process.life.is_dead.set(true);
        let open = self.network.borrow().of_process(which);
        for id in open {
            // The kernel closes the sockets of a killed process; a machine without power does not.
            let noticed_after = if id % 3 == 0 { Duration::from_secs(5) } else { Duration::ZERO };
            self.close_by_client(id, noticed_after);
        }
        self.forget_beliefs_of(which);
        self.executor.drop_dead();
        process.discard_work();
        let incarnation = process.incarnation + 1;
        drop(process);
        self.executor.at(Moment::now() + restarts_after, move |world| {
            world.tell(|| format!("{} starts", process_name(which, incarnation)));
            let process = Process::start(world, which, incarnation);
            world.processes.borrow_mut()[which] = Some(process);
        });
    }

    fn restart(self: &Rc<Self>, down: Duration, keeps_data: bool) {
        self.saw(if keeps_data { Situation::FaultRestart } else { Situation::FaultDataLoss });
        self.disturb_until(None, Moment::now() + down);
        if !keeps_data {
            self.lose_data(&Node::new());
        }
        let primary = {
            let mut network = self.network.borrow_mut();
            network.is_up = false;
            network.primary
        };
        self.close_all(primary);
        self.executor.at(Moment::now() + down, |world| world.network.borrow_mut().is_up = true);
    }

    /// Replaces the primary's data by `kept`. All other leases are lost.
    fn lose_data(&self, kept: &Node) {
        let now = Moment::now();
        let lost: Vec<LockName> = {
            let mut network = self.network.borrow_mut();
            let now_ms = network.clock.now_ms(now);
            let mut kept = kept.clone();
            let names: Vec<LockName> = network.primary().locks.keys().cloned().collect();
            let is_lost = |name: &LockName| {
                let has = network.primary().holder(name, now_ms);
                let keeps = kept.holder(name, now_ms);
                has.is_some_and(|(token, ends)| keeps.is_none_or(|(kept, kept_ends)| kept != token || kept_ends < ends))
            };
            names.into_iter().filter(is_lost).collect()
        };
        for name in &lost {
            self.disown(name);
        }
        let mut network = self.network.borrow_mut();
        let primary = network.primary();
        let is_replica = primary.is_replica;
        *primary = Node { is_replica, ..kept.clone() };
        drop(network);
        self.checks.borrow_mut().data_lost();
    }

    fn demote(self: &Rc<Self>, copy: Option<Node>, resolves_after: Duration) {
        self.saw(if copy.is_some() { Situation::FaultLossyDemotion } else { Situation::FaultDemotion });
        self.disturb(None);
        if let Some(copy) = &copy {
            self.lose_data(copy);
        }
        let new = {
            let mut network = self.network.borrow_mut();
            let primary = network.primary().clone();
            network.primary().is_replica = true;
            network.nodes.push(primary);
            network.primary = network.nodes.len() - 1;
            network.primary
        };
        let at = Moment::now() + resolves_after;
        self.disturb_until(None, at);
        self.executor.at(at, move |world| {
            let mut network = world.network.borrow_mut();
            network.resolves_to = network.resolves_to.max(new);
        });
    }

    /// Another kind of client takes a lock, and deletes its key later without a message.
    fn take_foreign(self: &Rc<Self>, name: &LockName, lasts: Duration) {
        let now = Moment::now();
        let mut network = self.network.borrow_mut();
        let now_ms = network.clock.now_ms(now);
        let lock = network.primary().locks.entry(name.clone()).or_default();
        lock.lapse(now_ms);
        if lock.slot != Slot::Free {
            return;
        }
        self.saw(Situation::FaultForeign);
        lock.slot = Slot::Foreign { value: "another".into(), ends_ms: Some(now_ms + 30_000) };
        let name = name.clone();
        drop(network);
        self.executor.at(now + lasts, move |world| {
            let mut network = world.network.borrow_mut();
            if let Some(lock) = network.primary().locks.get_mut(&name)
                && matches!(lock.slot, Slot::Foreign { .. })
            {
                lock.slot = Slot::Free;
            }
        });
    }
}

impl Fault {
    fn words(&self) -> String {
        match self {
            Self::Cut { process, forwards: true, noticed_after } => {
                format!("P{} is cut off; what it sent still runs for {noticed_after:?}", process + 1)
            }
            Self::Cut { process, .. } => format!("P{} is cut off, and what it sent is lost", process + 1),
            Self::Stall { process, lasts } => {
                format!("messages from and to P{} are held up for {lasts:?}", process + 1)
            }
            Self::Mute { process, lasts } => {
                format!("messages of the server to P{} are lost for {lasts:?}", process + 1)
            }
            Self::Duplicate { process } => format!("the next message to P{} arrives twice", process + 1),
            Self::Pause { process, lasts } => format!("P{} is stopped for {lasts:?}", process + 1),
            Self::Crash { process, restarts_after } => {
                format!("P{} crashes, and is started again after {restarts_after:?}", process + 1)
            }
            Self::Restart { down, keeps_data: true } => format!("the server restarts with its data, after {down:?}"),
            Self::Restart { down, .. } => format!("the server restarts without data, after {down:?}"),
            Self::Flush => "all keys are deleted".into(),
            Self::Delete { name } => format!("the key of {name} is deleted"),
            Self::Demote { loses, resolves_after } => {
                format!(
                    "the primary is demoted, {loses:?} of writes are lost, its name follows after {resolves_after:?}"
                )
            }
            Self::Hang { lasts } => format!("the server hangs for {lasts:?}"),
            Self::Foreign { name, lasts } => format!("another kind of client holds {name} for {lasts:?}"),
        }
    }
}
