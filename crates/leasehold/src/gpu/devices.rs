//! Finds the GPUs of a machine: from the driver, from `CUDA_VISIBLE_DEVICES`, or from a given count.

use serde::{Deserialize, Serialize};

/// The variable that selects the devices of a CUDA program.
pub const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// The variable for the order in which CUDA numbers devices, and the value for the driver's order, which this crate uses.
pub const ORDER: (&str, &str) = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
/// The largest number of devices, which is the largest size of a pool.
const DEVICES_MAX: u32 = 64;

/// A GPU of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Device {
    /// Its number in PCI bus order: the `<id>` of `gpu_lock:<id>`.
    pub id: u32,
    /// Its UUID; `None` without a driver.
    pub uuid: Option<String>,
    /// Its model; `None` without a driver.
    pub name: Option<String>,
    /// Its memory; `None` without a driver.
    pub memory: Option<Memory>,
}

/// The memory of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Memory in use.
    pub used_bytes: u64,
    /// Total memory.
    pub total_bytes: u64,
}

impl Device {
    /// Creates a device of which only the number is known.
    pub fn numbered(id: u32) -> Self {
        Self { id, uuid: None, name: None, memory: None }
    }
}

/// Lists the devices of a machine.
pub trait Driver {
    /// Returns the version of the driver, for people.
    fn version(&self) -> String;

    /// Returns all devices, sorted by number.
    ///
    /// # Errors
    /// A message when the driver does not answer.
    fn devices(&self) -> Result<Vec<Device>, String>;
}

/// The devices of this machine that may be used.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Devices {
    /// The devices, sorted by number.
    pub devices: Vec<Device>,
    /// Where the list comes from.
    pub source: Source,
}

/// Where a list of devices comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Source {
    /// The NVIDIA driver, with its version.
    Driver(String),
    /// `CUDA_VISIBLE_DEVICES`; there is no driver.
    Environment,
    /// A given count; there is no driver.
    Count,
}

/// Why the GPUs of this machine cannot be listed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DevicesError {
    /// There is no driver, no `CUDA_VISIBLE_DEVICES` and no count.
    #[error("no GPU found: there is no NVIDIA driver ({0}); list the GPUs in CUDA_VISIBLE_DEVICES, such as 0,1")]
    NoDriver(String),
    /// The driver reports no device.
    #[error("the NVIDIA driver {0} reports no GPU")]
    NoDevice(String),
    /// The variable lists no device.
    #[error("CUDA_VISIBLE_DEVICES lists no GPU: add one, or unset it")]
    Hidden,
    /// The variable lists a device that does not exist, or whose number is unknown.
    #[error("CUDA_VISIBLE_DEVICES lists `{given}`, {problem}")]
    Unknown {
        /// The listed device.
        given: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The given count is not possible.
    #[error("{given} GPUs were requested, {problem}")]
    Count {
        /// The given count.
        given: u32,
        /// What is wrong with it.
        problem: String,
    },
}

impl Devices {
    /// Finds the devices of this machine. A `count` replaces `CUDA_VISIBLE_DEVICES`: the first `count` devices are used.
    ///
    /// # Errors
    /// [`DevicesError`] when the devices are unknown.
    pub fn discover(count: Option<u32>) -> Result<Self, DevicesError> {
        let driver = super::nvml::open();
        let visible = std::env::var_os(VISIBLE).map(|value| value.to_string_lossy().into_owned());
        Self::find(driver.as_deref().map_err(String::as_str), visible.as_deref(), count)
    }

    /// Finds the devices, given a driver or why there is none, the value of `CUDA_VISIBLE_DEVICES`, and a count.
    ///
    /// # Errors
    /// [`DevicesError`] when the devices are unknown.
    pub fn find(
        driver: Result<&dyn Driver, &str>,
        visible: Option<&str>,
        count: Option<u32>,
    ) -> Result<Self, DevicesError> {
        let version = driver.map(Driver::version);
        // A driver that does not answer is treated as missing.
        let known = driver.map_err(str::to_owned).and_then(Driver::devices);
        let source = match (&version, &known) {
            (Ok(version), Ok(_)) => Some(Source::Driver(version.clone())),
            _ => None,
        };
        let all = known.as_ref().ok().map(Vec::as_slice);
        if let Some(count) = count {
            return Ok(Self { devices: counted(count, all)?, source: source.unwrap_or(Source::Count) });
        }
        if let Some(visible) = visible {
            return Ok(Self { devices: shown(visible, all)?, source: source.unwrap_or(Source::Environment) });
        }
        match (known, source) {
            (Ok(devices), Some(Source::Driver(version))) if devices.is_empty() => Err(DevicesError::NoDevice(version)),
            (Ok(devices), Some(source)) => Ok(Self { devices, source }),
            (Err(why), _) => Err(DevicesError::NoDriver(why)),
            (Ok(_), None) => Err(DevicesError::NoDriver("it does not answer".into())),
        }
    }
}

/// Returns the value of `CUDA_VISIBLE_DEVICES` that selects these devices. It uses UUIDs if all are known.
pub fn visible(devices: &[Device]) -> String {
    let uuids: Option<Vec<&str>> = devices.iter().map(|device| device.uuid.as_deref()).collect();
    match uuids {
        Some(uuids) => uuids.join(","),
        None => devices.iter().map(|device| device.id.to_string()).collect::<Vec<_>>().join(","),
    }
}

