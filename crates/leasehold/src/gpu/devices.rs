//! Which GPUs there are: from the driver, from `CUDA_VISIBLE_DEVICES`, or because somebody says so.

use serde::{Deserialize, Serialize};

/// The variable by which CUDA programs are shown some of the devices.
pub const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// The variable that says in which order CUDA numbers them; ours are numbered by bus, as the driver's.
pub const ORDER: (&str, &str) = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID");
/// The most devices: as many as a pool can have.
const MOST: u32 = 64;

/// A GPU of this machine, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Device {
    /// Its number, in the order of the bus: the `<id>` of `gpu_lock:<id>`.
    pub id: u32,
    /// What names it everywhere; known by the driver only.
    pub uuid: Option<String>,
    /// Its model.
    pub name: Option<String>,
    /// Its memory at this moment.
    pub memory: Option<Memory>,
}

/// Memory of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// In use.
    pub used_bytes: u64,
    /// All of it.
    pub total_bytes: u64,
}

impl Device {
    /// A device of which only the number is known.
    pub fn numbered(id: u32) -> Self {
        Self { id, uuid: None, name: None, memory: None }
    }
}

/// What knows the devices of a machine.
pub trait Driver {
    /// Its version, for people.
    fn version(&self) -> String;

    /// All devices, by number.
    ///
    /// # Errors
    /// A sentence, when the driver does not answer.
    fn devices(&self) -> Result<Vec<Device>, String>;
}

/// The devices of this machine that may be used, and how they are known.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Devices {
    /// By number.
    pub devices: Vec<Device>,
    /// How they are known.
    pub source: Source,
}

/// How devices are known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Source {
    /// The NVIDIA driver of this version said so.
    Driver(String),
    /// `CUDA_VISIBLE_DEVICES` names them, and there is no driver to ask.
    Environment,
    /// Somebody said how many there are.
    Count,
}

/// Why it is not known which GPUs there are.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DevicesError {
    /// Neither a driver nor anybody says so.
    #[error(
        "no GPU is known here: there is no NVIDIA driver ({0}); name the GPUs in CUDA_VISIBLE_DEVICES, such as 0,1"
    )]
    NoDriver(String),
    /// The driver is there and has none.
    #[error("the NVIDIA driver {0} has no GPU")]
    NoDevice(String),
    /// The variable shows none.
    #[error("CUDA_VISIBLE_DEVICES shows no GPU: name some in it, or unset it")]
    Hidden,
    /// The variable names something that is not there, or that cannot be numbered.
    #[error("CUDA_VISIBLE_DEVICES names `{given}`, {problem}")]
    Unknown {
        /// What it names.
        given: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A number of devices that cannot be.
    #[error("{given} GPUs were said to be here, {problem}")]
    Count {
        /// How many.
        given: u32,
        /// What is wrong with it.
        problem: String,
    },
}

impl Devices {
    /// Looks for the devices of this machine. `count`: somebody says how many there are.
    ///
    /// # Errors
    /// When nobody knows.
    pub fn discover(count: Option<u32>) -> Result<Self, DevicesError> {
        let driver = super::nvml::open();
        let visible = std::env::var_os(VISIBLE).map(|value| value.to_string_lossy().into_owned());
        Self::find(driver.as_deref().map_err(String::as_str), visible.as_deref(), count)
    }

