//! Detects that the database was removed or replaced while this process has it open.
//!
//! This process would continue with a file that no other process can find, and other processes with a new one. So the
//! path is compared with the open file: before every renewal, and at most a millisecond before any other command. The
//! path as it was given is compared too, because a symlink in it may lead to another database by now.

use std::fs;
use std::io::{Error, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, FileControl};

use super::path::{beside, unusable};
use super::schema::sqlite_error;
use crate::clock::Moment;
use crate::store::StoreError;

/// The interval between two checks, for commands other than renewals.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// The open files, by device and inode: the database, its log and its shared memory.
pub(super) struct OpenFiles {
    files: [(PathBuf, Inode); 3],
    /// The path that this process was given, if it differs.
    given: Option<PathBuf>,
    looked: Moment,
    /// The first path that led to another file.
    displaced: Option<PathBuf>,
}

type Inode = (u64, u64);

impl OpenFiles {
    /// Records the files of a connection that has just been opened. Its log and shared memory exist by then.
    pub(super) fn note(conn: &Connection, db: &Path, given: &Path) -> Result<Self, StoreError> {
        let given = (given != db).then(|| given.to_owned());
        Ok(Self { files: files_of(conn, db)?, given, looked: Moment::now(), displaced: None })
    }

    /// Records the files again after they were closed for a fork. The database must still be the same file.
    pub(super) fn reopened(&mut self, conn: &Connection, db: &Path) -> Result<(), StoreError> {
        let files = files_of(conn, db)?;
        if files[0].1 != self.files[0].1 {
            self.displaced = Some(db.to_owned());
        }
        self.files = files;
        Ok(())
    }

    /// Whether it is time to [look](Self::look) again, for commands other than renewals.
    pub(super) fn is_due(&self, now: Moment) -> bool {
        self.displaced.is_some() || self.looked.until(now) >= CHECK_INTERVAL
    }

    /// Returns the path whose file was removed or replaced, if there is one. Once found, it is permanent.
    ///
    /// # Errors
    /// When that is unknown, for example because the path may not be looked up.
    pub(super) fn look(&mut self, now: Moment) -> Result<Option<&Path>, StoreError> {
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
    conn.file_control(Some("main"), FileControl::HasMoved(&mut moved)).map_err(|e| sqlite_error(db, &e))?;
    if moved == 0 { Ok(files) } else { Err(unusable(db, &"it was removed or replaced while it was being opened")) }
}

fn inode(path: &Path) -> Result<Inode, Error> {
    fs::metadata(path).map(|meta| (meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::super::permissions::Sharing;
    use super::super::schema;
    use super::*;

    #[test]
    fn only_another_file_or_none_at_the_path_means_displaced() {
        let dir = tempfile::tempdir().expect("a directory");
        let home = dir.path().canonicalize().expect("a path");
        let (db, link, again) = (home.join("locks.db"), home.join("link.db"), home.join("again.db"));
        symlink(&db, &link).expect("linked");
        let (conn, ..) = schema::open(&db, Sharing::of(&home).expect("a directory")).expect("opens");
        let mut opened = OpenFiles::note(&conn, &db, &link).expect("noted");
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
        let refused = OpenFiles::note(&conn, &db, &db).err().expect("another file").to_string();
        assert!(refused.contains("being opened"), "{refused}");
    }
}
