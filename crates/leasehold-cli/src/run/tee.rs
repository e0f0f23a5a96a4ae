//! What a command writes, passed on as it comes and kept for those who did not run it.
//!
//! A thread per stream: whoever reads slowly slows the command down, as without us, and never the renewal
//! of the lease.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::sync::oneshot;

/// What is kept of each of the two streams.
pub(super) const KEPT_BYTES_MAX: usize = 480 * 1024;
/// What is still read of a stream after the command has ended: more than a pipe holds. Something else may
/// go on writing to it for ever.
const LATE_BYTES_MAX: usize = 2 * 1024 * 1024;

/// One stream of a command.
pub(super) struct Tee {
    /// Closed to say that the command has ended.
    running: OwnedFd,
    kept: oneshot::Receiver<Kept>,
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
        let (done, kept) = oneshot::channel();
        std::thread::Builder::new().name("leasehold-tee".into()).spawn(move || {
            // Nobody waits for it any more when the lease was lost.
            let _ = done.send(pump(File::from(from), File::from(to), &ended));
        })?;
        Ok((Self { running, kept }, commands_end))
    }

    /// All that the command wrote before its end.
    pub(super) async fn finish(self) -> Kept {
        drop(self.running);
        self.kept.await.unwrap_or_default()
    }
}

fn pump(mut from: File, mut to: File, ended: &OwnedFd) -> Kept {
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
        passing = passing && to.write_all(&buffer[..read]).is_ok();
    }
}

#[cfg(test)]
mod tests {
    use std::io::pipe;

    use super::*;

    #[tokio::test]
    async fn all_is_passed_on_and_the_beginning_is_kept() {
        let (mut seen, to) = pipe().expect("a pipe");
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            seen.read_to_end(&mut all).map(|_| all)
        });
        let (tee, commands_end) = Tee::start(to.into()).expect("a thread");
        let large = vec![7; KEPT_BYTES_MAX + 100_000];
        let written = large.clone();
        tokio::task::spawn_blocking(move || File::from(commands_end).write_all(&written))
            .await
            .expect("no panic")
            .expect("written");
        let kept = tee.finish().await;
        assert_eq!((kept.bytes.len(), kept.total), (KEPT_BYTES_MAX, large.len() as u64));
        assert!(reader.join().expect("no panic").expect("read") == large);
    }

    #[tokio::test]
    async fn what_goes_on_in_the_background_is_not_waited_for() {
        let (_seen, to) = pipe().expect("a pipe");
        let (tee, commands_end) = Tee::start(to.into()).expect("a thread");
        File::from(commands_end.try_clone().expect("a copy")).write_all(b"before the end").expect("written");
        let kept = tee.finish().await;
        assert_eq!(kept.bytes, b"before the end");
        drop(commands_end);
    }
}