    /// The same with everything it depends on given.
    ///
    /// # Errors
    /// When nobody knows.
    pub fn find(
        driver: Result<&dyn Driver, &str>,
        visible: Option<&str>,
        count: Option<u32>,
    ) -> Result<Self, DevicesError> {
        let version = driver.map(Driver::version);
        // A driver that does not answer is as good as none.
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

/// What `CUDA_VISIBLE_DEVICES` has to say for a program to see these devices: by what names them
/// everywhere, if that is known.
pub fn visible(devices: &[Device]) -> String {
    let uuids: Option<Vec<&str>> = devices.iter().map(|device| device.uuid.as_deref()).collect();
    match uuids {
        Some(uuids) => uuids.join(","),
        None => devices.iter().map(|device| device.id.to_string()).collect::<Vec<_>>().join(","),
    }
}

fn counted(count: u32, known: Option<&[Device]>) -> Result<Vec<Device>, DevicesError> {
    let wrong = |problem: String| Err(DevicesError::Count { given: count, problem });
    if count == 0 || count > MOST {
        return wrong(format!("but it is 1 to {MOST} that can be shared"));
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
        // CUDA's own way to show none, or no more.
        if given.is_empty() || given == "-1" {
            break;
        }
        let device = match (given.parse::<u32>(), known) {
            (Ok(id), Some(known)) => known
                .iter()
                .find(|device| device.id == id)
                .cloned()
                .ok_or_else(|| unknown("which the driver has not"))?,
            (Ok(id), None) => Device::numbered(id),
            (Err(_), Some(known)) => {
                // CUDA takes the beginning of one, too, if it is only one's.
                let is_it = |device: &&Device| device.uuid.as_deref().is_some_and(|uuid| uuid.starts_with(given));
                let mut found = known.iter().filter(is_it);
                let device = found.next().ok_or_else(|| unknown("which the driver has not"))?;
                if found.next().is_some() {
                    return Err(unknown("which is the beginning of several"));
                }
                device.clone()
            }
            (Err(_), None) => return Err(unknown("and there is no driver to say which number that is")),
        };
        if devices.iter().any(|other| other.id == device.id) {
            return Err(unknown("twice"));
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
    fn a_driver_knows_them_all_and_the_variable_shows_some() {
        let all = with(None, None).expect("two");
        assert_eq!((ids(&all), all.source), (vec![0, 1], Source::Driver("550.1".into())));
        assert_eq!(ids(&with(Some("1"), None).expect("one")), [1]);
        assert_eq!(ids(&with(Some("GPU-aab"), None).expect("one")), [1], "by the beginning of its name");
        assert_eq!(ids(&with(Some("1, 0"), None).expect("two")), [0, 1]);
        assert_eq!(ids(&with(Some("1,-1,0"), None).expect("one")), [1], "nothing after a -1");
        assert_eq!(ids(&with(Some("1"), Some(1)).expect("one")), [0], "whoever says it outright wins");
    }

    #[test]
    fn without_a_driver_somebody_has_to_say() {
        let shown = without(Some("2,5"), None).expect("two");
        assert_eq!((ids(&shown), shown.source), (vec![2, 5], Source::Environment));
        let counted = without(None, Some(2)).expect("two");
        assert_eq!((ids(&counted), counted.source), (vec![0, 1], Source::Count));
        let error = without(None, None).expect_err("nobody says").to_string();
        assert!(error.contains("no library") && error.contains("CUDA_VISIBLE_DEVICES"), "{error}");
    }

    #[test]
    fn what_is_not_there_is_told() {
        for (visible, count, told) in [
            (Some(""), None, "shows no GPU"),
            (Some("-1"), None, "shows no GPU"),
            (Some("7"), None, "`7`, which the driver has not"),
            (Some("GPU-ff"), None, "`GPU-ff`, which the driver has not"),
            (Some("GPU-aa"), None, "the beginning of several"),
            (Some("0,GPU-aaaa"), None, "twice"),
            (None, Some(3), "but the driver has 2"),
            (None, Some(0), "1 to 64"),
        ] {
            let error = with(visible, count).expect_err("not there").to_string();
            assert!(error.contains(told), "{visible:?} {count:?}: {error}");
        }
        let error = without(Some("GPU-aaaa"), None).expect_err("no number").to_string();
        assert!(error.contains("no driver to say which number"), "{error}");
        assert!(without(None, Some(65)).is_err());
    }

    #[test]
    fn a_program_is_shown_them_by_what_names_them_everywhere() {
        assert_eq!(visible(&[device(0, "GPU-aaaa"), device(1, "GPU-aabb")]), "GPU-aaaa,GPU-aabb");
        assert_eq!(visible(&[Device::numbered(3), Device::numbered(5)]), "3,5");
        assert_eq!(visible(&[device(0, "GPU-aaaa"), Device::numbered(5)]), "0,5", "never a mixture");
    }
}
