//! Failed logins, counted per address: whoever tries keys is soon told to wait.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Failures that an address may have within the window.
const ALLOWED: u32 = 30;
const WINDOW: Duration = Duration::from_secs(60);
/// Addresses remembered at once.
const ADDRESSES: usize = 100_000;
/// A full table is looked through at most this often: it is full because somebody means harm.
const SWEEP_EVERY: Duration = Duration::from_secs(5);

/// Who failed how often lately.
#[derive(Debug, Default)]
pub(crate) struct Failures(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    failed: HashMap<IpAddr, (u32, Instant)>,
    swept: Option<Instant>,
}

impl Failures {
    /// Counts one more. `Some`: too many, and for how long nothing else will be said to that address. Only
    /// those who fail are told so: a right key is let in at any time, also from behind a shared address.
    pub(crate) fn count(&self, from: SocketAddr, now: Instant) -> Option<Duration> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let over = |began: Instant| now.duration_since(began) >= WINDOW;
        let from = network(from.ip());
        if table.failed.len() >= ADDRESSES && !table.failed.contains_key(&from) {
            if table.swept.is_none_or(|swept| now.duration_since(swept) >= SWEEP_EVERY) {
                table.swept = Some(now);
                table.failed.retain(|_, (_, began)| !over(*began));
            }
            if table.failed.len() >= ADDRESSES {
                return Some(WINDOW);
            }
        }
        let (failed, began) = table.failed.entry(from).or_insert((0, now));
        if over(*began) {
            (*failed, *began) = (0, now);
        }
        *failed = failed.saturating_add(1);
        (*failed > ALLOWED).then(|| WINDOW.saturating_sub(now.duration_since(*began)))
    }
}

/// One customer has a whole /64 of IPv6.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_who_fail_often_are_told_to_wait_and_nobody_else() {
        let (failures, now) = (Failures::default(), Instant::now());
        let at = |text: &str| text.parse().expect("an address");
        for _ in 0..ALLOWED {
            assert_eq!(failures.count(at("192.0.2.1:1"), now), None);
        }
        assert_eq!(failures.count(at("192.0.2.1:2"), now), Some(WINDOW), "another port is the same address");
        assert_eq!(failures.count(at("192.0.2.2:1"), now), None);
        assert_eq!(failures.count(at("192.0.2.1:1"), now + WINDOW), None, "it is over");
        for n in 0..ALLOWED {
            assert_eq!(failures.count(at(&format!("[2001:db8::{n:x}]:1")), now), None);
        }
        assert!(failures.count(at("[2001:db8::ffff]:1"), now).is_some(), "one network");
    }

    #[test]
    fn the_table_is_bounded() {
        let (failures, now) = (Failures::default(), Instant::now());
        let at = |n: u32| SocketAddr::new(IpAddr::V4(n.into()), 1);
        for n in 0..200_000 {
            let _ = failures.count(at(n), now);
        }
        let table = failures.0.lock().expect("whole");
        assert_eq!(table.failed.len(), ADDRESSES);
        let bytes = table.failed.capacity() * (size_of::<(IpAddr, (u32, Instant))>() + 1);
        assert!(bytes < 50 << 20, "{bytes}");
        drop(table);
        assert_eq!(failures.count(at(500_000), now + WINDOW), None, "room again when the window is over");
    }
}
