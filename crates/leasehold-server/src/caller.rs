//! The caller of a request, identified by its API key.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use crate::keys::{KeyEntry, KeyError, KeyFile, Role, hash, unhex};

/// How soon a running server notices a created or revoked key.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);

/// The caller of a request.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) role: Role,
    /// The caller's key; `None` if the server requires no keys.
    pub(crate) key: Option<Arc<KeyEntry>>,
    /// A secret that only the owner of the key knows.
    seed: Seed,
}

/// A secret that is neither shown nor stored.
#[derive(Clone)]
struct Seed([u8; 32]);

impl std::fmt::Debug for Seed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("…")
    }
}

impl Caller {
    /// The caller on a server that requires no keys. It may do everything.
    pub(crate) fn anonymous() -> Self {
        Self { role: Role::Operator, key: None, seed: Seed([0; 32]) }
    }

    /// The name of the caller, for people and for the audit.
    pub(crate) fn who(&self) -> &str {
        self.key.as_ref().map_or("anybody", |key| &key.name)
    }

    /// Derives bytes that are the same for this caller and text on every server, and unknown to all other callers.
    pub(crate) fn derive(&self, parts: &[&str]) -> [u8; 32] {
        let mut hash = Sha256::new_with_prefix(b"leasehold request\0");
        hash.update(self.seed.0);
        for part in parts {
            hash.update(u64::try_from(part.len()).unwrap_or(u64::MAX).to_be_bytes());
            hash.update(part.as_bytes());
        }
        hash.finalize().into()
    }
}

/// The keys of a running server, reloaded when the file changes.
#[derive(Debug)]
pub(crate) struct Keys {
    file: KeyFile,
    loaded: Mutex<LoadedKeys>,
}

#[derive(Debug)]
struct LoadedKeys {
    keys: Vec<(Arc<KeyEntry>, [u8; 32])>,
    stamp: Option<(u64, i64, i64, u64)>,
    checked_at: Instant,
}

impl Keys {
    /// Loads the keys of a file, which must exist and contain at least one key.
    pub(crate) fn open(file: KeyFile) -> Result<Self, KeyError> {
        let stamp = stamp(file.path());
        let keys = file.entries()?.unwrap_or_default();
        if keys.is_empty() {
            let problem =
                "it has no keys, so no request could be authorized; create one with `leasehold keys create`".to_owned();
            return Err(KeyError::Content { path: file.path().to_owned(), problem });
        }
        let loaded = Mutex::new(LoadedKeys { keys: hashed(keys), stamp, checked_at: Instant::now() });
        Ok(Self { file, loaded })
    }

    /// Finds the caller of a key. The time it takes depends only on the length of `presented`.
    pub(crate) fn caller(&self, presented: &str) -> Option<Caller> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        self.reload_if_changed(&mut loaded);
        let theirs = hash(presented);
        // Compare with every key, so that the time does not reveal which one almost matched.
        let (mut found, mut at) = (Choice::from(0), 0_u32);
        for (index, (_, ours)) in (0_u32..).zip(&loaded.keys) {
            let same = ours.ct_eq(&theirs);
            at.conditional_assign(&index, same);
            found |= same;
        }
        if !bool::from(found) {
            return None;
        }
        let (key, _) = loaded.keys.get(usize::try_from(at).ok()?)?;
        let seed = Seed(Sha256::new_with_prefix(b"leasehold caller\0").chain_update(presented).finalize().into());
        Some(Caller { role: key.role, key: Some(key.clone()), seed })
    }

    /// Whether the key is still valid.
    pub(crate) fn knows(&self, key: &KeyEntry) -> bool {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        self.reload_if_changed(&mut loaded);
        loaded.keys.iter().any(|(known, _)| **known == *key)
    }

    fn reload_if_changed(&self, loaded: &mut LoadedKeys) {
        if loaded.checked_at.elapsed() < RELOAD_INTERVAL {
            return;
        }
        loaded.checked_at = Instant::now();
        let now = stamp(self.file.path());
        if now == loaded.stamp && now.is_some() {
            return;
        }
        match self.file.entries() {
            Ok(keys) => {
                let keys = keys.unwrap_or_default();
                tracing::info!(keys = keys.len(), "the key file has changed");
                (loaded.keys, loaded.stamp) = (hashed(keys), now);
            }
            // A key may have been revoked in a file that cannot be read, so the old keys are no longer accepted.
            Err(error) => {
                tracing::error!(error = %format_args!("{error:#}"), "no key is accepted");
                (loaded.keys, loaded.stamp) = (Vec::new(), None);
            }
        }
    }
}

/// Returns values that change when a file is replaced or rewritten.
fn stamp(path: &Path) -> Option<(u64, i64, i64, u64)> {
    let meta = fs::metadata(path).ok()?;
    Some((meta.ino(), meta.mtime(), meta.mtime_nsec(), meta.len()))
}

fn hashed(keys: Vec<KeyEntry>) -> Vec<(Arc<KeyEntry>, [u8; 32])> {
    keys.into_iter().filter_map(|key| unhex(&key.sha256).map(|hash| (Arc::new(key), hash))).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn file() -> (tempfile::TempDir, KeyFile) {
        let dir = tempfile::tempdir().expect("a directory");
        let file = KeyFile::new(dir.path().join("deep/keys.json"));
        (dir, file)
    }

    #[test]
    fn a_running_server_notices_a_revoked_key() {
        let (_dir, file) = file();
        let (entry, key) = file.create("a", Role::Viewer).expect("made");
        let (_, stays) = file.create("b", Role::Viewer).expect("made");
        let keys = Keys::open(file.clone()).expect("keys");
        assert!(keys.caller(&key).is_some());
        assert_eq!(file.revoke(&entry.id).expect("answered").map(|key| key.name), Some("a".into()));
        assert_eq!(file.revoke(&entry.id).expect("answered"), None);
        let expire_cache = || keys.loaded.lock().expect("whole").checked_at -= RELOAD_INTERVAL;
        expire_cache();
        assert!(keys.caller(&key).is_none() && keys.caller(&stays).is_some());
        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o666)).expect("set");
        fs::write(file.path(), "{}").expect("written");
        expire_cache();
        assert!(keys.caller(&stays).is_none(), "with a file that cannot be trusted no key is accepted");
    }

    #[test]
    fn derived_bytes_differ_between_callers() {
        let (_dir, file) = file();
        let made = ["a", "b"].map(|name| file.create(name, Role::Operator).expect("made").1);
        let keys = Keys::open(file).expect("keys");
        let [a, b] = made.map(|key| keys.caller(&key).expect("known"));
        assert_eq!(a.derive(&["x", "y"]), a.derive(&["x", "y"]));
        let others = [a.derive(&["xy", ""]), b.derive(&["x", "y"]), Caller::anonymous().derive(&["x", "y"])];
        assert!(others.iter().all(|other| *other != a.derive(&["x", "y"])));
    }
}
