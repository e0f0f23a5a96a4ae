//! What a command writes, passed on as it comes and kept for those who did not run it.
//!
//! A thread per stream: whoever reads slowly slows the command down, as without us, and never the renewal
//! of the lease.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::pipe::{PIPE_BUF, PipeFlags, pipe_with};
use tokio::sync::oneshot;

/// What is kept of each of the two streams.
pub(super) const KEPT_BYTES_MAX: usize = 480 * 1024;
/// What is still read of a stream after the command has ended: more than a pipe holds. Something else may
/// go on writing to it for ever.
const LATE_BYTES_MAX: usize = 2 * 1024 * 1024;

/// One stream of a command.
pub(super) struct Tee {
    /// Closed to say that the command has ended.
    running: Option<OwnedFd>,
    /// Closed to say that what comes from now on is kept and not passed on.
    passing_on: Option<OwnedFd>,
    kept: oneshot::Receiver<Kept>,
    /// What it was, once that is known.
    finished: Option<Kept>,
}

/// What a stream was.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Kept {
    /// Its beginning.
    pub(super) bytes: Vec<u8>,
    /// How long it was.
    pub(super) total: u64,
}

impl Tee {
    /// Begins to pass on to `to`. The second is for the command.
    pub(super) fn start(to: OwnedFd) -> io::Result<(Self, OwnedFd)> {
        let (from, commands_end) = pipe_with(PipeFlags::CLOEXEC)?;
        let (ended, running) = pipe_with(PipeFlags::CLOEXEC)?;
        let (enough, passing_on) = pipe_with(PipeFlags::CLOEXEC)?;
        let (done, kept) = oneshot::channel();
        std::thread::Builder::new().name("leasehold-tee".into()).spawn(move || {
            // Nobody waits for it any more when the lease was lost.
            let _ = done.send(pump(File::from(from), &to, &ended, &enough));
        })?;
        Ok((Self { running: Some(running), passing_on: Some(passing_on), kept, finished: None }, commands_end))
    }

    /// Waits until all that the command wrote before its end is passed on.
    ///
    /// Cancel safe: it can be called again.
    pub(super) async fn finish(&mut self) {
        self.running = None;
        if self.finished.is_none() {
            self.finished = Some((&mut self.kept).await.unwrap_or_default());
        }
    }

    /// What the command wrote, once it is [finished](Self::finish).
    pub(super) fn kept(self) -> Kept {
        self.finished.unwrap_or_default()
    }

    /// Stops waiting for the reader.
    pub(super) fn stop_passing_on(&mut self) {
        self.passing_on = None;
    }
}

fn pump(mut from: File, to: &OwnedFd, ended: &OwnedFd, enough: &OwnedFd) -> Kept {
    let mut kept = Kept::default();
    let mut buffer = vec![0; 64 * 1024];
    let (mut passing, mut late) = (true, 0);
    loop {
        let (readable, over) = {
            let mut ends = [PollFd::new(&from, PollFlags::IN), PollFd::new(ended, PollFlags::IN)];
            if poll(&mut ends, None).is_err() {
                continue;
            }
            (!ends[0].revents().is_empty(), !ends[1].revents().is_empty())
        };
        // What the command wrote before it ended stands in the pipe.
        if (over && !readable) || late > LATE_BYTES_MAX {
            return kept;
        }
        if !readable {
            continue;
        }
        let read = match from.read(&mut buffer) {
            Ok(0) => return kept,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return kept,
        };
        late += if over { read } else { 0 };
        kept.total += read as u64;
        let room = KEPT_BYTES_MAX - kept.bytes.len();
        kept.bytes.extend_from_slice(&buffer[..read.min(room)]);
        // Nobody reads here any more (`| head`): others still want the result.
        passing = passing && pass_on(to, &buffer[..read], enough);
    }
}

/// Writes as the reader reads. `false`: nobody reads any more, or nobody waits for it any more.
fn pass_on(to: &OwnedFd, mut bytes: &[u8], enough: &OwnedFd) -> bool {
    while !bytes.is_empty() {
        let mut ends = [PollFd::new(to, PollFlags::OUT), PollFd::new(enough, PollFlags::IN)];
        if poll(&mut ends, None).is_err() {
            continue;
        }
        if !ends[1].revents().is_empty() {
            return false;
        }
        // A pipe that has room at all has room for this much.
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
    async fn all_is_passed_on_and_the_beginning_is_kept() {
        let (mut seen, to) = pipe().expect("a pipe");
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            seen.read_to_end(&mut all).map(|_| all)
        });
        let (mut tee, commands_end) = Tee::start(to.into()).expect("a thread");
        let large = vec![7; KEPT_BYTES_MAX + 100_000];
        let written = large.clone();
        tokio::task::spawn_blocking(move || File::from(commands_end).write_all(&written))
            .await
            .expect("no panic")
            .expect("written");
        tee.finish().await;
        let kept = tee.kept();
        assert_eq!((kept.bytes.len(), kept.total), (KEPT_BYTES_MAX, large.len() as u64));
        assert!(reader.join().expect("no panic").expect("read") == large);
    }

    #[tokio::test]
    async fn what_goes_on_in_the_background_is_not_waited_for() {
        let (_seen, to) = pipe().expect("a pipe");
        let (mut tee, commands_end) = Tee::start(to.into()).expect("a thread");
        File::from(commands_end.try_clone().expect("a copy")).write_all(b"before the end").expect("written");
        tee.finish().await;
        let kept = tee.kept();
        assert_eq!(kept.bytes, b"before the end");
        drop(commands_end);
    }
}
