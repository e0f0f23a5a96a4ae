//! A process forks, and none of its files is open at that moment.
//!
//! SQLite keeps a table of the locks a process has on a file. A child inherits the table but not the locks,
//! so it would write where it must not, and lose commits; even one that opens the file anew. Whoever closes
//! before the fork and opens after it is safe, and so is its child.

use std::sync::mpsc::Sender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::driver::Command;
use crate::store::{StoreError, StoreErrorKind};

/// How long a fork waits for files to be closed.
const PATIENCE: Duration = Duration::from_secs(5);

static FILES: Mutex<Files> = Mutex::new(Files { pid: 0, open: 0, forking: false, stores: Vec::new(), last: 0 });
static CHANGED: Condvar = Condvar::new();

struct Files {
    /// Which process has them open.
    pid: u32,
    /// How many are open, or are being opened or closed.
    open: usize,
    forking: bool,
    /// Those that can be asked to stand aside.
    stores: Vec<(u64, Sender<Command>)>,
    last: u64,
}

fn files() -> MutexGuard<'static, Files> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// To be held while a file is open; dropped after it was closed.
pub(super) struct Open(());

impl Open {
    /// Waits while this process forks.
    pub(super) fn begin() -> Result<Self, StoreError> {
        let files = files();
        let mut files = CHANGED.wait_while(files, |files| files.forking).unwrap_or_else(PoisonError::into_inner);
        let pid = std::process::id();
        if files.open > 0 && files.pid != pid {
            let why = "a SQLite file was open when this process was forked: none can be used here. Open it after the \
                       fork only, or start the process by exec";
            return Err(StoreError::new(StoreErrorKind::Forked, why));
        }
        files.pid = pid;
        files.open += 1;
        Ok(Self(()))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut files = files();
        files.open = files.open.saturating_sub(1);
        drop(files);
        CHANGED.notify_all();
    }
}

/// A store whose file can be closed for a fork, as long as this lives.
pub(super) struct Listed(u64);

impl Listed {
    pub(super) fn new(commands: Sender<Command>) -> Self {
        let mut files = files();
        if files.forking {
            // It was being opened when the others were told.
            let _ = commands.send(Command::StandAside);
        }
        files.last += 1;
        let id = files.last;
        files.stores.push((id, commands));
        Self(id)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        files().stores.retain(|(id, _)| *id != self.0);
    }
}

/// This process is about to fork: no SQLite file is open, and none can be opened, until this is dropped (in the
/// parent) or [`in_child`](Self::in_child) is called. What is asked of a store meanwhile waits, and leases stay.
///
/// To be used around every fork of a process that may have a SQLite store open, if its child is to use one;
/// otherwise the child is refused with [`Forked`](StoreErrorKind::Forked). It must begin and end in the thread
/// that forks.
#[must_use = "the files are opened again when it is dropped"]
pub struct Forking {
    /// Nobody else has it locked at the fork, and the thread that forks can unlock it on both sides.
    files: Option<MutexGuard<'static, Files>>,
}

impl Forking {
    /// Closes every file. A store that does not come to it within seconds keeps its file open, and then the
    /// child is refused.
    pub fn begin() -> Self {
        let mut files = files();
        files.forking = true;
        for (_, commands) in &files.stores {
            // An error says that the thread is gone, or is about to be.
            let _ = commands.send(Command::StandAside);
        }
        let closed = CHANGED.wait_timeout_while(files, PATIENCE, |files| files.open > 0);
        Self { files: Some(closed.unwrap_or_else(PoisonError::into_inner).0) }
    }

    /// Instead of a drop, in the child: it begins anew, without anything of its parent's.
    pub fn in_child(mut self) {
        if let Some(files) = &mut self.files {
            // Not dropped: what leads to a thread of the parent's may have been in use there.
            std::mem::forget(std::mem::take(&mut files.stores));
        }
    }
}

impl Drop for Forking {
    fn drop(&mut self) {
        let Some(mut files) = self.files.take() else { return };
        files.forking = false;
        drop(files);
        CHANGED.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::thread;

    use super::super::SqliteStore;
    use super::*;
    use crate::facts::LockName;
    use crate::store::Inspect;

    fn is_open(path: &Path) -> bool {
        let open = fs::read_dir("/proc/self/fd").expect("on Linux");
        open.filter_map(|fd| fs::read_link(fd.ok()?.path()).ok()).any(|file| file == path)
    }

    fn ask(store: &SqliteStore) -> bool {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(store.holder(&LockName::new("a").expect("a name"))).expect("an answer").is_none()
    }

    #[test]
    fn no_file_is_open_while_this_process_forks() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().canonicalize().expect("a path").join("locks.db");
        let store = SqliteStore::open(&path).expect("opens");
        assert!(is_open(&path) && ask(&store));

        let forking = Forking::begin();
        assert!(!is_open(&path), "a child would inherit it");
        thread::scope(|threads| {
            let asked = threads.spawn(|| ask(&store));
            let opened = threads.spawn(|| SqliteStore::open(&path).is_ok());
            thread::sleep(Duration::from_millis(100));
            assert!(!asked.is_finished() && !opened.is_finished(), "both wait");
            assert!(!is_open(&path));
            drop(forking);
            assert!(asked.join().expect("no panic") && opened.join().expect("no panic"));
        });
        assert!(is_open(&path));
        drop(Forking::begin());
        assert!(ask(&store), "any number of times");
    }
}
