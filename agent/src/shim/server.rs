//! The shim's loop: one socket, one signalfd, one table of children.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd as _, FromRawFd as _, OwnedFd},
    process::ExitCode,
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        prctl,
        resource::{UsageWho, getrusage},
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
        time::TimeValLike as _,
        wait::{Id, WaitPidFlag, WaitStatus, waitid},
    },
};

use super::{
    child,
    namespaces::Namespaces,
    protocol::{self, Failed, Reply, Request},
};
use crate::{
    steps::Process,
    sys::{Exit, cgroup::Layout, procfs, signal},
};

/// Ended children that nobody asked about are forgotten beyond this many.
const REMEMBERED: usize = 4_096;

struct Shim {
    namespaces: Namespaces,
    layout: Layout,
    children: BTreeMap<i32, Known>,
    /// CPU time of ended children that were in no group, microseconds: nobody else accounts for them.
    ungrouped_us: u64,
}

/// A child that we started or adopted.
struct Known {
    start: u64,
    /// In a session's group, which has its own account.
    grouped: bool,
    exit: Option<Exit>,
}

type Answer = Result<(Reply, Option<OwnedFd>), Failed>;

/// Runs the shim on descriptor 3 until the agent is gone. Must be called before any thread exists.
pub fn serve() -> ExitCode {
    // SAFETY: descriptor 3 is the socket that our parent put there for us (`ShimClient::launch`); if it is not there,
    // the first use fails with EBADF and we end.
    let sock = unsafe { OwnedFd::from_raw_fd(3) };
    match run(&sock) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("drums-agent shim: {e}; it is started by the agent, not by hand");
            ExitCode::FAILURE
        }
    }
}

