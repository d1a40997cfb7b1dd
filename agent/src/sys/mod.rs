//! What the kernel shows and does, behind one trait: steps, undo and audit speak to [`Sys`] only. [`linux::Linux`] is the
//! real one (system calls of this process, and the shim for everything that forks or changes namespaces);
//! [`fake::Fake`] keeps the same behaviour in memory and may be told to fail.
//!
//! Knows nothing of arms, plans or the ledger.

pub mod cgroup;
pub mod clock;
pub mod fake;
pub mod links;
pub mod linux;
pub mod netns;
pub mod procfs;
pub mod signal;
pub mod spec;
pub mod tree;
pub mod windowed;

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use drums_common::{digest::Sha256, evidence::LimitsRead};

pub use linux::Linux;
pub use spec::{CgroupLimits, Leaf, LeafOf, OverlayRoot, PreMount, SessionNet, SessionSpec, StdIo, ToolSpec};
pub use windowed::Windowed;

use crate::steps::{Inode, Netns, Process};

/// A process that the shim started or adopted: never signalled by number, always through its descriptor.
#[derive(Debug)]
pub struct Child {
    pub process: Process,
    /// None only in tests' fakes.
    pub pidfd: Option<OwnedFd>,
}

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    Code(i32),
    Signal(i32),
    /// It ended, and who reaped it did not tell.
    Unknown,
}

impl Exit {
    pub fn ok(self) -> bool {
        self == Self::Code(0)
    }
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Code(c) => write!(f, "exit code {c}"),
            Self::Signal(s) => write!(f, "signal {s}"),
            Self::Unknown => f.write_str("an unknown status"),
        }
    }
}

