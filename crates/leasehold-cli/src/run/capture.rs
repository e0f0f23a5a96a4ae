//! Copies a command's output to the keeper's, and keeps the beginning of it for the stored result.
//!
//! Each stream has a thread: a slow reader slows the command down, as it would without `leasehold`, and never the renewal of the
//! lease.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::pipe::{PIPE_BUF, PipeFlags, pipe_with};
use tokio::sync::oneshot;

/// The most bytes of each of the two streams that are stored.
pub(super) const CAPTURED_BYTES_MAX: usize = 480 * 1024;
/// The most bytes of a stream that are read after the command has ended: more than a pipe holds. A background process
/// may go on writing to the pipe for ever.
const LATE_BYTES_MAX: usize = 2 * 1024 * 1024;

/// The capture of one stream of a command.
pub(super) struct Capture {
    /// Closed to tell the thread that the command has ended.
    running: Option<OwnedFd>,
    /// Closed to tell the thread to capture the rest and not to forward it.
    forwarding: Option<OwnedFd>,
    result: oneshot::Receiver<Captured>,
    /// The result, once it is received.
    finished: Option<Captured>,
}

/// The beginning of a stream, and its length.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Captured {
    /// At most [`CAPTURED_BYTES_MAX`] bytes from the beginning.
    pub(super) bytes: Vec<u8>,
    /// The number of bytes that were written.
    pub(super) total: u64,
}

impl Capture {
    /// Starts to copy to `to`. Returns the capture, and the end of the pipe that the command writes to.
    pub(super) fn start(to: OwnedFd) -> io::Result<(Self, OwnedFd)> {
        let (from, commands_end) = pipe_with(PipeFlags::CLOEXEC)?;
        let (ended, running) = pipe_with(PipeFlags::CLOEXEC)?;
        let (stop, forwarding) = pipe_with(PipeFlags::CLOEXEC)?;
        let (send_result, result) = oneshot::channel();
        std::thread::Builder::new().name("leasehold-copy".into()).spawn(move || {
            // When the lease was lost there is no receiver.
            let _ = send_result.send(copy(File::from(from), &to, &ended, &stop));
        })?;
        Ok((Self { running: Some(running), forwarding: Some(forwarding), result, finished: None }, commands_end))
    }

    /// Waits until everything that the command wrote before its end is forwarded.
    ///
    /// Cancel safe: it can be called again.
    pub(super) async fn finish(&mut self) {
        self.running = None;
        if self.finished.is_none() {
            self.finished = Some((&mut self.result).await.unwrap_or_default());
        }
    }

    /// Returns what the command wrote, once the capture is [finished](Self::finish).
    pub(super) fn captured(self) -> Captured {
        self.finished.unwrap_or_default()
    }

    /// Stops forwarding, so that a reader that does not read is not waited for.
    pub(super) fn stop_forwarding(&mut self) {
        self.forwarding = None;
    }
}

/// Copies until the command has ended and its pipe is empty.
fn copy(mut from: File, to: &OwnedFd, ended: &OwnedFd, stop: &OwnedFd) -> Captured {
    let mut captured = Captured::default();
    let mut buffer = vec![0; 64 * 1024];
    let (mut forwarding, mut late) = (true, 0);
    loop {
        let (readable, over) = {
            let mut ends = [PollFd::new(&from, PollFlags::IN), PollFd::new(ended, PollFlags::IN)];
            if poll(&mut ends, None).is_err() {
                continue;
            }
            (!ends[0].revents().is_empty(), !ends[1].revents().is_empty())
        };
        // Everything that the command wrote before it ended is in the pipe by now.
        if (over && !readable) || late > LATE_BYTES_MAX {
            return captured;
        }
        if !readable {
            continue;
        }
        let read = match from.read(&mut buffer) {
            Ok(0) => return captured,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return captured,
        };
        late += if over { read } else { 0 };
        captured.total += read as u64;
        let room = CAPTURED_BYTES_MAX - captured.bytes.len();
        captured.bytes.extend_from_slice(&buffer[..read.min(room)]);
        // The reader may have closed the pipe (`| head`); the result is captured all the same.
        forwarding = forwarding && forward(to, &buffer[..read], stop);
    }
}

/// Writes at the reader's pace. Returns whether to go on: `false` if the reader closed the pipe, or at `stop`.
fn forward(to: &OwnedFd, mut bytes: &[u8], stop: &OwnedFd) -> bool {
    while !bytes.is_empty() {
        let mut ends = [PollFd::new(to, PollFlags::OUT), PollFd::new(stop, PollFlags::IN)];
        if poll(&mut ends, None).is_err() {
            continue;
        }
        if !ends[1].revents().is_empty() {
            return false;
        }
        // A pipe that is writable has room for at least this many bytes.
        match rustix::io::write(to, &bytes[..bytes.len().min(PIPE_BUF)]) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(_) => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use std::io::{Write, pipe};

    use super::*;

    #[tokio::test]
    async fn everything_is_forwarded_and_the_beginning_is_captured() {
        let (mut seen, to) = pipe().expect("a pipe");
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            seen.read_to_end(&mut all).map(|_| all)
        });
        let (mut capture, commands_end) = Capture::start(to.into()).expect("a thread");
        let large = vec![7; CAPTURED_BYTES_MAX + 100_000];
        let written = large.clone();
        tokio::task::spawn_blocking(move || File::from(commands_end).write_all(&written))
            .await
            .expect("no panic")
            .expect("written");
        capture.finish().await;
        let captured = capture.captured();
        assert_eq!((captured.bytes.len(), captured.total), (CAPTURED_BYTES_MAX, large.len() as u64));
        assert!(reader.join().expect("no panic").expect("read") == large);
    }

    #[tokio::test]
    async fn a_background_process_that_holds_the_pipe_is_not_waited_for() {
        let (_seen, to) = pipe().expect("a pipe");
        let (mut capture, commands_end) = Capture::start(to.into()).expect("a thread");
        File::from(commands_end.try_clone().expect("a copy")).write_all(b"before the end").expect("written");
        capture.finish().await;
        let captured = capture.captured();
        assert_eq!(captured.bytes, b"before the end");
        drop(commands_end);
    }
}
