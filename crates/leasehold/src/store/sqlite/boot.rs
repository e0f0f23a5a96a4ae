//! The boot id, and the boot clock that all processes of a kernel share.
//!
//! Rows contain times of `CLOCK_BOOTTIME`. A time namespace shifts that clock, so its offset is subtracted before a
//! time is written or compared, and added again before a time is passed to the rest of the library.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use super::path::unusable;
use crate::clock::Moment;
use crate::store::{StoreError, StoreErrorKind};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const OFFSETS: &str = "/proc/self/timens_offsets";

/// How far the boot clock of this process is ahead of the kernel's, in nanoseconds. All stores of a process are in the
/// same time namespace. A forked child in another one reads the offset again when it opens its store.
static OFFSET_NS: AtomicI64 = AtomicI64::new(0);

/// Reads the boot id as a number, and stores the offset of this process's time namespace.
pub(super) fn read() -> Result<i64, StoreError> {
    OFFSET_NS.store(offset_ns()?, Ordering::Relaxed);
    let file = Path::new(BOOT_ID);
    let text = fs::read_to_string(file).map_err(|e| unusable(file, &e))?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).take(15).collect();
    i64::from_str_radix(&digits, 16).map_err(|e| unusable(file, &e))
}

/// The kernel's boot clock in whole milliseconds.
pub(super) fn now_ms() -> u64 {
    let shown = i128::try_from(Moment::now().since_boot().as_nanos()).unwrap_or(i128::MAX);
    u64::try_from((shown - i128::from(OFFSET_NS.load(Ordering::Relaxed))) / 1_000_000).unwrap_or(0)
}

/// Converts a time of the kernel's boot clock to the boot clock of this process.
pub(super) fn moment(at_ms: u64) -> Moment {
    let offset = OFFSET_NS.load(Ordering::Relaxed);
    let (at, by) = (Moment::from_boot(Duration::from_millis(at_ms)), Duration::from_nanos(offset.unsigned_abs()));
    if offset < 0 { at - by } else { at + by }
}

/// Now, rounded down to the millisecond that a lease in the store counts from.
pub(super) fn floor_now() -> Moment {
    moment(now_ms())
}

fn offset_ns() -> Result<i64, StoreError> {
    let text = match fs::read_to_string(OFFSETS) {
        Ok(text) => text,
        // A kernel without time namespaces.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(unusable(Path::new(OFFSETS), &error)),
    };
    let offset = parse_offset(&text).ok_or_else(|| unusable(Path::new(OFFSETS), &"no offset of `boottime` in it"))?;
    // The file contains the offsets of the namespace that children get.
    if fs::read_link("/proc/self/ns/time").ok() != fs::read_link("/proc/self/ns/time_for_children").ok() {
        let text = "this process has moved its children to another time namespace, so its own clock cannot be compared \
                    with that of other processes; open the store in a child process";
        return Err(StoreError::new(StoreErrorKind::File, text));
    }
    Ok(offset)
}

/// Parses `boottime  <seconds>  <nanoseconds>` into nanoseconds.
fn parse_offset(text: &str) -> Option<i64> {
    let line = text.lines().find(|line| line.starts_with("boottime"))?;
    let mut numbers = line.split_whitespace().skip(1).map(str::parse::<i64>);
    let (seconds, nanos) = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    seconds.checked_mul(1_000_000_000)?.checked_add(nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_read_in_both_directions() {
        let offset = |text| parse_offset(text);
        assert_eq!(offset("monotonic           0         0\nboottime            0         0\n"), Some(0));
        assert_eq!(offset("monotonic  1  0\nboottime  86400  5\n"), Some(86_400_000_000_005));
        assert_eq!(offset("boottime  -2  500000000\n"), Some(-1_500_000_000));
        assert_eq!(offset("monotonic 0 0\n"), None);
    }
}
