//! GPUs: those of this machine, where a driver knows them, and every GPU lock that is held or waited for.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use futures_util::future::try_join_all;
use leasehold::gpu::{Device, Devices, Source};
use leasehold::{Error, LockInfo, LockView, Owner};
use serde::Serialize;

use crate::App;
use crate::answer::Problem;

/// What the names of GPU locks begin with.
const GPU: &str = "gpu_lock:";
/// Looked at by name: a lock of another kind of client is in no index, and few machines have more GPUs.
const FIRST: u32 = 16;
/// GPU locks in one answer.
const MOST: usize = 1_000;

/// The GPUs that are known here.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct Gpus {
    /// `nvml` where the driver of this machine was asked.
    #[schema(value_type = Option<String>, example = "nvml")]
    driver: Option<&'static str>,
    /// Why the devices of this machine are not known.
    message: Option<String>,
    /// By host and number.
    gpus: Vec<GpuView>,
}

/// One GPU.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub(crate) struct GpuView {
    /// Its machine, as far as it is known: one lock may stand for GPUs of several.
    host: Option<String>,
    /// Its number: that of its lock.
    id: u32,
    /// What names it everywhere.
    uuid: Option<String>,
    /// Its model.
    model: Option<String>,
    /// Its memory, in bytes.
    memory_total: Option<u64>,
    /// How much of it is in use.
    memory_used: Option<u64>,
    /// Its lock, where somebody holds it or waits for it.
    lock: Option<LockView>,
}

/// GPUs, and who holds them
///
/// The devices of the server's own machine, and every lock `gpu_lock:…` that is held or waited for.
#[utoipa::path(get, path = "/api/v1/gpus", tag = "locks", responses((status = 200, body = Gpus)))]
pub(crate) async fn list(State(app): State<App>) -> Result<Json<Gpus>, Problem> {
    // Loading the driver and asking it takes a while.
    let found = tokio::task::spawn_blocking(|| Devices::discover(None)).await;
    let (devices, driver, message) = match found {
        Ok(Ok(found)) => (found.devices, matches!(found.source, Source::Driver(_)).then_some("nvml"), None),
        Ok(Err(error)) => (Vec::new(), None, Some(error.to_string())),
        Err(_) => (Vec::new(), None, Some("the driver could not be asked".to_owned())),
    };
    let here = Owner::default().host().to_owned();
    let locks = locks(&app, &here, &devices).await?;
    Ok(Json(Gpus { driver, message, gpus: together(&here, devices, locks) }))
}

/// The GPU locks that are held or waited for, by host (where the name has one) and number.
async fn locks(app: &App, here: &str, devices: &[Device]) -> Result<BTreeMap<(Option<String>, u32), LockInfo>, Error> {
    let held = app.locks.long_held().await?.into_iter().map(|(name, _)| name.to_string());
    let of_devices = devices.iter().flat_map(|d| [format!("{GPU}{}", d.id), format!("{GPU}{here}:{}", d.id)]);
    let first = (0..FIRST).map(|id| format!("{GPU}{id}"));
    let names = held.chain(of_devices).chain(first);
    let placed: BTreeMap<_, _> = names.filter_map(|name| Some((place(&name)?, name))).take(MOST).collect();
    let looked = placed.into_iter().map(async |(place, name)| Ok::<_, Error>((place, app.locks.info(name).await?)));
    let looked = try_join_all(looked).await?;
    Ok(looked.into_iter().filter(|(_, info)| info.holder.is_some() || !info.waiters.is_empty()).collect())
}

/// Host and number of a GPU lock: `gpu_lock:0` or `gpu_lock:host:0`.
fn place(name: &str) -> Option<(Option<String>, u32)> {
    let rest = name.strip_prefix(GPU)?;
    match rest.rsplit_once(':') {
        Some((host, id)) => Some((Some(host.to_owned()), id.parse().ok()?)),
        None => Some((None, rest.parse().ok()?)),
    }
}

/// Devices with their locks, then locks of devices elsewhere.
fn together(here: &str, devices: Vec<Device>, mut locks: BTreeMap<(Option<String>, u32), LockInfo>) -> Vec<GpuView> {
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
    fn devices_come_with_their_locks_and_locks_elsewhere_alone() {
        assert_eq!(place("gpu_lock:3"), Some((None, 3)));
        assert_eq!(place("gpu_lock:gpu-a:3"), Some((Some("gpu-a".into()), 3)));
        assert_eq!([place("gpu_lock:collecting"), place("gpu_lock:a:b"), place("task_lock:3")], [None, None, None]);
        let info =
            |name: &str| LockInfo { name: LockName::new(name).expect("a name"), holder: None, waiters: Vec::new() };
        let locks = ["gpu_lock:0", "gpu_lock:here:1", "gpu_lock:1", "gpu_lock:there:0"];
        let locks = locks.iter().map(|name| (place(name).expect("a GPU"), info(name))).collect();
        let gpus = together("here", vec![Device::numbered(0), Device::numbered(1)], locks);
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
