//! Network links by netlink, in whatever network namespace the calling thread was in when the socket was opened.

use std::{
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr},
    os::fd::{AsRawFd as _, BorrowedFd},
};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::{
    AddressFamily, RouteNetlinkMessage,
    address::{AddressAttribute, AddressMessage},
    link::{
        AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo,
        LinkMessage,
    },
    neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState},
    route::{RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// A request socket. One request, one acknowledgement.
pub struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self { socket, sequence: 0 })
    }

    fn request(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut packet = NetlinkMessage::from(message);
        packet.header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
        packet.header.sequence_number = self.sequence;
        packet.finalize();
        let mut out = vec![0; packet.buffer_len()];
        packet.serialize(&mut out);
        self.socket.send(&out, 0)?;
        loop {
            let (bytes, _) = self.socket.recv_from_full()?;
            let reply = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&bytes)
                .map_err(|e| io::Error::new(ErrorKind::InvalidData, e))?;
            if reply.header.sequence_number != self.sequence {
                continue;
            }
            if let NetlinkPayload::Error(e) = reply.payload {
                return match e.code {
                    None => Ok(()),
                    Some(code) => Err(io::Error::from_raw_os_error(code.get().abs())),
                };
            }
        }
    }

    /// A veth pair: `name` here, `peer` in the network namespace `there`.
    pub fn add_veth(
        &mut self,
        (name, mac): (&str, [u8; 6]),
        (peer, peer_mac): (&str, [u8; 6]),
        there: BorrowedFd<'_>,
    ) -> io::Result<()> {
        let mut other = LinkMessage::default();
        other.attributes = vec![
            LinkAttribute::IfName(peer.to_owned()),
            LinkAttribute::Address(peer_mac.to_vec()),
            LinkAttribute::NetNsFd(there.as_raw_fd()),
        ];
        let mut link = LinkMessage::default();
        link.attributes = vec![
            LinkAttribute::IfName(name.to_owned()),
            LinkAttribute::Address(mac.to_vec()),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Veth),
                LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(other))),
            ]),
        ];
        self.request(RouteNetlinkMessage::NewLink(link), NLM_F_CREATE | NLM_F_EXCL)
    }

    pub fn set_mac(&mut self, index: u32, mac: [u8; 6]) -> io::Result<()> {
        let mut link = LinkMessage::default();
        link.header.index = index;
        link.attributes = vec![LinkAttribute::Address(mac.to_vec())];
        self.request(RouteNetlinkMessage::SetLink(link), 0)
    }

    /// No link-local IPv6 address, hence no duplicate address detection and no router solicitation on it.
    pub fn no_ipv6_address(&mut self, index: u32) -> io::Result<()> {
        let mut link = LinkMessage::default();
        link.header.index = index;
        link.attributes = vec![LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(
            In6AddrGenMode::None,
        )])])];
        match self.request(RouteNetlinkMessage::SetLink(link), 0) {
            // A kernel without IPv6 has nothing to be quiet about.
            Err(e) if e.raw_os_error() == Some(libc::EAFNOSUPPORT) => Ok(()),
            other => other,
        }
    }

    pub fn set_up(&mut self, index: u32) -> io::Result<()> {
        let mut link = LinkMessage::default();
        link.header.index = index;
        link.header.flags = LinkFlags::Up;
        link.header.change_mask = LinkFlags::Up;
        self.request(RouteNetlinkMessage::SetLink(link), 0)
    }

    pub fn add_address(&mut self, index: u32, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
        let mut message = AddressMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.prefix_len = prefix;
        message.header.index = index;
        message.attributes =
            vec![AddressAttribute::Local(IpAddr::V4(address)), AddressAttribute::Address(IpAddr::V4(address))];
        self.request(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// A permanent neighbour entry: ARP never has to ask.
    pub fn add_neighbour(&mut self, index: u32, address: Ipv4Addr, mac: [u8; 6]) -> io::Result<()> {
        let mut message = NeighbourMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.ifindex = index;
        message.header.state = NeighbourState::Permanent;
        message.attributes = vec![
            NeighbourAttribute::Destination(NeighbourAddress::Inet(address)),
            NeighbourAttribute::LinkLocalAddress(mac.to_vec()),
        ];
        self.request(RouteNetlinkMessage::NewNeighbour(message), NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// One address, directly behind the link. Links that lead to the same address differ in their metric.
    pub fn add_link_route(&mut self, index: u32, address: Ipv4Addr) -> io::Result<()> {
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet;
        message.header.destination_prefix_length = 32;
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.header.protocol = RouteProtocol::Boot;
        message.header.scope = RouteScope::Link;
        message.header.kind = RouteType::Unicast;
        message.attributes = vec![
            RouteAttribute::Destination(RouteAddress::Inet(address)),
            RouteAttribute::Oif(index),
            RouteAttribute::Priority(index),
        ];
        self.request(RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    pub fn add_default_route(&mut self, index: u32, gateway: Ipv4Addr) -> io::Result<()> {
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet;
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.header.protocol = RouteProtocol::Boot;
        message.header.scope = RouteScope::Universe;
        message.header.kind = RouteType::Unicast;
        message.attributes = vec![RouteAttribute::Gateway(RouteAddress::Inet(gateway)), RouteAttribute::Oif(index)];
        self.request(RouteNetlinkMessage::NewRoute(message), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Removes a link; one that is not there is fine.
    pub fn delete(&mut self, name: &str) -> io::Result<()> {
        let mut link = LinkMessage::default();
        link.attributes = vec![LinkAttribute::IfName(name.to_owned())];
        match self.request(RouteNetlinkMessage::DelLink(link), 0) {
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            other => other,
        }
    }
}

/// Index of a link in the calling thread's network namespace; `None` when there is none of that name.
pub fn index(name: &str) -> io::Result<Option<u32>> {
    match nix::net::if_::if_nametoindex(name) {
        Ok(index) => Ok(Some(index)),
        Err(nix::errno::Errno::ENODEV) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// MAC of a link in the calling thread's network namespace; `None` when there is none of that name. One look, no list:
/// it is asked within timed windows.
pub fn mac(name: &str) -> io::Result<Option<[u8; 6]>> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: ifreq is plain data for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Ok(None);
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    // SAFETY: the request is a valid ifreq that lives through the call.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFHWADDR as _, &raw mut request) } < 0 {
        let e = io::Error::last_os_error();
        return if e.raw_os_error() == Some(libc::ENODEV) { Ok(None) } else { Err(e) };
    }
    // SAFETY: SIOCGIFHWADDR has filled in this member of the union.
    let address = unsafe { request.ifr_ifru.ifru_hwaddr.sa_data };
    let mut mac = [0; 6];
    for (to, from) in mac.iter_mut().zip(address) {
        *to = from.cast_unsigned();
    }
    Ok(Some(mac))
}

/// Index of a link that must be there.
pub fn index_of(name: &str) -> io::Result<u32> {
    index(name)?.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))
}

/// Links of this network namespace whose name begins with `prefix`, with their MACs.
pub fn named(prefix: &str) -> io::Result<Vec<(String, [u8; 6])>> {
    let all = nix::ifaddrs::getifaddrs()?;
    Ok(all
        .filter(|i| i.interface_name.starts_with(prefix))
        .filter_map(|i| Some((i.interface_name, i.address?.as_link_addr()?.addr()?)))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_has_a_mac_and_a_name_without_one_has_none() {
        // A link without an address of that kind reads as zeroes, which no link of ours has.
        assert_eq!(mac("lo").unwrap(), Some([0; 6]));
        assert_eq!(mac("drums-no-such").unwrap(), None);
        assert_eq!(mac("a-name-that-is-too-long").unwrap(), None);
    }
}
