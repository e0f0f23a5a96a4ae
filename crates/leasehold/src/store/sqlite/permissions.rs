//! File modes: 0660 where the directory is group-writable, else 0600, and nothing for others. The database holds the
//! tokens of every lease.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, chmodat, chownat, fchmod, fchown, fstat, open, stat};
use rustix::io::Errno;

/// Who may use the files of a database, derived from the mode and group of its directory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sharing {
    gid: u32,
    group: bool,
    setgid: u32,
}

impl Sharing {
    /// Reads the mode and group of the directory that contains the database.
    pub(super) fn of(dir: &Path) -> io::Result<Self> {
        let meta = fs::metadata(dir)?;
        Ok(Self { gid: meta.gid(), group: meta.mode() & 0o020 != 0, setgid: meta.mode() & 0o2000 })
    }

    /// Sets group and mode of a file that this process has just created, regardless of the umask.
    pub(super) fn apply(self, file: impl AsFd) -> io::Result<()> {
        let mode = if self.shares(&file)? { 0o660 } else { 0o600 };
        Ok(fchmod(file, Mode::from_raw_mode(mode))?)
    }

    /// Sets group and mode of a directory that this process has just created, regardless of the umask.
    pub(super) fn apply_to_dir(self, dir: &Path) -> io::Result<()> {
        let file = open(dir, OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let mode = if self.shares(&file)? { 0o770 | self.setgid } else { 0o700 };
        Ok(fchmod(file, Mode::from_raw_mode(mode))?)
    }

    /// Gives the file to the group of a group-writable directory. `false` if that fails, because the creator is in
    /// another group, or if the directory is not group-writable.
    fn shares(self, file: impl AsFd) -> io::Result<bool> {
        if !self.group {
            return Ok(false);
        }
        if fstat(&file)?.st_gid == self.gid {
            return Ok(true);
        }
        Ok(fchown(&file, None, Some(Gid::from_raw(self.gid))).is_ok())
    }
}

/// Creates an empty database file if there is none. SQLite gives its log and shared memory the same mode.
///
/// An existing file is not opened: closing it would drop the locks of every connection of this process.
pub(super) fn create(path: &Path, sharing: Sharing) -> io::Result<()> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match open(path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => sharing.apply(file),
        Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Gives a file that SQLite created to the group of the database. SQLite does that only for root.
pub(super) fn share(db: &Path, file: &Path) {
    let shared = || -> Result<(), Errno> {
        let gid = stat(db)?.st_gid;
        // Closing a descriptor of this kind drops no lock.
        let file = open(file, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let found = fstat(&file)?;
        if found.st_gid == gid || found.st_uid != rustix::process::geteuid().as_raw() {
            return Ok(());
        }
        chownat(&file, "", None, Some(Gid::from_raw(gid)), AtFlags::EMPTY_PATH)
    };
    let _ = shared();
}

/// Removes the permissions of others from a file or directory of an earlier version, if this user owns it. If that
/// fails, `doctor` reports it.
pub(super) fn tighten(path: &Path) {
    let tightened = || -> Result<(), Errno> {
        // Closing a descriptor of this kind drops no lock.
        let file = open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let stat = fstat(&file)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let ours = stat.st_uid == rustix::process::geteuid().as_raw();
        if !ours || stat.st_mode & 0o007 == 0 || !matches!(kind, FileType::RegularFile | FileType::Directory) {
            return Ok(());
        }
        let mode = Mode::from_raw_mode(stat.st_mode & 0o7770);
        chmodat(CWD, format!("/proc/self/fd/{}", file.as_raw_fd()), mode, AtFlags::empty())
    };
    let _ = tightened();
}
