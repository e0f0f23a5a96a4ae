//! Keeps measurements of a single task stable. With one task, a pair of requests is mostly work of the kernel, and two of
//! its decisions would dominate every result: how an idle processor wakes up, and whether client and server run on one
//! processor (which is faster) or on two.

use std::process::{Child, Command, Stdio};

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

/// One endless loop per processor, at idle priority, so that no processor sleeps. Dropping it ends the loops.
pub(crate) struct Awake(Vec<Child>);

impl Awake {
    pub(crate) fn keep() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let mut idle = Command::new("chrt");
        idle.args(["--idle", "0", "sh", "-c", "while :; do :; done"]).stdin(Stdio::null());
        Self((0..processors).map(|_| idle.spawn().expect("chrt starts (package util-linux)")).collect())
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Pins the server to one processor and this process to another, until dropped. Does nothing with only one processor.
pub(crate) struct Apart {
    server: u32,
    before: CpuSet,
}

impl Apart {
    pub(crate) fn keep(server: u32) -> Self {
        let before = sched_getaffinity(None).expect("readable");
        let mut ours = (0..CpuSet::MAX_CPU).filter(|cpu| before.is_set(*cpu));
        if let (Some(first), Some(second)) = (ours.next(), ours.next()) {
            pin(server, &only(first));
            pin(std::process::id(), &only(second));
        }
        Self { server, before }
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        pin(self.server, &self.before);
        pin(std::process::id(), &self.before);
    }
}

/// Pins this process to one processor, until dropped, so that a message between two threads always costs the same.
pub(crate) struct Together(CpuSet);

impl Together {
    pub(crate) fn keep() -> Self {
        let before = sched_getaffinity(None).expect("readable");
        if let Some(first) = (0..CpuSet::MAX_CPU).find(|cpu| before.is_set(*cpu)) {
            pin(std::process::id(), &only(first));
        }
        Self(before)
    }
}

impl Drop for Together {
    fn drop(&mut self) {
        pin(std::process::id(), &self.0);
    }
}

fn only(cpu: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(cpu);
    set
}

/// Pins every thread of the process. A thread that has ended in the meantime is skipped.
fn pin(process: u32, to: &CpuSet) {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).expect("the process runs");
    for thread in threads.flatten() {
        let id = thread.file_name().to_string_lossy().parse().ok().and_then(Pid::from_raw);
        if let Some(id) = id {
            let _ = sched_setaffinity(Some(id), to);
        }
    }
}
