//! Resources that check fences: the programs of the guide `docs/using-a-fence.md`.

mod service;

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, named_params};

pub use service::routes;

/// The table. It works on PostgreSQL too.
pub const TABLE: &str = include_str!("../accounts.sql");
/// The statement that writes a balance. It changes nothing unless the fence is higher than that of the last write.
pub const WRITE: &str = include_str!("../write.sql");
/// The script that writes a balance to a Redis hash under the same condition.
pub const WRITE_REDIS: &str = include_str!("../write.lua");

/// How long a writer waits for the transaction of another one.
const BUSY: Duration = Duration::from_secs(5);

/// Accounts in a database that several processes use.
#[derive(Debug)]
pub struct Accounts(Connection);

impl Accounts {
    /// Opens the database, and creates the table if it is missing.
    pub fn open(path: &Path) -> rusqlite::Result<Self> {
        let connection = Connection::open(path)?;
        connection.busy_timeout(BUSY)?;
        connection.execute_batch(TABLE)?;
        Ok(Self(connection))
    }

    /// Writes a balance. Returns `false` and changes nothing if there was a write with a higher fence: then the writer has lost
    /// its lock.
    pub fn write(&self, fence: u64, id: i64, balance: i64) -> rusqlite::Result<bool> {
        let fence = i64::try_from(fence).expect("fences end at 2^52");
        let rows = self.0.execute(WRITE, named_params! { "$1": fence, "$2": id, "$3": balance })?;
        Ok(rows == 1)
    }

    /// Returns the balance and the fence of its last write.
    pub fn read(&self, id: i64) -> rusqlite::Result<(i64, i64)> {
        self.0
            .query_row("SELECT balance, fence FROM accounts WHERE id = $1", [id], |row| Ok((row.get(0)?, row.get(1)?)))
    }
}
