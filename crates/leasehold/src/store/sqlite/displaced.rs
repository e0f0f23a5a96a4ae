//! The database is removed or replaced while we have it open.
//!
//! We would go on with a file that no other process can find, and another process with a new one. So the path is
//! compared with the open file: before every renewal, and for everything else at most a millisecond before. The path as
//! it was given is compared too: a symlink in it may lead to another database by now.

use std::fs;
use std::io::{Error, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, FileControl};

use super::driver::{Command, Driver};
use super::path::{beside, unusable};
use super::schema::refused;
use crate::clock::Moment;
use crate::store::{Left, Push, Release, Renewed, StoreError, StoreErrorKind};

/// Between two looks, for commands other than renewals.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Which files are open: the database, its log and its shared memory, by device and inode.
pub(super) struct Opened {
    files: [(PathBuf, Inode); 3],
    /// The path that this process was given, if it is another one.
    given: Option<PathBuf>,
    looked: Moment,
    /// The first path that was found to lead to another file.
    displaced: Option<PathBuf>,
}

type Inode = (u64, u64);

impl Opened {
    /// Notes the files of a connection that has just been opened. Its log and shared memory exist by then.
    pub(super) fn note(conn: &Connection, db: &Path, given: &Path) -> Result<Self, StoreError> {
        let given = (given != db).then(|| given.to_owned());
        Ok(Self { files: files_of(conn, db)?, given, looked: Moment::now(), displaced: None })
    }

    /// The same after the files were closed for a fork: the database must still be the one that was noted.
    pub(super) fn reopened(&mut self, conn: &Connection, db: &Path) -> Result<(), StoreError> {
        let files = files_of(conn, db)?;
        if files[0].1 != self.files[0].1 {
            self.displaced = Some(db.to_owned());
        }
        self.files = files;
        Ok(())
    }

    /// The path whose file was removed or replaced, if one was. Once found it stays so.
    ///
    /// # Errors
    /// When that cannot be told: the path may not be looked up, say.
    fn look(&mut self, now: Moment) -> Result<Option<&Path>, StoreError> {
        self.looked = now;
        if self.displaced.is_none()
            && let Some(path) = self.find_displaced()?
        {
            tracing::error!(
                path = %path.display(),
                "the database was removed or replaced while in use: every lease in it is lost; start this program again"
            );
            self.displaced = Some(path);
        }
        Ok(self.displaced.as_deref())
    }

    fn find_displaced(&self) -> Result<Option<PathBuf>, StoreError> {
        let given = self.given.iter().map(|given| (given, self.files[0].1));
        for (path, known) in self.files.iter().map(|(path, known)| (path, *known)).chain(given) {
            match inode(path) {
                Ok(found) if found == known => {}
                Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                    return Err(unusable(path, &error));
                }
                Ok(_) | Err(_) => return Ok(Some(path.clone())),
            }
        }
        Ok(None)
    }
}

fn files_of(conn: &Connection, db: &Path) -> Result<[(PathBuf, Inode); 3], StoreError> {
    let file = |path: PathBuf| {
        let found = inode(&path).map_err(|e| unusable(&path, &e))?;
        Ok::<_, StoreError>((path, found))
    };
    let files = [file(db.to_owned())?, file(beside(db, "-wal"))?, file(beside(db, "-shm"))?];
    let mut moved = 0;
    conn.file_control(Some("main"), FileControl::HasMoved(&mut moved)).map_err(|e| refused(db, &e))?;
    if moved == 0 { Ok(files) } else { Err(unusable(db, &"it was removed or replaced while it was being opened")) }
}

fn inode(path: &Path) -> Result<Inode, Error> {
    fs::metadata(path).map(|meta| (meta.dev(), meta.ino()))
}

impl Driver {
    /// Answers every command itself when the database is not where it was; else hands them back. Where that cannot be
    /// told, nothing is taken or renewed.
    pub(super) fn unless_displaced(&mut self, batch: Vec<Command>) -> Vec<Command> {
        let renews = batch.iter().any(|command| matches!(command, Command::Renew(..)));
        let now = Moment::now();
        if !renews && self.opened.displaced.is_none() && self.opened.looked.until(now) < LOOK_EVERY {
            return batch;
        }
        let path = match self.opened.look(now) {
            Ok(None) => return batch,
            Ok(Some(path)) => path,
            Err(error) => {
                let error = error.unsent();
                return batch.into_iter().filter_map(|command| refuse_unknown(command, &error)).collect();
            }
        };
        let text = format!(
            "{} was removed or replaced while this process had it open; start this program again to use what is there now",
            path.display()
        );
        let error = StoreError::new(StoreErrorKind::File, text).unsent();
        batch.into_iter().filter_map(|command| self.refuse_displaced(command, &error)).collect()
    }

    /// Whether the database is certainly where it was.
    pub(super) fn is_in_place(&mut self) -> bool {
        matches!(self.opened.look(Moment::now()), Ok(None))
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

/// Answers what would take or keep a lease; hands back the rest.
fn refuse_unknown(command: Command, error: &StoreError) -> Option<Command> {
    match command {
        Command::Renew(renewals, reply) => {
            drop(reply.send(vec![Renewed::Unknown(error.clone()); renewals.len()]));
        }
        Command::Try(_, reply) => drop(reply.send(Err(error.clone()))),
        Command::Acquire(_, _, reply) => drop(reply.send(Err(error.clone()))),
        other => return Some(other),
    }
    None
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::super::modes::Sharing;
    use super::super::schema;
    use super::*;

    #[test]
    fn only_another_file_or_none_at_the_path_means_displaced() {
        let dir = tempfile::tempdir().expect("a directory");
        let home = dir.path().canonicalize().expect("a path");
        let (db, link, again) = (home.join("locks.db"), home.join("link.db"), home.join("again.db"));
        symlink(&db, &link).expect("linked");
        let (conn, ..) = schema::open(&db, Sharing::of(&home).expect("a directory")).expect("opens");
        let mut opened = Opened::note(&conn, &db, &link).expect("noted");
        let mut look = || opened.look(Moment::now()).map(|path| path.map(Path::to_owned));
        assert_eq!(look(), Ok(None));
        // A path that cannot be followed says nothing about the file.
        symlink(&again, &again).expect("linked");
        fs::rename(&again, &link).expect("replaced");
        symlink(&link, &again).expect("linked");
        let error = look().expect_err("a loop");
        assert!(error.to_string().contains("link.db"), "{error}");
        symlink(&db, home.join("new")).expect("linked");
        fs::rename(home.join("new"), &link).expect("replaced");
        assert_eq!(look(), Ok(None), "it is there again");
        fs::write(home.join("other.db"), "").expect("written");
        symlink(home.join("other.db"), home.join("new")).expect("linked");
        fs::rename(home.join("new"), &link).expect("replaced");
        assert_eq!(look(), Ok(Some(link.clone())), "another database");
    }

    #[test]
    fn a_database_that_was_replaced_while_it_was_opened_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let home = dir.path().canonicalize().expect("a path");
        let db = home.join("locks.db");
        let (conn, ..) = schema::open(&db, Sharing::of(&home).expect("a directory")).expect("opens");
        fs::rename(&db, home.join("old.db")).expect("moved");
        fs::write(&db, "").expect("made");
        let refused = Opened::note(&conn, &db, &db).err().expect("another file").to_string();
        assert!(refused.contains("being opened"), "{refused}");
    }
}
