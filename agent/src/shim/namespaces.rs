//! Network namespaces, and links in them. The shim has one thread, so it may step into a namespace and back; should it
//! ever fail to come back it ends itself, because nothing that it does afterwards could be trusted.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
};

use nix::{
    sched::{CloneFlags, setns, unshare},
    sys::stat::{Mode, SFlag, makedev, mknod},
};

use super::protocol::Failed;
use crate::{
    steps::Netns,
    sys::{
        SessionNet,
        links::{self, Netlink},
        netns,
    },
};

pub(super) struct Namespaces {
    own: OwnedFd,
    /// Bound to our own namespace for good.
    netlink: Netlink,
}

/// Name of a session's interface inside.
const INSIDE: &str = "eth0";

impl Namespaces {
    pub(super) fn open() -> io::Result<Self> {
        Ok(Self { own: open_netns()?.into(), netlink: Netlink::open()? })
    }

    pub(super) fn make_netns(&self) -> Result<(OwnedFd, Netns), Failed> {
        unshare(CloneFlags::CLONE_NEWNET).map_err(|e| Failed::here("make a network namespace", e))?;
        let made = open_netns().map_err(|e| Failed::io("open the new network namespace", &e)).and_then(|file| {
            let look = |e: io::Error| Failed::io("look at the new network namespace", &e);
            let inode = file.metadata().map_err(look)?.ino();
            let cookie = netns::own_cookie().map_err(look)?;
            loopback_up().map_err(|e| Failed::io("bring lo up", &e))?;
            Ok((file.into(), Netns { inode, cookie }))
        });
        self.come_back();
        made
    }

    /// The pair is made from inside, so that it has one owner (the namespace) at every moment; then both ends get
    /// address, neighbour and state.
    pub(super) fn make_veth(&mut self, net: &SessionNet, netns: BorrowedFd<'_>) -> Result<(), Failed> {
        setns(netns, CloneFlags::CLONE_NEWNET).map_err(|e| Failed::here("enter the network namespace", e))?;
        let inside = self.inside(net);
        self.come_back();
        inside?;
        let here = |what: &'static str| move |e: io::Error| Failed::io(format!("{what} {}", net.link), &e);
        let index = links::index_of(&net.link).map_err(here("find link"))?;
        self.host_end(index, net)
    }

    fn inside(&self, net: &SessionNet) -> Result<(), Failed> {
        let fail = |what: &'static str| move |e: io::Error| Failed::io(format!("{what} {INSIDE} of {}", net.link), &e);
        let mut netlink = Netlink::open().map_err(fail("open a netlink socket for"))?;
        netlink
            .add_veth((INSIDE, net.guest_mac), (&net.link, net.host_mac), self.own.as_fd())
            .map_err(fail("make the veth pair with"))?;
        let index = links::index_of(INSIDE).map_err(fail("find"))?;
        netlink.no_ipv6_address(index).map_err(fail("silence IPv6 on"))?;
        netlink.add_address(index, net.guest, net.prefix).map_err(fail("give an address to"))?;
        netlink.set_up(index).map_err(fail("bring up"))?;
        netlink.add_neighbour(index, net.host, net.host_mac).map_err(fail("add the host as neighbour of"))?;
        netlink.add_default_route(index, net.host).map_err(fail("route through"))
    }

    fn host_end(&mut self, index: u32, net: &SessionNet) -> Result<(), Failed> {
        let fail = |what: &'static str| move |e: io::Error| Failed::io(format!("{what} {}", net.link), &e);
        self.netlink.no_ipv6_address(index).map_err(fail("silence IPv6 on"))?;
        self.netlink.add_address(index, net.host, net.prefix).map_err(fail("give an address to"))?;
        self.netlink.set_up(index).map_err(fail("bring up"))?;
        self.netlink.add_neighbour(index, net.guest, net.guest_mac).map_err(fail("add the guest as neighbour of"))?;
        let Some(first) = net.first_guest else { return Ok(()) };
        self.netlink.add_neighbour(index, first, net.guest_mac).map_err(fail("add the guest as neighbour of"))?;
        self.netlink.add_link_route(index, first).map_err(fail("route the guest's first address to"))
    }

    /// A tap of ours, not persistent: it ends with its last descriptor.
    pub(super) fn make_tap(&mut self, net: &SessionNet) -> Result<OwnedFd, Failed> {
        let fail = |what: &'static str| move |e: io::Error| Failed::io(format!("{what} {}", net.link), &e);
        let tun = open_tun().map_err(|e| Failed::io("open /dev/net/tun", &e))?;
        tun_set_iff(&tun, &net.link).map_err(fail("make the tap"))?;
        let index = links::index_of(&net.link).map_err(fail("find the tap"))?;
        self.netlink.set_mac(index, net.host_mac).map_err(fail("set the MAC of"))?;
        self.host_end(index, net)?;
        Ok(tun.into())
    }

    fn come_back(&self) {
        if let Err(e) = setns(&self.own, CloneFlags::CLONE_NEWNET) {
            eprintln!("drums-agent shim: cannot return to its own network namespace: {e}; ending");
            std::process::abort();
        }
    }
}

fn open_netns() -> io::Result<File> {
    File::open("/proc/thread-self/ns/net")
}

/// lo up in the namespace that we are in.
pub(super) fn loopback_up() -> io::Result<()> {
    // lo is the first link of every namespace.
    Netlink::open()?.set_up(1)
}

const TUN: &str = "/dev/net/tun";

fn open_tun() -> io::Result<File> {
    let open = |path: &Path| OpenOptions::new().read(true).write(true).custom_flags(libc::O_CLOEXEC).open(path);
    match open(Path::new(TUN)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            // The driver may be built in although nobody made its node: make one for the blink of an eye.
            let private = PathBuf::from(format!("/dev/drums-tun-{}", std::process::id()));
            mknod(&private, SFlag::S_IFCHR, Mode::from_bits_truncate(0o600), makedev(10, 200))?;
            let file = open(&private);
            fs::remove_file(&private)?;
            file
        }
        other => other,
    }
}

fn tun_set_iff(tun: &File, name: &str) -> io::Result<()> {
    // SAFETY: ifreq is plain data for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    #[allow(clippy::cast_possible_truncation)] // the flags fit into 16 bits
    {
        // EXCL: a tap of that name that somebody keeps is not taken over.
        request.ifr_ifru.ifru_flags =
            (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_TUN_EXCL) as libc::c_short;
    }
    // SAFETY: the request is a valid ifreq that lives through the call.
    if unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
