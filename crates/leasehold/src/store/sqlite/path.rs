//! The path of the database: the default, symlinks, and places where it must not be.

use std::env;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, StatxAttributes, StatxFlags, access, statfs, statx};

use crate::store::{StoreError, StoreErrorKind};

/// Shared by all users who may write there: root's cron jobs, people and services.
const SHARED_DIR: &str = "/var/lib/leasehold";

/// Most symlinks that are followed; the kernel has the same limit.
const SYMLINKS_MAX: usize = 40;

/// Filesystems whose locks or shared memory do not hold between machines, by `statfs` magic.
const NOT_LOCAL: [(u64, &str); 15] = [
    (0x6969, "NFS"),
    (0x517B, "SMB"),
    (0xFE53_4D42, "SMB2"),
    (0xFF53_4D42, "CIFS"),
    (0x6573_5546, "FUSE"),
    (0x0102_1997, "9p"),
    (0x00C3_6400, "Ceph"),
    (0x5346_414F, "AFS"),
    (0x0BD0_0BD0, "Lustre"),
    (0x7461_636F, "OCFS2"),
    (0x0116_1970, "GFS2"),
    (0x4750_4653, "GPFS"),
    (0x1983_0326, "BeeGFS"),
    (0x6B41_4653, "kAFS"),
    (0x786F_4256, "vboxsf"),
];

/// Names of common local filesystems, by `statfs` magic.
const LOCAL: [(u64, &str); 7] = [
    (0xEF53, "ext4"),
    (0x5846_5342, "XFS"),
    (0x9123_683E, "Btrfs"),
    (0x0102_1994, "tmpfs"),
    (0x794C_7630, "overlayfs"),
    (0x2FC1_2FC1, "ZFS"),
    (0xF2F5_2010, "F2FS"),
];

/// The default file: shared by all processes of the machine if `/var/lib/leasehold` exists and is writable, otherwise
/// by all processes of the user.
///
/// # Errors
/// [`StoreErrorKind::File`] if there is neither that directory nor a home. A temporary directory is not used, because
/// every user can write there and so take any lock.
pub fn default_path() -> Result<PathBuf, StoreError> {
    let shared = Path::new(SHARED_DIR);
    if shared.is_dir() && access(shared, Access::WRITE_OK | Access::EXEC_OK).is_ok() {
        return Ok(shared.join("locks.db"));
    }
    let set = |name: &str| env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let state = set("XDG_STATE_HOME").or_else(|| set("HOME").map(|home| home.join(".local/state")));
    let homeless = "no directory for the database: set HOME or XDG_STATE_HOME, or name a file with sqlite:PATH";
    let state = state.ok_or_else(|| StoreError::new(StoreErrorKind::File, homeless))?;
    Ok(state.join("leasehold/locks.db"))
}

/// Resolves every symlink in the path, and creates the directory for its owner alone if there is none. Rejects a
/// directory that other machines may share, and a file that has another path.
///
/// All paths of one file lead to one result, so that all processes use the same log, shared memory and `.alive`
/// directory.
pub(super) fn prepare(path: &Path) -> Result<PathBuf, StoreError> {
    let path = std::path::absolute(path).map_err(|e| unusable(path, &e))?;
    // `components` drops a final slash, with which a symlink would not be recognized.
    let path = follow(path.components().collect())?;
    let dir = directory(&path);
    if !dir.exists() {
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|e| unusable(dir, &e))?;
    }
    let resolved = fs::canonicalize(dir).map_err(|e| unusable(dir, &e))?;
    let path = match path.file_name() {
        Some(name) => resolved.join(name),
        None => resolved,
    };
    filesystem(directory(&path))?;
    sole_path(&path)?;
    Ok(path)
}

/// Follows a path that is itself a symlink, even if its target does not exist yet.
fn follow(mut path: PathBuf) -> Result<PathBuf, StoreError> {
    for _ in 0..SYMLINKS_MAX {
        match fs::read_link(&path) {
            Ok(target) => path = directory(&path).join(target),
            // Not a symlink, or no such file.
            Err(_) => return Ok(path),
        }
    }
    Err(unusable(&path, &"too many symlinks lead to it"))
}

