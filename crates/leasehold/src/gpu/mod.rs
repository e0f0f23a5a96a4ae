//! GPUs: which there are, one of them by its number, any of them, and what is done before one is given
//! back.
//!
//! The lock of a GPU is `gpu_lock:<id>` (or `gpu_lock:<host>:<id>`, see
//! [`GpuScope`](crate::config::GpuScope)), an ordinary lock: it is seen, waited for and taken away as all
//! others. How long one waits for it and how long a lease lasts come from the section `gpu_lock` of the
//! [configuration](crate::config::Config).

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
