//! The lock manager of the whole process, for code that is handed none.

use std::sync::OnceLock;

use crate::manager::LockManager;

static INSTALLED: OnceLock<LockManager> = OnceLock::new();

/// Makes a manager the one of this process: `#[lock]` uses it where no `locks = …` is said. Once, at
/// the start.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use leasehold::LockManager;
///
/// leasehold::install(LockManager::connect("memory:").await?)?;
/// assert!(leasehold::installed().is_some());
/// assert!(leasehold::install(LockManager::connect("memory:").await?).is_err(), "once");
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`AlreadyInstalled`] when there is one: two stores in one process do not exclude each other, so
/// nobody exchanges it unnoticed.
pub fn install(locks: LockManager) -> Result<(), AlreadyInstalled> {
    INSTALLED.set(locks).map_err(|_| AlreadyInstalled)
}

/// The manager of this process, if one was installed.
pub fn installed() -> Option<LockManager> {
    INSTALLED.get().cloned()
}

/// There is a process-wide lock manager already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a lock manager is installed already: `leasehold::install` is called once, at the start of the program")]
pub struct AlreadyInstalled;