/// Rejects a file that other processes may reach by another path. SQLite's log and the `.alive` directory are found by
/// the path, so such processes would not see each other.
pub(super) fn sole_path(path: &Path) -> Result<(), StoreError> {
    let refuse = |text: String| Err(StoreError::new(StoreErrorKind::File, text));
    let Ok(meta) = fs::metadata(path) else { return Ok(()) };
    if !meta.is_file() {
        return refuse(format!("{} is not a file", path.display()));
    }
    if meta.nlink() > 1 {
        return refuse(format!(
            "{} has {} hard links, and processes that use different ones do not see each other's locks. List them with \
             `find / -samefile {}`, use one path everywhere and remove the other links",
            path.display(),
            meta.nlink(),
            shell_word(&path.display().to_string())
        ));
    }
    if is_mount_point(path) {
        return refuse(format!(
            "{} is a mount point: only the file is mounted, so processes that use the original file do not see the locks \
             taken here. Mount the directory that contains the database instead",
            path.display()
        ));
    }
    Ok(())
}

/// Whether something is mounted on exactly this path.
fn is_mount_point(path: &Path) -> bool {
    let root = StatxAttributes::MOUNT_ROOT;
    if let Ok(found) = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty())
        && found.stx_attributes_mask.contains(root)
    {
        return found.stx_attributes.contains(root);
    }
    // For kernels before 5.8. The fifth field is the mount point, with octal escapes.
    let mounts = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let at = |line: &[u8]| line.split(|b| *b == b' ').nth(4).map(unescaped);
    mounts.split(|b| *b == b'\n').any(|line| at(line).is_some_and(|at| at == path.as_os_str().as_encoded_bytes()))
}

fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut text = Vec::new();
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let octal = (*first == b'\\').then(|| tail.get(..3).and_then(|d| std::str::from_utf8(d).ok())).flatten();
        let byte = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        text.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &tail[3..] } else { tail };
    }
    text
}

/// Returns the kind of filesystem that a directory is on. Rejects one that other machines may share.
pub(super) fn filesystem(dir: &Path) -> Result<String, StoreError> {
    let found = statfs(dir).map_err(|e| unusable(dir, &e))?;
    // The kernel's magic number has 32 bits; some platforms sign-extend it.
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

/// The system's reason why a path is not writable, if there is one. SQLite only reports that a write failed.
pub(super) fn not_writable(path: &Path) -> Option<StoreError> {
    let place = if path.exists() { path } else { directory(path) };
    access(place, Access::WRITE_OK).err().map(|error| unusable(place, &error))
}

/// Quotes a word if a shell would split or change it.
pub(super) fn shell_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:+@%=,".contains(c);
    if word.chars().all(plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

/// The directory that contains a file.
pub(super) fn directory(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Appends a suffix to the path, as SQLite does for its `-wal` file.
pub(super) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// The error for a file or directory that the system does not let us use.
pub(super) fn unusable(path: &Path, error: &dyn std::fmt::Display) -> StoreError {
    StoreError::new(StoreErrorKind::File, format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_table_is_read_with_its_escapes() {
        assert_eq!(unescaped(br"/a\040b\134c/locks.db"), br"/a b\c/locks.db");
        assert_eq!(unescaped(br"/plain\9"), br"/plain\9");
    }

    #[test]
    fn every_symlink_leads_to_one_path_before_and_after_the_file_exists() {
        let dir = tempfile::tempdir().expect("a directory");
        let home = dir.path().canonicalize().expect("a path");
        fs::create_dir(home.join("real")).expect("made");
        std::os::unix::fs::symlink("real", home.join("dir")).expect("linked");
        std::os::unix::fs::symlink("dir/locks.db", home.join("alias.db")).expect("linked");
        let real = home.join("real/locks.db");
        for _ in 0..2 {
            for path in ["alias.db", "dir/locks.db", "real/../dir/locks.db", "real/locks.db", "alias.db/"] {
                assert_eq!(prepare(&home.join(path)).expect("usable"), real, "{path}");
            }
            fs::write(&real, "").expect("made");
        }
        fs::hard_link(&real, home.join("hard.db")).expect("linked");
        for path in ["hard.db", "real/locks.db"] {
            let refused = prepare(&home.join(path)).expect_err("two links").to_string();
            assert!(refused.contains("hard links"), "{refused}");
        }
    }
}
