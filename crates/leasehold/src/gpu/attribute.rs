//! Used by the expansion of `#[gpu_lock]`. It changes with the attribute.
#![allow(missing_docs, reason = "hidden, and documented where the attribute is")]

use std::sync::Arc;
use std::time::Duration;

use super::{CleanUp, Defaults, Device, Leaving};
use crate::engine::Core;
use crate::error::Error;
use crate::facts::{LockName, Ttl};
use crate::manager::LockManager;
use crate::request::LockRequest;
use crate::scope::{Entered, Entry, OnLoss};

/// The options of one `#[gpu_lock]`, which were checked at compile time.
pub struct GpuCall {
    pub gpu_id: u32,
    /// `None` when the attribute has no `locks = …` and no manager is installed.
    pub locks: Option<LockManager>,
    pub max_wait_s: Option<u64>,
    pub lock_timeout_s: Option<u64>,
    pub clean_up: Option<CleanUp>,
    pub cancel_on_loss: bool,
}

/// The return type of a function under `#[gpu_lock]`.
#[diagnostic::on_unimplemented(
    message = "a function under `#[gpu_lock]` returns `Result<T, E>` with `E: From<leasehold::Error>`, not `{Self}`",
    label = "not such a `Result`",
    note = "the error reports that the GPU was not acquired or was lost"
)]
pub trait GpuLockResult {
    fn from_error(error: Error) -> Self;
}

impl<T, E: From<Error>> GpuLockResult for Result<T, E> {
    fn from_error(error: Error) -> Self {
        Err(error.into())
    }
}

pub async fn run_on_gpu<R, F>(call: GpuCall, from_error: fn(Error) -> R, body: F) -> R
where
    F: Future<Output = R>,
{
    let on_loss = if call.cancel_on_loss { OnLoss::Cancel } else { OnLoss::Continue };
    let on_gpu = match call.enter().await {
        Ok(entered) => entered,
        Err(error) => return from_error(error),
    };
    let done = on_gpu.entered().work(on_loss, body).await;
    on_gpu.leave().await;
    done.unwrap_or_else(from_error)
}

impl GpuCall {
    async fn enter(self) -> Result<OnGpu, Error> {
        let defaults = Defaults::configured();
        let name = LockName::new(defaults.scope.lock(self.gpu_id))?;
        let Some(locks) = &self.locks else { return Err(Error::NotInstalled { name }) };
        let entered = Entered::by(self.request(locks, &name, &defaults)?, Entry::Once).await?;
        let device = Device::numbered(self.gpu_id);
        Ok(OnGpu { entered: Some(entered), clean_up: self.clean_up, device, core: locks.core().clone() })
    }

    fn request(&self, locks: &LockManager, name: &LockName, defaults: &Defaults) -> Result<LockRequest, Error> {
        let lock_timeout = self.lock_timeout_s.map(|seconds| Ttl::new(Duration::from_secs(seconds))).transpose()?;
        let request = locks.lock(name).ttl(defaults.ttl(lock_timeout).duration()).renew(defaults.renews());
        Ok(request.wait_up_to(self.max_wait_s.map_or(defaults.max_wait, Duration::from_secs)))
    }
}

/// A GPU that is held, and the clean-up to run before it is released.
struct OnGpu {
    /// `None` only while it is released.
    entered: Option<Entered>,
    clean_up: Option<CleanUp>,
    device: Device,
    core: Arc<Core>,
}

impl OnGpu {
    fn entered(&self) -> &Entered {
        self.entered.as_ref().expect("present until it is released")
    }

    async fn leave(mut self) {
        match (self.entered.take(), self.clean_up.take()) {
            (Some(entered), Some(clean_up)) => {
                let leaving = leaving(&self.device, &entered);
                clean_up.run_before(&self.core, leaving, entered.leave()).await;
            }
            (Some(entered), None) => entered.leave().await,
            (None, _) => {}
        }
    }
}

impl Drop for OnGpu {
    /// Runs the clean-up in the background and then releases the lock, when the work was dropped or panicked.
    fn drop(&mut self) {
        if let (Some(entered), Some(clean_up)) = (self.entered.take(), self.clean_up.take()) {
            let leaving = leaving(&self.device, &entered);
            drop(clean_up.run_before(&self.core, leaving, entered.leave()));
        }
    }
}

fn leaving(device: &Device, entered: &Entered) -> Leaving {
    Leaving { devices: vec![device.clone()], lost: entered.guard().loss().is_some() }
}
