//! Pairs a database with its `.alive` directory. Both contain the same random id, and a database beside another
//! directory is rejected.
//!
//! The directory is found by the path. If two paths led to one database and two directories, processes would share rows
//! without seeing each other's liveness.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, TransactionBehavior, params};

use super::boot::{self, now_ms};
use super::forking;
use super::liveness::{directory_of, is_gone_in, make_dir, random_id};
use super::path::{self, directory, shell_word, unusable};
use super::permissions::Sharing;
use super::row::{sql, unsql};
use super::schema::{self, sqlite_error};
use crate::store::{StoreError, StoreErrorKind};

/// The file in the directory that contains the id.
const ID_FILE: &str = ".id";

/// What the database records about its directory. Both fields are empty before the first pairing.
struct PairedWith {
    id: String,
    /// The inode of the directory that contains the database, and the name of the file.
    place: String,
}

/// Creates the directory if there is none, and checks that it belongs to the database.
pub(super) fn pair(conn: &mut Connection, db: &Path, sharing: Sharing) -> Result<PathBuf, StoreError> {
    let dir = directory_of(db);
    make_dir(&dir, sharing).map_err(|e| unusable(&dir, &e))?;
    let place = place_of(db)?;
    let paired = paired(conn).map_err(|e| sqlite_error(db, &e))?;
    if !paired.id.is_empty() && id_of(&dir)?.as_ref() == Some(&paired.id) && paired.place == place {
        return Ok(dir);
    }
    pair_exclusively(conn, db, &dir, &place, sharing)?;
    Ok(dir)
}

/// Pairs the database with the directory while no other process writes.
fn pair_exclusively(
    conn: &mut Connection,
    db: &Path,
    dir: &Path,
    place: &str,
    sharing: Sharing,
) -> Result<(), StoreError> {
    let sql_error = |e: rusqlite::Error| sqlite_error(db, &e);
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(sql_error)?;
    let paired = paired(&tx).map_err(sql_error)?;
    let id = match id_of(dir)? {
        Some(found) if paired.id.is_empty() || found == paired.id => found,
        None if paired.id.is_empty() => write_id(dir, random_id(), sharing)?,
        // The directory was removed, and the database is in its place. Leases whose FIFOs are gone last for their ttl.
        None if paired.place == place => write_id(dir, paired.id.clone(), sharing)?,
        _ => return Err(wrong_directory(db, dir)),
    };
    if (paired.id.as_str(), paired.place.as_str()) != (id.as_str(), place) {
        record_pairing(&tx, &id, place).map_err(sql_error)?;
    }
    tx.commit().map_err(sql_error)
}

fn wrong_directory(db: &Path, dir: &Path) -> StoreError {
    let text = format!(
        "{} does not belong to {}: the database was copied, moved or restored, or other processes use it by another path. \
         All processes must use the same path. If they do, run `leasehold --store {} doctor --adopt` after its leases have ended",
        dir.display(),
        db.display(),
        shell_word(&format!("sqlite:{}", db.display()))
    );
    StoreError::new(StoreErrorKind::File, text)
}

fn paired(conn: &Connection) -> rusqlite::Result<PairedWith> {
    let read = |row: &rusqlite::Row<'_>| Ok(PairedWith { id: row.get(0)?, place: row.get(1)? });
    conn.query_row("SELECT alive, place FROM meta", [], read)
}

fn record_pairing(conn: &Connection, id: &str, place: &str) -> rusqlite::Result<()> {
    conn.execute("UPDATE meta SET alive = ?1, place = ?2", [id, place]).map(drop)
}

/// Identifies where the database is. The result is the same for every bind mount of the whole directory.
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

/// Writes the id atomically, even if this process is killed meanwhile.
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

/// Pairs a database with the `.alive` directory beside it, if no lease in it may have a living holder.
pub(super) fn adopt(path: &Path) -> Result<(), StoreError> {
    let db = path::prepare(path)?;
    if !db.exists() {
        return Err(unusable(&db, &"there is no such database"));
    }
    let boot = boot::read()?;
    let sharing = Sharing::of(directory(&db)).map_err(|e| unusable(&db, &e))?;
    let _open = forking::OpenGuard::begin()?;
    let (mut conn, _, _) = schema::open(&db, sharing)?;
    let dir = directory_of(&db);
    make_dir(&dir, sharing).map_err(|e| unusable(&dir, &e))?;
    let sql_error = |e: rusqlite::Error| sqlite_error(&db, &e);
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
    record_pairing(&tx, &id, &place_of(&db)?).map_err(sql_error)?;
    tx.commit().map_err(sql_error)
}

/// Counts the leases that may have a living holder, and returns the time until the last one ends without renewals.
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
