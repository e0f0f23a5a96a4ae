//! File permissions: could another user replace a file that the server relies on?

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const STICKY: u32 = 0o1000;
const OTHERS_WRITE: u32 = 0o002;
const GROUP_WRITES: u32 = 0o020;

/// Returns the world-writable directory, of a file or of its link target, in which every user could replace the file.
/// With the sticky bit, as in `/tmp` or a mounted Kubernetes secret, only the owner of the file can.
pub(crate) fn world_writable_directory(path: &Path) -> Option<PathBuf> {
    directories(path).find(|(_, mode, _)| mode & OTHERS_WRITE != 0 && mode & STICKY == 0).map(|(dir, ..)| dir)
}

/// Warns when a user other than root and this one owns the file or its directory, or when others can write the
/// directory.
pub(crate) fn warn_if_others_can_change(path: &Path, what: &str) {
    let stranger = |uid: u32| uid != 0 && uid != rustix::process::geteuid().as_raw();
    if let Some(uid) = fs::metadata(path).ok().map(|meta| meta.uid()).filter(|uid| stranger(*uid)) {
        tracing::warn!(path = %path.display(), uid, "{what} belongs to another user, who can change it: chown it");
    }
    for (dir, mode, uid) in directories(path) {
        let dir = dir.display();
        if stranger(uid) {
            tracing::warn!(%dir, uid, "the directory of {what} belongs to another user, who can replace the file: chown it");
        } else if mode & (GROUP_WRITES | OTHERS_WRITE) != 0 && mode & STICKY == 0 {
            tracing::warn!(%dir, "others can write the directory of {what} and replace the file: chmod go-w it");
        }
    }
}

/// Returns the directory of a file and that of its link target, each with its mode and owner.
fn directories(path: &Path) -> impl Iterator<Item = (PathBuf, u32, u32)> {
    let parent = |path: &Path| {
        let dir = path.parent()?;
        Some(if dir.as_os_str().is_empty() { PathBuf::from(".") } else { dir.to_owned() })
    };
    let named = parent(path);
    let real = fs::canonicalize(path).ok().and_then(|path| parent(&path));
    let same = named.as_deref().and_then(|dir| fs::canonicalize(dir).ok()) == real;
    let dirs = named.into_iter().chain(real.filter(|_| !same));
    dirs.filter_map(|dir| fs::metadata(&dir).ok().map(|meta| (dir, meta.mode(), meta.uid())))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_world_writable_directory_is_found_behind_a_link_too() {
        let dir = tempfile::tempdir().expect("a directory");
        let (real, links) = (dir.path().join("real"), dir.path().join("links"));
        for dir in [&real, &links] {
            fs::create_dir(dir).expect("made");
        }
        fs::write(real.join("keys.json"), "{}").expect("written");
        symlink(real.join("keys.json"), links.join("keys.json")).expect("linked");
        let set = |dir: &Path, mode| fs::set_permissions(dir, fs::Permissions::from_mode(mode)).expect("set");
        for (of_real, of_links, found) in [
            (0o755, 0o755, None),
            (0o775, 0o775, None),
            // The mode of a mounted Kubernetes secret.
            (0o755, 0o3777, None),
            (0o1777, 0o755, None),
            (0o777, 0o755, Some(&real)),
            (0o755, 0o777, Some(&links)),
        ] {
            set(&real, of_real);
            set(&links, of_links);
            let named = world_writable_directory(&links.join("keys.json"));
            assert_eq!(
                named.map(|dir| fs::canonicalize(dir).expect("there")),
                found.map(|dir| fs::canonicalize(dir).expect("there"))
            );
        }
    }
}
