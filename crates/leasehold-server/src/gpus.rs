//! GPUs: the devices of this machine, and every GPU lock that is held or has waiters.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use futures_util::future::try_join_all;
use leasehold::gpu::{Device, Devices, Source};
use leasehold::inspect::{LockInfo, LockView};
use leasehold::{Error, Owner};
use serde::Serialize;

use crate::App;
use crate::problem::Problem;

/// The prefix of GPU lock names.
pub(crate) const GPU_PREFIX: &str = "gpu_lock:";
/// How many GPU locks are looked up by name. Foreign locks are not in the index, and few machines have more GPUs.
const PROBED_IDS: u32 = 16;
/// The most GPU locks in one response.
const MAX_LOCKS: usize = 1_000;

/// The known GPUs.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Gpus {
    /// `nvml` if the driver of this machine answered.
    #[schema(value_type = Option<String>, example = "nvml")]
    driver: Option<&'static str>,
    /// Why the devices of this machine are unknown.
    message: Option<String>,
    /// The GPUs, sorted by host and number.
    gpus: Vec<GpuView>,
}

/// One GPU.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct GpuView {
    /// The host of the GPU, if known: one lock may stand for the GPUs of several hosts.
    host: Option<String>,
    /// The number of the GPU, as in the name of its lock.
    id: u32,
    /// The unique id of the device.
    uuid: Option<String>,
    /// The model of the device.
    model: Option<String>,
    /// The memory of the device, in bytes.
    memory_total: Option<u64>,
    /// The memory in use, in bytes.
    memory_used: Option<u64>,
    /// The lock of the GPU, if it is held or has waiters.
    lock: Option<LockView>,
}

/// List GPUs and their holders
///
/// Returns the devices of the server's own machine, and every lock `gpu_lock:…` that is held or has waiters.
#[utoipa::path(get, path = "/api/v1/gpus", tag = "locks", responses((status = 200, body = Gpus)))]
pub(crate) async fn list(State(app): State<App>) -> Result<Json<Gpus>, Problem> {
    // Loading and querying the driver blocks.
    let found = tokio::task::spawn_blocking(|| Devices::discover(None)).await;
    let (devices, driver, message) = match found {
        Ok(Ok(found)) => (found.devices, matches!(found.source, Source::Driver(_)).then_some("nvml"), None),
        Ok(Err(error)) => (Vec::new(), None, Some(format!("{error:#}"))),
        Err(_) => (Vec::new(), None, Some("the driver could not be queried".to_owned())),
    };
    let here = Owner::default().host().to_owned();
    let locks = gpu_locks(&app, &here, &devices).await?;
    Ok(Json(Gpus { driver, message, gpus: combine(&here, devices, locks) }))
}

/// Returns the GPU locks that are held or have waiters, by host (if the name has one) and number.
async fn gpu_locks(
    app: &App,
    here: &str,
    devices: &[Device],
) -> Result<BTreeMap<(Option<String>, u32), LockInfo>, Error> {
    let held = app.locks.long_held().await?.into_iter().map(|(name, _)| name.to_string());
    let of_devices =
        devices.iter().flat_map(|d| [format!("{GPU_PREFIX}{}", d.id), format!("{GPU_PREFIX}{here}:{}", d.id)]);
    let first = (0..PROBED_IDS).map(|id| format!("{GPU_PREFIX}{id}"));
    let names = held.chain(of_devices).chain(first);
    let placed: BTreeMap<_, _> = names.filter_map(|name| Some((host_and_id(&name)?, name))).take(MAX_LOCKS).collect();
    let inspected =
        placed.into_iter().map(async |(host_and_id, name)| Ok::<_, Error>((host_and_id, app.locks.info(name).await?)));
    let inspected = try_join_all(inspected).await?;
    Ok(inspected.into_iter().filter(|(_, info)| info.holder.is_some() || !info.waiters.is_empty()).collect())
}

/// Parses the host and number of a GPU lock: `gpu_lock:0` or `gpu_lock:host:0`.
fn host_and_id(name: &str) -> Option<(Option<String>, u32)> {
    let rest = name.strip_prefix(GPU_PREFIX)?;
    match rest.rsplit_once(':') {
        Some((host, id)) => Some((Some(host.to_owned()), id.parse().ok()?)),
        None => Some((None, rest.parse().ok()?)),
    }
}

/// Joins devices with their locks, followed by locks of devices on other hosts.
fn combine(here: &str, devices: Vec<Device>, mut locks: BTreeMap<(Option<String>, u32), LockInfo>) -> Vec<GpuView> {
    let mut gpus: Vec<GpuView> = devices
        .into_iter()
        .map(|device| {
            let own = locks.remove(&(Some(here.to_owned()), device.id));
            let lock = own.or_else(|| locks.remove(&(None, device.id)));
            GpuView {
                host: Some(here.to_owned()),
                id: device.id,
                uuid: device.uuid,
                model: device.name,
                memory_total: device.memory.map(|memory| memory.total_bytes),
                memory_used: device.memory.map(|memory| memory.used_bytes),
                lock: lock.map(|lock| lock.view()),
            }
        })
        .collect();
    let elsewhere = locks.into_iter().map(|((host, id), lock)| {
        let owner = lock.holder.as_ref().map(|holder| holder.owner.host().to_owned()).filter(|host| !host.is_empty());
        GpuView {
            host: host.or(owner),
            id,
            uuid: None,
            model: None,
            memory_total: None,
            memory_used: None,
            lock: Some(lock.view()),
        }
    });
    gpus.extend(elsewhere);
    gpus
}

#[cfg(test)]
mod tests {
    use leasehold::LockName;

    use super::*;

    #[test]
    fn devices_are_joined_with_their_locks() {
        assert_eq!(host_and_id("gpu_lock:3"), Some((None, 3)));
        assert_eq!(host_and_id("gpu_lock:gpu-a:3"), Some((Some("gpu-a".into()), 3)));
        assert_eq!(
            [host_and_id("gpu_lock:collecting"), host_and_id("gpu_lock:a:b"), host_and_id("task_lock:3")],
            [None, None, None]
        );
        let info =
            |name: &str| LockInfo { name: LockName::new(name).expect("a name"), holder: None, waiters: Vec::new() };
        let locks = ["gpu_lock:0", "gpu_lock:here:1", "gpu_lock:1", "gpu_lock:there:0"];
        let locks = locks.iter().map(|name| (host_and_id(name).expect("a GPU"), info(name))).collect();
        let gpus = combine("here", vec![Device::numbered(0), Device::numbered(1)], locks);
        let shown: Vec<_> =
            gpus.iter().map(|gpu| (gpu.host.as_deref(), gpu.id, gpu.lock.as_ref().map(|l| l.name.as_str()))).collect();
        assert_eq!(
            shown,
            [
                (Some("here"), 0, Some("gpu_lock:0")),
                (Some("here"), 1, Some("gpu_lock:here:1")),
                (None, 1, Some("gpu_lock:1")),
                (Some("there"), 0, Some("gpu_lock:there:0")),
            ]
        );
    }
}
