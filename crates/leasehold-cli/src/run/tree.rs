//! Everything a command has started, and the end of all of it.
//!
//! Both processes of a run are *subreapers*: whatever loses its parent becomes their child, however
//! it left its group, session, descriptors or environment behind. So the tree is found by ancestry
//! alone, and it is dead, all of it, when there is no child left to wait for.

use std::collections::HashMap;
use std::fs;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, getpid, kill_process, set_child_subreaper, wait};

/// Takes in every orphan below this process from now on.
pub(super) fn adopt_orphans() {
    // An ancient kernel refuses: then what was orphaned on purpose is not found.
    let _ = set_child_subreaper(Some(getpid()));
}

/// What there is to wait for.
pub(super) enum Reaped {
    /// Something happened to this child.
    Child(Pid, WaitStatus),
    /// Nothing at the moment.
    Nothing,
    /// Nobody is left.
    Nobody,
}

/// Takes note of one child that ended, stopped or went on, without waiting.
pub(super) fn reap() -> Reaped {
    loop {
        match wait(WaitOptions::NOHANG | WaitOptions::UNTRACED | WaitOptions::CONTINUED) {
            Ok(Some((pid, status))) => return Reaped::Child(pid, status),
            Ok(None) => return Reaped::Nothing,
            Err(Errno::INTR) => {}
            Err(_) => return Reaped::Nobody,
        }
    }
}

/// Sends a signal to everything below this process. Returns those who may not be signalled.
pub(super) fn signal_all(signal: Signal) -> Vec<Pid> {
    let mut refused = Vec::new();
    for pid in below(getpid()) {
        if kill_process(pid, signal) == Err(Errno::PERM) {
            refused.push(pid);
        }
    }
    refused
}

/// Whether a process stands still, by a signal or by a debugger.
pub(super) fn is_stopped(pid: Pid) -> bool {
    stat(&pid.as_raw_nonzero().to_string()).is_some_and(|(state, _)| matches!(state, 'T' | 't'))
}

/// Every living process below one.
fn below(root: Pid) -> Vec<Pid> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if let Ok(pid) = name.parse::<i32>()
            && let Some((state, parent)) = stat(name)
        {
            // A zombie has no children; its own parent buries it.
            if !matches!(state, 'Z' | 'X') {
                children.entry(parent).or_default().push(pid);
            }
        }
    }
    let mut found: Vec<i32> = vec![root.as_raw_nonzero().get()];
    let mut next = 0;
    while let Some(pid) = found.get(next) {
        found.extend(children.remove(pid).unwrap_or_default());
        next += 1;
    }
    found.into_iter().skip(1).filter_map(Pid::from_raw).collect()
}

/// A process's state and parent.
fn stat(pid: &str) -> Option<(char, i32)> {
    let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let text = String::from_utf8_lossy(&text);
    // The second field is the program's name in parentheses, which can contain anything.
    let mut fields = text.rsplit_once(") ")?.1.split(' ');
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn finds_children_and_grandchildren() {
        let mut child = Command::new("sh").args(["-c", "sleep 60 & sleep 60"]).spawn().expect("sh");
        let pid = Pid::from_child(&child);
        // Both sleeps are there once the shell has started them.
        while below(pid).len() < 2 {
            std::thread::yield_now();
        }
        assert!(below(getpid()).contains(&pid));
        assert!(!is_stopped(pid));
        for sleep in below(pid) {
            kill_process(sleep, Signal::KILL).expect("ours to kill");
        }
        child.wait().expect("the shell ends with its sleep");
        assert!(below(pid).is_empty());
    }
}
