//! Everything a command has started, and the end of all of it.
//!
//! Front, keeper and guardian are *subreapers*: a process below them that loses its parent becomes their child, even if it
//! has left its group and session and closed all descriptors. So ancestry alone finds the whole tree, and the tree is
//! dead when there is no child left to wait for.

use std::collections::HashMap;
use std::fs;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, getpid, kill_process, set_child_subreaper, wait};

/// Makes this process the parent of every process below it that loses its own.
pub(super) fn become_subreaper() {
    // A kernel before 3.4 refuses: then daemons are not found.
    let _ = set_child_subreaper(Some(getpid()));
}

/// The result of [`reap`].
pub(super) enum Reaped {
    /// This child ended, was stopped or was continued.
    Child(Pid, WaitStatus),
    /// Nothing happened to any child.
    Nothing,
    /// There is no child.
    NoChildren,
}

/// Returns one change of a child, and does not wait for one.
pub(super) fn reap() -> Reaped {
    loop {
        match wait(WaitOptions::NOHANG | WaitOptions::UNTRACED | WaitOptions::CONTINUED) {
            Ok(Some((pid, status))) => return Reaped::Child(pid, status),
            Ok(None) => return Reaped::Nothing,
            Err(Errno::INTR) => {}
            Err(_) => return Reaped::NoChildren,
        }
    }
}

/// Sends a signal to every process below this one. Returns the processes that this user may not signal.
pub(super) fn signal_all(signal: Signal) -> Vec<Pid> {
    let mut not_permitted = Vec::new();
    for pid in descendants(getpid()) {
        if kill_process(pid, signal) == Err(Errno::PERM) {
            not_permitted.push(pid);
        }
    }
    not_permitted
}

/// Returns whether a process is stopped, by a signal or by a debugger.
pub(super) fn is_stopped(pid: Pid) -> bool {
    stat(&pid.as_raw_nonzero().to_string()).is_some_and(|(state, _)| matches!(state, 'T' | 't'))
}

/// Returns every living process below `root`.
fn descendants(root: Pid) -> Vec<Pid> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if let Ok(pid) = name.parse::<i32>()
            && let Some((state, parent)) = stat(name)
        {
            // A zombie has no children, and its own parent reaps it.
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

/// Returns a process's state and parent.
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
        while descendants(pid).len() < 2 {
            std::thread::yield_now();
        }
        assert!(descendants(getpid()).contains(&pid));
        assert!(!is_stopped(pid));
        for sleep in descendants(pid) {
            kill_process(sleep, Signal::KILL).expect("permitted");
        }
        child.wait().expect("the shell ends with its sleep");
        assert!(descendants(pid).is_empty());
    }
}
