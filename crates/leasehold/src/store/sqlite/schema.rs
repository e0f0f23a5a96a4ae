//! Opens the file: its settings, tables and migrations, and errors of SQLite.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior};

use super::path::{beside, not_writable, unusable};
use super::permissions::{self, Sharing};
use crate::clock::Moment;
use crate::store::{StoreError, StoreErrorKind};

/// The application id in the file's header: `lhld`.
const APPLICATION: i64 = 0x6c68_6c64;
/// The version of the tables. A file with a higher version is rejected.
const VERSION: i64 = 4;
/// An operation fails if the file was locked for this long.
const BUSY_TIMEOUT_MS: u64 = 2_000;
/// The first wait for SQLite's lock, and every later one: short and even, so that no process starves.
const FIRST_WAIT: Duration = Duration::from_micros(50);
const NEXT_WAIT: Duration = Duration::from_micros(300);
/// The log is truncated to this size when it restarts after having grown beyond it.
const LOG_KEEPS_BYTES: u64 = 8 << 20;

const TABLES: &str = "
    -- One row per key (`KeySpace` makes it from namespace and name); free when `ends` is past, or when it was
    -- taken in an earlier boot (`row::lock_row`). A free row stays for a while: taking it again changes one page in place. `counter` is the highest number (fence or
    -- ticket) ever given for the name, `queue_ends` 0 while nobody waits.
    CREATE TABLE locks (
        name TEXT NOT NULL PRIMARY KEY, flag INTEGER NOT NULL, token TEXT NOT NULL, fence INTEGER NOT NULL,
        counter INTEGER NOT NULL, inbox TEXT, since_ms INTEGER NOT NULL, ttl_ms INTEGER NOT NULL,
        owner TEXT NOT NULL, ends INTEGER NOT NULL, boot INTEGER NOT NULL, queue_ends INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE waiting (
        name TEXT NOT NULL, ticket INTEGER NOT NULL, token TEXT NOT NULL, inbox TEXT, ttl_ms INTEGER NOT NULL,
        since_ms INTEGER NOT NULL, owner TEXT NOT NULL, polled INTEGER NOT NULL,
        PRIMARY KEY (name, ticket, token)
    ) WITHOUT ROWID;
    CREATE INDEX waiting_token ON waiting (token);
    -- What a process is to be told, until it has read it. `at` is the boot clock of the turn.
    CREATE TABLE messages (
        inbox TEXT NOT NULL, id INTEGER NOT NULL, kind INTEGER NOT NULL, token TEXT NOT NULL,
        fence INTEGER NOT NULL, lasts_ms INTEGER NOT NULL, at INTEGER NOT NULL, reason TEXT NOT NULL,
        PRIMARY KEY (inbox, id)
    ) WITHOUT ROWID;
    -- Above every number of a row that was cleared away.
    CREATE TABLE meta (id INTEGER PRIMARY KEY CHECK (id = 1), floor INTEGER NOT NULL);
    INSERT INTO meta VALUES (1, 0);
    CREATE TABLE counters (
        ns TEXT NOT NULL, name TEXT NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (ns, name)
    ) WITHOUT ROWID;
    CREATE TABLE events (id INTEGER PRIMARY KEY, ns TEXT NOT NULL, json TEXT NOT NULL);
    -- Pages kept back so that a lock can be given up when the disk is full.
    CREATE TABLE reserve (id INTEGER PRIMARY KEY, filler BLOB NOT NULL);
";

/// The tables that version 3 added.
const BINDINGS: &str = "
    -- `slots` is the key of the node's slots of which this binding has one. The value stands last: what
    -- is looked at is found without reading it.
    CREATE TABLE bindings (
        key TEXT NOT NULL PRIMARY KEY, claim TEXT NOT NULL, revision INTEGER NOT NULL, keep_ms INTEGER NOT NULL,
        slots TEXT, ends INTEGER NOT NULL, boot INTEGER NOT NULL, ends_wall INTEGER NOT NULL, value BLOB NOT NULL
    );
    CREATE INDEX bindings_slots ON bindings (slots) WHERE slots IS NOT NULL;
    CREATE INDEX bindings_ends ON bindings (ends_wall);
";

/// The columns that version 4 added.
const SINCE_VERSION_4: &str = "
    -- The id of the `.alive` directory, and where the database was when they were paired.
    ALTER TABLE meta ADD COLUMN alive TEXT NOT NULL DEFAULT '';
    ALTER TABLE meta ADD COLUMN place TEXT NOT NULL DEFAULT '';
    -- The boot clock when a lease was granted or last renewed.
    ALTER TABLE locks ADD COLUMN written INTEGER NOT NULL DEFAULT 0;
    UPDATE locks SET written = ends - ttl_ms;
";

/// The migration from version 1, which had no namespaces: its rows have plain names and belong to the default one.
const FROM_VERSION_1: &str = "
    UPDATE locks SET name = 'leasehold:lock:' || name
        WHERE NOT (name GLOB 'gpu_lock:*' OR name GLOB 'task_lock:*');
    UPDATE waiting SET name = 'leasehold:lock:' || name
        WHERE NOT (name GLOB 'gpu_lock:*' OR name GLOB 'task_lock:*');
    ALTER TABLE counters RENAME TO counters_1;
    CREATE TABLE counters (
        ns TEXT NOT NULL, name TEXT NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (ns, name)
    ) WITHOUT ROWID;
    INSERT INTO counters (ns, name, n) SELECT 'leasehold', name, n FROM counters_1;
    DROP TABLE counters_1;
    ALTER TABLE events ADD COLUMN ns TEXT NOT NULL DEFAULT 'leasehold';
";

/// How long to wait for SQLite's lock. The busy handler shares it.
#[derive(Clone)]
pub(super) struct BusyTimeout(Arc<AtomicU64>);

impl BusyTimeout {
    /// Runs `run` with a shorter timeout than usual.
    pub(super) fn limited<R>(&self, limit: Duration, run: impl FnOnce() -> R) -> R {
        self.0.store(u64::try_from(limit.as_millis()).unwrap_or(BUSY_TIMEOUT_MS), Ordering::Relaxed);
        let result = run();
        self.0.store(BUSY_TIMEOUT_MS, Ordering::Relaxed);
        result
    }
}

/// Opens the file, and creates it if there is none. Returns whether its tables were created.
pub(super) fn open(path: &Path, sharing: Sharing) -> Result<(Connection, BusyTimeout, bool), StoreError> {
    permissions::create(path, sharing).map_err(|e| unusable(path, &e))?;
    for suffix in ["", "-wal", "-shm", ".ckpt"] {
        permissions::tighten(&beside(path, suffix));
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut conn = Connection::open_with_flags(path, flags).map_err(|e| sqlite_error(path, &e))?;
    let busy_timeout = BusyTimeout(Arc::new(AtomicU64::new(BUSY_TIMEOUT_MS)));
    set_busy_handler(&mut conn, &busy_timeout).map_err(|e| sqlite_error(path, &e))?;
    let began = Moment::now();
    loop {
        match set_up(&mut conn) {
            Ok(Ok(new)) => {
                ["-wal", "-shm"].iter().for_each(|suffix| permissions::share(path, &beside(path, suffix)));
                return Ok((conn, busy_timeout, new));
            }
            Ok(Err(error)) => return Err(error),
            // The busy handler does not cover the switch of a new file to WAL mode.
            Err(error) if is_busy(&error) && began.until(Moment::now()) < Duration::from_millis(BUSY_TIMEOUT_MS) => {
                thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(sqlite_error(path, &error)),
        }
    }
}

fn set_up(conn: &mut Connection) -> rusqlite::Result<Result<bool, StoreError>> {
    let number = |conn: &Connection, sql: &str| conn.query_row(sql, [], |row| row.get::<_, i64>(0));
    // All three in one transaction: another process may be creating the tables right now.
    let look = conn.transaction()?;
    let tables = number(&look, "SELECT count(*) FROM sqlite_master")?;
    let (application, version) = (number(&look, "PRAGMA application_id")?, number(&look, "PRAGMA user_version")?);
    look.commit()?;
    if let Err(error) = check_version(application, version, tables) {
        return Ok(Err(error));
    }
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    if tables == 0 {
        // Small pages, because a commit writes whole pages and a lock is small. Both settings take effect only before
        // the first table. Repeating the second would write and sync a page.
        conn.execute_batch("PRAGMA page_size = 1024; PRAGMA auto_vacuum = INCREMENTAL;")?;
    }
    conn.query_row("PRAGMA journal_mode = WAL", [], |_| Ok(()))?;
    conn.execute_batch("PRAGMA synchronous = NORMAL; PRAGMA temp_store = MEMORY;")?;
    conn.query_row("PRAGMA wal_autocheckpoint = 0", [], |_| Ok(()))?;
    conn.query_row(&format!("PRAGMA journal_size_limit = {LOG_KEEPS_BYTES}"), [], |_| Ok(()))?;
    conn.set_prepared_statement_cache_capacity(64);
    if tables > 0 && version == VERSION {
        return Ok(Ok(false));
    }
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate)?;
    // Another process may have been first.
    let new = number(&tx, "SELECT count(*) FROM sqlite_master")? == 0;
    let version = number(&tx, "PRAGMA user_version")?;
    if new {
        tx.execute_batch(TABLES)?;
    } else if version == 1 {
        tx.execute_batch(FROM_VERSION_1)?;
    }
    if new || version < 3 {
        tx.execute_batch(BINDINGS)?;
    }
    if new || version < 4 {
        tx.execute_batch(SINCE_VERSION_4)?;
    }
    tx.execute_batch(&format!("PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION};"))?;
    tx.commit()?;
    Ok(Ok(new))
}

fn check_version(application: i64, version: i64, tables: i64) -> Result<(), StoreError> {
    if tables > 0 && application != APPLICATION {
        return Err(StoreError::new(StoreErrorKind::File, "it is a database of another program"));
    }
    if version > VERSION {
        let text = format!("the file has version {version}, this leasehold knows {VERSION}");
        return Err(StoreError::new(StoreErrorKind::NewerVersion, text));
    }
    Ok(())
}

fn set_busy_handler(conn: &mut Connection, busy_timeout: &BusyTimeout) -> rusqlite::Result<()> {
    let limit = busy_timeout.clone();
    let mut began = Moment::now();
    conn.busy_handler(Some(move |tries| {
        if tries == 0 {
            began = Moment::now();
        }
        let waited = began.until(Moment::now());
        thread::sleep(if tries == 0 { FIRST_WAIT } else { NEXT_WAIT });
        waited < Duration::from_millis(limit.0.load(Ordering::Relaxed))
    }))
}

fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// Whether space was missing, on the disk or within the limit of `disk_reserve`.
pub(super) fn is_full(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(ErrorCode::DiskFull)
        || error.sqlite_error().is_some_and(|e| e.extended_code == rusqlite::ffi::SQLITE_IOERR_SHMSIZE)
}

/// Whether a write failed, for any reason.
pub(super) fn is_failed_write(error: &rusqlite::Error) -> bool {
    error.sqlite_error().is_some_and(|e| e.extended_code == rusqlite::ffi::SQLITE_IOERR_WRITE)
}

/// Makes an error with a result code of SQLite.
pub(super) fn failure(code: i32) -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), None)
}

