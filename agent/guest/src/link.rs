//! The session's network link: what address it has, and, where the kernel is ours, giving it one.
//!
//! By ioctl: three calls on one socket, no netlink parsing, and nothing stays open that a checkpoint would have to carry.

use std::{io, mem, net::Ipv4Addr, os::fd::AsRawFd as _};

use nix::{
    ifaddrs::getifaddrs,
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
};

use crate::config::{Cidr, Mac};

pub const LINK: &str = "eth0";

/// The address of `eth0`, or of the first link that is not loopback; empty when there is none.
pub fn current() -> String {
    let Ok(all) = getifaddrs() else { return String::new() };
    let mut best = None;
    for entry in all {
        let address = entry.address.as_ref().and_then(|a| a.as_sockaddr_in()).map(|a| a.ip());
        let mask = entry.netmask.as_ref().and_then(|a| a.as_sockaddr_in()).map(|a| u32::from(a.ip()));
        let (Some(address), Some(mask)) = (address, mask) else { continue };
        let cidr = Cidr { address, prefix: mask.leading_ones() as u8 };
        if entry.interface_name == LINK {
            return cidr.to_string();
        }
        if !address.is_loopback() {
            best.get_or_insert(cidr);
        }
    }
    best.map(|c| c.to_string()).unwrap_or_default()
}

/// Brings loopback up.
pub fn loopback() -> io::Result<()> {
    Control::open()?.up("lo")
}

/// Gives `eth0` this address and no other, brings it up, and enters the gateway.
pub fn configure(address: Cidr, gateway: Option<Ipv4Addr>, gateway_mac: Option<Mac>) -> io::Result<()> {
    let control = Control::open()?;
    control.set_address(LINK, libc::SIOCSIFADDR, address.address)?;
    control.set_address(LINK, libc::SIOCSIFNETMASK, address.netmask())?;
    control.up(LINK)?;
    if let Some(gateway) = gateway {
        if let Some(mac) = gateway_mac {
            control.neighbour(LINK, gateway, mac)?;
        }
        control.default_route(gateway)?;
    }
    Ok(())
}

struct Control(std::os::fd::OwnedFd);

impl Control {
    fn open() -> io::Result<Self> {
        Ok(Self(socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?))
    }

    fn up(&self, link: &str) -> io::Result<()> {
        let mut request = named(link);
        self.call("read the flags of", link, libc::SIOCGIFFLAGS, &mut request)?;
        // SAFETY: SIOCGIFFLAGS has just filled in this member of the union.
        let flags = unsafe { request.ifr_ifru.ifru_flags };
        request.ifr_ifru.ifru_flags = flags | (libc::IFF_UP | libc::IFF_RUNNING) as i16;
        self.call("bring up", link, libc::SIOCSIFFLAGS, &mut request)
    }

    fn set_address(&self, link: &str, call: libc::Ioctl, address: Ipv4Addr) -> io::Result<()> {
        let mut request = named(link);
        request.ifr_ifru.ifru_addr = plain(address);
        self.call("address", link, call, &mut request)
    }

    fn neighbour(&self, link: &str, address: Ipv4Addr, mac: Mac) -> io::Result<()> {
        // SAFETY: arpreq is plain data for which all zeroes is a valid value.
        let mut request: libc::arpreq = unsafe { mem::zeroed() };
        request.arp_pa = plain(address);
        request.arp_ha.sa_family = libc::ARPHRD_ETHER;
        for (to, from) in request.arp_ha.sa_data.iter_mut().zip(mac.0) {
            *to = from as libc::c_char;
        }
        request.arp_flags = libc::ATF_COM | libc::ATF_PERM;
        for (to, from) in request.arp_dev.iter_mut().zip(link.bytes()) {
            *to = from as libc::c_char;
        }
        self.call("enter the gateway's hardware address on", link, libc::SIOCSARP, &mut request)
    }

    fn default_route(&self, gateway: Ipv4Addr) -> io::Result<()> {
        // SAFETY: rtentry is plain data for which all zeroes is a valid value.
        let mut request: libc::rtentry = unsafe { mem::zeroed() };
        request.rt_dst = plain(Ipv4Addr::UNSPECIFIED);
        request.rt_genmask = plain(Ipv4Addr::UNSPECIFIED);
        request.rt_gateway = plain(gateway);
        request.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
        match self.call("route through the gateway on", LINK, libc::SIOCADDRT, &mut request) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    }

    fn call<T>(&self, what: &str, link: &str, call: libc::Ioctl, request: &mut T) -> io::Result<()> {
        // SAFETY: every caller passes the structure that its ioctl reads and writes, alive for the call.
        if unsafe { libc::ioctl(self.0.as_raw_fd(), call, std::ptr::from_mut(request)) } == 0 {
            return Ok(());
        }
        let e = io::Error::last_os_error();
        Err(io::Error::new(e.kind(), format!("cannot {what} {link}: {e}")))
    }
}

fn named(link: &str) -> libc::ifreq {
    // SAFETY: ifreq is plain data for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(link.bytes()) {
        *to = from as libc::c_char;
    }
    request
}

fn plain(address: Ipv4Addr) -> libc::sockaddr {
    let inet = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from(address).to_be() },
        sin_zero: [0; 8],
    };
    // SAFETY: both are 16 bytes of plain data, the second being the general form of the first.
    unsafe { mem::transmute::<libc::sockaddr_in, libc::sockaddr>(inet) }
}
