//! Keys: who may look, and who may change something. Kept hashed in one file; a key itself is shown once,
//! to whoever makes it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

use crate::trust;

/// What every key begins with, so that one that strayed is recognised.
const PREFIX: &str = "lhk_";
/// More than anybody needs; every request is compared with each.
const MOST_KEYS: usize = 1_000;
/// How soon a key that was made or revoked counts in a server that runs.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// What a key allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Looking.
    Viewer,
    /// Looking, taking locks, and taking them away.
    Operator,
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
        })
    }
}

/// A key as the file knows it: without the key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyEntry {
    /// Names it, also in the key itself.
    pub id: String,
    /// Whose it is, for people.
    pub name: String,
    /// What it allows.
    pub role: Role,
    /// When it was made, in wall-clock milliseconds.
    pub created_ms: u64,
    /// The SHA-256 of the key. It has 256 random bits, so that nobody can guess it from this.
    pub sha256: String,
}

/// The file of the keys. Several processes may use it.
#[derive(Debug, Clone)]
pub struct KeyFile {
    path: PathBuf,
}

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// It cannot be read or written.
    #[error("the key file {} cannot be used: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is not a key file.
    #[error("{} is no key file: {problem}", path.display())]
    Content {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// Others could put a key of their own into it.
    #[error("the key file {} can be written by others: chmod 600 it", path.display())]
    Open {
        /// Which file.
        path: PathBuf,
    },
    /// Every user could put another file in its place.
    #[error("the key file {} can be replaced by any user: chmod o-w {}", path.display(), directory.display())]
    OpenDirectory {
        /// Which file.
        path: PathBuf,
        /// The directory that everybody may write.
        directory: PathBuf,
    },
    /// The name of a key is no name.
    #[error("the name of a key must have 1 to 64 characters, none of them a control character")]
    Name,
    /// There are too many.
    #[error("there are {MOST_KEYS} keys already: revoke some")]
    TooMany,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    version: u32,
    keys: Vec<KeyEntry>,
}

impl KeyFile {
    /// The keys of one file, which need not exist yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Which file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All keys; `None` when there is no file.
    ///
    /// # Errors
    /// When it cannot be read, is no key file, or can be written by others.
    pub fn entries(&self) -> Result<Option<Vec<KeyEntry>>, KeyError> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.io(error)),
        };
        if file.metadata().map_err(|e| self.io(e))?.mode() & 0o022 != 0 {
            return Err(KeyError::Open { path: self.path.clone() });
        }
        if let Some(directory) = trust::open_directory(&self.path) {
            return Err(KeyError::OpenDirectory { path: self.path.clone(), directory });
        }
        let mut text = String::new();
        io::Read::read_to_string(&mut file, &mut text).map_err(|e| self.io(e))?;
        let wrong = |problem: String| KeyError::Content { path: self.path.clone(), problem };
        let content: Content = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        if content.version != 1 {
            return Err(wrong(format!("it is of version {}, and this is 1", content.version)));
        }
        if let Some(bad) = content.keys.iter().find(|key| unhex(&key.sha256).is_none()) {
            return Err(wrong(format!("the hash of {} is none", bad.id)));
        }
        Ok(Some(content.keys))
    }

    /// Makes a key and returns it: this is the only time that it is seen.
    ///
    /// # Errors
    /// When the file cannot be used, or the name is no name.
    pub fn create(&self, name: &str, role: Role) -> Result<(KeyEntry, String), KeyError> {
        if name.is_empty() || name.chars().count() > 64 || name.chars().any(char::is_control) {
            return Err(KeyError::Name);
        }
        let (mut id, mut secret) = ([0_u8; 6], [0_u8; 32]);
        for bytes in [&mut id[..], &mut secret[..]] {
            getrandom::fill(bytes).map_err(|e| self.io(io::Error::other(e)))?;
        }
        let id = hex(&id);
        let key = format!("{PREFIX}{id}_{}", URL_SAFE_NO_PAD.encode(secret));
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let created_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        let entry = KeyEntry { id, name: name.to_owned(), role, created_ms, sha256: hex(&hash(&key)) };
        self.change(|keys| {
            if keys.len() >= MOST_KEYS {
                return Err(KeyError::TooMany);
            }
            keys.push(entry.clone());
            Ok(true)
        })?;
        Ok((entry, key))
    }

    /// Takes a key out; `None` when there is none of that id.
    ///
    /// # Errors
    /// When the file cannot be used.
    pub fn revoke(&self, id: &str) -> Result<Option<KeyEntry>, KeyError> {
        let mut revoked = None;
        self.change(|keys| {
            revoked = keys.iter().position(|key| key.id == id).map(|at| keys.remove(at));
            Ok(revoked.is_some())
        })?;
        Ok(revoked)
    }

    /// One change at a time, seen by readers whole or not at all.
    fn change(&self, change: impl FnOnce(&mut Vec<KeyEntry>) -> Result<bool, KeyError>) -> Result<(), KeyError> {
        let io = |error| self.io(error);
        let dir = self.path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io)?;
        let beside = |ending: &str| {
            let mut name = self.path.clone().into_os_string();
            name.push(ending);
            PathBuf::from(name)
        };
        let private = || OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).clone();
        let lock = private().open(beside(".lock")).map_err(io)?;
        lock.lock().map_err(io)?;
        let mut keys = self.entries()?.unwrap_or_default();
        if !change(&mut keys)? {
            return Ok(());
        }
        let text = serde_json::to_string_pretty(&Content { version: 1, keys }).expect("keys are JSON") + "\n";
        let new = beside(".new");
        let mut file = private().open(&new).map_err(io)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(io)?;
        fs::rename(&new, &self.path).map_err(io)?;
        File::open(dir).and_then(|dir| dir.sync_all()).map_err(io)
    }

    fn io(&self, source: io::Error) -> KeyError {
        KeyError::Io { path: self.path.clone(), source }
    }
}

