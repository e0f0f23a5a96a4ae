//! What makes one task's figure steady. With one task a pair of requests is mostly the kernel's work, and
//! two things of its would decide the figure, whoever is measured: how an idle processor finds back to
//! work, and whether it puts client and server on one processor (up to 1.6 times as fast) or on two.

use std::process::{Child, Command, Stdio};

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};

/// One endless loop per processor, which runs only while nothing else wants to; ended when dropped.
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

/// The server on one processor and we on another, until dropped. Nothing with one processor alone.
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

/// All of this process on one processor, until dropped: what two threads pass to each other costs the same each time.
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

/// Every thread of the process; one that has ended meanwhile needs no place.
fn pin(process: u32, to: &CpuSet) {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).expect("it runs");
    for thread in threads.flatten() {
        let id = thread.file_name().to_string_lossy().parse().ok().and_then(Pid::from_raw);
        if let Some(id) = id {
            let _ = sched_setaffinity(Some(id), to);
        }
    }
}
