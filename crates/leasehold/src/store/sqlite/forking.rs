//! Closes every SQLite file before this process forks.
//!
//! SQLite keeps a table of the locks that a process has on a file. A child inherits the table but not the locks, so it
//! would write without a lock and lose commits, even if it opened the file again. If the files are closed before the
//! fork and opened after it, both parent and child are safe.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::store::{StoreError, StoreErrorKind};

/// Longest wait of a fork for files to be closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

static FILES: Mutex<Files> = Mutex::new(Files { pid: 0, open: 0, forking: false, stores: Vec::new(), last: 0 });
static CHANGED: Condvar = Condvar::new();

struct Files {
    /// The id of the process that has the files open.
    pid: u32,
    /// Number of files that are open, or are being opened or closed.
    open: usize,
    forking: bool,
    /// The stores that can be asked to close their file.
    stores: Vec<(u64, AskToClose)>,
    last: u64,
}

/// Asks a store to close its file until the fork is over.
type AskToClose = Box<dyn Fn() + Send>;

fn files() -> MutexGuard<'static, Files> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts an open file. Taken before the file is opened, dropped after it is closed.
pub(super) struct OpenGuard(());

impl OpenGuard {
    /// Registers a file that is about to be opened. Waits while this process forks.
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

impl Drop for OpenGuard {
    fn drop(&mut self) {
        let mut files = files();
        files.open = files.open.saturating_sub(1);
        drop(files);
        CHANGED.notify_all();
    }
}

/// The registration of a store whose file can be closed for a fork. Dropping it ends the registration.
pub(super) struct Registration(u64);

impl Registration {
    pub(super) fn new(ask_to_close: impl Fn() + Send + 'static) -> Self {
        let mut files = files();
        if files.forking {
            // The store was being opened when the others were asked to close.
            ask_to_close();
        }
        files.last += 1;
        let id = files.last;
        files.stores.push((id, Box::new(ask_to_close)));
        Self(id)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        files().stores.retain(|(id, _)| *id != self.0);
    }
}

/// Keeps every SQLite file closed while this process forks, until it is dropped (in the parent) or
/// [`in_child`](Self::in_child) is called. Requests to a store wait meanwhile, and leases stay.
///
/// Use it around every fork of a process that may have a SQLite store open, if the child is to use one. Otherwise
/// opening a store in the child fails with [`Forked`](StoreErrorKind::Forked). It must begin and end in the thread that
/// forks.
#[must_use = "the files are opened again when it is dropped"]
pub struct Forking {
    /// Locked by the thread that forks, which can unlock it in both processes.
    files: Option<MutexGuard<'static, Files>>,
}

impl Forking {
    /// Closes every file. If a store does not close its file within seconds, it stays open, and the child cannot open
    /// any.
    pub fn begin() -> Self {
        let mut files = files();
        files.forking = true;
        files.stores.iter().for_each(|(_, ask_to_close)| ask_to_close());
        let closed = CHANGED.wait_timeout_while(files, CLOSE_TIMEOUT, |files| files.open > 0);
        Self { files: Some(closed.unwrap_or_else(PoisonError::into_inner).0) }
    }

    /// Starts over in the child, without the stores of the parent. Call it instead of dropping.
    pub fn in_child(mut self) {
        if let Some(files) = &mut self.files {
            // Not dropped: a thread of the parent may have been using the channels at the fork.
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
