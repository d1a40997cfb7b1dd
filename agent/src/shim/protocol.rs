//! Messages between agent and shim: one request, one reply, in turn. Both ends are the same binary, so there are no
//! versions; JSON because an operator can read it under strace.

use std::{
    io::{self, IoSlice, IoSliceMut},
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
};

use nix::{
    cmsg_space,
    errno::Errno,
    sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    steps::{Netns, Process},
    sys::{Exit, SessionNet, SessionSpec, ToolSpec},
};

/// Longest message. Below the kernel's default send buffer, so that a packet always fits.
pub const MAX_MESSAGE: usize = 160 * 1024;
/// Most descriptors in one message.
pub const MAX_FDS: usize = 16;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// A network namespace with lo up; its descriptor comes with the reply.
    Netns,
    /// Descriptor: the network namespace.
    Veth(SessionNet),
    /// The tap's descriptor comes with the reply.
    Tap(SessionNet),
    /// Descriptor: the network namespace, unless the spec wants a new one. The pidfd comes with the reply.
    Session(SessionSpec),
    /// Descriptors: those of `fds`, then the network namespace if it is to be entered.
    Tool(ToolSpec),
    /// A process that became our child by itself.
    Adopt { pid: i32 },
    /// How a process of ours ended; forgets it when it did.
    Status(Process),
    /// Processes that have not ended.
    Living,
    /// CPU time of the shim itself and of the tools it reaped that were in no group, microseconds.
    CpuTime,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    Done,
    Netns(Netns),
    Child(Process),
    Exit(Option<Exit>),
    Living(Vec<Process>),
    CpuTime(u64),
    Failed(Failed),
}

/// What was attempted and the error number it ended with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// True if the attempt was made by the new process, before its program ran.
    pub in_child: bool,
    pub step: String,
    pub errno: i32,
}

impl Failed {
    pub fn here(step: impl Into<String>, errno: Errno) -> Self {
        Self { in_child: false, step: step.into(), errno: errno as i32 }
    }
    pub fn io(step: impl Into<String>, e: &io::Error) -> Self {
        Self { in_child: false, step: step.into(), errno: e.raw_os_error().unwrap_or(libc::EIO) }
    }
}

/// Sends one packet.
pub fn send<T: Serialize>(sock: BorrowedFd<'_>, message: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = serde_json::to_vec(message).map_err(io::Error::other)?;
    if bytes.len() > MAX_MESSAGE || fds.len() > MAX_FDS {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("a message of {} bytes and {} descriptors is too large", bytes.len(), fds.len()),
        ));
    }
    let raw: Vec<i32> = fds.iter().map(|f| f.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &[][..] } else { &rights[..] };
    loop {
        match sendmsg::<()>(sock.as_raw_fd(), &[IoSlice::new(&bytes)], control, MsgFlags::MSG_NOSIGNAL, None) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Receives one packet; `None` at the end of file.
pub fn receive<T: DeserializeOwned>(
    sock: BorrowedFd<'_>,
    buffer: &mut Vec<u8>,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    buffer.resize(MAX_MESSAGE, 0);
    let mut space = cmsg_space!([i32; MAX_FDS]);
    let mut fds = Vec::new();
    let (n, truncated) = loop {
        let mut slices = [IoSliceMut::new(buffer)];
        match recvmsg::<()>(sock.as_raw_fd(), &mut slices, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC) {
            Ok(m) => {
                for c in m.cmsgs()? {
                    if let ControlMessageOwned::ScmRights(raw) = c {
                        for fd in raw {
                            // SAFETY: the kernel has just put this descriptor into our table for this message alone,
                            // so nothing else owns it.
                            fds.push(unsafe { OwnedFd::from_raw_fd(fd) });
                        }
                    }
                }
                break (m.bytes, m.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC));
            }
            Err(Errno::EINTR) => {}
            Err(e) => return Err(e.into()),
        }
    };
    if n == 0 {
        return Ok(None);
    }
    if truncated {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message was cut"));
    }
    let message = serde_json::from_slice(&buffer[..n]).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
    Ok(Some((message, fds)))
}