/// What was attempted, on what; the cause is the source.
#[derive(Debug, thiserror::Error)]
pub enum SysError {
    #[error("{op} {target}")]
    Os {
        op: &'static str,
        target: String,
        #[source]
        source: io::Error,
    },
    /// A new process failed before its program ran.
    #[error("the new process could not {step}")]
    Child {
        step: String,
        #[source]
        source: io::Error,
    },
    #[error("{what} still not done after {waited_ms} ms")]
    Deadline { what: String, waited_ms: u64 },
    #[error("{op}: {why}")]
    Refused { op: &'static str, why: String },
    #[error(transparent)]
    Shim(#[from] crate::shim::ShimError),
}

impl SysError {
    pub fn os(op: &'static str, target: impl std::fmt::Display, source: io::Error) -> Self {
        Self::Os { op, target: target.to_string(), source }
    }
    /// The shim could not be spoken to: nothing can be started on this host until the agent is.
    pub fn is_shim(&self) -> bool {
        matches!(self, Self::Shim(_))
    }
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Os { source, .. } | Self::Child { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }
}

/// True when the host is why something failed, and no session: no shim, no descriptors, no room, a disk that cannot be
/// read. What has one of these at its root says nothing about an arm.
pub fn is_host_fault(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(e) = next {
        let errno = e.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        if e.downcast_ref().is_some_and(SysError::is_shim)
            || matches!(errno, Some(libc::EMFILE | libc::ENFILE | libc::ENOSPC | libc::EIO))
        {
            return true;
        }
        next = e.source();
    }
    false
}

/// The kernel, as steps see it. All times are CLOCK_MONOTONIC_RAW microseconds. Removing what is not there succeeds.
pub trait Sys: Send {
    fn now_us(&self) -> u64;

    // Files.
    /// Makes a folder (its parent must exist); refuses one that exists.
    fn make_dir(&self, path: &Path, mode: u32) -> Result<(), SysError>;
    fn write_file(&self, path: &Path, bytes: &[u8], mode: u32) -> Result<(), SysError>;
    /// A file that was not there before, to read and to write; no descriptor in tests' fakes.
    fn new_file(&self, path: &Path, mode: u32) -> Result<Option<OwnedFd>, SysError>;
    fn set_mode(&self, path: &Path, mode: u32) -> Result<(), SysError>;
    fn read_file(&self, path: &Path) -> Result<Vec<u8>, SysError>;
    fn path_exists(&self, path: &Path) -> Result<bool, SysError>;
    /// Which one it is; none when nothing is there.
    fn path_inode(&self, path: &Path) -> Result<Option<Inode>, SysError>;
    /// Removes a folder and what is in it, without crossing into another file system or following a link.
    fn remove_tree(&self, path: &Path) -> Result<(), SysError>;
    /// What a symbolic link (of /proc, say) points to.
    fn read_link(&self, path: &Path) -> Result<PathBuf, SysError>;
    /// Size and digest of a folder's files.
    fn digest_tree(&self, path: &Path) -> Result<(u64, Sha256), SysError>;
    /// Names in a folder; empty when it does not exist.
    fn list_dir(&self, path: &Path) -> Result<Vec<String>, SysError>;

    // Mounts of this process's namespace.
    fn mount_tmpfs(&self, path: &Path, source: &str, bytes: u64) -> Result<(), SysError>;
    fn unmount(&self, path: &Path) -> Result<(), SysError>;
    fn is_mounted(&self, path: &Path) -> Result<bool, SysError>;
    /// What is mounted there (topmost), if it is a tmpfs: the name that its maker gave it.
    fn tmpfs_source(&self, path: &Path) -> Result<Option<String>, SysError>;

    // Control groups: NAME holds the limits, its leaves `tool` and `session` hold the processes.
    /// Refuses with EEXIST, and without a trace, a name that is taken in any hierarchy.
    fn cgroup_create(&self, name: &str, limits: &CgroupLimits) -> Result<(), SysError>;
    fn cgroup_exists(&self, name: &str) -> Result<bool, SysError>;
    /// Which one it is, by its folder in the first hierarchy that we use.
    fn cgroup_inode(&self, name: &str) -> Result<Option<Inode>, SysError>;
    fn cgroup_limits(&self, name: &str) -> Result<LimitsRead, SysError>;
    /// CPU time of the whole tree since it was made.
    fn cgroup_cpu_us(&self, name: &str) -> Result<u64, SysError>;
    fn cgroup_procs(&self, name: &str) -> Result<Vec<i32>, SysError>;
    /// Kills what is in it until it is empty, then removes it everywhere; `Deadline` when that does not come about.
    fn cgroup_remove(&self, name: &str, timeout_ms: u64) -> Result<(), SysError>;
    /// Names of groups at the top that begin with `prefix`.
    fn cgroups_named(&self, prefix: &str) -> Result<Vec<String>, SysError>;

    // Network of this process's namespace, and new namespaces.
    /// The MAC of a link; none when there is no such link.
    fn link_mac(&self, name: &str) -> Result<Option<[u8; 6]>, SysError>;
    fn link_delete(&self, name: &str) -> Result<(), SysError>;
    /// Links whose name begins with `prefix`, with their MACs.
    fn links_named(&self, prefix: &str) -> Result<Vec<(String, [u8; 6])>, SysError>;
    /// A new network namespace with lo up: its descriptor, and which one it is.
    fn netns(&self) -> Result<(Option<OwnedFd>, Netns), SysError>;
    /// True if some process is in that namespace.
    fn netns_in_use(&self, netns: Netns) -> Result<bool, SysError>;
    /// A veth pair, addresses and permanent neighbour entries on both sides: `net.link` here, eth0 in the namespace.
    fn veth(&self, net: &SessionNet, netns: Option<BorrowedFd<'_>>) -> Result<(), SysError>;
    /// A tap named `net.link` with the host's address and the guest's neighbour entry; its descriptor is for QEMU.
    fn tap(&self, net: &SessionNet) -> Result<Option<OwnedFd>, SysError>;

    // Processes, by the shim.
    /// An error when nothing can be started any more: the shim is asked and does not answer.
    fn standing(&self) -> Result<(), SysError>;
    /// A session's pid 1. Returns once its program runs.
    fn spawn_session(&self, spec: &SessionSpec, netns: Option<BorrowedFd<'_>>) -> Result<Child, SysError>;
    /// A tool. `fds[i]` becomes descriptor `spec.fds[i]`. Returns once its program runs.
    fn spawn_tool(&self, spec: &ToolSpec, fds: &[BorrowedFd<'_>]) -> Result<Child, SysError>;
    /// A process that became the shim's child by itself (criu's --restore-sibling, runc's init).
    fn adopt(&self, pid: i32) -> Result<Child, SysError>;
    /// Waits for the end of a child. `Deadline` leaves it running.
    fn wait(&self, child: &Child, timeout_ms: u64) -> Result<Exit, SysError>;
    /// True while the child has not ended.
    fn alive(&self, child: &Child) -> bool;
    /// SIGKILL, or another signal, through the descriptor; a child that has ended is fine.
    fn signal(&self, child: &Child, signal: i32) -> Result<(), SysError>;

    // Processes by what the ledger remembers of them.
    /// Start time of a pid; None when there is no such process (or only its zombie).
    fn process_start(&self, pid: i32) -> Result<Option<u64>, SysError>;
    /// Kills exactly that process and waits for its end; a reused pid is left alone.
    fn kill_process(&self, process: Process, timeout_ms: u64) -> Result<(), SysError>;
    /// CPU time of this process and the shim, user and system.
    fn own_cpu_us(&self) -> u64;
}
