//! Where the file is, and whether it may be there.

use std::env;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access, statfs};

use crate::store::{StoreError, StoreErrorKind};

/// Shared by everybody who may write there: root's cron, a user and a service.
const SHARED_DIR: &str = "/var/lib/leasehold";

/// Filesystems whose locks or shared memory do not hold between machines, by `statfs` magic.
const NOT_LOCAL: [(u64, &str); 9] = [
    (0x6969, "NFS"),
    (0x517B, "SMB"),
    (0xFE53_4D42, "SMB2"),
    (0xFF53_4D42, "CIFS"),
    (0x6573_5546, "FUSE"),
    (0x0102_1997, "9p"),
    (0x00C3_6400, "Ceph"),
    (0x5346_414F, "AFS"),
    (0x0BD0_0BD0, "Lustre"),
];

/// Some that people have, by name.
const LOCAL: [(u64, &str); 7] = [
    (0xEF53, "ext4"),
    (0x5846_5342, "XFS"),
    (0x9123_683E, "Btrfs"),
    (0x0102_1994, "tmpfs"),
    (0x794C_7630, "overlayfs"),
    (0x2FC1_2FC1, "ZFS"),
    (0xF2F5_2010, "F2FS"),
];

/// The file all processes of a user share by default, or all of the machine where
/// `/var/lib/leasehold` exists and is writable.
///
/// # Errors
/// [`StoreErrorKind::File`] when neither that nor a home is there. A temporary directory will not do:
/// everybody may write there, and take any lock.
pub fn default_path() -> Result<PathBuf, StoreError> {
    let shared = Path::new(SHARED_DIR);
    if shared.is_dir() && access(shared, Access::WRITE_OK | Access::EXEC_OK).is_ok() {
        return Ok(shared.join("locks.db"));
    }
    let set = |name: &str| env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let state = set("XDG_STATE_HOME").or_else(|| set("HOME").map(|home| home.join(".local/state")));
    let homeless = "there is no place for it: set HOME or XDG_STATE_HOME, or name a file with sqlite:PATH";
    let state = state.ok_or_else(|| StoreError::new(StoreErrorKind::File, homeless))?;
    Ok(state.join("leasehold/locks.db"))
}

/// Makes the directory, for its owner alone, and refuses one that other machines may share.
pub(super) fn prepare(path: &Path) -> Result<(), StoreError> {
    let dir = directory(path);
    if !dir.exists() {
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|e| unusable(dir, &e))?;
    }
    filesystem(dir)?;
    if fs::metadata(path).is_ok_and(|m| !m.is_file()) {
        return Err(StoreError::new(StoreErrorKind::File, format!("{} is not a file", path.display())));
    }
    Ok(())
}

/// The kind of filesystem a directory is on; refuses one that other machines may share.
pub(super) fn filesystem(dir: &Path) -> Result<String, StoreError> {
    let found = statfs(dir).map_err(|e| unusable(dir, &e))?;
    // The kernel's word for it is 32 bits wide; some platforms sign-extend it.
    let magic = found.f_type.cast_unsigned() & 0xFFFF_FFFF;
    if let Some((_, kind)) = NOT_LOCAL.iter().find(|(m, _)| *m == magic) {
        let text = format!(
            "{} is on {kind}, where SQLite's locks do not hold; use a local directory, or Redis for several machines",
            dir.display()
        );
        return Err(StoreError::new(StoreErrorKind::File, text));
    }
    let known = LOCAL.iter().find(|(m, _)| *m == magic);
    Ok(known.map_or_else(|| format!("a filesystem of type {magic:#x}"), |(_, kind)| (*kind).to_owned()))
}

/// Why nobody can write there, if the system says so. SQLite only knows that it could not.
pub(super) fn not_writable(path: &Path) -> Option<StoreError> {
    let place = if path.exists() { path } else { directory(path) };
    access(place, Access::WRITE_OK).err().map(|error| unusable(place, &error))
}

/// The directory a file is in.
pub(super) fn directory(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The file's own name with something behind it, as SQLite names its `-wal`.
pub(super) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// The system said no.
pub(super) fn unusable(path: &Path, error: &dyn std::fmt::Display) -> StoreError {
    StoreError::new(StoreErrorKind::File, format!("{}: {error}", path.display()))
}