fn counted(count: u32, known: Option<&[Device]>) -> Result<Vec<Device>, DevicesError> {
    let wrong = |problem: String| Err(DevicesError::Count { given: count, problem });
    if count == 0 || count > DEVICES_MAX {
        return wrong(format!("but a pool has 1 to {DEVICES_MAX}"));
    }
    match known {
        Some(known) if known.len() < count as usize => wrong(format!("but the driver has {}", known.len())),
        Some(known) => Ok(known[..count as usize].to_vec()),
        None => Ok((0..count).map(Device::numbered).collect()),
    }
}

fn shown(visible: &str, known: Option<&[Device]>) -> Result<Vec<Device>, DevicesError> {
    let mut devices: Vec<Device> = Vec::new();
    for given in visible.split(',').map(str::trim) {
        let unknown = |problem: &str| DevicesError::Unknown { given: given.to_owned(), problem: problem.to_owned() };
        // CUDA ignores all entries after an empty one or -1.
        if given.is_empty() || given == "-1" {
            break;
        }
        let device = match (given.parse::<u32>(), known) {
            (Ok(id), Some(known)) => known
                .iter()
                .find(|device| device.id == id)
                .cloned()
                .ok_or_else(|| unknown("which the driver does not have"))?,
            (Ok(id), None) => Device::numbered(id),
            (Err(_), Some(known)) => {
                // CUDA also accepts a unique prefix of a UUID.
                let is_it = |device: &&Device| device.uuid.as_deref().is_some_and(|uuid| uuid.starts_with(given));
                let mut found = known.iter().filter(is_it);
                let device = found.next().ok_or_else(|| unknown("which the driver does not have"))?;
                if found.next().is_some() {
                    return Err(unknown("which is the prefix of several UUIDs"));
                }
                device.clone()
            }
            (Err(_), None) => return Err(unknown("but its number is unknown without a driver")),
        };
        if devices.iter().any(|other| other.id == device.id) {
            return Err(unknown("which is listed twice"));
        }
        devices.push(device);
    }
    if devices.is_empty() {
        return Err(DevicesError::Hidden);
    }
    devices.sort_by_key(|device| device.id);
    Ok(devices)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Two;

    impl Driver for Two {
        fn version(&self) -> String {
            "550.1".into()
        }

        fn devices(&self) -> Result<Vec<Device>, String> {
            Ok([(0, "GPU-aaaa"), (1, "GPU-aabb")].map(|(id, uuid)| device(id, uuid)).into())
        }
    }

    fn device(id: u32, uuid: &str) -> Device {
        Device { uuid: Some(uuid.into()), ..Device::numbered(id) }
    }

    fn ids(found: &Devices) -> Vec<u32> {
        found.devices.iter().map(|device| device.id).collect()
    }

    fn with(visible: Option<&str>, count: Option<u32>) -> Result<Devices, DevicesError> {
        Devices::find(Ok(&Two), visible, count)
    }

    fn without(visible: Option<&str>, count: Option<u32>) -> Result<Devices, DevicesError> {
        Devices::find(Err("no library"), visible, count)
    }

    #[test]
    fn the_variable_selects_some_of_the_drivers_devices() {
        let all = with(None, None).expect("two");
        assert_eq!((ids(&all), all.source), (vec![0, 1], Source::Driver("550.1".into())));
        assert_eq!(ids(&with(Some("1"), None).expect("one")), [1]);
        assert_eq!(ids(&with(Some("GPU-aab"), None).expect("one")), [1], "by a prefix of its UUID");
        assert_eq!(ids(&with(Some("1, 0"), None).expect("two")), [0, 1]);
        assert_eq!(ids(&with(Some("1,-1,0"), None).expect("one")), [1], "nothing after a -1");
        assert_eq!(ids(&with(Some("1"), Some(1)).expect("one")), [0], "a count replaces the variable");
    }

    #[test]
    fn without_a_driver_the_variable_or_a_count_is_needed() {
        let shown = without(Some("2,5"), None).expect("two");
        assert_eq!((ids(&shown), shown.source), (vec![2, 5], Source::Environment));
        let counted = without(None, Some(2)).expect("two");
        assert_eq!((ids(&counted), counted.source), (vec![0, 1], Source::Count));
        let error = without(None, None).expect_err("unknown").to_string();
        assert!(error.contains("no library") && error.contains("CUDA_VISIBLE_DEVICES"), "{error}");
    }

    #[test]
    fn unknown_devices_are_errors() {
        for (visible, count, text) in [
            (Some(""), None, "lists no GPU"),
            (Some("-1"), None, "lists no GPU"),
            (Some("7"), None, "`7`, which the driver does not have"),
            (Some("GPU-ff"), None, "`GPU-ff`, which the driver does not have"),
            (Some("GPU-aa"), None, "the prefix of several"),
            (Some("0,GPU-aaaa"), None, "listed twice"),
            (None, Some(3), "but the driver has 2"),
            (None, Some(0), "1 to 64"),
        ] {
            let error = with(visible, count).expect_err("unknown device").to_string();
            assert!(error.contains(text), "{visible:?} {count:?}: {error}");
        }
        let error = without(Some("GPU-aaaa"), None).expect_err("no number").to_string();
        assert!(error.contains("unknown without a driver"), "{error}");
        assert!(without(None, Some(65)).is_err());
    }

    #[test]
    fn devices_are_listed_by_uuid_if_all_are_known() {
        assert_eq!(visible(&[device(0, "GPU-aaaa"), device(1, "GPU-aabb")]), "GPU-aaaa,GPU-aabb");
        assert_eq!(visible(&[Device::numbered(3), Device::numbered(5)]), "3,5");
        assert_eq!(visible(&[device(0, "GPU-aaaa"), Device::numbered(5)]), "0,5", "never a mixture");
    }
}
