//! The agent's end of the shim's socket.

use std::{
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::process::CommandExt as _,
    },
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Mutex, PoisonError},
};

use nix::sys::{
    socket::{AddressFamily, SockFlag, SockType, setsockopt, socketpair, sockopt},
    time::TimeVal,
};

use super::{
    ShimError,
    protocol::{self, Reply, Request},
};

/// The shim answers within milliseconds, tens under load. One that does not answer for so long hangs, and the measuring
/// thread must not hang with it: it counts as gone.
const ANSWER_TIMEOUT: TimeVal = TimeVal::new(30, 0);
/// Number of the socket in the shim.
const SHIM_FD: i32 = 3;

/// A running shim. Dropping it closes the socket; the shim then kills what it started and ends, and is waited for.
#[derive(Debug)]
pub struct ShimClient {
    inner: Mutex<Inner>,
    pid: i32,
}

#[derive(Debug)]
struct Inner {
    sock: Option<OwnedFd>,
    buffer: Vec<u8>,
    child: Child,
}

impl ShimClient {
    /// Starts `program shim` (our own binary). Call it before any runtime and from a thread that lives as long as the
    /// agent.
    pub fn launch(program: &Path) -> Result<Self, ShimError> {
        let fail = |what| move |e: io::Error| ShimError::Socket { what, source: e };
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .map_err(|e| fail("make a socket for")(e.into()))?;
        setsockopt(&ours, sockopt::ReceiveTimeout, &ANSWER_TIMEOUT)
            .map_err(|e| fail("bound the waiting for")(e.into()))?;
        setsockopt(&ours, sockopt::SendTimeout, &ANSWER_TIMEOUT)
            .map_err(|e| fail("bound the waiting for")(e.into()))?;
        let raw = theirs.as_raw_fd();
        let mut command = Command::new(program);
        command.arg("shim").stdin(Stdio::null());
        // SAFETY: between fork and exec only dup2, fcntl and setsid run, all async-signal-safe.
        unsafe {
            command.pre_exec(move || {
                let result = if raw == SHIM_FD { libc::fcntl(raw, libc::F_SETFD, 0) } else { libc::dup2(raw, SHIM_FD) };
                // A session of its own: Ctrl-C at a terminal is for the agent, which then ends the shim in order.
                if result < 0 || libc::setsid() < 0 {
                    return Err(io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let child = command.spawn().map_err(fail("start"))?;
        drop(theirs);
        let pid = i32::try_from(child.id()).unwrap_or(0);
        Ok(Self { inner: Mutex::new(Inner { sock: Some(ours), buffer: Vec::new(), child }), pid })
    }

    /// Process id of the shim.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// One request and its reply.
    pub fn call(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(Reply, Vec<OwnedFd>), ShimError> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let Inner { sock, buffer, child } = &mut *inner;
        let Some(open) = sock.as_ref() else { return Err(ShimError::Gone) };
        let said =
            protocol::send(open.as_fd(), request, fds).map_err(|e| failed("send a request to", e)).and_then(|()| {
                match protocol::receive(open.as_fd(), buffer) {
                    Ok(Some(reply)) => Ok(reply),
                    Ok(None) => Err(ShimError::Gone),
                    Err(e) => Err(failed("receive a reply from", e)),
                }
            });
        if matches!(said, Err(ShimError::Gone)) {
            // A late answer would be taken for the next request's. What a killed shim leaves, the audit undoes.
            *sock = None;
            let _ = child.kill();
            let _ = child.try_wait();
        }
        said
    }

    /// Ends the shim and waits for it: everything it started is dead afterwards.
    pub fn shutdown(&self) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.sock.take().is_some() {
            let _ = inner.child.wait();
        }
    }
}

fn failed(what: &'static str, source: io::Error) -> ShimError {
    match source.raw_os_error() {
        // The last one is a time-out.
        Some(libc::EPIPE | libc::ECONNRESET | libc::EAGAIN) => ShimError::Gone,
        _ => ShimError::Socket { what, source },
    }
}

impl Drop for ShimClient {
    fn drop(&mut self) {
        self.shutdown();
    }
}
