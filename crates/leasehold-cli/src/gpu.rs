//! GPUs: the selection of `run --gpu`, and the list of `gpus`.

use leasehold::LockManager;
use leasehold::config::{Config, GpuScope};
use leasehold::gpu::{Device, Devices, DevicesError, GpuPool, GpuRequest, Source};
use leasehold::inspect::{LockInfo, LockView};
use serde::Serialize;

use crate::cli::GpusArgs;
use crate::duration;
use crate::exit::{Exit, Failure};
use crate::output;
use crate::store::Choice;

/// The GPUs that a command requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GpuSelection {
    /// Any GPUs, this many.
    Any(usize),
    /// The GPUs with these numbers.
    Only(Vec<u32>),
}

impl GpuSelection {
    /// Parses `any`, `any:2`, `0` or `0,3`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a GPU: write any, any:2, 0 or 0,1");
        if text == "any" {
            return Ok(Self::Any(1));
        }
        if let Some(count) = text.strip_prefix("any:") {
            return count.parse().ok().filter(|count| *count > 0).map(Self::Any).ok_or_else(wrong);
        }
        let ids: Result<Vec<u32>, _> = text.split(',').map(str::parse).collect();
        let mut ids = ids.map_err(|_| wrong())?;
        ids.sort_unstable();
        if ids.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(format!("`{text}` names a GPU twice"));
        }
        Ok(Self::Only(ids))
    }

    /// Returns the request for the GPUs. `gpus` is the value of `--gpus`.
    pub(crate) fn request(
        &self,
        locks: &LockManager,
        scope: GpuScope,
        gpus: Option<u32>,
    ) -> Result<GpuRequest, Failure> {
        let usage = |error: &dyn std::fmt::Display| Failure::new(Exit::Usage, error.to_string());
        let devices = Devices::discover(gpus).map_err(|error| no_devices(&error))?;
        let here = devices.devices.len();
        let mut config = Config::default();
        config.gpu_scope = scope;
        let pool = GpuPool::new(locks, &config, devices).map_err(|error| usage(&error))?;
        match self {
            Self::Any(count) if *count > here => {
                let text = format!("{count} GPUs were requested, but this machine has {here}");
                Err(Failure::new(Exit::Usage, text))
            }
            Self::Any(count) => Ok(pool.any(*count)),
            Self::Only(ids) => pool.only(ids).map_err(|error| usage(&error)),
        }
    }

    /// Describes the selection for people.
    pub(crate) fn shown(&self) -> String {
        match self {
            Self::Any(1) => "any GPU".into(),
            Self::Any(count) => format!("any {count} GPUs"),
            Self::Only(ids) => {
                let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
                format!("GPU {}", ids.join(","))
            }
        }
    }
}

fn no_devices(error: &DevicesError) -> Failure {
    let exit = match error {
        DevicesError::Count { .. } => Exit::Usage,
        _ => Exit::Config,
    };
    Failure::new(exit, error_text(error))
}

/// Formats the error with the options that help.
fn error_text(error: &DevicesError) -> String {
    match error {
        DevicesError::NoDriver(_) | DevicesError::Hidden => format!("{error}, or give their number with --gpus N"),
        _ => error.to_string(),
    }
}

/// One GPU in JSON.
#[derive(Serialize)]
struct GpuView {
    #[serde(flatten)]
    device: Device,
    lock: LockView,
}

/// The output of `gpus` in JSON.
#[derive(Serialize)]
struct GpusView {
    /// How the devices were found. `null` if they were not: then the list has the GPU locks that are held.
    source: Option<Source>,
    /// Why the devices were not found.
    problem: Option<String>,
    gpus: Vec<GpuView>,
}

/// Prints the GPUs of this machine with holders and waiters. If the devices are unknown, prints the GPU locks that are held.
pub(crate) async fn gpus(args: GpusArgs, store: &Choice, json: bool) -> Result<Exit, Failure> {
    let scope = store.gpu_scope()?;
    let found = match Devices::discover(args.gpus) {
        Err(error @ DevicesError::Count { .. }) => return Err(no_devices(&error)),
        found => found,
    };
    let locks = store.connect().await?;
    let rows = match &found {
        Ok(found) => {
            let mut rows = Vec::new();
            for device in &found.devices {
                rows.push((device.clone(), locks.info(scope.lock(device.id)).await?));
            }
            rows
        }
        Err(_) => held(&locks, scope).await?,
    };
    let shown = locks.store();
    locks.shutdown().await;
    if json {
        let gpus = rows.into_iter().map(|(device, info)| GpuView { device, lock: info.view() }).collect();
        let (source, problem) = match found {
            Ok(found) => (Some(found.source), None),
            Err(error) => (None, Some(error_text(&error))),
        };
        output::json(&GpusView { source, problem, gpus })?;
        return Ok(Exit::Done);
    }
    if let Err(error) = found {
        output::message(&format!("leasehold: {}", error_text(&error)));
        let which = if rows.is_empty() { "no GPU lock is held" } else { "these GPU locks are held" };
        output::message(&format!("  {which} in {shown}"));
        if rows.is_empty() {
            return Ok(Exit::Done);
        }
    }
    output::data(&table(&rows))?;
    Ok(Exit::Done)
}

/// Returns the GPU locks that are held.
async fn held(locks: &LockManager, scope: GpuScope) -> Result<Vec<(Device, LockInfo)>, Failure> {
    let prefix = format!("{}:", scope.pool());
    let infos = locks.overview(&prefix).await?;
    let numbered = infos.into_iter().filter_map(|info| {
        let id = info.name.as_str().strip_prefix(&prefix)?.parse().ok()?;
        Some((Device::numbered(id), info))
    });
    let mut rows: Vec<(Device, LockInfo)> = numbered.collect();
    rows.sort_by_key(|(device, _)| device.id);
    Ok(rows)
}

fn table(rows: &[(Device, LockInfo)]) -> String {
    let mut lines = vec![["GPU", "MODEL", "MEMORY", "HOLDER", "HELD", "WAITING"].map(str::to_owned)];
    for (device, info) in rows {
        let view = info.view();
        let held = view.held_ms.map(|ms| duration::shown(std::time::Duration::from_millis(ms)));
        lines.push([
            device.id.to_string(),
            shown(device.name.as_deref(), "–"),
            device.memory.map_or_else(
                || "–".into(),
                |memory| format!("{} of {}", gib(memory.used_bytes), gib(memory.total_bytes)),
            ),
            shown(view.owner.as_deref(), "free"),
            held.unwrap_or_else(|| "–".into()),
            view.waiters.len().to_string(),
        ]);
    }
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; 6] = std::array::from_fn(width);
    let mut text = String::new();
    for line in &lines {
        let cells: Vec<String> = line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        text += cells.join("   ").trim_end();
        text.push('\n');
    }
    text
}

fn shown(text: Option<&str>, otherwise: &str) -> String {
    text.map_or_else(|| otherwise.to_owned(), |text| output::escaped(text).into_owned())
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selections_are_parsed() {
        assert_eq!(GpuSelection::parse("any"), Ok(GpuSelection::Any(1)));
        assert_eq!(GpuSelection::parse("any:3"), Ok(GpuSelection::Any(3)));
        assert_eq!(GpuSelection::parse("0"), Ok(GpuSelection::Only(vec![0])));
        assert_eq!(GpuSelection::parse("3,1"), Ok(GpuSelection::Only(vec![1, 3])));
        for wrong in ["", "any:0", "any:x", "all", "0,", "-1", "0,0", "GPU-1"] {
            assert!(GpuSelection::parse(wrong).is_err(), "{wrong}");
        }
    }
}
