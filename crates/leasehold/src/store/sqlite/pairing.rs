//! A database and its `.alive` directory belong together: both carry the same random id, and a database that finds
//! another directory beside it is refused.
//!
//! The directory is found by the path. Two paths that lead to one database and to two directories would share rows and
//! not see each other's processes.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, TransactionBehavior, params};

use super::alive::{directory_of, is_gone_in, make_dir, random_id};
use super::boot::{self, now_ms};
use super::modes::Sharing;
use super::path::{self, directory, shell_word, unusable};
use super::row::{sql, unsql};
use super::schema::{self, refused};
use super::{SqliteStore, forking};
use crate::store::{StoreError, StoreErrorKind};

/// The file in the directory that carries the id.
const ID_FILE: &str = ".id";

/// What the database knows of its directory; both empty before the first.
struct Known {
    id: String,
    /// The inode of the directory the database is in, and its name there.
    place: String,
}

/// Makes the directory where there is none, and sees that it is the database's own.
pub(super) fn pair(conn: &mut Connection, db: &Path, sharing: Sharing) -> Result<PathBuf, StoreError> {
    let dir = directory_of(db);
    make_dir(&dir, sharing).map_err(|e| unusable(&dir, &e))?;
    let place = place_of(db)?;
    let known = known(conn).map_err(|e| refused(db, &e))?;
    if !known.id.is_empty() && id_of(&dir)?.as_ref() == Some(&known.id) && known.place == place {
        return Ok(dir);
    }
    pair_alone(conn, db, &dir, &place, sharing)?;
    Ok(dir)
}

/// With no other process writing.
fn pair_alone(conn: &mut Connection, db: &Path, dir: &Path, place: &str, sharing: Sharing) -> Result<(), StoreError> {
    let sql_error = |e: rusqlite::Error| refused(db, &e);
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(sql_error)?;
    let known = known(&tx).map_err(sql_error)?;
    let id = match id_of(dir)? {
        Some(found) if known.id.is_empty() || found == known.id => found,
        None if known.id.is_empty() => write_id(dir, random_id(), sharing)?,
        // The directory was removed, and the database is where it was. Leases whose FIFOs are gone live by their ttl.
        None if known.place == place => write_id(dir, known.id.clone(), sharing)?,
        _ => return Err(strange(db, dir)),
    };
    if (known.id.as_str(), known.place.as_str()) != (id.as_str(), place) {
        note(&tx, &id, place).map_err(sql_error)?;
    }
    tx.commit().map_err(sql_error)
}

fn strange(db: &Path, dir: &Path) -> StoreError {
    let text = format!(
        "{} does not belong to {}: the database was copied, moved or restored, or other processes use it by another path. \
         All processes must use the same path. If they do, run `leasehold --store {} doctor --adopt` after its leases have ended",
        dir.display(),
        db.display(),
        shell_word(&format!("sqlite:{}", db.display()))
    );
    StoreError::new(StoreErrorKind::File, text)
}

fn known(conn: &Connection) -> rusqlite::Result<Known> {
    let read = |row: &rusqlite::Row<'_>| Ok(Known { id: row.get(0)?, place: row.get(1)? });
    conn.query_row("SELECT alive, place FROM meta", [], read)
}

fn note(conn: &Connection, id: &str, place: &str) -> rusqlite::Result<()> {
    conn.execute("UPDATE meta SET alive = ?1, place = ?2", [id, place]).map(drop)
}

/// The same for every bind mount of the whole directory.
fn place_of(db: &Path) -> Result<String, StoreError> {
    let home = directory(db);
    let inode = fs::metadata(home).map_err(|e| unusable(home, &e))?.ino();
    Ok(format!("{inode}/{}", db.file_name().unwrap_or_default().to_string_lossy()))
}

fn id_of(dir: &Path) -> Result<Option<String>, StoreError> {
    let file = dir.join(ID_FILE);
    match fs::read_to_string(&file) {
        Ok(id) => Ok(Some(id.trim().to_owned()).filter(|id| !id.is_empty())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(unusable(&file, &error)),
    }
}

/// Whole or not at all, also where this process is killed over it.
fn write_id(dir: &Path, id: String, sharing: Sharing) -> Result<String, StoreError> {
    let (new, file) = (dir.join(format!("{ID_FILE}.new")), dir.join(ID_FILE));
    let written = || -> std::io::Result<()> {
        // Left by a process that was killed.
        let _ = fs::remove_file(&new);
        let mut open = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
        sharing.apply(&open)?;
        open.write_all(format!("{id}\n").as_bytes())?;
        fs::rename(&new, &file)
    };
    written().map_err(|e| unusable(&file, &e))?;
    Ok(id)
}

impl SqliteStore {
    /// Pairs a database with the `.alive` directory beside it, after it was copied, moved or restored without its own.
    /// To be used when no process uses the database by another path.
    ///
    /// # Errors
    /// [`StoreErrorKind::Busy`] while leases in it last: their holders may be alive where they cannot be seen from here.
    /// Otherwise as [`SqliteStore::open`].
    pub fn adopt(path: &Path) -> Result<(), StoreError> {
        let db = path::prepare(path)?;
        if !db.exists() {
            return Err(unusable(&db, &"there is no such database"));
        }
        let boot = boot::read()?;
        let sharing = Sharing::of(directory(&db)).map_err(|e| unusable(&db, &e))?;
        let _open = forking::Open::begin()?;
        let (mut conn, _, _) = schema::open(&db, sharing)?;
        let dir = directory_of(&db);
        make_dir(&dir, sharing).map_err(|e| unusable(&dir, &e))?;
        let sql_error = |e: rusqlite::Error| refused(&db, &e);
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(sql_error)?;
        let (leases, longest) = lasting(&tx, boot, &dir).map_err(sql_error)?;
        if leases > 0 {
            let (which, seconds) = (if leases == 1 { "lease" } else { "leases" }, longest.as_millis().div_ceil(1_000));
            let text = format!(
                "{} cannot be adopted yet: {leases} {which} in it may have a living holder. Stop the programs that use it and \
                 run the same command again; if nothing renews them, they end within {seconds} s",
                db.display(),
            );
            return Err(StoreError::new(StoreErrorKind::Busy, text));
        }
        let id = match id_of(&dir)? {
            Some(id) => id,
            None => write_id(&dir, random_id(), sharing)?,
        };
        note(&tx, &id, &place_of(&db)?).map_err(sql_error)?;
        tx.commit().map_err(sql_error)
    }
}

/// The leases that may have a living holder, and how long until the last one ends. Renewals move that end.
fn lasting(conn: &Connection, boot: i64, dir: &Path) -> rusqlite::Result<(usize, Duration)> {
    const HELD: &str = "SELECT inbox, ends FROM locks WHERE ends > ?1 AND NOT (boot <> ?2 AND written > ?1)";
    let now = now_ms();
    let mut statement = conn.prepare(HELD)?;
    let rows =
        statement.query_map(params![sql(now), boot], |row| Ok((row.get::<_, Option<String>>(0)?, row.get(1)?)))?;
    let (mut leases, mut last) = (0, now);
    for row in rows {
        let (inbox, ends) = row?;
        if !inbox.is_some_and(|inbox| is_gone_in(dir, &inbox)) {
            (leases, last) = (leases + 1, last.max(unsql(ends)));
        }
    }
    Ok((leases, Duration::from_millis(last - now)))
}
