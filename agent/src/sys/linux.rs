//! The real kernel.

use std::{
    fs::{self, OpenOptions, Permissions},
    io::{self, Write as _},
    os::{
        fd::{BorrowedFd, OwnedFd},
        unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use drums_common::{digest::Sha256, evidence::LimitsRead};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sys::{
        resource::{UsageWho, getrusage},
        time::TimeValLike as _,
    },
};

use super::{
    CgroupLimits, Child, Exit, SessionNet, SessionSpec, Sys, SysError, ToolSpec,
    cgroup::Layout,
    clock,
    links::{self, Netlink},
    netns, procfs, signal, tree,
};
use crate::{
    shim::{Reply, Request, ShimClient, ShimError},
    steps::{Inode, Netns, Process},
};

/// The real one: system calls of this process, and the shim for what forks or changes namespaces.
pub struct Linux {
    shim: Arc<ShimClient>,
    layout: Layout,
    netlink: Mutex<Netlink>,
}

impl Linux {
    /// Opens it in the calling thread's network namespace, which must be the shim's.
    pub fn new(shim: Arc<ShimClient>) -> Result<Self, SysError> {
        let layout = Layout::discover().map_err(|e| SysError::os("find", "the control groups", e))?;
        let netlink = Netlink::open().map_err(|e| SysError::os("open", "a netlink socket", e))?;
        Ok(Self { shim, layout, netlink: Mutex::new(netlink) })
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    fn call(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(Reply, Option<OwnedFd>), SysError> {
        let (reply, fds) = self.shim.call(request, fds)?;
        match reply {
            Reply::Failed(f) => {
                let source = io::Error::from_raw_os_error(f.errno);
                Err(if f.in_child {
                    SysError::Child { step: f.step, source }
                } else {
                    SysError::Os { op: "the shim could not", target: f.step, source }
                })
            }
            reply => Ok((reply, fds.into_iter().next())),
        }
    }

    fn child(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<Child, SysError> {
        match self.call(request, fds)? {
            (Reply::Child(process), Some(pidfd)) => Ok(Child { process, pidfd: Some(pidfd) }),
            (other, _) => Err(unexpected(&other)),
        }
    }
}

/// The line of /proc/self/mountinfo for what is mounted exactly there, topmost.
fn mount_on(path: &Path) -> Result<Option<String>, SysError> {
    let text = fs::read_to_string("/proc/self/mountinfo").map_err(|e| SysError::os("read", "mountinfo", e))?;
    // Fields are separated by single blanks; blanks in paths are written \040.
    let wanted = path.display().to_string().replace('\\', "\\134").replace(' ', "\\040");
    Ok(text.lines().rfind(|l| l.split(' ').nth(4) == Some(wanted.as_str())).map(str::to_owned))
}

fn unexpected(reply: &Reply) -> SysError {
    SysError::Shim(ShimError::Protocol(format!("{reply:?}")))
}

impl Sys for Linux {
    fn now_us(&self) -> u64 {
        clock::raw_us()
    }

    fn make_dir(&self, path: &Path, mode: u32) -> Result<(), SysError> {
        fs::DirBuilder::new().mode(mode).create(path).map_err(|e| SysError::os("make the folder", path.display(), e))
    }
    fn write_file(&self, path: &Path, bytes: &[u8], mode: u32) -> Result<(), SysError> {
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(mode)
            .open(path)
            .and_then(|mut f| f.write_all(bytes))
            .map_err(|e| SysError::os("write", path.display(), e))
    }
    fn new_file(&self, path: &Path, mode: u32) -> Result<Option<OwnedFd>, SysError> {
        let made = OpenOptions::new().create_new(true).read(true).write(true).mode(mode).open(path);
        made.map(|file| Some(file.into())).map_err(|e| SysError::os("make the file", path.display(), e))
    }
    fn set_mode(&self, path: &Path, mode: u32) -> Result<(), SysError> {
        fs::set_permissions(path, Permissions::from_mode(mode))
            .map_err(|e| SysError::os("change the mode of", path.display(), e))
    }
    fn read_file(&self, path: &Path) -> Result<Vec<u8>, SysError> {
        fs::read(path).map_err(|e| SysError::os("read", path.display(), e))
    }
    fn path_exists(&self, path: &Path) -> Result<bool, SysError> {
        match path.symlink_metadata() {
            Ok(_) => Ok(true),
            Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => Ok(false),
            Err(e) => Err(SysError::os("look for", path.display(), e)),
        }
    }
    fn path_inode(&self, path: &Path) -> Result<Option<Inode>, SysError> {
        procfs::inode(path).map_err(|e| SysError::os("look at", path.display(), e))
    }
    fn remove_tree(&self, path: &Path) -> Result<(), SysError> {
        tree::remove(path).map_err(|e| SysError::os("remove the folder", path.display(), e))
    }
    fn read_link(&self, path: &Path) -> Result<PathBuf, SysError> {
        fs::read_link(path).map_err(|e| SysError::os("read the link", path.display(), e))
    }
    fn digest_tree(&self, path: &Path) -> Result<(u64, Sha256), SysError> {
        tree::digest(path).map_err(|e| SysError::os("digest the folder", path.display(), e))
    }
    fn list_dir(&self, path: &Path) -> Result<Vec<String>, SysError> {
        match fs::read_dir(path) {
            Ok(list) => Ok(list.flatten().filter_map(|e| e.file_name().into_string().ok()).collect()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(e) => Err(SysError::os("list", path.display(), e)),
        }
    }

    fn mount_tmpfs(&self, path: &Path, source: &str, bytes: u64) -> Result<(), SysError> {
        mount(
            Some(source),
            path,
            Some("tmpfs"),
            // Devices are allowed: a session's overlay has its device nodes in there.
            MsFlags::MS_NOSUID,
            Some(format!("mode=700,size={bytes}").as_str()),
        )
        .map_err(|e| SysError::os("mount a tmpfs on", path.display(), e.into()))
    }
    fn unmount(&self, path: &Path) -> Result<(), SysError> {
        if !self.is_mounted(path)? {
            return Ok(());
        }
        umount2(path, MntFlags::UMOUNT_NOFOLLOW).map_err(|e| SysError::os("unmount", path.display(), e.into()))
    }
    fn is_mounted(&self, path: &Path) -> Result<bool, SysError> {
        Ok(mount_on(path)?.is_some())
    }
    fn tmpfs_source(&self, path: &Path) -> Result<Option<String>, SysError> {
        let Some(line) = mount_on(path)? else { return Ok(None) };
        let mut kind = line.split_once(" - ").map_or("", |(_, rest)| rest).split(' ');
        Ok(kind.next().filter(|k| *k == "tmpfs").and(kind.next()).map(str::to_owned))
    }

    fn cgroup_create(&self, name: &str, limits: &CgroupLimits) -> Result<(), SysError> {
        self.layout.create(name, limits)
    }
    fn cgroup_exists(&self, name: &str) -> Result<bool, SysError> {
        self.layout.exists(name)
    }
    fn cgroup_inode(&self, name: &str) -> Result<Option<Inode>, SysError> {
        self.layout.inode(name)
    }
    fn cgroup_limits(&self, name: &str) -> Result<LimitsRead, SysError> {
        self.layout.limits(name)
    }
    fn cgroup_cpu_us(&self, name: &str) -> Result<u64, SysError> {
        self.layout.cpu_us(name)
    }
    fn cgroup_procs(&self, name: &str) -> Result<Vec<i32>, SysError> {
        self.layout.procs(name)
    }
    fn cgroup_remove(&self, name: &str, timeout_ms: u64) -> Result<(), SysError> {
        self.layout.remove(name, timeout_ms)
    }
    fn cgroups_named(&self, prefix: &str) -> Result<Vec<String>, SysError> {
        self.layout.named(prefix)
    }

    fn link_mac(&self, name: &str) -> Result<Option<[u8; 6]>, SysError> {
        links::mac(name).map_err(|e| SysError::os("look for the link", name, e))
    }
    fn link_delete(&self, name: &str) -> Result<(), SysError> {
        let mut netlink = self.netlink.lock().unwrap_or_else(PoisonError::into_inner);
        netlink.delete(name).map_err(|e| SysError::os("delete the link", name, e))
    }
    fn links_named(&self, prefix: &str) -> Result<Vec<(String, [u8; 6])>, SysError> {
        links::named(prefix).map_err(|e| SysError::os("list", "the links", e))
    }
    fn netns(&self) -> Result<(Option<OwnedFd>, Netns), SysError> {
        match self.call(&Request::Netns, &[])? {
            (Reply::Netns(netns), Some(fd)) => Ok((Some(fd), netns)),
            (other, _) => Err(unexpected(&other)),
        }
    }
    fn netns_in_use(&self, netns: Netns) -> Result<bool, SysError> {
        netns::in_use(netns).map_err(|e| SysError::os("look for users of network namespace", netns.inode, e))
    }
    fn veth(&self, net: &SessionNet, netns: Option<BorrowedFd<'_>>) -> Result<(), SysError> {
        let Some(netns) = netns else {
            return Err(SysError::Refused { op: "veth", why: "the session has no network namespace yet".into() });
        };
        self.call(&Request::Veth(net.clone()), &[netns]).map(|_| ())
    }
    fn tap(&self, net: &SessionNet) -> Result<Option<OwnedFd>, SysError> {
        Ok(self.call(&Request::Tap(net.clone()), &[])?.1)
    }

    fn standing(&self) -> Result<(), SysError> {
        self.call(&Request::CpuTime, &[]).map(drop)
    }
    fn spawn_session(&self, spec: &SessionSpec, netns: Option<BorrowedFd<'_>>) -> Result<Child, SysError> {
        self.child(&Request::Session(spec.clone()), netns.as_slice())
    }
    fn spawn_tool(&self, spec: &ToolSpec, fds: &[BorrowedFd<'_>]) -> Result<Child, SysError> {
        self.child(&Request::Tool(spec.clone()), fds)
    }
    fn adopt(&self, pid: i32) -> Result<Child, SysError> {
        self.child(&Request::Adopt { pid }, &[])
    }
    fn wait(&self, child: &Child, timeout_ms: u64) -> Result<Exit, SysError> {
        let Some(pidfd) = &child.pidfd else { return Ok(Exit::Unknown) };
        let ended = procfs::wait_ended(pidfd, clock::raw_us().saturating_add(timeout_ms.saturating_mul(1_000)))
            .map_err(|e| SysError::os("wait for", format!("pid {}", child.process.pid), e))?;
        if !ended {
            let what = format!("pid {}", child.process.pid);
            return Err(SysError::Deadline { what, waited_ms: timeout_ms });
        }
        match self.call(&Request::Status(child.process), &[])? {
            (Reply::Exit(exit), _) => Ok(exit.unwrap_or(Exit::Unknown)),
            (other, _) => Err(unexpected(&other)),
        }
    }
    fn alive(&self, child: &Child) -> bool {
        child.pidfd.as_ref().is_some_and(|p| !procfs::has_ended(p))
    }
    fn signal(&self, child: &Child, number: i32) -> Result<(), SysError> {
        let Some(pidfd) = &child.pidfd else { return Ok(()) };
        signal::send(pidfd, number).map_err(|e| SysError::os("signal", format!("pid {}", child.process.pid), e))
    }

    fn process_start(&self, pid: i32) -> Result<Option<u64>, SysError> {
        let stat = procfs::stat(pid).map_err(|e| SysError::os("look up", format!("pid {pid}"), e))?;
        Ok(stat.filter(|s| !s.is_zombie()).map(|s| s.start))
    }
    fn kill_process(&self, process: Process, timeout_ms: u64) -> Result<(), SysError> {
        signal::kill_exactly(process, timeout_ms)
    }
    fn own_cpu_us(&self) -> u64 {
        let own = getrusage(UsageWho::RUSAGE_SELF)
            .map(|u| u.user_time().num_microseconds() + u.system_time().num_microseconds())
            .unwrap_or(0);
        let shim = match self.call(&Request::CpuTime, &[]) {
            Ok((Reply::CpuTime(us), _)) => us,
            _ => 0,
        };
        u64::try_from(own).unwrap_or(0).saturating_add(shim)
    }
}