fn run(sock: &OwnedFd) -> io::Result<()> {
    nix::fcntl::fcntl(sock.as_fd(), nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
    // Whatever the agent itself inherited from its starter must not reach sessions: CRIU could not save them.
    // SAFETY: nothing in this process has opened a descriptor above 3 yet.
    unsafe { super::close_inherited(4) }?;
    prctl::set_child_subreaper(true)?;
    prctl::set_name(c"drums-shim")?;
    let mut mask = SigSet::empty();
    mask.add(Signal::SIGCHLD);
    mask.thread_block()?;
    let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    let mut shim = Shim {
        namespaces: Namespaces::open()?,
        layout: Layout::discover()?,
        children: BTreeMap::new(),
        ungrouped_us: 0,
    };
    let ended = shim.listen(sock, &signals);
    // However it ended: nobody is left to answer for what runs.
    shim.kill_everything();
    ended
}

impl Shim {
    /// Answers requests until the agent is gone.
    fn listen(&mut self, sock: &OwnedFd, signals: &SignalFd) -> io::Result<()> {
        let mut buffer = Vec::new();
        loop {
            let mut fds =
                [PollFd::new(sock.as_fd(), PollFlags::POLLIN), PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(e) => return Err(e.into()),
            }
            let [socket_ready, signal_ready] = fds.map(|f| f.any().unwrap_or(false));
            if signal_ready {
                while signals.read_signal()?.is_some() {}
                self.reap();
            }
            if socket_ready {
                let Some((request, fds)) = protocol::receive::<Request>(sock.as_fd(), &mut buffer)? else {
                    return Ok(());
                };
                let (reply, fd) = match self.handle(request, &fds) {
                    Ok((reply, fd)) => (reply, fd),
                    Err(failed) => (Reply::Failed(failed), None),
                };
                drop(fds);
                let out: Vec<_> = fd.iter().map(|f| f.as_fd()).collect();
                if protocol::send(sock.as_fd(), &reply, &out).is_err() {
                    return Ok(());
                }
            }
        }
    }

    fn handle(&mut self, request: Request, fds: &[OwnedFd]) -> Answer {
        match request {
            Request::Netns => {
                let (fd, netns) = self.namespaces.make_netns()?;
                Ok((Reply::Netns(netns), Some(fd)))
            }
            Request::Veth(net) => {
                let netns = fds.first().ok_or_else(|| Failed::here("find the network namespace", Errno::EBADF))?;
                self.namespaces.make_veth(&net, netns.as_fd())?;
                Ok((Reply::Done, None))
            }
            Request::Tap(net) => Ok((Reply::Done, Some(self.namespaces.make_tap(&net)?))),
            Request::Session(spec) => {
                let started = child::session(&spec, fds.first(), &self.layout)?;
                self.keep(started, spec.leaf.is_some())
            }
            Request::Tool(spec) => {
                let started = child::tool(&spec, fds, &self.layout)?;
                self.keep(started, spec.leaf.is_some())
            }
            Request::Adopt { pid } => self.adopt(pid),
            Request::Status(process) => {
                self.reap();
                let exit = match self.children.get(&process.pid) {
                    Some(known) if known.start == process.start => known.exit,
                    // Not ours any more, or another one: it ended, and nobody can tell how.
                    _ => Some(Exit::Unknown),
                };
                if exit.is_some() {
                    self.children.remove(&process.pid);
                }
                Ok((Reply::Exit(exit), None))
            }
            Request::Living => {
                self.reap();
                let living = self.children.iter().filter(|(_, known)| known.exit.is_none());
                Ok((Reply::Living(living.map(|(&pid, known)| Process { pid, start: known.start }).collect()), None))
            }
            Request::CpuTime => {
                let us = getrusage(UsageWho::RUSAGE_SELF)
                    .map(|u| u.user_time().num_microseconds() + u.system_time().num_microseconds())
                    .unwrap_or(0);
                Ok((Reply::CpuTime(u64::try_from(us).unwrap_or(0).saturating_add(self.ungrouped_us)), None))
            }
        }
    }

    fn keep(&mut self, started: child::Started, grouped: bool) -> Answer {
        let process = started.process;
        self.children.insert(process.pid, Known { start: process.start, grouped, exit: None });
        if self.children.len() > REMEMBERED {
            self.children.retain(|_, known| known.exit.is_none());
        }
        Ok((Reply::Child(process), Some(started.pidfd)))
    }

    /// Only our own child is adopted: the agent never gets a descriptor of somebody else's process from us.
    fn adopt(&mut self, pid: i32) -> Answer {
        let stat = procfs::stat(pid)
            .map_err(|e| Failed::io(format!("look up pid {pid}"), &e))?
            .ok_or_else(|| Failed::here(format!("adopt pid {pid}: there is no such process"), Errno::ESRCH))?;
        if stat.ppid != std::process::id() {
            return Err(Failed::here(
                format!("adopt pid {pid}: its parent is {}, not the shim", stat.ppid),
                Errno::ECHILD,
            ));
        }
        let pidfd = signal::open(pid).map_err(|e| Failed::io(format!("open pid {pid}"), &e))?;
        // What becomes our child by itself was made by a tool in a session's group.
        self.keep(child::Started { process: Process { pid, start: stat.start }, pidfd }, true)
    }

    fn reap(&mut self) {
        loop {
            // SAFETY: rusage is plain data for which all zeroes is a value.
            let (mut status, mut usage): (_, libc::rusage) = (0, unsafe { std::mem::zeroed() });
            // SAFETY: both pointers are valid for the call.
            match unsafe { libc::wait4(-1, &raw mut status, libc::WNOHANG, &raw mut usage) } {
                -1 if Errno::last() == Errno::EINTR => {}
                // Nothing has ended, or there are no children.
                -1 | 0 => return,
                pid => self.ended(pid, status, &usage),
            }
        }
    }

    fn ended(&mut self, pid: i32, status: i32, usage: &libc::rusage) {
        // Orphans of tools come to us as their subreaper; they are reaped and not remembered.
        let Some(known) = self.children.get_mut(&pid) else { return };
        known.exit = Some(if libc::WIFSIGNALED(status) {
            Exit::Signal(libc::WTERMSIG(status))
        } else {
            Exit::Code(libc::WEXITSTATUS(status))
        });
        if !known.grouped {
            let us = |t: libc::timeval| u64::try_from(t.tv_sec * 1_000_000 + t.tv_usec).unwrap_or(0);
            self.ungrouped_us += us(usage.ru_utime) + us(usage.ru_stime);
        }
    }

    /// SIGKILL to every child until there is none. Children of children end with their pid namespace, by PDEATHSIG, or
    /// come to us as orphans and are killed in the next round.
    fn kill_everything(&mut self) {
        // Something that hangs in the kernel must not keep the shim for ever; the agent's audit names what is left.
        for _ in 0..2_000 {
            let children = procfs::children_of_self().unwrap_or_default();
            for pid in &children {
                // A child of ours that we have not reaped cannot have its pid reused.
                let _ = signal::open(*pid).and_then(|pidfd| signal::send(&pidfd, libc::SIGKILL));
            }
            self.reap();
            match waitid(Id::All, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG) {
                Err(Errno::ECHILD) => return,
                Ok(WaitStatus::StillAlive) => {
                    // Nothing has ended yet: wait for SIGCHLD (blocked, so it stays pending) at most 5 ms.
                    let mut mask = SigSet::empty();
                    mask.add(Signal::SIGCHLD);
                    let limit = libc::timespec { tv_sec: 0, tv_nsec: 5_000_000 };
                    // SAFETY: both pointers are valid for the call; no info is asked for.
                    unsafe { libc::sigtimedwait(mask.as_ref(), std::ptr::null_mut(), &limit) };
                }
                _ => {}
            }
        }
    }
}
