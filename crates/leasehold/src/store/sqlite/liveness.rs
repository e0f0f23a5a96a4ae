//! Liveness: each open store has a FIFO, `<db>.alive/<id>`, which is open as long as its owner lives.
//!
//! Opening it for writing fails with `ENXIO` if no process has it open. A byte written to it wakes up its owner. A
//! descriptor that is open for writing becomes readable with `POLLERR` when the owner dies. All of that works across
//! users, pid namespaces and containers. An id is never used twice.
//!
//! Only `ENXIO` proves a death. A missing FIFO proves nothing: the directory may have been removed, or be another one.
//! So a process that closes the store closes its FIFO but keeps the file, and `sweep` removes the file when no row
//! names it.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{CWD, Mode, OFlags, mkfifoat, open};
use rustix::io::Errno;

use super::path::{beside, unusable};
use super::permissions::{Sharing, tighten};
use crate::facts::Token;
use crate::machine::InboxId;
use crate::store::StoreError;

/// Characters of an id, which have 96 random bits.
const ID_CHARS: usize = 16;
/// Attempts to create a FIFO: another process that sweeps the directory can remove it before it is open.
const CREATE_TRIES: usize = 16;

/// Our own FIFO, and access to those of other stores.
pub(super) struct Liveness {
    dir: PathBuf,
    id: InboxId,
    /// `None` after this store was closed.
    fifo: Mutex<Option<Arc<OwnedFd>>>,
}

/// Numbers of other processes that have the store open.
#[derive(Default)]
pub(super) struct OtherProcesses {
    pub(super) alive: usize,
    /// Processes whose FIFO may not be opened.
    pub(super) unknown: usize,
}

/// The `.alive` directory of a database.
pub(super) fn directory_of(db: &Path) -> PathBuf {
    beside(db, ".alive")
}

/// A random id of 96 bits.
pub(super) fn random_id() -> String {
    Token::random().reveal().chars().take(ID_CHARS).collect()
}

impl Liveness {
    /// Creates the FIFO of this store in an existing directory.
    pub(super) fn create(dir: PathBuf, sharing: Sharing) -> Result<Self, StoreError> {
        let mut last = Errno::NOENT;
        for _ in 0..CREATE_TRIES {
            let id = random_id();
            match make_fifo(&dir, &id, sharing) {
                Ok(fifo) => {
                    return Ok(Self { dir, id: InboxId(id.into()), fifo: Mutex::new(Some(Arc::new(fifo))) });
                }
                Err(error) => last = error,
            }
        }
        Err(unusable(&dir, &last))
    }

    /// The id of this store.
    pub(super) fn id(&self) -> &InboxId {
        &self.id
    }

    /// Our FIFO for reading; `None` after this store was closed.
    pub(super) fn fifo(&self) -> Option<Arc<OwnedFd>> {
        self.fifo.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns a second descriptor of our FIFO. This store counts as alive while any process has one open.
    pub(super) fn lifeline(&self) -> Option<OwnedFd> {
        self.fifo()?.try_clone().ok()
    }

    /// Whether an owner is certainly dead. If that is unknown, its lease decides.
    pub(super) fn is_gone(&self, id: &InboxId) -> bool {
        self.is_there(id) == Some(false)
    }

    /// Whether an owner is alive; `None` if that is unknown, because its FIFO is missing or may not be opened.
    pub(super) fn is_there(&self, id: &InboxId) -> Option<bool> {
        if *id == self.id {
            return Some(true);
        }
        liveness(self.reach(id))
    }

    /// Whether the FIFO of an owner is missing.
    pub(super) fn is_missing(&self, id: &InboxId) -> bool {
        *id != self.id && matches!(self.reach(id), Err(Errno::NOENT))
    }

    /// Counts the other processes that have the store open.
    pub(super) fn others(&self) -> OtherProcesses {
        let mut others = OtherProcesses::default();
        for id in self.names().filter(|id| **id != *self.id.0 && !id.starts_with('.')) {
            match reach(&self.dir.join(id)) {
                Ok(_) => others.alive += 1,
                Err(Errno::ACCESS | Errno::PERM) => others.unknown += 1,
                Err(_) => {}
            }
        }
        others
    }

    /// Returns a descriptor that becomes readable with an error when its owner dies; `None` if the owner is dead, or
    /// its FIFO is missing or may not be opened.
    pub(super) fn watch(&self, id: &InboxId) -> Option<OwnedFd> {
        self.reach(id).ok()
    }

    /// Wakes up an owner. If its FIFO is full, it has a wake-up pending; a dead owner needs none.
    pub(super) fn wake(&self, id: &InboxId) {
        if *id == self.id {
            if let Some(fifo) = self.fifo() {
                let _ = rustix::io::write(&*fifo, &[1]);
            }
        } else if let Ok(end) = self.reach(id) {
            let _ = rustix::io::write(&end, &[1]);
        }
    }

    /// Lists the names of all files in the directory.
    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok())
    }

    /// Whether a file in the directory is a FIFO that no process has open.
    pub(super) fn is_orphaned(&self, name: &str) -> bool {
        matches!(reach(&self.dir.join(name)), Err(Errno::NXIO))
    }

    /// Removes the file of a dead owner that no row names.
    pub(super) fn remove(&self, name: &str) {
        let _ = fs::remove_file(self.dir.join(name));
    }

    /// Closes our FIFO. From now on other processes see that this store is gone.
    pub(super) fn leave(&self) {
        drop(self.fifo.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    fn reach(&self, id: &InboxId) -> Result<OwnedFd, Errno> {
        reach_in(&self.dir, &id.0)
    }
}

/// Whether the owner of a FIFO in a directory is certainly dead. For use without an open store.
pub(super) fn is_gone_in(dir: &Path, id: &str) -> bool {
    liveness(reach_in(dir, id)) == Some(false)
}

fn liveness(reached: Result<OwnedFd, Errno>) -> Option<bool> {
    match reached {
        Ok(_) => Some(true),
        Err(Errno::NXIO) => Some(false),
        Err(_) => None,
    }
}

fn reach_in(dir: &Path, id: &str) -> Result<OwnedFd, Errno> {
    // The id comes from the database and becomes a file name, so only the characters of an id are allowed.
    if !id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-') {
        return Err(Errno::INVAL);
    }
    reach(&dir.join(id))
}

fn reach(path: &Path) -> Result<OwnedFd, Errno> {
    open(path, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())
}

/// Creates and opens a FIFO. It has a hidden name until it is open, so that a visible one always has an owner.
fn make_fifo(dir: &Path, id: &str, sharing: Sharing) -> Result<OwnedFd, Errno> {
    let (hidden, shown) = (dir.join(format!(".{id}")), dir.join(id));
    mkfifoat(CWD, &hidden, Mode::RUSR | Mode::WUSR)?;
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fifo = open(&hidden, flags, Mode::empty())?;
    // Every user who may write to the database may check whether this process is alive.
    let _ = sharing.apply(&fifo);
    fs::rename(&hidden, &shown).map_err(|_| Errno::NOENT)?;
    Ok(fifo)
}

/// Creates the directory with the permissions of the database.
pub(super) fn make_dir(dir: &Path, sharing: Sharing) -> std::io::Result<()> {
    if dir.is_dir() {
        tighten(dir);
        return Ok(());
    }
    match fs::create_dir(dir) {
        Ok(()) => sharing.apply_to_dir(dir),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}
