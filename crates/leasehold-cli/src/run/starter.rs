//! The guardian's thread that starts CMD: a program on a file system that hangs must not keep the guardian from killing.

use std::io::{self, PipeReader};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, Sender, channel};

use leasehold::lease::Moment;
use rustix::process::Pid;

use super::command::{self, Start};

/// The thread, from its creation until its result is taken.
pub(super) struct Starter {
    requests: Sender<Start>,
    results: Receiver<(io::Result<Pid>, Moment)>,
    /// Readable when there is a result.
    done: PipeReader,
}

impl Starter {
    /// Creates the thread, which waits for [`start`](Self::start).
    pub(super) fn spawn() -> io::Result<Self> {
        let (done, closed_when_done) = io::pipe()?;
        let (requests, requested) = channel::<Start>();
        let (send_result, results) = channel();
        std::thread::Builder::new().spawn(move || {
            let Ok(start) = requested.recv() else { return };
            let started = command::start(&start);
            let _ = send_result.send((started, Moment::now()));
            drop(closed_when_done);
            leave_session(start.group);
        })?;
        Ok(Self { requests, results, done })
    }

    /// Has CMD started by the thread.
    pub(super) fn start(&self, start: Start) {
        let _ = self.requests.send(start);
    }

    /// Returns CMD's process id or the error, and the moment of the start, once the thread is done.
    pub(super) fn result(&self) -> Option<(io::Result<Pid>, Moment)> {
        self.results.try_recv().ok()
    }
}

impl AsFd for Starter {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.done.as_fd()
    }
}

/// Moves this process from a group of its own to a session of its own.
///
/// As CMD's parent in another group of the same session the guardian keeps CMD's group from being orphaned. Where no
/// other process does, as in a cron job, that group would become orphaned when CMD ends, and the kernel would send SIGHUP
/// to all of it if any member were stopped. CMD has to join its group first, which it can only do within the session.
fn leave_session(group: i32) {
    // The leader of a group cannot leave its session. If either call fails, only the rule above is lost.
    let _ = rustix::process::setpgid(None, Pid::from_raw(group)).and_then(|()| rustix::process::setsid());
}
