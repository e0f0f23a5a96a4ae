//! Resources that check fences: the programs of the guide `docs/using-a-fence.md`.

mod service;

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, named_params};

pub use service::routes;

/// The table, and the one statement that writes to it. PostgreSQL takes both as they are.
pub const TABLE: &str = include_str!("../accounts.sql");
/// Changes one row, or none when the fence is not above the one that wrote last.
pub const WRITE: &str = include_str!("../write.sql");
/// The same for a Redis hash.
pub const WRITE_REDIS: &str = include_str!("../write.lua");

/// How long a writer waits for another one's transaction.
const BUSY: Duration = Duration::from_secs(5);

/// Accounts in a database that many processes write to.
#[derive(Debug)]
pub struct Accounts(Connection);

impl Accounts {
    /// Opens the database, and makes the table when there is none.
    pub fn open(path: &Path) -> rusqlite::Result<Self> {
        let connection = Connection::open(path)?;
        connection.busy_timeout(BUSY)?;
        connection.execute_batch(TABLE)?;
        Ok(Self(connection))
    }

    /// Writes a balance. `false`: somebody with a higher fence has written since, so the writer has
    /// lost its lock, and nothing was changed.
    pub fn write(&self, fence: u64, id: i64, balance: i64) -> rusqlite::Result<bool> {
        let fence = i64::try_from(fence).expect("fences end at 2^52");
        let rows = self.0.execute(WRITE, named_params! { "$1": fence, "$2": id, "$3": balance })?;
        Ok(rows == 1)
    }

    /// The balance, and the fence that wrote it.
    pub fn read(&self, id: i64) -> rusqlite::Result<(i64, i64)> {
        self.0
            .query_row("SELECT balance, fence FROM accounts WHERE id = $1", [id], |row| Ok((row.get(0)?, row.get(1)?)))
    }
}
