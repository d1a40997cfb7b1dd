//! The kernel's trait with a fault window before and after every change.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use drums_common::{digest::Sha256, evidence::LimitsRead};

use super::{CgroupLimits, Child, Exit, SessionNet, SessionSpec, Sys, SysError, ToolSpec};
use crate::{
    steps::{Inode, Netns, Process},
    windows::{Edge, around, pass},
};

/// Any kernel, with its windows. What only looks has none; waiting for a tool has, because the tool is at work then.
#[derive(Debug)]
pub struct Windowed<S>(pub S);

impl<S: Sys> Sys for Windowed<S> {
    fn now_us(&self) -> u64 {
        self.0.now_us()
    }
    fn make_dir(&self, path: &Path, mode: u32) -> Result<(), SysError> {
        around("make-dir", || self.0.make_dir(path, mode))
    }
    fn write_file(&self, path: &Path, bytes: &[u8], mode: u32) -> Result<(), SysError> {
        around("write-file", || self.0.write_file(path, bytes, mode))
    }
    fn new_file(&self, path: &Path, mode: u32) -> Result<Option<OwnedFd>, SysError> {
        around("new-file", || self.0.new_file(path, mode))
    }
    fn set_mode(&self, path: &Path, mode: u32) -> Result<(), SysError> {
        around("set-mode", || self.0.set_mode(path, mode))
    }
    fn read_file(&self, path: &Path) -> Result<Vec<u8>, SysError> {
        self.0.read_file(path)
    }
    fn path_exists(&self, path: &Path) -> Result<bool, SysError> {
        self.0.path_exists(path)
    }
    fn path_inode(&self, path: &Path) -> Result<Option<Inode>, SysError> {
        self.0.path_inode(path)
    }
    fn remove_tree(&self, path: &Path) -> Result<(), SysError> {
        around("remove-tree", || self.0.remove_tree(path))
    }
    fn read_link(&self, path: &Path) -> Result<PathBuf, SysError> {
        self.0.read_link(path)
    }
    fn digest_tree(&self, path: &Path) -> Result<(u64, Sha256), SysError> {
        self.0.digest_tree(path)
    }
    fn list_dir(&self, path: &Path) -> Result<Vec<String>, SysError> {
        self.0.list_dir(path)
    }
    fn mount_tmpfs(&self, path: &Path, source: &str, bytes: u64) -> Result<(), SysError> {
        around("mount", || self.0.mount_tmpfs(path, source, bytes))
    }
    fn unmount(&self, path: &Path) -> Result<(), SysError> {
        around("unmount", || self.0.unmount(path))
    }
    fn is_mounted(&self, path: &Path) -> Result<bool, SysError> {
        self.0.is_mounted(path)
    }
    fn tmpfs_source(&self, path: &Path) -> Result<Option<String>, SysError> {
        self.0.tmpfs_source(path)
    }
    fn cgroup_create(&self, name: &str, limits: &CgroupLimits) -> Result<(), SysError> {
        around("make-cgroup", || self.0.cgroup_create(name, limits))
    }
    fn cgroup_exists(&self, name: &str) -> Result<bool, SysError> {
        self.0.cgroup_exists(name)
    }
    fn cgroup_inode(&self, name: &str) -> Result<Option<Inode>, SysError> {
        self.0.cgroup_inode(name)
    }
    fn cgroup_limits(&self, name: &str) -> Result<LimitsRead, SysError> {
        self.0.cgroup_limits(name)
    }
    fn cgroup_cpu_us(&self, name: &str) -> Result<u64, SysError> {
        self.0.cgroup_cpu_us(name)
    }
    fn cgroup_procs(&self, name: &str) -> Result<Vec<i32>, SysError> {
        self.0.cgroup_procs(name)
    }
    fn cgroup_remove(&self, name: &str, timeout_ms: u64) -> Result<(), SysError> {
        around("remove-cgroup", || self.0.cgroup_remove(name, timeout_ms))
    }
    fn cgroups_named(&self, prefix: &str) -> Result<Vec<String>, SysError> {
        self.0.cgroups_named(prefix)
    }
    fn link_mac(&self, name: &str) -> Result<Option<[u8; 6]>, SysError> {
        self.0.link_mac(name)
    }
    fn link_delete(&self, name: &str) -> Result<(), SysError> {
        around("delete-link", || self.0.link_delete(name))
    }
    fn links_named(&self, prefix: &str) -> Result<Vec<(String, [u8; 6])>, SysError> {
        self.0.links_named(prefix)
    }
    fn netns(&self) -> Result<(Option<OwnedFd>, Netns), SysError> {
        around("make-netns", || self.0.netns())
    }
    fn netns_in_use(&self, netns: Netns) -> Result<bool, SysError> {
        self.0.netns_in_use(netns)
    }
    fn veth(&self, net: &SessionNet, netns: Option<BorrowedFd<'_>>) -> Result<(), SysError> {
        around("make-veth", || self.0.veth(net, netns))
    }
    fn tap(&self, net: &SessionNet) -> Result<Option<OwnedFd>, SysError> {
        around("make-tap", || self.0.tap(net))
    }
    fn standing(&self) -> Result<(), SysError> {
        self.0.standing()
    }
    fn spawn_session(&self, spec: &SessionSpec, netns: Option<BorrowedFd<'_>>) -> Result<Child, SysError> {
        around("spawn-session", || self.0.spawn_session(spec, netns))
    }
    fn spawn_tool(&self, spec: &ToolSpec, fds: &[BorrowedFd<'_>]) -> Result<Child, SysError> {
        pass("spawn-tool", Edge::Before, None);
        let started = self.0.spawn_tool(spec, fds);
        pass("spawn-tool", Edge::After, started.as_ref().ok().and_then(|c| c.pidfd.as_ref()));
        started
    }
    fn adopt(&self, pid: i32) -> Result<Child, SysError> {
        around("adopt", || self.0.adopt(pid))
    }
    fn wait(&self, child: &Child, timeout_ms: u64) -> Result<Exit, SysError> {
        pass("wait", Edge::Before, child.pidfd.as_ref());
        let ended = self.0.wait(child, timeout_ms);
        pass("wait", Edge::After, None);
        ended
    }
    fn alive(&self, child: &Child) -> bool {
        self.0.alive(child)
    }
    fn signal(&self, child: &Child, signal: i32) -> Result<(), SysError> {
        around("signal", || self.0.signal(child, signal))
    }
    fn process_start(&self, pid: i32) -> Result<Option<u64>, SysError> {
        self.0.process_start(pid)
    }
    fn kill_process(&self, process: Process, timeout_ms: u64) -> Result<(), SysError> {
        around("kill", || self.0.kill_process(process, timeout_ms))
    }
    fn own_cpu_us(&self) -> u64 {
        self.0.own_cpu_us()
    }
}
