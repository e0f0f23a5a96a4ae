//! Signals to child processes.

use rustix::process::{Pid, Signal, kill_process};

/// Sends a signal to a child that was not waited for yet, so its process id cannot have been reused.
pub(crate) fn send_signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a child's id is positive");
    kill_process(pid, signal).expect("a child can be signalled");
}
