//! GPUs: finding them, locking one by number or any of a pool, and cleaning up before the release.
//!
//! The lock of a GPU is `gpu_lock:<id>` (or `gpu_lock:<host>:<id>`, see [`GpuScope`](crate::config::GpuScope)). It is an
//! ordinary lock and can be inspected, waited for and evicted like any other. Wait limits and leases come from the section
//! `gpu_lock` of the [configuration](crate::config::Config).

#[cfg(feature = "macros")]
pub(crate) mod attribute;
mod clean_up;
mod defaults;
mod devices;
mod nvml;
mod pool;

pub use clean_up::{CleanUp, Cleaned, Leaving};
pub use defaults::configure;
pub use devices::{Device, Devices, DevicesError, Driver, Memory, ORDER, Source, VISIBLE, visible};
pub use pool::{GpuPool, GpuRequest, Gpus};

use defaults::Defaults;

/// Runs an async function, or method, while holding the lock of a GPU.
///
/// ```
/// use leasehold::gpu::gpu_lock;
/// use leasehold::{Error, LockManager};
///
/// #[gpu_lock(gpu_id = 0, max_wait_time = 1800, locks = locks)]
/// async fn transcribe(locks: &LockManager, file: &str) -> Result<String, Error> {
///     Ok(format!("{file}: on GPU 0"))
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Error> {
/// # let locks = LockManager::connect("memory:").await?;
/// # assert!(transcribe(&locks, "talk.wav").await?.starts_with("talk.wav"));
/// # Ok(()) }
/// ```
///
/// It works like [`lock`](macro@crate::lock) with the lock `gpu_lock:<id>`. The defaults come from the section `gpu_lock` of
/// the [configuration](configure). The lease is renewed while the body runs. Times are in seconds.
///
/// | option | default | |
/// |---|---|---|
/// | `gpu_id = 0` | | the GPU: a number, or an expression of type `u32` such as a parameter |
/// | `locks = self.locks` | the [installed](crate::install) one | a [`LockManager`](crate::LockManager), by value or reference |
/// | `max_wait_time = 1800` | as configured: 300 | how long to wait for the GPU |
/// | `lock_timeout = 600` | as configured: 600 | the lease; while it is renewed, at most the heartbeat's timeout |
/// | `cleanup = free_memory` | | an async function of [`Leaving`], or a command (text, run by `sh`) that always runs before the GPU is released. See [`CleanUp`] |
/// | `cleanup_timeout = 5` | 30 | the time limit of the clean-up |
/// | `on_lost = "continue"` | `"cancel"` | a lost lease cancels the body and the caller gets [`Error::Lost`](crate::Error::Lost), or the body continues |
#[cfg(feature = "macros")]
pub use leasehold_macros::gpu_lock;