/// Who asks.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) role: Role,
    /// Whose key it is; `None` where nobody needs one.
    pub(crate) key: Option<Arc<KeyEntry>>,
    /// What only the owner of the key can know of it.
    seed: Seed,
}

/// Not shown, and not kept.
#[derive(Clone)]
struct Seed([u8; 32]);

impl std::fmt::Debug for Seed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("…")
    }
}

impl Caller {
    /// Where nobody needs a key, everybody who comes in may do everything.
    pub(crate) fn anybody() -> Self {
        Self { role: Role::Operator, key: None, seed: Seed([0; 32]) }
    }

    /// Who it is, for people and for the audit.
    pub(crate) fn who(&self) -> &str {
        self.key.as_ref().map_or("anybody", |key| &key.name)
    }

    /// The same for the same caller and text on every server, and unknown to everybody else.
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

/// The keys in force in a server: read again when the file changes.
#[derive(Debug)]
pub(crate) struct Keys {
    file: KeyFile,
    loaded: Mutex<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    keys: Vec<(Arc<KeyEntry>, [u8; 32])>,
    stamp: Option<(u64, i64, i64, u64)>,
    looked: Instant,
}

impl Keys {
    /// The keys of a file that must be there and have some.
    pub(crate) fn open(file: KeyFile) -> Result<Self, KeyError> {
        let stamp = stamp(file.path());
        let keys = file.entries()?.unwrap_or_default();
        if keys.is_empty() {
            let problem = "it has no keys, so nobody could come in; make one with leasehold keys create".to_owned();
            return Err(KeyError::Content { path: file.path().to_owned(), problem });
        }
        let loaded = Mutex::new(Loaded { keys: hashed(keys), stamp, looked: Instant::now() });
        Ok(Self { file, loaded })
    }

    /// Whose key this is. Takes the same time for every text of the same length.
    pub(crate) fn caller(&self, presented: &str) -> Option<Caller> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        self.look_again(&mut loaded);
        let theirs = hash(presented);
        // All of them, whichever it is: the time says nothing about which one was nearly right.
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

    /// Whether a key that was let in still would be.
    pub(crate) fn knows(&self, key: &KeyEntry) -> bool {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        self.look_again(&mut loaded);
        loaded.keys.iter().any(|(known, _)| **known == *key)
    }

    fn look_again(&self, loaded: &mut Loaded) {
        if loaded.looked.elapsed() < LOOK_AGAIN {
            return;
        }
        loaded.looked = Instant::now();
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
            // A file that cannot be read may have had a key taken out: nobody is let in by what it was.
            Err(error) => {
                tracing::error!(%error, "nobody is let in");
                (loaded.keys, loaded.stamp) = (Vec::new(), None);
            }
        }
    }
}

/// Says whether a file is the one that was read.
fn stamp(path: &Path) -> Option<(u64, i64, i64, u64)> {
    let meta = fs::metadata(path).ok()?;
    Some((meta.ino(), meta.mtime(), meta.mtime_nsec(), meta.len()))
}

