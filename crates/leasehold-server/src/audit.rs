//! The audit: who changed what, to whose harm and why. One line of JSON each, on disk before the change is
//! made and before it is answered.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

/// A file that is only ever added to.
#[derive(Debug)]
pub(crate) struct Audit {
    path: PathBuf,
    file: Mutex<File>,
}

/// One line.
#[derive(Debug, Serialize)]
pub(crate) struct Line<'a> {
    /// `asked`, then what became of it.
    pub(crate) outcome: &'a str,
    /// What was asked for: `revoke`, `force`, or `ask` (to finish).
    pub(crate) action: &'a str,
    pub(crate) name: &'a str,
    pub(crate) reason: &'a str,
    /// The key's name, and its id.
    pub(crate) who: &'a str,
    pub(crate) key_id: Option<&'a str>,
    /// The holder that was named.
    pub(crate) holder_id: &'a str,
    /// Who that was, and its fence, once it is known.
    pub(crate) owner: Option<&'a str>,
    pub(crate) fence: Option<u64>,
    /// Since when it held the lock, and its last sign of life.
    pub(crate) since_ms: Option<u64>,
    pub(crate) last_seen_ms: Option<u64>,
}

impl Audit {
    /// Opens it, readable by its owner alone, and makes its directory.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        }
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
        Ok(Self { path: path.to_owned(), file: Mutex::new(file) })
    }

    /// Writes one line, to the disk.
    pub(crate) fn write(&self, line: &Line<'_>) -> io::Result<()> {
        #[derive(Serialize)]
        struct Dated<'a> {
            at_ms: u64,
            #[serde(flatten)]
            line: &'a Line<'a>,
        }
        let text = serde_json::to_string(&Dated { at_ms: crate::wall_ms(), line })? + "\n";
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        // In one write: several servers may share the file.
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_data());
        written.inspect_err(|error| tracing::error!(path = %self.path.display(), %error, "the audit cannot be written"))
    }
}
