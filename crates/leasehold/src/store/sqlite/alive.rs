//! Liveness, wake-up and death notice in one: a FIFO per store, `<db>.alive/<id>`, open as long as its owner lives.
//!
//! Opened for writing it answers `ENXIO` when no process has it open; a byte written wakes its owner; an end held open
//! for writing becomes readable with `POLLERR` when the owner dies. That works across users, pid namespaces and
//! containers. An id is never used twice.
//!
//! Only `ENXIO` proves a death. A FIFO that is missing proves nothing: somebody may have removed the directory, or it may
//! be another one. So a process that leaves closes its FIFO and leaves the file, and `sweep` removes it when no row names it.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::{CWD, Mode, OFlags, mkfifoat, open};
use rustix::io::Errno;

use super::modes::{Sharing, tighten};
use super::path::{beside, unusable};
use crate::facts::Token;
use crate::machine::InboxId;
use crate::store::StoreError;

/// Characters of an id: 96 random bits.
const ID_CHARS: usize = 16;
/// Another process sweeping the directory can take a FIFO away before it is open.
const CREATE_TRIES: usize = 16;

/// Our own FIFO, and the way to every other one.
pub(super) struct Alive {
    dir: PathBuf,
    id: InboxId,
    /// `None` once this store has left.
    fifo: Mutex<Option<Arc<OwnedFd>>>,
}

/// Processes that have the store open, ourselves apart.
#[derive(Default)]
pub(super) struct Others {
    pub(super) alive: usize,
    /// Those that may not be asked.
    pub(super) unknown: usize,
}

/// The directory of a database.
pub(super) fn directory_of(db: &Path) -> PathBuf {
    beside(db, ".alive")
}

/// A random name of 96 bits.
pub(super) fn random_id() -> String {
    Token::random().reveal().chars().take(ID_CHARS).collect()
}

impl Alive {
    /// Makes this store known in a directory that exists.
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

    /// Our address.
    pub(super) fn id(&self) -> &InboxId {
        &self.id
    }

    /// Our end, to listen at; `None` once this store has left.
    pub(super) fn fifo(&self) -> Option<Arc<OwnedFd>> {
        self.fifo.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A second descriptor of our FIFO: this store counts as alive while any process has one open.
    pub(super) fn lifeline(&self) -> Option<OwnedFd> {
        self.fifo()?.try_clone().ok()
    }

    /// Whether an owner is certainly gone. Where it cannot be told, the lease decides.
    pub(super) fn is_gone(&self, id: &InboxId) -> bool {
        self.is_there(id) == Some(false)
    }

    /// Whether an owner lives; `None` where that cannot be told: its FIFO is missing, or may not be opened.
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

    /// How many others there are.
    pub(super) fn others(&self) -> Others {
        let mut others = Others::default();
        for id in self.names().filter(|id| **id != *self.id.0 && !id.starts_with('.')) {
            match reach(&self.dir.join(id)) {
                Ok(_) => others.alive += 1,
                Err(Errno::ACCESS | Errno::PERM) => others.unknown += 1,
                Err(_) => {}
            }
        }
        others
    }

    /// An end that becomes readable with an error when its owner dies; `None`: gone already, missing, or
    /// not ours to open.
    pub(super) fn watch(&self, id: &InboxId) -> Option<OwnedFd> {
        self.reach(id).ok()
    }

    /// Wakes an owner up. A full FIFO is awake already; one that is gone needs no wake-up.
    pub(super) fn wake(&self, id: &InboxId) {
        if *id == self.id {
            if let Some(fifo) = self.fifo() {
                let _ = rustix::io::write(&*fifo, &[1]);
            }
        } else if let Ok(end) = self.reach(id) {
            let _ = rustix::io::write(&end, &[1]);
        }
    }

    /// The names of all files in the directory.
    pub(super) fn names(&self) -> impl Iterator<Item = String> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok())
    }

    /// Whether a file in the directory is a FIFO that no process has open.
    pub(super) fn is_deserted(&self, name: &str) -> bool {
        matches!(reach(&self.dir.join(name)), Err(Errno::NXIO))
    }

    /// Removes the file of a dead owner that no row names.
    pub(super) fn remove(&self, name: &str) {
        let _ = fs::remove_file(self.dir.join(name));
    }

    /// Closes our FIFO. Every look from now on sees that this store is gone.
    pub(super) fn leave(&self) {
        drop(self.fifo.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    fn reach(&self, id: &InboxId) -> Result<OwnedFd, Errno> {
        reach_in(&self.dir, &id.0)
    }
}

/// Whether the owner of a FIFO in a directory is certainly gone, for a look without a store.
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
    // What is in the database becomes a file name: only an id may.
    if !id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-') {
        return Err(Errno::INVAL);
    }
    reach(&dir.join(id))
}

fn reach(path: &Path) -> Result<OwnedFd, Errno> {
    open(path, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())
}

/// Under a hidden name until it is open: a name that can be looked up is never without its owner.
fn make_fifo(dir: &Path, id: &str, sharing: Sharing) -> Result<OwnedFd, Errno> {
    let (hidden, shown) = (dir.join(format!(".{id}")), dir.join(id));
    mkfifoat(CWD, &hidden, Mode::RUSR | Mode::WUSR)?;
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fifo = open(&hidden, flags, Mode::empty())?;
    // Everybody who may write to the database may ask whether we live.
    let _ = sharing.apply(&fifo);
    fs::rename(&hidden, &shown).map_err(|_| Errno::NOENT)?;
    Ok(fifo)
}

/// Makes the directory, with the access rights of the database.
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