fn hashed(keys: Vec<KeyEntry>) -> Vec<(Arc<KeyEntry>, [u8; 32])> {
    keys.into_iter().filter_map(|key| unhex(&key.sha256).map(|hash| (Arc::new(key), hash))).collect()
}

fn hash(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (byte, at) in bytes.iter_mut().zip((0..64).step_by(2)) {
        *byte = u8::from_str_radix(&text[at..at + 2], 16).ok()?;
    }
    Some(bytes)
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
    fn a_key_is_shown_once_and_kept_hashed() {
        let (_dir, file) = file();
        assert!(file.entries().expect("none yet").is_none());
        let (entry, key) = file.create("ops", Role::Operator).expect("made");
        let (_, other) = file.create("ops", Role::Operator).expect("made");
        assert_ne!(key, other);
        let secret = key.rsplit_once(&entry.id).expect("its id").1.trim_start_matches('_');
        assert_eq!(URL_SAFE_NO_PAD.decode(&key[PREFIX.len() + entry.id.len() + 1..]).expect("base64").len(), 32);
        let text = fs::read_to_string(file.path()).expect("written");
        assert!(!text.contains(&key) && !text.contains(secret), "no key in the file");
        assert_eq!(fs::metadata(file.path()).expect("there").permissions().mode() & 0o777, 0o600);
        let keys = Keys::open(file.clone()).expect("two keys");
        let caller = keys.caller(&key).expect("known");
        assert_eq!((caller.role, caller.who()), (Role::Operator, "ops"));
        assert!(!format!("{keys:?}{caller:?}").contains(secret), "nor in Debug");
        for wrong in ["", "lhk_", &key[1..], &format!("{key}x"), &key.to_uppercase(), &entry.sha256] {
            assert!(keys.caller(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn a_revoked_key_ends_in_a_server_that_runs() {
        let (_dir, file) = file();
        let (entry, key) = file.create("a", Role::Viewer).expect("made");
        let (_, stays) = file.create("b", Role::Viewer).expect("made");
        let keys = Keys::open(file.clone()).expect("keys");
        assert!(keys.caller(&key).is_some());
        assert_eq!(file.revoke(&entry.id).expect("answered").map(|key| key.name), Some("a".into()));
        assert_eq!(file.revoke(&entry.id).expect("answered"), None);
        let look = || keys.loaded.lock().expect("whole").looked -= LOOK_AGAIN;
        look();
        assert!(keys.caller(&key).is_none() && keys.caller(&stays).is_some());
        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o666)).expect("set");
        fs::write(file.path(), "{}").expect("written");
        look();
        assert!(keys.caller(&stays).is_none(), "a file that cannot be trusted lets nobody in");
    }

    #[test]
    fn files_that_cannot_be_trusted_are_refused() {
        let (_dir, file) = file();
        assert!(matches!(Keys::open(file.clone()), Err(KeyError::Content { .. })), "no keys, nobody could come in");
        file.create("a", Role::Viewer).expect("made");
        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o620)).expect("set");
        assert!(matches!(file.entries(), Err(KeyError::Open { .. })));
        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o600)).expect("set");
        for bad in ["", "[]", "{\"version\":2,\"keys\":[]}", "{\"version\":1,\"keys\":[{\"id\":\"a\"}]}"] {
            fs::write(file.path(), bad).expect("written");
            assert!(matches!(file.entries(), Err(KeyError::Content { .. })), "{bad}");
        }
        assert!(matches!(file.create("", Role::Viewer), Err(KeyError::Name)));
        assert!(matches!(file.create("a\nb", Role::Viewer), Err(KeyError::Name)));
    }

    #[test]
    fn what_is_derived_is_the_callers_own() {
        let (_dir, file) = file();
        let made = ["a", "b"].map(|name| file.create(name, Role::Operator).expect("made").1);
        let keys = Keys::open(file).expect("keys");
        let [a, b] = made.map(|key| keys.caller(&key).expect("known"));
        assert_eq!(a.derive(&["x", "y"]), a.derive(&["x", "y"]));
        let others = [a.derive(&["xy", ""]), b.derive(&["x", "y"]), Caller::anybody().derive(&["x", "y"])];
        assert!(others.iter().all(|other| *other != a.derive(&["x", "y"])));
    }
}
