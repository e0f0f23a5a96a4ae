//! The database is removed or replaced while we have it open.
//!
//! We would go on with a file that no other process can find, and another process with a new one. So the path is
//! compared with the open file: before every renewal, and for everything else at most a millisecond before.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::driver::{Command, Driver};
use super::path::{beside, unusable};
use crate::clock::Moment;
use crate::store::{Left, Push, Release, Renewed, StoreError, StoreErrorKind};

/// Between two looks, for commands other than renewals.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Which files are open: the database, its log and its shared memory, by device and inode.
pub(super) struct Opened {
    files: [(PathBuf, (u64, u64)); 3],
    looked: Moment,
    /// The first file that was found to be another.
    displaced: Option<PathBuf>,
}

impl Opened {
    /// Notes the files of a connection that has just been opened. Its log and shared memory exist by then.
    pub(super) fn note(db: &Path) -> Result<Self, StoreError> {
        let file = |path: PathBuf| {
            let found = inode(&path).map_err(|e| unusable(&path, &e))?;
            Ok::<_, StoreError>((path, found))
        };
        let files = [file(db.to_owned())?, file(beside(db, "-wal"))?, file(beside(db, "-shm"))?];
        Ok(Self { files, looked: Moment::now(), displaced: None })
    }

    /// The same after the files were closed for a fork: the database must still be the one that was noted.
    pub(super) fn reopened(&mut self, db: &Path) -> Result<(), StoreError> {
        let now = Self::note(db)?;
        if now.files[0].1 != self.files[0].1 {
            self.displaced = Some(db.to_owned());
        }
        self.files = now.files;
        Ok(())
    }

    /// The file that was removed or replaced, if one was. Once found it stays so.
    fn look(&mut self, now: Moment) -> Option<&Path> {
        self.looked = now;
        if self.displaced.is_none() {
            let other = self.files.iter().find(|(path, known)| inode(path).ok().as_ref() != Some(known));
            self.displaced = other.map(|(path, _)| path.clone());
            if let Some(path) = &self.displaced {
                tracing::error!(
                    path = %path.display(),
                    "the database was removed or replaced while in use: every lease in it is lost; start this program again"
                );
            }
        }
        self.displaced.as_deref()
    }
}

fn inode(path: &Path) -> std::io::Result<(u64, u64)> {
    fs::metadata(path).map(|meta| (meta.dev(), meta.ino()))
}

impl Driver {
    /// Answers every command itself when the database is not where it was; else hands them back.
    pub(super) fn unless_displaced(&mut self, batch: Vec<Command>) -> Vec<Command> {
        let renews = batch.iter().any(|command| matches!(command, Command::Renew(..)));
        let now = Moment::now();
        if !renews && self.opened.displaced.is_none() && self.opened.looked.until(now) < LOOK_EVERY {
            return batch;
        }
        let Some(path) = self.opened.look(now) else { return batch };
        let text = format!(
            "{} was removed or replaced while this process had it open; start this program again to use what is there now",
            path.display()
        );
        let error = StoreError::new(StoreErrorKind::File, text).unsent();
        batch.into_iter().filter_map(|command| self.refuse_displaced(command, &error)).collect()
    }

    fn refuse_displaced(&mut self, command: Command, error: &StoreError) -> Option<Command> {
        let error = || error.clone();
        match command {
            Command::Renew(renewals, reply) => drop(reply.send(vec![Renewed::Displaced; renewals.len()])),
            // What was held is held no more.
            Command::Release(_, _, reply) => drop(reply.send(Ok(Release::NotOwner))),
            Command::Leave(name, token, reply) => {
                self.waits.remove(&name, &token);
                let _ = reply.send(Ok(Left::WasWaiting));
            }
            Command::Try(_, reply) => drop(reply.send(Err(error()))),
            Command::Acquire(_, _, reply) => drop(reply.send(Err(error()))),
            Command::Ticket(reply) => drop(reply.send(Err(error()))),
            Command::Evict(.., reply) => drop(reply.send(Err(error()))),
            Command::AskToFinish(.., reply) => drop(reply.send(Err(error()))),
            Command::Create(_, reply) => drop(reply.send(Err(error()))),
            Command::Read(_, reply) => drop(reply.send(Err(error()))),
            Command::Change(_, reply) => drop(reply.send(Err(error()))),
            Command::Tell(_, reply) | Command::Count(_, reply) => drop(reply.send(Err(error()))),
            Command::Holder(_, reply) => drop(reply.send(Err(error()))),
            Command::List { reply, .. } => drop(reply.send(Err(error()))),
            Command::Queue(_, reply) => drop(reply.send(Err(error()))),
            Command::Counters(reply) => drop(reply.send(Err(error()))),
            Command::Events { reply, .. } => drop(reply.send(Err(error()))),
            Command::Check(reply) => drop(reply.send(Err(error()))),
            Command::Checkup(reply) => drop(reply.send(Err(error()))),
            Command::Expire(_, done) => drop(done.send(())),
            // Our waiters ask at once, and are refused.
            Command::Heard | Command::LookAround => self.wake_waiters(),
            Command::Provisional(_) | Command::LooksAround(_) => {}
            keep @ (Command::StandAside | Command::Close(_)) => return Some(keep),
        }
        None
    }

    fn wake_waiters(&mut self) {
        for token in self.waits.take_tokens() {
            let _ = self.pushes.send(Push::LookAgain { token, after: Duration::ZERO });
        }
        self.watch.set_waiting(0, &self.alive);
    }
}
