//! Failed logins per address: a client that keeps guessing keys must wait.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::peer::network;

/// Failed logins that an address may have within [`WINDOW`].
const MAX_FAILURES: u32 = 30;
const WINDOW: Duration = Duration::from_secs(60);
/// The most addresses that are remembered.
const MAX_ADDRESSES: usize = 100_000;
/// The shortest interval between two sweeps of a full table. A full table is probably under attack.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Counts recent failed logins per address.
#[derive(Debug, Default)]
pub(crate) struct FailedLogins(Mutex<FailureTable>);

#[derive(Debug, Default)]
struct FailureTable {
    failed: HashMap<IpAddr, (u32, Instant)>,
    swept: Option<Instant>,
}

impl FailedLogins {
    /// Counts one failure. Returns how long the address must wait if it has too many. Only failing requests are
    /// limited: a valid key is always accepted, even from a shared address.
    pub(crate) fn count(&self, from: SocketAddr, now: Instant) -> Option<Duration> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let over = |began: Instant| now.duration_since(began) >= WINDOW;
        let from = network(from.ip());
        if table.failed.len() >= MAX_ADDRESSES && !table.failed.contains_key(&from) {
            if table.swept.is_none_or(|swept| now.duration_since(swept) >= SWEEP_INTERVAL) {
                table.swept = Some(now);
                table.failed.retain(|_, (_, began)| !over(*began));
            }
            if table.failed.len() >= MAX_ADDRESSES {
                return Some(WINDOW);
            }
        }
        let (failed, began) = table.failed.entry(from).or_insert((0, now));
        if over(*began) {
            (*failed, *began) = (0, now);
        }
        *failed = failed.saturating_add(1);
        (*failed > MAX_FAILURES).then(|| WINDOW.saturating_sub(now.duration_since(*began)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_with_many_failures_have_to_wait() {
        let (failures, now) = (FailedLogins::default(), Instant::now());
        let at = |text: &str| text.parse().expect("an address");
        for _ in 0..MAX_FAILURES {
            assert_eq!(failures.count(at("192.0.2.1:1"), now), None);
        }
        assert_eq!(failures.count(at("192.0.2.1:2"), now), Some(WINDOW), "another port is the same address");
        assert_eq!(failures.count(at("192.0.2.2:1"), now), None);
        assert_eq!(failures.count(at("192.0.2.1:1"), now + WINDOW), None, "it is over");
        for n in 0..MAX_FAILURES {
            assert_eq!(failures.count(at(&format!("[2001:db8::{n:x}]:1")), now), None);
        }
        assert!(failures.count(at("[2001:db8::ffff]:1"), now).is_some(), "one network");
    }

    #[test]
    fn the_table_is_bounded() {
        let (failures, now) = (FailedLogins::default(), Instant::now());
        let at = |n: u32| SocketAddr::new(IpAddr::V4(n.into()), 1);
        for n in 0..200_000 {
            let _ = failures.count(at(n), now);
        }
        let table = failures.0.lock().expect("whole");
        assert_eq!(table.failed.len(), MAX_ADDRESSES);
        let bytes = table.failed.capacity() * (size_of::<(IpAddr, (u32, Instant))>() + 1);
        assert!(bytes < 50 << 20, "{bytes}");
        drop(table);
        assert_eq!(failures.count(at(500_000), now + WINDOW), None, "room again when the window is over");
    }
}
