//! Alive, wake-up and death notice in one: a FIFO per store, `<db>.alive/<id>`, open as long as
//! its owner lives.
//!
//! Opened for writing it answers `ENXIO` when nobody has it open; a byte written wakes its owner
//! up; an end held open for writing becomes readable with `POLLERR` when the owner dies. That works
//! across users, pid namespaces and containers. An id is never used twice.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Gid, Mode, OFlags, chmodat, chown, mkfifoat, open};
use rustix::io::Errno;

use super::path::{beside, directory, unusable};
use crate::facts::Token;
use crate::machine::InboxId;
use crate::store::StoreError;

/// Characters of an id: 96 random bits.
const ID_CHARS: usize = 16;
/// Another process sweeping the directory can take a FIFO away before it is open.
const CREATE_TRIES: usize = 16;

/// Our own FIFO, and the way to everybody else's.
pub(super) struct Alive {
    dir: PathBuf,
    id: InboxId,
    fifo: OwnedFd,
}

/// Processes that have the store open, ourselves apart.
#[derive(Default)]
pub(super) struct Others {
    pub(super) alive: usize,
    /// Those that may not be asked.
    pub(super) unknown: usize,
}

impl Alive {
    /// Makes this store known.
    pub(super) fn create(db: &Path) -> Result<Self, StoreError> {
        let dir = beside(db, ".alive");
        make_dir(&dir, directory(db)).map_err(|e| unusable(&dir, &e))?;
        let mut last = Errno::NOENT;
        for _ in 0..CREATE_TRIES {
            let id: String = Token::random().reveal().chars().take(ID_CHARS).collect();
            match make_fifo(&dir, &id) {
                Ok(fifo) => return Ok(Self { dir, id: InboxId(id.into()), fifo }),
                Err(error) => last = error,
            }
        }
        Err(unusable(&dir, &last))
    }

    /// Our address.
    pub(super) fn id(&self) -> &InboxId {
        &self.id
    }

    /// Our end, to listen at.
    pub(super) fn fifo(&self) -> &OwnedFd {
        &self.fifo
    }

    /// A second descriptor of our FIFO: whoever has one open lets us count as alive.
    pub(super) fn lifeline(&self) -> Option<OwnedFd> {
        self.fifo.try_clone().ok()
    }

    /// Whether an owner is certainly gone. Where nobody can tell, the lease decides.
    pub(super) fn is_gone(&self, id: &InboxId) -> bool {
        self.is_there(id) == Some(false)
    }

    /// Whether an owner lives; `None` when it is not ours to ask.
    pub(super) fn is_there(&self, id: &InboxId) -> Option<bool> {
        if *id == self.id {
            return Some(true);
        }
        match self.reach(id) {
            Ok(_) => Some(true),
            Err(error) => self.means_gone(error).then_some(false),
        }
    }

    /// How many others there are.
    pub(super) fn others(&self) -> Others {
        let mut others = Others::default();
        let Ok(entries) = fs::read_dir(&self.dir) else { return others };
        let shown = |name: &std::ffi::OsStr| !name.as_encoded_bytes().starts_with(b".") && *name != *self.id.0;
        for entry in entries.flatten().filter(|entry| shown(&entry.file_name())) {
            match reach(&entry.path()) {
                Ok(_) => others.alive += 1,
                Err(Errno::ACCESS | Errno::PERM) => others.unknown += 1,
                Err(_) => {}
            }
        }
        others
    }

    /// An end that becomes readable with an error when its owner dies; `None`: gone already, or
    /// not ours to open.
    pub(super) fn watch(&self, id: &InboxId) -> Option<OwnedFd> {
        self.reach(id).ok()
    }

    /// Wakes an owner up. A full FIFO is awake already; one that is gone needs no wake-up.
    pub(super) fn wake(&self, id: &InboxId) {
        if *id == self.id {
            let _ = rustix::io::write(&self.fifo, &[1]);
        } else if let Ok(end) = self.reach(id) {
            let _ = rustix::io::write(&end, &[1]);
        }
    }

    /// Takes everything out of our FIFO.
    pub(super) fn drain(&self) {
        let mut bytes = [0_u8; 256];
        while rustix::io::read(&self.fifo, &mut bytes[..]).is_ok_and(|n| n == bytes.len()) {}
    }

    /// Removes what the dead left behind.
    pub(super) fn sweep(&self) {
        let Ok(entries) = fs::read_dir(&self.dir) else { return };
        for entry in entries.flatten() {
            if matches!(reach(&entry.path()), Err(Errno::NXIO)) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Gives our name up. Whoever looks from now on sees us as gone.
    pub(super) fn leave(&self) {
        let _ = fs::remove_file(self.dir.join(&*self.id.0));
    }

    fn reach(&self, id: &InboxId) -> Result<OwnedFd, Errno> {
        // What stands in the database becomes a file name: nothing else than an id may.
        if !id.0.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-') {
            return Err(Errno::INVAL);
        }
        reach(&self.dir.join(&*id.0))
    }

    /// A file that is missing was swept, unless somebody took the whole directory away.
    fn means_gone(&self, error: Errno) -> bool {
        error == Errno::NXIO || (error == Errno::NOENT && self.dir.join(&*self.id.0).exists())
    }
}

fn reach(path: &Path) -> Result<OwnedFd, Errno> {
    open(path, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())
}

/// Under a hidden name until it is open: a name that can be looked up is never without its owner.
fn make_fifo(dir: &Path, id: &str) -> Result<OwnedFd, Errno> {
    let (hidden, shown) = (dir.join(format!(".{id}")), dir.join(id));
    mkfifoat(CWD, &hidden, Mode::RUSR | Mode::WUSR)?;
    let fifo = open(&hidden, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?;
    if let Ok(meta) = fs::metadata(dir) {
        // Whoever may write into the directory may ask us whether we live.
        let _ = chown(&hidden, None, Some(Gid::from_raw(meta.gid())));
        let _ = chmodat(CWD, &hidden, Mode::from_raw_mode(meta.mode() & 0o666), rustix::fs::AtFlags::empty());
    }
    fs::rename(&hidden, &shown).map_err(|_| Errno::NOENT)?;
    Ok(fifo)
}

/// Takes the group and mode of the directory the database is in.
fn make_dir(dir: &Path, like: &Path) -> std::io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    match fs::create_dir(dir) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => return Ok(()),
        Err(error) => return Err(error),
    }
    let meta = fs::metadata(like)?;
    let _ = chown(dir, None, Some(Gid::from_raw(meta.gid())));
    fs::set_permissions(dir, fs::Permissions::from_mode(meta.mode() & 0o7777))
}
