//! Any GPU, any few, or those one names.

use std::fmt;
use std::future::IntoFuture;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;

use super::{CleanUp, Defaults, Device, Devices, Leaving, visible};
use crate::clock::Moment;
use crate::config::Config;
use crate::engine::Core;
use crate::engine::guard::{Guard, first_lost};
use crate::error::Error;
use crate::facts::{Invalid, LockName, Ttl};
use crate::lease::Terms;
use crate::lease::terms::setters;
use crate::loss::LossReason;
use crate::manager::LockManager;
use crate::pool::{Permit, Permits, Pool, PoolRequest};
use crate::request::LockRequest;
use crate::scope;

/// The GPUs of a machine, of which any are good. Cheap to clone.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use leasehold::config::Config;
/// use leasehold::gpu::{CleanUp, Devices, GpuPool};
/// use leasehold::LockManager;
///
/// let config = Config::default();
/// let locks = LockManager::connect_with("memory:", config.gpu_options()).await?;
/// let gpus = GpuPool::new(&locks, &config, Devices::discover(Some(2))?)?; // or None: as the driver says
///
/// // Waits as long as the configuration says (300 s); a long task says more.
/// let gpu = gpus.acquire().wait_up_to(Duration::from_secs(1800)).clean_up(CleanUp::new(async |gpus| {
///     println!("freeing the memory of {:?}", gpus.devices);
/// })).await?;
/// println!("on GPU {:?}, CUDA_VISIBLE_DEVICES={}", gpu.ids(), gpu.visible());
/// gpu.release().await?; // cleans up, then gives it back; so does a drop, in the background
///
/// let both = gpus.any(2).run(async |gpus| gpus.ids()).await?;
/// assert_eq!(both, [0, 1]);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct GpuPool {
    locks: LockManager,
    pool: Pool,
    devices: Arc<[Device]>,
    defaults: Defaults,
}

impl GpuPool {
    /// A pool of these devices, as the sections `gpu_scope` and `gpu_lock` say. The manager is to be
    /// connected with [`gpu_options`](Config::gpu_options).
    ///
    /// # Errors
    /// [`Error::Invalid`] when there are none, or more than a pool can have.
    pub fn new(locks: &LockManager, config: &Config, devices: Devices) -> Result<Self, Error> {
        let pool = locks.pool(config.gpu_scope.pool(), devices.devices.iter().map(|device| device.id))?;
        Ok(Self { locks: locks.clone(), pool, devices: devices.devices.into(), defaults: config.into() })
    }

    /// Its devices.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Asks for any one device: await the request, or first say more about it.
    pub fn acquire(&self) -> GpuRequest {
        self.request(Ask::One(self.pool.acquire()))
    }

    /// Asks for any so many devices, all of them or none.
    pub fn any(&self, count: usize) -> GpuRequest {
        if count == 1 {
            return self.acquire();
        }
        self.request(Ask::Several(self.pool.any(count)))
    }

    /// Asks for these devices, by number, all of them or none.
    ///
    /// # Errors
    /// [`Error::Invalid`] when one of them is not in the pool, is named twice, or none is named.
    pub fn only(&self, ids: &[u32]) -> Result<GpuRequest, Error> {
        let unknown = ids.iter().find(|id| !self.devices.iter().any(|device| device.id == **id));
        if let Some(id) = unknown {
            let known: Vec<String> = self.devices.iter().map(|device| device.id.to_string()).collect();
            let problem = format!("is not here; there are {}", known.join(", "));
            return Err(Invalid::Setting { setting: "GPU", given: id.to_string(), problem }.into());
        }
        if let [id] = ids {
            let lock = self.locks.lock(self.defaults.scope.lock(*id));
            // Like a pool: without a store it is unknown whether another process uses the device.
            return Ok(self.request(Ask::This(*id, lock.protected())));
        }
        // All of a smaller pool: it collects under the same turn as the whole one does.
        let these = self.locks.pool(self.pool.name(), ids.iter().copied())?;
        Ok(self.request(Ask::Several(these.any(ids.len()))))
    }

    fn request(&self, ask: Ask) -> GpuRequest {
        let (devices, defaults, core) = (self.devices.clone(), self.defaults.clone(), self.locks.core().clone());
        let mut request = GpuRequest { ask, devices, defaults, clean_up: None, core };
        let defaults = &self.defaults;
        let terms = Terms::new().ttl(defaults.ttl(None).duration()).wait_up_to(defaults.max_wait);
        request.terms_mut().merge(&terms.renew(defaults.renews()));
        request
    }
}

impl fmt::Debug for GpuPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuPool").field("pool", &self.pool).finish_non_exhaustive()
    }
}

/// A request for GPUs, read like a sentence and sent by awaiting it.
#[must_use = "a request does nothing until it is awaited"]
pub struct GpuRequest {
    ask: Ask,
    devices: Arc<[Device]>,
    defaults: Defaults,
    clean_up: Option<CleanUp>,
    core: Arc<Core>,
}

enum Ask {
    This(u32, LockRequest),
    One(PoolRequest<Permit>),
    Several(PoolRequest<Permits>),
}

impl GpuRequest {
    setters!(wait_up_to, no_wait, owner, owned_by, max_hold, retry_every);

    fn terms_mut(&mut self) -> &mut Terms {
        match &mut self.ask {
            Ask::This(_, this) => this.terms_mut(),
            Ask::One(one) => one.terms_mut(),
            Ask::Several(several) => several.terms_mut(),
        }
    }

    /// Waits without limit, also where the configuration sets one.
    pub fn wait_for_ever(self) -> Self {
        self.wait_up_to(Duration::MAX)
    }

