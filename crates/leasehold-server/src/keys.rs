//! API keys and roles. The key file stores only hashes; a key itself is shown once, when it is created.

use std::fmt::{self, Formatter};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::append_cause;
use crate::clock::unix_ms;
use crate::file_permissions;

/// The prefix of every key, so that a leaked key is recognised.
const PREFIX: &str = "lhk_";
/// The most keys in a file. Every request is compared with each of them.
const MAX_KEYS: usize = 1_000;

/// What a key allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// May read.
    Viewer,
    /// May read, acquire locks, and evict holders.
    Operator,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Viewer => "viewer",
            Self::Operator => "operator",
        })
    }
}

/// A key as stored in the key file: its hash and description, without the key itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyEntry {
    /// The id of the key; it is also part of the key.
    pub id: String,
    /// The name of the key, for people.
    pub name: String,
    /// The role of the key.
    pub role: Role,
    /// When the key was created, in wall-clock milliseconds.
    pub created_ms: u64,
    /// The SHA-256 of the key. A key has 256 random bits, so the hash does not help to guess it.
    pub sha256: String,
}

/// A file of API keys. Several processes may use it.
#[derive(Debug, Clone)]
pub struct KeyFile {
    path: PathBuf,
}

/// Why a key file cannot be used. `{:#}` appends the cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The file cannot be read or written.
    #[error(fmt = cannot_use)]
    Io {
        /// The path of the key file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is not a key file.
    #[error("{} is not a key file: {problem}", path.display())]
    Content {
        /// The path of the key file.
        path: PathBuf,
        /// What is wrong with the content.
        problem: String,
    },
    /// Other users can write the file, and so add their own keys.
    #[error("the key file {} can be written by others: chmod 600 it", path.display())]
    Open {
        /// The path of the key file.
        path: PathBuf,
    },
    /// Any user can replace the file.
    #[error("the key file {} can be replaced by any user: chmod o-w {}", path.display(), directory.display())]
    OpenDirectory {
        /// The path of the key file.
        path: PathBuf,
        /// The world-writable directory.
        directory: PathBuf,
    },
    /// The name of a key is empty, too long, or contains control characters.
    #[error("the name of a key must have 1 to 64 characters, none of them a control character")]
    Name,
    /// The file has the most keys it may have.
    #[error("there are already {MAX_KEYS} keys: revoke some")]
    TooMany,
}

fn cannot_use(path: &Path, source: &io::Error, f: &mut Formatter<'_>) -> fmt::Result {
    write!(f, "the key file {} cannot be used", path.display())?;
    append_cause(source, f)
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    version: u32,
    keys: Vec<KeyEntry>,
}

impl KeyFile {
    /// Refers to a key file, which need not exist yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns all keys, or `None` if there is no file.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is not a key file, or can be written by others.
    pub fn entries(&self) -> Result<Option<Vec<KeyEntry>>, KeyError> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.io(error)),
        };
        if file.metadata().map_err(|e| self.io(e))?.mode() & 0o022 != 0 {
            return Err(KeyError::Open { path: self.path.clone() });
        }
        if let Some(directory) = file_permissions::world_writable_directory(&self.path) {
            return Err(KeyError::OpenDirectory { path: self.path.clone(), directory });
        }
        let mut text = String::new();
        io::Read::read_to_string(&mut file, &mut text).map_err(|e| self.io(e))?;
        let wrong = |problem: String| KeyError::Content { path: self.path.clone(), problem };
        let content: Content = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
        if content.version != 1 {
            return Err(wrong(format!("its version is {}, and only version 1 is supported", content.version)));
        }
        if let Some(bad) = content.keys.iter().find(|key| unhex(&key.sha256).is_none()) {
            return Err(wrong(format!("the hash of {} is invalid", bad.id)));
        }
        Ok(Some(content.keys))
    }

    /// Creates a key and returns it. The key cannot be recovered later.
    ///
    /// # Errors
    /// Fails if the file cannot be used or the name is invalid.
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
        let entry = KeyEntry { id, name: name.to_owned(), role, created_ms: unix_ms(), sha256: hex(&hash(&key)) };
        self.change(|keys| {
            if keys.len() >= MAX_KEYS {
                return Err(KeyError::TooMany);
            }
            keys.push(entry.clone());
            Ok(true)
        })?;
        Ok((entry, key))
    }

    /// Revokes a key. Returns `None` if there is no key with that id.
    ///
    /// # Errors
    /// Fails if the file cannot be used.
    pub fn revoke(&self, id: &str) -> Result<Option<KeyEntry>, KeyError> {
        let mut revoked = None;
        self.change(|keys| {
            revoked = keys.iter().position(|key| key.id == id).map(|at| keys.remove(at));
            Ok(revoked.is_some())
        })?;
        Ok(revoked)
    }

    /// Applies one change at a time. Readers see the old file or the new one, never a part.
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

/// The SHA-256 of a key.
pub(crate) fn hash(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn unhex(text: &str) -> Option<[u8; 32]> {
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
    use crate::caller::Keys;

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
    fn files_that_cannot_be_trusted_are_refused() {
        let (_dir, file) = file();
        assert!(matches!(Keys::open(file.clone()), Err(KeyError::Content { .. })), "no keys");
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
}