/// Translates an error of SQLite by what the caller can do about it.
pub(super) fn sqlite_error(path: &Path, error: &rusqlite::Error) -> StoreError {
    use ErrorCode as C;
    let kind = match error.sqlite_error_code() {
        _ if is_full(error) => StoreErrorKind::DiskFull,
        Some(C::DatabaseBusy | C::DatabaseLocked | C::FileLockingProtocolFailed) => StoreErrorKind::Busy,
        Some(
            C::NotADatabase
            | C::DatabaseCorrupt
            | C::CannotOpen
            | C::PermissionDenied
            | C::ReadOnly
            | C::SystemIoFailure
            | C::AuthorizationForStatementDenied,
        ) => return not_writable(path).unwrap_or_else(|| unusable(path, error)),
        Some(C::OutOfMemory) => StoreErrorKind::OutOfMemory,
        _ => StoreErrorKind::Other,
    };
    StoreError::new(kind, format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::super::SqliteStore;
    use super::super::boot::{self, now_ms};
    use super::super::row::sql;
    use super::*;
    use crate::facts::{BindingKind, LockName, Token};
    use crate::store::{Bind, BindingId, Inspect, Release, Store};

    /// The tables as version 1 made them.
    const TABLES_1: &str = "
        CREATE TABLE locks (
            name TEXT NOT NULL PRIMARY KEY, flag INTEGER NOT NULL, token TEXT NOT NULL, fence INTEGER NOT NULL,
            counter INTEGER NOT NULL, inbox TEXT, since_ms INTEGER NOT NULL, ttl_ms INTEGER NOT NULL,
            owner TEXT NOT NULL, ends INTEGER NOT NULL, boot INTEGER NOT NULL, queue_ends INTEGER NOT NULL
        ) WITHOUT ROWID;
        CREATE TABLE waiting (
            name TEXT NOT NULL, ticket INTEGER NOT NULL, token TEXT NOT NULL, inbox TEXT, ttl_ms INTEGER NOT NULL,
            since_ms INTEGER NOT NULL, owner TEXT NOT NULL, polled INTEGER NOT NULL,
            PRIMARY KEY (name, ticket, token)
        ) WITHOUT ROWID;
        CREATE INDEX waiting_token ON waiting (token);
        CREATE TABLE messages (
            inbox TEXT NOT NULL, id INTEGER NOT NULL, kind INTEGER NOT NULL, token TEXT NOT NULL,
            fence INTEGER NOT NULL, lasts_ms INTEGER NOT NULL, at INTEGER NOT NULL, reason TEXT NOT NULL,
            PRIMARY KEY (inbox, id)
        ) WITHOUT ROWID;
        CREATE TABLE meta (id INTEGER PRIMARY KEY CHECK (id = 1), floor INTEGER NOT NULL);
        INSERT INTO meta VALUES (1, 0);
        CREATE TABLE counters (name TEXT NOT NULL PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;
        CREATE TABLE events (id INTEGER PRIMARY KEY, json TEXT NOT NULL);
        CREATE TABLE reserve (id INTEGER PRIMARY KEY, filler BLOB NOT NULL);
        INSERT INTO counters VALUES ('total_locks', 7);
    ";

    #[tokio::test]
    async fn a_file_of_version_1_keeps_its_locks_in_the_default_namespace() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("locks.db");
        let old = Connection::open(&path).expect("opens");
        old.execute_batch(TABLES_1).expect("made");
        old.execute_batch(&format!("PRAGMA application_id = {APPLICATION}; PRAGMA user_version = 1;")).expect("set");
        let held = ["order:1", "gpu_lock:0", "leasehold:lock:x"].map(|name| (name, Token::random()));
        for (name, token) in &held {
            const HELD: &str = "INSERT INTO locks VALUES (?1, 0, ?2, 5, 5, NULL, 1, 60000, 'me@here:1', ?3, ?4, 0)";
            let ends = sql(now_ms() + 60_000);
            old.execute(HELD, (name, token.reveal(), ends, boot::read().expect("known"))).expect("written");
        }
        drop(old);
        // Opened twice, migrated once.
        let (store, _again) = (SqliteStore::open(&path).expect("opens"), SqliteStore::open(&path).expect("opens"));
        for (name, token) in &held {
            let name = LockName::new(name).expect("a name");
            let holder = store.holder(&name).await.expect("answered").expect("still held");
            assert_eq!(holder.id, token.holder_id());
            assert_eq!(store.release(&name, token).await, Ok(Release::Released));
        }
        assert_eq!(store.counters().await.expect("answered"), [("total_locks".to_owned(), 7)]);
        assert_eq!(store.integrity().await, Ok("ok".into()));
    }

    #[tokio::test]
    async fn a_file_of_version_2_gets_its_table_of_bindings() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("locks.db");
        let old = Connection::open(&path).expect("opens");
        old.execute_batch(TABLES).expect("made");
        old.execute_batch(&format!("PRAGMA application_id = {APPLICATION}; PRAGMA user_version = 2;")).expect("set");
        drop(old);
        let store = SqliteStore::open(&path).expect("opens");
        let id = BindingId { kind: BindingKind::Bindings, id: LockName::new("r").expect("a name") };
        assert_eq!(store.read(&id).await, Ok(None));
        assert_eq!(store.integrity().await, Ok("ok".into()));
    }
}