    /// Sets the lease: a long task's `lock_timeout`. While leases are renewed it is never longer than the heartbeat's
    /// timeout, so that a dead holder is found.
    pub fn lock_timeout(mut self, lock_timeout: Ttl) -> Self {
        let ttl = self.defaults.ttl(Some(lock_timeout)).duration();
        self.terms_mut().set_ttl(ttl);
        self
    }

    /// What is done before the devices are given back, always.
    pub fn clean_up(self, clean_up: CleanUp) -> Self {
        Self { clean_up: Some(clean_up), ..self }
    }

    /// Runs work on the devices: cleaned up and given back afterwards in any case; cancelled, with
    /// [`Error::Lost`], when a lease is lost.
    ///
    /// # Errors
    /// Whatever kept them from being acquired, or [`Error::Lost`].
    ///
    /// # Cancel safety
    /// Dropped, the work is dropped first; cleaning up and giving back go on in the background.
    pub async fn run<T>(self, work: impl AsyncFnOnce(&Gpus) -> T) -> Result<T, Error> {
        let gpus = self.await?;
        let guards: Vec<&Guard> = gpus.guards().iter().collect();
        let done = scope::run(&guards, work(&gpus)).await;
        drop(guards);
        scope::log_release(gpus.release().await);
        done
    }
}

impl IntoFuture for GpuRequest {
    type Output = Result<Gpus, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    /// Sends the request.
    ///
    /// # Cancel safety
    /// Dropped at any point, it keeps no device; there is nothing to clean up.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let taken: Vec<(u32, Guard)> = match self.ask {
                Ask::This(id, request) => vec![(id, request.await?)],
                Ask::One(request) => vec![numbered(request.await?)],
                Ask::Several(request) => request.await?.into_iter().map(numbered).collect(),
            };
            let device = |id: u32| self.devices.iter().find(|device| device.id == id).cloned();
            let devices = taken.iter().map(|(id, _)| device(*id).unwrap_or_else(|| Device::numbered(*id))).collect();
            let guards = taken.into_iter().map(|(_, guard)| guard).collect();
            Ok(Gpus { held: Some(HeldGpu { guards, devices, clean_up: self.clean_up }), core: self.core })
        })
    }
}

fn numbered(permit: Permit) -> (u32, Guard) {
    (permit.index(), permit.into_guard())
}

/// Holds GPUs, at least one. Dropping it cleans up and gives them back, in the background.
#[must_use = "dropping it gives the devices up"]
pub struct Gpus {
    /// There until they are given back.
    held: Option<HeldGpu>,
    core: Arc<Core>,
}

struct HeldGpu {
    guards: Vec<Guard>,
    devices: Vec<Device>,
    clean_up: Option<CleanUp>,
}

impl Gpus {
    /// The devices.
    pub fn devices(&self) -> &[Device] {
        &self.held().devices
    }

    /// Their numbers.
    pub fn ids(&self) -> Vec<u32> {
        self.devices().iter().map(|device| device.id).collect()
    }

    /// What `CUDA_VISIBLE_DEVICES` has to say for a program to see them (and them alone).
    pub fn visible(&self) -> String {
        visible(self.devices())
    }

    /// The guards on their locks, in the same order.
    pub fn guards(&self) -> &[Guard] {
        &self.held().guards
    }

    /// Until when all leases are proven.
    pub fn valid_until(&self) -> Moment {
        self.guards().iter().map(Guard::valid_until).min().expect("at least one")
    }

    /// Waits until a lease is lost; says which, and why.
    ///
    /// # Cancel safety
    /// Cancel safe: the loss stays told.
    pub async fn lost(&self) -> (LockName, LossReason) {
        let guards: Vec<&Guard> = self.guards().iter().collect();
        let (which, why) = first_lost(&guards).await;
        (guards[which].name().clone(), why)
    }

    /// Cleans up and gives them back. `true`: all were ours until now.
    ///
    /// # Errors
    /// [`Error::Store`] when the store did not answer; the rest goes on in the background.
    ///
    /// # Cancel safety
    /// Dropped before the answer, both go on in the background.
    pub async fn release(mut self) -> Result<bool, Error> {
        let Some(HeldGpu { guards, devices, clean_up }) = self.held.take() else { return Ok(false) };
        let Some(clean_up) = clean_up else { return give_back(guards).await };
        let leaving = leaving(&guards, devices);
        clean_up.run_before(&self.core, leaving, give_back(guards)).await.unwrap_or(Ok(false))
    }

    /// The guards and their devices, in the same order. What was to be done before they are given back is
    /// up to whoever has them.
    pub fn into_guards(mut self) -> (Vec<Guard>, Vec<Device>) {
        let HeldGpu { guards, devices, .. } = self.held.take().expect("there until they are given back");
        (guards, devices)
    }

    fn held(&self) -> &HeldGpu {
        self.held.as_ref().expect("there until they are given back")
    }
}

impl Drop for Gpus {
    fn drop(&mut self) {
        // Without a clean-up every guard gives its own lock back.
        if let Some(HeldGpu { guards, devices, clean_up: Some(clean_up) }) = self.held.take() {
            let leaving = leaving(&guards, devices);
            drop(clean_up.run_before(&self.core, leaving, give_back(guards)));
        }
    }
}

impl fmt::Debug for Gpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpus").field("guards", &self.guards()).finish_non_exhaustive()
    }
}

fn leaving(guards: &[Guard], devices: Vec<Device>) -> Leaving {
    Leaving { devices, lost: guards.iter().any(|guard| guard.loss().is_some()) }
}

async fn give_back(guards: Vec<Guard>) -> Result<bool, Error> {
    let mut all_ours = true;
    for answer in join_all(guards.into_iter().map(Guard::release)).await {
        all_ours &= answer?;
    }
    Ok(all_ours)
}
