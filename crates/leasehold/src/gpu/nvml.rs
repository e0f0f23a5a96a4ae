//! The driver: NVIDIA's management library.

use std::ffi::{OsStr, OsString};

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::devices::{Device, Driver, Memory};

/// The variable with the path of the library, if the system does not find it.
const LIBRARY: &str = "LEASEHOLD_NVML";
/// The names of the library: of an installed driver, and of one that is mounted into a container.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// Opens the driver, or returns why there is none.
pub(super) fn open() -> Result<Box<dyn Driver>, String> {
    let named = std::env::var_os(LIBRARY).filter(|path| !path.is_empty());
    let libraries = named.map_or_else(|| LIBRARIES.map(OsString::from).to_vec(), |path| vec![path]);
    let mut first = None;
    for library in &libraries {
        match Nvml::builder().lib_path(library).init() {
            Ok(nvml) => return Ok(Box::new(Library(nvml))),
            Err(error) => first = first.or(Some(problem(library, &error))),
        }
    }
    Err(first.unwrap_or_default())
}

struct Library(Nvml);

impl Driver for Library {
    fn version(&self) -> String {
        self.0.sys_driver_version().unwrap_or_else(|_| "of an unknown version".into())
    }

    fn devices(&self) -> Result<Vec<Device>, String> {
        let failed = |error: NvmlError| format!("the driver does not answer: {error}");
        let mut devices = Vec::new();
        for id in 0..self.0.device_count().map_err(failed)? {
            let device = self.0.device_by_index(id).map_err(failed)?;
            // A device that does not report some values is listed without them.
            let memory = device.memory_info().ok();
            devices.push(Device {
                id,
                uuid: device.uuid().ok(),
                name: device.name().ok(),
                memory: memory.map(|memory| Memory { used_bytes: memory.used, total_bytes: memory.total }),
            });
        }
        Ok(devices)
    }
}

fn problem(library: &OsStr, error: &NvmlError) -> String {
    match error {
        NvmlError::LibloadingError(_) => format!("{} cannot be loaded", library.display()),
        error => format!("{}: {error}", library.display()),
    }
}
