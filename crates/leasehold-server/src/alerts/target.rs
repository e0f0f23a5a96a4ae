//! The targets of webhooks: public addresses only, unless the configuration allows others. Every address that the host
//! resolves to is checked, and the connection uses one of the checked addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::net::{TcpStream, lookup_host};

/// The most addresses of one host that are tried.
const MAX_TRIED: usize = 4;

/// Why a connection to a webhook failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    /// One of the host's addresses is not public.
    #[error(
        "its host resolves to {0}, which is not a public address; set alerts.webhook.allow_private if that is intended"
    )]
    Private(IpAddr),
    #[error("its host has no address: {0}")]
    NoAddress(String),
    #[error("cannot connect to {0}: {1}")]
    NoConnection(SocketAddr, std::io::Error),
    #[error("connecting to {0} timed out")]
    TooSlow(SocketAddr),
}

/// Connects to a host if every address it resolves to is allowed.
pub(super) async fn connect(
    host: &str,
    port: u16,
    allow_private: bool,
    within: Duration,
) -> Result<TcpStream, ConnectError> {
    let found = match host.parse::<IpAddr>() {
        Ok(address) => vec![SocketAddr::new(address, port)],
        Err(_) => resolve(host, port, within).await?,
    };
    if found.is_empty() {
        return Err(ConnectError::NoAddress("the name resolves to none".into()));
    }
    // Check all of them: a name with a public and a private address may be an attack.
    if !allow_private && let Some(private) = found.iter().find(|address| !is_public(address.ip())) {
        return Err(ConnectError::Private(private.ip()));
    }
    let mut failed = None;
    for address in found.into_iter().take(MAX_TRIED) {
        match tokio::time::timeout(within, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => failed = Some(ConnectError::NoConnection(address, error)),
            Err(_) => failed = Some(ConnectError::TooSlow(address)),
        }
    }
    Err(failed.unwrap_or_else(|| ConnectError::NoAddress("none was tried".into())))
}

async fn resolve(host: &str, port: u16, within: Duration) -> Result<Vec<SocketAddr>, ConnectError> {
    match tokio::time::timeout(within, lookup_host((host, port))).await {
        Ok(Ok(found)) => Ok(found.collect()),
        Ok(Err(error)) => Err(ConnectError::NoAddress(error.to_string())),
        Err(_) => Err(ConnectError::NoAddress("resolving its name timed out".into())),
    }
}

/// Whether an address is public. Unknown ranges count as not public.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => is_public_v4(v4),
        IpAddr::V6(v6) => is_public_v6(v6),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = match (a, b, c) {
        // This network, private, loopback.
        (0 | 10 | 127, ..) => true,
        // Carrier-grade NAT, and link-local addresses, where clouds serve credentials.
        (100, 64..=127, _) | (169, 254, _) => true,
        (172, 16..=31, _) | (192, 168, _) => true,
        // Protocol assignments, documentation, benchmarks, 6to4 relays.
        (192, 0, 0 | 2) | (192, 88, 99) | (198, 18..=19, _) | (198, 51, 100) | (203, 0, 113) => true,
        // Multicast, reserved, broadcast.
        (224.., ..) => true,
        _ => false,
    };
    !special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let [a, b, c, ..] = address.segments();
    let bytes = address.octets();
    let last = || Ipv4Addr::new(bytes[12], bytes[13], bytes[14], bytes[15]);
    match (a, b, c) {
        // An embedded IPv4 address: mapped (::ffff:0:0/96) or translated (64:ff9b::/96).
        (0, 0, 0) if bytes[..10] == [0; 10] && bytes[10..12] == [0xff, 0xff] => is_public_v4(last()),
        (0x64, 0xff9b, 0) if bytes[..12] == [0, 0x64, 0xff, 0x9b, 0, 0, 0, 0, 0, 0, 0, 0] => is_public_v4(last()),
        // Teredo and 6to4 (2001::/32, 2002::/16), documentation, benchmarks, identifiers: 2001::/23 and 2001:db8::/32.
        (0x2001, 0..0x200, _) | (0x2001, 0xdb8, _) | (0x2002, ..) | (0x3fff, 0..0x1000, _) => false,
        // The only range that is assigned to the public.
        (0x2000..0x4000, ..) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_internet_addresses_are_public() {
        let public = |text: &str| is_public(text.parse().unwrap_or_else(|_| panic!("{text}")));
        for address in [
            "1.1.1.1",
            "8.8.8.8",
            "93.184.215.14",
            "172.15.0.1",
            "172.32.0.1",
            "100.63.0.1",
            "100.128.0.1",
            "192.0.3.1",
            "223.255.255.255",
            "2606:4700:4700::1111",
            "2a00:1450:4001:81b::200e",
            "::ffff:8.8.8.8",
            "64:ff9b::8.8.8.8",
        ] {
            assert!(public(address), "{address}");
        }
        for address in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "10.255.255.255",
            "100.64.0.1",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.255.254",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.1",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.0.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::ffff:169.254.169.254",
            "::ffff:0:127.0.0.1",
            "64:ff9b::127.0.0.1",
            "64:ff9b::10.0.0.1",
            "64:ff9b:1::10.0.0.1",
            "100::1",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::1",
            "3fff::1",
            "5f00::1",
            "fc00::1",
            "fd12:3456:789a::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(!public(address), "{address}");
        }
    }
}
