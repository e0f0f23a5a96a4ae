//! The journal: files of releases that failed in every way, and of work that ran without protection. Each entry is a small
//! file, synced to disk and readable only by its owner, because it contains the token that a replay needs.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::facts::Token;

/// The journal of one directory. Several processes may share it.
#[derive(Debug, Clone)]
pub struct Journal {
    dir: PathBuf,
}

/// An entry of the journal.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct JournalEntry {
    /// The id of the entry.
    pub id: String,
    /// What happened.
    pub kind: JournalKind,
    /// The lock.
    pub name: String,
    /// The URL of the store, without its secrets.
    pub store: String,
    /// The namespace of the lock.
    pub namespace: String,
    /// The owner of the lease.
    pub owner: String,
    /// The holder's public id.
    pub holder_id: String,
    /// The fence of the lease, if it had one.
    pub fence: Option<u64>,
    /// The ttl of the lease in milliseconds. After that the lock is free in any case.
    pub ttl_ms: u64,
    /// When the entry was written, in wall-clock milliseconds.
    pub at_ms: u64,
    /// The error that led to the entry.
    pub why: String,
    token: Option<String>,
}

/// The kinds of [`JournalEntry`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum JournalKind {
    /// A lock could not be released. It is released when the entry is replayed, or when its lease ends.
    Unreleased,
    /// Work ran without protection.
    Unprotected,
}

impl JournalEntry {
    pub(crate) fn new(kind: JournalKind, token: &Token) -> Self {
        let at_ms = crate::clock::wall_ms();
        Self {
            id: format!("{at_ms}-{}", token.holder_id()),
            kind,
            name: String::new(),
            store: String::new(),
            namespace: String::new(),
            owner: String::new(),
            holder_id: token.holder_id().to_string(),
            fence: None,
            ttl_ms: 0,
            at_ms,
            why: String::new(),
            token: (kind == JournalKind::Unreleased).then(|| token.reveal().to_owned()),
        }
    }

    pub(crate) fn token(&self) -> Option<Token> {
        Token::parse(self.token.as_deref()?).ok()
    }
}

impl std::fmt::Debug for JournalEntry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JournalEntry")
            .field("id", &self.id)
            .field("kind", &self.kind)
            .field("name", &self.name)
            .field("owner", &self.owner)
            .field("why", &self.why)
            .finish_non_exhaustive()
    }
}

impl Journal {
    /// Returns the journal in this directory, which is created when the first entry is written.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// Returns the directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns every entry that has not been settled, oldest first. A file that cannot be read is skipped with a warning.
    ///
    /// # Errors
    /// When the directory exists and cannot be read.
    pub fn entries(&self) -> io::Result<Vec<JournalEntry>> {
        let listing = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            listing => listing?,
        };
        let mut entries = Vec::new();
        for file in listing {
            let path = file?.path();
            if path.extension().is_none_or(|ext| ext != "json") {
                continue;
            }
            match fs::read(&path).map(|text| serde_json::from_slice(&text)) {
                Ok(Ok(entry)) => entries.push(entry),
                // Settled by another process meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Ok(Err(error)) => tracing::warn!(path = %path.display(), %error, "unreadable journal entry"),
                Err(error) => tracing::warn!(path = %path.display(), %error, "unreadable journal entry"),
            }
        }
        entries.sort_by(|a: &JournalEntry, b| (a.at_ms, &a.id).cmp(&(b.at_ms, &b.id)));
        Ok(entries)
    }

    /// Removes an entry. `false`: there is no such entry (any more).
    ///
    /// # Errors
    /// When the file cannot be removed.
    pub fn settle(&self, id: &str) -> io::Result<bool> {
        if id.contains(['/', '.']) {
            return Ok(false);
        }
        match fs::remove_file(self.path(id)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Writes an entry whole and synced, or not at all.
    pub(crate) fn write(&self, entry: &JournalEntry) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        let partial = self.dir.join(format!("{}.partial", entry.id));
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
        file.write_all(&serde_json::to_vec(entry)?)?;
        file.sync_all()?;
        fs::rename(&partial, self.path(&entry.id))?;
        File::open(&self.dir)?.sync_all()
    }

    fn path(&self, id: &str) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }
}

/// `$XDG_STATE_HOME/leasehold/journal`, else below the home directory; `None` without either.
pub(crate) fn default_dir() -> Option<PathBuf> {
    let from = |var: &str| std::env::var_os(var).map(PathBuf::from).filter(|p| p.is_absolute());
    let state = from("XDG_STATE_HOME").or_else(|| Some(from("HOME")?.join(".local/state")))?;
    Some(state.join("leasehold/journal"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn entries_survive_and_are_settled_once() {
        let dir = tempfile::tempdir().expect("a directory");
        let journal = Journal::new(dir.path().join("deep/journal"));
        assert_eq!(journal.entries().expect("none yet"), []);
        let token = Token::random();
        let entry = JournalEntry { name: "a".into(), ..JournalEntry::new(JournalKind::Unreleased, &token) };
        journal.write(&entry).expect("written");
        let mode = fs::metadata(journal.path(&entry.id)).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "nobody else may read the token");
        assert_eq!(journal.entries().expect("one"), std::slice::from_ref(&entry));
        assert_eq!(entry.token(), Some(token.clone()));
        assert!(!format!("{entry:?}").contains(token.reveal()));
        assert!(!journal.settle("../escape").expect("refused"));
        assert!(journal.settle(&entry.id).expect("settled"));
        assert!(!journal.settle(&entry.id).expect("settled before"));
    }

    #[test]
    fn a_broken_file_hides_no_other() {
        let dir = tempfile::tempdir().expect("a directory");
        let journal = Journal::new(dir.path());
        fs::write(dir.path().join("broken.json"), "{").expect("written");
        journal.write(&JournalEntry::new(JournalKind::Unprotected, &Token::random())).expect("written");
        assert_eq!(journal.entries().expect("one").len(), 1);
    }
}
