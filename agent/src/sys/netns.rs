//! Which network namespace is which, and whether anybody is in it.

use std::{
    fs::{self, File},
    io,
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    thread,
};

use nix::{
    sched::{CloneFlags, setns},
    sys::socket::{AddressFamily, SockFlag, SockType, socket},
};

use crate::steps::Netns;

/// asm-generic/socket.h; the libc crate does not have it.
const SO_NETNS_COOKIE: libc::c_int = 71;

/// Cookie of the namespace that the calling thread is in; none on a kernel that gives none.
pub fn own_cookie() -> io::Result<Option<u64>> {
    let socket = socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    let mut cookie = 0_u64;
    #[allow(clippy::cast_possible_truncation)] // eight
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: value and length are ours, and live through the call.
    let answer = unsafe {
        let (fd, value) = (socket.as_raw_fd(), (&raw mut cookie).cast());
        libc::getsockopt(fd, libc::SOL_SOCKET, SO_NETNS_COOKIE, value, &raw mut length)
    };
    if answer == 0 {
        return Ok(Some(cookie));
    }
    match io::Error::last_os_error() {
        e if e.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(None),
        e => Err(e),
    }
}

/// True if any process is in that namespace.
pub fn in_use(wanted: Netns) -> io::Result<bool> {
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().filter(|n| n.bytes().all(|b| b.is_ascii_digit())) else { continue };
        let path = format!("/proc/{pid}/ns/net");
        // A look is enough for most. Who has ended meanwhile, or is a kernel thread's zombie, is in no namespace.
        if !fs::metadata(&path).is_ok_and(|m| m.ino() == wanted.inode) {
            continue;
        }
        let Some(cookie) = wanted.cookie else { return Ok(true) };
        let Ok(file) = File::open(&path) else { continue };
        if file.metadata()?.ino() == wanted.inode {
            // One number is one namespace at a time, so whoever is in it answers for all.
            return Ok(cookie_of(&file)? == Some(cookie));
        }
    }
    Ok(false)
}

/// Asked on a thread of its own, which steps into the namespace and ends there.
fn cookie_of(namespace: &File) -> io::Result<Option<u64>> {
    let ask = || setns(namespace, CloneFlags::CLONE_NEWNET).map_err(io::Error::from).and_then(|()| own_cookie());
    thread::scope(|scope| {
        let asking = thread::Builder::new().spawn_scoped(scope, ask)?;
        asking.join().unwrap_or_else(|_| Err(io::Error::other("the thread in the namespace panicked")))
    })
}

#[cfg(test)]
mod tests {
    use std::{os::unix::process::CommandExt as _, process::Command};

    use super::*;

    #[test]
    fn live_a_reused_inode_is_another_namespace() {
        let mut command = Command::new("sleep");
        command.arg("infinity");
        let enter = || nix::sched::unshare(CloneFlags::CLONE_NEWNET).map_err(io::Error::from);
        // SAFETY: between fork and exec only a system call is made.
        let mut child = unsafe { command.pre_exec(enter) }.spawn().unwrap();
        let file = File::open(format!("/proc/{}/ns/net", child.id())).unwrap();
        let (inode, cookie) = (file.metadata().unwrap().ino(), cookie_of(&file).unwrap());
        drop(file);
        let is_there = |cookie| in_use(Netns { inode, cookie }).unwrap();
        assert_ne!(cookie, own_cookie().unwrap());
        assert!(is_there(cookie));
        assert!(!is_there(cookie.map(|c| c + 1)), "its inode, and not it");
        assert!(is_there(None), "nothing but the inode is known");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_there(cookie));
    }

    #[test]
    fn rows_of_earlier_agents_have_no_cookie() {
        let row: crate::steps::Receipt = serde_json::from_str(r#"{"netns":{"inode":7}}"#).unwrap();
        assert_eq!(row, crate::steps::Receipt::Netns(Netns { inode: 7, cookie: None }));
    }
}
