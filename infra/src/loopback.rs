//! Addresses and ports for servers on this machine that no other process takes meanwhile.
//!
//! A port that was free a moment ago on 127.0.0.1 may be any client's a moment later, and a thousand simulated agents take
//! a thousand. All of 127.0.0.0/8 is this machine's, so each process has an address of its own, held by a socket for as
//! long as it lives; and its ports lie below those that the kernel gives to clients.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    sync::atomic::{AtomicU16, Ordering::Relaxed},
};

/// Holds an address.
const CLAIM: u16 = 19_999;
const FIRST: u16 = 20_000;
/// Linux's ephemeral ports begin at 32768 by default.
const LAST: u16 = 32_000;

/// A loopback address that is this process's until it is dropped.
#[derive(Debug)]
pub struct Loopback {
    address: Ipv4Addr,
    next: AtomicU16,
    _claim: UdpSocket,
}

impl Loopback {
    /// The first address that nobody claimed, beginning with one that follows from the process's id.
    ///
    /// # Errors
    /// When the kernel gives no socket.
    pub fn claim() -> io::Result<Self> {
        for step in 0..u32::from(u16::MAX) {
            // 127.64.0.0 to 127.127.255.255: ids are below 2^22.
            let number = (std::process::id() + step) & 0x3f_ffff;
            let address = Ipv4Addr::from(u32::from(Ipv4Addr::new(127, 64, 0, 0)) + number);
            match UdpSocket::bind((address, CLAIM)) {
                Ok(claim) => return Ok(Self { address, next: AtomicU16::new(FIRST), _claim: claim }),
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
                Err(e) => return Err(e),
            }
        }
        Err(io::Error::new(io::ErrorKind::AddrInUse, "no loopback address is free"))
    }

    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// A port of the address, each time another, that is free for UDP and for TCP.
    ///
    /// # Errors
    /// When all twelve thousand were given.
    pub fn port(&self) -> io::Result<u16> {
        loop {
            let port = self.next.fetch_add(1, Relaxed);
            if port > LAST {
                return Err(io::Error::new(io::ErrorKind::AddrInUse, format!("{} has no more ports", self.address)));
            }
            // Whoever listens on every address has it on this one too.
            if UdpSocket::bind((self.address, port)).is_ok() && TcpListener::bind((self.address, port)).is_ok() {
                return Ok(port);
            }
        }
    }

    /// The address with another port.
    ///
    /// # Errors
    /// As `port`.
    pub fn socket(&self) -> io::Result<SocketAddr> {
        Ok((self.address, self.port()?).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_claims_are_two_addresses_and_a_dropped_one_is_free_again() {
        let one = Loopback::claim().unwrap();
        let two = Loopback::claim().unwrap();
        assert_ne!(one.address(), two.address());
        let claim = (one.address(), CLAIM);
        assert!(UdpSocket::bind(claim).is_err());
        drop(one);
        assert!(UdpSocket::bind(claim).is_ok());
    }

    #[test]
    fn ports_differ_are_no_clients_and_are_free_of_those_who_listen_everywhere() {
        let here = Loopback::claim().unwrap();
        let first = here.port().unwrap();
        // Far from where others begin, and whichever nobody has.
        let everywhere = (31_000..LAST).find_map(|p| TcpListener::bind((Ipv4Addr::UNSPECIFIED, p)).ok()).unwrap();
        let taken = everywhere.local_addr().unwrap().port();
        here.next.store(taken, Relaxed);
        let second = here.port().unwrap();
        assert!(taken < second && first < second && (FIRST..=LAST).contains(&second), "{first}, {taken}, {second}");
    }
}
