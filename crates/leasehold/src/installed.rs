//! The lock manager of the whole process, for code that receives none as an argument.

use std::sync::OnceLock;

use crate::error::Error;
use crate::manager::LockManager;

static INSTALLED: OnceLock<LockManager> = OnceLock::new();

/// Installs the manager that `#[lock]` uses in this process where it names none with `locks = …`.
///
/// It is called once, at the start of the program.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), leasehold::Error> {
/// use leasehold::LockManager;
///
/// leasehold::install(LockManager::connect("memory:").await?)?;
/// assert!(LockManager::installed().is_some());
/// assert!(leasehold::install(LockManager::connect("memory:").await?).is_err(), "once");
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`Error::AlreadyInstalled`] when there is one: two stores in one process do not exclude each other, so an installed
/// manager is never replaced.
pub fn install(locks: LockManager) -> Result<(), Error> {
    INSTALLED.set(locks).map_err(|_| Error::AlreadyInstalled)
}

impl LockManager {
    /// Returns the manager that was [installed](crate::install) for this process, or `None`.
    pub fn installed() -> Option<Self> {
        INSTALLED.get().cloned()
    }
}
