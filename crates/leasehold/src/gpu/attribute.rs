//! What `#[gpu_lock]` expands to. Not for anybody else: it changes with the attribute.
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

/// The options of one `#[gpu_lock]`, checked when it was compiled.
pub struct GpuCall {
    pub gpu_id: u32,
    /// `None`: none was said, and none is installed.
    pub locks: Option<LockManager>,
    pub max_wait_s: Option<u64>,
    pub lock_timeout_s: Option<u64>,
    pub clean_up: Option<CleanUp>,
    pub cancel_on_loss: bool,
}

/// What a function under `#[gpu_lock]` gives back.
#[diagnostic::on_unimplemented(
    message = "a function under `#[gpu_lock]` returns `Result<T, E>` with `E: From<leasehold::Error>`, not `{Self}`",
    label = "not such a `Result`",
    note = "its caller has to learn that the GPU was not acquired, or was lost"
)]
pub trait GpuLockResult {
    fn refused(error: Error) -> Self;
}

impl<T, E: From<Error>> GpuLockResult for Result<T, E> {
    fn refused(error: Error) -> Self {
        Err(error.into())
    }
}

pub async fn run_on_gpu<R, F>(call: GpuCall, refused: fn(Error) -> R, body: F) -> R
where
    F: Future<Output = R>,
{
    let on_loss = if call.cancel_on_loss { OnLoss::Cancel } else { OnLoss::Continue };
    let leaving = match call.enter().await {
        Ok(entered) => entered,
        Err(error) => return refused(error),
    };
    let done = leaving.entered().work(on_loss, body).await;
    leaving.leave().await;
    done.unwrap_or_else(refused)
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

/// A GPU that was entered, and what is done before it is left.
struct OnGpu {
    /// There until it is left.
    entered: Option<Entered>,
    clean_up: Option<CleanUp>,
    device: Device,
    core: Arc<Core>,
}

impl OnGpu {
    fn entered(&self) -> &Entered {
        self.entered.as_ref().expect("there until it is left")
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
    /// Dropped in the midst of its work, or by a panic: the clean-up runs in the background, and the lock is
    /// given back after it.
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
