//! The address of a client.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// The remote address of a connection, stored in the extensions of each request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub(crate) SocketAddr);

/// Returns the network that a client is counted under: its IPv4 address, or its IPv6 /64, because one customer usually
/// controls a whole /64.
pub(crate) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        v4 => v4,
    }
}
